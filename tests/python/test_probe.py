"""A group that measures its links when it is made: what it finds, who decides otherwise, and probes that fail.

Hosts are namespaces with known links (shaped.py), or, where links do not matter, processes of one machine that count as
hosts of their own because each has an IPC namespace.
"""

from __future__ import annotations

import ctypes
import os
import re
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import shaped
import torch
import torch.distributed as dist
from ranks import Ranks, values_of

import torch_iroh

pytestmark = pytest.mark.timeout(300)

_CLONE_NEWIPC = 0x08000000


def alone_on_its_host() -> bool:
    return ctypes.CDLL(None, use_errno=True).unshare(_CLONE_NEWIPC) == 0


@pytest.fixture(scope="module", autouse=True)
def _namespaces() -> None:
    if why := shaped.obstacle():
        pytest.skip(why)


@dataclass
class Seen:
    seconds: float
    network: torch_iroh.NetworkStats | None
    choices: list[torch_iroh.ChoiceStats]
    log: list[str] = field(default_factory=list)


class Log:
    """What this process writes to stderr, its native code included."""

    def __init__(self, path: str) -> None:
        self._path = Path(path)
        with self._path.open("w") as file:
            os.dup2(file.fileno(), 2)

    def lines(self) -> list[str]:
        return [line for line in self._path.read_text().splitlines() if line.startswith("torch-iroh[")]


class Meddling(dist.Store):
    """A store in which some entries are not what was written; `meddle` gives what is, and may take its time."""

    def __init__(self, path: str, world: int, meddle: Callable[[str, bytes], bytes]) -> None:
        super().__init__()
        self._store = dist.FileStore(path, world)
        self._meddle = meddle

    def set(self, key: str, value: Any) -> None:
        raw = value.encode() if isinstance(value, str) else bytes(value)
        self._store.set(key, self._meddle(key, raw))

    def get(self, key: str) -> bytes:
        return self._store.get(key)

    def add(self, key: str, amount: int) -> int:
        return self._store.add(key, amount)

    def check(self, keys: list[str]) -> bool:
        return self._store.check(keys)

    def wait(self, keys: list[str], timeout: timedelta = timedelta(seconds=60)) -> None:
        self._store.wait(keys, timeout)

    def delete_key(self, key: str) -> bool:
        return self._store.delete_key(key)


