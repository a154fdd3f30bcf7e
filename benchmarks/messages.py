"""How long is a message between two ranks of one host on its way, beside gloo?

Both ranks send and receive in turn (ping-pong); a row's time is half of a round trip, seen by rank 0. The rows take
turns in every round. The receiver checks every element.

    python benchmarks/messages.py
    python benchmarks/messages.py --bytes 4Ki,16Mi

bytes      of one message, float32
road       gloo (TCP on loopback), shared (iroh backend, shared memory), iroh (the same, shared_memory="off")
p50_us     median of one way
p95_us     95th percentile of the same
wrong      elements that differ from what was sent
to_gloo    gloo's p50 / this p50: above 1 is faster than gloo
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass

import harness
import torch
import torch.distributed as dist
from harness import Rank, parse_bytes, quantile, show_bytes

import torch_iroh

ROADS = {"shared": "auto", "iroh": "off"}  # Options.shared_memory


@dataclass(frozen=True)
class Plan:
    sizes: list[tuple[int, int]]  # bytes, rounds


@dataclass
class Seen:
    seconds: list[dict[str, list[float]]]  # by size: by road
    wrong: list[dict[str, int]]


def measure(rank: Rank, plan: Plan) -> Seen:
    groups = {"gloo": dist.group.WORLD}
    for road, shared_memory in ROADS.items():
        groups[road] = dist.new_group(backend="iroh", pg_options=torch_iroh.Options(shared_memory=shared_memory))
    seen = Seen([], [])
    for nbytes, rounds in plan.sizes:
        sent = torch.arange(nbytes // 4, dtype=torch.float32) % 1021 + rank.index
        expected = sent + (1 - 2 * rank.index)
        seconds: dict[str, list[float]] = {road: [] for road in groups}
        wrong = dict.fromkeys(groups, 0)
        for turn in range(rounds + 2):  # two warm up
            for road, group in groups.items():
                got = torch.zeros_like(sent)
                dist.barrier(group=group)
                start = time.perf_counter()
                if rank.index == 0:
                    dist.send(sent, 1, group=group)
                    dist.recv(got, 1, group=group)
                else:
                    dist.recv(got, 0, group=group)
                    dist.send(sent, 0, group=group)
                if turn >= 2:
                    seconds[road].append((time.perf_counter() - start) / 2)
                wrong[road] += int((got != expected).sum())
        seen.seconds.append(seconds)
        seen.wrong.append(wrong)
    paths = {peer.path for peer in torch_iroh.stats(groups["shared"]).peers}
    if paths != {"shared memory"}:
        raise RuntimeError(f"the ranks of this host share no memory: {paths}")
    return seen


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--bytes", type=harness.comma_list(parse_bytes), metavar="LIST", help="(default: 4,4Ki,64Ki,1Mi,16Mi)"
    )
    harness.add_common_options(parser)
    options = parser.parse_args()
    options.bytes = options.bytes or ([4, 64 << 10] if options.quick else [4, 4 << 10, 64 << 10, 1 << 20, 16 << 20])
    if min(options.bytes) < 4:
        parser.error("--bytes starts at 4: one element")
    return options


def main() -> int:
    options = parse_options()
    deadline = harness.Deadline(options.deadline)
    harness.print_header("data: float32; see --help")
    table = harness.Table(bytes=6, road=6, runs=4, p50_us=9, p95_us=9, wrong=5, to_gloo=7)
    default = 3 if options.quick else 50
    sizes = [(n // 4 * 4, options.rounds or (default if n < 4 << 20 else min(default, 10))) for n in options.bytes]
    seen = harness.run_ranks(measure, 2, Plan(sizes), deadline=deadline)
    wrong = 0
    for index, (nbytes, _) in enumerate(sizes):
        for road, seconds in seen[0].seconds[index].items():
            p50 = quantile(seconds, 0.5)
            mistakes = sum(one.wrong[index][road] for one in seen)
            wrong += mistakes
            table.row(
                bytes=show_bytes(nbytes),
                road=road,
                runs=len(seconds),
                p50_us=f"{p50 * 1e6:.1f}",
                p95_us=f"{quantile(seconds, 0.95) * 1e6:.1f}",
                wrong=mistakes,
                to_gloo=f"{quantile(seen[0].seconds[index]['gloo'], 0.5) / p50:.2f}",
            )
    print(f"\n# wrong elements: {wrong}")
    return harness.FINE if wrong == 0 else harness.FINDING


if __name__ == "__main__":
    harness.run_main(main)
