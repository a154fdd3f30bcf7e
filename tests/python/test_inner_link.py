"""A backend of torch inside hosts whose link is slow: nothing is lost by it, and the link carries two participants.

    python -m pytest -s tests/python/test_inner_link.py        prints medians and bytes, with and without

The hosts are namespaces with a link of 100 Mbit/s and 5 ms each way (shaped.py), two ranks on each; what the link
carried is read from its device.
"""

from __future__ import annotations

import statistics
import time
from datetime import timedelta
from pathlib import Path

import pytest
import shaped
import torch
import torch.distributed as dist
from ranks import Ranks
from test_levels import enter, uplink_bytes

import torch_iroh

pytestmark = pytest.mark.timeout(300)

HOST_OF = [0, 0, 1, 1]
SIZES = [4 << 10, 1 << 20, 8 << 20]
ROUNDS = 5
Found = dict[tuple[int, str], tuple[list[float], list[int]]]


def measure(rank: int, names: list[str], store: str) -> Found:
    """By bytes and inner backend: seconds of each all_reduce, and bytes that this rank's host sent meanwhile."""
    enter(HOST_OF[rank], names)
    name = names[HOST_OF[rank]]
    limit = timedelta(seconds=60)
    dist.init_process_group("iroh", store=dist.FileStore(store), rank=rank, world_size=4, timeout=limit)
    groups = {one: dist.new_group(pg_options=torch_iroh.Options(inner=one), timeout=limit) for one in ("none", "gloo")}
    found: Found = {}
    for size in SIZES:
        tensor = torch.zeros(size // 4)
        for group in groups.values():
            dist.all_reduce(tensor, group=group)  # connects, and opens the congestion windows
        for _ in range(ROUNDS):
            for inner, group in groups.items():
                dist.barrier()
                time.sleep(0.1)
                before, begun = uplink_bytes(name), time.monotonic()
                dist.all_reduce(tensor, group=group)
                seconds = time.monotonic() - begun
                dist.barrier()
                time.sleep(0.1)
                times, sent = found.setdefault((size, inner), ([], []))
                times.append(seconds)
                sent.append(uplink_bytes(name) - before)
    dist.destroy_process_group()
    return found


def test_a_slow_link_carries_two_participants(tmp_path: Path):
    if why := shaped.obstacle():
        pytest.skip(why)
    with shaped.shaped(2, bits_per_second=100e6, delay=0.005) as names, Ranks(4) as ranks:
        found = ranks.run(measure, names, str(tmp_path / "store"), deadline=200)
    for size, inner in found[0]:
        slowest = [max(one[size, inner][0][turn] for one in found) for turn in range(ROUNDS)]
        sent = statistics.median(found[0][size, inner][1])
        print(f"{size >> 10} KiB, inner {inner}: {statistics.median(slowest) * 1e3:.1f} ms, uplink {sent:.0f} bytes")
        if size >= 1 << 20:  # each host sends the whole once; headers are 5 %
            assert sent < 1.1 * size
