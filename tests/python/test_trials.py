"""Random collectives and messages over every road: a trial draws operation, road, dtype, size and root.

TEST_SEED=n draws others; TEST_TRIALS_SECONDS=n goes on for n seconds in each world (default 8).

    TEST_TRIALS_SECONDS=1200 python -m pytest -s -o faulthandler_timeout=0 tests/python/test_trials.py
"""

from __future__ import annotations

import os
import random
import time
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from ranks import Ranks
from references import (
    DTYPES,
    OPS_OF,
    REDUCIBLE,
    SEED,
    TIMEOUT,
    joined,
    random_bits,
    random_numbers,
    reduced,
    torch_op,
    wide,
)
from scenarios import Ledger, settle

import torch_iroh

SECONDS = float(os.environ.get("TEST_TRIALS_SECONDS", "8"))
ROADS = {
    "iroh": {"shared_memory": "off"},
    "shared": {"shared_memory": "auto"},
    "single_copy": {"shared_memory": "single_copy"},
    **{
        name: {"algorithm": name, "chunk_bytes": 4096}
        for name in ("ring", "direct", "ring_bidirectional", "tree", "butterfly", "bruck", "hierarchical")
    },
    # The same schedules with messages through shared memory, in a ring's slots and across several of them.
    "tree, shared": {"algorithm": "tree", "shared_memory": "auto", "chunk_bytes": 4096},
    "ring, shared": {"algorithm": "ring", "shared_memory": "auto", "chunk_bytes": 1 << 20},
}
OPERATIONS = ["all_reduce", "reduce", "reduce_scatter", "broadcast", "all_gather", "gather", "scatter"]
OPERATIONS += ["all_to_all", "send_recv"]
AT_ONCE = 4  # operations in flight


def trial(ledger: Ledger, number: int, groups: dict[str, dist.ProcessGroup]) -> None:
    """All ranks draw the same; several async operations of one road, checked when all are done."""
    world = dist.get_world_size()
    dice = random.Random(f"{SEED} {world} {number}")
    road = dice.choice(sorted(groups))
    group = groups[road]
    checks = []
    for _ in range(dice.randint(1, AT_ONCE)):
        kind = dice.choice(OPERATIONS)
        reducing = kind in ("all_reduce", "reduce", "reduce_scatter")
        dtype = dice.choice(REDUCIBLE if reducing else DTYPES)
        op = dice.choice(OPS_OF[dtype]) if reducing else ""
        if op == "PRODUCT" and dtype.startswith("complex"):
            op = "SUM"  # torch refuses it in all_reduce
        size = dice.choice([0, 1, 2, 13, 1009, 9973, dice.randint(0, 70_000)])
        root, seed = dice.randrange(world), dice.getrandbits(30)
        label = f"trial {number} of {world} ranks: {kind} {op} {dtype}[{size}] root {root} over {road}"
        wait = dice.random() < 0.5
        checks.append(start(ledger, label, kind, dtype, op, size, root, seed, group, wait))
    for check in checks:
        check()


