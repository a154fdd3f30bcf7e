"""What users say about compression beside the option of a group."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from torch_iroh._groups import iroh_backend

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

__all__ = ["all_reduce_compressed", "compression"]


@contextlib.contextmanager
def compression(codec: str | None) -> Iterator[None]:
    """Within it, the collectives that this thread issues are compressed by ``codec``, whatever their groups' option is.

    All ranks must do the same: ranks that issue a collective with different codecs get an error that names both, before
    data moves. What is compressed at all is said at ``torch_iroh.Options(compression=)``. It is about this thread
    alone: on a GPU, DDP issues its collectives from threads of autograd. For DDP use the option, or a hook.

    >>> with torch_iroh.compression("int8"):  # doctest: +SKIP
    ...     dist.all_reduce(gradient)

    Args:
        codec: one of :func:`torch_iroh.codec.names`, with parameters ("topk:density=0.001"); "none": exact; None: each
            group's own.

    Raises:
        ValueError: no such codec; the text lists the known ones.
    """
    from torch_iroh._native import torch_module

    native = torch_module()
    before = native.set_thread_compression(codec)
    try:
        yield
    finally:
        native.set_thread_compression(before)


def all_reduce_compressed(
    tensor: torch.Tensor,
    codec: str,
    *,
    op: dist.ReduceOp.RedOpType | None = None,
    residual: torch.Tensor | None = None,
    group: dist.ProcessGroup | None = None,
    timeout: timedelta | None = None,
) -> dist.Work:
    """Sum or average a tensor of floats over the ranks, in place, with frames of a codec between sites.

    Every value is quantised twice at most: as this rank's (or its site's) contribution, and in the result. Sums are
    taken in float32 in a fixed order, and all ranks end with equal bits.

    With a ``residual`` (error feedback, arXiv 1901.09847): it is added to this rank's contribution, and afterwards
    holds what this call left out: the rounding of the contribution, and of the result where this rank sums it up.
    Keep it for the next call with the same values' positions, and do not touch it before this call is done. Values that
    are not finite are never owed. An operation that fails leaves it half changed. Inside a site sums are rounded to the
    tensor's dtype, and that is not owed.

    Args:
        tensor: float16, bfloat16, float32 or float64, of any shape, on any device.
        codec: one of :func:`torch_iroh.codec.names`, with parameters; equal on all ranks.
        op: ``dist.ReduceOp.AVG`` (default) or ``SUM``.
        residual: float32, contiguous, on the CPU, with as many elements as ``tensor``; changed in place.
        group: a group of backend "iroh"; None: the default group.
        timeout: None: the group's.

    Returns:
        The work; ``wait()`` it.

    Raises:
        ValueError: an unknown codec, or the group has another backend.
        RuntimeError: a residual of another dtype, device or size.
    """
    import torch.distributed as dist

    reduce: Any = dist.ReduceOp.AVG if op is None else op
    native = iroh_backend(group)
    work: dist.Work = native.compressed_all_reduce(tensor, dist.ReduceOp(reduce), codec, residual, timeout)
    return work
