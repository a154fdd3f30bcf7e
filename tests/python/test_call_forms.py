"""The other forms of a collective: coalesced, functional, of objects, asynchronous, several groups at once."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from references import DEFAULT_ROADS, wide
from scenarios import Ledger, road_groups

# ---- coalesced, functional, object collectives ----


def scenario_coalesced(rank: int) -> Ledger:
    ledger, world = Ledger(rank), dist.get_world_size()
    sizes = [3, 0, 4097, 1]
    total = sum(range(1, world + 1))
    label = f"world={world}"

    def fresh() -> list[torch.Tensor]:
        return [torch.full([size], float((index + 1) * (rank + 1))) for index, size in enumerate(sizes)]

    def check(name: str, tensors: list[torch.Tensor]) -> None:
        for index, tensor in enumerate(tensors):
            ledger.equal(f"{name} {label} [{index}]", tensor, torch.full_like(tensor, (index + 1) * total))

    tensors = fresh()
    dist.all_reduce_coalesced(tensors)
    check("all_reduce_coalesced", tensors)
    tensors = fresh()
    dist.all_reduce_coalesced(tensors, async_op=True).wait()
    check("all_reduce_coalesced async", tensors)
    for async_ops in (False, True):
        tensors = fresh()
        with dist._coalescing_manager(async_ops=async_ops) as manager:
            for tensor in tensors:
                dist.all_reduce(tensor)
        if async_ops:
            manager.wait()
        check(f"coalescing manager async={async_ops}", tensors)

    parts = [torch.full([n], rank + 0.5) for n in (3, 1009)]
    gathered = [torch.zeros(world, n) for n in (3, 1009)]
    with dist._coalescing_manager(async_ops=True) as manager:
        for into, part in zip(gathered, parts, strict=True):
            dist.all_gather_into_tensor(into, part)
    manager.wait()
    for into in gathered:
        want = (torch.arange(world) + 0.5)[:, None].expand_as(into)
        ledger.equal(f"coalesced all_gather {label}", into, want)
    sources = [torch.arange(world * n, dtype=torch.float64) * (rank + 1) for n in (2, 1009)]
    outputs = [torch.zeros(n, dtype=torch.float64) for n in (2, 1009)]
    with dist._coalescing_manager(async_ops=True) as manager:
        for into, source in zip(outputs, sources, strict=True):
            dist.reduce_scatter_tensor(into, source)
    manager.wait()
    for into in outputs:
        want = (torch.arange(len(into), dtype=torch.float64) + rank * len(into)) * total
        ledger.equal(f"coalesced reduce_scatter {label}", into, want)

    lists = [[torch.zeros(n) for n in (3, 1009)] for _ in range(world)]
    dist.all_gather_coalesced(lists, parts)
    for peer, tensors in enumerate(lists):
        for tensor in tensors:
            ledger.equal(f"all_gather_coalesced {label} [{peer}]", tensor, torch.full_like(tensor, peer + 0.5))
    return ledger


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("world", [1, 2, 3, 5])
def test_coalesced_collectives_equal_single_ones(run_scenario, world):
    run_scenario(world, scenario_coalesced, roads=DEFAULT_ROADS)


def scenario_functional(rank: int) -> Ledger:
    ledger, world = Ledger(rank), dist.get_world_size()
    label, group = f"world={world}", dist.group.WORLD
    total = sum(range(1, world + 1))
    base = torch.arange(6 * world, dtype=torch.float32).view(2 * world, 3)
    mine = base * (rank + 1)

    ledger.equal(f"functional all_reduce {label}", funcol.all_reduce(mine, "sum", group), base * total)
    ledger.equal(f"functional all_reduce {label}, input", mine, base * (rank + 1))
    averaged = funcol.all_reduce(mine, "avg", group)
    ledger.near(f"functional avg {label}", averaged, wide(base) * total / world, np.abs(wide(base)) * total * 2.0**-23)
    whole = [base * (peer + 1) for peer in range(world)]
    for dim in (0, 1):
        gathered = funcol.all_gather_tensor(mine, dim, group)
        ledger.equal(f"functional all_gather dim {dim} {label}", gathered, torch.cat(whole, dim))
    scattered = funcol.reduce_scatter_tensor(mine, "sum", 0, group)
    ledger.equal(f"functional reduce_scatter {label}", scattered, (base * total)[2 * rank : 2 * rank + 2])
    sideways = funcol.reduce_scatter_tensor(mine.t().contiguous(), "sum", 1, group)
    ledger.equal(f"functional reduce_scatter dim 1 {label}", sideways, (base * total)[2 * rank : 2 * rank + 2].t())
    exchanged = funcol.all_to_all_single(mine, None, None, group)
    want = torch.cat([block[2 * rank : 2 * rank + 2] for block in whole])
    ledger.equal(f"functional all_to_all {label}", exchanged, want)
    ledger.equal(f"functional broadcast {label}", funcol.broadcast(mine, world - 1, group), base * world)
    pair = funcol.all_reduce_coalesced([mine, mine[0]], "sum", group)
    ledger.equal(
        f"functional coalesced {label}",
        torch.cat([pair[0].flatten(), pair[1]]),
        torch.cat([(base * total).flatten(), base[0] * total]),
    )
    pair = funcol.all_gather_into_tensor_coalesced([mine, mine[0]], group)
    ledger.equal(f"functional coalesced gather {label}", pair[0], torch.cat(whole))
    ledger.equal(f"functional coalesced gather {label} [1]", pair[1], torch.cat([part[0] for part in whole]))
    return ledger


@pytest.mark.parametrize("world", [1, 2, 3, 5])
def test_functional_collectives(run_scenario, world):
    run_scenario(world, scenario_functional, roads=DEFAULT_ROADS)


def scenario_objects(rank: int) -> Ledger:
    ledger, world = Ledger(rank), dist.get_world_size()

    def thing(peer: int) -> dict[str, Any]:
        return {"rank": peer, "text": "ß" * peer * 700, "nested": [(peer, None), {"x": 1.5}]}

    everyone = [thing(peer) for peer in range(world)]
    found: list[Any] = [None] * world
    dist.all_gather_object(found, thing(rank))
    ledger.true("all_gather_object", found == everyone, f"{found}")
    for root in range(world):
        found = [thing(root), root] if rank == root else [None, None]
        dist.broadcast_object_list(found, src=root)
        ledger.true(f"broadcast_object_list root={root}", found == [thing(root), root], f"{found}")
        into: list[Any] | None = [None] * world if rank == root else None
        dist.gather_object(thing(rank), into, dst=root)
        ledger.true(f"gather_object root={root}", into == (everyone if rank == root else None), f"{into}")
        one: list[Any] = [None]
        dist.scatter_object_list(one, everyone if rank == root else None, src=root)
        ledger.true(f"scatter_object_list root={root}", one == [thing(rank)], f"{one}")
    if world > 1 and rank == 0:
        dist.send_object_list([thing(0), "bye"], dst=1)
    if rank == 1:
        found = [None, None]
        dist.recv_object_list(found, src=0)
        ledger.true("recv_object_list", found == [thing(0), "bye"], f"{found}")
    return ledger


@pytest.mark.parametrize("world", [1, 2, 3])
def test_object_collectives(run_scenario, world):
    run_scenario(world, scenario_objects, roads=DEFAULT_ROADS)


# ---- asynchronous use ----


def scenario_in_flight(rank: int) -> Ledger:
    ledger, world = Ledger(rank), dist.get_world_size()
    total = sum(range(1, world + 1))
    sums, gathers, works = [], [], []
    for turn in range(30):
        size = [1, 70_001, 513][turn % 3]
        tensor = torch.full([size], float((rank + 1) * (turn + 1)))
        works.append(dist.all_reduce(tensor, async_op=True))
        sums.append(tensor)
        into = torch.zeros(world, 17, dtype=torch.int64)
        works.append(dist.all_gather_into_tensor(into, torch.full([17], rank * 100 + turn), async_op=True))
        gathers.append(into)
    works.append(dist.barrier(async_op=True))
    for work in reversed(works):  # any order
        work.wait()
    for work in works:
        ledger.true("in flight", work.is_completed() and work.wait(), "waited for, but not completed")
    for turn, (tensor, into) in enumerate(zip(sums, gathers, strict=True)):
        ledger.equal(f"in flight world={world} turn={turn}", tensor, torch.full_like(tensor, total * (turn + 1)))
        ledger.equal(
            f"in flight world={world} turn={turn}", into, (torch.arange(world) * 100 + turn)[:, None].expand(world, 17)
        )
    return ledger


@pytest.mark.parametrize("world", [1, 2, 3, 5])
def test_many_operations_in_flight_end_in_issue_order_with_right_results(run_scenario, world):
    run_scenario(world, scenario_in_flight, roads=DEFAULT_ROADS)


def scenario_futures(rank: int) -> Ledger:
    ledger, world = Ledger(rank), dist.get_world_size()
    total = float(sum(range(1, world + 1)))

    tensor = torch.full([40_001], float(rank + 1))
    future = dist.all_reduce(tensor, async_op=True).get_future()
    doubled = future.then(lambda done: done.value()[0] * 2)
    ledger.equal(f"future all_reduce world={world}", doubled.wait(), torch.full_like(tensor, 2 * total))
    late = future.then(lambda done: done.value()[0] + 1)  # of a future that is done
    ledger.equal(f"late future world={world}", late.wait(), torch.full_like(tensor, total + 1))

    view = torch.zeros(64, 2)[:, 1]  # has to be copied back before the future is done
    view.fill_(rank + 1)
    copied = dist.all_reduce(view, async_op=True).get_future().then(lambda done: done.value()[0].clone())
    ledger.equal(f"future of a strided view world={world}", copied.wait(), torch.full([64], total))

    outputs = [torch.zeros(3) for _ in range(world)]
    gathered = dist.all_gather(outputs, torch.full([3], float(rank)), async_op=True).get_future()
    parts = gathered.then(lambda done: torch.stack(done.value()[0])).wait()
    ledger.equal(f"future all_gather world={world}", parts, torch.arange(world)[:, None].expand(world, 3).float())
    chained = torch.futures.collect_all([dist.barrier(async_op=True).get_future(), doubled])
    ledger.true(f"collect_all world={world}", len(chained.wait()) == 2, "not two values")
    return ledger


@pytest.mark.parametrize("world", [1, 2, 3])
def test_futures_and_their_callbacks_see_the_result(run_scenario, world):
    run_scenario(world, scenario_futures, roads=DEFAULT_ROADS)


def scenario_interleaved(rank: int) -> Ledger:
    """Collectives and messages of several groups at once."""
    ledger, world = Ledger(rank), dist.get_world_size()
    works = []
    sums = {name: torch.full([30_011], float(rank + 1)) for name in road_groups}
    got = torch.zeros(30_011)
    if world > 1:
        works.append(dist.irecv(got, (rank - 1) % world, tag=5))
    for name, tensor in sums.items():
        works.append(dist.all_reduce(tensor, group=road_groups[name], async_op=True))
    if world > 1:
        works.append(dist.isend(torch.full([30_011], float(rank)), (rank + 1) % world, tag=5))
    for work in works:
        work.wait()
    for name, tensor in sums.items():
        ledger.equal(f"interleaved {name}", tensor, torch.full_like(tensor, sum(range(1, world + 1))))
    if world > 1:
        ledger.equal("interleaved recv", got, torch.full_like(got, (rank - 1) % world))
    return ledger


@pytest.mark.parametrize("world", [1, 2, 3, 5])
def test_groups_and_messages_do_not_disturb_each_other(run_scenario, world):
    run_scenario(world, scenario_interleaved, roads=DEFAULT_ROADS)
