"""What a rank is told when something goes wrong, and how soon: disagreement, death, silence, absence, departure."""

from __future__ import annotations

import itertools
import os
import random
import re
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from signal import SIGCONT, SIGKILL, SIGSTOP
from typing import Any

import pytest
import torch
import torch.distributed as dist
from families import Attempt, attempt, destroy, join, join_and_sum, sum_is_exact
from ranks import Outcome, Ranks, values_of

pytestmark = pytest.mark.usefixtures("road")

# Seconds. What the README promises; a busy machine has to keep them too.
SOON = 5.0
AT_ONCE = 0.1
DESTROYED_WITHIN = 1.0

BIG = 4 << 20  # float32 elements: 16 MiB


def floats(*shape: int) -> torch.Tensor:
    return torch.ones(*shape, dtype=torch.float32)


# ---- ranks that disagree ----

CALLS: dict[str, Callable[[int, int], Any]] = {
    "all_reduce": lambda rank, world: dist.all_reduce(floats(4)),
    "all_reduce_empty": lambda rank, world: dist.all_reduce(floats(0)),
    "all_reduce_5": lambda rank, world: dist.all_reduce(floats(5)),
    "all_reduce_2x2": lambda rank, world: dist.all_reduce(floats(2, 2)),
    "all_reduce_float64": lambda rank, world: dist.all_reduce(floats(4).double()),
    "all_reduce_max": lambda rank, world: dist.all_reduce(floats(4), dist.ReduceOp.MAX),
    "all_reduce_big": lambda rank, world: dist.all_reduce(floats(BIG)),
    "all_reduce_big_int32": lambda rank, world: dist.all_reduce(torch.ones(BIG, dtype=torch.int32)),
    "barrier": lambda rank, world: dist.barrier(),
    "broadcast": lambda rank, world: dist.broadcast(floats(4), 0),
    "broadcast_root_1": lambda rank, world: dist.broadcast(floats(4), 1),
    "broadcast_empty": lambda rank, world: dist.broadcast(floats(0), 0),
    "broadcast_big": lambda rank, world: dist.broadcast(floats(BIG), 0),
    "reduce": lambda rank, world: dist.reduce(floats(4), 0),
    "reduce_root_1": lambda rank, world: dist.reduce(floats(4), 1),
    "all_gather": lambda rank, world: dist.all_gather([floats(4) for _ in range(world)], floats(4)),
    "all_gather_5": lambda rank, world: dist.all_gather([floats(5) for _ in range(world)], floats(5)),
    "all_gather_last_empty": lambda rank, world: dist.all_gather(
        [floats(4) for _ in range(world - 1)] + [floats(0)], floats(0 if rank == world - 1 else 4)
    ),
    "reduce_scatter": lambda rank, world: dist.reduce_scatter(floats(4), [floats(4) for _ in range(world)]),
    "gather": lambda rank, world: dist.gather(floats(4), [floats(4) for _ in range(world)] if rank == 0 else None, 0),
    "gather_root_1": lambda rank, world: dist.gather(
        floats(4), [floats(4) for _ in range(world)] if rank == 1 else None, 1
    ),
    "scatter": lambda rank, world: dist.scatter(floats(4), [floats(4) for _ in range(world)] if rank == 0 else None, 0),
    "scatter_root_1": lambda rank, world: dist.scatter(
        floats(4), [floats(4) for _ in range(world)] if rank == 1 else None, 1
    ),
    "all_to_all": lambda rank, world: dist.all_to_all_single(floats(4 * world), floats(4 * world)),
    "all_to_all_int32": lambda rank, world: dist.all_to_all_single(
        torch.ones(4 * world, dtype=torch.int32), torch.ones(4 * world, dtype=torch.int32)
    ),
}

