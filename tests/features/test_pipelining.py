"""Pipelining over iroh: every schedule gives the loss and the gradients of one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from both import batch, compare, make_model
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleLoopedBFS,
    SplitPoint,
    pipeline,
)

MICRO = 4  # micro-batches
ROWS = 8
cross_entropy = torch.nn.functional.cross_entropy

SCHEDULES: dict[str, Any] = {
    "GPipe": ScheduleGPipe,
    "1F1B": Schedule1F1B,
    "interleaved 1F1B": ScheduleInterleaved1F1B,
    "looped BFS": ScheduleLoopedBFS,
    "zero bubble": ScheduleInterleavedZeroBubble,
}
SEVERAL_STAGES = {"interleaved 1F1B", "looped BFS", "zero bubble"}


def stages_of(world: int, kind: str) -> int:
    return 2 * world if kind in SEVERAL_STAGES else world


def cut(count: int) -> list[torch.nn.Sequential]:
    """The model in `count` parts; the last has the head."""
    model = make_model(depth=2 * count - 1)
    return [torch.nn.Sequential(model[2 * index], model[2 * index + 1]) for index in range(count)]


def alone(count: int) -> dict[str, Any]:
    model = torch.nn.Sequential(*cut(count))
    inputs, labels = batch(0, 0, rows=ROWS)
    losses = []
    for some, wanted in zip(inputs.chunk(MICRO), labels.chunk(MICRO), strict=True):
        loss = cross_entropy(model(some), wanted)
        (loss / MICRO).backward()
        losses.append(loss.detach())
    return {
        "losses": losses,
        "gradients": [{name: one.grad for name, one in part.named_parameters()} for part in model],
    }


def run_pipeline(rank: int, world: int, kind: str) -> dict[str, Any]:
    parts, device = cut(stages_of(world, kind)), torch.device("cpu")
    mine = list(range(rank, len(parts), world))
    stages = [PipelineStage(parts[index], index, len(parts), device) for index in mine]
    schedule = SCHEDULES[kind](stages if kind in SEVERAL_STAGES else stages[0], MICRO, loss_fn=cross_entropy)
    inputs, labels = batch(0, 0, rows=ROWS)
    losses: list[torch.Tensor] = []
    last = len(parts) - 1 in mine
    schedule.step(*([inputs] if 0 in mine else []), **({"target": labels, "losses": losses} if last else {}))
    gradients = {index: {name: one.grad for name, one in parts[index].named_parameters()} for index in mine}
    return {"losses": [one.detach() for one in losses], "gradients": gradients}


def check(results: list[Any], expected: dict[str, Any]) -> None:
    for rank, result in enumerate(results):
        if result["losses"]:
            compare(result["losses"], expected["losses"], what=f"rank {rank} and one process")
        for index, gradients in result["gradients"].items():
            compare(gradients, expected["gradients"][index], what=f"rank {rank}, stage {index} and one process")
    assert sum(bool(result["losses"]) for result in results) == 1


@pytest.mark.parametrize("kind", SCHEDULES)
@pytest.mark.parametrize("world", [2, 3])
def test_schedule_has_the_gradients_of_one_process(both, world, kind):
    if kind in ("interleaved 1F1B", "zero bubble") and MICRO % world:
        pytest.skip("torch: as many micro-batches as ranks, or a multiple")
    check(both(world, run_pipeline, kind), alone(stages_of(world, kind)))


def run_traced(rank: int, world: int) -> dict[str, Any]:
    """The model cut by torch.export at a split point, instead of by hand."""
    model = torch.nn.Sequential(*cut(world))
    inputs, labels = batch(0, 0, rows=ROWS)
    split = {str(index): SplitPoint.BEGINNING for index in range(1, world)}
    pipe = pipeline(model, mb_args=(inputs.chunk(MICRO)[0],), split_spec=split)
    stage = pipe.build_stage(rank, torch.device("cpu"))
    losses: list[torch.Tensor] = []
    schedule = ScheduleGPipe(stage, MICRO, loss_fn=cross_entropy)
    last = rank == world - 1
    schedule.step(*([inputs] if rank == 0 else []), **({"target": labels, "losses": losses} if last else {}))
    gradients = {name: one.grad for name, one in stage.submod.named_parameters()}
    return {"losses": [one.detach() for one in losses], "gradients": list(gradients.values())}


def test_model_cut_by_tracing(both):
    results, expected = both(2, run_traced), alone(2)
    compare(results[1]["losses"], expected["losses"], what="last stage and one process")
    for rank, result in enumerate(results):
        compare(result["gradients"], list(expected["gradients"][rank].values()), what=f"stage {rank} and one process")
