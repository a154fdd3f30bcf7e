"""What is special about ranks that share memory: who does, what they leave behind, and callers that drive themselves.

That collectives are right and failures are named is tested on both roads: test_collectives.py,
test_failures.py and others.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from families import Attempt, attempt, destroy, join, join_and_sum, sum_is_exact
from ranks import Ranks, values_of
from torch.nn.parallel import DistributedDataParallel

import torch_iroh

pytestmark = pytest.mark.skipif(not os.path.exists("/proc/self/ns/pid"), reason="shared memory needs Linux")

MEMFD_SECRET = 447  # the number of the system call, on every architecture
BIG = 16 << 20  # float32 elements: 64 MiB


def join_shared(rank: int, world: int, store: str, timeout: float = 30.0, **options: Any) -> None:
    join(rank, world, store, timeout, **{"shared_memory": "auto", **options})


def paths() -> set[str]:
    return {peer.path for peer in torch_iroh.stats().peers}


def road_of(rank: int, world: int, store: str, wishes: list[str]) -> set[str]:
    join_shared(rank, world, store, shared_memory=wishes[rank])
    assert sum_is_exact(rank, range(world))
    found = paths()
    dist.destroy_process_group()
    return found


@pytest.mark.parametrize(
    ("wishes", "shared"),
    [(["auto"] * 3, True), (["auto", "single_copy", "auto"], True), (["auto", "off", "auto"], False)],
    ids=["all", "one_single_copy", "one_off"],
)
def test_ranks_share_memory_when_all_of_them_want_to(tmp_path: Path, wishes: list[str], shared: bool):
    with Ranks(3) as ranks:
        for found in ranks.run(road_of, 3, str(tmp_path / "store"), wishes):
            assert (found == {"shared memory"}) == shared, found


def other_namespace(rank: int, store: str) -> set[str]:
    if rank == 1:
        _unshare_ipc()
    return road_of(rank, 2, store, ["auto", "auto"])


def _unshare_ipc() -> None:
    clone_newipc = 0x08000000
    if ctypes.CDLL(None, use_errno=True).unshare(clone_newipc) != 0:
        raise OSError(ctypes.get_errno(), "unshare")


@pytest.mark.skipif(os.geteuid() != 0, reason="making a namespace needs root")
def test_ranks_in_different_namespaces_use_iroh(tmp_path: Path):
    with Ranks(2) as ranks:
        for found in ranks.run(other_namespace, str(tmp_path / "store")):
            assert found != {"shared memory"}


def held() -> tuple[int, int]:
    """Open descriptors and mappings of shared memory of this process's groups."""
    descriptors = 0
    for entry in os.scandir("/proc/self/fd"):
        try:
            descriptors += "torch-iroh-group" in os.readlink(entry.path) or "pidfd" in os.readlink(entry.path)
        except FileNotFoundError:
            continue
    return descriptors, Path("/proc/self/maps").read_text().count("torch-iroh-group")


def make_many(rank: int, world: int, store: str, count: int) -> tuple[int, int]:
    join_shared(rank, world, store)
    options = torch_iroh.Options(shared_memory="auto")
    for _ in range(count):
        group = dist.new_group(pg_options=options, timeout=timedelta(seconds=30))
        tensor = torch.ones(100)
        dist.all_reduce(tensor, group=group)
        assert tensor[0] == world
        dist.destroy_process_group(group)
    dist.destroy_process_group()
    return held_in_the_end()


def held_in_the_end() -> tuple[int, int]:
    """`held()`, after up to 5 s: the thread that works for groups may hold the last of one a moment longer."""
    deadline = time.monotonic() + 5
    while held() != (0, 0) and time.monotonic() < deadline:
        time.sleep(0.05)
    return held()


def test_groups_that_end_leave_no_descriptor_and_no_mapping(tmp_path: Path):
    with Ranks(2) as ranks:
        assert ranks.run(make_many, 2, str(tmp_path / "store"), 100, deadline=90) == [(0, 0)] * 2