# What most ranks call, what the last rank calls, and the words for each that every error must have.
DISAGREEMENTS = [
    ("all_reduce", "broadcast", "all_reduce(", "broadcast("),
    ("all_reduce", "barrier", "all_reduce(", "barrier("),
    ("barrier", "all_gather", "barrier(", "all_gather("),
    ("all_reduce", "reduce", "all_reduce(", "reduce("),
    ("all_gather", "reduce_scatter", "all_gather(", "reduce_scatter("),
    ("gather", "scatter", "gather(", "scatter("),
    ("broadcast", "all_to_all", "broadcast(", "all_to_all("),
    ("all_reduce", "all_reduce_5", "[4]", "[5]"),
    ("all_reduce", "all_reduce_2x2", "[4]", "[2, 2]"),
    ("all_gather", "all_gather_5", "[4]", "[5]"),
    ("all_reduce", "all_reduce_float64", "float32", "float64"),
    ("all_to_all", "all_to_all_int32", "float32", "int32"),
    ("all_reduce", "all_reduce_max", "sum", "max"),
    ("broadcast", "broadcast_root_1", "root 0", "root 1"),
    ("reduce", "reduce_root_1", "root 0", "root 1"),
    ("gather", "gather_root_1", "root 0", "root 1"),
    ("scatter", "scatter_root_1", "root 0", "root 1"),
    ("all_reduce", "all_reduce_empty", "[4]", "[0]"),
    ("all_reduce_empty", "all_reduce", "[0]", "[4]"),
    ("broadcast", "broadcast_empty", "[4]", "[0]"),
    ("all_gather_last_empty", "all_gather", "blocks", "[4]"),
    ("all_reduce_big", "all_reduce_big_int32", "float32", "int32"),
    ("all_reduce_big", "broadcast_big", "all_reduce(", "broadcast("),
]


def disagree(rank: int, world: int, store: str, most: str, last: str) -> Attempt:
    join(rank, world, store)
    call = CALLS[last if rank == world - 1 else most]
    return attempt(lambda: call(rank, world), barriers)


def barriers() -> None:
    """For a call that is done before the others are heard, because this rank only sends: the news ends one of these."""
    until = time.monotonic() + SOON
    while time.monotonic() < until:
        dist.barrier()


def assert_disagreement_is_named(outcomes: list[Outcome], world: int, most: str, last: str) -> None:
    for rank, made in enumerate(values_of(outcomes)):
        assert made.kind == "DistBackendError", (rank, made)
        where = f"rank {rank}: {made}"
        # "rank A called X, rank B called Y": one of the two is the last rank.
        named = re.findall(r"rank (\d+) called (.*?)(?=, rank \d+ called|$)", made.error)
        assert len(named) == 2, where
        calls = {int(who): what for who, what in named}
        assert len(calls) == 2 and world - 1 in calls, where
        assert last in calls.pop(world - 1), where
        assert all(most in what for what in calls.values()), where
        assert made.took < SOON, where


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize(("most", "last", "most_words", "last_words"), DISAGREEMENTS)
def test_ranks_that_disagree_all_hear_both_calls_and_both_ranks(
    tmp_path: Path, world: int, most: str, last: str, most_words: str, last_words: str
) -> None:
    with Ranks(world) as ranks:
        ranks.start(disagree, world, str(tmp_path / "store"), most, last)
        assert_disagreement_is_named(ranks.collect(30), world, most_words, last_words)


def disagree_in_flight(rank: int, world: int, store: str) -> list[Attempt]:
    join(rank, world, store)
    works = [dist.all_reduce(floats(1000), async_op=True) for _ in range(3)]
    works.append(
        dist.broadcast(floats(7), 0, async_op=True) if rank == world - 1 else dist.all_reduce(floats(7), async_op=True)
    )
    works += [dist.all_reduce(floats(BIG), async_op=True) for _ in range(3)]
    return [attempt(work.wait) for work in works]


@pytest.mark.parametrize("world", [2, 4])
def test_operations_in_flight_behind_a_disagreement_fail_with_it(tmp_path: Path, world: int) -> None:
    with Ranks(world) as ranks:
        ranks.start(disagree_in_flight, world, str(tmp_path / "store"))
        for rank, works in enumerate(values_of(ranks.collect(30))):
            # The first three are done unless the news was faster; the fourth may be done on a rank that only sends.
            for one in [work for work in works[:4] if work.error] + works[4:]:
                assert "called all_reduce(" in one.error, (rank, one)
                assert f"collective #3: rank {world - 1} called broadcast(" in one.error or (
                    f", rank {world - 1} called broadcast(" in one.error
                ), (rank, one)
                assert one.took < SOON, (rank, one)


