"""Barriers and messages between real processes: every pair, dtype and tag, over iroh and through shared memory."""

from __future__ import annotations

import time

import numpy as np
import pytest
import torch
import torch.distributed as dist
from references import DEFAULT_ROADS, DTYPES, LARGE, MESSAGE_ROADS, SEED, WORLDS, random_bits
from scenarios import Ledger


def scenario_barrier(rank: int) -> Ledger:
    ledger, world = Ledger(rank), dist.get_world_size()
    for slow in range(world):
        if rank == slow:
            time.sleep(0.05)
        entered = torch.tensor([time.monotonic_ns()])  # one clock for all processes of a host
        dist.barrier()
        left = time.monotonic_ns()
        all_entered = [torch.zeros_like(entered) for _ in range(world)]
        dist.all_gather(all_entered, entered)
        last = max(int(moment) for moment in all_entered)
        ledger.true(f"barrier world={world} slow={slow}", left >= last, f"left {last - left} ns before the last came")
    return ledger


@pytest.mark.parametrize("world", WORLDS)
def test_nobody_leaves_a_barrier_before_all_have_come(run_scenario, world):
    run_scenario(world, scenario_barrier, roads=DEFAULT_ROADS)


def scenario_send_recv(rank: int, dtype: str, sizes: list[int]) -> Ledger:
    ledger, world = Ledger(rank), dist.get_world_size()
    for size in sizes:
        for distance in range(1, world):
            to, source = (rank + distance) % world, (rank - distance) % world
            label = f"send/recv world={world} dtype={dtype} size={size} distance={distance} seed={size}"
            sending = dist.isend(random_bits(dtype, size, size, rank), to)
            got = torch.zeros(size, dtype=getattr(torch, dtype))
            from_rank = dist.recv(got, source)
            sending.wait()
            ledger.true(label, from_rank == source, f"recv returned {from_rank}, expected {source}")
            ledger.equal(label, got, random_bits(dtype, size, size, source))
    return ledger


@pytest.mark.parametrize("world", [2, 3, 5])
@pytest.mark.parametrize("dtype", DTYPES)
def test_send_and_recv_between_all_pairs(run_scenario, world, dtype):
    run_scenario(world, scenario_send_recv, dtype, [0, 1, 1009], roads=MESSAGE_ROADS)


@pytest.mark.parametrize("world", [2, 3])
def test_send_and_recv_of_megabytes_both_ways_at_once(run_scenario, world):
    run_scenario(world, scenario_send_recv, "float32", [LARGE], roads=MESSAGE_ROADS)


def scenario_tags(rank: int) -> Ledger:
    ledger = Ledger(rank)
    count = 48
    order = np.random.default_rng(SEED).permutation(count).tolist()
    sizes = [1 + 977 * tag % 4099 for tag in range(count)]
    if rank == 0:
        works = [dist.isend(random_bits("int32", sizes[tag], 3, tag), 1, tag=tag) for tag in range(count)]
    else:
        got = {tag: torch.zeros(sizes[tag], dtype=torch.int32) for tag in order}
        works = [dist.irecv(got[tag], 0, tag=tag) for tag in order]
    for work in works:
        work.wait()
    for tag in order if rank == 1 else []:
        ledger.equal(f"tag {tag}, received in the order {order}", got[tag], random_bits("int32", sizes[tag], 3, tag))
    # Equal tags: in the order sent.
    values = [torch.tensor([float(n)]) for n in range(count)]
    if rank == 0:
        for value in values:
            dist.send(value, 1, tag=9)
    else:
        for value in values:
            found = torch.zeros(1)
            dist.recv(found, 0, tag=9)
            ledger.equal("one tag, many messages", found, value)
    ledger.checks += 1
    return ledger


def test_messages_of_many_tags_may_be_received_in_any_order(run_scenario):
    run_scenario(2, scenario_tags, roads=MESSAGE_ROADS)


def scenario_recv_anyone(rank: int) -> Ledger:
    ledger, world = Ledger(rank), dist.get_world_size()
    rounds = 5
    if rank != 0:
        for turn in range(rounds):
            dist.send(torch.tensor([rank, turn]), 0, tag=turn)
    for turn in range(rounds if rank == 0 else 0):
        seen = []
        for _ in range(world - 1):
            got = torch.zeros(2, dtype=torch.int64)
            source = dist.recv(got, tag=turn)
            ledger.true("recv from anyone", got.tolist() == [source, turn], f"{got.tolist()} came from {source}")
            seen.append(source)
        ledger.true("recv from anyone", sorted(seen) == list(range(1, world)), f"turn {turn}: heard of {seen}")
    ledger.checks += 1
    return ledger


@pytest.mark.parametrize("world", [2, 3, 5])
def test_recv_from_anyone_names_the_sender(run_scenario, world):
    run_scenario(world, scenario_recv_anyone, roads=MESSAGE_ROADS)


def scenario_batch(rank: int) -> Ledger:
    ledger, world = Ledger(rank), dist.get_world_size()
    out, back = (rank + 1) % world, (rank - 1) % world
    got = [torch.zeros(n, dtype=torch.float64) for n in (5, 40_001)]
    operations = [
        dist.P2POp(dist.isend, random_bits("float64", 5, 1, rank), out),
        dist.P2POp(dist.irecv, got[0], back),
        dist.P2POp(dist.isend, random_bits("float64", 40_001, 2, rank), back),
        dist.P2POp(dist.irecv, got[1], out),
    ]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    ledger.equal(f"batch world={world} from {back}", got[0], random_bits("float64", 5, 1, back))
    ledger.equal(f"batch world={world} from {out}", got[1], random_bits("float64", 40_001, 2, out))
    return ledger


@pytest.mark.parametrize("world", [2, 3, 5])
def test_batch_isend_irecv_around_a_ring(run_scenario, world):
    run_scenario(world, scenario_batch, roads=MESSAGE_ROADS)
