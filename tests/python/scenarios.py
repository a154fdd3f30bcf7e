"""Scenarios of collectives: groups on every road in a rank's process, and what became of a scenario there.

A scenario checks this rank's results against its own reference and notes a digest of what all ranks must share; the
test compares those (conftest.py, ``run_scenario``).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from references import FEW_SIZES, SEED, SIZES, SMALL_CHUNK, TIMEOUT, bits, first_wrong, wide


class Ledger:
    """What one rank found: digests of results that all ranks share, complaints, and the number of checks."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.digests: dict[str, str] = {}
        self.complaints: list[str] = []
        self.checks = 0

    def same(self, label: str, tensor: torch.Tensor) -> None:
        """All ranks that note this label must have these bits."""
        self.digests[label] = hashlib.sha256(bits(tensor).tobytes()).hexdigest()

    def near(self, label: str, got: torch.Tensor, want: np.ndarray, bound: np.ndarray | float) -> None:
        self._note(label, wide(got), want, bound)

    def equal(self, label: str, got: torch.Tensor, want: torch.Tensor) -> None:
        """Bit by bit; the index is that of the element."""
        self.checks += 1
        found, expected = bits(got), bits(want)
        if np.array_equal(found, expected):
            return
        if len(found) != len(expected):
            self.complain(label, f"{got.numel()} elements, expected {want.numel()}")
            return
        index = int(np.argmax(found != expected)) // got.element_size()
        self.complain(label, f"first wrong index {index}: {got.reshape(-1)[index]} != {want.reshape(-1)[index]}")

    def true(self, label: str, fact: bool, text: str) -> None:
        self.checks += 1
        if not fact:
            self.complain(label, text)

    def complain(self, label: str, text: str) -> None:
        self.complaints.append(f"seed {SEED}, rank {self.rank}, {label}: {text}")

    def _note(self, label: str, got: np.ndarray, want: np.ndarray, bound: np.ndarray | float) -> None:
        self.checks += 1
        index = first_wrong(got, want, bound)
        if index is None:
            return
        if index < 0:
            self.complain(label, f"shape {got.shape}, expected {want.shape}")
            return
        allowed = np.broadcast_to(bound, got.shape)[index]
        self.complain(label, f"first wrong index {index}: {got[index]!r}, expected {want[index]!r} within {allowed!r}")


def settle(ledgers: Sequence[Ledger]) -> None:
    """No rank complains, and all ranks have equal bits."""
    complaints = [text for ledger in ledgers for text in ledger.complaints]
    assert not complaints, f"{len(complaints)} complaints\n" + "\n".join(complaints[:20])
    assert all(ledger.checks for ledger in ledgers), "a rank checked nothing"
    by_label: dict[str, set[str]] = {}
    for ledger in ledgers:
        for label, digest in ledger.digests.items():
            by_label.setdefault(label, set()).add(digest)
    torn = [label for label, digests in by_label.items() if len(digests) > 1]
    assert not torn, f"seed {SEED}: ranks end with different bits: {torn[:20]}"


road_groups: dict[str, Any] = {}  # in a rank's process


def join(rank: int, world: int, store: str) -> None:
    import torch_iroh

    dist.init_process_group("iroh", store=dist.FileStore(store, world), rank=rank, world_size=world, timeout=TIMEOUT)
    road_groups["auto"] = dist.group.WORLD  # over iroh: see ranks.ENVIRONMENT
    for road, shared_memory in (("shared", "auto"), ("single_copy", "single_copy")):
        options = torch_iroh.Options(shared_memory=shared_memory)
        road_groups[road] = dist.new_group(backend="iroh", pg_options=options, timeout=TIMEOUT)
    for algorithm in ("ring", "direct"):
        options = torch_iroh.Options(algorithm=algorithm)
        road_groups[algorithm] = dist.new_group(backend="iroh", pg_options=options, timeout=TIMEOUT)
        options = torch_iroh.Options(algorithm=algorithm, chunk_bytes=SMALL_CHUNK)
        road_groups[f"{algorithm}, small chunks"] = dist.new_group(backend="iroh", pg_options=options, timeout=TIMEOUT)


def on_road(rank: int, road: str, scenario: Callable[..., Ledger], *arguments: Any) -> Ledger:
    """The scenario with another group in the place of the default one."""
    before = dist.group.WORLD
    dist.distributed_c10d._update_default_pg(road_groups[road])
    try:
        return scenario(rank, *arguments)
    finally:
        dist.distributed_c10d._update_default_pg(before)


def matrix_sizes(world: int, dtype: str) -> list[int]:
    """All sizes for some types of each width; the largest world and the others make do with fewer."""
    return SIZES if world < 7 and dtype in ("bool", "int16", "bfloat16", "float32", "complex128") else FEW_SIZES
