"""Settings of every test here: stay on loopback, and let no test change what the next one sees."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import scenarios
from ranks import ENVIRONMENT, Ranks

# Also for processes that a test starts without `ranks`.
os.environ.setdefault("TORCH_IROH_BIND", "127.0.0.1:0")
os.environ.setdefault("TORCH_IROH_SHARED_MEMORY", "off")


@pytest.fixture(autouse=True)
def _same_environment() -> Iterator[None]:
    before = dict(os.environ)
    yield
    if dict(os.environ) != before:
        os.environ.clear()
        os.environ.update(before)


@pytest.fixture(params=["iroh", "shared_memory"])
def road(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """How the ranks of this test reach each other: each such test runs on both roads."""
    over: str = request.param
    if over == "shared_memory":
        if request.node.get_closest_marker("over_iroh"):
            pytest.skip("it is about connections, which ranks that share memory have none of")
        monkeypatch.setitem(ENVIRONMENT, "TORCH_IROH_SHARED_MEMORY", "auto")
        monkeypatch.setenv("TORCH_IROH_SHARED_MEMORY", "auto")
    return over


@pytest.fixture(scope="module")
def families() -> Iterator[dict[tuple[int, str], Ranks]]:
    made: dict[tuple[int, str], Ranks] = {}
    yield made
    for family in made.values():
        family.close()


@pytest.fixture
def run(families: dict[tuple[int, str], Ranks]) -> Callable[..., list[Any]]:
    """``run(world, function, *arguments)`` on the processes of that world, which have no group."""

    def call(world: int, function: Callable[..., Any], *arguments: Any, deadline: float = 60) -> list[Any]:
        key = world, ENVIRONMENT["TORCH_IROH_SHARED_MEMORY"]
        if key not in families or not families[key].usable:
            families[key] = Ranks(world)
        try:
            return families[key].run(function, *arguments, deadline=deadline)
        except BaseException:
            families[key].close()
            raise

    return call


@pytest.fixture
def store(tmp_path: Path) -> str:
    return str(tmp_path / "store")


@pytest.fixture(scope="module")
def scenario_families() -> Iterator[dict[int, Ranks]]:
    made: dict[int, Ranks] = {}
    yield made
    for family in made.values():
        family.close()


@pytest.fixture
def run_scenario(scenario_families: dict[int, Ranks], tmp_path: Path) -> Callable[..., None]:
    """``run_scenario(world, scenario, *arguments)``: the scenario on each rank of that world's family, settled.

    With the default group on each of `roads` in turn.
    """

    def call(
        world: int,
        scenario: Callable[..., scenarios.Ledger],
        *arguments: Any,
        roads: Sequence[str] = ("auto",),
        deadline: float = 50.0,
    ) -> None:
        family = scenario_families.get(world)
        if family is None or not family.usable:
            family = scenario_families[world] = Ranks(world)
            family.run(scenarios.join, world, str(tmp_path / "store"))
        try:
            for road in roads if world > 1 else roads[:1]:
                scenarios.settle(family.run(scenarios.on_road, road, scenario, *arguments, deadline=deadline))
        except BaseException:
            family.close()  # its groups may be broken or out of step
            raise

    return call
