"""The same program on gloo and on iroh, in the same processes, with the results side by side.

A scenario is a function at module level, ``scenario(rank, world, *arguments)``, that runs after the default group was
made and returns tensors in dicts and lists. A test calls it through the fixture `both` (see conftest.py):

>>> both(3, scenario)                # doctest: +SKIP  equal to gloo to 1e-6
>>> both(2, scenario, tolerance=0)   # doctest: +SKIP  equal to gloo in every bit
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

TOLERANCE = 1e-6


def play(
    rank: int, world: int, store: str, backend: str, scenario: Callable[..., Any], arguments: tuple[Any, ...]
) -> Any:
    """One backend, one scenario, in a process that has no group before and none after."""
    random.seed(7)
    np.random.seed(7)
    torch.manual_seed(7)
    dist.init_process_group(
        backend,
        store=dist.FileStore(f"{store}.{backend}", world),
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=30),
    )
    try:
        result = scenario(rank, world, *arguments)
        dist.barrier()
        return result
    finally:
        dist.destroy_process_group()


def play_both(
    rank: int, world: int, store: str, scenario: Callable[..., Any], arguments: tuple[Any, ...], tolerance: float
) -> Any:
    """Gloo, then iroh; raises where they differ, returns what iroh gave."""
    theirs = play(rank, world, store, "gloo", scenario, arguments)
    ours = play(rank, world, store, "iroh", scenario, arguments)
    compare(ours, theirs, tolerance=tolerance, what=f"rank {rank}: iroh and gloo")
    return ours


def compare(ours: Any, theirs: Any, *, tolerance: float = TOLERANCE, what: str = "") -> None:
    """Raise AssertionError unless both trees have equal leaves; floating tensors may differ by `tolerance`."""
    mine, other = dict(leaves(ours)), dict(leaves(theirs))
    assert mine.keys() == other.keys(), f"{what}: {mine.keys() ^ other.keys()}"
    assert mine, f"{what}: nothing to compare"
    for place, value in mine.items():
        expected = other[place]
        if not isinstance(value, torch.Tensor):
            assert value == expected, f"{what}, {place}: {value!r} != {expected!r}"
            continue
        allowed = tolerance if value.is_floating_point() else 0.0
        try:
            torch.testing.assert_close(value, expected, rtol=allowed, atol=allowed, equal_nan=True)
        except AssertionError as error:
            raise AssertionError(f"{what}, {place}: {error}") from None


def leaves(tree: Any, place: str = "") -> Iterator[tuple[str, Any]]:
    """Each leaf of dicts, lists, tuples and dataclasses with the way to it; tensors detached and whole."""
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        tree = vars(tree)
    if isinstance(tree, dict):
        for key, value in tree.items():
            yield from leaves(value, f"{place}.{key}")
    elif isinstance(tree, (list, tuple)):
        for index, value in enumerate(tree):
            yield from leaves(value, f"{place}[{index}]")
    else:
        yield place, tree.detach() if isinstance(tree, torch.Tensor) else tree


# ---- what several scenarios train ----


class Block(torch.nn.Module):
    """A residual block of odd width: 3 ranks cannot share it evenly."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(width)
        self.up = torch.nn.Linear(width, hidden)
        self.down = torch.nn.Linear(hidden, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


def make_model(width: int = 13, hidden: int = 29, depth: int = 3) -> torch.nn.Sequential:
    """The same parameters in every process."""
    with torch.random.fork_rng():
        torch.manual_seed(11)
        return torch.nn.Sequential(*(Block(width, hidden) for _ in range(depth)), torch.nn.Linear(width, 5))


def batch(step: int, rank: int, rows: int = 6, width: int = 13) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and labels of one rank at one step."""
    draw = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(rows, width, generator=draw), torch.randint(0, 5, (rows,), generator=draw)


def loss_of(model: torch.nn.Module, inputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy."""
    return torch.nn.functional.cross_entropy(model(inputs), labels)


def train_alone(world: int, steps: int = 3, *, scale: float = 1.0, clip: float | None = None) -> dict[str, Any]:
    """One process that sees the batches of all ranks: losses by step and rank, and the parameters at the end."""
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for step in range(steps):
        each = [loss_of(model, *batch(step, rank)) for rank in range(world)]
        (torch.stack(each).mean() * scale).backward()
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(torch.stack(each).detach())
    return {"losses": losses, "parameters": dict(model.state_dict())}
