"""What a rank is told when another dies, stands still, is late or never comes, and how soon."""

from __future__ import annotations

import re
import time
from datetime import timedelta
from pathlib import Path
from signal import SIGCONT, SIGSTOP

import pytest
import torch
import torch.distributed as dist
from families import (
    AT_ONCE,
    BIG,
    DESTROYED_WITHIN,
    SOON,
    WAITS,
    Attempt,
    assert_death_is_told,
    attempt,
    destroy,
    floats,
    join,
    join_and_sum,
    sum_is_exact,
    wait_until_it_breaks,
)
from ranks import Ranks, values_of

pytestmark = pytest.mark.usefixtures("road")

# ---- ranks that never come ----


def try_to_join(rank: int, world: int, store: str) -> Attempt:
    return attempt(lambda: join(rank, world, store, timeout=3.0))


@pytest.mark.parametrize("missing", [[2], [0], [1, 3]])
def test_ranks_that_never_come_are_named_after_the_timeout_of_init(tmp_path: Path, missing: list[int]) -> None:
    present = [rank for rank in range(4) if rank not in missing]
    with Ranks(4) as ranks:
        ranks.start(try_to_join, 4, str(tmp_path / "store"), only=present)
        for rank, made in zip(present, values_of(ranks.collect(30)), strict=True):
            named = re.search(r"making the group: ranks? ([\d, ]+) of 4 did not join within 3\.0 s", made.error)
            assert named, (rank, made)
            # Without rank 0 nobody begins, so nobody else can be missed.
            assert [int(one) for one in named[1].split(", ")] == missing, (rank, made)
            assert 2.9 < made.took < 5.0, (rank, made)


# ---- ranks that die ----


def loop_until_it_breaks(
    rank: int, ranks: list[int], count: int, begun: str = ""
) -> tuple[Attempt, Attempt, Attempt, int]:
    """`begun`: a file of this name, with the rank behind it, says that the first round is over."""
    rounds = 0

    def loop() -> None:
        nonlocal rounds
        while True:
            assert sum_is_exact(rank, ranks, count)
            rounds += 1
            if begun and rounds == 1:
                Path(f"{begun}{rank}").touch()

    first = attempt(loop)
    again = attempt(lambda: dist.all_reduce(floats(1)))
    return first, again, destroy(), rounds


def test_killed_rank_of_four_in_the_middle_of_all_reduce_is_named_within_5_s(tmp_path: Path) -> None:
    everyone = list(range(4))
    with Ranks(4) as ranks:
        ranks.run(join_and_sum, 4, str(tmp_path / "store"))
        ranks.start(loop_until_it_breaks, everyone, BIG, str(tmp_path / "begun"))
        by = time.monotonic() + 30
        while not all((tmp_path / f"begun{rank}").exists() for rank in everyone) and time.monotonic() < by:
            time.sleep(0.05)
        time.sleep(0.5)
        ranks.kill(2)
        killed = time.monotonic()
        outcomes = ranks.collect(30)
        for rank in (0, 1, 3):
            *made, rounds = outcomes[rank].value
            assert_death_is_told(tuple(made), rank, 2, killed)
            assert rounds > 0, rank
            print(f"rank {rank}: told after {made[0].at - killed:.2f} s, destroyed in {made[2].took:.3f} s")


@pytest.mark.parametrize("what", WAITS)
def test_killed_idle_rank_is_named_within_5_s_to_those_who_wait_for_it(tmp_path: Path, what: str) -> None:
    with Ranks(3) as ranks:
        ranks.run(join_and_sum, 3, str(tmp_path / "store"))
        ranks.start(wait_until_it_breaks, what, only=[0, 1])
        time.sleep(0.5)
        ranks.kill(2)
        killed = time.monotonic()
        for rank, made in enumerate(values_of(ranks.collect(30))):
            assert_death_is_told(made, rank, 2, killed)
            print(f"{what}: rank {rank}: told after {made[0].at - killed:.2f} s, destroyed in {made[2].took:.3f} s")


def wait_for_one_who_waits(rank: int) -> tuple[Attempt, Attempt, Attempt]:
    first = attempt(lambda: dist.recv(floats(4), 2 if rank == 0 else 0))
    return first, attempt(lambda: dist.all_reduce(floats(1))), destroy()


