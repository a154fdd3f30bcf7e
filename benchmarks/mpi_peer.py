"""Open MPI's ranks for host.py, which starts them: the same operations on the same data, timed the same way.

The first argument is a JSON list of [operation, bytes, rounds]. Rank 0 prints one line of JSON: for each rank, by case,
its spans and the number of its wrong elements.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from mpi4py import MPI


def empty(count: int) -> np.ndarray:
    """Memory of torch, as the others use it: NumPy asks for huge pages, which copy faster, and torch does not."""
    return torch.empty(count).numpy()


def values(who: int, count: int) -> np.ndarray:
    made = empty(count)
    made[:] = np.arange(count, dtype=np.float32) % 61 + 3 * who
    return made


@dataclass(frozen=True)
class Exercise:
    """As in allreduce.py; outputs are NaN before each run."""

    fill: Callable[[], object]
    run: Callable[[], object]
    result: np.ndarray
    expected: np.ndarray


def exercise(world: MPI.Intracomm, op: str, whole: int) -> Exercise:
    me, size = world.Get_rank(), world.Get_size()
    part = whole // size
    if op == "barrier":
        nothing = empty(0)
        return Exercise(lambda: None, world.Barrier, nothing, nothing)
    out = empty(part if op == "reduce_scatter" else whole)
    expected = empty(0)
    if op in ("all_reduce", "reduce_scatter"):
        expected = sum((values(other, whole) for other in range(size)), np.zeros(whole, np.float32))
    mine = values(me, part if op == "all_gather" else whole)

    def blank() -> None:
        out.fill(np.nan)

    if op == "all_reduce":
        return Exercise(lambda: np.copyto(out, mine), lambda: world.Allreduce(MPI.IN_PLACE, out), out, expected)
    if op == "reduce_scatter":
        return Exercise(blank, lambda: world.Reduce_scatter_block(mine, out), out, expected[me * part :][:part])
    if op == "broadcast":
        expected = values(7, whole)
        fill = (lambda: np.copyto(out, expected)) if me == 0 else blank
        return Exercise(fill, lambda: world.Bcast(out, 0), out, expected)
    if op == "all_gather":
        expected = np.concatenate([values(other, part) for other in range(size)])
        return Exercise(blank, lambda: world.Allgather(mine, out), out, expected)
    assert op == "all_to_all", op
    sent = np.concatenate([values(me * size + to, part) for to in range(size)], out=empty(part * size))
    expected = np.concatenate([values(sender * size + me, part) for sender in range(size)])
    return Exercise(blank, lambda: world.Alltoall(sent, out), out, expected)


def main() -> None:
    world = MPI.COMM_WORLD
    spans, wrong = [], []
    for op, nbytes, rounds in json.loads(sys.argv[1]):
        task = exercise(world, op, nbytes // 4)
        spans.append([])
        wrong.append(0)
        for turn in range(rounds + 2):  # two warm up
            task.fill()
            world.Barrier()
            start = time.monotonic()
            task.run()
            end = time.monotonic()
            if turn >= 2:
                spans[-1].append((start, end))
            wrong[-1] += int((task.result != task.expected).sum())
    everyone = world.gather({"spans": spans, "wrong": wrong}, root=0)
    if everyone is not None:
        print(json.dumps(everyone))


if __name__ == "__main__":
    main()
