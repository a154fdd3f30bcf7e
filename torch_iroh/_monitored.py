"""A barrier that says who is missing."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING

from torch_iroh._groups import iroh_backend

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


_FOR_EVER = timedelta(days=36_500)


def monitored_barrier(
    group: ProcessGroup | None = None,
    timeout: timedelta | float | None = None,
    wait_all_ranks: bool = False,
) -> None:
    """Wait until all ranks of a group of backend "iroh" are here, or say on rank 0 which ones are not.

    ``torch.distributed.monitored_barrier`` of torch 2.13 takes groups of gloo only; this is the same for "iroh".
    A barrier that fails does not break the group. Ranks that are not in the group return at once.

    Args:
        group: default: the default group.
        timeout: a timedelta or seconds; default: the group's timeout. It starts on each rank with its call.
        wait_all_ranks: rank 0 names every missing rank, not only the first.

    Raises:
        RuntimeError: a rank is missing. Rank 0 names it; the others say that rank 0 waits for somebody.
        ValueError: the group has another backend.
    """
    import torch.distributed as dist

    outside: object = dist.GroupMember.NON_GROUP_MEMBER
    if group is outside:
        return
    limit = timeout
    if limit is not None and not isinstance(limit, timedelta):
        limit = timedelta(seconds=min(limit, _FOR_EVER.total_seconds()))
    if limit is not None:
        limit = min(limit, _FOR_EVER)
    iroh_backend(group).monitored_barrier(timeout=limit, wait_all_ranks=wait_all_ranks)
