"""A backend of torch inside each host, iroh between hosts: gloo inside, on hosts that are namespaces (hosts.py).

NCCL, what it is for, needs two CUDA devices: the last test looks for them.
"""

from __future__ import annotations

import copy
import hashlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hosts
import numpy as np
import pytest
import torch
import torch.distributed as dist
from families import join
from hosts import DEADLINE, EVEN, LAYOUTS, on_hosts
from torch.distributed import ReduceOp

import torch_iroh

pytestmark = pytest.mark.timeout(300)

SIZES = [0, 1, 2, 13, 65_537]
FLOATS = [torch.float32, torch.float64, torch.bfloat16]
REDUCED = [*FLOATS, torch.int64]
MOVED = [*REDUCED, torch.bool, torch.complex64, torch.float8_e4m3fn]
ROUNDOFF = {torch.float32: 2.0**-24, torch.float64: 2.0**-53, torch.bfloat16: 2.0**-8}


@pytest.fixture(scope="module", autouse=True)
def _namespaces() -> None:
    if why := hosts.obstacle():
        pytest.skip(why)


# ---- values ----


def values(rank: int, count: int, dtype: torch.dtype, salt: str = "") -> torch.Tensor:
    """Numbers of one rank that any rank can make; of a size that no sum or product here leaves its dtype."""
    seed = int.from_bytes(hashlib.sha256(f"{rank} {count} {dtype} {salt}".encode()).digest()[:8], "little")
    random = np.random.default_rng(seed)
    if dtype == torch.bool:
        return torch.from_numpy(random.integers(0, 2, count)).to(dtype)
    if dtype == torch.int64:
        return torch.from_numpy(random.integers(-1000, 1000, count))
    numbers = torch.from_numpy(random.uniform(0.5, 1.5, count) * random.choice([-1.0, 1.0], count))
    return numbers.to(dtype)


def expected(op: str, parts: list[torch.Tensor]) -> tuple[np.ndarray, np.ndarray]:
    """The reduction of `parts` in float64 (integers: exact), and what one roundoff is worth there."""
    wide = np.stack([part.to(torch.float64).numpy() if part.is_floating_point() else part.numpy() for part in parts])
    if op == "MIN":
        return wide.min(0), np.zeros_like(wide[0])
    if op == "MAX":
        return wide.max(0), np.zeros_like(wide[0])
    if op == "PRODUCT":
        return wide.prod(0), np.abs(wide.prod(0))
    total, size = wide.sum(0), np.abs(wide).sum(0)
    return (total / len(parts), size / len(parts)) if op == "AVG" else (total, size)


def difference(what: str, got: torch.Tensor, op: str, parts: list[torch.Tensor]) -> list[str]:
    want, size = expected(op, parts)
    wide = got.to(torch.float64).numpy() if got.is_floating_point() else got.numpy()
    slack = (len(parts) + 2) * ROUNDOFF.get(got.dtype, 0.0) * size
    wrong = np.flatnonzero(np.abs(wide - want) > slack)
    if wrong.size == 0:
        return []
    first = wrong[0]
    return [f"{what}: {wrong.size} of {want.size} wrong, [{first}] is {wide[first]}, not {want[first]}"]


def digest(*tensors: torch.Tensor) -> str:
    text = hashlib.sha256()
    for tensor in tensors:
        text.update(tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b"")
    return text.hexdigest()[:16]


