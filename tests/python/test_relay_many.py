"""Thousands of clients that say nothing: all are kept, each costs little, and packets still go between any two."""

from __future__ import annotations

import resource
from collections.abc import Iterator

import pytest
from relay_support import DATAGRAM_IN, PING, PONG, Client, Relay, eventually

CLIENTS = 2000

# Seen: 2.7 KB with uvloop, 2.8 KB with asyncio's own loop (CPython 3.11).
MOST_BYTES = 20_000


@pytest.fixture
def files() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = CLIENTS + 256
    if hard != resource.RLIM_INFINITY and hard < wanted:
        pytest.skip(f"this process may open {hard} files only")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, wanted), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.usefixtures("files")
def test_two_thousand_idle_clients_cost_little() -> None:
    with Relay() as relay:
        Client(relay.address).join().close()
        before = relay.memory()
        clients = [Client(relay.address).join() for _ in range(CLIENTS)]
        metrics = relay.metrics()
        assert metrics["torch_iroh_relay_sessions"] == metrics["torch_iroh_relay_endpoints"] == CLIENTS
        each = (relay.memory() - before) / CLIENTS
        print(f"{each:.0f} bytes for each client")
        assert each < MOST_BYTES
        # Every one is there: the first half sends to the second.
        half = CLIENTS // 2
        for sender, receiver in zip(clients[:half], clients[half:], strict=True):
            sender.send_to(receiver.key, b"x")
        for sender, receiver in zip(clients[:half], clients[half:], strict=True):
            assert receiver.receive(PING) == (DATAGRAM_IN, sender.key + b"\x00x")
        # Memory of what has passed goes back.
        assert (relay.memory() - before) / CLIENTS < MOST_BYTES
        for client in clients[1:]:
            client.close()
        eventually(lambda: relay.metrics()["torch_iroh_relay_sessions"] == 1)
        clients[0].send(PING, b"12345678")
        while clients[0].receive(PING) != (PONG, b"12345678"):
            pass
        clients[0].close()
        assert "Traceback" not in relay.log
