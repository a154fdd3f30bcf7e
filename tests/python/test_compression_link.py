"""What compression saves on a slow link: two hosts (shaped.py), 100 Mbit/s each way, 50 ms there and back.

With -s it prints the table of docs/compression.md, 1 Gbit/s and 20 ms included.
"""

from __future__ import annotations

import os
import statistics
import time
from datetime import timedelta
from pathlib import Path

import pytest
import shaped
import torch
import torch.distributed as dist
from ranks import Ranks

import torch_iroh

pytestmark = pytest.mark.timeout(300)

BYTES = 64 << 20


@pytest.fixture(scope="module", autouse=True)
def _namespaces() -> None:
    if why := shaped.obstacle():
        pytest.skip(why)


def measure(rank: int, names: list[str], store: str, codecs: list[str], rounds: int) -> dict[str, list[float]]:
    """Seconds of each all_reduce, by codec."""
    shaped.first_in_line()
    shaped.enter(names[rank])
    os.environ["TORCH_IROH_BIND"] = f"{shaped.address(rank)}:0"
    dist.init_process_group(
        "iroh", store=dist.FileStore(store), rank=rank, world_size=2, timeout=timedelta(seconds=120)
    )
    values = torch.randn(BYTES // 4, generator=torch.Generator().manual_seed(rank))
    dist.all_reduce(values[: 4 << 20].clone())  # connects, and opens the congestion windows
    seconds: dict[str, list[float]] = {codec: [] for codec in codecs}
    for _ in range(rounds):
        for codec in codecs:
            tensor = values.clone()
            with torch_iroh.compression(codec):
                dist.barrier()
                begun = time.monotonic()
                dist.all_reduce(tensor)
                seconds[codec].append(time.monotonic() - begun)
    dist.destroy_process_group()
    return seconds


# The least that each is to be faster than exact. Links as fast as the emulator are measured, not asserted.
LINKS = {
    "100 Mbit/s, 50 ms": (100e6, 0.025, 1, {"int8": 3.5, "int4": 6.5, "topk-int8": 20.0}),
    "1 Gbit/s, 20 ms": (1e9, 0.010, 3, {"int8": 1.0, "int4": 1.0, "topk-int8": 1.0}),
}


@pytest.mark.parametrize("link", LINKS)
def test_codecs_save_time_on_a_slow_link(tmp_path: Path, link: str):
    rate, delay, rounds, least = LINKS[link]
    with shaped.shaped(2, bits_per_second=rate, delay=delay) as names, Ranks(2) as ranks:
        seen = ranks.run(measure, names, str(tmp_path / "store"), ["none", *least], rounds, deadline=120)
    slower = {
        codec: statistics.median(max(pair) for pair in zip(seen[0][codec], seen[1][codec], strict=True))
        for codec in seen[0]
    }
    for codec, seconds in slower.items():
        print(f"{link}: {codec:10} {seconds:.3f} s, {slower['none'] / seconds:.2f} times as fast as exact")
    for codec, ratio in least.items():
        assert slower["none"] / slower[codec] >= ratio, slower
