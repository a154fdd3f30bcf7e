"""What a step of DistributedDataParallel costs over iroh, beside what it must cost.

    python benchmarks/ddp.py [--parameters 25000000] [--batch 64] [--rounds 7]

Question: does DDP over iroh lose time that neither the computation nor the raw road asks for? Two ranks train a
multi-layer perceptron. In each round take turns:

    compute    a step without communication (no_sync)
    raw        the bytes of one step's gradients both ways over the raw road (two connections, csrc/iroh)
    gloo       a step over gloo, and an all_reduce of the same bytes on its own
    iroh       a step over iroh

From gloo's row follows how much of its communication hides behind the computation: compute + all_reduce - step. The bound
is 1.15 x (compute + raw - that overlap). `share` is iroh's p50 as a share of the bound: up to 1 is within it. The ranks'
parameters are compared after each backend's steps; `equal` says whether they had the same bits.
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
    road = RawRoad(rank)
    groups = {"gloo": dist.group.WORLD, "iroh": dist.new_group(backend="iroh")}
    models = {
        name: DistributedDataParallel(perceptron(plan.width), process_group=group) for name, group in groups.items()
    }
    gradients = sum(parameter.numel() for parameter in models["iroh"].parameters())
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

    actions: dict[str, Callable[[], None]] = {
        "compute": alone,
        "raw": lambda: road.carry(shared, plan.traffic),
        "gloo": lambda: step(models["gloo"]),
        "gloo all_reduce": lambda: dist.all_reduce(flat),
        "iroh": lambda: step(models["iroh"]),
    }
    seconds: dict[str, list[float]] = {name: [] for name in actions}
    for turn in range(plan.rounds + 1):
        for name, action in actions.items():
            dist.barrier()
            begun = time.perf_counter()
            action()
            if turn > 0:  # the first warms up
                seconds[name].append(time.perf_counter() - begun)
    # "compute" has moved gloo's model on each rank by itself.
    mine = torch.cat([parameter.detach().flatten() for parameter in models["iroh"].parameters()])
    theirs = mine.clone()
    dist.broadcast(theirs, 0)
    road.close()
    dist.destroy_process_group(groups["iroh"])
    return Seen(seconds, torch.equal(mine, theirs), nbytes)


def main() -> int:
    description, usage = (__doc__ or "").split("\n    python", 1)
    parser = argparse.ArgumentParser(
        description=description, epilog="    python" + usage, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parameters", type=harness.positive, default=25_000_000, help="(default: %(default)s)")
    parser.add_argument("--batch", type=harness.positive, default=256, help="rows of one rank (default: %(default)s)")
    harness.add_common_options(parser)
    options = parser.parse_args()
    parameters = 200_000 if options.quick else options.parameters
    width = max(8, round((parameters / LAYERS) ** 0.5))
    plan = Plan(width, options.batch, options.rounds or (3 if options.quick else 9), Traffic(True, 2, 2, 64 << 10))

    harness.print_header("p50 and p95 of the slower rank of each round; see --help")
    seen = harness.run_ranks(measure, 2, plan, deadline=harness.Deadline(options.deadline))
    slower = {
        name: [max(pair) for pair in zip(*(one.seconds[name] for one in seen), strict=True)] for name in seen[0].seconds
    }
    table = harness.Table(what=15, p50_ms=9, p95_ms=9)
    for name, values in slower.items():
        table.row(what=name, p50_ms=f"{quantile(values, 0.5) * 1e3:.1f}", p95_ms=f"{quantile(values, 0.95) * 1e3:.1f}")
    compute, raw, gloo, gloo_alone, iroh = (quantile(slower[name], 0.5) for name in slower)
    overlap = max(0.0, compute + gloo_alone - gloo)
    bound = ALLOWED * (compute + raw - overlap)
    print(
        f"\n# gradients: {seen[0].gradient_bytes / 1e6:.1f} MB; gloo hides {overlap * 1e3:.1f} ms of its communication"
    )
    print(f"# bound: {ALLOWED} x ({compute * 1e3:.1f} + {raw * 1e3:.1f} - {overlap * 1e3:.1f}) = {bound * 1e3:.1f} ms")
    print(f"# share: {iroh / bound:.2f} of the bound; equal: {'yes' if all(one.equal for one in seen) else 'NO'}")
    return harness.FINE if all(one.equal for one in seen) else harness.FINDING


if __name__ == "__main__":
    harness.run_main(main)
