"""Communication hooks for DistributedDataParallel: gradients travel compressed, all ranks end with equal bits.

>>> state = torch_iroh.hooks.State()  # error feedback, no warm-up  # doctest: +SKIP
>>> model.register_comm_hook(state, torch_iroh.hooks.int8)  # doctest: +SKIP

===============  ==========================================================  =============================
hook             what a value becomes on the wire                            options of :class:`State`
===============  ==========================================================  =============================
bf16_compress    bfloat16                                                    all ranks' default with None
fp8              8-bit float (e4m3), a power-of-two scale per block          block
int8, int4       8 or 4 bits, a scale per block                              block, rounding
sign             its sign, the mean magnitude per block                      block
topk             itself, where it is among the 1 % largest, else nothing     density, momentum
topk_int8, _int4 8 or 4 bits, where it is among the 1 % largest              density, momentum, block, rounding
===============  ==========================================================  =============================

Which to choose is said in docs/compression.md. torch's own hooks work too (``allreduce_hook``, ``fp16_compress_hook``,
and PowerSGD with one bucket: with several, its callbacks issue collectives in an order that differs by rank, on every
backend). The bf16 ones DDP refuses by name unless the backend is NCCL.
"""

# No `from __future__ import annotations`: DDP compares the annotations of a hook with the types themselves.
from typing import Any

import torch
import torch.distributed as dist

from torch_iroh._hook_state import State

__all__ = ["State", "bf16_compress", "fp8", "int4", "int8", "sign", "topk", "topk_int4", "topk_int8"]


def bf16_compress(
    state: State | dist.ProcessGroup | None,
    bucket: dist.GradBucket,  # type: ignore[name-defined]
) -> torch.futures.Future[torch.Tensor]:
    """Average a gradient bucket as bfloat16: half the bytes of float32 on the wire, on any device.

    With a :class:`State`: by the codec "bf16", with error feedback. With a group, whatever its backend: the gradient is
    divided by the world size, rounded to bfloat16, summed over the ranks (each partial sum of a rank is rounded to
    bfloat16 where more than one rank holds part of it) and converted back to its own dtype.

    Args:
        state: a :class:`State`, or the process group, or None for the default group.
        bucket: a flat gradient of any floating dtype.
    """
    if isinstance(state, State):
        return state.average(bucket, "bf16")
    group = state
    chosen: Any = dist.group.WORLD if group is None else group
    gradient: torch.Tensor = bucket.buffer()
    compressed = gradient.to(torch.bfloat16).div_(chosen.size())
    future: Any = dist.all_reduce(compressed, group=chosen, async_op=True).get_future()

    def decompress(done: torch.futures.Future[list[torch.Tensor]]) -> torch.Tensor:
        gradient.copy_(done.value()[0])
        return gradient

    averaged: torch.futures.Future[torch.Tensor] = future.then(decompress)
    return averaged


def fp8(state: State, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:  # type: ignore[name-defined]
    """Average a gradient bucket as 8-bit floats (e4m3): 3.9 times fewer bytes than float32."""
    return state.average(bucket, "fp8")


def int8(state: State, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:  # type: ignore[name-defined]
    """Average a gradient bucket as 8-bit integers: 3.9 times fewer bytes than float32."""
    return state.average(bucket, "int8")


def int4(state: State, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:  # type: ignore[name-defined]
    """Average a gradient bucket as 4-bit integers: 7.6 times fewer bytes than float32."""
    return state.average(bucket, "int4")


def sign(state: State, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:  # type: ignore[name-defined]
    """Average a gradient bucket as signs and the mean magnitude per block: 28 times fewer bytes than float32."""
    return state.average(bucket, "sign")


def topk(state: State, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:  # type: ignore[name-defined]
    """Average the largest values of a gradient bucket, in float32; the others wait for later steps."""
    return state.average(bucket, "topk")


def topk_int8(state: State, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:  # type: ignore[name-defined]
    """Average the largest values of a gradient bucket, as 8-bit integers; the others wait for later steps."""
    return state.average(bucket, "topk-int8")


def topk_int4(state: State, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:  # type: ignore[name-defined]
    """Average the largest values of a gradient bucket, as 4-bit integers; the others wait for later steps."""
    return state.average(bucket, "topk-int4")
