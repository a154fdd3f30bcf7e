"""Ranks that leave: in order, by the end of their program, by a fork, or by giving their group up."""

from __future__ import annotations

import itertools
import os
import random
import re
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from signal import SIGKILL
from typing import Any

import pytest
import torch
import torch.distributed as dist
from families import (
    AT_ONCE,
    BIG,
    CALLS,
    DESTROYED_WITHIN,
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


@pytest.mark.parametrize("callback", ["lambda done: None", "print"])
def test_program_ends_with_0_while_an_operation_is_in_flight(tmp_path: Path, callback: str) -> None:
    programs = start_programs(
        tmp_path,
        2,
        f"""
        if rank == 0:
            work = dist.all_reduce(torch.ones(4), async_op=True)
            work.get_future().then({callback})
        else:
            time.sleep(1)  # it does not join
        """,
    )
    for rank, (code, _, output) in enumerate(ends_of(programs, 60)):
        assert code == 0, (rank, code, output)


HELD = """
import ctypes
ctypes.pythonapi.Py_IncRef(ctypes.py_object(dist.group.WORLD))  # nobody destroys it
"""


def test_program_that_ends_has_left_its_group_even_if_something_holds_it(tmp_path: Path) -> None:
    programs = start_programs(
        tmp_path,
        3,
        HELD
        + textwrap.dedent("""
        if rank == 0:
            dist.send(torch.arange(5.0), 1)
        else:
            time.sleep(1.5)
            if rank == 1:
                got = torch.zeros(5)
                dist.recv(got, 0)
                assert got.tolist() == [0, 1, 2, 3, 4]
                dist.send(got, 2)
            else:
                dist.recv(torch.zeros(5), 1)
        """),
    )
    for rank, (code, _, output) in enumerate(ends_of(programs, 60)):
        assert code == 0, (rank, code, output)


def test_program_ends_with_0_while_a_callback_still_runs(tmp_path: Path) -> None:
    programs = start_programs(
        tmp_path,
        2,
        """
        def slowly(done):
            print("BEGUN", flush=True)
            time.sleep(0.5)
            print("CALLED", flush=True)
        dist.all_reduce(torch.ones(4), async_op=True).get_future().then(slowly)
        dist.barrier()
        time.sleep(0.2)
        dist.destroy_process_group()
        """,
    )
    for rank, (code, _, output) in enumerate(ends_of(programs, 60)):
        assert code == 0 and "BEGUN" in output and "CALLED" in output, (rank, code, output)


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
