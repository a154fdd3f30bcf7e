"""What a compressing hook keeps between steps: checkpoints, other numbers of ranks, momentum."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
import torch.distributed as dist
from families import join
from hooked import digest, make_model, sgd, step_of, wrapped

from torch_iroh import hooks

# ---- checkpoints ----


def train_and_save(
    rank: int, world: int, store: str, hook: str, options: dict[str, Any], ddp: dict[str, Any]
) -> tuple[dict[str, Any], str, str]:
    """The state after 3 of 6 steps, and the parameters of an uninterrupted and of a resumed run."""
    join(rank, world, store)
    model = make_model()
    distributed, state = wrapped(model, hook, options, **ddp)
    saved = io.BytesIO()
    for number in range(6):
        if number == 3:
            torch.save({"model": model.state_dict(), "hook": state.state_dict()}, saved)
        step_of(distributed, sgd(model), rank, number)
    saved.seek(0)
    loaded = torch.load(saved, weights_only=True)
    other = make_model()
    other.load_state_dict(loaded["model"])
    distributed, state = wrapped(other, hook, options, **ddp)
    state.load_state_dict(loaded["hook"])
    assert state.step == 3
    for number in range(3, 6):
        step_of(distributed, sgd(other), rank, number)
    dist.destroy_process_group()
    return loaded["hook"], digest(model), digest(other)


@pytest.mark.parametrize(
    ("world", "hook", "options"),
    [(2, "int8", {"warmup_steps": 1}), (3, "topk_int4", {"momentum": 0.9, "density": 0.05}), (2, "sign", {})],
)
def test_resumed_run_equals_one_that_was_not_interrupted(run, store, world, hook, options):
    ddp = {"find_unused_parameters": True}  # then DDP keeps its first buckets
    for state, uninterrupted, resumed in run(world, train_and_save, world, store, hook, options, ddp):
        assert uninterrupted == resumed
        assert state["residuals"] and bool(state["velocities"]) == ("momentum" in options)


def load(rank: int, world: int, store: str, states: list[dict[str, Any]]) -> Any:
    """Loads, trains a step; what is owed after loading, and the parameters."""
    join(rank, world, store)
    model = make_model()
    distributed, state = wrapped(model, "topk_int8", {"momentum": 0.9})
    state.load_state_dict(states[rank])
    owed = state.state_dict()["residuals"]
    step_of(distributed, sgd(model), rank, 0)
    dist.destroy_process_group()
    return owed, digest(model)


@pytest.mark.parametrize(("world", "other"), [(3, 2), (2, 3)])
def test_merged_states_owe_the_same_with_another_number_of_ranks(run, store, world, other):
    results = run(world, train_and_save, world, store, "topk_int8", {"momentum": 0.9}, {})
    states = [state for state, _, _ in results]
    merged = hooks.State.merge(states[::-1], other)
    for kind in ("residuals", "velocities"):
        for place in states[0][kind]:
            before = sum(state[kind][place].double() for state in states) / world
            after = sum(state[kind][place].double() for state in merged if place in state[kind]) / other
            torch.testing.assert_close(after, before, rtol=1e-6, atol=1e-6)
    loaded = run(other, load, other, store + "-other", merged)
    for (owed, bits), state in zip(loaded, merged, strict=True):
        assert bits == loaded[0][1]
        assert owed.keys() == state["residuals"].keys()
        assert all(torch.equal(owed[place], state["residuals"][place]) for place in owed)


def test_merge_takes_one_state_of_each_rank():
    state = {"version": 1, "step": 1, "rank": 0, "world": 2, "shapes": [], "buckets": {}}
    state |= {"residuals": {}, "velocities": {}}
    with pytest.raises(ValueError, match=r"each rank of 2 ranks, found ranks \[0\]"):
        hooks.State.merge([state], 1)
    with pytest.raises(ValueError, match="rank 1's state has step 2, rank 0's has 1"):
        hooks.State.merge([state, {**state, "rank": 1, "step": 2}], 1)
    with pytest.raises(ValueError, match="world is 1 or more"):
        hooks.State.merge([state], 0)


def refuse_states(rank: int, world: int, store: str) -> list[str]:
    join(rank, world, store)
    model = make_model()
    distributed, state = wrapped(model, "topk", {"momentum": 0.9})
    step_of(distributed, sgd(model), rank, 0)
    saved = state.state_dict()
    shapes = saved["shapes"]
    wrong = [
        (hooks.State(), saved),
        (state, {**saved, "world": 7}),
        (state, {**saved, "rank": 1 - rank}),
        (state, {**saved, "version": 9}),
        (state, {**saved, "shapes": [[3, 3], *shapes[1:]]}),
        (state, {**saved, "shapes": [*shapes, [5]]}),
        (state, {**saved, "shapes": shapes[:-1], "residuals": {}, "velocities": {}}),
        (hooks.State(parameters=model.parameters()), saved),
        (hooks.State(parameters=model.parameters(), error_feedback=False), saved),
    ]
    errors = []
    for other, content in wrong:
        try:
            other.load_state_dict(content)
            errors.append("")
        except ValueError as error:
            errors.append(str(error))
    dist.destroy_process_group()
    return errors


def test_state_that_does_not_fit_is_refused_and_the_bucket_named(run, store):
    errors = run(2, refuse_states, 2, store)[0]
    expected = [
        "State(parameters=model.parameters())",
        "one of 7 ranks, here are 2",
        "what rank 1 owes; this is rank 0",
        "version 9",
        "bucket 0, parameter 0: expected shape [40, 24], found [3, 3]",
        "bucket (none), parameter 8: expected shape none, found [5]",
        "parameter 7: expected shape [40], found none",
        "made without momentum",
        "made without error_feedback",
    ]
    for error, text in zip(errors, expected, strict=True):
        assert text in error, error


# ---- momentum ----

DENSITY, MOMENTUM, COUNT = 0.05, 0.9, 2000


def draw(rank: int, number: int) -> torch.Tensor:
    return torch.randn(COUNT, generator=torch.Generator().manual_seed(100 * rank + number))


class Drawn(torch.nn.Module):
    """Its gradient is the draw of that number."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.rank = rank
        self.values = torch.nn.Parameter(torch.zeros(COUNT))

    def forward(self, number: int) -> torch.Tensor:
        return (self.values * draw(self.rank, number)).sum()


