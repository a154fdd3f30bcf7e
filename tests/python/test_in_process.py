"""Ranks that are threads of one process: the same collectives over NumPy arrays, against the same reference."""

from __future__ import annotations

import doctest
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from ranks import run_ranks, values_of
from references import (
    BITWISE,
    COMPLEX,
    FACTORS,
    FLOATS,
    INTEGERS,
    OPS,
    OPS_OF,
    REDUCIBLE,
    ROUNDOFF,
    SEED,
    first_wrong,
    random_bits,
    random_numbers,
    reduced,
    seed_of,
    wide,
)

import torch_iroh.in_process
from torch_iroh import InProcessRank, InProcessWorld

WORLDS = [1, 2, 3, 5, 7, 16]
ALGORITHMS = ["ring", "direct"]
OTHERS = ["ring_bidirectional", "tree", "butterfly", "bruck"]
SIZES = [0, 1, 2, 13, 1009]
CHUNK = 256  # bytes: a thousand elements are many chunks
DEADLINE = 30.0  # of each operation: a hang is a TimeoutError that names the rank waited for
NUMPY = ["bool", *INTEGERS, "float16", "float32", "float64", *COMPLEX]


@contextmanager
def in_process(world: int, algorithm: str = "auto", chunk_bytes: int = CHUNK) -> Iterator[Callable[..., list[Any]]]:
    """``run(work)``: ``work(rank)`` on a thread per rank; the results, or the first exception, in rank order."""
    with (
        InProcessWorld(world, chunk_bytes=chunk_bytes, algorithm=algorithm) as ranks,
        ThreadPoolExecutor(world) as pool,
    ):
        yield lambda work: list(pool.map(work, ranks))


def array_of(tensor: torch.Tensor) -> np.ndarray:
    """NumPy has no bfloat16; its bits go as uint16."""
    return (tensor.view(torch.uint16) if tensor.dtype == torch.bfloat16 else tensor).numpy().copy()


def tensor_of(array: np.ndarray, dtype: str) -> torch.Tensor:
    tensor = torch.from_numpy(array)
    return tensor.view(torch.bfloat16) if dtype == "bfloat16" else tensor


def assert_near(label: str, got: torch.Tensor, want: np.ndarray, bound: np.ndarray | float) -> None:
    found = wide(got)
    index = first_wrong(found, want, bound)
    assert index is None, (
        f"seed {SEED}, {label}: first wrong index {index}: {found[index]!r}, expected {want[index]!r} "
        f"within {np.broadcast_to(bound, want.shape)[index]!r}"
    )


def assert_bits(label: str, got: np.ndarray, want: np.ndarray) -> None:
    assert got.dtype == want.dtype, f"{label}: dtype {got.dtype}, expected {want.dtype}"
    assert got.tobytes() == want.tobytes(), f"seed {SEED}, {label}: {got[:20]} != {want[:20]}"


def assert_equal_bits(label: str, arrays: Sequence[np.ndarray]) -> None:
    assert len({array.tobytes() for array in arrays}) == 1, f"seed {SEED}, {label}: ranks end with different bits"


# ---- reductions ----


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("dtype", REDUCIBLE)
def test_all_reduce_equals_float64_on_every_rank(dtype, world, algorithm):
    factors = (FACTORS * 3)[:world]
    with in_process(world, algorithm) as run:
        for op in OPS_OF[dtype]:
            for size in SIZES if world < 16 else [1, 1009]:
                label = f"all_reduce world={world} dtype={dtype} op={op} size={size} {algorithm}"
                parts = [random_numbers(dtype, op, size, seed_of(label), rank, world) for rank in range(world)]
                want, bound = reduced(dtype, op, [wide(part) for part in parts], factors)

                def work(rank: InProcessRank, parts: list[torch.Tensor] = parts, op: str = op) -> np.ndarray:
                    array = array_of(parts[rank.rank])
                    factor = factors[rank.rank]
                    rank.all_reduce(array, op.lower(), factor=factor, dtype=dtype, timeout=DEADLINE)
                    return array

                results = run(work)
                assert_equal_bits(label, results)
                assert_near(label, tensor_of(results[0], dtype), want, bound)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("dtype", ["bool", "int16", "bfloat16", "float64", "complex64"])