def disagree_all(rank: int, world: int, store: str) -> Attempt:
    join(rank, world, store)
    names = ["all_reduce", "broadcast_root_1", "all_gather", "reduce_scatter"]
    return attempt(lambda: CALLS[names[rank]](rank, world), barriers)


def test_four_ranks_with_four_calls_all_hear_two_of_them(tmp_path: Path) -> None:
    with Ranks(4) as ranks:
        ranks.start(disagree_all, 4, str(tmp_path / "store"))
        for rank, made in enumerate(values_of(ranks.collect(30))):
            named = dict(re.findall(r"rank (\d) called (\w+)\(", made.error))
            names = {"0": "all_reduce", "1": "broadcast", "2": "all_gather", "3": "reduce_scatter"}
            assert len(named) == 2 and named.items() <= names.items(), (rank, made)
            assert made.took < SOON, (rank, made)


SENT = {
    "size": (lambda: floats(4), lambda: floats(5), "float32, 4 elements", "float32, 5 elements"),
    "dtype": (lambda: floats(4), lambda: torch.ones(4, dtype=torch.int32), "float32, 4", "int32, 4"),
    "empty": (lambda: floats(4), lambda: floats(0), "float32, 4 elements", "float32, 0 elements"),
    "big": (lambda: floats(BIG), lambda: floats(BIG + 1), f"{BIG} elements", f"{BIG + 1} elements"),
}


def send_or_receive(rank: int, world: int, store: str, case: str) -> Attempt:
    join(rank, world, store)
    sent, received, _, _ = SENT[case]
    if rank == 0:
        return attempt(lambda: dist.send(sent(), 1), barriers)
    if rank == 1:
        return attempt(lambda: dist.recv(received(), 0))
    return attempt(dist.barrier)


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("case", SENT)
def test_send_and_recv_that_do_not_match_are_both_named_on_every_rank(tmp_path: Path, world: int, case: str) -> None:
    with Ranks(world) as ranks:
        ranks.start(send_or_receive, world, str(tmp_path / "store"), case)
        for rank, made in enumerate(values_of(ranks.collect(30))):
            assert SENT[case][2] in made.error and SENT[case][3] in made.error, (rank, made)
            assert "rank 0 sends" in made.error and "rank 1 receives" in made.error, (rank, made)
            assert made.took < SOON, (rank, made)


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


def assert_death_is_told(made: tuple[Attempt, Attempt, Attempt], rank: int, dead: int, since: float) -> None:
    first, again, destroyed = made
    assert first.kind == "DistBackendError" and f"rank {dead} is gone" in first.error, (rank, first)
    assert first.at - since < SOON, (rank, first.at - since)
    cause = first.error[first.error.index(f"rank {dead} is gone") :]
    assert cause in again.error, (rank, first, again)
    assert again.took < AT_ONCE, (rank, again)
    assert not destroyed.error and destroyed.took < DESTROYED_WITHIN, (rank, destroyed)


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


WAITS: dict[str, Callable[[], Any]] = {
    "recv": lambda: dist.recv(floats(4), 2),
    "broadcast": lambda: dist.broadcast(floats(4), 2),
    "all_gather": lambda: dist.all_gather([floats(4) for _ in range(3)], floats(4)),
    "barrier": lambda: dist.barrier(),
    "all_reduce_big": lambda: dist.all_reduce(floats(BIG)),
    "recv_from_anyone": lambda: dist.recv(floats(4)),
}


def wait_until_it_breaks(rank: int, what: str) -> tuple[Attempt, Attempt, Attempt]:
    first = attempt(WAITS[what])
    again = attempt(lambda: dist.all_reduce(floats(1)))
    return first, again, destroy()


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


# ---- ranks that leave ----