def reductions(rank: int, world: int) -> tuple[list[str], list[str]]:
    """Everything that reduces; what is wrong here, and digests of what all ranks must have alike."""
    wrong: list[str] = []
    shared: list[str] = []
    for dtype in REDUCED:
        for count in SIZES:
            for op in ["SUM", "AVG", "MIN", "MAX", "PRODUCT"]:
                if (op == "AVG" and not dtype.is_floating_point) or (count > 13 and op in ("MIN", "PRODUCT")):
                    continue
                what = f"{op} {dtype} {count}"
                parts = [values(one, count, dtype, op) for one in range(world)]
                mine = parts[rank].clone()
                dist.all_reduce(mine, op=getattr(ReduceOp, op))
                wrong += difference(f"all_reduce {what}", mine, op, parts)
                shared.append(digest(mine))
                root = count % world
                mine = parts[rank].clone()
                dist.reduce(mine, dst=root, op=getattr(ReduceOp, op))
                if rank == root:
                    wrong += difference(f"reduce {what}", mine, op, parts)
                elif not torch.equal(mine, parts[rank]):
                    wrong.append(f"reduce {what}: the input was changed")
                blocks = [values(one, count * world, dtype, op) for one in range(world)]
                output = torch.empty(count, dtype=dtype)
                source = blocks[rank].clone()
                dist.reduce_scatter_tensor(output, source, op=getattr(ReduceOp, op))
                own = [part[rank * count : (rank + 1) * count] for part in blocks]
                wrong += difference(f"reduce_scatter {what}", output, op, own)
                if not torch.equal(source, blocks[rank]):
                    wrong.append(f"reduce_scatter {what}: the input was changed")
    factor = [0.5, -1.25, 2.0, 0.1][rank]
    parts = [values(one, 1009, torch.float32) for one in range(world)]
    scaled = [part * [0.5, -1.25, 2.0, 0.1][one] for one, part in enumerate(parts)]
    mine = parts[rank].clone()
    dist.all_reduce(mine, op=dist._make_nccl_premul_sum(factor))
    wrong += difference("all_reduce PREMUL_SUM", mine, "SUM", scaled)
    shared.append(digest(mine))
    return wrong, shared


def movements(rank: int, world: int) -> tuple[list[str], list[str]]:
    wrong: list[str] = []
    shared: list[str] = []
    for dtype in MOVED:
        for count in SIZES:
            parts = [values(one, count, dtype) for one in range(world)]
            whole = torch.empty(count * world, dtype=dtype)
            dist.all_gather_into_tensor(whole, parts[rank])
            pieces = [torch.empty(count, dtype=dtype) for _ in range(world)]
            dist.all_gather(pieces, parts[rank])
            for root in range(world):
                mine = parts[rank].clone()
                dist.broadcast(mine, src=root)
                if digest(mine) != digest(parts[root]):
                    wrong.append(f"broadcast {dtype} {count} from {root}")
            if digest(whole) != digest(*parts):
                wrong.append(f"all_gather_into_tensor {dtype} {count}")
            if digest(*pieces) != digest(*parts):
                wrong.append(f"all_gather {dtype} {count}")
            shared.append(digest(whole))
    return wrong, shared


def strided(rank: int, world: int) -> tuple[list[str], list[str]]:
    """Tensors that are no stretch of memory, scalars, and leaves of a graph."""
    wrong: list[str] = []
    shared: list[str] = []
    parts = [values(one, 35, torch.float32).view(5, 7) for one in range(world)]
    for root in [None, 0, world - 1]:
        mine = torch.zeros(7, 5).t()
        mine.copy_(parts[rank])
        if root is None:
            dist.all_reduce(mine, op=ReduceOp.AVG)
            shared.append(digest(mine))
        else:
            dist.reduce(mine, dst=root, op=ReduceOp.AVG)
        if root in (None, rank):
            wrong += difference(f"strided, root {root}", mine, "AVG", parts)
        mine.copy_(parts[rank])
        dist.broadcast(mine, src=root or 0)
        if not torch.equal(mine, parts[root or 0]):
            wrong.append(f"strided broadcast from {root}")
    whole = torch.zeros(world, 7, 5).transpose(1, 2)
    dist.all_gather_into_tensor(whole, parts[rank])
    if not torch.equal(whole, torch.stack(parts)):
        wrong.append("strided all_gather_into_tensor")
    output = torch.zeros(7, 5).t()
    dist.reduce_scatter_tensor(output, torch.stack([part.t() for part in parts]).transpose(1, 2))
    wrong += difference("strided reduce_scatter", output, "SUM", [parts[rank]] * world)
    scalar = torch.tensor(float(rank))
    dist.all_reduce(scalar)
    if scalar.item() != sum(range(world)):
        wrong.append(f"scalar {scalar.item()}")
    leaf = torch.ones(9, requires_grad=True)
    dist.all_reduce(leaf.detach())
    with torch.no_grad():
        dist.broadcast(leaf, src=0)
    if leaf.sum().item() != 9 * world:
        wrong.append(f"leaf {leaf}")
    with torch.inference_mode():
        tensor = torch.full((9,), float(rank))
        dist.all_reduce(tensor, op=ReduceOp.MAX)
        if tensor.sum().item() != 9 * (world - 1):
            wrong.append(f"inference tensor {tensor}")
    return wrong, shared


