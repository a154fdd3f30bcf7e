"""What c10d has beyond the plain collectives: sparse sums, the monitored barrier, splitting and merging groups, futures
of results, hooks, errors of each kind beside gloo's, groups made and destroyed many times.
"""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from families import attempt, join, join_and_sum
from torch.distributed import ReduceOp

import torch_iroh


def own_backend() -> Any:
    return dist.group.WORLD._get_backend(torch.device("cpu"))


# ---- sparse ----


def sparse_of(rank: int, dtype: torch.dtype, case: str) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank)
    if case == "empty":
        return torch.sparse_coo_tensor(torch.empty(1, 0, dtype=torch.int64), torch.empty(0, 3, dtype=dtype), (7, 3))
    if case == "uneven":  # rank 0 has nothing, rank 2 has doubles
        indices = [[], [1, 4], [4, 0, 4, 6, 6], [2], [2, 3, 5]][rank % 5]
        values = torch.randint(-9, 9, (len(indices), 3), generator=generator).to(dtype)
        return torch.sparse_coo_tensor(torch.tensor([indices], dtype=torch.int64), values, (7, 3))
    values = torch.randint(-9, 9, (4,), generator=generator).to(dtype)
    indices = torch.randint(0, 5, (2, 4), generator=generator)
    return torch.sparse_coo_tensor(indices, values, (5, 5))


SPARSE_CASES = [
    (dtype, case, average)
    for dtype in (torch.float32, torch.float64, torch.int64, torch.bfloat16)
    for case in ("empty", "uneven", "two_dimensions")
    for average in (False, True)
    if not (average and dtype is torch.int64)
]


def sparse_sums(rank: int, world: int, store: str) -> list[tuple[torch.Tensor, bool]]:
    join(rank, world, store)
    found = []
    for dtype, case, average in SPARSE_CASES:
        tensor = sparse_of(rank, dtype, case)
        work = dist.all_reduce(tensor, op=ReduceOp.AVG if average else ReduceOp.SUM, async_op=True)
        dense = torch.ones(3)
        dist.all_reduce(dense)  # is not overtaken by the parts that become known late
        work.wait()
        found.append((tensor.to_dense(), bool((dense == world).all())))
    dist.destroy_process_group()
    return found


@pytest.mark.parametrize("world", [1, 2, 3, 5])
def test_sparse_all_reduce_equals_the_dense_sum(run, store, world):
    for found in run(world, sparse_sums, world, store):
        for (dtype, case, average), (got, others) in zip(SPARSE_CASES, found, strict=True):
            expected = sum(sparse_of(rank, torch.float64, case).to_dense() for rank in range(world))
            expected = (expected / world if average else expected).to(dtype)
            torch.testing.assert_close(got, expected, msg=f"{dtype} {case} average={average} world={world}: {got}")
            assert others


def sparse_mistakes(rank: int, world: int, store: str) -> dict[str, str]:
    join_and_sum(rank, world, store)
    found = {"max": attempt(lambda: dist.all_reduce(sparse_of(rank, torch.float32, "uneven"), op=ReduceOp.MAX)).error}
    shape = (7, 3 + rank)
    tensor = torch.sparse_coo_tensor(torch.tensor([[1]]), torch.ones(1, shape[1]), shape)
    found["shapes"] = attempt(lambda: dist.all_reduce(tensor)).error
    dist.destroy_process_group()
    return found


def test_sparse_mistakes_are_errors_on_both_sides(run, store):
    for found in run(2, sparse_mistakes, 2, store):
        assert "SUM or AVG" in found["max"]
        assert "[7, 3]" in found["shapes"] and "[7, 4]" in found["shapes"], found


# ---- the monitored barrier ----


def barriers(rank: int, world: int, store: str, absent: list[int]) -> list[Any]:
    join(rank, world, store)
    torch_iroh.monitored_barrier(timeout=timedelta(seconds=20))
    found: list[Any] = []
    for name_all in (False, True):
        if rank not in absent:
            found.append(attempt(lambda all_=name_all: torch_iroh.monitored_barrier(timeout=1.0, wait_all_ranks=all_)))
        dist.barrier()  # the group goes on
    dist.destroy_process_group()
    return found


