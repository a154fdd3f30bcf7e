"""Every collective of backend "iroh" between real processes over loopback, against float64 NumPy and plain bytes.

One family of processes per world runs the whole matrix over one set of groups. TEST_SEED=n draws other values.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from references import (
    COMPLEX,
    DEFAULT_ROADS,
    DTYPES,
    FACTORS,
    FLOAT8,
    FLOATS,
    HALVES,
    LARGE,
    MANY_CHUNKS,
    OPS,
    OPS_OF,
    REDUCIBLE,
    ROADS,
    ROUNDOFF,
    WORLDS,
    joined,
    random_bits,
    random_numbers,
    reduced,
    seed_of,
    torch_op,
    wide,
)
from scenarios import Ledger, matrix_sizes, road_groups
from torch.distributed import ReduceOp

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
                dist.all_reduce(tensor, torch_op(op, rank), group=road_groups[group])
                ledger.near(f"{label} {group} seed={seed}", tensor, want, bound)
                ledger.same(f"{label} {group}", tensor)
    return ledger


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("dtype", REDUCIBLE)
def test_all_reduce_equals_float64_on_every_rank(run_scenario, world, dtype):
    run_scenario(world, scenario_all_reduce, dtype, matrix_sizes(world, dtype), ROADS, OPS_OF[dtype])


@pytest.mark.parametrize("world", WORLDS)
def test_all_reduce_of_many_chunks(run_scenario, world):
    groups = ["ring, small chunks", "direct, small chunks", "shared", "single_copy"]
    run_scenario(world, scenario_all_reduce, "float32", [MANY_CHUNKS // (2 if world == 7 else 1)], groups, ["SUM"])
    run_scenario(world, scenario_all_reduce, "int8", [MANY_CHUNKS], groups, ["BXOR"])


@pytest.mark.parametrize("world", [2, 3, 5])
def test_all_reduce_of_a_million_elements(run_scenario, world):
    run_scenario(world, scenario_all_reduce, "float32", [LARGE], DEFAULT_ROADS, ["SUM"])


def scenario_half_sum(rank: int, dtype: str) -> Ledger:
    """Big + 1 + 1, where big + 1 rounds to big: only an accumulator wider than the type keeps both ones."""
    ledger = Ledger(rank)
    big = 1 / ROUNDOFF[dtype]
    tensor = torch.full([5], big if rank == 0 else 1.0, dtype=getattr(torch, dtype))
    dist.all_reduce(tensor, group=road_groups["direct"])
    ledger.equal(f"all_reduce world=3 dtype={dtype} op=SUM direct", tensor, torch.full_like(tensor, big + 2))
    return ledger


@pytest.mark.parametrize("dtype", HALVES)
def test_half_sums_accumulate_in_fp32_where_the_owner_sees_all_parts(run_scenario, dtype):
    run_scenario(3, scenario_half_sum, dtype)  # DESIGN.md, section 5


def scenario_nan(rank: int) -> Ledger:
    ledger, world = Ledger(rank), dist.get_world_size()
    for dtype in FLOATS:
        for op in ("MIN", "MAX", "SUM"):
            for group in ROADS:
                tensor = torch.arange(12, dtype=torch.float32).to(getattr(torch, dtype))
                tensor[rank] = float("nan")
                dist.all_reduce(tensor, getattr(ReduceOp, op), group=road_groups[group])
                label = f"NaN world={world} dtype={dtype} op={op} {group}"
                found = tensor.isnan().nonzero().flatten().tolist()
                ledger.true(label, found == list(range(world)), f"NaN at {found}, expected at 0..{world - 1}")
                ledger.same(label, tensor)
    return ledger


@pytest.mark.parametrize("world", [2, 3])
def test_nan_of_any_rank_survives_sum_min_and_max(run_scenario, world):
    run_scenario(world, scenario_nan, roads=DEFAULT_ROADS)


def scenario_premul_tensor(rank: int) -> Ledger:
    ledger, world = Ledger(rank), dist.get_world_size()
    tensor = torch.full([7], 4.0)
    dist.all_reduce(tensor, dist._make_nccl_premul_sum(torch.tensor(FACTORS[rank])))
    total = 4.0 * float(np.float32(FACTORS[:world]).astype(np.float64).sum())
    ledger.near("premul by tensor", tensor, np.full(7, total, np.longdouble), abs(total) * 2.0**-20)
    return ledger


def test_premul_sum_takes_its_factor_from_a_tensor(run_scenario):
    run_scenario(3, scenario_premul_tensor)


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
def test_reduce_op_without_meaning_is_refused_by_name(run_scenario, dtype):
    run_scenario(2, scenario_wrong_ops, dtype)


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
                    dist.reduce(tensor, root, torch_op(op, rank), group=road_groups[group])
                    if rank == root:
                        want, bound = reduced(dtype, op, [wide(part) for part in parts])
                        ledger.near(f"{label} {group} seed={seed}", tensor, want, bound)
                    else:
                        ledger.equal(f"{label} {group} seed={seed}, not the root", tensor, parts[rank])
    return ledger


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("dtype", ["bool", "uint16", "int64", "bfloat16", "float32", "complex64"])
def test_reduce_to_every_root_leaves_the_others_alone(run_scenario, world, dtype):
    run_scenario(world, scenario_reduce, dtype, [0, 1, 1009] if world < 5 else [13])


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
                        dist.reduce_scatter_tensor(output, source, torch_op(op, rank), group=road_groups[group])
                    else:
                        blocks = [block.clone() for block in source.reshape(world, size)]
                        dist.reduce_scatter(output, blocks, torch_op(op, rank), group=road_groups[group])
                    ledger.near(f"{label} {form} {group} seed={seed}", output, want, bound)
                    ledger.equal(f"{label} {form} {group}, input", source, parts[rank])
    return ledger


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("dtype", ["bool", "int8", "uint64", "float16", "bfloat16", "float32", "float64", "complex64"])
def test_reduce_scatter_of_tensor_and_list(run_scenario, world, dtype):
    run_scenario(world, scenario_reduce_scatter, dtype, [0, 1, 1009] if world < 7 else [13])


def scenario_reduce_scatter_uneven(rank: int) -> Ledger:
    ledger, world = Ledger(rank), dist.get_world_size()
    sizes = [17 * peer % 41 for peer in range(world)]  # rank 0 gets nothing
    for group in ROADS:
        label = f"uneven reduce_scatter world={world} dtype=float64 op=SUM sizes={sizes} {group}"
        parts = [random_numbers("float64", "SUM", sum(sizes), 5, peer, world) for peer in range(world)]
        start = sum(sizes[:rank])
        want, bound = reduced("float64", "SUM", [wide(part)[start : start + sizes[rank]] for part in parts])
        output = torch.empty(sizes[rank], dtype=torch.float64)
        dist.reduce_scatter(output, list(parts[rank].split(sizes)), group=road_groups[group])
        ledger.near(label, output, want, bound)
    return ledger


@pytest.mark.parametrize("world", WORLDS)
def test_reduce_scatter_of_uneven_blocks(run_scenario, world):
    run_scenario(world, scenario_reduce_scatter_uneven)


# ---- movement: bit patterns of every dtype ----


def scenario_broadcast(rank: int, dtype: str, sizes: list[int]) -> Ledger:
    ledger, world = Ledger(rank), dist.get_world_size()
    for size in sizes:
        for root in range(world):
            label = f"broadcast world={world} dtype={dtype} size={size} root={root}"
            want = random_bits(dtype, size, seed_of(label), root)
            for group in ROADS:
                tensor = want.clone() if rank == root else torch.zeros(size, dtype=want.dtype)
                dist.broadcast(tensor, root, group=road_groups[group])
                ledger.equal(f"{label} {group} seed={seed_of(label)}", tensor, want)
    return ledger


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_broadcast_from_every_root(run_scenario, world, dtype):
    run_scenario(world, scenario_broadcast, dtype, [0, 1, 1009] if world < 5 else [13])


@pytest.mark.parametrize("world", WORLDS)
def test_broadcast_of_many_elements(run_scenario, world):
    run_scenario(world, scenario_broadcast, "int32", [65_537])


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
            dist.all_gather(outputs, parts[rank], group=road_groups[group])
            for peer in range(world):
                ledger.equal(f"{label} list[{peer}] {group} seed={seed}", outputs[peer], parts[peer])
            for shape in ([world * size], [world, size]):
                output = torch.zeros(shape, dtype=kind)
                dist.all_gather_into_tensor(output, parts[rank], group=road_groups[group])
                ledger.equal(f"{label} into {shape} {group} seed={seed}", output, whole)
    return ledger


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_all_gather_into_list_and_tensor(run_scenario, world, dtype):
    run_scenario(world, scenario_all_gather, dtype, [0, 1, 13, 1009])


@pytest.mark.parametrize("world", WORLDS)
def test_all_gather_of_many_elements(run_scenario, world):
    run_scenario(world, scenario_all_gather, "int16", [65_537])


def scenario_all_gather_uneven(rank: int, dtype: str) -> Ledger:
    ledger, world = Ledger(rank), dist.get_world_size()
    for scale in (1, 2003):
        sizes = [scale * ((3 * peer + 2) % 5) for peer in range(world)]  # rank 1 has nothing
        parts = [random_bits(dtype, size, 7, peer) for peer, size in enumerate(sizes)]
        for group in ROADS:
            outputs = [torch.zeros(size, dtype=parts[0].dtype) for size in sizes]
            dist.all_gather(outputs, parts[rank], group=road_groups[group])
            for peer in range(world):
                label = f"uneven all_gather world={world} dtype={dtype} sizes={sizes} [{peer}] {group} seed=7"
                ledger.equal(label, outputs[peer], parts[peer])
    return ledger


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("dtype", ["uint8", "float64"])
def test_all_gather_of_uneven_parts(run_scenario, world, dtype):
    run_scenario(world, scenario_all_gather_uneven, dtype)


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
def test_gather_and_scatter_at_every_root(run_scenario, world, dtype):
    run_scenario(world, scenario_gather_scatter, dtype, [0, 1, 1009] if world < 5 else [13], roads=DEFAULT_ROADS)


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
def test_all_to_all_even_uneven_and_empty(run_scenario, world, dtype):
    run_scenario(world, scenario_all_to_all, dtype, 3, roads=DEFAULT_ROADS)
    if dtype in ("int64", "float16") and world < 7:
        run_scenario(world, scenario_all_to_all, dtype, 0, roads=DEFAULT_ROADS)
        run_scenario(world, scenario_all_to_all, dtype, 5003, roads=DEFAULT_ROADS)
