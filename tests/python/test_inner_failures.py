"""How a group with a backend of torch inside each host breaks, and the option that chooses the backend.

gloo inside, on hosts that are namespaces (hosts.py).
"""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import hosts
import pytest
import torch
import torch.distributed as dist
from families import Attempt, attempt, destroy, join
from hosts import DEADLINE, EVEN, on_hosts
from ranks import RankDied, values_of
from torch.distributed import ReduceOp

import torch_iroh

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module", autouse=True)
def _namespaces() -> None:
    if why := hosts.obstacle():
        pytest.skip(why)


# ---- failures ----


def sum_until_it_fails(rank: int, world: int, store: str, count: int) -> Attempt:
    join(rank, world, store, inner="gloo")
    dist.all_reduce(torch.ones(count))
    Path(f"{store}.ready{rank}").touch()
    tensor = torch.ones(count)
    return attempt(*[lambda: dist.all_reduce(tensor, op=ReduceOp.MAX)] * 1_000_000)


def idle_until_killed(rank: int, world: int, store: str, count: int) -> Attempt:
    """The others begin an operation; this rank never does, and dies meanwhile."""
    join(rank, world, store, inner="gloo")
    dist.all_reduce(torch.ones(count))
    Path(f"{store}.ready{rank}").touch()
    time.sleep(1000)
    raise AssertionError("still alive")


@pytest.mark.parametrize("victim", [0, 3])
@pytest.mark.parametrize("layout", ["2x2", "2+1 of 4"])
@pytest.mark.parametrize("state", ["busy", "idle"])
def test_a_killed_rank_is_named_to_all_within_5_s(store: str, layout: str, victim: int, state: str):
    host_of = EVEN if layout == "2x2" else [0, 1, 1, 1]
    with on_hosts(host_of) as ranks:
        others = [rank for rank in range(4) if rank != victim]
        ranks.start(sum_until_it_fails, 4, store, 65_537, only=others)
        ranks.start(sum_until_it_fails if state == "busy" else idle_until_killed, 4, store, 65_537, only=[victim])
        until = time.monotonic() + 40
        while not all(Path(f"{store}.ready{rank}").exists() for rank in range(4)):
            assert time.monotonic() < until, "the ranks did not start"
            time.sleep(0.02)
        time.sleep(0.3)
        killed = time.monotonic()
        ranks.kill(victim)
        outcomes = ranks.collect(40)
    assert isinstance(outcomes[victim].error, RankDied)
    for rank in others:
        found = outcomes[rank].value
        print(f"rank {rank} after {found.at - killed:.1f} s: {found.error}")
        assert f"rank {victim} is gone" in found.error
        assert found.at - killed < 5


def leave_after_failure(rank: int) -> Attempt:
    # Also what is called on a group that was destroyed fails, and does not hang.
    group = dist.group.WORLD
    destroyed = destroy()
    again = attempt(lambda: group.allreduce([torch.ones(1009)]).wait())  # type: ignore[union-attr]
    assert "destroyed" in again.error or "gone" in again.error, again.error
    return destroyed


def test_a_stopped_rank_is_named_and_holds_nobody_up(store: str):
    with on_hosts(EVEN) as ranks:
        ranks.start(sum_until_it_fails, 4, store, 65_537)
        until = time.monotonic() + 40
        while not all(Path(f"{store}.ready{rank}").exists() for rank in range(4)):
            assert time.monotonic() < until, "the ranks did not start"
            time.sleep(0.02)
        time.sleep(0.2)
        stopped = time.monotonic()
        ranks.kill(1, signal.SIGSTOP)
        for outcome in ranks.collect(40, only=[0, 2, 3]):
            assert "rank 1 is gone" in outcome.value.error
            assert outcome.value.at - stopped < 5
        # gloo waits for the stopped rank until its own timeout; nobody waits for gloo.
        ranks.start(leave_after_failure, only=[0, 2, 3])
        for outcome in ranks.collect(40, only=[0, 2, 3]):
            assert outcome.ok, outcome.text()
            assert outcome.value.took < 10
        ranks.kill(1)


def stop_in_the_middle(rank: int, world: int, store: str) -> tuple[Attempt, Attempt, Attempt]:
    """Rank 1 never calls; a short timeout ends the others, and the group stays broken with its first cause."""
    join(rank, world, store, inner="gloo", timeout=20)
    dist.all_reduce(torch.ones(1009))
    if rank == 1:
        time.sleep(4)
        return attempt(), attempt(lambda: dist.all_reduce(torch.ones(3))), destroy()
    options = dist.AllreduceOptions()
    options.timeout = timedelta(seconds=1.5)
    first = attempt(lambda: dist.group.WORLD.allreduce([torch.ones(1009)], options).wait())  # type: ignore[union-attr]
    second = attempt(lambda: dist.all_reduce(torch.ones(1009)))
    return first, second, destroy()


