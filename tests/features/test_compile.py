"""torch.compile, autograd and objects through the collectives of iroh: as on gloo, and as without the compiler."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.distributed.nn.functional as autograd_collectives
from both import batch, compare, loss_of, make_model
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

# ---- functional collectives in a compiled graph ----


def functional(x: torch.Tensor) -> list[torch.Tensor]:
    """Every functional collective that can be traced; `x` has world rows."""
    group, world = dist.group.WORLD, x.shape[0]
    uneven = funcol.all_to_all_single(x, [1] * world, [1] * world, group)
    return [
        funcol.all_reduce(x * 2, "sum", group) + 1,
        funcol.all_reduce(x, "max", group),
        funcol.all_reduce(x, "avg", group),
        funcol.all_gather_tensor(x, 0, group).sin(),
        funcol.all_gather_tensor(x, 1, group),
        funcol.reduce_scatter_tensor(x, "sum", 0, group) * 3,
        uneven.cos(),
        funcol.broadcast(x, 1, group),
        *funcol.all_reduce_coalesced([x, x + 1], "sum", group),
        *funcol.all_gather_into_tensor_coalesced([x, x * 2], group),
        *funcol.reduce_scatter_tensor_coalesced([x, x * 2], "sum", [0, 0], group),
        funcol.permute_tensor(x.flatten(), [(rank + 1) % world for rank in range(world)], group),
    ]


def rewritten(x: torch.Tensor) -> list[torch.Tensor]:
    """The calls of torch.distributed that dynamo turns into functional ones."""
    world = x.shape[0]
    total, gathered, part = x * 1, x.new_empty(world * world, x.shape[1]), x.new_empty(1, x.shape[1])
    exchanged = torch.empty_like(x)
    dist.all_reduce(total)
    dist.all_gather_into_tensor(gathered, x)
    dist.reduce_scatter_tensor(part, x)
    dist.all_to_all_single(exchanged, x)
    return [total + 1, gathered * 2, part - 1, exchanged]


PROGRAMS = {"functional": functional, "rewritten": rewritten}


def run_compiled(rank: int, world: int, program: str, compiler: str) -> list[torch.Tensor]:
    torch._dynamo.reset()
    x = torch.arange(world * 5.0).reshape(world, 5) * (rank + 1)
    expected = PROGRAMS[program](x.clone())
    compiled = torch.compile(PROGRAMS[program], fullgraph=True, backend=compiler)
    found = compiled(x.clone())
    compare(found, [one * 1 for one in expected], what=f"rank {rank}: compiled and eager")
    return found


@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("world", [2, 3])
def test_compiled_with_fullgraph_gives_what_eager_gives(both, world, program):
    both(world, run_compiled, program, "aot_eager")


@pytest.mark.timeout(240)
def test_compiled_by_inductor(both):
    """Inductor compiles C++ for each kernel: one program, two ranks."""
    both(2, run_compiled, "functional", "inductor", deadline=200)


def train_compiled(rank: int, world: int, kind: str) -> dict[str, Any]:
    torch._dynamo.reset()
    model: Any = make_model()
    if kind == "ddp":
        model = torch.compile(DistributedDataParallel(model), backend="aot_eager")
    else:
        mesh = init_device_mesh("cpu", (world,))
        for layer in (*model, model):
            fully_shard(layer, mesh=mesh)
        for layer in model:
            layer.compile(backend="aot_eager")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for step in range(3):
        loss = loss_of(model, *batch(step, rank))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return {"losses": losses}


@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_compiled_training(both, kind):
    both(2, train_compiled, kind)


# ---- autograd ----


def gradients(rank: int, world: int) -> dict[str, torch.Tensor]:
    """Collectives that gradients pass through (torch.distributed.nn, and functional ones with autograd)."""
    group, found = dist.group.WORLD, {}

    def leaf(scale: float = 1.0) -> torch.Tensor:
        return (torch.arange(world * 3.0).reshape(world, 3) * scale + rank).requires_grad_()

    def record(name: str, x: torch.Tensor, result: Any) -> None:
        parts = result if isinstance(result, (list, tuple)) else [result]
        sum(((part * (index + 1 + rank)) ** 2).sum() for index, part in enumerate(parts)).backward()
        if name != "reduce" or rank == 1:  # elsewhere nothing is promised
            found[f"{name} value"] = torch.cat([part.reshape(-1) for part in parts]).detach()
        found[f"{name} gradient"] = x.grad

    x = leaf()
    record("all_reduce", x, autograd_collectives.all_reduce(x))
    x = leaf()
    record("all_gather", x, autograd_collectives.all_gather(x * 1.0))
    x = leaf()
    record("broadcast", x, autograd_collectives.broadcast(x, 1))
    x = leaf()
    record("reduce", x, autograd_collectives.reduce(x, 1))
    x = leaf()
    record("reduce_scatter", x, autograd_collectives.reduce_scatter(torch.empty(3), list(x.unbind())))
    x = leaf()
    record("scatter", x, autograd_collectives.scatter(list(x.unbind()), src=1))
    x = leaf()
    record("gather", x, autograd_collectives.gather(x, dst=1))
    x = leaf()
    record("all_to_all_single", x, autograd_collectives.all_to_all_single(torch.empty(world, 3), x))
    x = leaf()
    record("funcol all_gather", x, funcol.all_gather_tensor_autograd(x, 0, group))
    x = leaf()
    record("funcol reduce_scatter", x, funcol.reduce_scatter_tensor_autograd(x, "sum", 0, group))
    x = leaf()
    splits = [1] * world
    record("funcol all_to_all", x, funcol.all_to_all_single_autograd(x, splits, splits, group))
    return found


@pytest.mark.parametrize("world", [2, 3])
def test_gradients_pass_through_collectives(both, world):
    both(world, gradients)


def gradients_gloo_lacks(rank: int, world: int) -> list[torch.Tensor]:
    """all_to_all of lists, which gloo refuses."""
    x = (torch.arange(world * 2.0).reshape(world, 2) + 10 * rank).requires_grad_()
    received = autograd_collectives.all_to_all([torch.empty(2) for _ in range(world)], list(x.unbind()))
    for sender, part in enumerate(received):
        assert part.tolist() == [2.0 * rank + 10 * sender, 2.0 * rank + 1 + 10 * sender]
    sum((part * (rank + 1)).sum() for part in received).backward()
    assert x.grad is not None
    assert x.grad.tolist() == [[receiver + 1.0] * 2 for receiver in range(world)]
    return [x.grad]


def test_gradients_pass_through_all_to_all_of_lists(iroh):
    iroh(3, gradients_gloo_lacks)


# ---- objects ----


def objects(rank: int, world: int) -> dict[str, Any]:
    thing = {"rank": rank, "text": "é" * rank, "tensor": torch.full([rank + 1], float(rank)), "none": None}
    everyone: list[Any] = [None] * world
    dist.all_gather_object(everyone, thing)
    assert [one["rank"] for one in everyone] == list(range(world))
    at_one = [None] * world if rank == 1 else None
    dist.gather_object(thing, at_one, dst=1)
    sent = [thing, "second", 3] if rank == 1 else [None, None, None]
    dist.broadcast_object_list(sent, src=1)
    got: list[Any] = [None]
    dist.scatter_object_list(got, [f"for {one}" for one in range(world)] if rank == 1 else None, src=1)
    round_trip: list[Any] = [None, None]
    if rank == 0:
        dist.send_object_list([thing, list(range(1000))], dst=1)
        dist.recv_object_list(round_trip, src=1)
    elif rank == 1:
        dist.recv_object_list(round_trip, src=0)
        dist.send_object_list(round_trip, dst=0)
    return {"all": everyone, "gathered": at_one or [], "sent": sent, "got": got, "round trip": round_trip}


@pytest.mark.parametrize("world", [2, 3])
def test_objects_travel_as_on_gloo(both, world):
    both(world, objects, tolerance=0)