@pytest.mark.parametrize("what", [one for one in WAITS if one != "recv_from_anyone"])  # anyone is still there
def test_rank_that_destroys_its_group_is_named_at_once_to_those_who_wait_for_it(tmp_path: Path, what: str) -> None:
    with Ranks(3) as ranks:
        ranks.run(join_and_sum, 3, str(tmp_path / "store"))
        ranks.start(wait_until_it_breaks, what, only=[0, 1])
        time.sleep(0.3)
        left = time.monotonic()
        ranks.start(destroy, only=[2])
        outcomes = ranks.collect(30)
        for rank in (0, 1):
            assert_death_is_told(values_of([outcomes[rank]])[0], rank, 2, left)
            told = outcomes[rank].value[0].at - left
            assert told < 1.0, (rank, told)
            assert "left" in outcomes[rank].value[0].error, outcomes[rank]
        assert outcomes[2].value.took < DESTROYED_WITHIN, outcomes[2]


def test_recv_from_anyone_ends_at_once_when_everyone_else_has_left(tmp_path: Path) -> None:
    with Ranks(3) as ranks:
        ranks.run(join_and_sum, 3, str(tmp_path / "store"))
        ranks.start(wait_until_it_breaks, "recv_from_anyone", only=[0])
        time.sleep(0.3)
        ranks.start(destroy, only=[1, 2])
        left = time.monotonic()
        first, again, destroyed = values_of(ranks.collect(40))[0]
        assert re.search(r"rank [12] is gone", first.error) and first.at - left < 1.0, (first, first.at - left)
        assert again.took < AT_ONCE and destroyed.took < DESTROYED_WITHIN, (again, destroyed)


def late_recv(rank: int) -> tuple[Attempt, Attempt]:
    """The other rank has left already; what it sent before must still come, what it did not send must not hang."""
    values = torch.zeros(5)
    got = attempt(lambda: dist.recv(values, 0))
    assert torch.equal(values, torch.arange(5.0)), values
    return got, attempt(lambda: dist.recv(values, 0))


def send_and_destroy(rank: int) -> tuple[Attempt, Attempt]:
    return attempt(lambda: dist.send(torch.arange(5.0), 1)), destroy()


@pytest.mark.parametrize("pause", [0.0, 0.5])
def test_first_message_and_goodbye_in_one_breath_cost_neither_side_time(tmp_path: Path, pause: float) -> None:
    with Ranks(2) as ranks:
        ranks.run(join, 2, str(tmp_path / "store"))  # nobody is connected yet
        ranks.start(send_and_destroy, only=[0])
        time.sleep(pause)
        ranks.start(recv_and_destroy, only=[1])
        (sent, left), (got, followed) = values_of(ranks.collect(30))
        for made in (sent, left, got, followed):
            assert not made.error and made.took < DESTROYED_WITHIN, made


def recv_and_destroy(rank: int) -> tuple[Attempt, Attempt]:
    values = torch.zeros(5)
    made = attempt(lambda: dist.recv(values, 0))
    assert torch.equal(values, torch.arange(5.0))
    return made, destroy()


def test_message_of_a_rank_that_has_left_still_arrives_and_the_next_recv_names_it(tmp_path: Path) -> None:
    with Ranks(2) as ranks:
        ranks.run(join_and_sum, 2, str(tmp_path / "store"))
        ranks.start(send_and_destroy, only=[0])
        sent, destroyed = values_of(ranks.collect(30))[0]
        assert not sent.error and not destroyed.error and destroyed.took < DESTROYED_WITHIN, (sent, destroyed)
        time.sleep(0.5)
        ranks.start(late_recv, only=[1])
        got, missed = values_of(ranks.collect(30))[0]
        assert not got.error and got.took < 1.0, got
        assert "rank 0 is gone" in missed.error and missed.took < 1.0, missed


LAST = ["all_reduce", "all_reduce_big", "broadcast", "broadcast_big", "barrier", "gather", "scatter", "reduce", "pair"]


