"""The raw road between ranks 0 and 1: bytes over iroh's streams (csrc/iroh), without links, groups or collectives.

Made by both ranks at once, and every method is called by both. The bytes are zeros and nobody looks at them.
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from harness import Rank, show_bytes

_TIMEOUT_SECONDS = 120.0


@dataclass(frozen=True)
class Traffic:
    """How bytes travel. ``both_ways`` sends them in each direction at once.

    Attributes:
        connections: 1, or 2: one for each direction.
        streams: how many streams share the bytes of a direction.
        piece: bytes of one write and of one read; every stream has one of each in flight.
    """

    both_ways: bool
    connections: int
    streams: int
    piece: int

    def __str__(self) -> str:
        connections = "1 connection" if self.connections == 1 else "a connection for each"
        way = "one way" if not self.both_ways else f"both ways, {connections}"
        return f"{way}, streams: {self.streams}, piece: {show_bytes(self.piece)}"


class RawRoad:
    """Two connections between ranks 0 and 1; the default group carries the address."""

    def __init__(self, rank: Rank) -> None:
        from torch_iroh import _native

        _native.open_library()
        self._index = rank.index
        self._endpoint: Any = _native.core_module().RawEndpoint(os.environ["TORCH_IROH_BIND"], "torch-iroh/bench")
        where = [(self._endpoint.id(), self._endpoint.addresses())] if rank.index == 0 else [None]
        dist.broadcast_object_list(where, src=0)
        if where[0] is None:
            raise RuntimeError("rank 0 sent no address")
        make = self._endpoint.accept if rank.index == 0 else lambda: self._endpoint.connect(*where[0])
        self._connections = [make() for _ in range(2)]
        self._other_direction = ThreadPoolExecutor(1)

    def carry(self, count: int, traffic: Traffic) -> None:
        """Move ``count`` bytes from rank 0 to 1, and with ``both_ways`` as many from 1 to 0; wait for this rank's."""
        receives = self._index == 1
        if not traffic.both_ways:
            self._transfer(0, 0 if receives else count, count if receives else 0, traffic)
        elif traffic.connections == 1:
            self._transfer(0, count, count, traffic)
        else:  # connection n carries what rank n sends
            receiving = self._other_direction.submit(self._transfer, 1 - self._index, 0, count, traffic)
            self._transfer(self._index, count, 0, traffic)
            receiving.result()

    def close(self) -> None:
        dist.barrier()  # the peer has its bytes
        self._other_direction.shutdown()
        for connection in self._connections:
            connection.close()
        self._endpoint.close()

    def _transfer(self, connection: int, send: int, receive: int, traffic: Traffic) -> None:
        self._connections[connection].transfer(send, receive, traffic.piece, traffic.streams, _TIMEOUT_SECONDS)