@pytest.mark.parametrize(("world", "absent"), [(2, [1]), (3, [1, 2]), (5, [2, 4])])
def test_monitored_barrier_names_who_is_missing_and_leaves_the_group_whole(run, store, world, absent):
    all_found = run(world, barriers, world, store, absent)
    first, every = all_found[0]
    assert f"[Rank 0]: Rank {absent[0]} failed to pass monitoredBarrier in 1000 ms" in first.error
    assert f"[Rank 0]: Ranks {', '.join(map(str, absent))} failed to pass monitoredBarrier in 1000 ms" in every.error
    assert 0.9 < first.took < 3 and first.kind == "DistBackendError"
    for rank in set(range(1, world)) - set(absent):
        for made in all_found[rank]:
            assert f"Rank {rank} successfully reached monitoredBarrier, but received errors" in made.error, made


def barrier_of_group(rank: int, world: int, store: str) -> tuple[float, str, str]:
    join(rank, world, store)
    group = dist.new_group([0, 1])
    begun = time.monotonic()
    torch_iroh.monitored_barrier(group, timeout=20)
    took = time.monotonic() - begun
    zero = attempt(lambda: torch_iroh.monitored_barrier(timeout=0)).error if rank == 0 else ""
    gloo = dist.new_group(backend="gloo")
    wrong = attempt(lambda: torch_iroh.monitored_barrier(gloo)).error
    dist.barrier()
    dist.destroy_process_group()
    return took, zero, wrong


def test_monitored_barrier_of_a_subgroup_of_another_backend_and_without_time(run, store):
    found = run(3, barrier_of_group, 3, store)
    assert all(took < 5 for took, _, _ in found)
    assert "Rank 0 timed out in monitoredBarrier" in found[0][1]
    assert all("'gloo'" in wrong for _, _, wrong in found)


# ---- splitting and merging ----


def split_groups(rank: int, world: int, store: str) -> dict[str, Any]:
    join(rank, world, store)
    found: dict[str, Any] = {"name before": own_backend().options.group_name}
    mine = [one for one in range(world) if one % 2 == rank % 2]
    part = dist.group.WORLD.split_group(mine, group_name=f"half{rank % 2}", timeout=timedelta(seconds=25))
    total = torch.tensor([float(rank)])
    part.allreduce([total]).wait()
    found["half"] = (part.rank(), part.size(), total.item())
    found["timeouts"] = (own_backend().options._timeout, part._get_backend(torch.device("cpu")).options._timeout)
    nobody = dist.group.WORLD.split_group([0], group_name="zero")
    found["outside"] = nobody is None
    found["supports"] = own_backend().supports_splitting
    own_backend().perform_nocolor_split(torch.device("cpu"))
    found["options"] = type(own_backend().options).__name__
    found["name"] = own_backend().options.group_name
    dist.barrier()
    part.shutdown()
    dist.destroy_process_group()
    return found


@pytest.mark.parametrize("world", [2, 3, 5])
def test_split_makes_groups_that_sum_on_their_own(run, store, world):
    for rank, found in enumerate(run(world, split_groups, world, store)):
        mine = [one for one in range(world) if one % 2 == rank % 2]
        assert found["half"] == (mine.index(rank), len(mine), float(sum(mine)))
        assert found["outside"] == (rank != 0)
        assert found["supports"] and found["options"] == "Options"
        # The group that was split keeps its own, 30 s from join().
        assert found["timeouts"] == (timedelta(seconds=30), timedelta(seconds=25))
        assert found["name"] == found["name before"]


def merge_groups(rank: int, world: int, store: str) -> tuple[int, float]:
    # Each rank is a world of its own first, which needs no network.
    dist.init_process_group("iroh", store=dist.HashStore(), rank=0, world_size=1)
    shared = dist.FileStore(store, world)
    merged = dist.group.WORLD.merge_remote_group(shared, world, timedelta(seconds=30), group_name="all")
    total = torch.tensor([rank + 1.0])
    merged.allreduce([total]).wait()
    merged.shutdown()
    dist.destroy_process_group()
    return merged.rank(), total.item()


@pytest.mark.parametrize("world", [2, 3])
def test_merge_joins_groups_that_had_no_network(run, store, world):
    found = run(world, merge_groups, world, store)
    assert sorted(rank for rank, _ in found) == list(range(world))
    assert {total for _, total in found} == {world * (world + 1) / 2}


# ---- results and errors ----


def result_futures(rank: int, world: int, store: str) -> tuple[Any, Any, str]:
    join(rank, world, store, timeout=2.0)
    good = dist.all_reduce(torch.ones(3), async_op=True)
    first = good.get_future_result().wait()
    second, error = None, ""
    if rank == 0:
        late = dist.all_reduce(torch.ones(3), async_op=True)
        second = late.get_future_result().wait()
        error = str(own_backend().get_error())
    else:
        time.sleep(4)
    dist.destroy_process_group()
    return first, second, error


