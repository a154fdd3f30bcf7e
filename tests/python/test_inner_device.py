"""Tensors on an accelerator with a backend of their own inside hosts: the streams of iroh's part, of that backend's and
of the caller are in order.

The accelerator is simulated (simulated.py) and so is its backend (device_inner.py), which stands where NCCL would.
"""

from __future__ import annotations

import time
from typing import Any

import device_inner
import hosts
import pytest
import simulated
import test_device
import torch
import torch.distributed as dist
from hosts import DEADLINE, EVEN, LAYOUTS, on_hosts

import torch_iroh

pytestmark = pytest.mark.timeout(600)  # the first test compiles the accelerator and its backend


@pytest.fixture(scope="module", autouse=True)
def built() -> None:
    if why := hosts.obstacle():
        pytest.skip(why)
    simulated.build()
    device_inner.build()


def use_stand_in(rank: int) -> None:
    """From now on this process's NCCL is the stand-in."""
    from torch_iroh import _inner

    make = _inner.make
    wrap = device_inner.load().DeviceInner

    def make_stand_in(name: str, *where: Any) -> Any:
        assert name == "nccl"
        return wrap(make("gloo", *where))

    _inner.make = make_stand_in
    _inner.facts = lambda: _inner.Facts(True, f"sim of rank {rank}")


def on_stand_in(rank: int, call: Any, *arguments: Any) -> Any:
    use_stand_in(rank)
    return call(rank, *arguments)


def call(layout: str, function: Any, store: str) -> list[Any]:
    host_of = LAYOUTS[layout]
    with on_hosts(host_of) as ranks:  # "auto" takes NCCL by itself
        return ranks.run(on_stand_in, function, len(host_of), store, deadline=DEADLINE)


@pytest.mark.parametrize("layout", ["2x2", "2x2 interleaved", "2+1"])
def test_collectives_on_the_device_equal_those_on_the_cpu(store: str, layout: str):
    assert call(layout, test_device.all_collectives, store) == [[]] * len(LAYOUTS[layout])


def bytes_inside(rank: int, world: int, store: str) -> tuple[int, bool]:
    """Payload bytes over iroh to the rank of the same host, of operations large and of all kinds."""
    test_device.join(rank, world, store)
    tensor = test_device.late(torch.full((1 << 16,), float(rank)))
    dist.all_reduce(tensor)
    dist.all_reduce(tensor, op=dist.ReduceOp.AVG)
    dist.broadcast(tensor, src=0)
    right = bool((tensor.cpu() == sum(range(world))).all())
    sent = sum(peer.bytes_sent for peer in torch_iroh.stats().peers if peer.rank == rank ^ 1)
    dist.destroy_process_group()
    return sent, right


def test_iroh_carries_nothing_between_ranks_of_one_host(store: str):
    for sent, right in call("2x2", bytes_inside, store):
        assert right and sent < 64


@pytest.mark.parametrize("layout", ["2x2", "2+1"])
def test_memory_freed_after_the_call_is_kept_for_the_operation(store: str, layout: str):
    assert call(layout, test_device.freed_early, store) == [True] * len(LAYOUTS[layout])


def dropped(rank: int, world: int, store: str) -> bool:
    sim = test_device.join(rank, world, store)
    right = True
    for turn in range(10):
        mine = test_device.late(torch.full((1009,), float(turn)))
        work = dist.all_reduce(mine, async_op=True)
        until = time.monotonic() + 30
        while not work.is_completed() and time.monotonic() < until:
            time.sleep(0.001)
        del mine, work  # nobody waits for it, and the operation's stream has yet to write
        time.sleep(0.01 * (turn % 2))
        junk = [torch.full((1009,), -7.0, device="sim") for _ in range(3)]
        sim.synchronize()
        right = right and all(bool((one.cpu() == -7).all()) for one in junk)
    dist.destroy_process_group()
    return right


@pytest.mark.parametrize("layout", ["2x2", "2+1"])
def test_memory_of_a_result_that_nobody_waits_for_is_not_given_away(store: str, layout: str):
    assert call(layout, dropped, store) == [True] * len(LAYOUTS[layout])


@pytest.mark.parametrize("layout", ["2x2", "2+1"])
def test_futures_and_waits_order_the_stream_of_whoever_waits(store: str, layout: str):
    world = len(LAYOUTS[layout])
    assert call(layout, test_device.chained, store) == [(2.0 * sum(range(1, world + 1)), float(world))] * world


def busy_device(rank: int, world: int, store: str) -> dict[str, Any]:
    sim = test_device.join(rank, world, store)
    dist.all_reduce(test_device.late(torch.ones(3)))
    tensor = test_device.late(torch.full((1009,), float(rank)))
    sim.reset_counters()
    with sim.held(sim.current_stream()):
        work = dist.all_reduce(tensor, async_op=True)  # returns, though nothing can be read yet
        early = work.is_completed()
    work.wait()
    waits = sim.counters()["main"]
    right = bool((tensor.cpu() == sum(range(world))).all())
    dist.destroy_process_group()
    return {"early": early, "right": right, "waits": {name: waits[name] for name in ("event", "stream", "device")}}


def test_issuing_does_not_wait_for_a_busy_device(store: str):
    for found in call("2x2", busy_device, store):
        assert found == {"early": False, "right": True, "waits": {"event": 0, "stream": 0, "device": 0}}


def test_ddp_on_the_device_equals_ddp_on_the_cpu(store: str):
    results = call("2x2", test_device.data_parallel, store)
    for on_cpu, on_device in results:
        for one, other in zip(on_cpu, on_device, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)
        assert all(torch.equal(mine, first) for mine, first in zip(on_device, results[0][1], strict=True))


def same_device(rank: int, world: int, store: str) -> str:
    from torch_iroh import _inner

    _inner.facts = lambda: _inner.Facts(True, "GPU-0")
    try:
        test_device.join(rank, world, store)
    except dist.DistBackendError as error:
        return str(error)
    except ValueError as error:
        return str(error)
    dist.destroy_process_group()
    return ""


def test_ranks_of_a_host_on_one_device_are_named_when_nccl_is_asked_for(store: str):
    with on_hosts(EVEN, {"TORCH_IROH_INNER": "nccl"}) as ranks:
        for text in ranks.run(on_stand_in, same_device, 4, store, deadline=DEADLINE):
            assert "inner='nccl' cannot be had: ranks 0 and 1 of one host work on the same device GPU-0" in text
    with on_hosts(EVEN, {"TORCH_IROH_LOG": "info"}) as ranks:
        assert ranks.run(on_stand_in, same_device, 4, store + "auto", deadline=DEADLINE) == [""] * 4
        assert "work on the same device GPU-0" in ranks.output(3)
