"""Processes for feature tests: one family for each world size and module, started when first needed."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from both import TOLERANCE, play, play_both
from ranks import Ranks

_numbers = itertools.count()


class Families:
    """Families of ranks by world size; a family that failed is replaced."""

    def __init__(self, folder: Path) -> None:
        self._made: dict[int, Ranks] = {}
        self._folder = folder

    def store(self) -> str:
        """A path that nobody has used."""
        return str(self._folder / f"store{next(_numbers)}")

    def run(self, world: int, function: Callable[..., Any], *arguments: Any, deadline: float = 60) -> list[Any]:
        """Values by rank."""
        family = self._made.get(world)
        if family is None or not family.usable:
            self._made[world] = family = Ranks(world)
        try:
            return family.run(function, *arguments, deadline=deadline)
        except BaseException:
            family.close()
            raise

    def close(self) -> None:
        """End all processes."""
        for family in self._made.values():
            family.close()


@pytest.fixture(scope="module")
def families(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Families]:
    made = Families(tmp_path_factory.mktemp("stores"))
    yield made
    made.close()


@pytest.fixture
def both(families: Families) -> Callable[..., list[Any]]:
    """``both(world, scenario, *arguments, tolerance=1e-6, deadline=60)``: on gloo and on iroh, compared.

    Gives iroh's results by rank; `deadline` is in seconds, for all of it.
    """

    def call(
        world: int, scenario: Callable[..., Any], *arguments: Any, tolerance: float = TOLERANCE, **options: Any
    ) -> list[Any]:
        return families.run(world, play_both, world, families.store(), scenario, arguments, tolerance, **options)

    return call


@pytest.fixture
def iroh(families: Families) -> Callable[..., list[Any]]:
    """``iroh(world, scenario, *arguments)``: where gloo cannot do it."""

    def call(world: int, scenario: Callable[..., Any], *arguments: Any) -> list[Any]:
        return families.run(world, play, world, families.store(), "iroh", scenario, arguments)

    return call