def test_killed_rank_is_named_to_a_rank_that_waits_for_another_who_waits_for_it(tmp_path: Path) -> None:
    with Ranks(3) as ranks:
        ranks.run(join_and_sum, 3, str(tmp_path / "store"))
        ranks.start(wait_for_one_who_waits, only=[0, 1])
        time.sleep(0.5)
        ranks.kill(2)
        killed = time.monotonic()
        for rank, made in enumerate(values_of(ranks.collect(30))):
            assert_death_is_told(made, rank, 2, killed)


@pytest.mark.over_iroh
def test_rank_killed_before_its_first_word_is_named_within_connect_timeout(tmp_path: Path) -> None:
    with Ranks(3, environment={"TORCH_IROH_CONNECT_TIMEOUT": "2"}) as ranks:
        ranks.run(join, 3, str(tmp_path / "store"))
        ranks.kill(2)
        for rank in (0, 1):
            ranks.start(wait_until_it_breaks, "all_gather", only=[rank])
        for rank, (first, again, destroyed) in enumerate(values_of(ranks.collect(30))):
            assert "rank 2 is gone" in first.error and "2.0 s" in first.error, (rank, first)
            assert first.took < 2.0 + 1.5, (rank, first)
            assert "rank 2 is gone" in again.error and again.took < AT_ONCE, (rank, again)
            assert destroyed.took < DESTROYED_WITHIN, (rank, destroyed)


@pytest.mark.over_iroh
@pytest.mark.parametrize("what", ["barrier", "all_reduce_big"])
def test_peer_timeout_of_1_s_is_kept(tmp_path: Path, what: str) -> None:
    with Ranks(3, environment={"TORCH_IROH_PEER_TIMEOUT": "1"}) as ranks:
        ranks.run(join_and_sum, 3, str(tmp_path / "store"))
        ranks.run(nap, 2.5)  # silence of the program is not silence of the process
        assert ranks.run(sum_is_exact, [0, 1, 2]) == [True] * 3
        ranks.start(wait_until_it_breaks, what, only=[0, 1])
        time.sleep(0.5)
        ranks.kill(2)
        killed = time.monotonic()
        for rank, made in enumerate(values_of(ranks.collect(30))):
            assert_death_is_told(made, rank, 2, killed)
            assert made[0].at - killed < 2.0, (rank, made[0].at - killed)
            assert made[0].at - killed > 0.4, (rank, made[0].at - killed)
            print(f"{what}: rank {rank}: told after {made[0].at - killed:.2f} s")


def nap(rank: int, seconds: float) -> None:
    time.sleep(seconds)


# ---- ranks that stand still ----


def loop_for(rank: int, world: int, until: float, count: int) -> int:
    """all_reduces until rank 0's clock passes `until`; all ranks stop after the same one."""
    wrong = 0
    while True:
        go_on = torch.tensor([1.0 if rank > 0 or time.monotonic() < until else 0.0])
        dist.all_reduce(go_on, dist.ReduceOp.MIN)
        if go_on.item() == 0.0:
            return wrong
        wrong += not sum_is_exact(rank, range(world), count)


@pytest.mark.parametrize("count", [1000, BIG])
def test_rank_stopped_for_2_s_in_the_middle_of_a_loop_breaks_nothing(tmp_path: Path, count: int) -> None:
    with Ranks(3) as ranks:
        ranks.run(join_and_sum, 3, str(tmp_path / "store"))
        ranks.start(loop_for, 3, time.monotonic() + 7.5, count)
        for stopped in (1, 0, 2):
            time.sleep(0.4)
            ranks.kill(stopped, SIGSTOP)
            time.sleep(2.0)
            ranks.kill(stopped, SIGCONT)
        assert values_of(ranks.collect(60)) == [0, 0, 0]
        assert [one.error for one in ranks.run(destroy)] == [""] * 3


def test_rank_stopped_for_longer_than_peer_timeout_is_named_and_hears_it_later(tmp_path: Path) -> None:
    with Ranks(3, environment={"TORCH_IROH_PEER_TIMEOUT": "1.5"}) as ranks:
        ranks.run(join_and_sum, 3, str(tmp_path / "store"))
        ranks.start(loop_until_it_breaks, [0, 1, 2], 100_000)
        time.sleep(0.5)
        ranks.kill(1, SIGSTOP)
        stopped = time.monotonic()
        for outcome in ranks.collect(30, only=[0, 2]):
            *made, _ = values_of([outcome])[0]
            assert_death_is_told(tuple(made), outcome.rank, 1, stopped)
            assert made[0].at - stopped > 1.0, (outcome.rank, made[0].at - stopped)
        ranks.kill(1, SIGCONT)
        resumed = time.monotonic()
        first, again, destroyed, _ = values_of(ranks.collect(30))[0]
        assert first.error and first.at - resumed < SOON, first
        assert re.search(r"rank [0-2] is gone", first.error), first
        assert again.took < AT_ONCE and destroyed.took < DESTROYED_WITHIN, (again, destroyed)


