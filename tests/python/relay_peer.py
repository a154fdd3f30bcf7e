"""A process with one iroh endpoint, for the tests of the relay: a JSON line in is an operation, one out its result.

Arguments: the address to bind, the relays as JSON, [[url, token or null], ...], and a protocol.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from typing import Any

from torch_iroh._native import core_module, open_library

DEADLINE = 30.0
PIECE = 1 << 18


class Peer:
    def __init__(self, bind: str, relays: list[tuple[str, str | None]], alpn: str) -> None:
        open_library()
        self.endpoint = core_module().RawEndpoint(bind, alpn, [tuple(relay) for relay in relays])
        self.connection: Any = None

    def id(self) -> str:
        return str(self.endpoint.id())

    def relay_url(self) -> str | None:
        url = self.endpoint.relay_url()
        return None if url is None else str(url)

    def online(self, timeout: float = DEADLINE) -> None:
        self.endpoint.online(timeout)

    def connect(self, peer: str, url: str, timeout: float = DEADLINE) -> None:
        self.connection = self.endpoint.connect(peer, [], timeout, url)

    def observe(self, observer: str) -> None:
        identity, _, address = observer.partition("@")
        self.connection = self.endpoint.connect(identity, [address], DEADLINE)

    def accept(self, timeout: float = DEADLINE) -> str:
        self.connection = self.endpoint.accept(timeout)
        return str(self.connection.remote_id())

    def transfer(self, send: int, receive: int, streams: int = 1, timeout: float = 60.0) -> None:
        self.connection.transfer(send, receive, PIECE, streams, timeout)

    def transfer_watched(self, send: int, receive: int, streams: int, timeout: float) -> tuple[float, list[int]]:
        """Seconds, and the round-trip times (ms) that the connection's path had meanwhile, each 50 ms."""
        seen: list[int] = []
        done = threading.Event()

        def watch() -> None:
            while not done.wait(0.05):
                seen.extend(path[3] for path in self.connection.paths() if path[2])

        watcher = threading.Thread(target=watch)
        watcher.start()
        begin = time.monotonic()
        try:
            self.transfer(send, receive, streams, timeout)
        finally:
            took = time.monotonic() - begin
            done.set()
            watcher.join()
        return took, seen

    def write(self, text: str) -> None:
        self.connection.write(text.encode())

    def read(self, limit: int, timeout: float = DEADLINE) -> str:
        data: bytes = self.connection.read(limit, timeout)
        return data.decode()

    def paths(self) -> list[Any]:
        return list(self.connection.paths())


def main() -> None:
    peer = Peer(sys.argv[1], json.loads(sys.argv[2]), sys.argv[3])
    for line in sys.stdin:
        operation, *arguments = json.loads(line)
        try:
            answer = getattr(peer, operation)(*arguments), None
        except Exception as error:
            answer = None, f"{type(error).__name__}: {error}"
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