def come_and_go(rank: int, world: int, folder: str, seed: int, repetitions: int) -> list[tuple[str, float]]:
    """Groups in a row; the ranks leave each at different times, right after a last operation."""
    chance = random.Random(seed)
    made = []
    for repetition in range(repetitions):
        longest = 1.0 if repetition % 5 == 0 else 0.15
        pauses = [chance.uniform(0.0, longest) for _ in range(world)]
        pauses[chance.randrange(world)] = 0.0
        last = LAST[repetition % len(LAST)]
        join_and_sum(rank, world, f"{folder}/store-{repetition}")
        if last == "pair":
            peers = {0: (dist.send, 1), 1: (dist.recv, 0)}
            if rank in peers:
                how, peer = peers[rank]
                how(floats(100), peer)
        else:
            CALLS[last](rank, world)
        time.sleep(pauses[rank])
        destroyed = destroy()
        assert not destroyed.error, (repetition, last, destroyed)
        made.append((last, destroyed.took))
    return made


def test_orderly_end_at_different_times_is_never_an_error(tmp_path: Path) -> None:
    with Ranks(3) as ranks:
        ranks.start(come_and_go, 3, str(tmp_path), 20240607, 30)
        every = list(itertools.chain(*values_of(ranks.collect(100))))
        longest = max(every, key=lambda one: one[1])
        print("longest destroy:", longest)
        assert longest[1] < DESTROYED_WITHIN, longest
        for rank in range(3):
            assert "error" not in ranks.output(rank) and "warning" not in ranks.output(rank), ranks.output(rank)


# ---- whole programs ----

PROGRAM = """
import os, sys, time
from datetime import timedelta
import torch, torch.distributed as dist
rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
store = dist.FileStore(os.environ["STORE"])
dist.init_process_group("iroh", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=30))
values = torch.ones(100_000)
dist.all_reduce(values)
assert values[0] == world
"""


def start_programs(tmp_path: Path, world: int, end: str) -> list[subprocess.Popen[str]]:
    script = tmp_path / "program.py"
    script.write_text(PROGRAM + textwrap.dedent(end))
    programs = []
    for rank in range(world):
        environment = os.environ | {
            "RANK": str(rank),
            "WORLD_SIZE": str(world),
            "STORE": str(tmp_path / "store"),
            "TORCH_IROH_BIND": "127.0.0.1:0",
            "OMP_NUM_THREADS": "1",
        }
        command = [sys.executable, str(script)]
        programs.append(
            subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        )
    return programs


def ends_of(programs: list[subprocess.Popen[str]], patience: float) -> list[tuple[int | None, float, str]]:
    """Exit code, time of the end and output of each; -999: it had to be killed."""
    ends: list[tuple[int | None, float, str]] = [(-999, 0.0, "")] * len(programs)
    left = set(range(len(programs)))
    until = time.monotonic() + patience
    while left and time.monotonic() < until:
        for i in list(left):
            if programs[i].poll() is not None:
                ends[i] = (programs[i].returncode, time.monotonic(), "")
                left.remove(i)
        time.sleep(0.01)
    for program in programs:
        program.kill()
    return [(code, at, program.communicate()[0]) for (code, at, _), program in zip(ends, programs, strict=True)]


def test_program_that_ends_without_destroying_its_group_exits_with_0_within_3_s(tmp_path: Path) -> None:
    # One rank ends at once, one a second later, one collects garbage first: none disturbs another.
    programs = start_programs(
        tmp_path,
        3,
        """
        time.sleep([0.0, 1.0, 0.2][rank])
        if rank == 2:
            import gc; gc.collect()
        print("END", time.monotonic(), flush=True)
        """,
    )
    # How long a program with torch and without a group takes to end, on this machine and just now.
    bare = "import time, torch; time.sleep(2); print('END', time.monotonic(), flush=True)"
    programs.append(subprocess.Popen([sys.executable, "-c", bare], stdout=subprocess.PIPE, text=True))
    took = []
    for rank, (code, at, output) in enumerate(ends_of(programs, 60)):
        said = re.search(r"END ([\d.]+)", output)
        assert code == 0 and said, (rank, code, output)
        assert "Traceback" not in output and "torch-iroh[" not in output, (rank, output)
        took.append(at - float(said[1]))
    print(
        "seconds from last line to end:", [round(one, 2) for one in took[:-1]], "without a group:", round(took[-1], 2)
    )
    assert max(took[:-1]) < 3.0 + took[-1], took


