"""Sockets on hosts of a laboratory, in the test's own process: what arrives where, and from whom."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable

from torch_iroh.lab import Host

Where = tuple[str, int]
SILENCE = 0.2  # how long nothing must come, on links of a few milliseconds
PATIENCE = 10.0


class Probe:
    """A UDP socket on a host."""

    def __init__(self, host: Host, port: int = 0, *, ipv6: bool = False) -> None:
        self.host = host
        self.socket = host.call(socket.socket, socket.AF_INET6 if ipv6 else socket.AF_INET, socket.SOCK_DGRAM)
        self.socket.bind(("::" if ipv6 else "0.0.0.0", port))
        self.port = self.socket.getsockname()[1]

    def __enter__(self) -> Probe:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()

    @property
    def where(self) -> Where:
        return self.host.address, self.port

    def send(self, text: str, to: Where) -> None:
        self.socket.sendto(text.encode(), to)

    def hears(self, timeout: float = PATIENCE) -> tuple[str, Where] | None:
        self.socket.settimeout(timeout)
        try:
            data, sender = self.socket.recvfrom(65_535)
        except TimeoutError:
            return None
        return data.decode(), (sender[0], sender[1])

    def hears_nothing(self) -> bool:
        return self.hears(SILENCE) is None

    def seen_from(self, other: Probe) -> Where:
        """The address and port as which this socket appears there."""
        self.send("who am I", other.where)
        heard = other.hears()
        assert heard is not None, f"nothing came from {self.host.name} to {other.host.name}"
        return heard[1]


def reaches(sender: Probe, receiver: Probe, timeout: float = PATIENCE) -> bool:
    """Whether a packet comes through within that time, one being sent again and again."""
    for attempt in range(int(timeout / 0.1)):
        sender.send(f"attempt {attempt}", receiver.where)
        if receiver.hears(0.1):
            return True
    return False


def round_trips(first: Probe, second: Probe, count: int) -> list[float]:
    """Seconds, there and back, of packets one after the other."""
    echo = threading.Thread(target=lambda: [second.socket.sendto(*second.socket.recvfrom(2000)) for _ in range(count)])
    second.socket.settimeout(PATIENCE)
    echo.start()
    times = []
    for number in range(count):
        begin = time.monotonic()
        first.send(str(number), second.where)
        assert first.hears() is not None
        times.append(time.monotonic() - begin)
    echo.join()
    return times


def tcp(client: Host, server: Host, port: int = 4000) -> tuple[socket.socket, socket.socket]:
    """A connection: the client's socket and the server's."""
    listener = server.call(socket.socket)
    with listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("0.0.0.0", port))
        listener.listen()
        listener.settimeout(PATIENCE)
        near = client.call(socket.socket)
        near.settimeout(PATIENCE)
        near.connect((server.address, port))
        far, _ = listener.accept()
    far.settimeout(PATIENCE)
    return near, far


def receive(connection: socket.socket, nbytes: int) -> bytes:
    """Exactly so many bytes."""
    received = bytearray()
    while len(received) < nbytes:
        part = connection.recv(1 << 20)
        assert part, f"the connection ended after {len(received)} of {nbytes} bytes"
        received += part
    return bytes(received)


def tcp_megabits(sender: Host, receiver: Host, nbytes: int) -> float:
    """What a TCP transfer of that length reaches, from its first to its last byte."""
    near, far = tcp(sender, receiver)
    with near, far:
        sending = threading.Thread(target=near.sendall, args=(bytes(nbytes),))
        sending.start()
        first = len(far.recv(1 << 20))
        begin = time.monotonic()
        receive(far, nbytes - first)
        seconds = time.monotonic() - begin
        sending.join()
    return (nbytes - first) * 8e-6 / seconds


def eventually(condition: Callable[[], bool], timeout: float = PATIENCE) -> bool:
    until = time.monotonic() + timeout
    while time.monotonic() < until:
        if condition():
            return True
        time.sleep(0.05)
    return condition()
