"""Backend "iroh" as a program meets it: how it is found and started, its groups, options, statistics and refusals.

What the collectives compute is test_collectives.py's matter; what happens when a rank dies, test_failures.py's.
"""

from __future__ import annotations

import contextlib
import copy
import ctypes.util
import gc
import os
import re
import shutil
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import ENVIRONMENT, RemoteError, run_ranks, values_of

import torch_iroh
from torch_iroh import _native

TIMEOUT = timedelta(seconds=30)


# ---- helpers ----


def python(code: str, *arguments: str, environment: dict[str, str] | None = None, module: str = "") -> str:
    """Run a program (with `module`, under ``python -m module``) and return what it prints; it must exit with 0."""
    command = [sys.executable, "-c", textwrap.dedent(code)] if not module else [sys.executable, "-m", module]
    done = subprocess.run(
        [*command, *arguments],
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
        env={**os.environ, **ENVIRONMENT, **(environment or {})},
    )
    assert done.returncode == 0, f"exit {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def threads() -> int:
    """Threads of this process, without tokio's pool for blocking calls, which iroh grows and shrinks as it likes."""
    names = []
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # it has ended
            names.append((task / "comm").read_text().strip())
    return sum(name != "tokio-rt-worker" for name in names)


def settled(count: Callable[[], int], at_most: int) -> int:
    """`count()` once it is no more than `at_most`, or after 5 s: what closes in the background needs a moment."""
    until = time.monotonic() + 5
    while (found := count()) > at_most and time.monotonic() < until:
        time.sleep(0.05)
    return found


@contextlib.contextmanager
def group(rank: int, world: int, store: Any, backend: str = "iroh", **options: Any) -> Iterator[None]:
    """The default group, on a FileStore at path `store` or on a given store."""
    if isinstance(store, str):
        store = dist.FileStore(store, world)
    options = {"timeout": TIMEOUT, **options}
    dist.init_process_group(backend, store=store, rank=rank, world_size=world, **options)
    try:
        yield
    finally:
        dist.destroy_process_group()


def meet(store: str, world: int) -> None:
    """A barrier that the backend has no part in."""
    other = dist.FileStore(store + ".meet", world)
    other.add("come", 1)
    while other.add("come", 0) < world:
        time.sleep(0.01)


def error_of(call: Callable[[], Any]) -> str:
    """Type and text of what `call` raises, without C++'s stack; "nothing" if it does not."""
    try:
        call()
    except Exception as error:
        text = str(error).split("\nException raised from")[0]
        return f"{type(error).__name__}: {text}"
    return "nothing"


# ---- how it is found ----

ALONE = """
    dist.init_process_group("iroh", store=dist.HashStore(), rank=0, world_size=1)
    tensor = torch.arange(3.0)
    dist.all_reduce(tensor)
    assert tensor.tolist() == [0.0, 1.0, 2.0]
    dist.destroy_process_group()
    print("worked")
"""


def test_import_torch_alone_is_enough_and_starts_and_loads_nothing():
    code = """
    import os, sys
    import torch
    import torch.distributed as dist
    native = [name for name in sys.modules if name in ("torch_iroh._C", "torch_iroh._core", "iroh")]
    assert native == [], native
    tasks = os.listdir("/proc/self/task")
    assert len(tasks) == 1, tasks
    """
    assert python(code + ALONE) == "worked\n"


@pytest.mark.parametrize("autoload", ["0", "1"])
@pytest.mark.parametrize("order", ["torch, torch_iroh", "torch_iroh, torch"])
def test_import_torch_iroh_before_or_after_torch_registers_the_backend(order, autoload):
    code = f"""
    import {order}
    import torch.distributed as dist
    """
    assert python(code + ALONE, environment={"TORCH_DEVICE_BACKEND_AUTOLOAD": autoload}) == "worked\n"


def test_torch_without_autoload_and_without_the_import_does_not_know_it():
    code = """
    import torch, torch.distributed as dist
    try:
        dist.init_process_group("iroh", store=dist.HashStore(), rank=0, world_size=1)
    except Exception as error:
        print(error)
    """
    if tuple(int(part) for part in torch.__version__.split(".")[:2]) >= (2, 14):
        pytest.skip("torch 2.14 asks the second entry point whatever the variable says")
    assert "iroh" in python(code, environment={"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"})