def start(ledger, label, kind, dtype, op, size, root, seed, group, wait):
    rank, world = ledger.rank, dist.get_world_size()
    torch_dtype = getattr(torch, dtype)
    peers = range(world)
    calls = {"async_op": not wait, "group": group}
    if kind in ("all_reduce", "reduce"):
        parts = [random_numbers(dtype, op, size, seed, peer, world) for peer in peers]
        tensor = parts[rank].clone()
        if kind == "all_reduce":
            work = dist.all_reduce(tensor, torch_op(op, rank), **calls)
        else:
            work = dist.reduce(tensor, root, torch_op(op, rank), **calls)

        def check() -> None:
            finish(work)
            if kind == "all_reduce" or rank == root:
                ledger.near(label, tensor, *reduced(dtype, op, [wide(part) for part in parts]))
            else:
                ledger.equal(label, tensor, parts[rank])
            if kind == "all_reduce":
                ledger.same(label, tensor)

        return check
    if kind == "reduce_scatter":
        parts = [random_numbers(dtype, op, size * world, seed, peer, world) for peer in peers]
        output = torch.empty(size, dtype=torch_dtype)
        work = dist.reduce_scatter_tensor(output, parts[rank], torch_op(op, rank), **calls)
        own = [wide(part)[rank * size : (rank + 1) * size] for part in parts]
        return lambda: (finish(work), ledger.near(label, output, *reduced(dtype, op, own)))
    if kind == "send_recv":  # around the ranks, by a distance that all draw alike
        to, source = (rank + 1 + root) % world, (rank - 1 - root) % world
        want, output = random_bits(dtype, size, seed, source), torch.zeros(size, dtype=torch_dtype)
        mine = random_bits(dtype, size, seed, rank)
        if to == rank:
            return lambda: ledger.true(label, True, "")
        works = [dist.isend(mine, to, group=group), dist.irecv(output, source, group=group)]
        return lambda: ([work.wait() for work in works], ledger.equal(label, output, want))
    if kind == "broadcast":
        want = random_bits(dtype, size, seed, root)
        output = want.clone() if rank == root else torch.zeros(size, dtype=torch_dtype)
        work = dist.broadcast(output, root, **calls)
    elif kind == "all_gather":
        parts = [random_bits(dtype, size, seed, peer) for peer in peers]
        want, output = joined(parts), torch.zeros(world * size, dtype=torch_dtype)
        work = dist.all_gather_into_tensor(output, parts[rank], **calls)
    elif kind == "gather":
        parts = [random_bits(dtype, size, seed, peer) for peer in peers]
        outputs = [torch.zeros(size, dtype=torch_dtype) for _ in peers] if rank == root else None
        work = dist.gather(parts[rank], outputs, dst=root, **calls)
        want = joined(parts)
        if outputs is None:
            return lambda: (finish(work), ledger.true(label, True, ""))
        return lambda: (finish(work), ledger.equal(label, joined(outputs), want))
    elif kind == "scatter":
        parts = [random_bits(dtype, size, seed, peer) for peer in peers]
        want, output = parts[rank], torch.zeros(size, dtype=torch_dtype)
        work = dist.scatter(output, parts if rank == root else None, src=root, **calls)
    else:
        rng = np.random.default_rng(seed)
        counts = rng.integers(0, size + 1, (world, world)).tolist()  # [from][to]
        sent = [[random_bits(dtype, counts[source][to], seed + to, source) for to in peers] for source in peers]
        want = joined([sent[source][rank] for source in peers])
        output = torch.zeros(len(want), dtype=torch_dtype)
        arriving, leaving = [counts[source][rank] for source in peers], counts[rank]
        work = dist.all_to_all_single(output, joined(sent[rank]), arriving, leaving, **calls)
    return lambda: (finish(work), ledger.equal(label, output, want))


def finish(work: dist.Work | None) -> None:
    if work is not None:
        work.wait()


def trials(rank: int, world: int, store: str) -> Ledger:
    dist.init_process_group("iroh", store=dist.FileStore(store, world), rank=rank, world_size=world, timeout=TIMEOUT)
    groups = {
        name: dist.new_group(pg_options=torch_iroh.Options(**options), timeout=TIMEOUT)
        for name, options in ROADS.items()
    }
    ledger = Ledger(rank)
    until, number = time.monotonic() + SECONDS, 0
    while True:
        go_on = torch.tensor([float(rank > 0 or time.monotonic() < until)])
        dist.all_reduce(go_on, dist.ReduceOp.MIN)
        if go_on.item() == 0 or ledger.complaints:
            break
        trial(ledger, number, groups)
        number += 1
    print(f"{number} trials, {ledger.checks} checks", flush=True)
    dist.destroy_process_group()
    return ledger


@pytest.mark.timeout(int(SECONDS) + 120)
@pytest.mark.parametrize("world", [2, 3, 5])
def test_random_collectives_over_every_road(tmp_path: Path, world: int):
    with Ranks(world) as ranks:
        settle(ranks.run(trials, world, str(tmp_path / "store"), deadline=SECONDS + 60))
        print(ranks.output(0).splitlines()[-1])
