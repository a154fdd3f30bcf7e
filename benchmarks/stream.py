"""How many bytes per second does the raw road carry between two processes?

The raw road is iroh's streams alone (csrc/iroh): no links, groups or collectives. It is what a collective can reach at
best. The peer is gloo (TCP, one connection): send and recv of a tensor of the same bytes. All rows take turns in every
round of one run, each row moves the same bytes in all, and the bytes are not looked at.

    python benchmarks/stream.py
    python benchmarks/stream.py --bytes 256Mi --pieces 64Ki,1Mi --streams 1,8

road     iroh or gloo
ways     one: rank 0 to rank 1. both: half of the bytes in each direction, at once
conns    connections; 2 is one for each direction
streams  streams that share the bytes of a direction
piece    bytes of one write and of one read; each stream has one of each in flight
p50_ms   median of the times from the first rank's start to the last rank's end; p95_ms likewise
GBps     10^9 bytes per second, all directions together, at the median
ratio    p50 / gloo's p50 with the same ways: below 1 is faster than gloo
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass

import harness
import torch
import torch.distributed as dist
from harness import Rank, parse_bytes, positive, quantile, show_bytes
from raw_road import RawRoad, Traffic

Span = tuple[float, float]  # start and end on the clock that all processes of the machine share


@dataclass(frozen=True)
class Plan:
    total: int
    rounds: int
    traffics: list[Traffic]  # rows of the raw road; gloo's two rows come first


def measure(rank: Rank, plan: Plan) -> list[list[Span]]:
    """This rank's spans: a list for each row, an entry for each round."""
    road = RawRoad(rank)
    half = plan.total // 2
    outgoing, incoming = torch.zeros(plan.total, dtype=torch.uint8), torch.zeros(plan.total, dtype=torch.uint8)

    def gloo_one_way() -> None:
        if rank.index == 0:
            dist.send(outgoing, dst=1)
        else:
            dist.recv(incoming, src=0)

    def gloo_both_ways() -> None:
        peer = 1 - rank.index
        for work in (dist.irecv(incoming[:half], src=peer), dist.isend(outgoing[:half], dst=peer)):
            assert work is not None
            work.wait()

    def over(traffic: Traffic) -> Callable[[], None]:
        return lambda: road.carry(half if traffic.both_ways else plan.total, traffic)

    rows = [gloo_one_way, gloo_both_ways, *(over(traffic) for traffic in plan.traffics)]
    spans: list[list[Span]] = [[] for _ in rows]
    for turn in range(plan.rounds + 1):  # the first warms up
        for row, run in enumerate(rows):
            dist.barrier()
            start = time.monotonic()
            run()
            end = time.monotonic()
            if turn > 0:
                spans[row].append((start, end))
    road.close()
    return spans


def parse_options() -> argparse.Namespace:
    description, columns = (__doc__ or "").split("\n    python", 1)
    parser = argparse.ArgumentParser(
        description=description, epilog="    python" + columns, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    sizes, counts = harness.comma_list(parse_bytes), harness.comma_list(positive)
    parser.add_argument("--bytes", type=parse_bytes, help="moved by each measurement (default: 64Mi)")
    parser.add_argument("--pieces", type=sizes, help="list (default: 64Ki,256Ki)")
    parser.add_argument("--streams", type=counts, help="list (default: 1,2,4)")
    harness.add_common_options(parser)
    options = parser.parse_args()
    options.bytes = options.bytes or (1 << 20 if options.quick else 64 << 20)
    options.pieces = options.pieces or ([64 << 10] if options.quick else [64 << 10, 256 << 10])
    options.streams = options.streams or ([1, 4] if options.quick else [1, 2, 4])
    options.rounds = options.rounds or (3 if options.quick else 9)
    for streams in options.streams:
        if options.bytes % (2 * streams):
            parser.error(f"--bytes {options.bytes} cannot be shared by two ways of {streams} streams")
    return options


def main() -> int:
    options = parse_options()
    traffics = [
        Traffic(both_ways, connections, streams, piece)
        for (both_ways, connections), piece, streams in itertools.product(
            [(False, 1), (True, 1), (True, 2)], options.pieces, options.streams
        )
    ]
    harness.print_header(
        f"{options.rounds} rounds; GBps = bytes / p50; ratio = p50 / gloo's p50 with the same ways; see --help"
    )
    plan = Plan(options.bytes, options.rounds, traffics)
    by_rank = harness.run_ranks(measure, 2, plan, deadline=harness.Deadline(options.deadline))
    times = [
        [max(end for _, end in spans) - min(start for start, _ in spans) for spans in zip(*row, strict=True)]
        for row in zip(*by_rank, strict=True)
    ]
    gloo = {False: times[0], True: times[1]}

    table = harness.Table(road=4, ways=4, conns=5, streams=7, piece=6, bytes=6, p50_ms=9, p95_ms=9, GBps=7, ratio=6)

    def print_row(road: str, both_ways: bool, conns: int, streams: str, piece: str, seconds: list[float]) -> None:
        p50 = quantile(seconds, 0.5)
        table.row(
            road=road,
            ways="both" if both_ways else "one",
            conns=conns,
            streams=streams,
            piece=piece,
            bytes=show_bytes(options.bytes),
            p50_ms=f"{p50 * 1e3:.2f}",
            p95_ms=f"{quantile(seconds, 0.95) * 1e3:.2f}",
            GBps=f"{options.bytes / p50 / 1e9:.3f}",
            ratio=f"{p50 / quantile(gloo[both_ways], 0.5):.2f}",
        )

    for both_ways in (False, True):
        print_row("gloo", both_ways, 1, "-", "-", gloo[both_ways])
    for traffic, seconds in zip(traffics, times[2:], strict=True):
        print_row(
            "iroh", traffic.both_ways, traffic.connections, str(traffic.streams), show_bytes(traffic.piece), seconds
        )
    return harness.FINE


if __name__ == "__main__":
    harness.run_main(main)