@pytest.mark.parametrize("how", ["sys.exit(0)", "raise ValueError('no')"])
def test_rank_whose_program_ends_is_named_at_once_to_those_who_wait_for_it(tmp_path: Path, how: str) -> None:
    programs = start_programs(
        tmp_path,
        3,
        f"""
        def main():
            if rank == 1:
                time.sleep(0.5)
                print("END", time.monotonic(), flush=True)
                {how}
            try:
                if rank != 1:
                    dist.all_reduce(torch.ones(4))
            except RuntimeError as error:
                print("TOLD", time.monotonic(), error, flush=True)
        main()
        """,
    )
    ends = ends_of(programs, 60)
    said = re.search(r"END ([\d.]+)", ends[1][2])
    assert said, ends[1]
    for rank in (0, 2):
        told = re.search(r"TOLD ([\d.]+) (.*)", ends[rank][2])
        assert ends[rank][0] == 0 and told, ends[rank]
        assert "rank 1 is gone" in told[2] and "left" in told[2], told[2]
        assert float(told[1]) - float(said[1]) < 2.0, (rank, float(told[1]) - float(said[1]))


def test_worker_that_raises_under_torchrun_ends_the_job_within_seconds(tmp_path: Path) -> None:
    script = tmp_path / "worker.py"
    script.write_text(
        textwrap.dedent("""
        import time, torch, torch.distributed as dist
        dist.init_process_group("iroh")
        dist.all_reduce(torch.ones(4))
        if dist.get_rank() == 1:
            print("RAISES", time.monotonic(), flush=True)
            raise ValueError("rank 1 has had enough")
        try:
            dist.all_reduce(torch.ones(4))
        except RuntimeError as error:
            print("TOLD", str(error).splitlines()[0], flush=True)
            raise
        """)
    )
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=3", str(script)]
    environment = os.environ | {"TORCH_IROH_BIND": "127.0.0.1:0", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=90, check=False)
    ended = time.monotonic()
    output = done.stdout + done.stderr
    raised = re.search(r"RAISES ([\d.]+)", output)
    assert done.returncode != 0 and raised, output
    assert ended - float(raised[1]) < 15.0, ended - float(raised[1])
    assert "rank 1 has had enough" in output, output
    print(f"the job ended {ended - float(raised[1]):.2f} s after the exception")


# ---- processes that fork ----


def fork_after_a_group_of_one(rank: int, store: str) -> list[int]:
    """What two children, which make a group of their own, end with: 0 fine, 1 an error that says "fork", 2 another."""
    join(0, 1, store + "-alone")
    assert sum_is_exact(0, [0])
    destroy()
    children = []
    for place in (0, 1):
        pid = os.fork()
        if pid == 0:
            # Leaves in order: _exit alone could take the last bytes along before the other child has them.
            made = attempt(lambda place=place: join_and_sum(place, 2, store, timeout=5.0), dist.destroy_process_group)
            print(place, made, flush=True)
            os._exit(0 if not made.error else 1 if "fork" in made.error else 2)
        children.append(pid)
    ends = {}
    until = time.monotonic() + 15.0
    while len(ends) < 2 and time.monotonic() < until:
        for pid in children:
            if pid not in ends and (found := os.waitpid(pid, os.WNOHANG))[0]:
                ends[pid] = os.waitstatus_to_exitcode(found[1])
        time.sleep(0.02)
    for pid in set(children) - set(ends):
        os.kill(pid, SIGKILL)
        os.waitpid(pid, 0)
    return [ends.get(pid, -999) for pid in children]


@pytest.mark.over_iroh
def test_child_of_a_process_that_had_a_group_of_one_makes_a_group_or_hears_why_not(tmp_path: Path) -> None:
    with Ranks(1) as ranks:
        ends = ranks.run(fork_after_a_group_of_one, str(tmp_path / "store"))[0]
        assert ends in ([0, 0], [1, 1]), (ends, ranks.output(0))


