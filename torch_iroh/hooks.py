"""Communication hooks for DistributedDataParallel.

>>> model.register_comm_hook(None, torch_iroh.hooks.bf16_compress)  # doctest: +SKIP

torch's own hooks work too (``allreduce_hook``, ``fp16_compress_hook``, and PowerSGD with one bucket: with several, its
callbacks issue collectives in an order that differs by rank, on every backend). The bf16 ones DDP refuses by name
unless the backend is NCCL.
"""

# No `from __future__ import annotations`: DDP compares the annotations of a hook with the types themselves.
from typing import Any

import torch
import torch.distributed as dist

__all__ = ["bf16_compress"]


def bf16_compress(group: dist.ProcessGroup | None, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:  # type: ignore[name-defined]
    """Average a gradient bucket as bfloat16: half the bytes of float32 on the wire, on any device.

    The gradient is divided by the world size, rounded to bfloat16, summed over the ranks (each partial sum of a rank is
    rounded to bfloat16 where more than one rank holds part of it) and converted back to its own dtype.

    Args:
        group: the process group, or None for the default group.
        bucket: a flat gradient of any floating dtype.
    """
    chosen: Any = dist.group.WORLD if group is None else group
    gradient: torch.Tensor = bucket.buffer()
    compressed = gradient.to(torch.bfloat16).div_(chosen.size())
    future: Any = dist.all_reduce(compressed, group=chosen, async_op=True).get_future()

    def decompress(done: torch.futures.Future[list[torch.Tensor]]) -> torch.Tensor:
        gradient.copy_(done.value()[0])
        return gradient

    averaged: torch.futures.Future[torch.Tensor] = future.then(decompress)
    return averaged
