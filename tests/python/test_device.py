"""Tensors on an accelerator, simulated (see simulated.py): right numbers without waiting for it, every stream ordered
behind what it depends on, memory kept as long as a stream uses it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import simulated
import torch
import torch.distributed as dist
from families import attempt
from torch.distributed import ReduceOp

pytestmark = pytest.mark.timeout(600)  # the first test compiles the accelerator

COUNT = 40_001
WORLDS = [1, 2, 3]


@pytest.fixture(scope="module", autouse=True)
def built() -> None:
    simulated.build()  # once, before several ranks want it


def join(rank: int, world: int, store: str) -> Any:
    """A group that takes tensors of the simulated device."""
    from torch_iroh import _register

    sim = simulated.load()
    if "IROH_SIM" not in dist.Backend._plugins:
        dist.Backend.register_backend("iroh_sim", _register._create, extended_api=True, devices=["cpu", "sim"])
    dist.init_process_group("iroh_sim", store=dist.FileStore(store), rank=rank, world_size=world)
    return sim


def values(rank: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank * 1000 + count)
    return torch.randint(-4, 5, (count,), generator=generator).to(dtype)


def late(tensor: torch.Tensor) -> torch.Tensor:
    """The same numbers on the device, written by work that is still queued when this returns."""
    return (tensor + 1).pin_memory().to("sim", non_blocking=True).sub_(1)


def collectives(rank: int, world: int, dtype: torch.dtype, place: Callable[[torch.Tensor], torch.Tensor]) -> list[Any]:
    """Each collective once on tensors that `place` puts somewhere; results as they are right after wait()."""
    mine = values(rank, COUNT, dtype)
    blocks = values(rank, world * 33, dtype).view(world, 33)
    strided = place(values(rank, 60, dtype).view(6, 10))[:, ::2].t()  # neither contiguous nor whole
    results: list[torch.Tensor] = []

    reduced = place(mine)
    dist.all_reduce(reduced)
    averaged = place(mine)
    dist.all_reduce(averaged, op=ReduceOp.MAX)
    dist.all_reduce(strided)
    results += [reduced, averaged, strided]

    rooted = place(mine)
    dist.reduce(rooted, world - 1)
    if rank == world - 1:
        results.append(rooted)
    sent = place(mine)
    dist.broadcast(sent, world // 2)
    results.append(sent)

    gathered = [torch.empty(5, dtype=dtype, device=sent.device) for _ in range(world)]
    dist.all_gather(gathered, place(values(rank, 5, dtype)))
    flat = torch.empty(world * 5, dtype=dtype, device=sent.device)
    dist.all_gather_into_tensor(flat, place(values(rank, 5, dtype)))
    results += [*gathered, flat]

    part = torch.empty(33, dtype=dtype, device=sent.device)
    dist.reduce_scatter_tensor(part, place(blocks).view(-1))
    swapped = torch.empty(world * 33, dtype=dtype, device=sent.device)
    dist.all_to_all_single(swapped, place(blocks).view(-1))
    results += [part, swapped]

    rows = [torch.empty(33, dtype=dtype, device=sent.device) for _ in range(world)] if rank == 0 else None
    dist.gather(place(blocks)[0], rows, 0)
    row = torch.empty(33, dtype=dtype, device=sent.device)
    dist.scatter(row, list(place(blocks)) if rank == 0 else None, 0)
    results += [*(rows or []), row]

    if world > 1:
        other = torch.empty(COUNT, dtype=dtype, device=sent.device)
        works = [dist.isend(place(mine), (rank + 1) % world), dist.irecv(other, (rank - 1) % world)]
        for work in works:
            work.wait()
        results.append(other)
    # Not synchronised: a copy that is ordered behind the current stream must see the right numbers.
    return [one.to("cpu", non_blocking=False) for one in results]


def all_collectives(rank: int, world: int, store: str) -> list[str]:
    join(rank, world, store)
    wrong = []
    for dtype in (torch.float32, torch.int64, torch.bfloat16, torch.complex64):
        if dtype is torch.complex64:
            continue  # MAX has no meaning for it; below
        expected = collectives(rank, world, dtype, torch.clone)
        for index, (got, want) in enumerate(zip(collectives(rank, world, dtype, late), expected, strict=True)):
            if not torch.equal(got, want):
                wrong.append(f"{dtype} result {index}: {got.flatten()[:5]} instead of {want.flatten()[:5]}")
    pair = late(values(rank, 10, torch.complex64))
    dist.all_reduce(pair)
    if not torch.equal(pair.cpu(), sum(values(one, 10, torch.complex64) for one in range(world))):
        wrong.append("complex64")
    dist.destroy_process_group()
    return wrong


@pytest.mark.parametrize("world", WORLDS)
def test_collectives_on_the_device_equal_those_on_the_cpu(run, store, world):
    assert run(world, all_collectives, world, store, deadline=120) == [[]] * world


def busy_device(rank: int, world: int, store: str) -> dict[str, Any]:
    sim = join(rank, world, store)
    dist.all_reduce(late(torch.ones(3)))  # connected
    tensor = late(values(rank, COUNT, torch.float32))
    small = torch.ones(5)
    sim.reset_counters()
    begun = time.monotonic()
    with sim.held(sim.current_stream()):
        work = dist.all_reduce(tensor, async_op=True)
        issued = time.monotonic() - begun
        behind = dist.all_reduce(small, async_op=True)  # of the same group: must not overtake
        time.sleep(0.3)
        early = (work.is_completed(), behind.is_completed())
    work.wait()
    behind.wait()
    waits = sim.counters()["main"]
    expected = sum(values(one, COUNT, torch.float32) for one in range(world))
    found = {
        "issued": issued,
        "early": early,
        "waits": {name: waits[name] for name in ("event", "stream", "device")},
        "right": torch.equal(tensor.cpu(), expected) and bool((small == world).all()),
    }
    dist.destroy_process_group()
    return found


@pytest.mark.parametrize("world", [2, 3])
def test_issuing_does_not_wait_for_a_busy_device_and_order_is_kept(run, store, world):
    for found in run(world, busy_device, world, store):
        assert found["right"], found
        assert found["issued"] < 0.25 and found["early"] == (False, False), found
        assert found["waits"] == {"event": 0, "stream": 0, "device": 0}, found  # the caller's thread never waits for it


def freed_early(rank: int, world: int, store: str) -> bool:
    join(rank, world, store)
    right = True
    for turn in range(10):
        mine = late(values(rank + turn, COUNT, torch.float32))
        whole = torch.empty(world * COUNT, device="sim")
        work = dist.all_gather_into_tensor(whole, mine, async_op=True)
        del mine  # its memory is free for this stream, but the operation's stream still reads it
        junk = [torch.full((COUNT,), -7.0, device="sim") for _ in range(3)]
        work.wait()
        expected = torch.cat([values(one + turn, COUNT, torch.float32) for one in range(world)])
        right = right and torch.equal(whole.cpu(), expected)
        del junk
    dist.destroy_process_group()
    return right


def test_memory_freed_after_the_call_is_kept_for_the_operation(run, store):
    assert run(2, freed_early, 2, store) == [True, True]


def chained(rank: int, world: int, store: str) -> tuple[float, float]:
    sim = join(rank, world, store)
    work = dist.all_reduce(late(torch.full((COUNT,), rank + 1.0)), async_op=True)
    doubled = work.get_future().then(lambda done: done.value()[0] * 2)
    result = doubled.wait()  # orders the current stream behind it
    side = torch.Stream(device="sim")
    other = dist.all_reduce(late(torch.full((7,), 1.0)), async_op=True)
    with side:
        other.wait()  # orders this stream behind it
        on_side = other.result()[0] + 0
        copied = on_side.cpu()
    sim.synchronize()
    dist.destroy_process_group()
    return result.cpu()[COUNT - 1].item(), copied[6].item()


@pytest.mark.parametrize("world", [1, 2, 3])
def test_futures_and_waits_order_the_stream_of_whoever_waits(run, store, world):
    assert run(world, chained, world, store) == [(2.0 * sum(range(1, world + 1)), float(world))] * world


def wrong_devices(rank: int, world: int, store: str) -> list[str]:
    join(rank, world, store)
    backend = dist.group.WORLD._get_backend(torch.device("sim"))
    here, there = torch.ones(4), torch.ones(4, device="sim")
    found = [
        attempt(lambda: backend.allgather([[here, there]], [there])).error,
        attempt(lambda: backend.allgather([[there, torch.ones(4, device="sim:1")]], [there])).error,
        attempt(lambda: backend.allreduce([torch.ones(4, device="meta")])).error,
    ]
    dist.barrier()
    dist.destroy_process_group()
    return found


def test_mixed_devices_are_refused_by_name(run, store):
    for mixed, two, meta in run(2, wrong_devices, 2, store):
        assert "should be on the same device" in mixed and "cpu" in mixed and "sim:0" in mixed, mixed
        assert "sim:0" in two and "sim:1" in two, two
        assert "meta" in meta, meta


def trained(device: str, rank: int, world: int) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(20, 30), torch.nn.ReLU(), torch.nn.Linear(30, 3)).to(device)
    wrapped = torch.nn.parallel.DistributedDataParallel(model, bucket_cap_mb=0.001)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    for step in range(4):
        torch.manual_seed(step * world + rank)
        batch = torch.randn(8, 20).to(device)
        optimizer.zero_grad()
        wrapped(batch).square().mean().backward()
        optimizer.step()
    return [parameter.detach().cpu() for parameter in model.parameters()]


def data_parallel(rank: int, world: int, store: str) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    join(rank, world, store)
    both = trained("cpu", rank, world), trained("sim", rank, world)
    dist.destroy_process_group()
    return both


@pytest.mark.parametrize("world", [2, 3])
def test_ddp_on_the_device_equals_ddp_on_the_cpu(run, store, world):
    results = run(world, data_parallel, world, store, deadline=120)
    for on_cpu, on_device in results:
        for one, other in zip(on_cpu, on_device, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)
        assert all(torch.equal(mine, first) for mine, first in zip(on_device, results[0][1], strict=True))


def meshes(rank: int, world: int, store: str) -> tuple[list[float], list[str]]:
    simulated.load()
    from torch_iroh import _register

    dist.Backend.register_backend("iroh_sim", _register._create, extended_api=True, devices=["cpu", "sim"])
    dist.init_process_group(
        "iroh_sim",
        store=dist.FileStore(store),
        rank=rank,
        world_size=world,
        device_id=torch.device("sim", 0),
    )
    mesh = dist.device_mesh.init_device_mesh("sim", (2, world // 2), mesh_dim_names=("outer", "inner"))
    sums = []
    for name in ("outer", "inner"):
        total = torch.full((3,), float(rank), device="sim")
        dist.all_reduce(total, group=mesh.get_group(name))
        sums.append(total.cpu()[0].item())
    split = dist.split_group(split_ranks=[[0, 1], [2, 3]])
    total = torch.full((3,), float(rank), device="sim")
    dist.all_reduce(total, group=split)
    sums.append(total.cpu()[0].item())
    outside = dist.new_group([0])  # calls perform_nocolor_split elsewhere
    dist.barrier()
    dist.destroy_process_group()
    return sums, [type(outside).__name__]


def test_device_id_two_dimensional_meshes_and_split_group(run, store):
    found = run(4, meshes, 4, store, deadline=120)
    assert [sums for sums, _ in found] == [[2.0, 1.0, 1.0], [4.0, 1.0, 1.0], [2.0, 5.0, 5.0], [4.0, 5.0, 5.0]]
