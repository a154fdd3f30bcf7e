"""What a group has done so far, and how its peers are reached."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch_iroh._groups import iroh_backend

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
class GroupStats:
    """The group since it was made.

    Attributes:
        collectives: collectives that are done.
        busy_seconds: wall time with at least one operation in flight.
        peers: the other ranks, in rank order.
    """

    collectives: int
    busy_seconds: float
    peers: list[PeerStats]

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
    return GroupStats(
        collectives=raw["collectives"],
        busy_seconds=raw["busy_seconds"],
        peers=[PeerStats(**peer) for peer in raw["peers"]],
    )