def test_reduce_to_every_root_leaves_the_others_alone(dtype, world, algorithm):
    with in_process(world, algorithm) as run:
        for root in range(world):
            for size in [0, 13, 301]:
                label = f"reduce world={world} dtype={dtype} op=sum size={size} root={root} {algorithm}"
                parts = [random_numbers(dtype, "SUM", size, seed_of(label), rank, world) for rank in range(world)]

                def work(rank: InProcessRank, parts: list[torch.Tensor] = parts, root: int = root) -> np.ndarray:
                    array = array_of(parts[rank.rank])
                    rank.reduce(array, root, dtype=dtype, timeout=DEADLINE)
                    return array

                for rank, result in enumerate(run(work)):
                    if rank == root:
                        want, bound = reduced(dtype, "SUM", [wide(part) for part in parts])
                        assert_near(label, tensor_of(result, dtype), want, bound)
                    else:
                        assert_bits(f"{label}, rank {rank}", result, array_of(parts[rank]))


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("dtype", ["uint8", "int64", "float16", "bfloat16", "float32"])
def test_reduce_scatter_of_even_and_uneven_blocks(dtype, world, algorithm):
    with in_process(world, algorithm) as run:
        for sizes in ([0] * world, [5] * world, [301] * world, [(7 * rank) % 43 for rank in range(world)]):
            for op in OPS_OF[dtype]:
                if op == "PREMUL_SUM":
                    continue  # reduce_scatter takes no factor
                label = f"reduce_scatter world={world} dtype={dtype} op={op} blocks={sizes} {algorithm}"
                seed = seed_of(label)
                parts = [random_numbers(dtype, op, sum(sizes), seed, rank, world) for rank in range(world)]

                def work(
                    rank: InProcessRank, parts: list[torch.Tensor] = parts, op: str = op, sizes: list[int] = sizes
                ) -> np.ndarray:
                    blocks = np.split(array_of(parts[rank.rank]), np.cumsum(sizes)[:-1])
                    return rank.reduce_scatter(blocks, op.lower(), dtype=dtype, timeout=DEADLINE)

                want, bound = reduced(dtype, op, [wide(part) for part in parts])
                joined = np.concatenate(run(work))
                assert_near(label, tensor_of(joined, dtype), want, bound)


def test_meaningless_op_and_dtype_raise_value_error_naming_what_is_known():
    with InProcessWorld(1) as (rank,):
        for dtype in REDUCIBLE:
            for op in OPS:
                array = array_of(random_bits(dtype, 4, 1, 0))
                if op in OPS_OF[dtype]:
                    rank.all_reduce(array, op.lower(), dtype=dtype, timeout=DEADLINE)
                    continue
                with pytest.raises(ValueError, match=f"reduce op {op.lower()} has no meaning for dtype {dtype}"):
                    rank.all_reduce(array, op.lower(), dtype=dtype)
        with pytest.raises(ValueError, match=r"unknown reduce op 'mean'; known: sum, avg, .*premul_sum"):
            rank.all_reduce(np.zeros(3), "mean")
        with pytest.raises(ValueError, match=r"unknown dtype 'float128'; known: bool, .*complex128"):
            rank.all_reduce(np.zeros(3, np.longdouble))
        with pytest.raises(ValueError, match="unknown dtype 'datetime64"):
            rank.broadcast(np.zeros(3, "datetime64[s]"), 0)
        with pytest.raises(ValueError, match="not C-contiguous"):
            rank.all_reduce(np.zeros((3, 4)).T)
        with pytest.raises(ValueError, match="not C-contiguous"):
            rank.all_reduce(np.zeros(9)[::2])
        assert rank.all_gather(np.arange(3)).tolist() == [0, 1, 2], "a refused call has harmed the group"


def test_array_that_cannot_be_written_is_refused_before_anything_is_sent():
    with InProcessWorld(1) as (rank,):
        array = np.arange(3.0)
        array.flags.writeable = False
        with pytest.raises((ValueError, BufferError)):
            rank.all_reduce(array)
        assert array.tolist() == [0.0, 1.0, 2.0]


@pytest.mark.parametrize("algorithm", ALGORITHMS + OTHERS)
def test_nan_of_any_rank_survives(algorithm):
    with in_process(3, algorithm) as run:
        for op in ("sum", "min", "max"):

            def work(rank: InProcessRank, op: str = op) -> np.ndarray:
                array = np.arange(9, dtype=np.float32)
                array[rank.rank] = np.nan
                rank.all_reduce(array, op, timeout=DEADLINE)
                return array

            for result in run(work):
                assert np.flatnonzero(np.isnan(result)).tolist() == [0, 1, 2], (op, result)


