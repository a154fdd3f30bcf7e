"""What a group has done so far, and how its peers are reached."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch_iroh._groups import iroh_backend
from torch_iroh._plan import Link

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


@dataclass(frozen=True)
class PeerStats:
    """One other rank, as this rank sees it.

    Attributes:
        rank: its rank in the group.
        endpoint_id: the first ten hex digits of its public key.
        path: "direct ADDRESS", "relay URL" or "not connected".
        rtt_ms: round-trip time in milliseconds, the least of the last eight measurements; None when not connected.
        bytes_sent: payload bytes sent to it.
        bytes_received: payload bytes received from it.
    """

    rank: int
    endpoint_id: str
    path: str
    rtt_ms: float | None
    bytes_sent: int
    bytes_received: int


@dataclass(frozen=True)
class NetworkStats:
    """The links of a group as its probes found them, equal on all ranks. Its links fit :func:`torch_iroh.plan`.

    Attributes:
        hosts: the ranks of each host.
        sites: the ranks of each site: hosts that name one, or that reach each other within 3 ms.
        host: the links within a host: assumed, not measured.
        site: the slowest link between hosts of a site, rounded to 1, 2 or 5 times a power of ten.
        wan: the same between sites. Where one of the two does not exist, it is a copy of the other.
    """

    hosts: list[list[int]]
    sites: list[list[int]]
    host: Link
    site: Link
    wan: Link


@dataclass(frozen=True)
class ChoiceStats:
    """What ran a collective of one size.

    Attributes:
        op: the collective.
        bytes: the power of two that holds the whole.
        algorithm: what ran it.
        count: how many are done.
        predicted_seconds: of the last one; None where the links are not known.
        mean_seconds: from its turn to its end on this rank, without the first, which may have had to connect.
    """

    op: str
    bytes: int
    algorithm: str
    count: int
    predicted_seconds: float | None
    mean_seconds: float


@dataclass(frozen=True)
class GroupStats:
    """The group since it was made.

    Attributes:
        collectives: collectives that are done.
        busy_seconds: wall time with at least one operation in flight.
        peers: the other ranks, in rank order.
        plan: what ``Options(plan=...)`` or ``algorithm`` fixed, "" when nothing.
        network: its links; None where they were not measured (one host, a plan, ``probe="off"``, or it failed).
        choices: what ran its collectives; empty where they go through shared memory.
    """

    collectives: int
    busy_seconds: float
    peers: list[PeerStats]
    plan: str
    network: NetworkStats | None
    choices: list[ChoiceStats]

    @property
    def bytes_sent(self) -> int:
        """Payload bytes sent to all peers."""
        return sum(peer.bytes_sent for peer in self.peers)

    @property
    def bytes_received(self) -> int:
        """Payload bytes received from all peers."""
        return sum(peer.bytes_received for peer in self.peers)


def stats(group: ProcessGroup | None = None) -> GroupStats:
    """Return the statistics of a group of backend "iroh" (default: the default group).

    Raises:
        ValueError: the group has another backend, or there is no default group.
    """
    raw = iroh_backend(group).stats()
    network = raw["network"]
    return GroupStats(
        collectives=raw["collectives"],
        busy_seconds=raw["busy_seconds"],
        peers=[PeerStats(**peer) for peer in raw["peers"]],
        plan=raw["plan"],
        network=network
        and NetworkStats(
            hosts=network["hosts"],
            sites=network["sites"],
            **{level: Link(**network[level]) for level in ("host", "site", "wan")},
        ),
        choices=[ChoiceStats(**choice) for choice in raw["choices"]],
    )
