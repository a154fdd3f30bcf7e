"""Ranks on several hosts: the hosts are found, and between them each byte goes once for a host, not once for a rank.

The hosts are namespaces with a slow link (shaped.py); what the link carried is read from its device.
"""

from __future__ import annotations

import os
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

MEBI = 1 << 20
BYTES = 8 * MEBI
BITS_PER_SECOND = 100e6


def enter(host: int, names: list[str]) -> None:
    shaped.first_in_line()
    shaped.enter(names[host])
    os.environ["TORCH_IROH_BIND"] = f"{shaped.address(host)}:0"


def uplink_bytes(name: str) -> int:
    # Inside the namespace /sys may still be that of the outer one.
    for line in Path("/proc/thread-self/net/dev").read_text().splitlines():
        device, _, fields = line.partition(":")
        if device.strip() == f"{name}t":
            return int(fields.split()[8])
    raise AssertionError(f"no device {name}t")


def measure(
    rank: int, names: list[str], host_of: list[int], store: str, algorithms: list[str], memory: str
) -> tuple[dict[str, tuple[float, int, bool]], dict[int, str]]:
    """By algorithm: seconds of one all_reduce, bytes that this rank's host sent meanwhile, and is the sum exact.

    And by which path each peer was reached that data went to.
    """
    world = len(host_of)
    name = names[host_of[rank]]
    enter(host_of[rank], names)
    os.environ["TORCH_IROH_SHARED_MEMORY"] = memory
    dist.init_process_group(
        "iroh", store=dist.FileStore(store), rank=rank, world_size=world, timeout=timedelta(seconds=60)
    )
    found = {}
    paths: dict[int, str] = {}
    for algorithm in algorithms:
        group = dist.new_group(pg_options=torch_iroh.Options(algorithm=algorithm), timeout=timedelta(seconds=60))
        tensor = torch.ones(BYTES // 4)
        dist.all_reduce(tensor, group=group)  # connects, and opens the congestion windows
        tensor.fill_(rank + 1)
        dist.barrier()
        time.sleep(0.3)
        before, begun = uplink_bytes(name), time.monotonic()
        dist.all_reduce(tensor, group=group)
        dist.barrier()
        seconds = time.monotonic() - begun
        time.sleep(0.3)
        exact = bool(torch.all(tensor == world * (world + 1) // 2))
        paths |= {peer.rank: peer.path for peer in torch_iroh.stats(group).peers if peer.bytes_sent > 0}
        found[algorithm] = seconds, uplink_bytes(name) - before, exact
    dist.destroy_process_group()
    return found, paths


@pytest.fixture(scope="module", autouse=True)
def _namespaces() -> None:
    if why := shaped.obstacle():
        pytest.skip(why)


@pytest.mark.parametrize("memory", ["off", "auto"])
@pytest.mark.parametrize(
    ("host_of", "ring_is_slower"), [([0, 0, 1, 1], 1.2), ([0, 1, 0, 1], 1.8)], ids=["contiguous", "interleaved"]
)
def test_a_slow_link_carries_two_participants_not_four(
    tmp_path: Path, host_of: list[int], ring_is_slower: float, memory: str
):
    with shaped.shaped(2, bits_per_second=BITS_PER_SECOND, delay=0.005) as names, Ranks(4) as ranks:
        outcomes = ranks.run(measure, names, host_of, str(tmp_path / "store"), ["auto", "ring"], memory, deadline=120)
    found = [one for one, _ in outcomes]
    assert all(exact for one in found for _, _, exact in one.values())
    seconds = {name: max(one[name][0] for one in found) for name in found[0]}
    print(f"{seconds}, bytes {[one['auto'][1] for one in found]} with levels, {[one['ring'][1] for one in found]} ring")
    for one in found:
        # Of two participants each sends the whole once: half of it to be added, half of the sum. Headers are 5 %.
        assert one["auto"][1] < 1.1 * BYTES, one
        assert one["ring"][1] > 1.4 * BYTES, one
    assert seconds["ring"] > ring_is_slower * seconds["auto"], seconds
    for rank, (_, paths) in enumerate(outcomes):
        for peer, path in paths.items():
            shares = memory == "auto" and host_of[peer] == host_of[rank]
            assert (path == "shared memory") == shares, (rank, peer, path)


def disagree_on_site(rank: int, store: str) -> str:
    try:
        dist.init_process_group(
            "iroh",
            store=dist.FileStore(store),
            rank=rank,
            world_size=2,
            timeout=timedelta(seconds=20),
            pg_options=torch_iroh.Options(site=f"home {rank}"),
        )
    except dist.DistBackendError as error:
        return str(error)
    return ""


def test_ranks_of_one_host_that_name_two_sites_hear_both(tmp_path: Path):
    with Ranks(2) as ranks:
        for text in ranks.run(disagree_on_site, str(tmp_path / "store")):
            assert "ranks 0 and 1 are on one host" in text
            assert "'home 0' and 'home 1'" in text