# ---- ranks that are late ----


def call_or_not(rank: int, world: int, store: str) -> tuple[Attempt, Attempt, Attempt] | None:
    join_and_sum(rank, world, store, timeout=2.0)
    if rank == world - 1:
        return None
    first = attempt(lambda: dist.all_reduce(floats(4)))
    return first, attempt(lambda: dist.all_reduce(floats(1))), destroy()


@pytest.mark.parametrize("world", [2, 3])
def test_operation_that_a_rank_never_calls_times_out_naming_that_rank(tmp_path: Path, world: int) -> None:
    with Ranks(world) as ranks:
        ranks.start(call_or_not, world, str(tmp_path / "store"))
        for rank, made in enumerate(values_of(ranks.collect(30))[:-1]):
            first, again, destroyed = made
            assert f"rank {rank}: all_reduce #1(sum, float32[4]" in first.error, (rank, first)
            assert "Timed out" in first.error, (rank, first)
            assert re.search(rf"rank {world - 1} never began|rank {world - 1} \(", first.error), (rank, first)
            assert "never began this operation" in first.error, (rank, first)
            assert 1.9 < first.took < 4.0, (rank, first)
            assert "Timed out" in again.error and again.took < AT_ONCE, (rank, again)
            assert destroyed.took < DESTROYED_WITHIN, (rank, destroyed)


def receive_or_not(rank: int, world: int, store: str) -> Attempt | None:
    join_and_sum(rank, world, store, timeout=2.0)
    return attempt(lambda: dist.recv(floats(4), 1)) if rank == 0 else None


def test_recv_that_nobody_sends_times_out_naming_the_sender(tmp_path: Path) -> None:
    with Ranks(2) as ranks:
        ranks.start(receive_or_not, 2, str(tmp_path / "store"))
        made = values_of(ranks.collect(30))[0]
        assert "recv from rank 1 (float32, 4 elements)" in made.error and "timed out" in made.error, made
        assert 1.9 < made.took < 4.0, made


def wait_with_timeout(rank: int, world: int, store: str) -> tuple[Attempt, Attempt, Attempt] | None:
    join_and_sum(rank, world, store)
    if rank == world - 1:
        return None
    work = dist.all_reduce(floats(4), async_op=True)
    first = attempt(lambda: work.wait(timeout=timedelta(seconds=1)))
    return first, attempt(lambda: dist.all_reduce(floats(1))), destroy()


@pytest.mark.parametrize("world", [2, 3])
def test_wait_with_a_timeout_ends_then_and_names_operation_and_rank(tmp_path: Path, world: int) -> None:
    with Ranks(world) as ranks:
        ranks.start(wait_with_timeout, world, str(tmp_path / "store"))
        for rank, made in enumerate(values_of(ranks.collect(30))[:-1]):
            first, again, destroyed = made
            assert first.took < 2.0, (rank, first)
            assert "all_reduce #1" in first.error and "timed out" in first.error, (rank, first)
            assert again.error and again.took < AT_ONCE, (rank, again)
            assert destroyed.took < DESTROYED_WITHIN, (rank, destroyed)
            assert f"rank {world - 1} never began" in first.error, (rank, first)


# ---- after a failure ----


def rejoin(rank: int, places: list[int], store: str) -> tuple[bool, Attempt]:
    join(places.index(rank), len(places), store)
    exact = all(sum_is_exact(places.index(rank), range(len(places)), count) for count in (1, 1000, BIG))
    return exact, destroy()


def test_survivors_of_a_killed_rank_make_a_new_group_in_the_same_processes(tmp_path: Path) -> None:
    survivors = [0, 1, 3]
    with Ranks(4, environment={"TORCH_IROH_PEER_TIMEOUT": "1"}) as ranks:
        ranks.run(join_and_sum, 4, str(tmp_path / "store"))
        ranks.start(loop_until_it_breaks, [0, 1, 2, 3], 100_000)
        time.sleep(0.5)
        ranks.kill(2)
        for rank, outcome in enumerate(ranks.collect(30)):
            assert rank == 2 or "rank 2 is gone" in outcome.value[0].error, outcome
        ranks.start(rejoin, survivors, str(tmp_path / "again"), only=survivors)
        for exact, destroyed in values_of(ranks.collect(60)):
            assert exact and not destroyed.error, destroyed