# ---- groups given up on purpose ----


def abort_in_flight(rank: int, world: int, store: str) -> list[Attempt]:
    join_and_sum(rank, world, store)
    if rank == 1:
        time.sleep(0.5)
        return [attempt(dist.distributed_c10d._abort_process_group)]
    works = [dist.all_reduce(floats(4), async_op=True), dist.all_reduce(floats(BIG), async_op=True)]
    return [attempt(work.wait) for work in works]


def test_abort_on_one_rank_ends_what_the_others_wait_for_and_names_it(tmp_path: Path) -> None:
    with Ranks(3) as ranks:
        ranks.start(abort_in_flight, 3, str(tmp_path / "store"))
        made = values_of(ranks.collect(30))
        assert not made[1][0].error and made[1][0].took < DESTROYED_WITHIN, made[1]
        for rank in (0, 2):
            for work in made[rank]:
                assert "rank 1" in work.error and "abort" in work.error, (rank, work)
                assert work.at - made[1][0].at < 1.0, (rank, work)


def abort_own(rank: int, world: int, store: str, how: str) -> tuple[list[Attempt], Attempt] | None:
    join_and_sum(rank, world, store)
    if rank == 1:
        time.sleep(2.0)
        return None
    works = [dist.all_reduce(floats(4), async_op=True), dist.barrier(async_op=True)]
    works.append(dist.irecv(floats(4), 1))
    time.sleep(0.2)
    begun = time.monotonic()
    if how == "_abort_process_group":
        aborted = attempt(dist.distributed_c10d._abort_process_group)
    else:
        group: Any = dist.group.WORLD
        aborted = attempt(group.abort)
    ended = [attempt(work.wait) for work in works]
    assert time.monotonic() - begun < 1.5
    return ended, aborted


@pytest.mark.parametrize("how", ["_abort_process_group", "group.abort"])
def test_abort_ends_works_in_flight_at_once(tmp_path: Path, how: str) -> None:
    with Ranks(2) as ranks:
        ranks.start(abort_own, 2, str(tmp_path / "store"), how)
        works, aborted = values_of(ranks.collect(30))[0]
        assert not aborted.error and aborted.took < DESTROYED_WITHIN, aborted
        for work in works:
            assert "aborted on rank 0" in work.error and work.took < AT_ONCE, work


def destroy_in_flight(rank: int, world: int, store: str) -> tuple[Attempt, list[Attempt]] | None:
    join_and_sum(rank, world, store)
    if rank == 1:
        time.sleep(2.0)
        return None
    works = [dist.all_reduce(floats(4), async_op=True), dist.irecv(floats(4), 1)]
    destroyed = destroy()
    return destroyed, [attempt(work.wait) for work in works]


def test_destroy_with_works_in_flight_ends_them_within_1_s_or_so(tmp_path: Path) -> None:
    with Ranks(2) as ranks:
        ranks.start(destroy_in_flight, 2, str(tmp_path / "store"))
        destroyed, works = values_of(ranks.collect(30))[0]
        assert not destroyed.error and destroyed.took < 1.5, destroyed
        for work in works:
            assert "destroyed on rank 0" in work.error and work.took < AT_ONCE, work


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


def disagree_and_rejoin(rank: int, world: int, folder: str) -> list[str]:
    errors = []
    for turn in range(3):
        made = disagree(rank, world, f"{folder}/store-{turn}", "all_reduce", "broadcast")
        errors.append(made.error)
        destroyed = destroy()
        assert destroyed.took < DESTROYED_WITHIN, destroyed
    join_and_sum(rank, world, f"{folder}/store-last")
    destroy()
    return errors


def test_ranks_that_disagreed_make_a_new_group_in_the_same_processes(tmp_path: Path) -> None:
    with Ranks(3) as ranks:
        ranks.start(disagree_and_rejoin, 3, str(tmp_path))
        for errors in values_of(ranks.collect(60)):
            assert all("rank 2 called broadcast(" in one for one in errors), errors