def loop(rank: int, world: int, store: str, how: str) -> tuple[Attempt, Attempt, tuple[int, int]]:
    join_shared(rank, world, store, shared_memory=how)
    tensor = torch.ones(BIG)

    def forever() -> None:
        while True:
            dist.all_reduce(tensor)

    Path(f"{store}-{rank}").touch()
    broken = attempt(forever)
    return broken, destroy(), held_in_the_end()


@pytest.mark.parametrize("how", ["auto", "single_copy"])
def test_rank_killed_inside_a_collective_is_named_and_leaves_nothing_in_dev_shm(tmp_path: Path, how: str):
    before = sorted(os.listdir("/dev/shm"))
    store = str(tmp_path / "store")
    with Ranks(3) as ranks:
        ranks.start(loop, 3, store, how)
        by = time.monotonic() + 30
        while not all(Path(f"{store}-{rank}").exists() for rank in range(3)) and time.monotonic() < by:
            time.sleep(0.05)
        time.sleep(0.5)
        ranks.kill(1)
        killed = time.monotonic()
        outcomes = ranks.collect(30)
    for rank in (0, 2):
        broken, destroyed, left = values_of([outcomes[rank]])[0]
        assert "rank 1 is gone" in broken.error, broken
        assert broken.at - killed < 5.0, broken.at - killed
        assert not destroyed.error and destroyed.took < 1.0, destroyed
        assert left == (0, 0)
        print(f"rank {rank}: told after {broken.at - killed:.3f} s")
    assert sorted(os.listdir("/dev/shm")) == before


def drive_from_two_threads(rank: int, world: int, store: str) -> bool:
    """Two groups, each used by its own thread, in opposite orders on the ranks: neither waits for the other."""
    join_shared(rank, world, store)
    options = torch_iroh.Options(shared_memory="auto")
    groups = [dist.new_group(pg_options=options, timeout=timedelta(seconds=30)) for _ in range(2)]
    right = []

    def work(group: dist.ProcessGroup, base: int) -> None:
        for turn in range(200):
            tensor = torch.full((1 + turn * 37,), float(base + rank))
            dist.all_reduce(tensor, group=group)
            right.append(bool(torch.all(tensor == world * base + world * (world - 1) / 2)))

    threads = [threading.Thread(target=work, args=(groups[i], 10 * i)) for i in (0, 1)]
    for thread in threads if rank == 0 else reversed(threads):
        thread.start()
    works = [dist.all_reduce(torch.ones(1000), async_op=True) for _ in range(50)]
    for thread in threads:
        thread.join()
    for one in works:
        one.wait()
    dist.destroy_process_group()
    return len(right) == 400 and all(right)


@pytest.mark.parametrize("world", [2, 3])
def test_two_threads_and_async_operations_at_once(tmp_path: Path, world: int):
    with Ranks(world) as ranks:
        assert ranks.run(drive_from_two_threads, world, str(tmp_path / "store"), deadline=60) == [True] * world


def losses(rank: int, world: int, shared_memory: str, store: str) -> list[float]:
    join_shared(rank, world, store, shared_memory=shared_memory)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(50, 300), torch.nn.Tanh(), torch.nn.Linear(300, 10))
    wrapped = DistributedDataParallel(model, bucket_cap_mb=0.02)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    found = []
    for step in range(10):
        generator = torch.Generator().manual_seed(1000 * step + rank)
        inputs = torch.randn(16, 50, generator=generator)
        loss = wrapped(inputs).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    assert (paths() == {"shared memory"}) == (shared_memory == "auto")
    dist.destroy_process_group()
    return found


@pytest.mark.parametrize("world", [2, 3])
def test_ddp_over_shared_memory_trains_as_over_iroh(tmp_path: Path, world: int):
    # Not beside gloo: destroyed by the collector, its group now and then waits for its thread, which waits for the GIL.
    with Ranks(world) as ranks:
        shared = ranks.run(losses, world, "auto", str(tmp_path / "shared"))
        sent = ranks.run(losses, world, "off", str(tmp_path / "sent"))
    for mine, other in zip(shared, sent, strict=True):
        assert mine == pytest.approx(other, rel=1e-6)


