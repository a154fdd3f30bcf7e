"""Pinned plans: what they make a group run, and ranks that have different ones."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks, values_of

import torch_iroh

MIXED = "all_reduce<=1KiB=tree, all_reduce=ring/2KiB, all_gather=bruck, reduce_scatter=butterfly, *=auto"


@contextmanager
def group(rank: int, world: int, store: str, **options: Any) -> Iterator[None]:
    dist.init_process_group(
        "iroh",
        store=dist.FileStore(store, world),
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=30),
        pg_options=torch_iroh.Options(**options),
    )
    try:
        yield
    finally:
        dist.destroy_process_group()


def run_mixed(rank: int, world: int, store: str, count: int) -> dict[str, str]:
    """Values against plain torch; then what the text of a mismatch says that would have run."""
    with group(rank, world, store, plan=MIXED):
        inputs = [torch.arange(count, dtype=torch.float64) * (r + 1) for r in range(world)]
        total = torch.stack(inputs).sum(0)
        mine = inputs[rank].clone()
        dist.all_reduce(mine)
        assert torch.equal(mine, total)
        gathered = torch.empty(world * count, dtype=torch.float64)
        dist.all_gather_into_tensor(gathered, inputs[rank])
        assert torch.equal(gathered, torch.cat(inputs))
        wide = torch.cat([total * (r + 1) for r in range(world)])
        part = torch.empty(count, dtype=torch.float64)
        dist.reduce_scatter_tensor(part, wide)
        assert torch.equal(part, total * (rank + 1) * world)
        root = inputs[2 % world].clone() if rank == 2 % world else torch.empty(count, dtype=torch.float64)
        dist.broadcast(root, 2 % world)
        assert torch.equal(root, inputs[2 % world])
    found = {}
    for name, shape in {"small": 3, "large": 3000}.items():
        with group(rank, world, f"{store}-{name}", plan=MIXED), pytest.raises(dist.DistBackendError) as caught:
            dist.all_reduce(torch.ones(shape + rank))
        found[name] = str(caught.value)
    return found


@pytest.mark.parametrize("count", [1, 13, 4097])
@pytest.mark.parametrize("world", [2, 3, 5])
def test_a_plan_runs_each_collective_by_its_rule(tmp_path: Path, world: int, count: int) -> None:
    for found in values_of(run_ranks(run_mixed, world, world, str(tmp_path / "store"), count)):
        # In the text of the mismatch, or, where who found it had left before this rank came to it, of its own call.
        assert re.search(r"all_reduce( #0)?\(sum, float32\[\d\], tree\)", found["small"]), found
        assert re.search(r"all_reduce( #0)?\(sum, float32\[\d+\], ring\)", found["large"]), found


def join(rank: int, world: int, store: str, plans: list[dict[str, str]]) -> str:
    try:
        with group(rank, world, store, **plans[rank]):
            dist.all_reduce(torch.ones(5))
    except dist.DistBackendError as error:
        return str(error)
    return ""


def test_ranks_with_different_plans_hear_both_before_any_data_moves(tmp_path: Path) -> None:
    plans = [{"plan": "all_reduce=ring"}, {"plan": "all_reduce=tree"}, {"plan": "all_reduce=ring"}]
    found = values_of(run_ranks(join, 3, 3, str(tmp_path / "store"), plans))
    # A rank hears of the first that differs from it.
    for rank, other in ((0, 1), (1, 0), (2, 1)):
        theirs, mine = ("ring", "tree") if rank == 1 else ("tree", "ring")
        assert f"the plan: that of rank {rank} is 'all_reduce={mine}'" in found[rank], found
        assert re.search(rf"that of rank {other} on \S+ is 'all_reduce={theirs}'", found[rank]), found


def test_a_plan_against_none_is_a_mismatch_too(tmp_path: Path) -> None:
    found = values_of(run_ranks(join, 2, 2, str(tmp_path / "store"), [{}, {"algorithm": "ring"}]))
    assert "that of rank 0 is auto, that of rank 1" in found[0] and "is '*=ring'" in found[0], found


def test_plans_that_mean_the_same_agree(tmp_path: Path) -> None:
    plans = [{"plan": "*=ring"}, {"algorithm": "ring"}, {"plan": " * = ring "}]
    assert values_of(run_ranks(join, 3, 3, str(tmp_path / "store"), plans)) == ["", "", ""]
    plans = [{"plan": "*=auto"}, {"algorithm": "auto"}, {}]
    assert values_of(run_ranks(join, 3, 3, str(tmp_path / "store2"), plans)) == ["", "", ""]


def test_plan_and_algorithm_together_are_refused() -> None:
    with pytest.raises(ValueError, match=r"algorithm is 'ring' beside a plan; allowed: one of them"):
        torch_iroh.Options(algorithm="ring", plan="*=ring")


@pytest.mark.parametrize("plan", ["", "all_reduce", "all_reduce=oak", "*=ring, gather=tree", "gather=ring"])
def test_a_wrong_plan_is_a_value_error_that_names_its_rule(plan: str) -> None:
    with pytest.raises(ValueError, match=r"option plan.*(rule \d|empty)"):
        torch_iroh.Options(plan=plan)


def by_environment(rank: int, world: int, store: str, options: dict[str, str]) -> str:
    try:
        with group(rank, world, store, **options):
            dist.all_reduce(torch.ones(5 + rank))
    except (dist.DistBackendError, ValueError) as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("environment", "options", "text"),
    [
        ({"TORCH_IROH_PLAN": "*=tree"}, {}, ", tree)"),
        ({"TORCH_IROH_PLAN": "*=oak"}, {}, "rule 1: 'oak' is no algorithm"),
        ({"TORCH_IROH_PLAN": "*=tree", "TORCH_IROH_ALGORITHM": "ring"}, {}, "TORCH_IROH_ALGORITHM is set beside"),
        ({"TORCH_IROH_PLAN": "*=tree"}, {"algorithm": "ring"}, ", ring)"),
        ({"TORCH_IROH_ALGORITHM": "ring"}, {"plan": "*=tree"}, ", tree)"),
    ],
)
def test_the_variable_is_the_option(tmp_path: Path, environment: dict[str, str], options: dict, text: str) -> None:
    outcomes = run_ranks(by_environment, 2, 2, str(tmp_path / "store"), options, environment=environment)
    for found in values_of(outcomes):
        assert text in found, found


def works_in_memory(rank: int, world: int, store: str, plan: str) -> bool:
    with group(rank, world, store, plan=plan):
        dist.all_reduce(torch.ones(5))
        peers = torch_iroh.stats().peers
        assert {peer.path for peer in peers} == {"shared memory"}
        return all(peer.bytes_sent == 0 for peer in peers)  # nobody sends


@pytest.mark.parametrize(("plan", "shared"), [("*=auto", True), ("all_reduce=auto, *=ring", False)])
def test_ranks_of_one_host_send_messages_where_a_plan_fixes_something(tmp_path: Path, plan: str, shared: bool) -> None:
    environment = {"TORCH_IROH_SHARED_MEMORY": "auto"}
    found = values_of(run_ranks(works_in_memory, 2, 2, str(tmp_path / "store"), plan, environment=environment))
    assert found == [shared] * 2