def descend(rank: int, world: int, store: str, steps: int, warmup: int) -> torch.Tensor:
    join(rank, world, store)
    model = Drawn(rank)
    options = {"momentum": MOMENTUM, "density": DENSITY, "warmup_steps": warmup}
    distributed, _ = wrapped(model, "topk", options)
    optimizer = sgd(model, lr=1.0)
    for number in range(steps):
        distributed(number).backward()
        optimizer.step()
        optimizer.zero_grad()
    dist.destroy_process_group()
    return -model.values.detach()


def largest(values: torch.Tensor, density: float) -> torch.Tensor:
    kept = torch.zeros_like(values, dtype=torch.bool)
    kept[values.abs().topk(-int(-density * len(values) // 1)).indices] = True
    return kept


def deep_gradient_compression(steps: int, warmup: int) -> torch.Tensor:
    """Two ranks in float64. Each owns a half: adds its values to what the other sent, and tells the sum's largest."""
    u, v = [torch.zeros(2, COUNT, dtype=torch.float64) for _ in range(2)]
    applied = torch.zeros(COUNT, dtype=torch.float64)
    for number in range(steps):
        u = MOMENTUM * u + torch.stack([draw(rank, number).double() for rank in range(2)])
        if number < warmup:
            applied += u.mean(0)
            continue
        v += u
        for owner in range(2):
            half = slice(owner * COUNT // 2, (owner + 1) * COUNT // 2)
            other = 1 - owner
            sent = largest(v[other, half], DENSITY)
            total = v[owner, half] + v[other, half] * sent
            told = largest(total, 2 * DENSITY)
            applied[half] += total * told / 2
            v[other, half] *= ~sent
            v[owner, half] = total * ~told
            u[owner, half] *= ~told
            u[other, half] *= ~(sent & told)
    return applied


def test_momentum_correction_is_that_of_deep_gradient_compression(run, store):
    steps = 8
    first, second = run(2, descend, 2, store, steps, 3)
    assert torch.equal(first, second)
    torch.testing.assert_close(first.double(), deep_gradient_compression(steps, 3), rtol=1e-4, atol=1e-4)


def test_momentum_without_compression_is_that_of_sgd(run, store):
    (applied,) = run(1, descend, 1, store, 6, 2)
    torch.testing.assert_close(applied.double(), deep_gradient_of_one(6), rtol=1e-5, atol=1e-5)


def deep_gradient_of_one(steps: int) -> torch.Tensor:
    u, applied = torch.zeros(COUNT, dtype=torch.float64), torch.zeros(COUNT, dtype=torch.float64)
    for number in range(steps):
        u = MOMENTUM * u + draw(0, number).double()
        applied += u
    return applied
