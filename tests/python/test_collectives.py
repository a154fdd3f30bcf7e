"""Every collective of backend "iroh" between real processes over loopback, against float64 NumPy and plain bytes.

One family of processes per world runs the whole matrix over one set of groups. In a rank's process a scenario checks
this rank's results against its own reference and notes a digest of what all ranks must share; the test compares those.
TEST_SEED=n draws other values.
"""

from __future__ import annotations

import hashlib
import os
import re
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from ranks import Ranks
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
ROADS = ["ring", "direct", "shared", "buffered"]
DEFAULT_ROADS = ["auto", "shared", "buffered"]
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


# ---- values, in a rank's process and in the tests of other transports ----


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


class Ledger:
    """What one rank found: digests of results that all ranks share, complaints, and the number of checks."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.digests: dict[str, str] = {}
        self.complaints: list[str] = []
        self.checks = 0

    def same(self, label: str, tensor: torch.Tensor) -> None:
        """All ranks that note this label must have these bits."""
        self.digests[label] = hashlib.sha256(bits(tensor).tobytes()).hexdigest()

    def near(self, label: str, got: torch.Tensor, want: np.ndarray, bound: np.ndarray | float) -> None:
        self._note(label, wide(got), want, bound)

    def equal(self, label: str, got: torch.Tensor, want: torch.Tensor) -> None:
        """Bit by bit; the index is that of the element."""
        self.checks += 1
        found, expected = bits(got), bits(want)
        if np.array_equal(found, expected):
            return
        if len(found) != len(expected):
            self.complain(label, f"{got.numel()} elements, expected {want.numel()}")
            return
        index = int(np.argmax(found != expected)) // got.element_size()
        self.complain(label, f"first wrong index {index}: {got.reshape(-1)[index]} != {want.reshape(-1)[index]}")

    def true(self, label: str, fact: bool, text: str) -> None:
        self.checks += 1
        if not fact:
            self.complain(label, text)

    def complain(self, label: str, text: str) -> None:
        self.complaints.append(f"seed {SEED}, rank {self.rank}, {label}: {text}")

    def _note(self, label: str, got: np.ndarray, want: np.ndarray, bound: np.ndarray | float) -> None:
        self.checks += 1
        index = first_wrong(got, want, bound)
        if index is None:
            return
        if index < 0:
            self.complain(label, f"shape {got.shape}, expected {want.shape}")
            return
        allowed = np.broadcast_to(bound, got.shape)[index]
        self.complain(label, f"first wrong index {index}: {got[index]!r}, expected {want[index]!r} within {allowed!r}")


def settle(ledgers: Sequence[Ledger]) -> None:
    """No rank complains, and all ranks have equal bits."""
    complaints = [text for ledger in ledgers for text in ledger.complaints]
    assert not complaints, f"{len(complaints)} complaints\n" + "\n".join(complaints[:20])
    assert all(ledger.checks for ledger in ledgers), "a rank checked nothing"
    by_label: dict[str, set[str]] = {}
    for ledger in ledgers:
        for label, digest in ledger.digests.items():
            by_label.setdefault(label, set()).add(digest)
    torn = [label for label, digests in by_label.items() if len(digests) > 1]
    assert not torn, f"seed {SEED}: ranks end with different bits: {torn[:20]}"


# ---- the processes ----

_groups: dict[str, Any] = {}  # in a rank's process
_families: dict[int, Ranks] = {}  # in pytest's


def join(rank: int, world: int, store: str) -> None:
    import torch_iroh

    dist.init_process_group("iroh", store=dist.FileStore(store, world), rank=rank, world_size=world, timeout=TIMEOUT)
    _groups["auto"] = dist.group.WORLD  # over iroh: see ranks.ENVIRONMENT
    for road, shared_memory in (("shared", "auto"), ("buffered", "buffered")):
        options = torch_iroh.Options(shared_memory=shared_memory)
        _groups[road] = dist.new_group(backend="iroh", pg_options=options, timeout=TIMEOUT)
    for algorithm in ("ring", "direct"):
        options = torch_iroh.Options(algorithm=algorithm)
        _groups[algorithm] = dist.new_group(backend="iroh", pg_options=options, timeout=TIMEOUT)
        options = torch_iroh.Options(algorithm=algorithm, chunk_bytes=SMALL_CHUNK)
        _groups[f"{algorithm}, small chunks"] = dist.new_group(backend="iroh", pg_options=options, timeout=TIMEOUT)


def on_road(rank: int, road: str, scenario: Callable[..., Ledger], *arguments: Any) -> Ledger:
    """The scenario with another group in the place of the default one."""
    before = dist.group.WORLD
    dist.distributed_c10d._update_default_pg(_groups[road])
    try:
        return scenario(rank, *arguments)
    finally:
        dist.distributed_c10d._update_default_pg(before)


@pytest.fixture(scope="module")
def _all_families() -> Iterator[dict[int, Ranks]]:
    yield _families
    for family in _families.values():
        family.close()
    _families.clear()


@pytest.fixture
def run(_all_families: dict[int, Ranks], tmp_path: Path) -> Callable[..., None]:
    """``run(world, scenario, *arguments)``: the scenario on each rank of that world's family, settled.

    With the default group on each of `roads` in turn.
    """

    def call(
        world: int,
        scenario: Callable[..., Ledger],
        *arguments: Any,
        roads: Sequence[str] = ("auto",),
        deadline: float = 50.0,
    ) -> None:
        family = _all_families.get(world)
        if family is None or not family.usable:
            family = _all_families[world] = Ranks(world)
            family.run(join, world, str(tmp_path / "store"))
        try:
            for road in roads if world > 1 else roads[:1]:
                settle(family.run(on_road, road, scenario, *arguments, deadline=deadline))
        except BaseException:
            family.close()  # its groups may be broken or out of step
            raise

    return call


def matrix_sizes(world: int, dtype: str) -> list[int]:
    """All sizes for some types of each width; the largest world and the others make do with fewer."""
    return SIZES if world < 7 and dtype in ("bool", "int16", "bfloat16", "float32", "complex128") else FEW_SIZES


# ---- reductions ----


def scenario_all_reduce(rank: int, dtype: str, sizes: list[int], groups: list[str], ops: list[str]) -> Ledger:
    ledger, world = Ledger(rank), dist.get_world_size()
    for op in ops:
        if dtype in COMPLEX and op == "PRODUCT":
            continue  # torch.distributed itself refuses it, for all_reduce only
        for size in sizes:
            label = f"all_reduce world={world} dtype={dtype} op={op} size={size}"
            seed = seed_of(label)
            parts = [random_numbers(dtype, op, size, seed, peer, world) for peer in range(world)]
            want, bound = reduced(dtype, op, [wide(part) for part in parts])
            for group in groups:
                tensor = parts[rank].clone()
                dist.all_reduce(tensor, torch_op(op, rank), group=_groups[group])
                ledger.near(f"{label} {group} seed={seed}", tensor, want, bound)
                ledger.same(f"{label} {group}", tensor)
    return ledger


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("dtype", REDUCIBLE)
def test_all_reduce_equals_float64_on_every_rank(run, world, dtype):
    run(world, scenario_all_reduce, dtype, matrix_sizes(world, dtype), ROADS, OPS_OF[dtype])


@pytest.mark.parametrize("world", WORLDS)
def test_all_reduce_of_many_chunks(run, world):
    groups = ["ring, small chunks", "direct, small chunks", "shared", "buffered"]
    run(world, scenario_all_reduce, "float32", [MANY_CHUNKS // (2 if world == 7 else 1)], groups, ["SUM"])
    run(world, scenario_all_reduce, "int8", [MANY_CHUNKS], groups, ["BXOR"])


@pytest.mark.parametrize("world", [2, 3, 5])
def test_all_reduce_of_a_million_elements(run, world):
    run(world, scenario_all_reduce, "float32", [LARGE], DEFAULT_ROADS, ["SUM"])


def scenario_half_sum(rank: int, dtype: str) -> Ledger:
    """Big + 1 + 1, where big + 1 rounds to big: only an accumulator wider than the type keeps both ones."""
    ledger = Ledger(rank)
    big = 1 / ROUNDOFF[dtype]
    tensor = torch.full([5], big if rank == 0 else 1.0, dtype=getattr(torch, dtype))
    dist.all_reduce(tensor, group=_groups["direct"])
    ledger.equal(f"all_reduce world=3 dtype={dtype} op=SUM direct", tensor, torch.full_like(tensor, big + 2))
    return ledger


@pytest.mark.parametrize("dtype", HALVES)
def test_half_sums_accumulate_in_fp32_where_the_owner_sees_all_parts(run, dtype):
    run(3, scenario_half_sum, dtype)  # DESIGN.md, section 5


def scenario_nan(rank: int) -> Ledger:
    ledger, world = Ledger(rank), dist.get_world_size()
    for dtype in FLOATS:
        for op in ("MIN", "MAX", "SUM"):
            for group in ROADS:
                tensor = torch.arange(12, dtype=torch.float32).to(getattr(torch, dtype))
                tensor[rank] = float("nan")
                dist.all_reduce(tensor, getattr(ReduceOp, op), group=_groups[group])
                label = f"NaN world={world} dtype={dtype} op={op} {group}"
                found = tensor.isnan().nonzero().flatten().tolist()
                ledger.true(label, found == list(range(world)), f"NaN at {found}, expected at 0..{world - 1}")
                ledger.same(label, tensor)
    return ledger


@pytest.mark.parametrize("world", [2, 3])
def test_nan_of_any_rank_survives_sum_min_and_max(run, world):
    run(world, scenario_nan, roads=DEFAULT_ROADS)


def scenario_premul_tensor(rank: int) -> Ledger:
    ledger, world = Ledger(rank), dist.get_world_size()
    tensor = torch.full([7], 4.0)
    dist.all_reduce(tensor, dist._make_nccl_premul_sum(torch.tensor(FACTORS[rank])))
    total = 4.0 * float(np.float32(FACTORS[:world]).astype(np.float64).sum())
    ledger.near("premul by tensor", tensor, np.full(7, total, np.longdouble), abs(total) * 2.0**-20)
    return ledger


def test_premul_sum_takes_its_factor_from_a_tensor(run):
    run(3, scenario_premul_tensor)


def scenario_wrong_ops(rank: int, dtype: str) -> Ledger:
    ledger, world = Ledger(rank), dist.get_world_size()
    for op in OPS:
        if op in OPS_OF[dtype]:
            continue
        # For all_reduce of complex numbers torch.distributed raises before the backend is asked.
        text = "has no meaning for dtype|does not support .* on complex tensors"
        tensor = random_bits(dtype, 6, 1, rank)
        calls: dict[str, Callable[[], Any]] = {
            "all_reduce": lambda t=tensor, o=op: dist.all_reduce(t, torch_op(o, rank)),
            "reduce": lambda t=tensor, o=op: dist.reduce(t, 0, torch_op(o, rank)),
            "reduce_scatter": lambda t=tensor, o=op: dist.reduce_scatter_tensor(
                t[: 6 // world], t[: 6 // world * world], torch_op(o, rank)
            ),
        }
        for name, call in calls.items():
            label = f"{name} dtype={dtype} op={op}"
            try:
                call()
                ledger.complain(label, "accepted")
            except (RuntimeError, ValueError) as error:  # torch itself refuses some, with ValueError
                ledger.true(label, re.search(text, str(error)) is not None, f"unclear: {error}")
    dist.barrier()  # and the group still works
    ledger.checks += 1
    return ledger


@pytest.mark.parametrize("dtype", DTYPES)
def test_reduce_op_without_meaning_is_refused_by_name(run, dtype):
    run(2, scenario_wrong_ops, dtype)


def scenario_reduce(rank: int, dtype: str, sizes: list[int]) -> Ledger:
    ledger, world = Ledger(rank), dist.get_world_size()
    for op in OPS_OF[dtype][:2] if world > 3 else OPS_OF[dtype]:
        for size in sizes:
            for root in range(world):
                label = f"reduce world={world} dtype={dtype} op={op} size={size} root={root}"
                seed = seed_of(label)
                parts = [random_numbers(dtype, op, size, seed, peer, world) for peer in range(world)]
                for group in ROADS:
                    tensor = parts[rank].clone()
                    dist.reduce(tensor, root, torch_op(op, rank), group=_groups[group])
                    if rank == root:
                        want, bound = reduced(dtype, op, [wide(part) for part in parts])
                        ledger.near(f"{label} {group} seed={seed}", tensor, want, bound)
                    else:
                        ledger.equal(f"{label} {group} seed={seed}, not the root", tensor, parts[rank])
    return ledger


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("dtype", ["bool", "uint16", "int64", "bfloat16", "float32", "complex64"])
def test_reduce_to_every_root_leaves_the_others_alone(run, world, dtype):
    run(world, scenario_reduce, dtype, [0, 1, 1009] if world < 5 else [13])


def scenario_reduce_scatter(rank: int, dtype: str, sizes: list[int]) -> Ledger:
    ledger, world = Ledger(rank), dist.get_world_size()
    kind = getattr(torch, dtype)
    for op in OPS_OF[dtype]:
        for size in sizes:
            label = f"reduce_scatter world={world} dtype={dtype} op={op} block={size}"
            seed = seed_of(label)
            parts = [random_numbers(dtype, op, size * world, seed, peer, world) for peer in range(world)]
            want, bound = reduced(dtype, op, [wide(part)[rank * size : (rank + 1) * size] for part in parts])
            for group in ROADS:
                for form in ("tensor", "list"):
                    output = torch.empty(size, dtype=kind)
                    source = parts[rank].clone()
                    if form == "tensor":
                        dist.reduce_scatter_tensor(output, source, torch_op(op, rank), group=_groups[group])
                    else:
                        blocks = [block.clone() for block in source.reshape(world, size)]
                        dist.reduce_scatter(output, blocks, torch_op(op, rank), group=_groups[group])
                    ledger.near(f"{label} {form} {group} seed={seed}", output, want, bound)
                    ledger.equal(f"{label} {form} {group}, input", source, parts[rank])
    return ledger


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("dtype", ["bool", "int8", "uint64", "float16", "bfloat16", "float32", "float64", "complex64"])
def test_reduce_scatter_of_tensor_and_list(run, world, dtype):
    run(world, scenario_reduce_scatter, dtype, [0, 1, 1009] if world < 7 else [13])


def scenario_reduce_scatter_uneven(rank: int) -> Ledger:
    ledger, world = Ledger(rank), dist.get_world_size()
    sizes = [17 * peer % 41 for peer in range(world)]  # rank 0 gets nothing
    for group in ROADS:
        label = f"uneven reduce_scatter world={world} dtype=float64 op=SUM sizes={sizes} {group}"
        parts = [random_numbers("float64", "SUM", sum(sizes), 5, peer, world) for peer in range(world)]
        start = sum(sizes[:rank])
        want, bound = reduced("float64", "SUM", [wide(part)[start : start + sizes[rank]] for part in parts])
        output = torch.empty(sizes[rank], dtype=torch.float64)
        dist.reduce_scatter(output, list(parts[rank].split(sizes)), group=_groups[group])
        ledger.near(label, output, want, bound)
    return ledger


@pytest.mark.parametrize("world", WORLDS)
def test_reduce_scatter_of_uneven_blocks(run, world):
    run(world, scenario_reduce_scatter_uneven)


# ---- movement: bit patterns of every dtype ----


def scenario_broadcast(rank: int, dtype: str, sizes: list[int]) -> Ledger:
    ledger, world = Ledger(rank), dist.get_world_size()
    for size in sizes:
        for root in range(world):
            label = f"broadcast world={world} dtype={dtype} size={size} root={root}"
            want = random_bits(dtype, size, seed_of(label), root)
            for group in ROADS:
                tensor = want.clone() if rank == root else torch.zeros(size, dtype=want.dtype)
                dist.broadcast(tensor, root, group=_groups[group])
                ledger.equal(f"{label} {group} seed={seed_of(label)}", tensor, want)
    return ledger


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_broadcast_from_every_root(run, world, dtype):
    run(world, scenario_broadcast, dtype, [0, 1, 1009] if world < 5 else [13])


@pytest.mark.parametrize("world", WORLDS)
def test_broadcast_of_many_elements(run, world):
    run(world, scenario_broadcast, "int32", [65_537])


def scenario_all_gather(rank: int, dtype: str, sizes: list[int]) -> Ledger:
    ledger, world = Ledger(rank), dist.get_world_size()
    kind = getattr(torch, dtype)
    for size in sizes:
        label = f"all_gather world={world} dtype={dtype} size={size}"
        seed = seed_of(label)
        parts = [random_bits(dtype, size, seed, peer) for peer in range(world)]
        whole = joined(parts)
        for group in ROADS:
            outputs = [torch.zeros(size, dtype=kind) for _ in range(world)]
            dist.all_gather(outputs, parts[rank], group=_groups[group])
            for peer in range(world):
                ledger.equal(f"{label} list[{peer}] {group} seed={seed}", outputs[peer], parts[peer])
            for shape in ([world * size], [world, size]):
                output = torch.zeros(shape, dtype=kind)
                dist.all_gather_into_tensor(output, parts[rank], group=_groups[group])
                ledger.equal(f"{label} into {shape} {group} seed={seed}", output, whole)
    return ledger


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_all_gather_into_list_and_tensor(run, world, dtype):
    run(world, scenario_all_gather, dtype, [0, 1, 13, 1009])


@pytest.mark.parametrize("world", WORLDS)
def test_all_gather_of_many_elements(run, world):
    run(world, scenario_all_gather, "int16", [65_537])


def scenario_all_gather_uneven(rank: int, dtype: str) -> Ledger:
    ledger, world = Ledger(rank), dist.get_world_size()
    for scale in (1, 2003):
        sizes = [scale * ((3 * peer + 2) % 5) for peer in range(world)]  # rank 1 has nothing
        parts = [random_bits(dtype, size, 7, peer) for peer, size in enumerate(sizes)]
        for group in ROADS:
            outputs = [torch.zeros(size, dtype=parts[0].dtype) for size in sizes]
            dist.all_gather(outputs, parts[rank], group=_groups[group])
            for peer in range(world):
                label = f"uneven all_gather world={world} dtype={dtype} sizes={sizes} [{peer}] {group} seed=7"
                ledger.equal(label, outputs[peer], parts[peer])
    return ledger


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("dtype", ["uint8", "float64"])
def test_all_gather_of_uneven_parts(run, world, dtype):
    run(world, scenario_all_gather_uneven, dtype)


def scenario_gather_scatter(rank: int, dtype: str, sizes: list[int]) -> Ledger:
    ledger, world = Ledger(rank), dist.get_world_size()
    for size in sizes:
        for root in range(world):
            label = f"world={world} dtype={dtype} size={size} root={root}"
            seed = seed_of(label)
            parts = [random_bits(dtype, size, seed, peer) for peer in range(world)]
            outputs = [torch.zeros_like(part) for part in parts] if rank == root else None
            dist.gather(parts[rank], outputs, dst=root)
            for peer, output in enumerate(outputs or []):
                ledger.equal(f"gather {label} [{peer}] seed={seed}", output, parts[peer])
            output = torch.zeros_like(parts[rank])
            dist.scatter(output, parts if rank == root else None, src=root)
            ledger.equal(f"scatter {label} seed={seed}", output, parts[rank])
    return ledger


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_gather_and_scatter_at_every_root(run, world, dtype):
    run(world, scenario_gather_scatter, dtype, [0, 1, 1009] if world < 5 else [13], roads=DEFAULT_ROADS)


def scenario_all_to_all(rank: int, dtype: str, scale: int) -> Ledger:
    ledger, world = Ledger(rank), dist.get_world_size()
    kind = getattr(torch, dtype)

    def size(sender: int, receiver: int) -> int:  # some of them zero, none of the two directions equal
        return scale * ((2 * sender + 5 * receiver) % 7)

    def block(sender: int, receiver: int, count: int) -> torch.Tensor:
        return random_bits(dtype, count, 11 + receiver, sender)

    peers = range(world)
    label = f"world={world} dtype={dtype} scale={scale} seed=11"
    for uneven in (False, True):
        out = [block(rank, peer, size(rank, peer) if uneven else scale) for peer in peers]
        want = [block(peer, rank, size(peer, rank) if uneven else scale) for peer in peers]
        got = [torch.zeros(part.shape, dtype=kind) for part in want]
        dist.all_to_all(got, out)
        for peer in peers:
            ledger.equal(f"all_to_all {label} uneven={uneven} from {peer}", got[peer], want[peer])

        single = torch.zeros(sum(map(len, want)), dtype=kind)
        splits = ([len(part) for part in want], [len(part) for part in out]) if uneven else (None, None)
        dist.all_to_all_single(single, joined(out), *splits)
        ledger.equal(f"all_to_all_single {label} uneven={uneven}", single, joined(want))
        # The same, with rows of three elements: splits count rows.
        rows = torch.zeros(len(single), 3, dtype=kind)
        source = joined(out)
        if dtype not in FLOAT8:
            dist.all_to_all_single(rows, source.repeat_interleave(3).view(-1, 3), *splits)
            ledger.equal(f"all_to_all_single {label} rows uneven={uneven}", rows, joined(want).repeat_interleave(3))
    return ledger


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_all_to_all_even_uneven_and_empty(run, world, dtype):
    run(world, scenario_all_to_all, dtype, 3, roads=DEFAULT_ROADS)
    if dtype in ("int64", "float16") and world < 7:
        run(world, scenario_all_to_all, dtype, 0, roads=DEFAULT_ROADS)
        run(world, scenario_all_to_all, dtype, 5003, roads=DEFAULT_ROADS)


# ---- barrier and point to point ----


def scenario_barrier(rank: int) -> Ledger:
    ledger, world = Ledger(rank), dist.get_world_size()
    for slow in range(world):
        if rank == slow:
            time.sleep(0.05)
        entered = torch.tensor([time.monotonic_ns()])  # one clock for all processes of a host
        dist.barrier()
        left = time.monotonic_ns()
        all_entered = [torch.zeros_like(entered) for _ in range(world)]
        dist.all_gather(all_entered, entered)
        last = max(int(moment) for moment in all_entered)
        ledger.true(f"barrier world={world} slow={slow}", left >= last, f"left {last - left} ns before the last came")
    return ledger


@pytest.mark.parametrize("world", WORLDS)
def test_nobody_leaves_a_barrier_before_all_have_come(run, world):
    run(world, scenario_barrier, roads=DEFAULT_ROADS)


def scenario_send_recv(rank: int, dtype: str, sizes: list[int]) -> Ledger:
    ledger, world = Ledger(rank), dist.get_world_size()
    for size in sizes:
        for distance in range(1, world):
            to, source = (rank + distance) % world, (rank - distance) % world
            label = f"send/recv world={world} dtype={dtype} size={size} distance={distance} seed={size}"
            sending = dist.isend(random_bits(dtype, size, size, rank), to)
            got = torch.zeros(size, dtype=getattr(torch, dtype))
            from_rank = dist.recv(got, source)
            sending.wait()
            ledger.true(label, from_rank == source, f"recv returned {from_rank}, expected {source}")
            ledger.equal(label, got, random_bits(dtype, size, size, source))
    return ledger


@pytest.mark.parametrize("world", [2, 3, 5])
@pytest.mark.parametrize("dtype", DTYPES)
def test_send_and_recv_between_all_pairs(run, world, dtype):
    run(world, scenario_send_recv, dtype, [0, 1, 1009], roads=MESSAGE_ROADS)


@pytest.mark.parametrize("world", [2, 3])
def test_send_and_recv_of_megabytes_both_ways_at_once(run, world):
    run(world, scenario_send_recv, "float32", [LARGE], roads=MESSAGE_ROADS)


def scenario_tags(rank: int) -> Ledger:
    ledger = Ledger(rank)
    count = 48
    order = np.random.default_rng(SEED).permutation(count).tolist()
    sizes = [1 + 977 * tag % 4099 for tag in range(count)]
    if rank == 0:
        works = [dist.isend(random_bits("int32", sizes[tag], 3, tag), 1, tag=tag) for tag in range(count)]
    else:
        got = {tag: torch.zeros(sizes[tag], dtype=torch.int32) for tag in order}
        works = [dist.irecv(got[tag], 0, tag=tag) for tag in order]
    for work in works:
        work.wait()
    for tag in order if rank == 1 else []:
        ledger.equal(f"tag {tag}, received in the order {order}", got[tag], random_bits("int32", sizes[tag], 3, tag))
    # Equal tags: in the order sent.
    values = [torch.tensor([float(n)]) for n in range(count)]
    if rank == 0:
        for value in values:
            dist.send(value, 1, tag=9)
    else:
        for value in values:
            found = torch.zeros(1)
            dist.recv(found, 0, tag=9)
            ledger.equal("one tag, many messages", found, value)
    ledger.checks += 1
    return ledger


def test_messages_of_many_tags_may_be_received_in_any_order(run):
    run(2, scenario_tags, roads=MESSAGE_ROADS)


def scenario_recv_anyone(rank: int) -> Ledger:
    ledger, world = Ledger(rank), dist.get_world_size()
    rounds = 5
    if rank != 0:
        for turn in range(rounds):
            dist.send(torch.tensor([rank, turn]), 0, tag=turn)
    for turn in range(rounds if rank == 0 else 0):
        seen = []
        for _ in range(world - 1):
            got = torch.zeros(2, dtype=torch.int64)
            source = dist.recv(got, tag=turn)
            ledger.true("recv from anyone", got.tolist() == [source, turn], f"{got.tolist()} came from {source}")
            seen.append(source)
        ledger.true("recv from anyone", sorted(seen) == list(range(1, world)), f"turn {turn}: heard of {seen}")
    ledger.checks += 1
    return ledger


@pytest.mark.parametrize("world", [2, 3, 5])
def test_recv_from_anyone_names_the_sender(run, world):
    run(world, scenario_recv_anyone, roads=MESSAGE_ROADS)


def scenario_batch(rank: int) -> Ledger:
    ledger, world = Ledger(rank), dist.get_world_size()
    out, back = (rank + 1) % world, (rank - 1) % world
    got = [torch.zeros(n, dtype=torch.float64) for n in (5, 40_001)]
    operations = [
        dist.P2POp(dist.isend, random_bits("float64", 5, 1, rank), out),
        dist.P2POp(dist.irecv, got[0], back),
        dist.P2POp(dist.isend, random_bits("float64", 40_001, 2, rank), back),
        dist.P2POp(dist.irecv, got[1], out),
    ]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    ledger.equal(f"batch world={world} from {back}", got[0], random_bits("float64", 5, 1, back))
    ledger.equal(f"batch world={world} from {out}", got[1], random_bits("float64", 40_001, 2, out))
    return ledger


@pytest.mark.parametrize("world", [2, 3, 5])
def test_batch_isend_irecv_around_a_ring(run, world):
    run(world, scenario_batch, roads=MESSAGE_ROADS)


# ---- coalesced, functional, object collectives ----


def scenario_coalesced(rank: int) -> Ledger:
    ledger, world = Ledger(rank), dist.get_world_size()
    sizes = [3, 0, 4097, 1]
    total = sum(range(1, world + 1))
    label = f"world={world}"

    def fresh() -> list[torch.Tensor]:
        return [torch.full([size], float((index + 1) * (rank + 1))) for index, size in enumerate(sizes)]

    def check(name: str, tensors: list[torch.Tensor]) -> None:
        for index, tensor in enumerate(tensors):
            ledger.equal(f"{name} {label} [{index}]", tensor, torch.full_like(tensor, (index + 1) * total))

    tensors = fresh()
    dist.all_reduce_coalesced(tensors)
    check("all_reduce_coalesced", tensors)
    tensors = fresh()
    dist.all_reduce_coalesced(tensors, async_op=True).wait()
    check("all_reduce_coalesced async", tensors)
    for async_ops in (False, True):
        tensors = fresh()
        with dist._coalescing_manager(async_ops=async_ops) as manager:
            for tensor in tensors:
                dist.all_reduce(tensor)
        if async_ops:
            manager.wait()
        check(f"coalescing manager async={async_ops}", tensors)

    parts = [torch.full([n], rank + 0.5) for n in (3, 1009)]
    gathered = [torch.zeros(world, n) for n in (3, 1009)]
    with dist._coalescing_manager(async_ops=True) as manager:
        for into, part in zip(gathered, parts, strict=True):
            dist.all_gather_into_tensor(into, part)
    manager.wait()
    for into in gathered:
        want = (torch.arange(world) + 0.5)[:, None].expand_as(into)
        ledger.equal(f"coalesced all_gather {label}", into, want)
    sources = [torch.arange(world * n, dtype=torch.float64) * (rank + 1) for n in (2, 1009)]
    outputs = [torch.zeros(n, dtype=torch.float64) for n in (2, 1009)]
    with dist._coalescing_manager(async_ops=True) as manager:
        for into, source in zip(outputs, sources, strict=True):
            dist.reduce_scatter_tensor(into, source)
    manager.wait()
    for into in outputs:
        want = (torch.arange(len(into), dtype=torch.float64) + rank * len(into)) * total
        ledger.equal(f"coalesced reduce_scatter {label}", into, want)

    lists = [[torch.zeros(n) for n in (3, 1009)] for _ in range(world)]
    dist.all_gather_coalesced(lists, parts)
    for peer, tensors in enumerate(lists):
        for tensor in tensors:
            ledger.equal(f"all_gather_coalesced {label} [{peer}]", tensor, torch.full_like(tensor, peer + 0.5))
    return ledger


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("world", [1, 2, 3, 5])
def test_coalesced_collectives_equal_single_ones(run, world):
    run(world, scenario_coalesced, roads=DEFAULT_ROADS)


def scenario_functional(rank: int) -> Ledger:
    ledger, world = Ledger(rank), dist.get_world_size()
    label, group = f"world={world}", dist.group.WORLD
    total = sum(range(1, world + 1))
    base = torch.arange(6 * world, dtype=torch.float32).view(2 * world, 3)
    mine = base * (rank + 1)

    ledger.equal(f"functional all_reduce {label}", funcol.all_reduce(mine, "sum", group), base * total)
    ledger.equal(f"functional all_reduce {label}, input", mine, base * (rank + 1))
    averaged = funcol.all_reduce(mine, "avg", group)
    ledger.near(f"functional avg {label}", averaged, wide(base) * total / world, np.abs(wide(base)) * total * 2.0**-23)
    whole = [base * (peer + 1) for peer in range(world)]
    for dim in (0, 1):
        gathered = funcol.all_gather_tensor(mine, dim, group)
        ledger.equal(f"functional all_gather dim {dim} {label}", gathered, torch.cat(whole, dim))
    scattered = funcol.reduce_scatter_tensor(mine, "sum", 0, group)
    ledger.equal(f"functional reduce_scatter {label}", scattered, (base * total)[2 * rank : 2 * rank + 2])
    sideways = funcol.reduce_scatter_tensor(mine.t().contiguous(), "sum", 1, group)
    ledger.equal(f"functional reduce_scatter dim 1 {label}", sideways, (base * total)[2 * rank : 2 * rank + 2].t())
    exchanged = funcol.all_to_all_single(mine, None, None, group)
    want = torch.cat([block[2 * rank : 2 * rank + 2] for block in whole])
    ledger.equal(f"functional all_to_all {label}", exchanged, want)
    ledger.equal(f"functional broadcast {label}", funcol.broadcast(mine, world - 1, group), base * world)
    pair = funcol.all_reduce_coalesced([mine, mine[0]], "sum", group)
    ledger.equal(
        f"functional coalesced {label}",
        torch.cat([pair[0].flatten(), pair[1]]),
        torch.cat([(base * total).flatten(), base[0] * total]),
    )
    pair = funcol.all_gather_into_tensor_coalesced([mine, mine[0]], group)
    ledger.equal(f"functional coalesced gather {label}", pair[0], torch.cat(whole))
    ledger.equal(f"functional coalesced gather {label} [1]", pair[1], torch.cat([part[0] for part in whole]))
    return ledger


@pytest.mark.parametrize("world", [1, 2, 3, 5])
def test_functional_collectives(run, world):
    run(world, scenario_functional, roads=DEFAULT_ROADS)


def scenario_objects(rank: int) -> Ledger:
    ledger, world = Ledger(rank), dist.get_world_size()

    def thing(peer: int) -> dict[str, Any]:
        return {"rank": peer, "text": "ß" * peer * 700, "nested": [(peer, None), {"x": 1.5}]}

    everyone = [thing(peer) for peer in range(world)]
    found: list[Any] = [None] * world
    dist.all_gather_object(found, thing(rank))
    ledger.true("all_gather_object", found == everyone, f"{found}")
    for root in range(world):
        found = [thing(root), root] if rank == root else [None, None]
        dist.broadcast_object_list(found, src=root)
        ledger.true(f"broadcast_object_list root={root}", found == [thing(root), root], f"{found}")
        into: list[Any] | None = [None] * world if rank == root else None
        dist.gather_object(thing(rank), into, dst=root)
        ledger.true(f"gather_object root={root}", into == (everyone if rank == root else None), f"{into}")
        one: list[Any] = [None]
        dist.scatter_object_list(one, everyone if rank == root else None, src=root)
        ledger.true(f"scatter_object_list root={root}", one == [thing(rank)], f"{one}")
    if world > 1 and rank == 0:
        dist.send_object_list([thing(0), "bye"], dst=1)
    if rank == 1:
        found = [None, None]
        dist.recv_object_list(found, src=0)
        ledger.true("recv_object_list", found == [thing(0), "bye"], f"{found}")
    return ledger


@pytest.mark.parametrize("world", [1, 2, 3])
def test_object_collectives(run, world):
    run(world, scenario_objects, roads=DEFAULT_ROADS)


# ---- asynchronous use ----


def scenario_in_flight(rank: int) -> Ledger:
    ledger, world = Ledger(rank), dist.get_world_size()
    total = sum(range(1, world + 1))
    sums, gathers, works = [], [], []
    for turn in range(30):
        size = [1, 70_001, 513][turn % 3]
        tensor = torch.full([size], float((rank + 1) * (turn + 1)))
        works.append(dist.all_reduce(tensor, async_op=True))
        sums.append(tensor)
        into = torch.zeros(world, 17, dtype=torch.int64)
        works.append(dist.all_gather_into_tensor(into, torch.full([17], rank * 100 + turn), async_op=True))
        gathers.append(into)
    works.append(dist.barrier(async_op=True))
    for work in reversed(works):  # any order
        work.wait()
    for work in works:
        ledger.true("in flight", work.is_completed() and work.wait(), "waited for, but not completed")
    for turn, (tensor, into) in enumerate(zip(sums, gathers, strict=True)):
        ledger.equal(f"in flight world={world} turn={turn}", tensor, torch.full_like(tensor, total * (turn + 1)))
        ledger.equal(
            f"in flight world={world} turn={turn}", into, (torch.arange(world) * 100 + turn)[:, None].expand(world, 17)
        )
    return ledger


@pytest.mark.parametrize("world", [1, 2, 3, 5])
def test_many_operations_in_flight_end_in_issue_order_with_right_results(run, world):
    run(world, scenario_in_flight, roads=DEFAULT_ROADS)


def scenario_futures(rank: int) -> Ledger:
    ledger, world = Ledger(rank), dist.get_world_size()
    total = float(sum(range(1, world + 1)))

    tensor = torch.full([40_001], float(rank + 1))
    future = dist.all_reduce(tensor, async_op=True).get_future()
    doubled = future.then(lambda done: done.value()[0] * 2)
    ledger.equal(f"future all_reduce world={world}", doubled.wait(), torch.full_like(tensor, 2 * total))
    late = future.then(lambda done: done.value()[0] + 1)  # of a future that is done
    ledger.equal(f"late future world={world}", late.wait(), torch.full_like(tensor, total + 1))

    view = torch.zeros(64, 2)[:, 1]  # has to be copied back before the future is done
    view.fill_(rank + 1)
    copied = dist.all_reduce(view, async_op=True).get_future().then(lambda done: done.value()[0].clone())
    ledger.equal(f"future of a strided view world={world}", copied.wait(), torch.full([64], total))

    outputs = [torch.zeros(3) for _ in range(world)]
    gathered = dist.all_gather(outputs, torch.full([3], float(rank)), async_op=True).get_future()
    parts = gathered.then(lambda done: torch.stack(done.value()[0])).wait()
    ledger.equal(f"future all_gather world={world}", parts, torch.arange(world)[:, None].expand(world, 3).float())
    chained = torch.futures.collect_all([dist.barrier(async_op=True).get_future(), doubled])
    ledger.true(f"collect_all world={world}", len(chained.wait()) == 2, "not two values")
    return ledger


@pytest.mark.parametrize("world", [1, 2, 3])
def test_futures_and_their_callbacks_see_the_result(run, world):
    run(world, scenario_futures, roads=DEFAULT_ROADS)


def scenario_interleaved(rank: int) -> Ledger:
    """Collectives and messages of several groups at once."""
    ledger, world = Ledger(rank), dist.get_world_size()
    works = []
    sums = {name: torch.full([30_011], float(rank + 1)) for name in _groups}
    got = torch.zeros(30_011)
    if world > 1:
        works.append(dist.irecv(got, (rank - 1) % world, tag=5))
    for name, tensor in sums.items():
        works.append(dist.all_reduce(tensor, group=_groups[name], async_op=True))
    if world > 1:
        works.append(dist.isend(torch.full([30_011], float(rank)), (rank + 1) % world, tag=5))
    for work in works:
        work.wait()
    for name, tensor in sums.items():
        ledger.equal(f"interleaved {name}", tensor, torch.full_like(tensor, sum(range(1, world + 1))))
    if world > 1:
        ledger.equal("interleaved recv", got, torch.full_like(got, (rank - 1) % world))
    return ledger


@pytest.mark.parametrize("world", [1, 2, 3, 5])
def test_groups_and_messages_do_not_disturb_each_other(run, world):
    run(world, scenario_interleaved, roads=DEFAULT_ROADS)


# ---- memory: views, guards, odd tensors ----

LAYOUTS = ["offset", "strided", "transposed", "columns"]


class Guarded:
    """A view inside random bytes; ``intact`` tells whether everything around it is as before."""

    def __init__(self, layout: str, dtype: str, values: torch.Tensor) -> None:
        rows, columns = values.shape
        self.base = random_bits(dtype, 4 * rows * columns + 64, 99, 0)
        mask = torch.zeros(self.base.shape, dtype=torch.bool)
        self.view = self._cut(layout, self.base, rows, columns)
        self._cut(layout, mask, rows, columns).fill_(True)
        self.view.copy_(values)
        self._around = ~mask
        self._before = self.base[self._around].clone()

    @staticmethod
    def _cut(layout: str, base: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
        if layout == "offset":
            return base[5 : 5 + rows * columns].view(rows, columns)
        if layout == "strided":
            return base[3 : 3 + 4 * rows * columns].view(rows, 2 * columns, 2)[:, ::2, 1]
        if layout == "transposed":
            return base[7 : 7 + rows * columns].view(columns, rows).t()
        return base[1 : 1 + 3 * rows * columns].view(columns, 3 * rows)[:, rows : 2 * rows].t()

    def intact(self) -> bool:
        return bool(np.array_equal(bits(self.base[self._around]), bits(self._before)))


def scenario_views(rank: int, layout: str, dtype: str) -> Ledger:
    ledger, world = Ledger(rank), dist.get_world_size()
    kind = getattr(torch, dtype)
    rows, columns = 2 * world, 3

    def values(peer: int) -> torch.Tensor:
        plain = torch.arange(rows * columns).view(rows, columns) + 10 * peer
        return (plain * (1 + 2j)).to(kind) if kind.is_complex else (plain % 120).to(kind)

    def guarded(peer: int | None) -> Guarded:
        return Guarded(layout, dtype, values(peer) if peer is not None else torch.zeros(rows, columns, dtype=kind))

    def check(op: str, output: Guarded, want: torch.Tensor) -> None:
        label = f"{op} world={world} dtype={dtype} layout={layout}"
        ledger.equal(label, output.view, want)
        ledger.true(label, output.intact(), "bytes around the view have changed")

    peers, everyone = range(world), [values(peer) for peer in range(world)]
    exact = torch.complex128 if kind.is_complex else torch.float64
    total = torch.stack([part.to(exact) for part in everyone]).sum(0).to(kind)
    mine = guarded(rank)
    dist.all_reduce(mine.view)
    check("all_reduce", mine, total)
    for root in peers:
        mine = guarded(rank)
        dist.reduce(mine.view, root)
        check(f"reduce to {root}", mine, total if rank == root else values(rank))
        mine = guarded(rank)
        dist.broadcast(mine.view, root)
        check(f"broadcast from {root}", mine, values(root))
        mine, outputs = guarded(rank), [guarded(None) for _ in peers]
        dist.gather(mine.view, [output.view for output in outputs] if rank == root else None, dst=root)
        check(f"gather at {root}, input", mine, values(rank))
        for peer in peers if rank == root else []:
            check(f"gather at {root}", outputs[peer], values(peer))
        output, inputs = guarded(None), [guarded(peer) for peer in peers]
        dist.scatter(output.view, [one.view for one in inputs] if rank == root else None, src=root)
        check(f"scatter from {root}", output, values(rank))
    mine, outputs = guarded(rank), [guarded(None) for _ in peers]
    dist.all_gather([output.view for output in outputs], mine.view)
    for peer in peers:
        check("all_gather", outputs[peer], values(peer))
    check("all_gather, input", mine, values(rank))

    output, part = guarded(None), Guarded(layout, dtype, values(rank)[:2])
    dist.all_gather_into_tensor(output.view, part.view)
    check("all_gather_into_tensor", output, torch.cat([values(peer)[:2] for peer in peers]))
    mine, output = guarded(rank), Guarded(layout, dtype, torch.zeros(2, columns, dtype=kind))
    dist.reduce_scatter_tensor(output.view, mine.view)
    check("reduce_scatter_tensor", output, total[2 * rank : 2 * rank + 2])
    check("reduce_scatter_tensor, input", mine, values(rank))
    output, inputs = guarded(None), [guarded(rank) for _ in peers]
    dist.reduce_scatter(output.view, [one.view for one in inputs])
    check("reduce_scatter", output, total)
    outputs, inputs = [guarded(None) for _ in peers], [guarded(rank) for _ in peers]
    dist.all_to_all([one.view for one in outputs], [one.view for one in inputs])
    for peer in peers:
        check("all_to_all", outputs[peer], values(peer))
    mine, output = guarded(rank), guarded(None)
    dist.all_to_all_single(output.view, mine.view)
    check("all_to_all_single", output, torch.cat([values(peer)[2 * rank : 2 * rank + 2] for peer in peers]))
    if world > 1:
        mine, output = guarded(rank), guarded(None)
        sending = dist.isend(mine.view, (rank + 1) % world)
        dist.recv(output.view, (rank - 1) % world)
        sending.wait()
        check("recv", output, values((rank - 1) % world))
    return ledger


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("dtype", ["bool", "int16", "uint32", "bfloat16", "float64", "complex64"])
def test_views_are_read_and_written_without_touching_what_lies_around_them(run, world, dtype):
    for layout in LAYOUTS:
        run(world, scenario_views, layout, dtype, roads=DEFAULT_ROADS)


def scenario_conjugate(rank: int) -> Ledger:
    """Where torch hands such views on as they are; most of its functions resolve or refuse them before."""
    ledger, world = Ledger(rank), dist.get_world_size()

    def value(peer: int) -> torch.Tensor:
        return (
            torch.arange(1, 6 * world + 1).to(torch.complex64) * (1 + 2j) + 10 * peer
        )  # no zeros, so no signs of zero

    for name, lazy in (("conj", torch.conj), ("neg", lambda tensor: tensor.conj().imag)):

        def view(peer: int, lazy: Callable[[torch.Tensor], torch.Tensor] = lazy) -> torch.Tensor:
            return lazy(value(peer))

        ledger.true(name, view(0).is_conj() or view(0).is_neg(), "not a lazy view; the test is void")
        total = torch.stack([view(peer).clone() for peer in range(world)]).sum(0)
        output = torch.zeros(6, dtype=total.dtype)
        dist.reduce_scatter_tensor(output, view(rank))
        ledger.equal(f"reduce_scatter_tensor {name}", output, total[6 * rank : 6 * rank + 6])
        outputs = [lazy(torch.zeros(6 * world, dtype=torch.complex64)) for _ in range(world)]
        dist.gather(view(rank), outputs if rank == 0 else None, dst=0)
        for peer, got in enumerate(outputs if rank == 0 else []):
            ledger.equal(f"gather {name}", got, view(peer))
    return ledger


@pytest.mark.parametrize("world", [1, 2, 3])
def test_lazy_conjugates_and_negatives_are_values_not_memory(run, world):
    run(world, scenario_conjugate, roads=DEFAULT_ROADS)


def scenario_adjacent_blocks(rank: int) -> Ledger:
    """Lists whose tensors lie one after the other in one tensor take the path without copies."""
    ledger, world = Ledger(rank), dist.get_world_size()
    for sizes in ([5] * world, [3 * peer for peer in range(world)]):
        base = torch.full([sum(sizes) + 2], -1, dtype=torch.int32)
        outputs = list(base[1:-1].split(sizes))
        dist.all_gather(outputs, torch.full([sizes[rank]], rank, dtype=torch.int32))
        want = [peer for peer, size in enumerate(sizes) for _ in range(size)]
        ledger.equal(f"adjacent {sizes}", base, torch.tensor([-1, *want, -1], dtype=torch.int32))
        # In place: the input is this rank's block of the output.
        base = torch.full([sum(sizes) + 2], -1, dtype=torch.int32)
        outputs = list(base[1:-1].split(sizes))
        outputs[rank].fill_(rank)
        dist.all_gather(outputs, outputs[rank])
        ledger.equal(f"in place {sizes}", base, torch.tensor([-1, *want, -1], dtype=torch.int32))
    whole = torch.arange(4 * world, dtype=torch.float32)
    dist.reduce_scatter_tensor(whole[4 * rank : 4 * rank + 4], whole)
    want = torch.arange(4 * world, dtype=torch.float32)
    want[4 * rank : 4 * rank + 4] *= world
    ledger.equal("reduce_scatter in place", whole, want)
    return ledger


@pytest.mark.parametrize("world", [1, 2, 3, 5])
def test_lists_that_are_one_stretch_of_memory_and_in_place_use(run, world):
    run(world, scenario_adjacent_blocks, roads=DEFAULT_ROADS)


def scenario_odd_tensors(rank: int) -> Ledger:
    ledger, world = Ledger(rank), dist.get_world_size()
    total = float(sum(range(1, world + 1)))

    scalar = torch.tensor(float(rank + 1))
    dist.all_reduce(scalar)
    ledger.true("0-dim all_reduce", scalar.dim() == 0 and scalar.item() == total, f"{scalar}")
    scalar = torch.tensor(rank)
    dist.broadcast(scalar, world - 1)
    ledger.true("0-dim broadcast", scalar.item() == world - 1, f"{scalar}")
    outputs = [torch.tensor(-1) for _ in range(world)]
    dist.all_gather(outputs, torch.tensor(rank))
    ledger.true("0-dim all_gather", [int(one) for one in outputs] == list(range(world)), f"{outputs}")
    into = torch.zeros(world, dtype=torch.int64)
    dist.all_gather_into_tensor(into, torch.tensor(rank))
    ledger.true("0-dim all_gather_into_tensor", into.tolist() == list(range(world)), f"{into}")

    for shape in ([0], [0, 3], [3, 0, 2]):
        empty = torch.empty(shape)
        dist.all_reduce(empty)
        dist.broadcast(empty, 0)
        outputs = [torch.empty(shape) for _ in range(world)]
        dist.all_gather(outputs, empty)
        dist.reduce_scatter(torch.empty(shape), [torch.empty(shape) for _ in range(world)])
        ledger.true("empty", list(empty.shape) == shape, f"{empty.shape}")

    leaf = torch.full([9], float(rank + 1), requires_grad=True)
    with torch.no_grad():
        dist.all_reduce(leaf)
    ledger.equal("leaf all_reduce", leaf, torch.full([9], total))
    ledger.true("leaf all_reduce", leaf.is_leaf and leaf.requires_grad, "no longer a leaf that requires grad")
    leaf = torch.full([9, 2], float(rank + 1), requires_grad=True)
    with torch.no_grad():
        dist.broadcast(leaf.t(), world - 1)  # a view of a leaf, copied back
    ledger.equal("leaf view broadcast", leaf, torch.full([9, 2], float(world)))

    with torch.inference_mode():
        inference = torch.full([9], float(rank + 1))
        columns = torch.full([4, 2], float(rank + 1))[:, 0]
        dist.all_reduce(inference)
        dist.all_reduce(columns)
    dist.all_reduce(inference)  # outside of the mode
    dist.all_reduce(columns)
    ledger.equal("inference tensor", inference, torch.full([9], total * world))
    ledger.equal("inference view", columns, torch.full([4], total * world))

    channels_last = torch.full([2, 3, 4, 5], float(rank + 1)).to(memory_format=torch.channels_last)
    channels_last[0, 1, 2, 3] = 100.0
    dist.all_reduce(channels_last)
    ledger.true("channels_last", channels_last[0, 1, 2, 3].item() == 100.0 * world, f"{channels_last[0, 1, 2, 3]}")
    mixed = torch.arange(24.0).view(2, 3, 2, 2)
    mixed = mixed.to(memory_format=torch.channels_last) if rank == 0 else mixed.clone()
    dist.broadcast(mixed, 0)
    dist.all_reduce(mixed)  # ranks with different strides and equal shapes
    ledger.equal("different strides", mixed, torch.arange(24.0).view(2, 3, 2, 2) * world)
    ledger.equal("expanded input", _all_gather_expanded(world), torch.ones(world, 3, 4))
    return ledger


def _all_gather_expanded(world: int) -> torch.Tensor:
    outputs = [torch.zeros(3, 4) for _ in range(world)]
    dist.all_gather(outputs, torch.ones(1, 1).expand(3, 4))
    return torch.stack(outputs)


@pytest.mark.parametrize("world", [1, 2, 3])
def test_scalars_empties_leaves_inference_tensors_and_other_memory_formats(run, world):
    run(world, scenario_odd_tensors, roads=DEFAULT_ROADS)


def scenario_repeat(rank: int, group: str) -> Ledger:
    ledger, world = Ledger(rank), dist.get_world_size()
    for turn in range(4):
        tensor = random_numbers("float32", "SUM", 50_021, 3, rank, world)
        if rank == turn % world:
            time.sleep(0.02)  # timing differs, bits do not
        dist.all_reduce(tensor, group=_groups[group])
        ledger.same(f"repeated all_reduce world={world} {group}", tensor)
        ledger.checks += 1
        ledger.true(f"turn {turn}", len(set(ledger.digests.values())) == 1, "other bits than the turn before")
    return ledger


@pytest.mark.parametrize("world", [3, 5])
@pytest.mark.parametrize("group", ["ring, small chunks", "direct, small chunks", "shared", "buffered"])
def test_result_does_not_depend_on_timing(run, world, group):
    run(world, scenario_repeat, group)
