"""DTensor over iroh: every redistribution gives exactly what one process has; tensor parallel equals one process."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from both import batch, compare, loss_of, make_model
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Replicate,
    Shard,
    distribute_module,
    distribute_tensor,
)
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

# Small whole numbers: every sum is exact, so any order of adding gives the same bits.
SHAPES = [(7, 5), (3, 4), (1, 6), (2, 0), (9, 3)]


def values(shape: tuple[int, ...], seed: int = 0) -> torch.Tensor:
    return torch.randint(-64, 64, shape, generator=torch.Generator().manual_seed(seed)).float()


def placements_of(dimensions: int, sources: bool) -> list[Any]:
    every: list[Any] = [Replicate(), *(Shard(dimension) for dimension in range(dimensions))]
    return [*every, Partial("sum"), Partial("max"), Partial("min"), Partial("avg")] if sources else every


def scattered(shape: tuple[int, ...], placement: list[Any], mesh: DeviceMesh) -> tuple[DTensor, torch.Tensor]:
    """A DTensor with these placements, and the whole tensor that it stands for."""
    if not any(one.is_partial() for one in placement):
        whole = values(shape)
        return distribute_tensor(whole, mesh, placement), whole
    # Each part along the partial dimensions of the mesh has values of its own.
    coordinate = mesh.get_coordinate()
    assert coordinate is not None

    def part(at: tuple[int, ...]) -> torch.Tensor:
        return values(shape, seed=1 + sum(index * 10**place for place, index in enumerate(at)))

    def reduced(at: tuple[int, ...], dimension: int) -> torch.Tensor:
        if dimension == mesh.ndim:
            return part(at)
        if not placement[dimension].is_partial():
            return reduced((*at, 0), dimension + 1)
        parts = torch.stack([reduced((*at, index), dimension + 1) for index in range(mesh.size(dimension))])
        kind = placement[dimension].reduce_op
        if kind == "max":
            return parts.amax(0)
        if kind == "min":
            return parts.amin(0)
        return parts.sum(0) / (mesh.size(dimension) if kind == "avg" else 1)

    mine = tuple(index if one.is_partial() else 0 for index, one in zip(coordinate, placement, strict=True))
    local = part(mine)
    for dimension, one in enumerate(placement):
        if one.is_shard():
            pieces = local.tensor_split(mesh.size(dimension), one.dim)
            assert local.shape[one.dim] % mesh.size(dimension) == 0
            local = pieces[coordinate[dimension]]
    made = DTensor.from_local(local.contiguous(), mesh, placement, run_check=False)
    return made, reduced((), 0)


def redistribute_all(rank: int, world: int, shape: tuple[int, ...]) -> list[torch.Tensor]:
    """One-dimensional mesh: from every placement to every other, and back to the whole."""
    mesh, got, wrong = init_device_mesh("cpu", (world,)), [], []
    for source, target in itertools.product(placements_of(len(shape), True), placements_of(len(shape), False)):
        tensor, whole = scattered(shape, [source], mesh)
        moved = tensor.redistribute(mesh, [target])
        expected = distribute_tensor(whole, mesh, [target], src_data_rank=None).to_local()
        mean = isinstance(source, Partial) and source.reduce_op == "avg"  # divides: the last bit may differ
        tolerance = 1e-6 if mean else 0.0
        if not torch.allclose(moved.to_local(), expected, rtol=tolerance, atol=tolerance):
            wrong.append((source, target, "local"))
        if not torch.allclose(moved.full_tensor(), whole, rtol=tolerance, atol=tolerance):
            wrong.append((source, target, "full"))
        got.append(moved.to_local())
    assert not wrong, f"rank {rank}, shape {shape}: {wrong}"
    return got


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_redistribute_from_every_placement_to_every_other(both, world, shape):
    both(world, redistribute_all, shape)


def redistribute_2d(rank: int, world: int) -> dict[str, torch.Tensor]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    got, wrong = {}, []
    options: list[Any] = [Replicate(), Shard(0), Shard(1)]
    sources = [*itertools.product([*options, Partial()], repeat=2)]
    for source, target in itertools.product(sources, itertools.product(options, repeat=2)):
        tensor, whole = scattered((8, 4), list(source), mesh)
        moved = tensor.redistribute(mesh, list(target))
        if not torch.equal(moved.full_tensor(), whole):
            wrong.append((source, target))
        got[f"{source} {target}"] = moved.to_local()
    assert not wrong, f"rank {rank}: {wrong}"
    return got


def test_redistribute_on_a_mesh_of_two_by_two(both):
    both(4, redistribute_2d, tolerance=0)


def operations(rank: int, world: int) -> dict[str, torch.Tensor]:
    mesh = init_device_mesh("cpu", (world,))
    left, right = values((7, 5), 1), values((5, 6), 2)
    found = {}
    for a, b in itertools.product(placements_of(2, False), repeat=2):
        product = distribute_tensor(left, mesh, [a]) @ distribute_tensor(right, mesh, [b])
        found[f"matmul {a} {b}"] = product.full_tensor()
        assert torch.equal(product.full_tensor(), left @ right), (a, b)
    for placement in placements_of(2, False):
        tensor = distribute_tensor(left, mesh, [placement])
        for name in ("sum", "mean", "amax", "norm"):
            reduced = getattr(tensor, name)()
            found[f"{name} {placement}"] = reduced.full_tensor() if isinstance(reduced, DTensor) else reduced
            torch.testing.assert_close(found[f"{name} {placement}"], getattr(left, name)(), rtol=1e-6, atol=1e-6)
        found[f"softmax {placement}"] = tensor.softmax(1).full_tensor()
        found[f"transpose {placement}"] = tensor.t().full_tensor()
        found[f"cat {placement}"] = torch.cat([tensor, tensor]).full_tensor()
    return found


def test_operations_on_dtensors_equal_those_on_whole_tensors(both):
    both(3, operations)


def backward(rank: int, world: int) -> dict[str, torch.Tensor]:
    mesh = init_device_mesh("cpu", (world,))
    found = {}
    for source, target in itertools.product(placements_of(2, False), repeat=2):
        tensor = distribute_tensor(values((7, 5)), mesh, [source]).requires_grad_()
        (tensor.redistribute(mesh, [target]) * distribute_tensor(values((7, 5), 9), mesh, [target])).sum().backward()
        assert isinstance(tensor.grad, DTensor)
        found[f"{source} {target}"] = tensor.grad.full_tensor()
        assert torch.equal(found[f"{source} {target}"], values((7, 5), 9)), (source, target)
    return found


def test_gradients_go_back_through_redistribute(both):
    both(3, backward, tolerance=0)


def module_of_dtensors(rank: int, world: int) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (world,))
    torch.manual_seed(rank)  # rank 0's parameters are those that count
    model = distribute_module(torch.nn.Linear(5, 7), mesh)
    same = [torch.zeros(7, 5) for _ in range(world)]
    dist.all_gather(same, model.weight.to_local().detach())
    assert all(torch.equal(same[0], one) for one in same)
    return {"weight": model.weight.full_tensor()}


def test_distribute_module_takes_rank_0s_parameters(both):
    both(3, module_of_dtensors, tolerance=0)


# ---- tensor parallel ----


def plan(kind: str, layers: int) -> dict[str, Any]:
    if kind == "sequence":
        each = {
            "norm": SequenceParallel(sequence_dim=0),
            "up": ColwiseParallel(input_layouts=Shard(0)),
            "down": RowwiseParallel(output_layouts=Shard(0)),
        }
    else:
        each = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    return {f"{index}.{name}": style for index in range(layers) for name, style in each.items()}


def train_tensor_parallel(rank: int, world: int, kind: str) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (world,))
    model = make_model(width=12, hidden=24, depth=2)
    styles = plan(kind, 2)
    if kind == "sequence":
        styles["0"] = PrepareModuleInput(
            input_layouts=(Replicate(),), desired_input_layouts=(Shard(0),), use_local_output=True
        )
        styles["2"] = ColwiseParallel(input_layouts=Shard(0), output_layouts=Replicate())
    if kind == "loss":
        styles["2"] = ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)
    parallelize_module(model, mesh, styles)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for step in range(3):
        inputs, labels = batch(step, 0, width=12)  # the same on every rank
        if kind == "loss":
            with loss_parallel():
                loss = loss_of(model, inputs, labels)
                loss.backward()
        else:
            loss = loss_of(model, inputs, labels)
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.full_tensor() if isinstance(loss, DTensor) else loss.detach())
    state = {name: one.full_tensor() if isinstance(one, DTensor) else one for name, one in model.state_dict().items()}
    return {"losses": losses, "parameters": state}


def train_alone_of_width_12(world: int = 1) -> dict[str, Any]:
    model = make_model(width=12, hidden=24, depth=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for step in range(3):
        each = [loss_of(model, *batch(step, rank, width=12)) for rank in range(world)]
        torch.stack(each).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(torch.stack(each).mean().detach())
    return {"losses": losses, "parameters": dict(model.state_dict())}


@pytest.mark.parametrize("kind", ["plain", "sequence", "loss"])
@pytest.mark.parametrize("world", [2, 3])
def test_tensor_parallel_trains_as_on_gloo_and_as_one_process(both, world, kind):
    alone = train_alone_of_width_12()
    for rank, result in enumerate(both(world, train_tensor_parallel, kind)):
        compare(result, alone, what=f"rank {rank} and one process")


def train_2d(rank: int, world: int) -> dict[str, Any]:
    """Tensor parallel inside, FSDP2 outside."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    model = make_model(width=12, hidden=24, depth=2)
    parallelize_module(model, mesh["tensor"], plan("plain", 2))
    for layer in (model[0], model[1], model):
        fully_shard(layer, mesh=mesh["data"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for step in range(3):
        loss = loss_of(model, *batch(step, mesh["data"].get_local_rank(), width=12))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach() / 2
        dist.all_reduce(mean, group=mesh["data"].get_group())
        losses.append(mean)
    return {"losses": losses, "parameters": {name: one.full_tensor() for name, one in model.state_dict().items()}}


def test_tensor_parallel_inside_fsdp2(both):
    alone = train_alone_of_width_12(world=2)
    for rank, result in enumerate(both(4, train_2d)):
        compare(result, alone, what=f"rank {rank} and one process")