@pytest.mark.skipif(not hasattr(dist.Backend, "_ensure_backend_registered"), reason="torch 2.13 has no second group")
def test_torch_without_autoload_asks_the_second_entry_point_when_a_group_is_made():
    code = """
    import sys
    import torch, torch.distributed as dist
    assert [name for name in sys.modules if name.startswith("torch_iroh")] == []
    """
    assert python(code + ALONE, environment={"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}) == "worked\n"


PROGRAM = r"""
import os
import sys
import torch
import torch.distributed as dist
import torch.multiprocessing as processes

def work(rank, world, store):
    where = {} if rank is None else {"store": dist.FileStore(store, world), "rank": rank, "world_size": world}
    dist.init_process_group("iroh", **where)
    tensor = torch.ones(100_000) * (dist.get_rank() + 1)
    dist.all_reduce(tensor)
    assert tensor.unique().tolist() == [3.0], tensor
    # One write, so that lines of two ranks cannot mix.
    os.write(1, f"rank {dist.get_rank()} of {dist.get_world_size()} done\n".encode())
    dist.destroy_process_group()

if __name__ == "__main__":
    if sys.argv[1] == "torchrun":
        work(None, None, None)
    else:
        processes.start_processes(work, args=(2, sys.argv[2]), nprocs=2, start_method=sys.argv[1])
"""


@pytest.mark.parametrize("start", ["torchrun", "spawn", "fork"])
def test_program_started_by_torchrun_spawn_and_fork(start, tmp_path):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    if start == "torchrun":
        launcher = ["--standalone", "--nproc-per-node=2", str(program), start]
        printed = python("", *launcher, module="torch.distributed.run")
    else:
        done = subprocess.run(
            [sys.executable, str(program), start, str(tmp_path / "store")],
            capture_output=True,
            text=True,
            timeout=90,
            check=False,
            env={**os.environ, **ENVIRONMENT},
        )
        assert done.returncode == 0, done.stderr
        printed = done.stdout
    assert sorted(line for line in printed.splitlines() if line.endswith("done")) == [
        "rank 0 of 2 done",
        "rank 1 of 2 done",
    ]


# ---- stores, one group after the other ----


def cycle(rank: int, world: int, kind: str, where: Any) -> list[tuple[int, int]]:
    """Five default groups on one store object; open files and threads after each."""
    if kind == "FileStore":
        store: Any = dist.FileStore(where, world)
    else:
        store = dist.TCPStore("127.0.0.1", where, world, is_master=rank == 0, timeout=TIMEOUT)
    usage: list[tuple[int, int]] = []
    for turn in range(5):
        with group(rank, world, store):
            tensor = torch.full([1000 + turn], rank + turn + 1.0)
            dist.all_reduce(tensor)
            assert tensor.unique().tolist() == [sum(peer + turn + 1.0 for peer in range(world))], tensor
        gc.collect()
        if turn < 2:  # these may start what stays: the iroh library's thread, pools
            time.sleep(0.5)
            usage.append((open_files(), threads()))
        else:
            usage.append((settled(open_files, usage[1][0]), settled(threads, usage[1][1])))
    return usage


@pytest.mark.parametrize("kind", ["FileStore", "TCPStore"])
def test_five_groups_one_after_the_other_on_one_store_leak_nothing(run, kind, store):
    for usage in run(2, cycle, 2, kind, store if kind == "FileStore" else free_port()):
        for files, tasks in usage[2:]:
            assert files <= usage[1][0], f"open files after each group: {usage}"
            assert tasks <= usage[1][1], f"threads after each group: {usage}"


def by_url(rank: int, world: int, url: str) -> list[float]:
    dist.init_process_group("iroh", init_method=url, rank=rank, world_size=world, timeout=TIMEOUT)
    tensor = torch.tensor([float(rank)])
    dist.all_reduce(tensor)
    dist.destroy_process_group()
    return tensor.tolist()


@pytest.mark.parametrize("scheme", ["file", "tcp"])
def test_init_method_urls(run, scheme, store):
    url = f"file://{store}" if scheme == "file" else f"tcp://127.0.0.1:{free_port()}"
    assert run(2, by_url, 2, url) == [[1.0], [1.0]]


def leave_at_once(rank: int, world: int, store: str) -> list[Any]:
    found: list[Any] = []
    shared = dist.FileStore(store, world)
    for turn in range(12):
        with group(rank, world, shared):
            tensor = torch.full([1 if turn % 2 else 200_000], float(turn))
            found.append(error_of(lambda tensor=tensor: dist.all_reduce(tensor)))
            if turn % 3:
                pass  # nothing else: the first message is also the last
            elif rank == 0:
                found.append(error_of(lambda tensor=tensor: dist.send(tensor, 1)))
            elif rank == 1:
                found.append(error_of(lambda tensor=tensor: dist.recv(tensor, 0)))
            found.append(tensor.unique().tolist() == [turn * world])
    return found


@pytest.mark.parametrize("world", [2, 3])
def test_rank_that_leaves_after_its_last_operation_takes_nothing_with_it(run, world, store):
    for rank, found in enumerate(run(world, leave_at_once, world, store)):
        assert [one for one in found if one not in ("nothing", True)] == [], f"rank {rank}"


def missing_rank(rank: int, store: str) -> tuple[str, float]:
    begun = time.monotonic()
    join = dist.init_process_group
    text = error_of(
        lambda: join("iroh", store=dist.FileStore(store, 3), rank=rank, world_size=3, timeout=timedelta(seconds=2))
    )
    return text, time.monotonic() - begun


def test_rank_that_does_not_join_is_named_when_the_timeout_passes(run, store):
    for text, took in run(2, missing_rank, store):  # ranks 0 and 1 of three
        assert "rank 2" in text, text
        assert re.search("did not join within 2", text), text
        assert 1.5 < took < 8, took


def test_world_of_one_needs_neither_iroh_nor_a_network(store):
    (printed,) = values_of(run_ranks(alone_without_library, 1, environment={"TORCH_IROH_LIBRARY": "/absent.so"}))
    assert printed == [2.0]


def alone_without_library(rank: int) -> list[float]:
    with group(rank, 1, dist.HashStore()):
        tensor = torch.tensor([2.0])
        dist.all_reduce(tensor)
        dist.barrier()
    return tensor.tolist()


# ---- groups ----


def subsets(rank: int, store: str) -> list[Any]:
    with group(rank, 3, store):
        outer = dist.new_group([0, 2])
        one = dist.new_group([1])
        turned = dist.new_group([1, 0], use_local_synchronization=True) if rank < 2 else None
        found: list[Any] = []
        if rank != 1:
            tensor = torch.tensor([rank + 1.0])
            dist.all_reduce(tensor, group=outer)
            found.append(tensor.item())
            tensor = torch.tensor([rank])
            dist.broadcast(tensor, src=2, group=outer)  # a rank of the world, rank 1 in the group
            found.append(tensor.item())
            if rank == 2:
                dist.send(torch.tensor([7]), dst=0, group=outer)
            else:
                tensor = torch.zeros(1, dtype=torch.int64)
                found.append((dist.recv(tensor, group=outer), tensor.item()))
            outsider = error_of(lambda: dist.all_reduce(torch.ones(1), group=one))
            found.append(outsider if outsider != "nothing" else "no part in it")
        else:
            tensor = torch.tensor([5.0])
            dist.all_reduce(tensor, group=one)
            found.append(tensor.item())
        if turned is not None:
            parts = [torch.zeros(1) for _ in range(2)]
            dist.all_gather(parts, torch.tensor([float(rank)]), group=turned)
            found.append([part.item() for part in parts])
        dist.barrier()
        return found


@pytest.mark.filterwarnings("ignore")
def test_groups_of_some_ranks(run, store):
    first, second, third = run(3, subsets, store)
    assert first[:3] == [4.0, 2, (2, 7)]
    assert second[0] == 5.0
    assert third[:2] == [4.0, 2]
    assert sorted(first[-1]) == sorted(second[-1]) == [0.0, 1.0]


def many_groups(rank: int, world: int, store: str) -> list[tuple[int, int]]:
    usage: list[tuple[int, int]] = []
    with group(rank, world, store):
        for turn in range(20):
            extra = dist.new_group(pg_options=torch_iroh.Options(algorithm="ring"))
            tensor = torch.full([3000], 1.0)
            dist.all_reduce(tensor, group=extra)
            assert tensor.unique().tolist() == [float(world)]
            dist.destroy_process_group(extra)
            del extra
            gc.collect()
            if turn == 3:
                dist.barrier()
                time.sleep(1.0)
                usage.append((open_files(), threads()))
        dist.barrier()
        usage.append((settled(open_files, usage[0][0]), settled(threads, usage[0][1])))
    return usage


def test_twenty_groups_made_and_destroyed_leak_neither_files_nor_threads(run, store):
    for (files_before, tasks_before), (files, tasks) in run(3, many_groups, 3, store):
        assert files <= files_before, f"{files_before} open files after 4 groups, {files} after 20"
        assert tasks <= tasks_before, f"{tasks_before} threads after 4 groups, {tasks} after 20"


def forty_groups_at_once(rank: int, world: int, store: str) -> list[float]:
    with group(rank, world, store):
        groups = [dist.new_group() for _ in range(20)]
        tensors = [torch.full([2000], float(number)) for number in range(20)]
        works = [dist.all_reduce(tensor, group=one, async_op=True) for tensor, one in zip(tensors, groups, strict=True)]
        for work in works:
            work.wait()
        return [tensor[-1].item() for tensor in tensors]


def test_twenty_groups_at_once_share_one_pair_of_processes(run, store):
    assert run(2, forty_groups_at_once, 2, store) == [[2.0 * number for number in range(20)]] * 2


# ---- training ----


def small_model() -> torch.nn.Module:
    torch.manual_seed(7)
    return torch.nn.Sequential(
        torch.nn.Linear(20, 64), torch.nn.GELU(), torch.nn.Linear(64, 33), torch.nn.Linear(33, 4)
    )


def batch(step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(8, 20, generator=generator), torch.randn(8, 4, generator=generator)


def ddp(rank: int, world: int, backend: str, store: str, static: bool) -> tuple[list[float], torch.Tensor]:
    """Loss of each step, the mean of all ranks, and the parameters in the end."""
    with group(rank, world, store, backend):
        model = torch.nn.parallel.DistributedDataParallel(
            small_model(), bucket_cap_mb=0.005, static_graph=static, gradient_as_bucket_view=static
        )
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        losses = []
        for step in range(10):
            inputs, targets = batch(step, rank)
            loss = torch.nn.functional.mse_loss(model(inputs), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            mean = loss.detach().clone()
            dist.all_reduce(mean)
            losses.append(mean.item() / world)
        # torch 2.13's ~ProcessGroupGloo joins its threads with the GIL held, which one that frees a tensor waits for:
        # without a pause the reference hangs in about one run of fifty.
        time.sleep(0.3 if backend == "gloo" else 0)
        return losses, torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


@pytest.mark.parametrize("static", [False, True], ids=["dynamic", "static_graph"])
def test_ddp_has_gloos_loss_at_every_step(run, static, tmp_path):
    mine = run(2, ddp, 2, "iroh", str(tmp_path / "iroh"), static)
    gloos = run(2, ddp, 2, "gloo", str(tmp_path / "gloo"), static)
    assert torch.equal(mine[0][1], mine[1][1]), "the ranks' parameters differ"
    for step, (loss, reference) in enumerate(zip(mine[0][0], gloos[0][0], strict=True)):
        assert abs(loss - reference) <= 1e-6, f"step {step}: loss {loss}, with gloo {reference}"
    assert mine[0][0][-1] < mine[0][0][0], "it does not learn"
    assert mine[0][0] == mine[1][0]


def fsdp(rank: int, world: int, store: str) -> tuple[list[float], list[torch.Tensor], list[torch.Tensor]]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    with group(rank, world, store):
        mesh = init_device_mesh("cpu", (world,))
        model = small_model()
        for layer in model:
            if isinstance(layer, torch.nn.Linear):
                fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        losses = []
        for step in range(3):
            inputs, targets = batch(step, rank)
            loss = torch.nn.functional.mse_loss(model(inputs), targets)
            optimizer.zero_grad()
            loss.backward()
            gradients = [parameter.grad.full_tensor() for parameter in model.parameters()]
            optimizer.step()
            mean = loss.detach().clone()
            dist.all_reduce(mean, dist.ReduceOp.AVG)
            losses.append(mean.item())
        return losses, gradients, [parameter.full_tensor().detach() for parameter in model.parameters()]


def test_fsdp2_on_cpu_equals_one_process(run, store):
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    reference = []
    for step in range(3):
        parts = [batch(step, rank) for rank in range(2)]
        loss = sum(torch.nn.functional.mse_loss(model(inputs), targets) for inputs, targets in parts) / 2
        optimizer.zero_grad()
        loss.backward()
        gradients = [parameter.grad.clone() for parameter in model.parameters()]
        optimizer.step()
        reference.append(loss.item())
    for rank, (losses, found, parameters) in enumerate(run(2, fsdp, 2, store)):
        assert losses == pytest.approx(reference, abs=1e-6), rank
        for mine, want in zip(found, gradients, strict=True):
            torch.testing.assert_close(mine, want, rtol=1e-5, atol=1e-6)
        for mine, want in zip(parameters, model.parameters(), strict=True):
            torch.testing.assert_close(mine, want.detach(), rtol=1e-5, atol=1e-6)


# ---- statistics ----


def statistics(rank: int, world: int, store: str) -> tuple[Any, Any, str, str]:
    without = error_of(lambda: torch_iroh.stats())
    with group(rank, world, store):
        fresh = torch_iroh.stats()
        meet(store, world)
        for _ in range(3):
            dist.all_reduce(torch.ones(100_000))
        dist.barrier()
        time.sleep(0.2)
        used = torch_iroh.stats(dist.group.WORLD)
        other = dist.new_group(backend="gloo")
        foreign = error_of(lambda: torch_iroh.stats(other))
        dist.barrier()
    return fresh, used, without, foreign


def test_stats_count_what_was_done_and_say_how_peers_are_reached(run, store):
    everyone = run(3, statistics, 3, store)
    for rank, (fresh, used, without, foreign) in enumerate(everyone):
        assert fresh.collectives == 0
        assert fresh.bytes_sent == fresh.bytes_received == 0
        assert [peer.path for peer in fresh.peers] == ["not connected"] * 2
        assert [peer.rtt_ms for peer in fresh.peers] == [None] * 2
        assert used.collectives == 4
        assert 0 < used.busy_seconds < 60
        assert [peer.rank for peer in used.peers] == [peer for peer in range(3) if peer != rank]
        assert used.bytes_sent == sum(peer.bytes_sent for peer in used.peers) > 3 * 400_000
        for peer in used.peers:
            assert re.fullmatch("[0-9a-f]{10}", peer.endpoint_id), peer
            if peer.bytes_sent or peer.bytes_received:
                assert re.fullmatch(r"direct 127\.0\.0\.1:\d+", peer.path), peer
                assert peer.rtt_ms is not None and 0 <= peer.rtt_ms < 1000, peer
            theirs = next(one for one in everyone[peer.rank][1].peers if one.rank == rank)
            assert theirs.bytes_received == peer.bytes_sent, (rank, peer, theirs)
        assert without.startswith("ValueError: there is no default process group"), without
        assert foreign.startswith("ValueError: the group's backend is 'gloo', not \"iroh\""), foreign
        with pytest.raises(AttributeError):  # frozen
            used.collectives = 1


def test_stats_of_a_world_of_one_have_no_peers(run):
    ((stats, *_),) = run(1, lonely_stats)
    assert stats.peers == []
    assert (stats.collectives, stats.bytes_sent, stats.bytes_received) == (1, 0, 0)


def lonely_stats(rank: int) -> tuple[Any]:
    with group(rank, 1, dist.HashStore()):
        dist.all_reduce(torch.ones(3))
        return (torch_iroh.stats(),)


# ---- options ----

ALLOWED = {  # option: (text of what is allowed, wrong values)
    "chunk_bytes": ("1024 to 1048576 bytes", [0, -1, 1023, 1048577, 2**40]),
    "algorithm": ("'auto', 'ring', 'direct'", ["oak", "", "RING"]),
    "plan": ("auto, ring, direct", ["all_reduce=oak", "*=RING"]),
    "probe": ("'auto', 'off'", ["on", ""]),
    "connect": ("'lazy', 'eager'", ["sometimes", ""]),
    "shared_memory": ("'auto', 'buffered', 'off'", ["on", ""]),
    "site": ("up to 100 printable ASCII characters", ["x" * 101, "two\nlines"]),
    "streams": ("1 to 64", [0, -1, 65, 10**6]),
    "peer_timeout": ("0.2 to 3600 seconds", [0, -1.0, 0.1, 3601.0, float("nan"), float("inf")]),
    "heartbeat": ("0.02 to 1200 seconds", [0, -1.0, 0.01, 1201.0, float("nan")]),
    "connect_timeout": ("0.1 to 3600 seconds", [0, -1.0, 0.05, 3601.0, float("nan")]),
    "bind": ("ip:port", ["nonsense", "127.0.0.1", "127.0.0.1:99999", "host.example:1", ":", "127.0.0.1:-1"]),
}
RIGHT = {
    "chunk_bytes": 65536,
    "algorithm": "ring",
    "connect": "eager",
    "shared_memory": "buffered",
    "probe": "off",
    "site": "home",
    "streams": 3,
    "peer_timeout": 2.5,
    "heartbeat": 0.25,
    "connect_timeout": 7.0,
    "bind": "127.0.0.1:0",
}


@pytest.mark.parametrize(("option", "value"), [(key, value) for key, (_, wrong) in ALLOWED.items() for value in wrong])
def test_wrong_option_is_a_value_error_naming_what_is_allowed(option, value):
    with pytest.raises(ValueError, match=f"{option}.*allowed: .*{re.escape(ALLOWED[option][0])}"):
        torch_iroh.Options(**{option: value})


@pytest.mark.parametrize("option", sorted(RIGHT))
def test_option_of_a_wrong_type_is_a_type_error_naming_it(option):
    wrong: Any = object() if isinstance(RIGHT[option], (int, float)) else 3
    with pytest.raises(TypeError, match=option):
        torch_iroh.Options(**{option: wrong})
    if isinstance(RIGHT[option], int):
        with pytest.raises(TypeError, match=option):
            torch_iroh.Options(**{option: 1.5})


def test_heartbeat_longer_than_half_of_the_peer_timeout_is_refused():
    with pytest.raises(ValueError, match=r"heartbeat is 2.* at most half of peer_timeout \(3"):
        torch_iroh.Options(heartbeat=2.0)
    with pytest.raises(ValueError, match=r"heartbeat.*at most half of peer_timeout \(800 ms"):
        torch_iroh.Options(peer_timeout=0.8, heartbeat=0.5)
    assert torch_iroh.Options(peer_timeout=0.8).heartbeat is None  # half of it, by itself
    assert torch_iroh.Options(heartbeat=2.0, peer_timeout=4.0).heartbeat == 2.0


def test_unknown_option_is_a_type_error_that_lists_the_known_ones():
    with pytest.raises(TypeError, match=r"no option 'chunks'; it has: .*algorithm.*chunk_bytes.*streams"):
        torch_iroh.Options(chunks=3)
    with pytest.raises(TypeError):
        torch_iroh.Options(65536)  # keyword only


def test_options_repeat_themselves():
    options = torch_iroh.Options(**RIGHT)
    for name, value in RIGHT.items():
        assert getattr(options, name) == value, name
        assert getattr(torch_iroh.Options(), name) is None, name
        with pytest.raises(AttributeError):
            setattr(options, name, value)
    assert repr(torch_iroh.Options()) == "torch_iroh.Options()"
    assert eval(repr(options), {"torch_iroh": torch_iroh}).bind == "127.0.0.1:0"
    for name, value in RIGHT.items():
        assert f"{name}={value!r}" in repr(options)
    for twin in (copy.deepcopy(options), copy.copy(options), copy.deepcopy({"a": [options]})["a"][0]):
        assert twin is not options
        assert repr(twin) == repr(options)
    assert repr(torch_iroh.Options(streams=None, algorithm=None)) == "torch_iroh.Options()"
    for name in RIGHT:
        assert name in torch_iroh.Options.__doc__ or name in torch_iroh.Options.__init__.__doc__, name


@pytest.mark.parametrize(
    ("variable", "value", "text"),
    [
        ("TORCH_IROH_CHUNK_BYTES", "12", "chunk_bytes.*1024 to 1048576 bytes"),
        ("TORCH_IROH_CHUNK_BYTES", "many", "TORCH_IROH_CHUNK_BYTES is 'many'; allowed: a number"),
        ("TORCH_IROH_CHUNK_BYTES", "65536k", "TORCH_IROH_CHUNK_BYTES is '65536k'; allowed: a number"),
        ("TORCH_IROH_ALGORITHM", "oak", "algorithm.*'auto', 'ring', 'direct', .*'tree', 'butterfly', 'bruck'"),
        ("TORCH_IROH_CONNECT", "never", "connect.*'lazy', 'eager'"),
        ("TORCH_IROH_STREAMS", "0", "streams.*1 to 64"),
        ("TORCH_IROH_STREAMS", "2.5", "TORCH_IROH_STREAMS|streams"),
        ("TORCH_IROH_PEER_TIMEOUT", "3s", "TORCH_IROH_PEER_TIMEOUT is '3s'; allowed: a number"),
        ("TORCH_IROH_HEARTBEAT", "nan", "heartbeat.*0.02 to 1200 seconds"),
        ("TORCH_IROH_HEARTBEAT", "2", "heartbeat.*half of peer_timeout"),
        ("TORCH_IROH_CONNECT_TIMEOUT", "-1", "connect_timeout.*0.1 to 3600 seconds"),
        ("TORCH_IROH_BIND", "nowhere", "bind.*ip:port"),
    ],
)
def test_environment_variables_are_validated_like_options(run, variable, value, text):
    (found,) = run(1, with_variable, variable, value)
    assert found.startswith("ValueError"), found
    assert re.search(text, found), found


def with_variable(rank: int, variable: str, value: str) -> str:
    before = os.environ.get(variable)
    os.environ[variable] = value
    try:
        return error_of(lambda: group(rank, 1, dist.HashStore()).__enter__())
    finally:
        os.environ.pop(variable) if before is None else os.environ.update({variable: before})
        if dist.is_initialized():
            dist.destroy_process_group()


def environment_counts(rank: int, world: int, store: str) -> dict[str, str]:
    """Which values the node runs with shows in what a second group may say."""
    found = {}
    with group(rank, world, store):
        for name, value in {"streams": 5, "peer_timeout": 4.5, "heartbeat": 0.75, "connect_timeout": 6.5}.items():
            for shift in (0, 1):
                made = []

                def second(name: str = name, value: Any = value + shift, made: list[Any] = made) -> None:
                    made.append(dist.new_group(pg_options=torch_iroh.Options(**{name: value})))

                found[f"{name} {shift}"] = error_of(second)
                for one in made:
                    dist.destroy_process_group(one)
        # The algorithm is in the text of a mismatch.
        tensor = torch.ones(3 + rank)
        found["algorithm"] = error_of(lambda: dist.all_reduce(tensor))
    return found


def test_environment_variables_are_honoured(tmp_path):
    environment = {
        "TORCH_IROH_STREAMS": "5",
        "TORCH_IROH_PEER_TIMEOUT": "4.5",
        "TORCH_IROH_HEARTBEAT": "0.75",
        "TORCH_IROH_CONNECT_TIMEOUT": "6.5",
        "TORCH_IROH_ALGORITHM": "ring",
    }
    outcomes = run_ranks(environment_counts, 2, 2, str(tmp_path / "store"), environment=environment)
    for found in values_of(outcomes):
        for name in ("streams", "peer_timeout", "heartbeat", "connect_timeout"):
            assert found[f"{name} 0"] == "nothing", (name, found)
            assert found[f"{name} 1"].startswith("ValueError: streams, heartbeat, peer_timeout, "), (name, found)
            assert "are per process" in found[f"{name} 1"], (name, found)
        assert "[3], ring)" in found["algorithm"] and "[4], ring)" in found["algorithm"], found


def option_beats_environment(rank: int, world: int, store: str) -> str:
    options = torch_iroh.Options(algorithm="direct")
    with group(rank, world, store, pg_options=options):
        assert repr(options) == "torch_iroh.Options(algorithm='direct')"
        return error_of(lambda: dist.all_reduce(torch.ones(3 + rank)))


def test_option_goes_before_the_environment_variable(store):
    outcomes = run_ranks(option_beats_environment, 2, 2, store, environment={"TORCH_IROH_ALGORITHM": "ring"})
    for text in values_of(outcomes):
        assert ", direct)" in text, text


def connect(rank: int, world: int, store: str, how: str) -> list[str]:
    with group(rank, world, store, pg_options=torch_iroh.Options(connect=how)):
        until = time.monotonic() + (5 if how == "eager" else 0.5)
        while time.monotonic() < until:
            paths = [peer.path for peer in torch_iroh.stats().peers]
            if how == "eager" and "not connected" not in paths:
                break
            time.sleep(0.05)
        meet(store, world)
        dist.barrier()
    return paths


@pytest.mark.parametrize("how", ["lazy", "eager"])
def test_eager_groups_connect_before_the_first_operation_and_lazy_ones_do_not(run, how, store):
    for paths in run(3, connect, 3, store, how):
        assert len(paths) == 2
        for path in paths:
            assert (path == "not connected") == (how == "lazy"), paths


def bound(rank: int, world: int, store: str, port: int) -> list[str]:
    options = torch_iroh.Options(bind=f"127.0.0.1:{port}") if rank == 0 else None
    with group(rank, world, store, pg_options=options):
        dist.barrier()
        paths = [peer.path for peer in torch_iroh.stats().peers]
        dist.barrier()
    return paths


def test_bind_decides_where_a_rank_listens(run, store):
    port = free_port()
    _, (path,) = run(2, bound, 2, store, port)
    assert path == f"direct 127.0.0.1:{port}"


def options_of_others(rank: int, store: str) -> list[str]:
    from torch.distributed import ProcessGroupGloo

    found = []
    for wrong in (ProcessGroupGloo._Options(), object(), {"streams": 3}):
        with contextlib.suppress(FileNotFoundError):
            os.remove(store)
        found.append(error_of(lambda wrong=wrong: group(rank, 1, store, pg_options=wrong).__enter__()))
        if dist.is_initialized():
            dist.destroy_process_group()
    return found


def test_options_of_another_backend_are_a_type_error_that_names_the_right_ones(run, store):
    for text in run(1, options_of_others, store)[0]:
        assert re.match(r"TypeError: backend \"iroh\" takes pg_options=torch_iroh\.Options\(\.\.\.\), not \w+", text), (
            text
        )


# ---- the library and the build ----


def library_error(rank: int, patch: str = "") -> str:
    if patch:  # a folder with an iroh package of another kind, or "absent"
        import importlib.util

        if patch == "absent":
            real = importlib.util.find_spec
            importlib.util.find_spec = lambda name, *rest: None if name == "iroh" else real(name, *rest)
        else:
            sys.path.insert(0, patch)
            importlib.invalidate_caches()
    return error_of(lambda: group(0, 2, dist.HashStore(), timeout=timedelta(seconds=3)).__enter__())


def test_library_that_is_not_there_is_named_with_what_to_install():
    (text,) = values_of(run_ranks(library_error, 1, environment={"TORCH_IROH_LIBRARY": "/absent/libiroh_ffi.so"}))
    assert text.startswith("RuntimeError: cannot open the iroh library: "), text
    for part in ("/absent/libiroh_ffi.so", "iroh>=1.2,<1.3", "TORCH_IROH_LIBRARY"):
        assert part in text, text


def test_library_without_irohs_symbols_is_refused_with_the_supported_version():
    libc = ctypes.util.find_library("c")
    assert libc
    (text,) = values_of(run_ranks(library_error, 1, environment={"TORCH_IROH_LIBRARY": libc}))
    assert text.startswith(f"RuntimeError: the iroh library at {libc} (installed version: "), text
    assert re.search(r"does not fit: symbol \w+ is missing\. Supported: iroh 1\.2\.x", text), text


def test_iroh_that_is_not_installed_is_named_with_the_supported_version():
    (text,) = values_of(run_ranks(library_error, 1, "absent"))
    assert text.startswith("RuntimeError: the iroh package is not installed. torch-iroh needs iroh 1.2.x"), text
    assert "pip install 'iroh>=1.2,<1.3'" in text, text


@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler to make a library of another version")
def test_iroh_of_another_version_is_refused_with_both_versions(tmp_path):
    (tmp_path / "iroh").mkdir()
    (tmp_path / "iroh" / "__init__.py").touch()
    (tmp_path / "iroh-9.8.7.dist-info").mkdir()
    (tmp_path / "iroh-9.8.7.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: iroh\nVersion: 9.8.7\n")
    source = "unsigned ffi_iroh_ffi_uniffi_contract_version(void) { return 4711; }"
    made = ["cc", "-shared", "-fPIC", "-x", "c", "-", "-o", str(tmp_path / "iroh" / "libiroh_ffi.so")]
    subprocess.run(made, input=source, text=True, check=True, timeout=60)
    (text,) = values_of(run_ranks(library_error, 1, str(tmp_path)))
    assert text.startswith("RuntimeError: the iroh library at "), text
    for part in ("installed version: 9.8.7", "contract version is 4711", "Supported: iroh 1.2.x", "iroh>=1.2,<1.3"):
        assert part in text, text


def test_module_built_for_another_torch_says_both_versions(monkeypatch):
    built = _native.torch_module().built_for_torch
    assert built.split(".")[:2] == torch.__version__.split(".")[:2]
    monkeypatch.setattr(torch, "__version__", "2.99.1+cpu")
    text = rf"built for torch {re.escape(built)}, found torch 2\.99\.1\+cpu.*pip install --no-build-isolation"
    with pytest.raises(ImportError, match=text):
        _native.torch_module()
    patch_release = ".".join([*built.split("+")[0].split(".")[:2], "77"])
    monkeypatch.setattr(torch, "__version__", patch_release)
    _native.torch_module()  # c10d keeps its ABI within a minor version


def test_native_module_that_is_not_built_says_how_to_build_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch_iroh._C", None)
    with pytest.raises(
        ImportError, match=r"native module _C cannot be loaded.*pip install --no-build-isolation.*found"
    ):
        _native.torch_module()


# ---- fork ----

FORKING = r"""
import gc
import os
import sys
import time
import torch
import torch.distributed as dist
import torch.multiprocessing as processes
import torch_iroh

def text_of(call):
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}".splitlines()[0]
    return "nothing"

def say(key, text):  # one write, so that lines of two ranks cannot mix
    os.write(1, f"{key} {text}\n".encode())

def child(rank):
    say("use", text_of(lambda: dist.all_reduce(torch.ones(3))))
    say("send", text_of(lambda: dist.send(torch.ones(3), 1 - rank)))
    say("stats", text_of(lambda: torch_iroh.stats()))
    say("destroy", text_of(dist.destroy_process_group))
    again = lambda: dist.init_process_group("iroh", store=dist.HashStore(), rank=0, world_size=2)
    say("again", text_of(again))
    gc.collect()
    sys.exit(0)  # through the interpreter's whole end

def work(rank, store):
    dist.init_process_group("iroh", store=dist.FileStore(store, 2), rank=rank, world_size=2)
    dist.all_reduce(torch.ones(100_000))
    pending = dist.all_reduce(torch.ones(100_000), async_op=True)
    pid = os.fork()
    if pid == 0:
        child(rank)
    _, status = os.waitpid(pid, 0)
    say("status", status)
    pending.wait()
    for _ in range(20):  # longer than the others would wait for a silent peer
        tensor = torch.full([100_000], rank + 1.0)
        dist.all_reduce(tensor)
        assert tensor.unique().tolist() == [3.0]
        time.sleep(0.1)
    say("parent", "went on")
    dist.destroy_process_group()

if __name__ == "__main__":
    processes.start_processes(work, args=(sys.argv[1],), nprocs=2, start_method="spawn")
"""


def test_forked_child_gets_an_error_exits_cleanly_and_leaves_the_parent_alone(tmp_path):
    program = tmp_path / "forking.py"
    program.write_text(FORKING)
    done = subprocess.run(
        [sys.executable, str(program), str(tmp_path / "store")],
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
        env={**os.environ, **ENVIRONMENT, "TORCH_IROH_PEER_TIMEOUT": "1", "TORCH_IROH_HEARTBEAT": "0.2"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found: dict[str, list[str]] = {}
    for line in done.stdout.splitlines():
        key, _, text = line.partition(" ")
        found.setdefault(key, []).append(text)
    assert found["status"] == ["0", "0"], done.stdout + done.stderr
    assert found["parent"] == ["went on", "went on"], done.stdout
    for key in ("use", "send", "stats"):
        for text in found[key]:
            assert text.startswith("RuntimeError: ") and "forked" in text, (key, text)
    assert found["destroy"] == ["nothing", "nothing"], found
    for text in found["again"]:
        assert text.startswith("RuntimeError: ") and "fork" in text, text


# ---- refusals ----


def strange_tensors() -> dict[str, torch.Tensor]:
    return {
        "sparse": torch.eye(3).to_sparse(),
        "sparse_csr": torch.eye(3).to_sparse_csr(),
        "meta": torch.empty(3, device="meta"),
        "quint8": torch.quantize_per_tensor(torch.ones(3), 1.0, 0, torch.quint8),
        "float4": torch.empty(3, dtype=torch.float4_e2m1fn_x2),
        "complex32": torch.zeros(3, dtype=torch.complex32),
    }


def refusals(rank: int, world: int, store: str) -> dict[str, str]:
    found = {}
    with group(rank, world, store):
        backend = dist.group.WORLD._get_backend(torch.device("cpu"))
        for kind, tensor in strange_tensors().items():
            calls: dict[str, Callable[[], Any]] = {
                "backend.allreduce": lambda t=tensor: backend.allreduce([t]),
                "backend.broadcast": lambda t=tensor: backend.broadcast([t]),
                "backend.allgather": lambda t=tensor: backend.allgather([[t, t]], [t]),
                "backend.gather": lambda t=tensor: backend.gather([[t, t]] if rank == 0 else [], [t]),
                "backend.scatter": lambda t=tensor: backend.scatter([t], [[t, t]] if rank == 0 else []),
                "backend.reduce_scatter": lambda t=tensor: backend.reduce_scatter([t], [[t, t]]),
                "backend.alltoall": lambda t=tensor: backend.alltoall([t, t], [t, t]),
                "backend.send": lambda t=tensor: backend.send([t], 1 - rank, 0),
                "backend.recv": lambda t=tensor: backend.recv([t], 1 - rank, 0),
            }
            # Other layouts have no kernel in torch's dispatcher, which on meta tensors does nothing; and it shows
            # complex32 to a backend as float16.
            if kind == "sparse":
                del calls["backend.allreduce"]  # the one operation that takes it
            if kind == "float4":
                calls["all_reduce"] = lambda t=tensor: dist.all_reduce(t)
                calls["broadcast"] = lambda t=tensor: dist.broadcast(t, 0)
                calls["send"] = lambda t=tensor: dist.send(t, 1 - rank)
            for name, call in calls.items():
                found[f"{name} {kind}"] = error_of(call)
        dist.barrier()  # the group is as good as before
    return found


def test_tensors_that_cannot_be_moved_raise_runtime_error(run, store):
    for found in run(2, refusals, 2, store):
        wrong = {label: text for label, text in found.items() if not text.startswith("RuntimeError: ")}
        assert not wrong, "\n".join(f"{label}: {text}" for label, text in wrong.items())


def wrong_arguments(rank: int, world: int, store: str) -> dict[str, str]:
    ones = torch.ones(4)
    lists = [torch.ones(4) for _ in range(world)]
    calls: dict[str, Callable[[], Any]] = {
        "broadcast root 2": lambda: dist.broadcast(ones, 2),
        "broadcast root -1": lambda: dist.broadcast(ones, -1),
        "reduce root 7": lambda: dist.reduce(ones, 7),
        "gather root 2": lambda: dist.gather(ones, None, dst=2),
        "scatter root 2": lambda: dist.scatter(ones, None, src=2),
        "send to 2": lambda: dist.send(ones, 2),
        "send to itself": lambda: dist.send(ones, rank),
        "send tag -1": lambda: dist.send(ones, 1 - rank, tag=-1),
        "recv from 2": lambda: dist.recv(ones, 2),
        "all_gather list of 1": lambda: dist.all_gather(lists[:1], ones),
        "all_gather list of 3": lambda: dist.all_gather([*lists, ones], ones),
        "all_gather own size": lambda: dist.all_gather([torch.ones(3) for _ in lists], ones),
        "all_gather dtypes": lambda: dist.all_gather([one.double() for one in lists], ones),
        "all_gather_into_tensor size": lambda: dist.all_gather_into_tensor(torch.ones(9), ones),
        "all_gather_into_tensor dtypes": lambda: dist.all_gather_into_tensor(torch.ones(8).int(), ones),
        "reduce_scatter list": lambda: dist.reduce_scatter(ones, lists[:1]),
        "reduce_scatter size": lambda: dist.reduce_scatter(torch.ones(3), lists),
        "reduce_scatter_tensor size": lambda: dist.reduce_scatter_tensor(ones, torch.ones(7)),
        "reduce_scatter_tensor dtypes": lambda: dist.reduce_scatter_tensor(ones, torch.ones(8).int()),
        "gather list": lambda: dist.gather(ones, lists[:1] if rank == 0 else lists, dst=0),
        "scatter list": lambda: dist.scatter(ones, lists[:1] if rank == 0 else lists, src=0),
        "scatter uneven": lambda: dist.scatter(ones, [ones, torch.ones(3)] if rank == 0 else lists, src=0),
        "all_to_all list": lambda: dist.all_to_all(lists[:1], lists[:1]),
        "all_to_all dtypes": lambda: dist.all_to_all(lists, [one.double() for one in lists]),
        "all_to_all_single odd": lambda: dist.all_to_all_single(torch.ones(3), torch.ones(3)),
        "all_to_all_single splits": lambda: dist.all_to_all_single(ones, ones, [1, 2], [2, 2]),
        "all_to_all_single three splits": lambda: dist.all_to_all_single(ones, ones, [2, 1, 1], [2, 2]),
        "all_to_all_single negative": lambda: dist.all_to_all_single(ones, ones, [5, -1], [2, 2]),
    }
    with group(rank, world, store):
        found = {name: error_of(call) for name, call in calls.items()}
        tensor = torch.ones(4)
        dist.all_reduce(tensor)  # refused before anything was sent
        found["afterwards"] = str(tensor.tolist())
    return found


def test_wrong_roots_lists_splits_and_dtypes_are_refused_before_anything_is_sent(run, store):
    for found in run(2, wrong_arguments, 2, store):
        assert found.pop("afterwards") == "[2.0, 2.0, 2.0, 2.0]"
        wrong = {}
        for name, text in found.items():
            # Some are refused by torch itself, before the backend is asked.
            if not re.match("RuntimeError: ProcessGroupIroh::|(TypeError|ValueError): ", text):
                wrong[name] = text
        assert not wrong, "\n".join(f"{name}: {text}" for name, text in wrong.items())


def all_to_all_own_size(rank: int, world: int, store: str) -> tuple[str, str]:
    with group(rank, world, store):
        text = error_of(lambda: dist.all_to_all([torch.ones(4), torch.ones(4)], [torch.ones(3), torch.ones(3)]))
        return text, error_of(dist.barrier)


def test_all_to_all_whose_own_block_has_two_sizes_is_refused_and_does_no_harm(run, store):
    for text, afterwards in run(2, all_to_all_own_size, 2, store):
        assert text.startswith("RuntimeError: ProcessGroupIroh::"), text
        assert afterwards == "nothing", afterwards


def mismatch(rank: int, world: int, store: str, which: str) -> str:
    first = rank == 0

    def gathered(count: int) -> None:
        dist.all_gather_into_tensor(torch.ones(count * world), torch.ones(count))

    calls: dict[str, Callable[[], Any]] = {
        "size": lambda: dist.all_reduce(torch.ones(3 if first else 4)),
        "dtype": lambda: dist.all_reduce(torch.ones(3, dtype=torch.float32 if first else torch.int32)),
        "op": lambda: dist.all_reduce(torch.ones(3), dist.ReduceOp.SUM if first else dist.ReduceOp.MAX),
        "call": lambda: dist.all_reduce(torch.ones(3)) if first else dist.broadcast(torch.ones(3), 0),
        "root": lambda: dist.broadcast(torch.ones(3), 0 if first else 1),
        "gathered size": lambda: gathered(3 if first else 4),
        "message size": lambda: dist.send(torch.ones(3), 1) if first else dist.recv(torch.ones(4), 0),
    }

    def call_and_go_on() -> None:
        calls[which]()
        dist.barrier()  # a rank that only sends hears of it here at the latest

    with group(rank, world, store):
        return error_of(call_and_go_on)


MISMATCHES = {
    "size": ("float32[3]", "float32[4]"),
    "dtype": ("float32[3]", "int32[3]"),
    "op": ("all_reduce(sum,", "all_reduce(max,"),
    "call": ("all_reduce(", "broadcast("),
    "root": ("root 0", "root 1"),
    "gathered size": ("float32[3]", "float32[4]"),
    "message size": ("3 elements", "4 elements"),
}


@pytest.mark.parametrize("which", sorted(MISMATCHES))
def test_ranks_that_call_different_things_hear_both(run, which, store):
    for rank, text in enumerate(run(2, mismatch, 2, store, which)):
        assert text.startswith("DistBackendError: "), (rank, text)
        for part in MISMATCHES[which]:
            assert part in text, (rank, text)


def test_remote_errors_are_readable():
    """The helper itself: an exception that cannot be pickled comes back as text."""
    (outcome,) = run_ranks(raise_unpicklable, 1)
    assert isinstance(outcome.error, RemoteError)
    assert "Local: of no use elsewhere" in str(outcome.error)


def raise_unpicklable(rank: int) -> None:
    class Local(Exception):
        pass

    raise Local("of no use elsewhere")