def uncovered(rank: int, world: int) -> tuple[list[str], list[str]]:
    """What goes over iroh alone, between operations in parts: the numbers of both stay in step."""
    wrong: list[str] = []
    shared: list[str] = []
    for dtype, op in [(torch.int64, ReduceOp.BXOR), (torch.int16, ReduceOp.SUM), (torch.complex64, ReduceOp.SUM)]:
        ones = torch.ones(13, dtype=dtype) * (rank + 1)
        dist.all_reduce(ones, op=op)
        total = torch.ones(13)
        dist.all_reduce(total)
        if total.sum() != 13 * world:
            wrong.append(f"after {dtype}: {total}")
        shared.append(digest(ones))
    listed = [torch.ones(3 + index) for index in range(2)]
    dist.all_reduce_coalesced(listed)
    if [one.sum().item() for one in listed] != [3 * world, 4 * world]:
        wrong.append(f"all_reduce_coalesced: {listed}")
    sent = torch.arange(world, dtype=torch.float32)
    got = torch.empty(world)
    dist.all_to_all_single(got, sent)
    if not torch.equal(got, torch.full((world,), float(rank))):
        wrong.append(f"all_to_all_single: {got}")
    objects: list[Any] = [None] * world
    dist.all_gather_object(objects, {"rank": rank})
    if [one["rank"] for one in objects] != list(range(world)):
        wrong.append(f"all_gather_object: {objects}")
    dist.barrier()
    torch_iroh.monitored_barrier()
    return wrong, shared


def in_group(
    rank: int, world: int, store: str, check: Callable[[int, int], tuple[list[str], list[str]]]
) -> tuple[list[str], list[str]]:
    join(rank, world, store, inner="gloo")
    found = check(rank, world)
    dist.destroy_process_group()
    return found


@pytest.mark.parametrize("check", [reductions, movements, strided, uncovered], ids=lambda check: str(check.__name__))
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_every_collective_equals_its_reference_with_equal_bits_on_all_ranks(
    store: str, layout: str, check: Callable[..., Any]
):
    host_of = LAYOUTS[layout]
    with on_hosts(host_of) as ranks:
        found = ranks.run(in_group, len(host_of), store, check, deadline=DEADLINE)
    assert [wrong for wrong, _ in found] == [[]] * len(host_of)
    assert all(shared == found[0][1] for _, shared in found)


# ---- what goes over iroh ----