def test_a_rank_that_does_not_call_is_named_when_the_time_is_up(store: str):
    with on_hosts(EVEN) as ranks:
        found = ranks.run(stop_in_the_middle, 4, store, deadline=DEADLINE)
    print("\n".join(first.error for first, _, _ in found))
    for rank in (0, 2, 3):
        first, second, left = found[rank]
        # Known on its host first: the other one does not blame rank 0, which waits as it does.
        assert "Timed out waiting 1500ms on rank 0; still waiting for rank 1" in first.error and first.took < 4
        assert second.error and second.took < 1
        assert left.took < 10
    assert found[1][1].error, "the late rank hears that the group is broken"
    assert "rank 1" in found[0][0].error and "never began this operation" in found[0][0].error


def waits_shortly(rank: int, world: int, store: str) -> tuple[Attempt, Attempt]:
    """Rank 1 never calls; rank 0 waits for a moment only, and the others for a future."""
    join(rank, world, store, inner="gloo", timeout=30)
    if rank == 1:
        time.sleep(3)
        return attempt(), destroy()
    work = dist.all_reduce(torch.ones(1009), async_op=True)
    if rank == 0:
        time.sleep(0.3)
        return attempt(lambda: work.wait(timedelta(seconds=0.2))), destroy()
    return attempt(work.get_future().wait), destroy()


def test_a_wait_that_ends_early_breaks_the_group_and_futures_tell(store: str):
    with on_hosts(EVEN) as ranks:
        found = ranks.run(waits_shortly, 4, store, deadline=DEADLINE)
    assert "wait(200 ms) timed out on rank 0" in found[0][0].error
    for rank in (2, 3):
        assert "wait(200 ms) timed out on rank 0" in found[rank][0].error
        assert found[rank][0].took < 10


def call_differently(rank: int, world: int, store: str, odd: int, how: str) -> Attempt:
    join(rank, world, store, inner="gloo", timeout=30)
    tensor = torch.ones(1009)
    calls: dict[str, Callable[[], Any]] = {
        "broadcast": lambda: dist.broadcast(tensor, src=0),
        "shape": lambda: dist.all_reduce(torch.ones(5000)),
        "dtype": lambda: dist.all_reduce(torch.ones(1009, dtype=torch.int64)),
        "uncovered": lambda: dist.all_reduce(torch.ones(1009, dtype=torch.int16)),
    }
    # A rank may hear of it while it is still in the first.
    found = attempt(
        lambda: dist.all_reduce(torch.ones(7)), calls[how] if rank == odd else lambda: dist.all_reduce(tensor)
    )
    destroy()
    return found


@pytest.mark.parametrize("how", ["broadcast", "shape", "dtype", "uncovered"])
def test_different_calls_inside_a_host_are_an_error_that_names_both(store: str, how: str):
    with on_hosts(EVEN) as ranks:
        found = ranks.run(call_differently, 4, store, 1, how, deadline=DEADLINE)
    print(found[0].error)
    for one in found:
        assert "the ranks disagree about" in one.error
        assert "all_reduce(sum, float32[1009]" in one.error
        assert one.took < 10


def different_by_host(rank: int, world: int, store: str) -> Attempt:
    join(rank, world, store, inner="gloo", timeout=30)
    count = 1000 + rank // 2  # alike inside each host
    found = attempt(lambda: dist.all_reduce(torch.ones(count)))
    destroy()
    return found


def test_different_calls_of_two_hosts_are_an_error_that_names_both(store: str):
    with on_hosts(EVEN) as ranks:
        found = ranks.run(different_by_host, 4, store, deadline=DEADLINE)
    for one in found:
        assert "float32[1000]" in one.error and "float32[1001]" in one.error
        assert one.took < 10


def abort_in_flight(rank: int, world: int, store: str) -> tuple[Attempt, float]:
    join(rank, world, store, inner="gloo", timeout=60)
    dist.all_reduce(torch.ones(1009))
    if rank == 1:  # the others wait for it
        time.sleep(1)
        dist.distributed_c10d._abort_process_group()
        return attempt(), 0.0
    work = [dist.all_reduce(torch.ones(1009), async_op=True) for _ in range(3)]
    found = attempt(*[one.wait for one in work])
    begun = time.monotonic()
    destroy()
    return found, time.monotonic() - begun


def test_an_abort_ends_what_every_rank_has_in_flight(store: str):
    with on_hosts(EVEN) as ranks:
        found = ranks.run(abort_in_flight, 4, store, deadline=DEADLINE)
    for rank in (0, 2, 3):
        assert "aborted on rank 1" in found[rank][0].error
        assert found[rank][1] < 10


