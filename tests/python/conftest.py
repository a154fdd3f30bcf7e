"""Settings of every test here: stay on loopback, and let no test change what the next one sees."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

# Also for processes that a test starts without `ranks`.
os.environ.setdefault("TORCH_IROH_BIND", "127.0.0.1:0")


@pytest.fixture(autouse=True)
def _same_environment() -> Iterator[None]:
    before = dict(os.environ)
    yield
    if dict(os.environ) != before:
        os.environ.clear()
        os.environ.update(before)