# ---- movement ----


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("dtype", NUMPY)
def test_broadcast_and_all_gather_move_every_bit(dtype, world, algorithm):
    with in_process(world, algorithm) as run:
        for size in [0, 1, 301]:
            parts = [array_of(random_bits(dtype, size, 3, rank)) for rank in range(world)]
            label = f"world={world} dtype={dtype} size={size} {algorithm}"
            for result in run(lambda rank, parts=parts: rank.all_gather(parts[rank.rank], timeout=DEADLINE)):
                assert_bits(f"all_gather {label}", result, np.concatenate(parts))
            for root in range(world):

                def work(rank: InProcessRank, parts: list[np.ndarray] = parts, root: int = root) -> np.ndarray:
                    array = parts[root].copy() if rank.rank == root else np.zeros_like(parts[root])
                    rank.broadcast(array, root, timeout=DEADLINE)
                    return array

                for result in run(work):
                    assert_bits(f"broadcast {label} root={root}", result, parts[root])


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("dtype", NUMPY)
def test_gather_scatter_and_all_to_all_move_every_bit(dtype, world, algorithm="auto"):
    with in_process(world, algorithm) as run:
        for size in [0, 1, 301]:
            parts = [array_of(random_bits(dtype, size, 5, rank)) for rank in range(world)]
            label = f"world={world} dtype={dtype} size={size} {algorithm}"
            for root in range(0, world, max(1, world // 5)):

                def work(rank: InProcessRank, parts: list[np.ndarray] = parts, root: int = root) -> tuple[Any, Any]:
                    gathered = rank.gather(parts[rank.rank], root, timeout=DEADLINE)
                    out = np.zeros_like(parts[0])
                    rank.scatter(parts if rank.rank == root else None, out, root, timeout=DEADLINE)
                    return gathered, out

                for rank, (gathered, out) in enumerate(run(work)):
                    if rank == root:
                        assert_bits(f"gather {label} root={root}", gathered, np.concatenate(parts))
                    else:
                        assert gathered is None
                    assert_bits(f"scatter {label} root={root}", out, parts[rank])

            def exchange(rank: InProcessRank, size: int = size) -> list[np.ndarray]:
                blocks = [array_of(random_bits(dtype, size, 100 + to, rank.rank)) for to in range(world)]
                return rank.all_to_all(blocks, timeout=DEADLINE)

            for rank, blocks in enumerate(run(exchange)):
                for sender, block in enumerate(blocks):
                    want = array_of(random_bits(dtype, size, 100 + rank, sender))
                    assert_bits(f"all_to_all {label} {sender} to {rank}", block, want)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("world", WORLDS)
def test_uneven_all_gather_and_all_to_all(world, algorithm):
    sizes = [(11 * rank + 6) % 17 * 20 for rank in range(world)]  # rank 1 has nothing

    def count(sender: int, receiver: int) -> int:
        return (sender * 3 + receiver * 5) % 7

    def work(rank: InProcessRank) -> tuple[np.ndarray, list[np.ndarray]]:
        mine = rank.rank
        gathered = rank.all_gather(array_of(random_bits("int32", sizes[mine], 1, mine)), sizes, timeout=DEADLINE)
        blocks = [np.full(count(mine, to), mine * 100 + to) for to in range(world)]
        return gathered, rank.all_to_all(blocks, [count(sender, mine) for sender in range(world)], timeout=DEADLINE)

    with in_process(world, algorithm) as run:
        for rank, (gathered, blocks) in enumerate(run(work)):
            want = np.concatenate([array_of(random_bits("int32", size, 1, peer)) for peer, size in enumerate(sizes)])
            assert_bits(f"all_gather world={world} sizes={sizes}", gathered, want)
            for sender, block in enumerate(blocks):
                assert block.tolist() == [sender * 100 + rank] * count(sender, rank), (world, sender, rank)


@pytest.mark.parametrize("algorithm", OTHERS)
@pytest.mark.parametrize("world", [2, 3, 5, 7, 8, 9])
def test_other_algorithms_pass_the_same_tests(world, algorithm):
    for dtype in ["int32", "bfloat16", "float32"]:
        test_all_reduce_equals_float64_on_every_rank(dtype, world, algorithm)
    test_reduce_to_every_root_leaves_the_others_alone("bfloat16", world, algorithm)
    test_reduce_scatter_of_even_and_uneven_blocks("float16", world, algorithm)
    test_broadcast_and_all_gather_move_every_bit("float32", world, algorithm)
    test_gather_scatter_and_all_to_all_move_every_bit("float32", world, algorithm)
    test_uneven_all_gather_and_all_to_all(world, algorithm)


@pytest.mark.parametrize("world", WORLDS)
def test_nobody_leaves_a_barrier_before_all_have_come(world):
    def work(rank: InProcessRank) -> tuple[float, float]:
        time.sleep(0.05 if rank.rank == world - 1 else 0)
        entered = time.monotonic()
        rank.barrier(timeout=DEADLINE)
        return entered, time.monotonic()

    with in_process(world) as run:
        times = run(work)
    assert min(left for _, left in times) >= max(entered for entered, _ in times), times


@pytest.mark.parametrize("world", [2, 3, 7])
def test_messages_by_tag_from_a_peer_and_from_anyone(world):
    def work(rank: InProcessRank) -> list[Any]:
        if rank.rank != 0:
            # Each send returns when its message is taken, so those of one rank need a thread each.
            with ThreadPoolExecutor(3) as sends:
                list(sends.map(lambda tag: rank.send(np.array([rank.rank, tag]), 0, tag, timeout=DEADLINE), (3, 1, 2)))
            return []
        seen: list[Any] = []
        for peer in range(1, world):
            array = np.zeros(2, np.int64)
            assert rank.recv(array, peer, 1, timeout=DEADLINE) == peer
            seen.append(array.tolist())
        for tag in (2, 3):
            for _ in range(1, world):
                array = np.zeros(2, np.int64)
                source = rank.recv(array, tag=tag, timeout=DEADLINE)
                assert array.tolist() == [source, tag]
                seen.append([source, tag])
        return seen

    with in_process(world) as run:
        seen = run(work)[0]
    assert sorted(seen) == sorted([peer, tag] for peer in range(1, world) for tag in (1, 2, 3))


def _refused_peers(_: int) -> dict[int, str]:
    found = {}
    with InProcessWorld(2) as ranks:
        for peer in (0, 2, 99, -1):
            error = _failure(lambda peer=peer: ranks[0].send(np.zeros(1), peer, timeout=5))
            found[peer] = f"{type(error).__name__}: {error}"
        error = _failure(lambda: ranks[0].recv(np.zeros(1), 2, timeout=5))
        found[-2] = f"{type(error).__name__}: {error}"
    return found


def test_send_to_itself_or_to_nobody_is_a_value_error():
    (found,) = values_of(run_ranks(_refused_peers, 1))  # a process of its own: this has been a segmentation fault
    for peer in (0, 2, 99, -1):
        assert found[peer].startswith(f"ValueError: no such peer: {peer}"), found
    assert found[-2].startswith("ValueError: no such peer: 2"), found


# ---- failures ----


def test_timeout_names_the_rank_waited_for_and_breaks_the_group():
    with InProcessWorld(2) as ranks:
        begun = time.monotonic()
        with pytest.raises(TimeoutError, match=r"rank 0: all_reduce.*rank 1"):
            ranks[0].all_reduce(np.zeros(3), timeout=0.2)
        assert 0.15 <= time.monotonic() - begun < 3
        with pytest.raises((RuntimeError, TimeoutError)):
            ranks[0].barrier(timeout=5)
        with pytest.raises((RuntimeError, TimeoutError)):  # and the other rank hears of it
            ranks[1].all_reduce(np.zeros(3), timeout=5)


def _failure(work: Callable[[], Any]) -> BaseException | None:
    try:
        work()
    except Exception as error:
        return error
    return None


@pytest.mark.parametrize("world", [2, 3, 7])
@pytest.mark.parametrize("algorithm", ALGORITHMS + OTHERS)
def test_abort_ends_every_ranks_operation_with_its_reason(world, algorithm):
    def work(rank: InProcessRank) -> BaseException | None:
        if rank.rank == 1:
            time.sleep(0.1)
            rank.abort("enough of this")
        return _failure(lambda: rank.all_reduce(np.zeros(5000), timeout=10))

    begun = time.monotonic()
    with in_process(world, algorithm) as run:
        errors = run(work)
    assert time.monotonic() - begun < 5
    for rank, error in enumerate(errors):
        assert isinstance(error, RuntimeError), (rank, error)
        assert "enough of this" in str(error), (rank, error)


@pytest.mark.parametrize("world", [2, 3, 7])
@pytest.mark.parametrize("algorithm", ALGORITHMS + OTHERS)
def test_severed_rank_is_named_by_all_others(world, algorithm):
    def work(rank: InProcessRank) -> BaseException | None:
        rank.barrier(timeout=DEADLINE)
        if rank.rank == 1:
            time.sleep(0.1)
            rank.sever("pulled the plug")
            return None
        return _failure(lambda: rank.all_reduce(np.zeros(5000), timeout=10))

    begun = time.monotonic()
    with in_process(world, algorithm) as run:
        errors = run(work)
    assert time.monotonic() - begun < 5
    for rank, error in enumerate(errors):
        if rank == 1:
            continue
        assert isinstance(error, RuntimeError), (rank, error)
        assert "rank 1" in str(error), (rank, error)
        assert "pulled the plug" in str(error), (rank, error)


def test_different_calls_are_an_error_that_names_both():
    def work(rank: InProcessRank) -> BaseException | None:
        if rank.rank == 0:
            return _failure(lambda: rank.all_reduce(np.zeros(3, np.float32), timeout=10))
        return _failure(lambda: rank.broadcast(np.zeros(4, np.int16), 0, timeout=10))

    with in_process(2) as run:
        errors = run(work)
    for error in errors:
        assert isinstance(error, RuntimeError), error
        assert "all_reduce(sum, float32[3]" in str(error), error
        assert "broadcast(int16[4]" in str(error), error


def test_close_during_an_operation_ends_it():
    def work(rank: InProcessRank) -> BaseException | None:
        if rank.rank == 1:
            time.sleep(0.1)
            rank.close()
            return None
        return _failure(lambda: rank.all_reduce(np.zeros(3), timeout=20))

    begun = time.monotonic()
    with in_process(2) as run:
        errors = run(work)
    assert time.monotonic() - begun < 5
    assert isinstance(errors[0], RuntimeError)
    assert "rank 1" in str(errors[0])


# ---- the class ----


def test_world_is_a_sequence_of_its_ranks():
    with InProcessWorld(3) as ranks:
        assert len(ranks) == 3
        assert [rank.rank for rank in ranks] == [0, 1, 2]
        assert {rank.world for rank in ranks} == {3}
        assert ranks[2].rank == 2
        with pytest.raises(IndexError):
            ranks[3]
    ranks.close()  # a second time


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"world": 0}, "a world of 0 ranks"),
        ({"world": -1}, "a world of -1 ranks"),
        ({"world": 2, "chunk_bytes": 32}, "multiple of 16 from 64 to 1048576"),
        ({"world": 2, "chunk_bytes": 100}, "multiple of 16 from 64 to 1048576"),
        ({"world": 2, "chunk_bytes": 2 << 20}, "multiple of 16 from 64 to 1048576"),
        ({"world": 2, "algorithm": "oak"}, "unknown algorithm 'oak'; known: ring, direct, .*bruck"),
        ({"world": 2, "algorithm": "hierarchical"}, "unknown algorithm 'hierarchical'"),
    ],
)
def test_wrong_option_names_what_is_allowed(options, text):
    with pytest.raises(ValueError, match=text):
        InProcessWorld(**options)