def test_result_futures_tell_success_and_time_out(run, store):
    found = run(2, result_futures, 2, store)
    assert found[0][:2] == (0, 1)
    assert "TIMEOUT" in found[0][2]


def timeouts_of_work(rank: int, world: int, store: str) -> list[timedelta]:
    join(rank, world, store)
    soon = dist.BarrierOptions()
    soon.timeout = timedelta(seconds=20)
    works = [dist.all_reduce(torch.ones(3), async_op=True), own_backend().barrier(soon)]
    for work in works:
        work.wait()
    dist.destroy_process_group()
    return [work.timeout for work in works]


@pytest.mark.skipif(not hasattr(dist.Work, "timeout"), reason="torch 2.13 does not ask")
def test_work_tells_its_timeout(run, store):
    assert run(2, timeouts_of_work, 2, store) == [[timedelta(seconds=30), timedelta(seconds=20)]] * 2


def rooted(options: Any, root: int) -> Any:
    options.rootRank = root
    return options


def mistakes(backend: str, rank: int, world: int, store: str) -> dict[str, str]:
    dist.init_process_group(backend, store=dist.FileStore(store), rank=rank, world_size=world)
    pg = dist.group.WORLD._get_backend(torch.device("cpu"))
    one = torch.ones(4)
    lists = [torch.ones(4) for _ in range(world)]
    calls: dict[str, Callable[[], Any]] = {
        "broadcast: no tensor": lambda: pg.broadcast([]),
        "broadcast: root 9": lambda: pg.broadcast(one, 9),
        "broadcast: root -1": lambda: pg.broadcast(one, -1),
        "allreduce: no tensor": lambda: pg.allreduce([]),
        "reduce: root 9": lambda: pg.reduce(one, 9),
        "allgather: no input": lambda: pg.allgather([lists], []),
        "allgather: short list": lambda: pg.allgather([lists[:-1]], [one]),
        "allgather: no list": lambda: pg.allgather([], [one]),
        "gather: root 9": lambda: pg.gather([lists], [one], rooted(dist.GatherOptions(), 9)),
        "gather: list elsewhere": lambda: pg.gather([lists], [one], rooted(dist.GatherOptions(), 1 - rank)),
        "gather: short list": lambda: pg.gather([lists[:-1]], [one], rooted(dist.GatherOptions(), rank)),
        "scatter: root 9": lambda: pg.scatter([one], [lists], rooted(dist.ScatterOptions(), 9)),
        "scatter: short list": lambda: pg.scatter([one], [lists[:-1]], rooted(dist.ScatterOptions(), rank)),
        "scatter: list elsewhere": lambda: pg.scatter([one], [lists], rooted(dist.ScatterOptions(), 1 - rank)),
    }
    found = {}
    for name, call in calls.items():
        made = attempt(call)
        found[name] = made.kind
        if backend == "iroh":
            assert made.error.startswith("ProcessGroupIroh::"), (name, made)
    dist.barrier()
    dist.destroy_process_group()
    return found


def test_mistakes_raise_what_gloo_raises(run, tmp_path):
    ours = run(2, mistakes_of("iroh"), 2, str(tmp_path / "iroh"))
    gloos = run(2, mistakes_of("gloo"), 2, str(tmp_path / "gloo"))
    for mine, theirs in zip(ours, gloos, strict=True):
        assert mine == theirs, {name: (mine[name], theirs[name]) for name in mine if mine[name] != theirs[name]}


def mistakes_of(backend: str) -> Callable[..., dict[str, str]]:
    return {"iroh": iroh_mistakes, "gloo": gloo_mistakes}[backend]


def iroh_mistakes(rank: int, world: int, store: str) -> dict[str, str]:
    return mistakes("iroh", rank, world, store)


def gloo_mistakes(rank: int, world: int, store: str) -> dict[str, str]:
    return mistakes("gloo", rank, world, store)


# ---- groups ----


def different_lists(rank: int, world: int, store: str, lists: list[list[int]]) -> str:
    join_and_sum(rank, world, store)
    error = attempt(lambda: dist.new_group(lists[rank], timeout=timedelta(seconds=5))).error
    dist.destroy_process_group()
    return error