def wake_late(rank: int, world: int, store: str) -> float:
    """CPU seconds that a rank spends waiting 2 s for another."""
    join_and_sum(rank, world, store, shared_memory="auto")
    if rank == 1:
        time.sleep(2)
    before = time.process_time()
    dist.barrier()
    spent = time.process_time() - before
    dist.destroy_process_group()
    return spent


def test_a_rank_that_waits_does_not_spin(tmp_path: Path):
    with Ranks(2) as ranks:
        spent = ranks.run(wake_late, 2, str(tmp_path / "store"))
    assert spent[0] < 0.1, spent


# ---- memory that other processes cannot read, as the pinned memory of a device may be ----


def secret_tensor(values: torch.Tensor) -> torch.Tensor:
    """`values` in memory that process_vm_readv is refused (memfd_secret, Linux 5.14). Raises OSError without it."""
    descriptor = ctypes.CDLL(None, use_errno=True).syscall(MEMFD_SECRET, 0)
    if descriptor < 0:
        raise OSError(ctypes.get_errno(), "memfd_secret")
    size = max(1, values.numel() * values.element_size())
    os.ftruncate(descriptor, size)
    memory = mmap.mmap(descriptor, size)
    os.close(descriptor)
    tensor = torch.frombuffer(memory, dtype=values.dtype, count=values.numel())
    return tensor.copy_(values)


def collectives_on_secret_memory(rank: int, world: int, store: str, secretive: list[int]) -> list[str]:
    join_shared(rank, world, store, shared_memory="single_copy")
    place = secret_tensor if rank in secretive else torch.clone
    count = 300_007  # beyond what goes through windows

    def numbers(of: int, size: int) -> torch.Tensor:
        return torch.arange(size, dtype=torch.float32) % 1000 + of

    wrong = []

    def expect(name: str, got: torch.Tensor, want: torch.Tensor) -> None:
        if not torch.equal(got, want):
            wrong.append(name)

    total = sum(numbers(of, count) for of in range(world))
    tensor = place(numbers(rank, count))
    dist.all_reduce(tensor)
    expect("all_reduce", tensor, total)
    tensor = place(numbers(rank, count))
    dist.broadcast(tensor, 1)
    expect("broadcast", tensor, numbers(1, count))
    tensor = place(numbers(rank, count))
    dist.reduce(tensor, 1)
    expect("reduce", tensor, total if rank == 1 else numbers(rank, count))
    gathered = place(torch.zeros(world * count))
    dist.all_gather_into_tensor(gathered, place(numbers(rank, count)))
    expect("all_gather", gathered, torch.cat([numbers(of, count) for of in range(world)]))
    shard = place(torch.zeros(count))
    dist.reduce_scatter_tensor(shard, place(numbers(rank, world * count)))
    whole = sum(numbers(of, world * count) for of in range(world))
    expect("reduce_scatter", shard, whole[rank * count : (rank + 1) * count])
    exchanged = place(torch.zeros(world * count))
    dist.all_to_all_single(exchanged, place(numbers(rank, world * count)))
    mine = slice(rank * count, (rank + 1) * count)
    expect("all_to_all", exchanged, torch.cat([numbers(of, world * count)[mine] for of in range(world)]))
    dist.destroy_process_group()
    return wrong


@pytest.mark.parametrize("secretive", [[0], [0, 1, 2]], ids=["one", "all"])
def test_tensors_that_other_processes_cannot_read_are_shown_as_copies(tmp_path: Path, secretive: list[int]):
    try:
        secret_tensor(torch.ones(1))
    except OSError as error:
        pytest.skip(f"this kernel has no secret memory: {error}")
    with Ranks(3) as ranks:
        assert ranks.run(collectives_on_secret_memory, 3, str(tmp_path / "store"), secretive) == [[]] * 3
