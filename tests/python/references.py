"""Values for collectives of every dtype and what they must become: float64 NumPy and plain bytes.

Runs in a rank's process and in the tests of other transports. TEST_SEED=n draws other values.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed import ReduceOp

SEED = int(os.environ.get("TEST_SEED", "0"))
TIMEOUT = timedelta(seconds=40)  # of a group: a hang ends as an error that names the rank waited for
WORLDS = [1, 2, 3, 5, 7]
SIZES = [0, 1, 2, 13, 1009, 65_537]
FEW_SIZES = [0, 1, 13, 1009]  # for the largest world and the larger matrices
MANY_CHUNKS = 300_007
LARGE = 2**20 + 7
SMALL_CHUNK = 4096
# How bytes get from rank to rank: two algorithms over iroh, shared memory with and without reading the other process.
ROADS = ["ring", "direct", "shared", "single_copy"]
DEFAULT_ROADS = ["auto", "shared", "single_copy"]
MESSAGE_ROADS = ["auto", "shared"]

INTEGERS = ["uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64"]
HALVES = ["float16", "bfloat16"]
FLOATS = [*HALVES, "float32", "float64"]
COMPLEX = ["complex64", "complex128"]
FLOAT8 = ["float8_e4m3fn", "float8_e5m2"]
REDUCIBLE = ["bool", *INTEGERS, *FLOATS, *COMPLEX]
DTYPES = [*REDUCIBLE, *FLOAT8]
OPS = ["SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR", "PREMUL_SUM"]
BITWISE = ["BAND", "BOR", "BXOR"]
OPS_OF = {
    "bool": ["SUM", "PRODUCT", "MIN", "MAX", *BITWISE],
    **{dtype: ["SUM", "AVG", "PRODUCT", "MIN", "MAX", *BITWISE] for dtype in INTEGERS},
    **{dtype: ["SUM", "AVG", "PRODUCT", "MIN", "MAX", "PREMUL_SUM"] for dtype in FLOATS},
    **{dtype: ["SUM", "AVG", "PRODUCT", "PREMUL_SUM"] for dtype in COMPLEX},
    **{dtype: [] for dtype in FLOAT8},
}
# Unit roundoff: half the distance from 1 to the next number.
ROUNDOFF = {"float16": 2.0**-11, "bfloat16": 2.0**-8, "float32": 2.0**-24, "float64": 2.0**-53}
ROUNDOFF |= {"complex64": 2.0**-24, "complex128": 2.0**-53}
SMALLEST = {"float16": 2.0**-24, "bfloat16": 2.0**-133}  # subnormal; of the wider types nothing comes near it
FACTORS = [0.5, -1.25, 2.0, 0.1, -0.75, 3.0, 1.0]  # of PREMUL_SUM, by rank


def seed_of(label: str) -> int:
    return zlib.crc32(f"{SEED} {label}".encode())


def random_bits(dtype: str, size: int, seed: int, rank: int) -> torch.Tensor:
    """Any bit pattern, NaNs included: what is moved must arrive bit by bit."""
    kind = getattr(torch, dtype)
    rng = np.random.default_rng([seed, rank])
    if dtype == "bool":
        return torch.from_numpy(rng.integers(0, 2, size).astype(bool))
    raw = rng.integers(0, 256, size * kind.itemsize, dtype=np.uint8)
    return as_type(torch.from_numpy(raw), kind)


def as_type(tensor: torch.Tensor, kind: torch.dtype) -> torch.Tensor:
    """The same bytes under another dtype, also where there are none."""
    return tensor.view(kind) if tensor.numel() > 0 else torch.empty(0, dtype=kind)


def random_numbers(dtype: str, op: str, size: int, seed: int, rank: int, world: int) -> torch.Tensor:
    """Operands of a reduction that stays finite; integers wrap around, except for AVG."""
    rng = np.random.default_rng([seed, rank])
    if dtype == "bool" or (dtype in INTEGERS and op != "AVG"):
        return random_bits(dtype, size, seed, rank)
    if dtype in INTEGERS:
        info = np.iinfo(dtype)
        return torch.from_numpy(rng.integers(info.min // (2 * world), info.max // (2 * world), size, dtype=dtype))
    if op == "PRODUCT":
        numbers = rng.uniform(0.5, 1.5, size) * rng.choice([-1.0, 1.0], size)
    else:
        numbers = rng.normal(0.0, 8.0, size)
    if dtype in COMPLEX:
        numbers = numbers + 1j * rng.normal(0.0, 1.0, size)
    return torch.from_numpy(numbers).to(getattr(torch, dtype))


def wide(tensor: torch.Tensor) -> np.ndarray:
    """The same values in a type that holds sums and products of them exactly or nearly so."""
    tensor = tensor.detach().reshape(-1)
    if tensor.dtype in (torch.complex64, torch.complex128):
        return tensor.numpy().astype(np.clongdouble)
    if tensor.dtype.is_floating_point:
        return tensor.to(torch.float64).numpy().astype(np.longdouble)
    return tensor.numpy()


def joined(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """``torch.cat`` for every dtype."""
    return as_type(torch.cat([as_type(part, torch.uint8) for part in parts]), parts[0].dtype)


def bits(tensor: torch.Tensor) -> np.ndarray:
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    return as_type(flat, torch.uint8).numpy()


def reduced(
    dtype: str, op: str, parts: Sequence[np.ndarray], factors: Sequence[float] = FACTORS
) -> tuple[np.ndarray, np.ndarray | float]:
    """The reduction of all ranks' `wide` parts and how far a correct result may be from it.

    Bound for n ranks, unit roundoff u: a sum in any order makes n-1 roundings of partial sums, each at most S = sum of
    |x|, so it errs by at most (n-1) u S; scaling or dividing rounds once more per element, and one more u S covers
    higher orders. A product of n errs by (n-1) u |product|, times sqrt(5) for complex numbers (Brent, 2007). Integers,
    bool, min and max are exact.
    """
    stack = np.stack(list(parts))
    n = len(parts)
    if dtype == "bool":
        of_all = {"SUM": np.any, "MAX": np.any, "BOR": np.any, "PRODUCT": np.all, "MIN": np.all, "BAND": np.all}
        return (np.logical_xor.reduce(stack) if op == "BXOR" else of_all[op](stack, axis=0)), 0.0
    if op in ("MIN", "MAX"):
        return (stack.min(axis=0) if op == "MIN" else stack.max(axis=0)), 0.0
    if op in BITWISE:
        return {"BAND": np.bitwise_and, "BOR": np.bitwise_or, "BXOR": np.bitwise_xor}[op].reduce(stack), 0.0
    if dtype in INTEGERS:
        wider = np.dtype("uint64" if dtype.startswith("u") else "int64")  # modulo 2**64, so also modulo 2**8
        if op == "PRODUCT":
            return np.prod(stack, axis=0, dtype=wider).astype(dtype), 0.0
        total = np.sum(stack, axis=0, dtype=wider)
        if op == "AVG":
            total = np.where(total < 0, -(-total // n), total // n)  # towards zero
        return total.astype(dtype), 0.0
    u = ROUNDOFF[dtype]
    tiny = n * SMALLEST.get(dtype, 0.0)
    if op == "PRODUCT":
        product = np.prod(stack, axis=0)
        return product, np.abs(product) * (u * n * (5**0.5 if dtype in COMPLEX else 1.0)) + tiny
    if op == "PREMUL_SUM":
        stack = stack * np.array(factors[:n], stack.dtype)[:, None]
    bound = (n + 1) * u * np.abs(stack).sum(axis=0)
    total = stack.sum(axis=0)
    return (total / n, bound / n + tiny) if op == "AVG" else (total, bound + tiny)


def first_wrong(got: np.ndarray, want: np.ndarray, bound: np.ndarray | float) -> int | None:
    """Index of the first element of `got` farther from `want` than `bound`; a NaN is wrong."""
    if got.shape != want.shape:
        return -1
    good = np.abs(got - want) <= bound if got.dtype.kind in "fc" else got == want
    return None if good.all() else int(np.argmin(good))


def torch_op(op: str, rank: int) -> Any:
    return dist._make_nccl_premul_sum(FACTORS[rank]) if op == "PREMUL_SUM" else getattr(ReduceOp, op)
