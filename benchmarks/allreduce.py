"""How long does a collective take on iroh, beside gloo, and how much of the raw road does it use?

Both backends are groups of the same processes and take turns in every round of one run. For one case (two ranks, 64 Mi
unless --raw-bytes says otherwise) the raw road takes turns with them: the same bytes in each direction over iroh's
streams alone, one way and both ways. Every rank checks every element of every result against the expected values.

    python benchmarks/allreduce.py
    python benchmarks/allreduce.py --op all --ranks 4 --bytes 64Ki,4Mi

bytes      of the whole: input of all_reduce, reduce_scatter and all_to_all, output of all_gather and broadcast
backend    gloo (TCP), iroh, or raw: the raw road; raw_both_ways has a connection for each direction
runs       measurements of this row
p50_ms     median of the times from the last rank's start (broadcast: the root's) to the last rank's end
p95_ms     95th percentile of the same; with fewer than 20 runs it is their maximum
algbw_GBps bytes / p50, in 10^9 bytes per second (raw: bytes of one direction)
busbw_GBps algbw x 2(n-1)/n for all_reduce, x (n-1)/n for all_gather, reduce_scatter and all_to_all, x 1 for broadcast
           and the raw road; derived in https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md
wrong      elements that differ from the expected value, over all ranks and runs (the warm-up too)
ratio      p50 / gloo's p50: below 1 is faster than gloo

p50_us     what the caller spends on issuing an async all_reduce of 1 KiB before it waits, all ranks' calls; p95_us too
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import harness
import torch
import torch.distributed as dist
from harness import Rank, parse_bytes, positive, quantile, show_bytes
from raw_road import RawRoad, Traffic
from torch import Tensor

import torch_iroh

BUSBW_FACTORS: dict[str, Callable[[int], float]] = {
    "all_reduce": lambda n: 2 * (n - 1) / n,
    "all_gather": lambda n: (n - 1) / n,
    "reduce_scatter": lambda n: (n - 1) / n,
    "broadcast": lambda n: 1.0,
    "all_to_all": lambda n: (n - 1) / n,
    "barrier": lambda n: 0.0,
}
OPS = list(BUSBW_FACTORS)
BACKENDS = ("gloo", "iroh")  # in the order of the table: the ratio is to the first
RAW_ROWS = ("raw_one_way", "raw_both_ways")

ISSUE_BYTES = 1 << 10
BOUND_CASE, BOUND_MS = ("all_reduce", 4 << 20, 4), 250.0  # 1M float32 on 4 ranks

Span = tuple[float, float]  # start and end on the clock that all processes of the machine share


@dataclass(frozen=True)
class Case:
    op: str
    count: int  # bytes of the whole; a multiple of 4 x ranks
    rounds: int
    raw: bool  # does the raw road take turns?


@dataclass(frozen=True)
class Plan:
    cases: list[Case]
    raw_traffics: tuple[Traffic, Traffic]  # one way, both ways
    async_calls: int  # 0: not measured


@dataclass
class Row:
    """What one rank saw of one backend (or raw road) in one case."""

    spans: list[Span] = field(default_factory=list)
    wrong: int = 0


@dataclass
class Seen:
    """What one rank saw: rows by name for each case, and the seconds of its async calls by backend."""

    cases: list[dict[str, Row]]
    issued: dict[str, Row]


# ---- in a rank ----


@dataclass(frozen=True)
class Exercise:
    """One collective on data whose result is known: values are small whole numbers, so float32 sums are exact."""

    fill: Callable[[], object]  # before each run; outputs are NaN, so an element that nobody wrote is wrong
    run: Callable[[dist.ProcessGroup], object]
    result: Tensor
    expected: Tensor


def values(who: int, count: int) -> Tensor:
    """Distinct for each ``who``, different at neighbouring places."""
    return torch.arange(count, dtype=torch.float32).remainder_(61) + 3 * who


def exercise(op: str, rank: Rank, nbytes: int) -> Exercise:
    me, world = rank.index, rank.world
    whole = nbytes // 4
    part = whole // world
    nan = float("nan")
    if op == "barrier":
        nothing = torch.empty(0)
        return Exercise(lambda: None, lambda group: dist.barrier(group=group), nothing, nothing)
    if op == "broadcast":
        expected = values(7, whole)
        buffer = torch.empty(whole)
        fill = (lambda: buffer.copy_(expected)) if me == 0 else (lambda: buffer.fill_(nan))
        return Exercise(fill, lambda group: dist.broadcast(buffer, src=0, group=group), buffer, expected)
    if op == "all_reduce":
        mine, buffer = values(me, whole), torch.empty(whole)
        expected = sum((values(other, whole) for other in range(world)), torch.zeros(whole))
        return Exercise(
            lambda: buffer.copy_(mine), lambda group: dist.all_reduce(buffer, group=group), buffer, expected
        )
    if op == "all_gather":
        mine, out = values(me, part), torch.empty(whole)
        expected = torch.cat([values(other, part) for other in range(world)])
        return Exercise(
            lambda: out.fill_(nan), lambda group: dist.all_gather_single(out, mine, group=group), out, expected
        )
    if op == "reduce_scatter":
        mine, out = values(me, whole), torch.empty(part)
        expected = sum((values(other, whole) for other in range(world)), torch.zeros(whole))[me * part :][:part]
        return Exercise(
            lambda: out.fill_(nan), lambda group: dist.reduce_scatter_single(out, mine, group=group), out, expected
        )
    assert op == "all_to_all", op
    mine = torch.cat([values(me * world + to, part) for to in range(world)])
    expected = torch.cat([values(sender * world + me, part) for sender in range(world)])
    out = torch.empty(whole)
    return Exercise(lambda: out.fill_(nan), lambda group: dist.all_to_all_single(out, mine, group=group), out, expected)


def measure(rank: Rank, plan: Plan) -> Seen:
    world_group = dist.group.WORLD
    # Over iroh also here, where all ranks are on one host; host.py is about the memory they share.
    iroh_group = dist.new_group(backend="iroh", pg_options=torch_iroh.Options(shared_memory="off"))
    assert world_group is not None and isinstance(iroh_group, dist.ProcessGroup)
    groups = dict(zip(BACKENDS, (world_group, iroh_group), strict=True))
    road = RawRoad(rank) if any(case.raw for case in plan.cases) else None
    cases = [measure_case(rank, case, groups, road if case.raw else None, plan) for case in plan.cases]
    issued = measure_issuing(rank, groups, plan.async_calls) if plan.async_calls else {}
    if road is not None:
        road.close()
    return Seen(cases, issued)


def measure_case(
    rank: Rank, case: Case, groups: dict[str, dist.ProcessGroup], road: RawRoad | None, plan: Plan
) -> dict[str, Row]:
    task = exercise(case.op, rank, case.count)
    rows = {backend: Row() for backend in BACKENDS}
    if road is not None:
        rows.update({name: Row() for name in RAW_ROWS})
    for turn in range(case.rounds + 1):  # the first warms up: it connects, and touches memory
        for name, row in rows.items():
            task.fill()
            dist.barrier()  # gloo's, for all rows
            start = time.monotonic()
            if name in groups:
                task.run(groups[name])
            elif road is not None:
                road.carry(case.count, plan.raw_traffics[RAW_ROWS.index(name)])
            end = time.monotonic()
            if turn > 0:
                row.spans.append((start, end))
            if name in groups:
                row.wrong += int((task.result != task.expected).sum())
    return rows


def measure_issuing(rank: Rank, groups: dict[str, dist.ProcessGroup], calls: int) -> dict[str, Row]:
    task = exercise("all_reduce", rank, ISSUE_BYTES)
    rows = {backend: Row() for backend in groups}
    for turn in range(calls + 10):
        for name, group in groups.items():
            task.fill()
            dist.barrier()
            start = time.monotonic()
            work = dist.all_reduce(task.result, group=group, async_op=True)
            end = time.monotonic()
            assert work is not None
            work.wait()
            if turn >= 10:
                rows[name].spans.append((start, end))
            rows[name].wrong += int((task.result != task.expected).sum())
    return rows


# ---- in the parent ----


def together(op: str, by_rank: Sequence[Sequence[Span]]) -> list[float]:
    """Seconds of each run, from every rank's spans.

    Nothing but a broadcast can end before the last rank has started; a rank that was late after the barrier is not
    the collective's fault.
    """
    runs = zip(*by_rank, strict=True)
    if op == "broadcast" or op == "raw_one_way":
        return [max(end for _, end in spans) - spans[0][0] for spans in runs]
    return [max(end for _, end in spans) - max(start for start, _ in spans) for spans in runs]


def print_case(table: harness.Table, case: Case, world: int, by_rank: list[dict[str, Row]]) -> dict[str, list[float]]:
    """Print the rows of one case and return the seconds of each."""
    seconds = {}
    for name in by_rank[0]:
        raw = name in RAW_ROWS
        op = name if raw else case.op
        seconds[name] = together(op, [rows[name].spans for rows in by_rank])
        p50 = quantile(seconds[name], 0.5)
        algbw = case.count / p50 / 1e9
        moves = case.op != "barrier"
        table.row(
            op=op,
            bytes=show_bytes(case.count) if moves else "-",
            ranks=world,
            backend="raw" if raw else name,
            runs=len(seconds[name]),
            p50_ms=f"{p50 * 1e3:.3f}",
            p95_ms=f"{quantile(seconds[name], 0.95) * 1e3:.3f}",
            algbw_GBps=f"{algbw:.4f}" if moves else "-",
            busbw_GBps=f"{algbw * (1 if raw else BUSBW_FACTORS[case.op](world)):.4f}" if moves else "-",
            wrong=sum(rows[name].wrong for rows in by_rank) if moves and not raw else "-",
            ratio=f"{p50 / quantile(seconds[BACKENDS[0]], 0.5):.2f}",
        )
    return seconds


def raw_verdict(case: Case, seconds: dict[str, list[float]], traffics: tuple[Traffic, Traffic]) -> list[str]:
    """Two ranks' all_reduce of S bytes sends S bytes in each direction, so it moves 2 S in all."""
    ours = 2 * case.count / quantile(seconds["iroh"], 0.5)
    size = show_bytes(case.count)
    lines = [f"# all_reduce of {size} on 2 ranks moves {ours / 1e9:.3f} GB/s, both directions together"]
    for name, traffic in zip(RAW_ROWS, traffics, strict=True):
        moved = case.count * (2 if traffic.both_ways else 1)
        raw = moved / quantile(seconds[name], 0.5)
        lines.append(f"# all_reduce moves {ours / raw:.2f} of the raw road's bytes per second: {traffic}")
    return lines