@pytest.mark.parametrize(
    "lists",
    [
        [[0, 1, 2], [0, 1], [0, 1, 2]],
        [[0, 1], [0, 2], [0, 2]],
        [[0, 1], [0, 1, 2], [0, 1, 2]],
    ],
)
def test_new_group_with_different_lists_is_an_error_that_names_both(run, store, lists):
    errors = [error for error in run(3, different_lists, 3, store, lists) if error]
    assert errors
    texts = [", ".join(map(str, one)) for one in lists]
    assert any(all(text in error for text in set(texts)) for error in errors), errors


def many_groups(rank: int, world: int, store: str, count: int) -> dict[str, int]:
    join_and_sum(rank, world, store)

    def used() -> dict[str, int]:
        gc.collect()
        return {"files": len(os.listdir("/proc/self/fd")), "threads": len(os.listdir("/proc/self/task"))}

    def one() -> None:
        group = dist.new_group(timeout=timedelta(seconds=60))
        total = torch.ones(5)
        dist.all_reduce(total, group=group)
        assert total[0] == world
        dist.destroy_process_group(group)

    for _ in range(20):
        one()
    before = used()
    for _ in range(count):
        one()
    after = used()
    dist.destroy_process_group()
    return {name: after[name] - before[name] for name in before}


def test_a_thousand_groups_leak_no_file_and_no_thread(run, store):
    for grown in run(2, many_groups, 2, store, 1000, deadline=280):
        assert grown["files"] <= 0 and grown["threads"] <= 2, grown  # tokio's spare threads come and go


def again_and_again(rank: int, world: int, store: str) -> bool:
    for turn in range(20):
        join(rank, world, f"{store}-{turn}")
        total = torch.ones(3)
        dist.all_reduce(total)
        assert total[0] == world
        dist.destroy_process_group()
    return True


def test_init_and_destroy_twenty_times_in_one_process(run, store):
    assert run(3, again_and_again, 3, store) == [True] * 3


def mixed_backends(rank: int, world: int, store: str) -> tuple[float, list[str]]:
    dist.init_process_group("cpu:gloo,cuda:iroh", store=dist.FileStore(store), rank=rank, world_size=world)
    total = torch.ones(3)
    dist.all_reduce(total)
    kinds = [type(dist.group.WORLD._get_backend(torch.device(kind))).__name__ for kind in ("cpu", "cuda")]
    torch_iroh.monitored_barrier(timeout=20)  # through the iroh part
    dist.destroy_process_group()
    return total[0].item(), kinds


def test_gloo_for_the_cpu_and_iroh_for_devices_in_one_group(run, store):
    assert run(2, mixed_backends, 2, store) == [(2.0, ["ProcessGroupGloo", "ProcessGroupIroh"])] * 2


# ---- hooks ----


def trained(hook: Callable[..., Any] | None, rank: int, world: int) -> torch.Tensor:
    torch.manual_seed(0)
    model = torch.nn.Linear(33, 7)
    wrapped = torch.nn.parallel.DistributedDataParallel(model)
    if hook is not None:
        wrapped.register_comm_hook(None, hook)
    torch.manual_seed(rank)
    wrapped(torch.randn(5, 33)).square().sum().backward()
    assert model.weight.grad is not None
    return model.weight.grad.clone()


def hooked(rank: int, world: int, store: str) -> tuple[torch.Tensor, torch.Tensor]:
    join(rank, world, store)
    exact, compressed = trained(None, rank, world), trained(torch_iroh.hooks.bf16_compress, rank, world)
    dist.destroy_process_group()
    return exact, compressed


@pytest.mark.parametrize("world", [2, 3])
def test_bf16_hook_averages_within_bfloat16_and_equally_on_all_ranks(run, store, world):
    results = run(world, hooked, world, store)
    for exact, compressed in results:
        assert torch.equal(compressed, results[0][1])
        assert not torch.equal(exact, compressed)
        bound = 2**-7 * exact.abs().max()  # every rank's part and the sum are rounded to 8 bits
        assert (exact - compressed).abs().max() <= bound


# ---- messages ----


def send_first(rank: int, world: int, store: str, count: int) -> tuple[float, float]:
    """Every rank sends to its neighbour before it receives, and leaves at once when it has what it wanted."""
    join(rank, world, store)
    mine = torch.full((count,), float(rank))
    got = torch.empty(count)
    dist.send(mine, (rank + 1) % world)
    mine.fill_(-1.0)  # ours again
    if rank == 0:
        time.sleep(0.3)
    dist.recv(got, (rank - 1) % world)
    dist.destroy_process_group()
    return got[0].item(), got[-1].item()


