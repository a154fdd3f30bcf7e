"""What a relay server can be told, and what it refuses to be told."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from pathlib import Path

DEFAULT_PORT = 3340
DEFAULT_BIND = (f"0.0.0.0:{DEFAULT_PORT}", f"[::]:{DEFAULT_PORT}")


@dataclass(frozen=True, kw_only=True)
class RelayOptions:
    """How a :class:`RelayServer` listens, whom it lets in and what it allows them.

    Args:
        bind: "ip:port" or "[ip]:port" to listen on with TCP; port 0 is one port that is free on all of them.
        tokens: who shows one of these is let in. Empty: everybody is.
        tls_cert: file with the chain of certificates, in PEM; with `tls_key` it makes this an https server.
        tls_key: file with the certificate's private key.
        metrics_bind: "ip:port" of a listener of its own for ``/metrics``. None: the relay's port answers
            ``/metrics`` to this host only, and to nobody through a proxy.
        observer: "ip:port" (UDP) of the observer; port 0 is the relay's port number. None: there is no observer.
        observer_key: the observer's secret key, 32 bytes; None is a fresh one, and so a new id at each start.
        public_url: what clients are told as the relay's URL; needed behind a proxy. None: made from the address.
        public_ip: the address under which clients reach this host. None: the address it is bound to, or, where it is
            bound to all, that of the interface with the default route.
        max_clients: so many are let in at once, by relay and observer each.
        client_rate: bytes per second that one client may send; what is more waits in its own socket. None: no limit.
        queue_bytes: so much waits for a client that reads too slowly; the oldest packets go when there is more.
        keepalive: seconds between pings; a client that says nothing for three times as long is dropped.
        handshake_timeout: seconds that a client may take from its connection to its proof of who it is.

    Raises:
        ValueError: a value that has no meaning; the text names it and what is allowed.
    """

    bind: tuple[str, ...] = DEFAULT_BIND
    tokens: frozenset[str] = frozenset()
    tls_cert: Path | None = None
    tls_key: Path | None = None
    metrics_bind: str | None = None
    observer: str | None = "0.0.0.0:0"
    observer_key: bytes | None = None
    public_url: str | None = None
    public_ip: str | None = None
    max_clients: int = 4096
    client_rate: float | None = None
    queue_bytes: int = 1 << 20
    keepalive: float = 15.0
    handshake_timeout: float = 10.0

    def __post_init__(self) -> None:
        if not self.bind:
            raise ValueError("bind: at least one address to listen on")
        for text in (*self.bind, self.metrics_bind, self.observer):
            if text is not None:
                split_address(text)
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ValueError("tls_cert and tls_key: give both (https) or neither (http)")
        if self.public_ip is not None:
            ipaddress.ip_address(self.public_ip)
        if self.public_url is not None and not self.public_url.startswith(("http://", "https://")):
            raise ValueError(f"public_url is {self.public_url!r}; allowed: http://... or https://...")
        for name in ("max_clients", "queue_bytes", "keepalive", "handshake_timeout"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} is {getattr(self, name)}; allowed: more than 0")
        if self.queue_bytes < 64 * 1024:
            raise ValueError(f"queue_bytes is {self.queue_bytes}; allowed: from 65536, which is one message")
        if self.client_rate is not None and not self.client_rate >= 1000:
            raise ValueError(f"client_rate is {self.client_rate} bytes/s; allowed: from 1000")


def split_address(text: str) -> tuple[str, int]:
    """Return ("127.0.0.1", 80) for "127.0.0.1:80"; raises ValueError for what is no numeric address with a port."""
    host, colon, port = text.rpartition(":")
    bare = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    try:
        address = ipaddress.ip_address(bare)
        if not colon or (address.version == 6) != (bare != host) or not port.isdecimal() or int(port) > 65535:
            raise ValueError
    except ValueError:
        raise ValueError(f"{text!r} is not an address like 0.0.0.0:3340 or [::]:3340") from None
    return str(address), int(port)


def join_address(host: str, port: int) -> str:
    """Return "127.0.0.1:80" or "[::1]:80"."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