def test_wrong_root_is_a_value_error():
    with InProcessWorld(1) as (rank,):
        for call in (
            lambda: rank.broadcast(np.zeros(2), 1),
            lambda: rank.reduce(np.zeros(2), -1),
            lambda: rank.gather(np.zeros(2), 5),
        ):
            with pytest.raises(ValueError, match="root"):
                call()


def test_docstring_of_the_module_tells_the_truth():
    result = doctest.testmod(torch_iroh.in_process)
    assert result.attempted > 0
    assert result.failed == 0


def test_reference_itself_is_right_on_small_cases():
    """The tests stand on it, so it is checked by hand."""
    a, b = np.array([100, -128], np.int8), np.array([100, -1], np.int8)
    assert reduced("int8", "SUM", [a, b])[0].tolist() == [-56, 127]
    assert reduced("int8", "AVG", [np.array([-3], np.int8), np.array([0], np.int8)])[0].tolist() == [-1]
    assert reduced("int8", "PRODUCT", [a, b])[0].tolist() == [16, -128]
    assert reduced("bool", "SUM", [np.array([True, False]), np.array([True, False])])[0].tolist() == [True, False]
    assert reduced("bool", "BXOR", [np.array([True, False]), np.array([True, True])])[0].tolist() == [False, True]
    assert BITWISE == ["BAND", "BOR", "BXOR"]
    for dtype in FLOATS:
        one = torch.tensor(1.0, dtype=getattr(torch, dtype))
        assert one + torch.tensor(ROUNDOFF[dtype]).to(one.dtype) == one
        assert one + torch.tensor(2 * ROUNDOFF[dtype]).to(one.dtype) != one
    assert first_wrong(np.array([1.0, np.nan]), np.array([1.0, 2.0]), 1e9) == 1
    assert first_wrong(np.array([1.0, 2.5]), np.array([1.0, 2.0]), 0.5) is None
