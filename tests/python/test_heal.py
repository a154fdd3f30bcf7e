"""Links that heal: the direct path between two hosts dies while a relay lives, then everything is cut for a while.

The hosts are namespaces (shaped.py), a third is the relay's. A host is cut off from another by a route into a device
that swallows packets without a word, as a dead path does.
"""

from __future__ import annotations

import os
import subprocess
import time
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import pytest
import shaped
import torch
import torch.distributed as dist
from ranks import Ranks, values_of
from relay_support import Relay

import torch_iroh

pytestmark = [pytest.mark.timeout(180), pytest.mark.over_iroh]

ELEMENTS = 1 << 18
# Seconds that a dead path may cost where the relay lives. On a machine of its own it is less than two;
# here others may use both cores. Without the standby iroh takes 15.
STALL = 4.0
PEER_TIMEOUT = 20.0
RELAY_HOST = 2


@dataclass
class Operation:
    began: float
    ended: float
    path: str


def work(rank: int, names: list[str], relay: str, store: str, until: float) -> tuple[list[Operation], int]:
    """All_reduces until then; each with the path that the link had after it, and how many were wrong."""
    shaped.enter(names[rank])
    os.environ["TORCH_IROH_BIND"] = f"{shaped.address(rank)}:0"
    os.environ["TORCH_IROH_RELAY"] = relay
    os.environ["TORCH_IROH_PEER_TIMEOUT"] = str(PEER_TIMEOUT)
    dist.init_process_group("iroh", store=dist.FileStore(store), rank=rank, world_size=2, timeout=timedelta(seconds=60))
    made = []
    wrong = 0
    goes_on = torch.ones(1)
    number = 0
    while goes_on.item() == 2 or number == 0:
        tensor = torch.full((ELEMENTS,), float(rank + 1 + number % 5))
        began = time.monotonic()
        dist.all_reduce(tensor)
        path = torch_iroh.stats().peers[0].path
        made.append(Operation(began, time.monotonic(), path))
        wrong += int((tensor != 3 + 2 * (number % 5)).sum())
        number += 1
        goes_on.fill_(time.monotonic() < until)
        dist.all_reduce(goes_on)
    dist.destroy_process_group()
    return made, wrong


def swallow(names: list[str], source: int, target: int, *, cut: bool) -> None:
    """Whether packets of one host to another vanish."""
    ip = ["ip", "-n", names[source]]
    if cut:
        device = ["link", "add", "hole", "arp", "off", "type", "veth", "peer", "name", "bottom"]
        subprocess.run([*ip, *device], check=False, capture_output=True)  # it may be there
        for end in ("hole", "bottom"):
            subprocess.run([*ip, "link", "set", end, "arp", "off", "up"], check=True)
    verb = "add" if cut else "del"
    subprocess.run([*ip, "route", verb, f"{shaped.address(target)}/32", "dev", "hole"], check=True)


def sleep_until(when: float) -> None:
    time.sleep(max(0.0, when - time.monotonic()))


@pytest.mark.skipif(bool(shaped.obstacle()), reason=shaped.obstacle() or "-")
def test_a_dead_path_costs_seconds_a_cut_only_its_own_time_and_no_sum_is_wrong(tmp_path: Path) -> None:
    with (
        shaped.shaped(3, bits_per_second=100e6, delay=0.025) as names,
        Relay(namespace=names[RELAY_HOST], bind=f"{shaped.address(RELAY_HOST)}:3340") as relay,
        Ranks(2) as ranks,
    ):
        begin = time.monotonic() + 6.0  # both have met by then
        path_dead, path_back = begin + 2.0, begin + 8.0
        all_dead, all_back = path_back + 12.0, path_back + 18.0
        end = all_back + 4.0
        ranks.start(work, names, relay.url, str(tmp_path / "store"), end)
        sleep_until(path_dead)
        for source, target in ((0, 1), (1, 0)):
            swallow(names, source, target, cut=True)
        sleep_until(path_back)
        for source, target in ((0, 1), (1, 0)):
            swallow(names, source, target, cut=False)
        everything = [(0, 1), (1, 0), (0, RELAY_HOST), (1, RELAY_HOST)]
        sleep_until(all_dead)
        for source, target in everything:
            swallow(names, source, target, cut=True)
        sleep_until(all_back)
        for source, target in everything:
            swallow(names, source, target, cut=False)
        for made, wrong in values_of(ranks.collect(60)):
            assert wrong == 0 and len(made) > 20, (wrong, len(made))
            paths = [(one.ended - begin, one.path.split()[0]) for one in made]

            def path_between(after: float, before: float, made: list[Operation] = made) -> set[str]:
                return {one.path.split()[0] for one in made if after < one.began and one.ended < before}

            assert path_between(begin, path_dead) == {"direct"}, paths
            assert path_between(path_dead + STALL, path_back) == {"relay"}, paths
            assert path_between(all_dead - 1.5, all_dead) == {"direct"}, paths
            usual = sorted(one.ended - one.began for one in made)[len(made) // 2]
            worst = max(one.ended - one.began for one in made if one.began < all_dead - 1.0)
            assert worst - usual < STALL, (worst, usual)
            assert made[-1].ended > all_back + 3.0, paths  # and it went on
