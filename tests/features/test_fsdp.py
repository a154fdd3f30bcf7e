"""FSDP1 and FSDP2 over iroh train as on gloo, and as one process that sees the batches of all ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from both import batch, compare, loss_of, make_model, train_alone
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    CPUOffload,
    FullStateDictConfig,
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    ShardingStrategy,
    StateDictType,
    fully_shard,
)

STEPS = 3


# ---- FSDP2 ----


def shard(model: torch.nn.Module, mesh: Any, **options: Any) -> Any:
    for layer in model:
        if any(True for _ in layer.children()):
            fully_shard(layer, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def whole(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.full_tensor() for name, value in model.state_dict().items()}


def train_fsdp2(rank: int, world: int, variant: str) -> dict[str, Any]:
    shape = (2, world // 2) if variant == "hsdp" else (world,)
    names = ("replicate", "shard") if variant == "hsdp" else ("shard",)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    options: dict[str, Any] = {}
    if variant == "keep gathered":
        options["reshard_after_forward"] = False
    if variant == "bf16":
        options["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = shard(make_model(), mesh, **options)
    if variant == "divide factor":  # needs ReduceOp.PREMUL_SUM, which gloo refuses
        for part in model.modules():
            if hasattr(part, "set_gradient_divide_factor"):
                part.set_gradient_divide_factor(2.0 * world)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for step in range(STEPS):
        if variant == "accumulate":
            model.set_requires_gradient_sync(False)
            (loss_of(model, *batch(100 + step, rank)) / 2).backward()
            model.set_requires_gradient_sync(True)
        loss = loss_of(model, *batch(step, rank))
        loss.backward()
        if variant == "clip":
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return {"losses": losses, "parameters": whole(model)}


VARIANTS = ["plain", "keep gathered", "bf16", "accumulate", "clip"]
# One process computes the same in these; in bf16 it rounds elsewhere, and the accumulation has batches of its own.
AS_ONE_PROCESS = {"plain": {}, "keep gathered": {}, "clip": {"clip": 0.1}, "hsdp": {}}


def check_against_one_process(results: list[Any], world: int, **options: Any) -> None:
    alone = train_alone(world, STEPS, **options)
    for rank, result in enumerate(results):
        losses = [each[rank] for each in alone["losses"]]
        compare(result, {**alone, "losses": losses}, what=f"rank {rank} and one process")


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("world", [2, 3])
def test_fsdp2_trains_as_on_gloo_and_as_one_process(both, world, variant):
    results = both(world, train_fsdp2, variant)
    if variant in AS_ONE_PROCESS:
        check_against_one_process(results, world, **AS_ONE_PROCESS[variant])


def test_hsdp_on_a_mesh_of_two_by_two(both):
    check_against_one_process(both(4, train_fsdp2, "hsdp"), 4)


def test_fsdp2_with_a_divide_factor_of_its_own(iroh):
    check_against_one_process(iroh(3, train_fsdp2, "divide factor"), 3, scale=0.5)


# ---- FSDP1 ----


def train_fsdp1(rank: int, world: int, strategy: str, variant: str = "") -> dict[str, Any]:
    hybrid = strategy.endswith("HYBRID_SHARD") or strategy.startswith("_HYBRID")
    options: dict[str, Any] = {"sharding_strategy": ShardingStrategy[strategy]}
    if hybrid:
        options["device_mesh"] = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("replicate", "shard"))
    if variant == "bf16":
        options["mixed_precision"] = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    if variant == "offload":
        options["cpu_offload"] = CPUOffload(offload_params=True)
    options["use_orig_params"] = variant != "flat"
    model = make_model()
    for index, layer in enumerate(model):
        model[index] = FullyShardedDataParallel(layer, device_id=torch.device("cpu"), **options)
    model = FullyShardedDataParallel(model, device_id=torch.device("cpu"), **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for step in range(STEPS):
        if variant == "no_sync":
            with model.no_sync():
                (loss_of(model, *batch(100 + step, rank)) / 2).backward()
        loss = loss_of(model, *batch(step, rank))
        loss.backward()
        if variant == "clip":
            model.clip_grad_norm_(0.1)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    with FullyShardedDataParallel.state_dict_type(model, StateDictType.FULL_STATE_DICT, FullStateDictConfig()):
        parameters = dict(model.state_dict())
    return {"losses": losses, "parameters": parameters}


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"])
@pytest.mark.parametrize("world", [2, 3])
def test_fsdp1_trains_as_on_gloo_and_as_one_process(both, world, strategy):
    check_against_one_process(both(world, train_fsdp1, strategy), world)


@pytest.mark.parametrize("strategy", ["HYBRID_SHARD", "_HYBRID_SHARD_ZERO2"])
def test_fsdp1_hybrid_on_a_mesh_of_two_by_two(both, strategy):
    check_against_one_process(both(4, train_fsdp1, strategy), 4)


@pytest.mark.parametrize("variant", ["flat", "bf16", "no_sync", "clip"])
def test_fsdp1_variants(both, variant):
    both(3, train_fsdp1, "FULL_SHARD", variant)


def sharded_state(rank: int, world: int) -> dict[str, Any]:
    model = FullyShardedDataParallel(make_model(), device_id=torch.device("cpu"), use_orig_params=True)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    loss_of(model, *batch(0, rank)).backward()
    optimizer.step()
    state = FullyShardedDataParallel.full_optim_state_dict(model, optimizer)
    scattered = FullyShardedDataParallel.scatter_full_optim_state_dict(state if rank == 0 else None, model)
    assert scattered["state"]
    return {"state": state["state"]} if rank == 0 else {"none": dist.get_rank()}


def test_fsdp1_optimizer_state_is_gathered_and_scattered(both):
    both(3, sharded_state)