@pytest.mark.parametrize("world", [2, 3, 5])
@pytest.mark.parametrize("count", [1, 3_000_017])
def test_blocking_sends_against_each_other_arrive_whole(run, store, world, count):
    expected = [(float((rank - 1) % world),) * 2 for rank in range(world)]
    assert run(world, send_first, world, store, count) == expected


def send_ahead(rank: int, world: int, store: str, count: int) -> bool:
    join(rank, world, store)
    right = True
    if rank == 0:
        works = [dist.isend(torch.tensor([float(index)]), 1) for index in range(count)]
        for work in works:
            work.wait()
    else:
        time.sleep(1)
        for index in range(count):
            got = torch.empty(1)
            dist.recv(got, 0)
            right = right and got.item() == index
    dist.destroy_process_group()
    return right


def test_twenty_thousand_messages_may_wait_for_a_receiver(road, run, store):
    assert run(2, send_ahead, 2, store, 20_000, deadline=100) == [True, True]


def uneven_to_nothing(rank: int, world: int, store: str) -> str:
    join_and_sum(rank, world, store)
    sends = [0, 0] if rank == 0 else [2, 0]
    wants = [0, 2] if rank == 0 else [2, 0]  # rank 1 waits for two elements that rank 0 does not have for it
    error = attempt(lambda: dist.all_to_all_single(torch.empty(2), torch.empty(sum(sends)), wants, sends))
    if rank == 0:
        time.sleep(0.5)
    dist.destroy_process_group()
    return error.error


def test_all_to_all_that_disagrees_to_zero_names_both_amounts(run, store):
    errors = run(2, uneven_to_nothing, 2, store)
    assert any("sends 0 elements to rank 1, which expects 2" in error for error in errors), errors


def leave_unread(rank: int, world: int, store: str) -> tuple[float, str]:
    join(rank, world, store)
    if rank == 1:
        dist.send(torch.ones(1), 0)  # never received
        time.sleep(1)  # the other's message is on offer
        dist.destroy_process_group()
        return 0.0, ""
    dist.send(torch.ones(1_000_000), 1)  # kept for rank 1, which has a message here and leaves
    begun = time.monotonic()
    dist.destroy_process_group()
    return time.monotonic() - begun, ""


def test_a_message_kept_for_a_rank_that_left_holds_nobody_up(road, run, store):
    assert run(2, leave_unread, 2, store)[0][0] < 5


def head_leaves(rank: int, world: int, store: str) -> str:
    join_and_sum(rank, world, store)
    if rank == 0:
        dist.destroy_process_group()
        return ""
    made = attempt(lambda: torch_iroh.monitored_barrier(timeout=30))
    dist.destroy_process_group()
    assert made.took < 5, made
    return made.error


def test_monitored_barrier_ends_when_rank_0_leaves(road, run, store):
    assert "rank 0 is gone" in run(2, head_leaves, 2, store)[1]


def odd_sparse(rank: int, world: int, store: str) -> tuple[torch.Size, torch.Tensor]:
    join(rank, world, store)
    nothing = torch.sparse_coo_tensor(torch.tensor([[0, 1]]), torch.ones(2, 0, 4), (5, 0, 4))
    dist.all_reduce(nothing)
    with torch.inference_mode():
        inferred = torch.sparse_coo_tensor(torch.tensor([[rank]]), torch.ones(1), (3,))
        dist.all_reduce(inferred)
        dense = inferred.to_dense()
    dist.destroy_process_group()
    return nothing.to_dense().shape, dense.clone()


def test_sparse_tensors_without_width_and_of_inference_mode(run, store):
    for shape, dense in run(2, odd_sparse, 2, store):
        assert shape == (5, 0, 4)
        assert dense.tolist() == [1.0, 1.0, 0.0]


def many_waiting_callbacks(rank: int, world: int, store: str, count: int) -> int:
    join(rank, world, store)
    other = dist.new_group()

    def then(done: Any) -> int:
        strided = torch.ones(4, 6)[:, ::2]  # its result is copied back
        dist.all_reduce(strided, group=other)
        return int(strided.sum())

    futures = [
        dist.all_reduce(torch.ones(3), async_op=True).get_future().then(then)  # more than there are threads for them
        for _ in range(count)
    ]
    sums = {future.wait() for future in futures}
    dist.destroy_process_group()
    assert sums == {12 * world}
    return count


def test_a_hundred_callbacks_may_wait_for_operations_of_another_group(run, store):
    assert run(2, many_waiting_callbacks, 2, store, 100) == [100, 100]
