"""What the tests of failures share: calls, joining a group in a rank's process, and what became of one call there.

Runs inside the processes of ranks.py; knows nothing of what is tested.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

# Seconds. What the README promises; a busy machine has to keep them too.
SOON = 5.0
AT_ONCE = 0.1
DESTROYED_WITHIN = 1.0

BIG = 4 << 20  # float32 elements: 16 MiB


@dataclass
class Attempt:
    """What a call did: text and type of what it raised (empty: nothing), how long it took, and when it ended.

    `at` is ``time.monotonic()``, a clock that all processes of a machine share.
    """

    error: str
    kind: str
    took: float
    at: float


def attempt(*calls: Callable[[], Any]) -> Attempt:
    """Run the calls until one raises."""
    begun = time.monotonic()
    try:
        for call in calls:
            call()
    except Exception as error:
        now = time.monotonic()
        return Attempt(str(error).split("\nException raised from")[0], type(error).__name__, now - begun, now)
    now = time.monotonic()
    return Attempt("", "", now - begun, now)


def join(rank: int, world: int, store: str, timeout: float = 30.0, **options: Any) -> None:
    """Make the default group over a FileStore at `store`."""
    import torch_iroh

    dist.init_process_group(
        "iroh",
        store=dist.FileStore(store),
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=timeout),
        pg_options=torch_iroh.Options(**options) if options else None,
    )


def destroy(rank: int = 0) -> Attempt:
    return attempt(dist.destroy_process_group)


def sum_is_exact(rank: int, ranks: Sequence[int], count: int = 1000) -> bool:
    """One all_reduce of `ranks` (this one is `rank` among them) whose sum float32 holds exactly."""
    base = torch.arange(count, dtype=torch.float32) % 128
    values = base * (rank + 1)
    dist.all_reduce(values)
    return bool(torch.equal(values, base * sum(one + 1 for one in ranks)))


def join_and_sum(rank: int, world: int, store: str, timeout: float = 30.0, **options: Any) -> None:
    """Join, and exchange something with every other rank."""
    join(rank, world, store, timeout, **options)
    assert sum_is_exact(rank, range(world))


def floats(*shape: int) -> torch.Tensor:
    return torch.ones(*shape, dtype=torch.float32)


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


def barriers() -> None:
    """For a call that is done before the others are heard, because this rank only sends: the news ends one of these."""
    until = time.monotonic() + SOON
    while time.monotonic() < until:
        dist.barrier()


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


def assert_death_is_told(made: tuple[Attempt, Attempt, Attempt], rank: int, dead: int, since: float) -> None:
    first, again, destroyed = made
    assert first.kind == "DistBackendError" and f"rank {dead} is gone" in first.error, (rank, first)
    assert first.at - since < SOON, (rank, first.at - since)
    cause = first.error[first.error.index(f"rank {dead} is gone") :]
    assert cause in again.error, (rank, first, again)
    assert again.took < AT_ONCE, (rank, again)
    assert not destroyed.error and destroyed.took < DESTROYED_WITHIN, (rank, destroyed)
