"""The tests of the simulated device, on a real one where there is one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from families import join
from test_device import COUNT, collectives, values

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine")


def late(tensor: torch.Tensor) -> torch.Tensor:
    """The same numbers on the GPU, behind work that is still queued when this returns."""
    torch.cuda._sleep(2_000_000)
    return (tensor + 1).pin_memory().to("cuda", non_blocking=True).sub_(1)


def all_collectives(rank: int, world: int, store: str) -> list[str]:
    torch.cuda.set_device(rank % torch.cuda.device_count())
    join(rank, world, store)
    wrong = []
    for dtype in (torch.float32, torch.int64, torch.bfloat16):
        expected = collectives(rank, world, dtype, torch.clone)
        for index, (got, want) in enumerate(zip(collectives(rank, world, dtype, late), expected, strict=True)):
            if not torch.equal(got, want):
                wrong.append(f"{dtype} result {index}: {got.flatten()[:5]} instead of {want.flatten()[:5]}")
    dist.destroy_process_group()
    return wrong


@pytest.mark.parametrize("world", [1, 2, 3])
def test_collectives_on_the_gpu_equal_those_on_the_cpu(run, store, world):
    assert run(world, all_collectives, world, store, deadline=120) == [[]] * world


def sparse_and_future(rank: int, world: int, store: str) -> tuple[Any, Any]:
    torch.cuda.set_device(rank % torch.cuda.device_count())
    join(rank, world, store)
    sparse = torch.sparse_coo_tensor(torch.tensor([[rank, 5]]), torch.ones(2, 3), (7, 3)).cuda()
    dist.all_reduce(sparse)
    work = dist.all_reduce(late(values(rank, COUNT, torch.float32)), async_op=True)
    doubled = work.get_future().then(lambda done: done.value()[0] * 2).wait()
    result = sparse.to_dense().cpu(), doubled.cpu()
    dist.destroy_process_group()
    return result


def test_sparse_sums_and_futures_on_the_gpu(run, store):
    expected = torch.zeros(7, 3)
    expected[0] += 1
    expected[1] += 1
    expected[5] += 2
    total = sum(values(one, COUNT, torch.float32) for one in range(2))
    for sparse, doubled in run(2, sparse_and_future, 2, store, deadline=120):
        assert torch.equal(sparse, expected)
        assert torch.equal(doubled, 2 * total)