def sent_to(rank: int, host_of: list[int], store: str, inner: str, call: str, count: int) -> tuple[int, int, int]:
    """Payload bytes of one collective to this rank's own host, and to others; and how many collectives it was."""
    world = len(host_of)
    join(rank, world, store, inner=inner, algorithm="ring")
    dist.barrier()
    before = torch_iroh.stats()
    tensor = torch.full((count,), float(rank))
    calls: dict[str, Callable[[], Any]] = {
        "all_reduce": lambda: dist.all_reduce(tensor),
        "broadcast": lambda: dist.broadcast(tensor, src=1),
        "reduce": lambda: dist.reduce(tensor, dst=1),
        "all_gather": lambda: dist.all_gather_into_tensor(torch.empty(count * world), tensor),
        "reduce_scatter": lambda: dist.reduce_scatter_tensor(torch.empty(count // world), tensor),
    }
    calls[call]()
    after = torch_iroh.stats()
    dist.barrier()
    inside = outside = 0
    for old, new in zip(before.peers, after.peers, strict=True):
        bytes_sent = new.bytes_sent - old.bytes_sent
        if host_of[new.rank] == host_of[rank]:
            inside += bytes_sent
        else:
            outside += bytes_sent
    dist.destroy_process_group()
    return inside, outside, after.collectives - before.collectives


@pytest.mark.parametrize(
    ("call", "per_host"),
    # Of two hosts: each sends its sums once and gets the other's; a root's host sends alone, or is sent to.
    [
        ("all_reduce", [1, 1]),
        ("broadcast", [1, 0]),
        ("reduce", [0, 1]),
        ("all_gather", [2, 2]),
        ("reduce_scatter", [0.5, 0.5]),
    ],
)
def test_hosts_exchange_the_bytes_of_two_participants(store: str, call: str, per_host: list[float]):
    count = 1 << 18
    with on_hosts(EVEN) as ranks:
        found = ranks.run(sent_to, EVEN, store, "gloo", call, count, deadline=DEADLINE)
    print(call, found)
    for host in range(2):
        outside = sum(found[rank][1] for rank in range(4) if EVEN[rank] == host)
        assert outside == per_host[host] * 4 * count
    # Inside a host iroh carries the agreement: an empty message, or next to it.
    assert all(inside < 64 for inside, _, _ in found)
    assert all(collectives == 1 for _, _, collectives in found)


def test_ranks_of_a_host_share_its_work_where_hosts_are_even(store: str):
    count = 1 << 18
    with on_hosts(EVEN) as ranks:
        found = ranks.run(sent_to, EVEN, store, "gloo", "all_reduce", count, deadline=DEADLINE)
    assert [outside for _, outside, _ in found] == [2 * count] * 4


def test_without_an_inner_backend_four_take_part(store: str):
    count = 1 << 18
    with on_hosts(EVEN) as ranks:
        found = ranks.run(sent_to, EVEN, store, "none", "all_reduce", count, deadline=DEADLINE)
    assert sum(outside for _, outside, _ in found) == 2 * 6 * count  # of four in a ring, two send to the other host
    assert all(inside + outside == 6 * count for inside, outside, _ in found)


# ---- asynchronous ----


def many_in_flight(rank: int, world: int, store: str) -> list[str]:
    join(rank, world, store, inner="gloo")
    tensors = [torch.full((1009 + 7 * index,), float(rank + index)) for index in range(50)]
    begun = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    order: list[int] = []
    futures = [
        work.get_future().then(lambda done, index=index: order.append(index)) for index, work in enumerate(begun)
    ]
    for future in futures:
        future.wait()
    wrong = [] if sorted(order) == list(range(50)) else [f"callbacks {order}"]
    for index, (work, tensor) in enumerate(zip(begun, tensors, strict=True)):
        work.wait()
        want = sum(range(world)) + world * index
        if not work.is_completed() or not torch.all(tensor == want):
            wrong.append(f"all_reduce {index}: {tensor[:3]} instead of {want}")
    # On one tensor, in the order of the calls, though each goes another way.
    one = torch.full((1009,), float(rank))
    last = [
        dist.all_reduce(one, async_op=True),
        dist.broadcast(one, src=world - 1, async_op=True),
        dist.all_reduce(one, op=ReduceOp.AVG, async_op=True),
        dist.all_reduce(one.view(torch.int32), op=ReduceOp.BOR, async_op=True),  # over iroh alone
        dist.all_reduce(one, op=ReduceOp.MAX, async_op=True),
    ]
    dist.barrier()
    if not all(work.is_completed() for work in last):
        wrong.append("a barrier ended before what was called before it")
    for work in last:
        work.wait()
    if not torch.all(one == sum(range(world))):
        wrong.append(f"five on one tensor: {one[:3]}")
    dist.destroy_process_group()
    return wrong


@pytest.mark.parametrize("layout", ["2x2", "2+1"])
def test_many_in_flight_end_in_order_each_with_its_own_result(store: str, layout: str):
    host_of = LAYOUTS[layout]
    with on_hosts(host_of) as ranks:
        assert ranks.run(many_in_flight, len(host_of), store, deadline=DEADLINE) == [[]] * len(host_of)


def returns_at_once(rank: int, world: int, store: str, gate: str) -> tuple[bool, bool]:
    """The last rank comes when the others have their Works; were a call to wait for it, nobody would ever come."""
    join(rank, world, store, inner="gloo")
    tensor = torch.ones(1009)
    if rank == world - 1:
        while not all(Path(f"{gate}{other}").exists() for other in range(world - 1)):
            time.sleep(0.01)
        dist.all_reduce(tensor)
        dist.destroy_process_group()
        return True, True
    work = dist.all_reduce(tensor, async_op=True)
    early = work.is_completed()
    Path(f"{gate}{rank}").touch()
    work.wait()
    dist.destroy_process_group()
    return not early, bool(torch.all(tensor == world))


def test_an_asynchronous_call_waits_for_nobody(store: str, tmp_path: Path):
    with on_hosts(EVEN) as ranks:
        found = ranks.run(returns_at_once, 4, store, str(tmp_path / "gate"), deadline=DEADLINE)
    assert found == [(True, True)] * 4


def split_and_new(rank: int, world: int, store: str) -> list[str]:
    join(rank, world, store, inner="gloo")
    wrong = []
    pairs = dist.new_group([0, 2, 3], pg_options=torch_iroh.Options(inner="gloo"))  # hosts 0, 1, 1
    again = dist.new_group(pg_options=torch_iroh.Options(inner="gloo"))
    options = dist.group.WORLD._get_backend(torch.device("cpu")).options  # type: ignore[union-attr]
    split = dist.group.WORLD.split_group([1, 2, 3], opts=options)  # type: ignore[union-attr]
    if rank > 0:
        tensor = torch.full((1009,), float(rank))
        split.allreduce([tensor]).wait()
        sent = split._get_backend(torch.device("cpu")).stats()["peers"]
        inside = [peer["bytes_sent"] for peer in sent if rank > 1 and peer["rank"] > 0]
        if not torch.all(tensor == 6) or any(one > 64 for one in inside):
            wrong.append(f"split: {tensor[:3]}, {inside} bytes inside the host")
    for _ in range(3):
        for group, members in [(pairs, [0, 2, 3]), (again, range(world)), (None, range(world))]:
            if rank not in members:
                continue
            tensor = torch.full((1009,), float(rank + 1))
            dist.all_reduce(tensor, group=group)
            if not torch.all(tensor == sum(one + 1 for one in members)):
                wrong.append(f"{members}: {tensor[:3]}")
    dist.destroy_process_group()
    return wrong


def test_groups_beside_each_other_have_inner_backends_of_their_own(store: str):
    with on_hosts(EVEN) as ranks:
        assert ranks.run(split_and_new, 4, store, deadline=DEADLINE) == [[]] * 4


# ---- DDP ----


def model() -> torch.nn.Module:
    torch.manual_seed(7)
    return torch.nn.Sequential(torch.nn.Linear(16, 33), torch.nn.Tanh(), torch.nn.Linear(33, 5)).double()


def two_steps(net: torch.nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> list[torch.Tensor]:
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    for step in range(2):
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(net(inputs[step]), targets[step]).backward()
        optimizer.step()
    return [parameter.detach().clone() for parameter in net.parameters()]


def data(world: int) -> tuple[torch.Tensor, torch.Tensor]:
    random = torch.Generator().manual_seed(3)
    return (
        torch.randn(2, 4 * world, 16, generator=random, dtype=torch.float64),
        torch.randn(2, 4 * world, 5, generator=random, dtype=torch.float64),
    )


def train(rank: int, world: int, store: str) -> list[torch.Tensor]:
    join(rank, world, store, inner="gloo")
    inputs, targets = data(world)
    mine = slice(4 * rank, 4 * rank + 4)
    net = model()
    if rank > 0:  # DDP gives everyone rank 0's
        for parameter in net.parameters():
            parameter.data.zero_()
    wrapped = torch.nn.parallel.DistributedDataParallel(net, bucket_cap_mb=0.001)
    trained = two_steps(wrapped, inputs[:, mine], targets[:, mine])
    del wrapped
    dist.destroy_process_group()
    return trained


@pytest.mark.parametrize("layout", ["2x2", "2+1"])
def test_ddp_trains_as_one_process_does(store: str, layout: str):
    host_of = LAYOUTS[layout]
    world = len(host_of)
    with on_hosts(host_of) as ranks:
        found = ranks.run(train, world, store, deadline=DEADLINE)
    alone = two_steps(copy.deepcopy(model()), *data(world))
    for trained in found:
        for got, first, want in zip(trained, found[0], alone, strict=True):
            assert torch.equal(got, first)
            torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-14)


# ---- NCCL ----


def on_devices(rank: int, host_of: list[int], store: str, inner: str) -> tuple[list[str], list[str]]:
    world = len(host_of)
    torch.cuda.set_device(host_of[:rank].count(host_of[rank]))  # hosts of one machine share its devices
    join(rank, world, store, inner=inner)
    wrong: list[str] = []
    shared: list[str] = []
    for dtype in REDUCED:
        for count in [1, 13, 65_537]:
            parts = [values(one, count, dtype) for one in range(world)]
            torch.cuda._sleep(2_000_000)
            mine = parts[rank].pin_memory().to("cuda", non_blocking=True)
            dist.all_reduce(mine, async_op=True).wait()
            result = mine.cpu()
            wrong += difference(f"all_reduce {dtype} {count}", result, "SUM", parts)
            shared.append(digest(result))
            mine = parts[rank].cuda()
            dist.broadcast(mine, src=world - 1)
            if digest(mine.cpu()) != digest(parts[-1]):
                wrong.append(f"broadcast {dtype} {count}")
            whole = torch.empty(count * world, dtype=dtype, device="cuda")
            dist.all_gather_into_tensor(whole, parts[rank].cuda())
            if digest(whole.cpu()) != digest(*parts):
                wrong.append(f"all_gather {dtype} {count}")
            blocks = [values(one, count * world, dtype) for one in range(world)]
            own = torch.empty(count, dtype=dtype, device="cuda")
            dist.reduce_scatter_tensor(own, blocks[rank].cuda())
            mine_of = [part[rank * count : (rank + 1) * count] for part in blocks]
            wrong += difference(f"reduce_scatter {dtype} {count}", own.cpu(), "SUM", mine_of)
    if any(peer.bytes_sent > 64 << 10 for peer in torch_iroh.stats().peers if host_of[peer.rank] == host_of[rank]):
        # Where hosts are uneven, reduce_scatter and all_gather go over iroh alone.
        wrong += ["iroh carried tensors inside a host"] * (host_of.count(0) == host_of.count(1))
    dist.destroy_process_group()
    return wrong, shared


@pytest.mark.skipif(
    not (dist.is_nccl_available() and torch.cuda.device_count() >= 2), reason="needs NCCL and two CUDA devices"
)
@pytest.mark.parametrize("inner", ["auto", "nccl"])
@pytest.mark.parametrize("layout", ["2x2", "2+1"])
def test_nccl_inside_hosts(store: str, layout: str, inner: str):
    host_of = LAYOUTS[layout]
    with on_hosts(host_of, {"TORCH_IROH_LOG": "info"}) as ranks:
        found = ranks.run(on_devices, host_of, store, inner, deadline=DEADLINE)
        assert "go through NCCL" in ranks.output(0)
    assert [wrong for wrong, _ in found] == [[]] * len(host_of)
    assert all(shared == found[0][1] for _, shared in found)
