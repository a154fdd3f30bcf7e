"""Compressed collectives between real processes: errors within the codec's bounds, equal bits on all ranks, nothing
lost that error feedback should repay, and exactness where it is promised.

Ranks here share no memory unless a test says so, so each is a site of its own.
"""

from __future__ import annotations

import functools
import hashlib
import os
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hosts
import numpy as np
import pytest
import torch
import torch.distributed as dist
from families import attempt, join
from hosts import DEADLINE, LAYOUTS, on_hosts
from ranks import Ranks, values_of

import torch_iroh

pytestmark = pytest.mark.timeout(300)

# Relative L2 error that two quantisations of normal values may make, one of W contributions' sum and one of the sum.
BOUNDS = {
    "none": 1e-6,
    "bf16": 0.006,
    "fp8": 0.06,
    "fp8-e5m2": 0.12,
    "int8": 0.015,
    "int8:block=32,scale=fp32,rounding=stochastic": 0.02,
    "int4": 0.25,
    "sign": 1.2,
    "topk:density=0.9": 0.2,
    "topk": 1.0,
    "topk-int8": 1.0,
    "topk-int4:density=0.05": 1.0,
}
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
SIZES = [0, 1, 2, 127, 1000, 4099, 100_003]


def numbers(rank: int, count: int, dtype: torch.dtype = torch.float32, salt: int = 0) -> torch.Tensor:
    random = np.random.default_rng([rank, count, salt])
    return torch.from_numpy(random.standard_normal(count)).to(dtype)


