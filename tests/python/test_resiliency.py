"""What a fault-tolerant trainer needs: a rank that leaves or dies in the middle is named by all others in time, in
every collective, and the survivors make a new group in the same processes.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from families import Attempt, attempt, destroy, join, join_and_sum, sum_is_exact
from ranks import Ranks, values_of

pytestmark = pytest.mark.usefixtures("road")

WORLD = 3
COUNT = 3 * 1000
CLOSED_WITHIN = 1.0  # seconds from the last rank's goodbye
SILENT_WITHIN = 5.0  # seconds from its death


def operations(world: int) -> dict[str, Callable[[], Any]]:
    flat = torch.ones(COUNT)
    part = torch.ones(COUNT // world)

    def list_of(tensor: torch.Tensor) -> list[torch.Tensor]:
        return [torch.empty_like(tensor) for _ in range(world)]

    def on_root(tensors: list[torch.Tensor]) -> list[torch.Tensor] | None:
        return tensors if dist.get_rank() == 0 else None

    return {
        "all_reduce": lambda: dist.all_reduce(flat),
        "reduce": lambda: dist.reduce(flat, 0),
        "broadcast": lambda: dist.broadcast(flat, 0),
        "all_gather": lambda: dist.all_gather(list_of(part), part),
        "all_gather_into_tensor": lambda: dist.all_gather_into_tensor(flat, part),
        "reduce_scatter_tensor": lambda: dist.reduce_scatter_tensor(part, flat),
        "gather": lambda: dist.gather(part, on_root(list_of(part)), 0),
        "scatter": lambda: dist.scatter(part, on_root(list(flat.chunk(world))), 0),
        "all_to_all_single": lambda: dist.all_to_all_single(torch.empty(COUNT), flat),
        "all_to_all": lambda: dist.all_to_all(list_of(part), list(flat.chunk(world))),
        "barrier": lambda: dist.barrier(),
    }


NAMES = [
    "all_reduce",
    "reduce",
    "broadcast",
    "all_gather",
    "all_gather_into_tensor",
    "reduce_scatter_tensor",
    "gather",
    "scatter",
    "all_to_all_single",
    "all_to_all",
    "barrier",
]


def lose_the_last(rank: int, world: int, store: str, name: str, dies: bool) -> tuple[float, Attempt]:
    """When the last rank went, or what became of the others, who go on as if it were there."""
    join_and_sum(rank, world, store)
    operation = operations(world)[name]
    operation()
    dist.barrier()
    if rank == world - 1:
        if dies:
            threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGKILL)).start()
            time.sleep(10)
        time.sleep(0.2)
        went = time.monotonic()
        destroy()
        return went, attempt()
    # In operations that flow one way a rank may be through before the last one is missed: not in the next barrier.
    return 0.0, attempt(operation, dist.barrier)


def meet_again(rank: int, world: int, store: str) -> bool:
    destroyed = destroy()
    assert not destroyed.error and destroyed.took < 1.0, destroyed
    join(rank, world, store)
    return sum_is_exact(rank, range(world))


@pytest.mark.parametrize("dies", [False, True], ids=["shuts_down", "is_killed"])
@pytest.mark.parametrize("name", NAMES)
def test_the_others_name_a_lost_rank_in_time_and_go_on_without_it(tmp_path: Path, name: str, dies: bool) -> None:
    with Ranks(WORLD) as ranks:
        ranks.start(lose_the_last, WORLD, str(tmp_path / "store"), name, dies)
        outcomes = ranks.collect(30)
        went = time.monotonic() if dies else outcomes[-1].value[0]
        for rank, outcome in enumerate(values_of(outcomes[:-1])):
            made = outcome[1]
            assert f"rank {WORLD - 1}" in made.error and made.kind == "DistBackendError", (rank, made)
            if dies:
                assert made.took < SILENT_WITHIN + 0.3, (rank, made)
            else:
                assert made.at - went < CLOSED_WITHIN, (rank, made, went)
        ranks.start(meet_again, WORLD - 1, str(tmp_path / "again"), only=range(WORLD - 1))
        assert values_of(ranks.collect(30)) == [True] * (WORLD - 1)