def bound_verdict(seconds: dict[str, list[float]]) -> str:
    p50_ms = quantile(seconds["iroh"], 0.5) * 1e3
    return f"# all_reduce of 1M float32 (4 MiB) on 4 ranks takes {p50_ms:.1f} ms (p50); the bound is {BOUND_MS:g} ms"


def print_issuing(issued: dict[int, list[dict[str, Row]]]) -> None:
    print(f"\n# what the caller spends to issue an async all_reduce of {show_bytes(ISSUE_BYTES)}")
    table = harness.Table(op=14, ranks=5, backend=7, runs=5, p50_us=9, p95_us=9, wrong=5, ratio=6)
    for world, by_rank in issued.items():
        calls = {name: [end - start for rows in by_rank for start, end in rows[name].spans] for name in BACKENDS}
        for name, seconds in calls.items():
            p50 = quantile(seconds, 0.5)
            table.row(
                op="all_reduce",
                ranks=world,
                backend=name,
                runs=len(seconds),
                p50_us=f"{p50 * 1e6:.1f}",
                p95_us=f"{quantile(seconds, 0.95) * 1e6:.1f}",
                wrong=sum(rows[name].wrong for rows in by_rank),
                ratio=f"{p50 / quantile(calls[BACKENDS[0]], 0.5):.2f}",
            )