def work(rank: int, world: int, store: Any, log: Log | None, sizes: list[int], **options: Any) -> Seen:
    """Make a group and run all_reduces of these sizes, three each, against their known sum."""
    begun = time.monotonic()
    dist.init_process_group(
        "iroh",
        store=store,
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=60),
        pg_options=torch_iroh.Options(**options),
    )
    seconds = time.monotonic() - begun
    for size in sizes:
        for _ in range(3):
            tensor = torch.full((max(1, size // 4),), float(rank + 1))
            dist.all_reduce(tensor)
            assert torch.all(tensor == world * (world + 1) // 2)
    stats = torch_iroh.stats()
    dist.barrier()
    dist.destroy_process_group()
    return Seen(seconds, stats.network, stats.choices, log.lines() if log else [])


def shaped_rank(rank: int, names: list[str], host_of: list[int], store: str, sizes: list[int], folder: str) -> Seen:
    log = Log(f"{folder}/{rank}.log")
    shaped.first_in_line()
    shaped.enter(names[host_of[rank]])
    os.environ["TORCH_IROH_BIND"] = f"{shaped.address(host_of[rank])}:0"
    world = len(host_of)
    return work(rank, world, dist.FileStore(store, world), log, sizes)


@pytest.mark.parametrize("sites", [[0, 0, 1, 1], [0, 1, 0, 1]], ids=["contiguous", "interleaved"])
def test_two_sites_are_found_and_an_all_reduce_goes_by_levels(tmp_path: Path, sites: list[int]) -> None:
    small, large = 4 << 10, 512 << 10
    host_of = [rank // 3 for rank in range(12)]
    environment = {"TORCH_IROH_LOG": "info"}
    with (
        shaped.shaped(4, bits_per_second=200e6, delay=0.015, sites=sites, near=0.0002) as names,
        Ranks(12, environment=environment) as ranks,
    ):
        seen = ranks.run(
            shaped_rank, names, host_of, str(tmp_path / "store"), [small, large], str(tmp_path), deadline=200
        )
    network = seen[0].network
    assert network is not None, seen[0].log
    assert all(one.network == network for one in seen)  # one decision
    print(network, max(one.seconds for one in seen), seen[0].log)
    assert network.hosts == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9, 10, 11]]
    assert network.sites == [[rank for rank in range(12) if sites[host_of[rank]] == site] for site in (0, 1)]
    assert 0.01 <= network.wan.latency <= 0.02
    assert network.site.latency <= 0.0015
    # QUIC's slow start and headers let it see less than the wire has, never much more.
    assert 2e6 <= network.wan.bandwidth <= 50e6
    chosen = {one.bytes: one for one in seen[0].choices if one.op == "all_reduce"}
    assert chosen[large].algorithm == "hierarchical", chosen
    assert chosen[large].count == 3 and chosen[large].predicted_seconds is not None
    # Said once for each size, by each rank.
    for one in seen:
        said = [
            line for line in one.log if re.search(r"all_reduce 512 KiB, hierarchical: predicted .* m?s, took", line)
        ]
        assert len(said) == 1, one.log


def test_ranks_of_one_host_are_measured_once(tmp_path: Path) -> None:
    with shaped.shaped(2, bits_per_second=100e6, delay=0.010) as names, Ranks(4) as ranks:
        seen = ranks.run(
            shaped_rank, names, [0, 1, 0, 1], str(tmp_path / "store"), [1 << 20], str(tmp_path), deadline=120
        )
    for one in seen:
        assert one.network is not None
        assert one.network.hosts == one.network.sites == [[0, 2], [1, 3]]
        assert one.network.site == one.network.wan  # there is no link within a site
        (chosen,) = (choice.algorithm for choice in one.choices if choice.op == "all_reduce")
        assert chosen in ("hierarchical", "butterfly")  # which move the same here


def lone_rank(rank: int, world: int, store: str, folder: str, options: dict[str, Any], site: str = "") -> Seen:
    assert alone_on_its_host()
    if site:
        os.environ["TORCH_IROH_SITE"] = site.split(",")[rank]
    log = Log(f"{folder}/{rank}.log")
    return work(rank, world, dist.FileStore(store, world), log, [1 << 10, 300_000], **options)


@pytest.mark.parametrize("world", [2, 3, 5])
def test_near_hosts_are_one_site(tmp_path: Path, world: int) -> None:
    with Ranks(world) as ranks:
        seen = ranks.run(lone_rank, world, str(tmp_path / "store"), str(tmp_path), {})
    for one in seen:
        assert one.network is not None, one.log
        assert one.network.sites == [list(range(world))]
        assert one.network == seen[0].network


def test_a_named_site_goes_before_what_was_measured(tmp_path: Path) -> None:
    with Ranks(4) as ranks:
        seen = ranks.run(lone_rank, 4, str(tmp_path / "store"), str(tmp_path), {}, "a,b,a,b")
    for one in seen:
        assert one.network is not None, one.log
        assert one.network.sites == [[0, 2], [1, 3]]


def later_groups(rank: int, world: int, store: str, folder: str) -> tuple[list[Any], list[str]]:
    log = Log(f"{folder}/{rank}.log")
    assert alone_on_its_host()
    dist.init_process_group(
        "iroh", store=dist.FileStore(store, world), rank=rank, world_size=world, timeout=timedelta(seconds=60)
    )
    networks = [torch_iroh.stats().network]
    for members in ([2, 0], [1, 2]):
        group = dist.new_group(members, timeout=timedelta(seconds=60))
        if rank in members:
            tensor = torch.full((1000,), float(rank + 1))
            dist.all_reduce(tensor, group=group)
            assert torch.all(tensor == sum(members) + 2)
            networks.append(torch_iroh.stats(group).network)
    dist.barrier()
    dist.destroy_process_group()
    return networks, log.lines()


def test_groups_among_the_same_hosts_do_not_measure_again(tmp_path: Path) -> None:
    with Ranks(3, environment={"TORCH_IROH_LOG": "info"}) as ranks:
        seen = ranks.run(later_groups, 3, str(tmp_path / "store"), str(tmp_path), deadline=100)
    assert [len(networks) for networks, _ in seen] == [2, 2, 3]
    first = seen[0][0][0]
    assert first is not None
    for networks, _ in seen:
        for one in networks:
            assert one is not None and (one.site, one.wan) == (first.site, first.wan)
            assert len(one.hosts) in (2, 3)
    measured = [line for _, log in seen for line in log if "measured in" in line]
    known = [line for _, log in seen for line in log if "known from an earlier group" in line]
    assert len(measured) == 1 and len(known) == 2, (measured, known)


@pytest.mark.parametrize("options", [{"probe": "off"}, {"algorithm": "ring"}, {"plan": "all_reduce=tree"}])
def test_nothing_is_measured_where_that_is_not_wanted(tmp_path: Path, options: dict[str, Any]) -> None:
    with Ranks(2) as ranks:
        seen = ranks.run(lone_rank, 2, str(tmp_path / "store"), str(tmp_path), options)
    for one in seen:
        assert one.network is None
        assert one.choices and all(choice.predicted_seconds is None for choice in one.choices)


def one_of_two_declines(rank: int, store: str, folder: str) -> Seen:
    return lone_rank(rank, 2, store, folder, {"probe": "off"} if rank == 1 else {})


def test_one_rank_that_does_not_want_it_is_enough(tmp_path: Path) -> None:
    with Ranks(2) as ranks:
        for one in ranks.run(one_of_two_declines, str(tmp_path / "store"), str(tmp_path)):
            assert one.network is None


def test_a_wrong_value_of_the_option_is_a_value_error() -> None:
    with pytest.raises(ValueError, match="option probe is 'on'; allowed: 'auto', 'off'"):
        torch_iroh.Options(probe="on")


# ---- probes that fail ----


def garbage(key: str, value: bytes) -> bytes:
    return b"\xff" * 40 if re.search(r"probe/found/\d+/1$", key) else value


def too_many(key: str, value: bytes) -> bytes:
    return value[:4] + struct.pack("<I", 1 << 30) + value[8:] if re.search(r"probe/found/0/1$", key) else value


def failed(key: str, value: bytes) -> bytes:
    text = b"rank 1: no\x1b[2J words"
    return struct.pack("<IH", 0, len(text)) + text if re.search(r"probe/found/0/1$", key) else value


def late(key: str, value: bytes) -> bytes:
    if re.search(r"probe/found/0/1$", key):
        time.sleep(7)
    return value


FAILURES: dict[str, tuple[Callable[[str, bytes], bytes], str]] = {
    "garbage": (garbage, "what rank 1 found is unreadable"),
    "too many answers": (too_many, "what rank 1 found is unreadable: another number of answers"),
    "says that it failed": (failed, r"rank 1: no\?\[2J words"),
    "late": (late, "rank 1 measured for too long"),
}


def meddled_rank(rank: int, world: int, path: str, folder: str, what: str) -> Seen:
    assert alone_on_its_host()
    log = Log(f"{folder}/{rank}.log")
    store = Meddling(path, world, FAILURES[what][0])
    return work(rank, world, store, log, [1 << 10, 300_000])


@pytest.mark.parametrize("what", FAILURES)
def test_probes_that_fail_are_said_once_and_the_group_works(tmp_path: Path, what: str) -> None:
    with Ranks(3) as ranks:
        seen = ranks.run(meddled_rank, 3, str(tmp_path / "store"), str(tmp_path), what)
    for rank, one in enumerate(seen):
        assert one.network is None
        said = [line for line in one.log if "links of this group could not be measured" in line]
        assert len(said) == (1 if rank == 0 else 0), one.log
    (warning,) = (line for line in seen[0].log if "could not be measured" in line)
    assert re.search(FAILURES[what][1], warning), warning


def lie_about_the_links(key: str, value: bytes) -> bytes:
    return value[:-1] + b"\xff" if key.endswith("probe/decision") else value


def lie_about_the_work(key: str, value: bytes) -> bytes:
    return b"\x09\0\0\0" if key.endswith("probe/step/0") else value


LIES = {
    "links": (lie_about_the_links, [0, 1], "probe/decision of rank 0 is unreadable: sites out of order"),
    "work": (lie_about_the_work, [1], "probe/step/0 of rank 0 is unreadable: an unknown step"),
}


def lied_to(rank: int, path: str, what: str) -> str:
    assert alone_on_its_host()
    try:
        work(rank, 2, Meddling(path, 2, LIES[what][0]), None, [])
    except dist.DistBackendError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("what", LIES)
def test_an_entry_of_rank_0_that_is_none_is_an_error_that_names_it(tmp_path: Path, what: str) -> None:
    with Ranks(2) as ranks:
        ranks.start(lied_to, str(tmp_path / "store"), what)
        found = values_of(ranks.collect(60))
    for rank in LIES[what][1]:
        assert LIES[what][2] in found[rank], found
