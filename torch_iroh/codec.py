"""Codecs of values on the wire: what one does to a tensor, and how many bytes it takes.

>>> import torch
>>> from torch_iroh import codec
>>> gradient = torch.linspace(-1, 1, 1000)
>>> frame = codec.encode(gradient, "int8")
>>> len(frame), bool((codec.decode(frame, "int8", 1000) - gradient).abs().max() < 0.004)
(1056, True)

A codec is a name, with parameters behind a colon where the usual ones do not fit: ``int8``, ``int4:block=64``,
``topk-int8:density=0.001,rounding=stochastic``.

====================  ==================================================================================
``none``              float32 as it is
``bf16``              bfloat16, rounded to nearest even
``fp8``, ``fp8-e5m2`` 8-bit floats (e4m3fn, e5m2) times a power of two for each block; fp8 has no infinity
``int8``, ``int4``    integers from each block's lowest value to its highest
``sign``              one bit, and the mean magnitude of each block
``topk``              the share ``density`` of the values that is largest in magnitude, the others are 0
``topk-int8``         the same, the kept values as int8; likewise ``topk-int4``
====================  ==================================================================================

Parameters: ``block`` (values that share a scale: a power of two from 16 to 4096, default 128), ``scale`` (``bf16`` or
``fp32``), ``density`` (default 0.01), ``rounding`` (``nearest`` or ``stochastic``) and ``nonfinite`` (``keep``: NaN and
infinity stay visible; ``raise``: :func:`encode` raises).
"""

from __future__ import annotations

from typing import cast

import torch

from torch_iroh._native import core_module

__all__ = ["decode", "encode", "frame_bytes", "names"]


def names() -> list[str]:
    """The known codecs, without their parameters."""
    return cast("list[str]", core_module().codec_names())


def frame_bytes(codec: str, count: int) -> int:
    """The size of a frame of ``count`` values, which depends on nothing else.

    Raises:
        ValueError: for an unknown codec (the text lists the known ones) or parameter.
    """
    return cast(int, core_module().codec_frame_bytes(codec, count))


def encode(tensor: torch.Tensor, codec: str, seed: int = 0) -> bytes:
    """The frame of a tensor's values, taken as float32 in the order of ``tensor.flatten()``.

    Args:
        tensor: of any shape, floating dtype and device.
        codec: as ``"int8"`` or ``"topk:density=0.001"``.
        seed: of stochastic rounding; equal seeds give equal frames.

    Raises:
        ValueError: for an unknown codec or parameter, a tensor that is not floating, or, with ``nonfinite=raise``,
            values that are not finite.
    """
    if not tensor.is_floating_point():
        raise ValueError(f"codec: a tensor of {tensor.dtype} is not floating")
    values = tensor.detach().to("cpu", torch.float32).contiguous().numpy()
    return cast(bytes, core_module().codec_encode(codec, values, seed))


def decode(frame: bytes, codec: str, count: int) -> torch.Tensor:
    """The ``count`` values of a frame, a flat float32 tensor on the CPU.

    Raises:
        ValueError: for an unknown codec or parameter.
        RuntimeError: where the frame is not one of this codec and count, or was changed since.
    """
    return torch.from_numpy(core_module().codec_decode(codec, frame, count))
