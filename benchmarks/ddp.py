"""What a step of DistributedDataParallel costs over iroh, beside what it must cost.

    python benchmarks/ddp.py [--parameters 25000000] [--batch 256] [--rounds 9]
    python benchmarks/ddp.py --ranks 4

Question: does DDP over iroh lose time that neither the computation nor the raw road asks for, and what do ranks of one
host win by sharing memory? The ranks train a multi-layer perceptron. In each round take turns:

    compute    a step without communication (no_sync)
    raw        the bytes of one step's gradients over the raw road, both ways (two connections); two ranks only
    gloo       a step over gloo, and an all_reduce of the same bytes on its own
    iroh       a step over iroh; two ranks only
    shared     a step over shared memory

From gloo's row follows how much of its communication hides behind the computation: compute + all_reduce - step. The
bound is 1.15 x (compute + raw - that overlap). `share` is iroh's p50 as a share of the bound: up to 1 is within it.
`equal` says whether the ranks' parameters had the same bits after all steps over iroh.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass

import harness
import torch
import torch.distributed as dist
from harness import Rank, quantile
from raw_road import RawRoad, Traffic
from torch.nn.parallel import DistributedDataParallel

import torch_iroh

LAYERS = 5
ALLOWED = 1.15


@dataclass(frozen=True)
class Plan:
    width: int
    batch: int
    rounds: int
    traffic: Traffic


@dataclass(frozen=True)
class Seen:
    seconds: dict[str, list[float]]
    equal: bool
    gradient_bytes: int


def perceptron(width: int) -> torch.nn.Module:
    torch.manual_seed(0)
    layers: list[torch.nn.Module] = []
    for _ in range(LAYERS):
        layers += [torch.nn.Linear(width, width), torch.nn.ReLU()]
    return torch.nn.Sequential(*layers)


def measure(rank: Rank, plan: Plan) -> Seen:
    """One rank's part."""
    pair = rank.world == 2
    road = RawRoad(rank) if pair else None
    groups = {"gloo": dist.group.WORLD}
    for name, shared_memory in (("iroh", "off"), ("shared", "auto")) if pair else (("shared", "auto"),):
        options = torch_iroh.Options(shared_memory=shared_memory)
        groups[name] = dist.new_group(backend="iroh", pg_options=options)
    models = {
        name: DistributedDataParallel(perceptron(plan.width), process_group=group) for name, group in groups.items()
    }
    gradients = sum(parameter.numel() for parameter in models["shared"].parameters())
    flat = torch.zeros(gradients)
    nbytes = 4 * gradients
    shared = nbytes // (8 * plan.traffic.streams) * (8 * plan.traffic.streams)
    torch.manual_seed(rank.index)
    batch = torch.randn(plan.batch, plan.width)

    def step(model: DistributedDataParallel) -> None:
        model.zero_grad(set_to_none=False)
        model(batch).square().mean().backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.01 * parameter.grad

    def alone() -> None:
        with models["gloo"].no_sync():
            step(models["gloo"])

    actions: dict[str, Callable[[], object]] = {"compute": alone}
    if road is not None:
        actions["raw"] = lambda: road.carry(shared, plan.traffic)
    actions["gloo"] = lambda: step(models["gloo"])
    actions["gloo_all_reduce"] = lambda: dist.all_reduce(flat)
    if pair:
        actions["iroh"] = lambda: step(models["iroh"])
    actions["shared"] = lambda: step(models["shared"])
    seconds: dict[str, list[float]] = {name: [] for name in actions}
    for turn in range(plan.rounds + 1):
        for name, action in actions.items():
            dist.barrier()
            begun = time.perf_counter()
            action()
            if turn > 0:  # the first warms up
                seconds[name].append(time.perf_counter() - begun)
    # "compute" has moved gloo's model on each rank by itself.
    equal = True
    for name in [name for name in models if name != "gloo"]:
        mine = torch.cat([parameter.detach().flatten() for parameter in models[name].parameters()])
        theirs = mine.clone()
        dist.broadcast(theirs, 0)
        equal = equal and torch.equal(mine, theirs)
    if road is not None:
        road.close()
    return Seen(seconds, equal, nbytes)


def main() -> int:
    description, usage = (__doc__ or "").split("\n    python", 1)
    parser = argparse.ArgumentParser(
        description=description, epilog="    python" + usage, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parameters", type=harness.positive, default=25_000_000, help="(default: %(default)s)")
    parser.add_argument("--ranks", type=harness.positive, default=2, help="(default: %(default)s)")
    parser.add_argument("--batch", type=harness.positive, default=256, help="rows of one rank (default: %(default)s)")
    harness.add_common_options(parser)
    options = parser.parse_args()
    parameters = 200_000 if options.quick else options.parameters
    width = max(8, round((parameters / LAYERS) ** 0.5))
    plan = Plan(width, options.batch, options.rounds or (3 if options.quick else 9), Traffic(True, 2, 2, 64 << 10))

    harness.print_header("p50 and p95 of the slower rank of each round; see --help")
    seen = harness.run_ranks(measure, options.ranks, plan, deadline=harness.Deadline(options.deadline))
    slower = {
        name: [max(pair) for pair in zip(*(one.seconds[name] for one in seen), strict=True)] for name in seen[0].seconds
    }
    table = harness.Table(what=15, p50_ms=9, p95_ms=9)
    for name, values in slower.items():
        table.row(what=name, p50_ms=f"{quantile(values, 0.5) * 1e3:.1f}", p95_ms=f"{quantile(values, 0.95) * 1e3:.1f}")
    p50 = {name: quantile(values, 0.5) for name, values in slower.items()}
    equal = "yes" if all(one.equal for one in seen) else "NO"
    print(f"\n# gradients: {seen[0].gradient_bytes / 1e6:.1f} MB; equal: {equal}")
    print(f"# a step over shared memory takes {p50['shared'] / p50['gloo']:.2f} of gloo's")
    if "iroh" in p50:
        overlap = max(0.0, p50["compute"] + p50["gloo_all_reduce"] - p50["gloo"])
        bound = ALLOWED * (p50["compute"] + p50["raw"] - overlap)
        print(f"# gloo hides {overlap * 1e3:.1f} ms of its communication")
        print(
            f"# bound: {ALLOWED} x ({p50['compute'] * 1e3:.1f} + {p50['raw'] * 1e3:.1f} - {overlap * 1e3:.1f})"
            f" = {bound * 1e3:.1f} ms"
        )
        print(f"# share: iroh takes {p50['iroh'] / bound:.2f} of the bound")
    return harness.FINE if all(one.equal for one in seen) else harness.FINDING


if __name__ == "__main__":
    harness.run_main(main)