def leave_one_by_one(rank: int, world: int, store: str) -> bool:
    join(rank, world, store, inner="gloo")
    tensor = torch.full((65_537,), float(rank))
    dist.all_reduce(tensor)
    time.sleep(0.2 * rank)
    dist.destroy_process_group()
    return bool(torch.all(tensor == sum(range(world))))


def test_ranks_that_leave_one_by_one_disturb_nobody(store: str):
    with on_hosts(EVEN) as ranks:
        ranks.start(leave_one_by_one, 4, store)
        assert values_of(ranks.collect(DEADLINE)) == [True] * 4
        assert all("gone" not in ranks.output(rank) for rank in range(4))


SCRIPT = """
import sys
import torch, torch.distributed as dist
import hosts, families
rank = int(sys.argv[1])
hosts.move_to(int(sys.argv[2]))
families.join(rank, 4, sys.argv[3], inner="gloo")
tensor = torch.ones(65_537)
dist.all_reduce(tensor)
dist.barrier()
print(tensor.sum().item())
"""


def test_a_program_may_end_without_destroying_its_group(store: str):
    folder = Path(__file__).parent
    with hosts.hosts(2) as ids:
        command = [sys.executable, "-c", SCRIPT]
        started = [
            subprocess.Popen(
                [*command, str(rank), str(ids[EVEN[rank]]), store], cwd=folder, stdout=subprocess.PIPE, text=True
            )
            for rank in range(4)
        ]
        try:
            for process in started:
                output, _ = process.communicate(timeout=60)
                assert (process.returncode, output) == (0, f"{4 * 65_537}.0\n")
        finally:
            for process in started:
                process.kill()
                process.wait()


# ---- the option ----


def join_as(rank: int, world: int, store: str, inner: list[str]) -> Attempt:
    found = attempt(lambda: join(rank, world, store, inner=inner[rank], timeout=20))
    if not found.error:
        destroy()
    return found


def test_ranks_that_disagree_about_the_option_hear_both(store: str):
    with on_hosts(EVEN) as ranks:
        found = ranks.run(join_as, 4, store, ["gloo", "gloo", "gloo", "none"], deadline=DEADLINE)
    for one in found:
        assert "the ranks disagree about the backend inside hosts" in one.error
        assert "rank 0 has inner='gloo', rank 3 has inner='none'" in one.error


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_nccl_that_is_not_there_is_an_error_when_asked_for_and_none_by_itself(store: str):
    with on_hosts(EVEN, {"TORCH_IROH_LOG": "info"}) as ranks:
        for one in ranks.run(join_as, 4, store, ["nccl"] * 4, deadline=DEADLINE):
            assert "inner='nccl' cannot be had: rank 0's torch has no NCCL, or no CUDA device" in one.error
        for one in ranks.run(join_as, 4, store + "auto", ["auto"] * 4, deadline=DEADLINE):
            assert one.error == ""
        # Once in each process, for both groups.
        ranks.run(join_as, 4, store + "again", ["auto"] * 4, deadline=DEADLINE)
        assert ranks.output(0).count("device tensors go over iroh inside hosts too") == 1


@pytest.mark.parametrize("layout", ["3x1", "one host"])
def test_a_group_with_nothing_inside_or_nothing_between_is_as_without(store: str, layout: str):
    host_of = {"3x1": [0, 1, 2], "one host": [0, 0, 0]}[layout]
    with on_hosts(host_of, {"TORCH_IROH_LOG": "info", "TORCH_IROH_INNER": "gloo"}) as ranks:
        assert ranks.run(sum_over, 3, store, deadline=DEADLINE) == [3.0] * 3
        assert "inner='gloo' has nothing to do in a group of" in ranks.output(1)


def sum_over(rank: int, world: int, store: str) -> float:
    join(rank, world, store)
    tensor = torch.ones(1)
    dist.all_reduce(tensor)
    dist.destroy_process_group()
    return tensor.item()


def test_a_wrong_name_is_refused_where_it_is_given(monkeypatch: pytest.MonkeyPatch):
    allowed = "allowed: 'auto', 'nccl', 'gloo', 'none'"
    with pytest.raises(ValueError, match=f"inner is 'mpi'; {allowed}"):
        torch_iroh.Options(inner="mpi")
    monkeypatch.setenv("TORCH_IROH_INNER", "ring")
    with pytest.raises(ValueError, match=f"inner is 'ring'; {allowed}"):
        torch_iroh.Options()
    assert "inner='none'" in repr(torch_iroh.Options(inner="none"))
