"""What the tests of failures share: joining a group in a rank's process, and what became of one call there.

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
