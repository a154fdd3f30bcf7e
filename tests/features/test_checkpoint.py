"""Distributed checkpoints over iroh: saved, loaded, resharded from 3 ranks to 2, and saved while training goes on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from both import batch, compare, loss_of, make_model
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel


def wrapped(kind: str, world: int) -> tuple[Any, torch.optim.Optimizer]:
    model: Any = make_model()
    if kind == "fsdp2":
        mesh = init_device_mesh("cpu", (world,))
        for layer in (*model, model):
            fully_shard(layer, mesh=mesh)
    elif kind == "fsdp1":
        model = FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=True)
    else:
        model = DistributedDataParallel(model)
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def step(model: Any, optimizer: Any, number: int, rank: int) -> None:
    loss_of(model, *batch(number, rank)).backward()
    optimizer.step()
    optimizer.zero_grad()


def plain(tree: Any) -> Any:
    if isinstance(tree, dict):
        return {key: plain(value) for key, value in tree.items()}
    if isinstance(tree, DTensor):
        return tree.full_tensor().clone()
    return tree.detach().clone() if isinstance(tree, torch.Tensor) else tree


def everything(model: Any, optimizer: Any) -> dict[str, Any]:
    """Parameters and moments, whole, by name."""
    state, moments = get_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True, cpu_offload=False))
    return plain({"model": state, "state": moments["state"]})


def save(rank: int, world: int, kind: str, folder: str, how: str = "now") -> dict[str, Any]:
    model, optimizer = wrapped(kind, world)
    for number in range(2):
        step(model, optimizer, number, rank)
    saved = everything(model, optimizer)
    state, moments = get_state_dict(model, optimizer)
    content = {"model": state, "optimizer": moments, "step": 2}
    place = f"{folder}/{dist.get_backend()}"
    if how == "now":
        dcp.save(content, checkpoint_id=place)
    else:
        kind_of_saver = AsyncCheckpointerType.PROCESS if how == "process" else AsyncCheckpointerType.THREAD
        # Two groups: the saver must not share one with the training that goes on.
        saver_group = dist.new_group()
        future = dcp.async_save(
            content, checkpoint_id=place, process_group=saver_group, async_checkpointer_type=kind_of_saver
        )
        for number in range(2, 5):
            step(model, optimizer, number, rank)  # changes the parameters while they are written
        future.result()
    return saved


def load(rank: int, world: int, kind: str, folder: str) -> dict[str, Any]:
    model, optimizer = wrapped(kind, world)
    state, moments = get_state_dict(model, optimizer)
    content = {"model": state, "optimizer": moments, "step": 0}
    dcp.load(content, checkpoint_id=f"{folder}/{dist.get_backend()}")
    set_state_dict(model, optimizer, model_state_dict=content["model"], optim_state_dict=content["optimizer"])
    assert content["step"] == 2
    return everything(model, optimizer)


def loaded_equals_saved(saved: list[Any], loaded: list[Any]) -> None:
    whole = next(one for one in saved if one["model"])
    for rank, one in enumerate(loaded):
        if one["model"]:
            compare(one, whole, tolerance=0, what=f"loaded on rank {rank} and saved")


@pytest.mark.parametrize("kind", ["ddp", "fsdp1", "fsdp2"])
@pytest.mark.parametrize("worlds", [(3, 3), (3, 2), (2, 3)], ids=lambda worlds: f"{worlds[0]}to{worlds[1]}")
def test_saved_on_some_ranks_loads_on_as_many_or_others(both, kind, worlds, tmp_path):
    saved = both(worlds[0], save, kind, str(tmp_path))
    loaded_equals_saved(saved, both(worlds[1], load, kind, str(tmp_path)))


def test_async_save_writes_what_was_there_when_it_was_called(both, tmp_path):
    saved = both(3, save, "fsdp2", str(tmp_path), "thread")
    loaded_equals_saved(saved, both(2, load, "fsdp2", str(tmp_path)))


def full_state(rank: int, world: int) -> dict[str, Any]:
    """Rank 0 alone has the state and hands it out."""
    model, _ = wrapped("fsdp2", world)
    draw = torch.Generator().manual_seed(23)
    given = {name: torch.randn(value.shape, generator=draw) for name, value in make_model().state_dict().items()}
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, dict(given) if rank == 0 else {}, options=options)  # it changes what it is given
    found = plain(model.state_dict())
    compare(found, given, tolerance=0, what=f"rank {rank}: got and given")
    return found


def test_state_dict_of_rank_0_reaches_all(both):
    both(3, full_state, tolerance=0)


def tensors_of_several_placements(rank: int, world: int, folder: str) -> dict[str, Any]:
    """DTensors written with one placement and read into another."""
    mesh, whole = init_device_mesh("cpu", (world,)), torch.arange(35.0).reshape(7, 5)
    placements = [Shard(0), Shard(1), Replicate()]
    place = f"{folder}/{dist.get_backend()}"
    dcp.save({str(one): distribute_tensor(whole, mesh, [one]) for one in placements}, checkpoint_id=place)
    found = {}
    for source in placements:
        for target in placements:
            into = {str(source): distribute_tensor(torch.zeros(7, 5), mesh, [target])}
            dcp.load(into, checkpoint_id=place)
            found[f"{source} {target}"] = into[str(source)].full_tensor()
            assert torch.equal(found[f"{source} {target}"], whole)
    return found


def test_dtensors_are_read_into_other_placements(both, tmp_path):
    both(3, tensors_of_several_placements, str(tmp_path), tolerance=0)


def failing_save(rank: int, world: int, folder: str) -> list[str]:
    """A checkpoint that one rank cannot write fails on all, and the group works afterwards."""

    class Broken(dcp.FileSystemWriter):
        def write_data(self, *arguments: Any, **options: Any) -> Any:
            if rank == 1:
                raise OSError("no space left")
            return super().write_data(*arguments, **options)

    heard = []
    try:
        dcp.save({"tensor": torch.ones(3)}, storage_writer=Broken(f"{folder}/{dist.get_backend()}"))
    except dcp.api.CheckpointException as error:
        heard = [f"{failed}: {cause[0]}" for failed, cause in error.failures.items()]
    tensor = torch.ones(2)
    dist.all_reduce(tensor)
    assert tensor.tolist() == [world, world]
    return heard


def test_failed_save_is_heard_by_every_rank(both, tmp_path):
    for heard in both(3, failing_save, str(tmp_path)):
        assert heard == ["1: no space left"]


def resumed(rank: int, world: int, folder: str) -> dict[str, Any]:
    """Four steps at once, and two, a checkpoint, and two more: the same parameters."""
    model, optimizer = wrapped("fsdp2", world)
    for number in range(4):
        step(model, optimizer, number, rank)
    straight = everything(model, optimizer)
    save(rank, world, "fsdp2", folder)
    model, optimizer = wrapped("fsdp2", world)
    state, moments = get_state_dict(model, optimizer)
    dcp.load({"model": state, "optimizer": moments}, checkpoint_id=f"{folder}/{dist.get_backend()}")
    set_state_dict(model, optimizer, model_state_dict=state, optim_state_dict=moments)
    for number in range(2, 4):
        step(model, optimizer, number, rank)
    compare(everything(model, optimizer), straight, what=f"rank {rank}: resumed and not interrupted")
    return straight


def test_training_goes_on_from_a_checkpoint_as_if_never_interrupted(both, tmp_path: Path):
    both(3, resumed, str(tmp_path))
