"""The simulated accelerator itself: whoever forgets a wait or record_stream sees wrong numbers there, others never."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import simulated
import torch

pytestmark = pytest.mark.timeout(600)  # the first test compiles the accelerator

COUNT = 1000
POISON = torch.full((COUNT * 4,), 0xA5, dtype=torch.uint8).view(torch.float32)


@pytest.fixture(scope="module", autouse=True)
def sim():
    return simulated.load()


@pytest.fixture(autouse=True)
def _quiet(sim):
    yield
    for device in range(sim.device_count()):
        sim.synchronize(device)
    sim.set_device(0)
    sim.set_delay(0.5, 3)


def pinned(value: float) -> torch.Tensor:
    return torch.full((COUNT,), float(value)).pin_memory()


def on_device(value: float, device: str = "sim") -> torch.Tensor:
    tensor = torch.full((COUNT,), float(value)).to(device)
    simulated.synchronize(device)
    return tensor


def in_own_process(test: Callable[[ModuleType], None]) -> Callable[..., None]:
    """Autograd counts the devices at the first backward of a process: no other test may have run one before."""

    @functools.wraps(test)
    def start(sim: ModuleType) -> None:
        code = f"import simulated, {__name__} as tests; tests.{test.__name__}.__wrapped__(simulated.load())"
        folder = Path(__file__).parent
        done = subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr

    return start


# ---- torch sees an accelerator ----


def test_torch_knows_the_device(sim):
    assert torch.accelerator.is_available()
    assert torch.accelerator.current_accelerator() == torch.device("sim")
    assert torch.accelerator.device_count() == 2
    with torch.accelerator.device_index(1):
        assert torch.empty(1, device="sim").device == torch.device("sim:1")
    assert torch.empty(1, device="sim").device == torch.device("sim:0")


def test_pinned_memory_is_known_by_any_pointer_into_it():
    tensor = torch.empty(COUNT, pin_memory=True)
    assert tensor.is_pinned() and tensor[10:].is_pinned()
    assert not torch.empty(COUNT).is_pinned()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64])
def test_operators_equal_the_cpu(dtype):
    cpu = torch.arange(24).to(dtype).view(4, 6)
    there = cpu.to("sim")
    for made in (lambda t: t + t, lambda t: t.t().contiguous(), lambda t: t[1:3, ::2].clone(), lambda t: t == t[0]):
        assert torch.equal(made(there).cpu(), made(cpu))
    assert torch.equal(there.to("sim:1").cpu(), cpu)
    assert torch.equal(there.conj().cpu(), cpu.conj().resolve_conj())


@in_own_process
def test_a_model_trains_as_on_the_cpu(sim):
    sim.set_delay(0, 0)
    losses = {}
    for device in ("cpu", "sim"):
        torch.manual_seed(1)
        layers = (torch.nn.Linear(4, 8), torch.nn.LayerNorm(8), torch.nn.ReLU(), torch.nn.Linear(8, 3))
        model = torch.nn.Sequential(*layers).to(device)
        inputs, targets = torch.randn(5, 4).to(device), torch.tensor([0, 1, 2, 1, 0], device=device)
        losses[device] = []
        for _ in range(4):
            loss = torch.nn.functional.cross_entropy(model(inputs), targets)
            loss.backward()
            losses[device].append(loss.item())
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter -= 0.1 * parameter.grad
                    parameter.grad = None
    assert losses["sim"] == pytest.approx(losses["cpu"], rel=1e-6)


def test_storage_grows_and_shrinks_in_stream_order():
    tensor = torch.arange(4.0).to("sim")
    tensor.untyped_storage().resize_(8)
    tensor.untyped_storage().resize_(16)
    assert tensor[:2].tolist() == [0, 1]
    assert torch.empty(0, device="sim").resize_(2, 3).shape == (2, 3)


def test_host_tensors_are_refused_as_operands():
    with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
        on_device(1).add_(torch.ones(COUNT))


# ---- asynchronous ----


def test_pinned_target_is_old_until_the_stream_is_synchronized(sim):
    source, target = on_device(7), pinned(1)
    with sim.held(sim.current_stream()):
        target.copy_(source, non_blocking=True)
        assert target.eq(1).all()
        assert not sim.current_stream().query()
    sim.current_stream().synchronize()
    assert target.eq(7).all()
    assert sim.current_stream().query()


def test_delay_alone_shows_a_forgotten_wait(sim):
    sim.set_delay(30, 30)
    source, target = on_device(7), pinned(1)
    target.copy_(source, non_blocking=True)
    assert target.eq(1).all()


def test_copies_with_unpinned_memory_wait(sim):
    sim.reset_counters()
    target = torch.zeros(COUNT)
    target.copy_(on_device(7), non_blocking=True)
    assert target.eq(7).all()
    assert sim.counters()["main"]["copy"] == 2


def test_computing_is_enqueued(sim):
    tensor, other = on_device(3), on_device(4)
    sim.reset_counters()
    with sim.held(sim.current_stream()):
        tensor.mul_(2).add_(other)
        product = tensor.view(1, COUNT) @ other.view(COUNT, 1)
        tensor.zero_()
    assert sum(sim.counters()["main"].values()) == 0
    assert product.item() == pytest.approx(10 * 4 * COUNT)
    assert tensor.cpu().eq(0).all()


def test_pinned_source_is_kept_until_the_copy_has_read_it(sim):
    target = on_device(0)
    source = pinned(5)
    with sim.held(sim.current_stream()):
        target.copy_(source, non_blocking=True)
        address = source.data_ptr()
        del source
        other = torch.empty(COUNT, pin_memory=True)
        assert other.data_ptr() != address
    assert target.cpu().eq(5).all()
    again = torch.empty(COUNT, pin_memory=True)
    assert again.data_ptr() == address


# ---- order between streams ----


def test_streams_do_not_wait_for_each_other(sim):
    source, target, side = on_device(1), pinned(0), sim.pool_stream()
    with sim.held(sim.current_stream()):
        source.fill_(2)
        with side:
            target.copy_(source, non_blocking=True)
        side.synchronize()
        assert target.eq(1).all()


def test_event_orders_streams(sim):
    source, target, side = on_device(1), pinned(0), sim.pool_stream()
    event = torch.Event("sim")
    with sim.held(sim.current_stream()):
        source.fill_(2)
        event.record()
        side.wait_event(event)
        with side:
            target.copy_(source, non_blocking=True)
        assert not event.query() and not side.query()
    side.synchronize()
    assert event.query() and target.eq(2).all()


def test_event_waits_for_what_was_recorded_when_it_was_asked(sim):
    side, event = sim.pool_stream(), torch.Event("sim")
    event.record()
    sim.current_stream().synchronize()
    side.wait_event(event)
    with sim.held(sim.current_stream()):
        event.record()
        side.synchronize()
        assert not event.query()


def test_devices_are_ordered_by_a_copy_between_them(sim):
    source, target = on_device(1), torch.zeros(COUNT, device="sim:1")
    with sim.held(sim.current_stream(0)):
        source.fill_(2)
        target.copy_(source)
        target.add_(1)
        assert not sim.current_stream(1).query()
    assert target.cpu().eq(3).all()


def test_future_orders_streams_without_a_wait_of_the_host(sim):
    source, target, side = on_device(1), pinned(0), sim.pool_stream()
    future = torch.futures.Future(devices=["sim:0"])
    sim.reset_counters()
    with sim.held(side):
        with side:
            future.set_result(source.fill_(2))
        target.copy_(future.wait(), non_blocking=True)
        assert target.eq(0).all()
    assert sum(sim.counters()["main"].values()) == 0
    sim.current_stream().synchronize()
    assert target.eq(2).all()


@in_own_process
def test_backward_runs_on_the_streams_of_forward(sim):
    weight = on_device(2).requires_grad_()
    side, target = sim.pool_stream(), pinned(0)
    with sim.held(side):
        with side:
            loss = (weight * weight).sum()
        loss.backward()
        target.copy_(weight.grad, non_blocking=True)
        assert target.eq(0).all()
    sim.current_stream().synchronize()
    assert target.eq(4).all()


def test_event_measures_time(sim):
    sim.set_delay(5, 5)
    tensor = on_device(1)
    start, end = torch.Event("sim", enable_timing=True), torch.Event("sim", enable_timing=True)
    start.record()
    tensor.add_(1)
    end.record()
    end.synchronize()
    assert start.elapsed_time(end) >= 5


def test_pool_has_8_streams(sim):
    streams = {sim.pool_stream(1).stream_id for _ in range(20)}
    assert len(streams) == 8 and 0 not in streams


# ---- memory between streams ----


def staged_late(sim, record: bool) -> torch.Tensor:
    """What a side stream reads from a tensor freed before the read, which its stream was told of or not."""
    target, side = pinned(0), sim.pool_stream()
    source = on_device(7)
    side.wait_stream(sim.current_stream())
    with sim.held(side):
        with side:
            target.copy_(source, non_blocking=True)
        if record:
            source.record_stream(side)
        del source
        sim.current_stream().synchronize()
    side.synchronize()
    return target


def test_missing_record_stream_gives_poison(sim):
    assert torch.equal(staged_late(sim, record=False).view(torch.int32), POISON.view(torch.int32))


def test_record_stream_keeps_the_memory(sim):
    assert staged_late(sim, record=True).eq(7).all()


def test_missing_record_stream_shows_without_help(sim):
    corrupt = 0
    for _ in range(20):
        target, side, source = pinned(0), sim.pool_stream(), on_device(7)
        with side:
            target.copy_(source, non_blocking=True)
        del source
        side.synchronize()
        corrupt += not target.eq(7).all()
    assert corrupt >= 10


def test_freed_memory_is_used_again_at_once_by_its_own_stream_only(sim):
    source = on_device(7)
    address = source.data_ptr()
    with sim.held(sim.current_stream()):
        doubled = source * 2
        del source
        with sim.pool_stream():
            assert torch.empty(COUNT, device="sim").data_ptr() != address
        again = torch.empty(COUNT, device="sim").fill_(1)
        assert again.data_ptr() == address
    assert doubled.cpu().eq(14).all() and again.cpu().eq(1).all()


def test_recorded_memory_is_used_again_after_that_stream(sim):
    side, source = sim.pool_stream(), on_device(7)
    address = source.data_ptr()
    with sim.held(side):
        source.record_stream(side)
        del source
        other = torch.empty(COUNT, device="sim")
        assert other.data_ptr() != address
    side.synchronize()
    assert torch.empty(COUNT, device="sim").data_ptr() == address


def test_live_allocations_counts_blocks(sim):
    before = sim.live_allocations(1)
    tensors = [torch.empty(COUNT, device="sim:1") for _ in range(3)]
    assert sim.live_allocations(1) == before + 3
    tensors.clear()
    assert sim.live_allocations(1) == before


# ---- counters and errors ----


def test_waits_are_counted_by_kind_and_thread(sim):
    event = torch.Event("sim")
    event.record()
    sim.reset_counters()
    event.synchronize()
    sim.current_stream().synchronize()
    sim.current_stream().synchronize()
    thread = threading.Thread(target=torch.accelerator.synchronize)
    thread.start()
    thread.join()
    counters = sim.counters()
    assert {kind: count for kind, count in counters["main"].items() if count} == {"event": 1, "stream": 2}
    assert {kind: count for kind, count in counters["other"].items() if count} == {"device": 1}


def test_failed_kernel_is_reported_by_the_next_synchronize(sim):
    tensor, source = on_device(1), torch.zeros(3, dtype=torch.int64, device="sim")
    torch.gather(tensor, 0, source + COUNT, out=torch.empty(3, device="sim"))
    with pytest.raises(RuntimeError, match="out of bounds"):
        sim.current_stream().synchronize()
    sim.current_stream().synchronize()


def test_forked_process_is_refused(sim):
    on_device(1)
    child = os.fork()
    if child == 0:
        try:
            torch.ones(1, device="sim")
        except RuntimeError as error:
            os._exit(0 if "forked" in str(error) else 1)
        os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_current_stream_belongs_to_the_thread(sim):
    seen = []
    with sim.pool_stream() as stream:
        thread = threading.Thread(target=lambda: seen.append(sim.current_stream()))
        thread.start()
        thread.join()
        assert sim.current_stream() == stream
    assert seen == [sim.default_stream()]