# ---- options ----


def rounds_for(nbytes: int) -> int:
    """Many where one is short and the scheduler's noise is large."""
    return min(100, max(9, (256 << 20) // nbytes))


def op_name(text: str) -> str:
    if text not in OPS:
        raise argparse.ArgumentTypeError(f"no op {text!r}; there are: {', '.join(OPS)}, or all")
    return text


def collectives_parser(doc: str | None) -> argparse.ArgumentParser:
    """With a module's description, and the options --op and --ranks."""
    description, columns = (doc or "").split("\n    python", 1)
    parser = argparse.ArgumentParser(
        description=description, epilog="    python" + columns, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    ops, counts = harness.comma_list(op_name), harness.comma_list(positive)
    parser.add_argument(
        "--op",
        type=lambda text: OPS if text == "all" else ops(text),
        default=["all_reduce"],
        metavar="LIST",
        help=f"all, or a list of: {', '.join(OPS)} (default: all_reduce)",
    )
    parser.add_argument("--ranks", type=counts, metavar="LIST", help="(default: 2,4)")
    return parser


def parse_options() -> argparse.Namespace:
    parser = collectives_parser(__doc__)
    parser.add_argument(
        "--bytes",
        type=harness.comma_list(parse_bytes),
        metavar="LIST",
        help="rounded down to a whole number of float32 on each rank (default: 1Ki,64Ki,1Mi,4Mi,64Mi)",
    )
    parser.add_argument(
        "--raw-bytes",
        type=parse_bytes,
        metavar="BYTES",
        help="the size at which the raw road takes turns with two ranks' all_reduce (default: 64Mi)",
    )
    parser.add_argument("--raw-streams", type=positive, default=2, help="see stream.py (default: %(default)s)")
    parser.add_argument("--raw-piece", type=parse_bytes, default=64 << 10, help="see stream.py (default: 64Ki)")
    parser.add_argument(
        "--async-issue",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="measure what it costs the caller to issue an async all_reduce",
    )
    harness.add_common_options(parser)
    options = parser.parse_args()
    quick = options.quick
    options.ranks = options.ranks or ([2] if quick else [2, 4])
    options.bytes = options.bytes or ([1 << 10, 1 << 20] if quick else [1 << 10, 64 << 10, 1 << 20, 4 << 20, 64 << 20])
    if options.raw_bytes and options.raw_bytes not in options.bytes:
        parser.error(f"--raw-bytes {show_bytes(options.raw_bytes)} is not in --bytes")
    options.raw_bytes = options.raw_bytes or (1 << 20 if quick else 64 << 20)
    if options.raw_bytes % (8 * options.raw_streams):
        parser.error(f"--raw-bytes {options.raw_bytes} cannot be shared by {options.raw_streams} streams")
    if min(options.ranks) < 2:
        parser.error("--ranks starts at 2: one rank alone sends nothing")
    if min(options.bytes) < 4 * max(options.ranks):
        parser.error(f"--bytes starts at {4 * max(options.ranks)}: one float32 for each rank")
    return options


def plan_for(world: int, options: argparse.Namespace) -> Plan:
    cases = []
    for op in options.op:
        for nbytes in options.bytes if op != "barrier" else [1 << 10]:
            count = nbytes // (4 * world) * (4 * world)
            rounds = options.rounds or (3 if options.quick else rounds_for(count))
            raw = (op, world, count) == ("all_reduce", 2, options.raw_bytes)
            cases.append(Case(op, count, rounds, raw))
    one_way = Traffic(False, 1, options.raw_streams, options.raw_piece)
    both_ways = Traffic(True, 2, options.raw_streams, options.raw_piece)
    calls = (20 if options.quick else 200) if options.async_issue else 0
    return Plan(cases, (one_way, both_ways), calls)


def main() -> int:
    options = parse_options()
    deadline = harness.Deadline(options.deadline)
    harness.print_header(
        "data: float32; busbw as in nccl-tests' doc/PERFORMANCE.md; ratio = p50 / gloo's p50; see --help"
    )
    widths = {"op": 14, "bytes": 6, "ranks": 5, "backend": 7, "runs": 4, "p50_ms": 9, "p95_ms": 9}
    table = harness.Table(**widths, algbw_GBps=10, busbw_GBps=10, wrong=5, ratio=6)
    wrong = 0
    verdicts: list[str] = []
    issued: dict[int, list[dict[str, Row]]] = {}
    for world in options.ranks:
        plan = plan_for(world, options)
        seen = harness.run_ranks(measure, world, plan, deadline=deadline)
        for index, case in enumerate(plan.cases):
            by_rank = [one.cases[index] for one in seen]
            seconds = print_case(table, case, world, by_rank)
            if case.raw:
                verdicts += raw_verdict(case, seconds, plan.raw_traffics)
            if (case.op, case.count, world) == BOUND_CASE:
                verdicts.append(bound_verdict(seconds))
        if options.async_issue:
            issued[world] = [one.issued for one in seen]
        wrong += sum(row.wrong for one in seen for rows in [*one.cases, one.issued] for row in rows.values())
    if verdicts:
        print("", *verdicts, sep="\n")
    if issued:
        print_issuing(issued)
    print(f"\n# wrong elements: {wrong}")
    return harness.FINE if wrong == 0 else harness.FINDING


if __name__ == "__main__":
    harness.run_main(main)
