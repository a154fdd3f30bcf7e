"""Predicts a collective before anybody is connected: its real schedules, simulated on links that the caller describes.

>>> import torch_iroh
>>> plan = torch_iroh.plan("all_reduce", bytes=64 << 20, world=8)  # doctest: +SKIP
>>> plan.algorithm, plan.predicted_seconds  # doctest: +SKIP
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Link:
    """What a message between two ranks of one level costs.

    Attributes:
        latency: seconds, one way: half of what ping shows.
        bandwidth: bytes per second that a host (within a host: a rank) can send, and as many that it can receive at
            the same time. 1 Gbit/s is 125e6.
        jitter: seconds; each chunk is late by 0 to this, uniformly, from a fixed seed.
        message_seconds: seconds of a rank's processor for each chunk, at each end. The default is an assumption; iroh
            on loopback was measured at 0.23 ms (docs/scaling.md).
        byte_seconds: seconds of a rank's processor for each byte, at each end. The default is an assumption; iroh on
            loopback was measured at 3.6 ns.
    """

    latency: float
    bandwidth: float
    jitter: float = 0.0
    message_seconds: float = 50e-6
    byte_seconds: float = 1e-9

    def __post_init__(self) -> None:
        """Refuse what no link can be.

        Raises:
            ValueError: a number is negative or not a number, or the bandwidth is 0.
        """
        for name, value in dataclasses.asdict(self).items():
            if not value >= 0 or (math.isinf(value) and name != "bandwidth"):
                raise ValueError(f"Link: {name} {value} is not a number from 0 up")
        if self.bandwidth == 0:
            raise ValueError("Link: bandwidth 0 never delivers anything")


@dataclass(frozen=True)
class Plan:
    """One algorithm for one collective, and what it would take.

    Attributes:
        op: the collective.
        algorithm: the one that was asked for, or for "auto" the fastest.
        world: ranks.
        bytes: of the whole, as given.
        depth: most messages of which each comes because of the one before.
        fan_out: most peers that one rank sends to.
        messages_per_rank: most messages that one rank sends.
        bytes_per_rank: most bytes that one rank sends.
        predicted_seconds: until the last rank has its result.
        median_seconds: until half of the ranks have theirs.
        chunk_bytes: into which messages are cut.
        method: "everyone" (all ranks were simulated), "period" (one host or site of a world that is the same from
            all: exact for a size rounded up to equal shards) or "kinds" (a sample: one host of each kind).
        simulated_ranks: of the world.
        simulated_chunk_bytes: larger than `chunk_bytes` where a sample would else have been too large; larger chunks
            pipeline less, so the prediction is rather too long.
        alternatives: predicted seconds of every algorithm that could be predicted, by name.
        refused: why the others could not, by name.
        levels: of "hierarchical": ranks of a host, hosts of a site and sites, and the groups that were made of them,
            innermost first: "8x125x10, at most 32: groups of 8, 25, 5, 10". Else empty.
    """

    op: str
    algorithm: str
    world: int
    bytes: int
    depth: int
    fan_out: int
    messages_per_rank: int
    bytes_per_rank: int
    predicted_seconds: float
    median_seconds: float
    chunk_bytes: int
    method: str
    simulated_ranks: int
    simulated_chunk_bytes: int
    alternatives: dict[str, float] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    levels: str = ""


# Assumptions for callers that name no links, not measurements: cables of today, one way.
HOST = Link(latency=20e-6, bandwidth=4e9, message_seconds=10e-6, byte_seconds=0.0)
SITE = Link(latency=0.5e-3, bandwidth=1.25e9)
WAN = Link(latency=25e-3, bandwidth=125e6)


def plan(
    op: str = "all_reduce",
    *,
    bytes: int,
    world: int,
    ranks_per_host: int = 1,
    hosts_per_site: int = 1,
    host: Link = HOST,
    site: Link = SITE,
    wan: Link = WAN,
    local_byte_seconds: float = 0.0,
    algorithm: str = "auto",
    pins: str | None = None,
    dtype: str = "float32",
    chunk_bytes: int = 256 << 10,
    seed: int = 1,
) -> Plan:
    """Predict one collective by simulating its schedules. Connects to nothing and needs no torch.

    Args:
        op: "all_reduce", "broadcast", "all_gather", ...
        bytes: of the whole: the tensor; of all_gather and gather the output, of reduce_scatter and scatter the input,
            of all_to_all what one rank sends, itself included.
        world: ranks. Ranks fill hosts and hosts fill sites in order.
        ranks_per_host: ranks of a host; they share its ports towards other hosts.
        hosts_per_site: hosts of a site.
        host: the links within a host.
        site: the links between hosts of a site.
        wan: the links between sites.
        local_byte_seconds: seconds of a rank's processor for each byte that it reduces or copies.
        algorithm: "ring", "direct", "ring_bidirectional", "tree", "butterfly", "bruck", "hierarchical" (its levels are
            the hosts and sites, in groups of at most 32), or "auto": the fastest of those that can be predicted. One
            that does not cover the collective is planned as its nearest kin, and ``Plan.algorithm`` names that.
        pins: a plan as in ``Options(plan=...)``, which may fix the algorithm and the chunk of this collective; in place
            of `algorithm`. A group with the same plan runs what this predicts.
        dtype: of the elements, a torch name.
        chunk_bytes: into which messages are cut, as ``Options.chunk_bytes``.
        seed: of the jitter.

    Returns:
        The plan. ``predicted_seconds`` says nothing about connecting, congestion control, loss, or ranks that are late.

    Raises:
        ValueError: a name is unknown (the text lists the known ones), a number is out of range, or the world is larger
            than this algorithm can be simulated for (the text has the bound).
    """
    for name, value, least in (
        ("bytes", bytes, 0),
        ("world", world, 1),
        ("ranks_per_host", ranks_per_host, 1),
        ("hosts_per_site", hosts_per_site, 1),
        ("chunk_bytes", chunk_bytes, 64),
    ):
        if isinstance(value, bool) or not isinstance(value, int):
            raise TypeError(f"plan: {name} must be an int, not {type(value).__name__}")
        if not least <= value <= (2**62 if name == "bytes" else 2**31 - 1):
            raise ValueError(f"plan: {name} {value} is out of range, the least is {least}")
    if not 0 <= local_byte_seconds < math.inf:
        raise ValueError(f"plan: local_byte_seconds {local_byte_seconds} is not a number from 0 up")
    from torch_iroh._native import core_module

    if pins is not None:
        if algorithm != "auto":
            raise ValueError(f"plan: algorithm {algorithm!r} beside pins; allowed: one of them")
        algorithm, pinned_chunk = core_module().pinned(plan=pins, op=op, bytes=bytes)
        chunk_bytes = pinned_chunk or chunk_bytes
    links = {name: dataclasses.asdict(link) for name, link in (("host", host), ("site", site), ("wan", wan))}
    tried: list[dict[str, Any]] = core_module().plan(
        op=op,
        bytes=bytes,
        world=world,
        ranks_per_host=ranks_per_host,
        hosts_per_site=hosts_per_site,
        local_byte_seconds=local_byte_seconds,
        algorithm=algorithm,
        dtype=dtype,
        chunk_bytes=chunk_bytes,
        seed=seed,
        **links,
    )
    refused = {one["algorithm"]: one["refused"] for one in tried if "refused" in one}
    done = [one for one in tried if "refused" not in one]
    if not done:
        reasons = "; ".join(f"{name}: {why}" for name, why in refused.items())
        raise ValueError(f"plan({op}, world {world}): no algorithm can be predicted: {reasons}")
    best = min(done, key=lambda one: one["predicted_seconds"])
    alternatives = {one["algorithm"]: one["predicted_seconds"] for one in done}
    return Plan(
        op=op, world=world, bytes=bytes, chunk_bytes=chunk_bytes, alternatives=alternatives, refused=refused, **best
    )
