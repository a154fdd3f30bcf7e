"""One fixture per topology. Each gives an open laboratory, whose hosts are `lab["name"]`, and closes it.

Hosts here are routed for real, so what other folders set to stay on loopback does not hold.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from torch_iroh.lab import Lab, obstacle


@pytest.fixture(autouse=True)
def _beyond_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCH_IROH_BIND", raising=False)


@pytest.fixture
def make_lab() -> Iterator[Callable[..., Lab]]:
    """``make_lab(delay=..., ...)``: an empty laboratory, closed at the end of the test."""
    missing = obstacle()
    if missing:
        pytest.skip(missing)
    with ExitStack() as stack:
        yield lambda **settings: stack.enter_context(Lab(**settings))


@pytest.fixture
def two_homes(make_lab: Callable[..., Lab]) -> Lab:
    """`anna` and `bert` behind port-restricted NATs, `pub` public, 30 ms between any two (there and back)."""
    lab = make_lab(delay=15)
    for name in ("anna", "bert"):
        lab.host(name, nat="port")
    lab.host("pub")
    return lab


@pytest.fixture
def nat_pair(make_lab: Callable[..., Lab]) -> Callable[[str, str], Lab]:
    """``nat_pair("port", "symmetric")``: `anna` and `bert` behind these NATs, `pub` and `pub2` public."""

    def make(first: str, second: str) -> Lab:
        lab = make_lab(delay=1)
        lab.host("anna", nat=first)
        lab.host("bert", nat=second)
        lab.host("pub")
        lab.host("pub2")
        return lab

    return make


@pytest.fixture
def routable_pair(make_lab: Callable[..., Lab]) -> Callable[..., Lab]:
    """``routable_pair(rate=100, delay=25, loss=0.1)``: public hosts `one` and `two`, equal lines in both directions."""

    def make(*, rate: float = 0.0, queue: float = 50.0, ipv6: bool = False, **settings: Any) -> Lab:
        lab = make_lab(**settings)
        for name in ("one", "two"):
            lab.host(name, up=rate, down=rate, queue=queue, ipv6=ipv6)
        return lab

    return make


@pytest.fixture
def four_homes(make_lab: Callable[..., Lab]) -> Lab:
    """`home0` to `home3` behind port-restricted NATs, 20 Mbit/s up and 100 down, and `pub` public."""
    lab = make_lab(delay=15)
    for number in range(4):
        lab.host(f"home{number}", nat="port", up=20, down=100)
    lab.host("pub")
    return lab