def digest(*tensors: torch.Tensor) -> str:
    hashed = hashlib.sha256()
    for tensor in tensors:
        if tensor.numel() > 0:
            hashed.update(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return hashed.hexdigest()


def off(got: torch.Tensor, want: np.ndarray) -> float:
    """Relative L2 distance; 0 where there is nothing."""
    size = float(np.linalg.norm(want))
    return (
        float(np.linalg.norm(got.detach().to(torch.float64).numpy().ravel() - want.ravel())) / size if size > 0 else 0.0
    )


def total(count: int, world: int, dtype: torch.dtype, salt: int = 0) -> np.ndarray:
    return np.sum([numbers(rank, count, dtype, salt).to(torch.float64).numpy() for rank in range(world)], axis=0)


# ---- all_reduce, reduce_scatter, all_gather ----


def every_size(rank: int, world: int, store: str, codec: str) -> tuple[list[str], list[str]]:
    """What is wrong, and a digest of every result."""
    join(rank, world, store)
    wrong: list[str] = []
    digests: list[str] = []

    def expect(what: str, got: torch.Tensor, want: np.ndarray, dtype: torch.dtype) -> None:
        # Two roundings to the dtype come on top.
        bound = BOUNDS[codec] + 4 * torch.finfo(dtype).eps
        if not off(got, want) <= bound:
            wrong.append(f"{what}: off by {off(got, want):.4g}, at most {bound:.4g}")

    with torch_iroh.compression(codec):
        for dtype in DTYPES if codec == "int8" else DTYPES[:1]:
            for count in SIZES:
                tensor = numbers(rank, count, dtype)
                dist.all_reduce(tensor)
                expect(f"sum {dtype} {count}", tensor, total(count, world, dtype), dtype)
                digests.append(digest(tensor))
                tensor = numbers(rank, count, dtype)
                dist.all_reduce(tensor, op=dist.ReduceOp.AVG)
                expect(f"avg {dtype} {count}", tensor, total(count, world, dtype) / world, dtype)
                digests.append(digest(tensor))

                shard = torch.full((count,), float("nan"), dtype=dtype)
                dist.reduce_scatter_tensor(shard, numbers(rank, count * world, dtype))
                mine = slice(rank * count, (rank + 1) * count)
                expect(f"scattered {dtype} {count}", shard, total(count * world, world, dtype)[mine], dtype)

                gathered = torch.full((count * world,), float("nan"), dtype=dtype)
                dist.all_gather_into_tensor(gathered, numbers(rank, count, dtype))
                every = np.concatenate([numbers(one, count, dtype).to(torch.float64).numpy() for one in range(world)])
                expect(f"gathered {dtype} {count}", gathered, every, dtype)
                digests.append(digest(gathered))
    dist.destroy_process_group()
    return wrong, digests


@pytest.mark.parametrize("world", [2, 3, 5])
def test_int8_of_every_dtype_and_size_is_close_and_equal_on_all_ranks(tmp_path: Path, world: int):
    with Ranks(world) as ranks:
        seen = ranks.run(every_size, world, str(tmp_path / "store"), "int8", deadline=100)
    assert [wrong for wrong, _ in seen] == [[]] * world
    assert len({tuple(digests) for _, digests in seen}) == 1


@pytest.mark.parametrize("codec", [codec for codec in BOUNDS if codec != "int8"])
def test_every_codec_is_close_and_equal_on_all_ranks(tmp_path: Path, codec: str):
    with Ranks(3) as ranks:
        seen = ranks.run(every_size, 3, str(tmp_path / "store"), codec, deadline=100)
    assert [wrong for wrong, _ in seen] == [[]] * 3
    assert len({tuple(digests) for _, digests in seen}) == 1


def shapes(rank: int, world: int, store: str) -> list[str]:
    join(rank, world, store, compression="int8")
    wrong = []
    whole = numbers(rank, 5 * 7 * 11 * 13 * 2).view(5, 7, 11, 13, 2)
    want = np.sum([numbers(one, whole.numel()).double().view(whole.shape).numpy() for one in range(world)], axis=0)
    layouts = {
        "5-d": whole.clone(),
        "transposed": whole.clone().permute(4, 3, 2, 1, 0).contiguous().permute(4, 3, 2, 1, 0),
        "strided": torch.empty(*whole.shape, 2)[..., 0].copy_(whole),
        "a parameter": torch.nn.Parameter(whole.clone()),
    }
    for name, tensor in layouts.items():
        dist.all_reduce(tensor.data if name == "a parameter" else tensor)
        if not 1e-6 < off(tensor, want) < BOUNDS["int8"]:
            wrong.append(f"{name}: {off(tensor, want)}")
    scalar = torch.tensor(float(rank + 1))
    dist.all_reduce(scalar)
    if scalar.item() != world * (world + 1) / 2:
        wrong.append(f"0-d: {scalar.item()}")
    tensors = [numbers(rank, 1000, salt=salt) for salt in range(3)]
    with dist._coalescing_manager(group=dist.group.WORLD):
        for tensor in tensors:
            dist.all_reduce(tensor)
    for salt, tensor in enumerate(tensors):
        if not off(tensor, total(1000, world, torch.float32, salt)) < BOUNDS["int8"]:
            wrong.append(f"coalesced {salt}")
    lists = [torch.zeros(1000) for _ in range(world)]
    dist.all_gather(lists, numbers(rank, 1000))
    for one in range(world):
        if not 0 < off(lists[one], numbers(one, 1000).double().numpy()) < BOUNDS["int8"]:
            wrong.append(f"all_gather of lists {one}")
    dist.destroy_process_group()
    return wrong


def test_shapes_layouts_and_forms_of_call(tmp_path: Path):
    with Ranks(3) as ranks:
        assert ranks.run(shapes, 3, str(tmp_path / "store")) == [[]] * 3


# ---- what stays exact ----


def exact_things(rank: int, world: int, store: str) -> list[str]:
    join(rank, world, store, compression="int4")
    wrong = []

    def expect(what: str, got: torch.Tensor, want: torch.Tensor) -> None:
        if not torch.equal(got, want):
            wrong.append(what)

    count = 4099
    for dtype in (torch.int64, torch.int32, torch.uint8, torch.bool):
        tensor = (torch.arange(count) % 5 + rank).to(dtype)
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
        expect(f"max {dtype}", tensor, (torch.arange(count) % 5 + world - 1).to(dtype))
    tensor = torch.arange(count) + rank
    dist.all_reduce(tensor)
    expect("sum of integers", tensor, torch.arange(count) * world + sum(range(world)))
    for op, pick in ((dist.ReduceOp.MIN, torch.amin), (dist.ReduceOp.MAX, torch.amax)):
        tensor = numbers(rank, count)
        dist.all_reduce(tensor, op=op)
        expect(str(op), tensor, pick(torch.stack([numbers(one, count) for one in range(world)]), 0))
    tensor = numbers(rank, count)
    dist.broadcast(tensor, 1)
    expect("broadcast", tensor, numbers(1, count))
    objects: list[Any] = [None] * world
    dist.all_gather_object(objects, {"rank": rank, "text": "x" * 5000})
    if objects != [{"rank": one, "text": "x" * 5000} for one in range(world)]:
        wrong.append("objects")
    dist.barrier()
    with torch_iroh.compression("none"):
        tensor = (torch.arange(count, dtype=torch.float32) % 61) + rank
        dist.all_reduce(tensor)
        expect("none, just now", tensor, (torch.arange(count, dtype=torch.float32) % 61) * world + sum(range(world)))
    dist.destroy_process_group()
    return wrong


def test_integers_min_max_objects_and_what_is_asked_to_be_are_exact(tmp_path: Path):
    with Ranks(3) as ranks:
        assert ranks.run(exact_things, 3, str(tmp_path / "store")) == [[]] * 3


def in_one_memory(rank: int, world: int, store: str) -> bool:
    join(rank, world, store, compression="int4", shared_memory="auto")
    tensor = torch.arange(4099, dtype=torch.float32) % 61 + rank
    dist.all_reduce(tensor)
    dist.destroy_process_group()
    return torch.equal(tensor, (torch.arange(4099, dtype=torch.float32) % 61) * world + sum(range(world)))


def test_ranks_that_share_memory_compress_nothing(tmp_path: Path):
    with Ranks(3) as ranks:
        assert ranks.run(in_one_memory, 3, str(tmp_path / "store")) == [True] * 3


# ---- error feedback ----


def owed(rank: int, world: int, store: str, codec: str, options: dict[str, Any]) -> list[tuple[np.ndarray, np.ndarray]]:
    """Of three calls: the result and what this rank owes afterwards, in float64."""
    join(rank, world, store, **options)
    residual = torch.zeros(100_003)
    seen = []
    for step in range(3):
        tensor = numbers(rank, 100_003, salt=step)
        torch_iroh.all_reduce_compressed(tensor, codec, op=dist.ReduceOp.SUM, residual=residual).wait()
        seen.append((tensor.double().numpy(), residual.double().numpy().copy()))
    averaged = numbers(rank, 100_003, salt=9)
    torch_iroh.all_reduce_compressed(averaged, codec, residual=residual).wait()
    seen.append((averaged.double().numpy() * world, residual.double().numpy().copy()))
    dist.destroy_process_group()
    return seen


def check_that_nothing_is_lost(seen: list[list[tuple[np.ndarray, np.ndarray]]], world: int) -> None:
    for step, salt in enumerate((0, 1, 2, 9)):
        before = sum(seen[rank][step - 1][1] for rank in range(world)) if step > 0 else 0.0
        after = sum(seen[rank][step][1] for rank in range(world))
        for rank in range(world):
            assert np.array_equal(seen[rank][step][0], seen[0][step][0])
        given = total(100_003, world, torch.float32, salt) + before
        np.testing.assert_allclose(seen[0][step][0] + after, given, atol=2e-5 * max(1.0, float(np.abs(given).max())))
        if step > 0:
            assert np.abs(after).max() > 0


CODECS_WITH_LOSS = ["bf16", "fp8", "int8", "int8:rounding=stochastic", "int4", "sign", "topk", "topk-int8", "topk-int4"]


@pytest.mark.parametrize("codec", CODECS_WITH_LOSS)
def test_what_a_call_leaves_out_is_what_the_residuals_hold(tmp_path: Path, codec: str):
    """The result and all residuals together are what was given, for every element."""
    with Ranks(3) as ranks:
        check_that_nothing_is_lost(ranks.run(owed, 3, str(tmp_path / "store"), codec, {}), 3)


def test_a_residual_that_does_not_fit_is_refused(tmp_path: Path):
    with Ranks(1) as ranks:
        texts = ranks.run(wrong_residuals, str(tmp_path / "store"))[0]
    for text in texts[:3]:
        assert "the residual must be float32, contiguous, on the CPU and have 1000 elements" in text, text
    assert "no codec 'oak'" in texts[3] or "oak" in texts[3]
    for name in ("int8", "topk-int4", "none", "sign"):
        assert name in texts[3], texts[3]


def wrong_residuals(rank: int, store: str) -> list[str]:
    join(rank, 1, store)
    texts = []
    for residual in (torch.zeros(999), torch.zeros(1000, dtype=torch.float64), torch.zeros(2000)[::2]):
        call = functools.partial(torch_iroh.all_reduce_compressed, torch.zeros(1000), "int8", residual=residual)
        texts.append(attempt(call).error)
    texts.append(attempt(lambda: torch_iroh.all_reduce_compressed(torch.zeros(1000), "oak")).error)
    dist.destroy_process_group()
    return texts


# ---- by levels ----


@pytest.fixture
def hosts_of_two() -> Iterator[None]:
    if why := hosts.obstacle():
        pytest.skip(why)
    yield


MEMORY = {"shared_memory": "auto", "probe": "off"}


def levels(rank: int, world: int, store: str, layout: list[int]) -> tuple[list[str], str]:
    join(rank, world, store, **MEMORY, compression="int8")
    wrong = []
    results = []
    for dtype in (torch.float32, torch.bfloat16):
        for count in (1, 7, 1000, 100_003):
            bound = BOUNDS["int8"] + 8 * torch.finfo(dtype).eps
            tensor = numbers(rank, count, dtype)
            dist.all_reduce(tensor, op=dist.ReduceOp.AVG)
            if not off(tensor, total(count, world, dtype) / world) < bound:
                wrong.append(f"all_reduce {dtype} {count}: {off(tensor, total(count, world, dtype) / world)}")
            results.append(tensor)
            shard = torch.zeros(count, dtype=dtype)
            dist.reduce_scatter_tensor(shard, numbers(rank, count * world, dtype))
            want = total(count * world, world, dtype)[rank * count : (rank + 1) * count]
            if not off(shard, want) < bound + 0.03 / count:
                wrong.append(f"reduce_scatter {dtype} {count}: {off(shard, want)}")
    # Where a site's sum is whole, it crosses exactly: ranks of one host cancel out, and nothing is left to round.
    same = layout.index(layout[rank])
    tensor = numbers(layout[rank], 4099) * (0.0 if layout.count(layout[rank]) == 1 else 1.0 if rank == same else -1.0)
    dist.all_reduce(tensor)
    if layout.count(layout[rank]) == 2 and tensor.abs().max() != 0:
        wrong.append("what cancels out inside a host is not exact")
    dist.destroy_process_group()
    return wrong, digest(*results)


@pytest.mark.parametrize("name", LAYOUTS)
def test_sites_sum_exactly_inside_and_compress_between(tmp_path: Path, name: str, hosts_of_two: None):
    layout = LAYOUTS[name]
    world = len(layout)
    with on_hosts(layout) as ranks:
        seen = ranks.run(levels, world, str(tmp_path / "store"), layout, deadline=DEADLINE)
    assert [wrong for wrong, _ in seen] == [[]] * world
    assert len({one for _, one in seen}) == 1


@pytest.mark.parametrize("name", ["2x2", "2+1"])
def test_residuals_of_sites_hold_what_is_left_out(tmp_path: Path, name: str, hosts_of_two: None):
    world = len(LAYOUTS[name])
    with on_hosts(LAYOUTS[name]) as ranks:
        seen = ranks.run(owed, world, str(tmp_path / "store"), "topk-int8", MEMORY, deadline=DEADLINE)
    check_that_nothing_is_lost(seen, world)


# ---- bytes ----


def bytes_sent(rank: int, world: int, store: str, codec: str) -> int:
    join(rank, world, store)
    tensor = numbers(rank, 1 << 20)
    before = sum(peer.bytes_sent for peer in torch_iroh.stats().peers)
    with torch_iroh.compression(codec):
        dist.all_reduce(tensor)
    dist.barrier()
    sent = sum(peer.bytes_sent for peer in torch_iroh.stats().peers) - before
    dist.destroy_process_group()
    return sent


@pytest.mark.parametrize(("codec", "ratio"), [("int8", 3.8), ("int4", 7.3), ("topk", 45.0), ("topk-int8", 105.0)])
def test_a_codec_saves_the_bytes_that_it_says(tmp_path: Path, codec: str, ratio: float):
    """Of two ranks each sends half of its values, then the sum of the other half: sparse sums have twice the room."""
    with Ranks(2) as ranks:
        sent = ranks.run(bytes_sent, 2, str(tmp_path / "store"), codec)
    assert max(sent) < (4 << 20) / ratio, sent
    assert min(sent) > (4 << 20) / (ratio * 1.6), sent


# ---- bad input and failure ----


def values_that_are_none(rank: int, world: int, store: str) -> tuple[list[bool], str]:
    join(rank, world, store)
    tensor = numbers(rank, 4096)
    if rank == 1:
        tensor[5], tensor[300], tensor[4000] = float("nan"), float("inf"), float("-inf")
    with torch_iroh.compression("int8"):
        dist.all_reduce(tensor)
    seen = [bool(tensor[5].isnan()), bool(tensor[300] == float("inf")), bool(tensor[4000] == float("-inf"))]
    seen.append(bool(torch.isfinite(tensor).sum() == 4096 - 3))
    breaks = dist.new_group()
    refused = numbers(rank, 4096)
    if rank == 1:
        refused[7] = float("nan")
    with torch_iroh.compression("int8:nonfinite=raise"):
        error = attempt(lambda: dist.all_reduce(refused, group=breaks)).error
    attempt(dist.destroy_process_group)
    return seen, error


def test_nan_and_infinity_stay_where_they_were_or_are_refused(tmp_path: Path):
    with Ranks(3) as ranks:
        for seen, error in ranks.run(values_that_are_none, 3, str(tmp_path / "store")):
            assert seen == [True] * 4
            assert "not finite" in error, error
            assert "rank 1" in error, error


def with_own_codec(rank: int, world: int, store: str, how: str) -> str:
    mine = ["int8", "int4", "int8:block=64"][rank]
    if how == "option":
        return attempt(lambda: join(rank, world, store, compression=mine)).error
    join(rank, world, store)
    with torch_iroh.compression(mine):
        error = attempt(lambda: dist.all_reduce(numbers(rank, 4096))).error
    attempt(dist.destroy_process_group)
    return error


@pytest.mark.parametrize("how", ["option", "call"])
def test_ranks_with_different_codecs_hear_both(tmp_path: Path, how: str):
    with Ranks(3) as ranks:
        for error in ranks.run(with_own_codec, 3, str(tmp_path / "store"), how):
            assert "disagree" in error, error
            assert len({"int8", "int4", "int8:block=64"} & set(re.findall(r"int[48](?::block=64)?", error))) >= 2, error


def test_a_wrong_codec_is_refused_where_the_option_is_set():
    with pytest.raises(ValueError, match=r"oak.*int8"):
        torch_iroh.Options(compression="oak")


def until_it_breaks(rank: int, world: int, store: str) -> tuple[str, float]:
    join(rank, world, store, compression="topk-int8")
    Path(f"{store}-{rank}").touch()

    def forever() -> None:
        while True:
            dist.all_reduce(numbers(rank, 1 << 20))

    broken = attempt(forever)
    attempt(dist.destroy_process_group)
    return broken.error, broken.at


def test_a_rank_killed_in_a_compressed_collective_is_named(tmp_path: Path):
    store = str(tmp_path / "store")
    with Ranks(3) as ranks:
        ranks.start(until_it_breaks, 3, store)
        by = time.monotonic() + 30
        while not all(Path(f"{store}-{rank}").exists() for rank in range(3)) and time.monotonic() < by:
            time.sleep(0.05)
        time.sleep(1.0)
        ranks.kill(1)
        killed = time.monotonic()
        outcomes = ranks.collect(30)
    for rank in (0, 2):
        error, at = values_of([outcomes[rank]])[0]
        assert "rank 1" in error, error
        assert at - killed < 5.0


# ---- training ----


def sharded(rank: int, world: int, store: str, codec: str) -> tuple[list[float], str]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    os.environ["TORCH_IROH_COMPRESSION"] = codec
    join(rank, world, store)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 8))
    fully_shard(model, mesh=init_device_mesh("cpu", (world,)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    x = torch.randn(96, 64)
    y = x[:, :8].sin()
    losses = []
    for _ in range(30):
        optimizer.zero_grad()
        loss = (model(x[rank::world]) - y[rank::world]).square().mean()
        loss.backward()
        optimizer.step()
        mean = loss.detach().clone().double()
        dist.all_reduce(mean, op=dist.ReduceOp.AVG)
        losses.append(mean.item())
    with torch.no_grad():
        out = model(x[:16])
    dist.destroy_process_group()
    return losses, digest(out)


def test_fsdp_trains_with_compressed_parameters_and_gradients(tmp_path: Path):
    runs = {}
    for codec in ("none", "int8"):
        with Ranks(2) as ranks:
            seen = ranks.run(sharded, 2, str(tmp_path / codec), codec, deadline=100)
        assert seen[0] == seen[1]
        runs[codec] = seen[0][0]
    assert runs["int8"][-1] < 0.5 * runs["int8"][0]
    assert runs["int8"] != runs["none"]
    assert abs(runs["int8"][-1] / runs["none"][-1] - 1) < 0.02


# ---- what others found ----


def chained(rank: int, world: int, store: str) -> tuple[list[str], list[str]]:
    """Operations on the same memory, all in flight: each finds what the one before it has made."""
    join(rank, world, store, compression="int8")
    wrong, digests = [], []
    for turn in range(6):
        tensor = torch.full((2_000_003,), float(rank + 1))
        works = [dist.all_reduce(tensor, async_op=True), dist.all_reduce(tensor, async_op=True)]
        works.append(dist.broadcast(tensor, turn % world, async_op=True))
        for work in works:
            work.wait()
        want = world * world * (world + 1) / 2
        if not bool(((tensor - want).abs() < 0.02 * want).all()):
            wrong.append(f"{turn}: sums of sums are {tensor.min()} to {tensor.max()}, not {want}")
        digests.append(digest(tensor))
        shard, whole = torch.zeros(100_003), torch.zeros(100_003 * world)
        works = [
            dist.reduce_scatter_tensor(shard, torch.full((100_003 * world,), float(turn + 1)), async_op=True),
            dist.all_gather_into_tensor(whole, shard, async_op=True),
        ]
        for work in works:
            work.wait()
        want = world * (turn + 1)
        if not bool(((whole - want).abs() < 0.02 * want).all()):
            wrong.append(f"{turn}: gathered shards are {whole.min()} to {whole.max()}, not {want}")
        digests.append(digest(whole))
    dist.destroy_process_group()
    return wrong, digests


def test_what_follows_on_the_same_memory_finds_the_result(tmp_path: Path):
    with Ranks(3) as ranks:
        seen = ranks.run(chained, 3, str(tmp_path / "store"))
    assert [wrong for wrong, _ in seen] == [[]] * 3
    assert len({tuple(digests) for _, digests in seen}) == 1


def halves(rank: int, world: int, store: str) -> list[str]:
    """Of float16 and bfloat16: averages that the sums would overflow, and what is owed of what the type cannot hold."""
    join(rank, world, store, **MEMORY, compression="int8")
    wrong = []
    high = torch.full((4096,), 40_000.0, dtype=torch.float16)
    dist.all_reduce(high, op=dist.ReduceOp.AVG)
    if not bool(((high.float() - 40_000).abs() < 200).all()):
        wrong.append(f"the average of 40000 is {high.min()} to {high.max()}")
    shard = torch.zeros(4096, dtype=torch.float16)
    dist.reduce_scatter_tensor(shard, torch.full((4096 * world,), 40_000.0, dtype=torch.float16), op=dist.ReduceOp.AVG)
    if not bool(((shard.float() - 40_000).abs() < 200).all()):
        wrong.append(f"the scattered average of 40000 is {shard.min()} to {shard.max()}")
    residual, paid = torch.ones(10_007), torch.zeros(10_007)
    for _ in range(6):  # who owes, wherever its values are sent from, pays
        tensor = torch.zeros(10_007)
        torch_iroh.all_reduce_compressed(tensor, "int8", op=dist.ReduceOp.SUM, residual=residual).wait()
        paid += tensor
    if not bool(((paid - world).abs() < 1e-3).all()) or residual.abs().max() > 1e-3:
        wrong.append(f"of {world} owed, {paid.min()} to {paid.max()} is paid, {residual.abs().max()} left")
    for op in (dist.ReduceOp.MAX, dist.ReduceOp.PRODUCT):
        call = functools.partial(torch_iroh.all_reduce_compressed, torch.zeros(1000), "int8", op=op)
        if "only SUM and AVG" not in attempt(call).error:
            wrong.append(f"{op} is taken")
    dist.destroy_process_group()
    return wrong


@pytest.mark.parametrize("name", ["2x2", "2+1", "3x1"])
def test_narrow_types_do_not_overflow_and_all_that_is_owed_is_paid(tmp_path: Path, name: str, hosts_of_two: None):
    with on_hosts(LAYOUTS[name]) as ranks:
        world = len(LAYOUTS[name])
        assert ranks.run(halves, world, str(tmp_path / "store"), deadline=DEADLINE) == [[]] * world


def narrow_sums(rank: int, world: int, store: str, dtype: torch.dtype) -> tuple[np.ndarray, np.ndarray]:
    join(rank, world, store)
    given, got = np.zeros(50_021), np.zeros(50_021)
    residual = torch.zeros(50_021)
    for step in range(20):
        tensor = numbers(rank, 50_021, dtype, step)
        given += tensor.double().numpy()
        torch_iroh.all_reduce_compressed(tensor, "int8", op=dist.ReduceOp.SUM, residual=residual).wait()
        got += tensor.double().numpy()
    small, owes = torch.ones(3, dtype=dtype), torch.full((3,), 1e-3)
    torch_iroh.all_reduce_compressed(small, "int8", op=dist.ReduceOp.SUM, residual=owes).wait()
    dist.destroy_process_group()
    # What each rank gave, less what it still owes; the sum is that of rank 0.
    return given - residual.double().numpy(), np.concatenate(
        [got, small.double().numpy() + world * owes.double().numpy()]
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_what_a_narrow_type_cannot_hold_stays_owed(tmp_path: Path, dtype: torch.dtype):
    with Ranks(3) as ranks:
        seen = ranks.run(narrow_sums, 3, str(tmp_path / "store"), dtype)
    paid = sum(given for given, _ in seen)
    np.testing.assert_allclose(seen[0][1][:-3], paid, atol=1e-4)
    np.testing.assert_allclose(seen[0][1][-3:], 3 * 1.001, atol=1e-3)  # the sum itself is rounded
