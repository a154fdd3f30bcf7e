"""Backend "iroh" as a program meets it: how it is found and started, its groups, training and statistics.

What the collectives compute is test_collectives.py's matter; what happens when a rank dies, test_failures.py's.
"""

from __future__ import annotations

import gc
import os
import re
import subprocess
import sys
import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from programs import TIMEOUT, error_of, free_port, group, meet, open_files, python, settled, threads
from ranks import ENVIRONMENT, run_ranks, values_of

import torch_iroh

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
