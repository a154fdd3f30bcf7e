"""The relay server: its listeners, its sessions, the clock of keep-alives, and the observer beside it."""

from __future__ import annotations

import asyncio
import errno
import os
import random
import socket
import ssl
from typing import Any

from torch_iroh._native import core_module, open_library
from torch_iroh.relay import _auth, _session
from torch_iroh.relay._metrics import Metrics
from torch_iroh.relay._options import RelayOptions, join_address, split_address
from torch_iroh.relay._session import Session, log

_READ_BUFFER = 256 * 1024
_BACKLOG = 1024
_MOST_PENDING = 1024  # connections that have not become clients yet
_PORT_TRIES = 10
_CLOSE_PATIENCE = 2.0
_ADAPT_INTERVAL = 0.5
_MOST_REPORTS = 20  # for each second or less
# How long clients may take to come back: spread, so that thousands do not come at once.
_RECONNECT_SPREAD_MS = 2000
_RECONNECT_TRY_MS = 5000


class RelayServer:
    """A relay and its observer; one asyncio loop, which must be the one that runs :meth:`start`.

    Raises:
        ImportError: the packages of the extra "relay" are not installed.
    """

    def __init__(self, options: RelayOptions) -> None:
        self.options = options
        self.access = _auth.Access(options.tokens)
        self.metrics = Metrics()
        self.hub: Any = core_module().RelayHub(options.queue_bytes, int.from_bytes(os.urandom(8), "little"))
        self.proved = _auth.load_verifier()
        self.read_buffer = memoryview(bytearray(_READ_BUFFER))
        self.closing = False
        self._sessions: dict[int, Session] = {}  # by the hub's number
        self._pending: set[Session] = set()
        self._servers: list[asyncio.Server] = []
        self._tls: ssl.SSLContext | None = None
        self._observer: Any = None
        self._reports = 0
        self._clock: asyncio.Task[None] | None = None
        self.listening: tuple[str, ...] = ()  # "ip:port" of each listener
        self.metrics_listening: str | None = None

    async def start(self) -> None:
        """Listen.

        Raises:
            OSError: an address cannot be listened on, or a file of the certificate not be read.
        """
        if self.options.tls_cert is not None:
            self._tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            self._tls.minimum_version = ssl.TLSVersion.TLSv1_2
            self.reload_certificate()
        try:
            for listener in _listeners(self.options.bind):
                self.listening += (join_address(*listener.getsockname()[:2]),)
                await self._serve(listener, False)
            if self.options.metrics_bind is not None:
                listener = _listen(*split_address(self.options.metrics_bind))
                self.metrics_listening = join_address(*listener.getsockname()[:2])
                await self._serve(listener, True)
            if self.options.observer is not None:
                self._start_observer(self.options.observer)
        except BaseException:
            await self.close()
            raise
        self._clock = asyncio.create_task(self._tick())

    async def _serve(self, listener: socket.socket, metrics_only: bool) -> None:
        tls = None if metrics_only else self._tls
        server = await asyncio.get_running_loop().create_server(
            lambda: Session(self, metrics_only),
            sock=listener,
            backlog=_BACKLOG,
            ssl=tls,
            ssl_handshake_timeout=self.options.handshake_timeout if tls else None,
        )
        self._servers.append(server)

    def _start_observer(self, bind: str) -> None:
        host, port = split_address(bind)
        address = join_address(host, port or self.port)
        open_library()
        key = self.options.observer_key or os.urandom(32)
        try:
            self._observer = core_module().Observer(address, key, self.options.max_clients)
        except RuntimeError as error:
            raise OSError(f"the observer cannot use UDP {address}: {error}") from error

    # ---- what people are told ----

    @property
    def port(self) -> int:
        """The TCP port of the first listener."""
        return split_address(self.listening[0])[1]

    @property
    def public_ip(self) -> str:
        """The address under which clients reach this host, as far as it can be known from here."""
        bound = split_address(self.listening[0])[0]
        if self.options.public_ip is not None:
            return self.options.public_ip
        return bound if bound not in ("0.0.0.0", "::") else _own_address()

    @property
    def relay_url(self) -> str:
        """What clients are given as their relay."""
        scheme = "http" if self._tls is None else "https"
        return self.options.public_url or f"{scheme}://{join_address(self.public_ip, self.port)}"

    @property
    def observer(self) -> str | None:
        """What clients are given as their observer, "<id>@ip:port"."""
        if self._observer is None:
            return None
        host, port = split_address(self._observer.bound_sockets()[0])
        public = self.options.public_ip or (host if host not in ("0.0.0.0", "::") else self.public_ip)
        return f"{self._observer.id()}@{join_address(public, port)}"

    def metrics_text(self) -> str:
        """What ``/metrics`` says."""
        observer = self._observer
        seen = (
            {}
            if observer is None
            else {
                "observer_connections": observer.connections(),
                "observer_answers_total": observer.answers(),
            }
        )
        return self.metrics.text(self.hub.counters(), seen)

    # ---- while it runs ----

    def set_tokens(self, tokens: frozenset[str]) -> None:
        """Let in by these from now on; clients that are connected stay."""
        self.access = _auth.Access(tokens)

    def reload_certificate(self) -> None:
        """Read the files of the certificate again; connections that are open stay as they are."""
        if self._tls is None or self.options.tls_cert is None:
            return
        try:
            self._tls.load_cert_chain(self.options.tls_cert, self.options.tls_key)
        except (ssl.SSLError, OSError) as error:
            files = f"{self.options.tls_cert} and {self.options.tls_key}"
            raise OSError(f"the certificate of {files} cannot be used: {error}") from error

    def welcome(self, session: Session) -> bool:
        """Count a connection."""
        self.metrics.accepted += 1
        if len(self._pending) >= _MOST_PENDING:
            self.metrics.refused["full"] += 1
            return False
        self._pending.add(session)
        return True

    def admit(self, session: Session) -> bool:
        """Open a client of the hub."""
        if len(self._sessions) >= self.options.max_clients:
            return False
        session.client = self.hub.open()
        self._sessions[session.client] = session
        return True

    def confirmed(self, session: Session, surplus: int | None) -> None:
        """Count a client, and end its oldest session when it has too many."""
        self.metrics.confirmed += 1
        self._pending.discard(session)
        if surplus is not None:
            self._sessions[surplus].end(_session.POLICY)

    def flush_ready(self) -> None:
        """Write what the hub has queued for anybody."""
        for client in self.hub.take_ready():
            self._sessions[client].flush()

    def forget(self, session: Session) -> None:
        """Close a client of the hub; those who knew it are told."""
        self._pending.discard(session)
        if session.client is not None:
            self.hub.close(session.client)
            del self._sessions[session.client]
            self.flush_ready()

    def report(self, text: str) -> None:
        """Log a connection that was ended, unless so many were that the log would be what they fill."""
        self._reports += 1
        if self._reports <= _MOST_REPORTS:
            log.info("%s", text)

    async def _tick(self) -> None:
        loop = asyncio.get_running_loop()
        adapted = loop.time()
        while True:
            await asyncio.sleep(min(1.0, self.options.keepalive / 4))
            now = loop.time()
            if now - adapted >= _ADAPT_INTERVAL:
                self.hub.adapt(now - adapted)
                adapted = now
            if self._reports > _MOST_REPORTS:
                log.info("%d more connections were ended: see refused_total of /metrics", self._reports - _MOST_REPORTS)
            self._reports = 0
            for session in list(self._sessions.values()):
                session.tick(now)
            self.flush_ready()

    # ---- the end ----

    async def close(self) -> None:
        """Tell clients that they may come back soon, and end."""
        self.closing = True
        counted = self.hub.counters()
        log.info(
            "%d clients; in all %d MB passed on, messages dropped for slow receivers: %d",
            counted["clients"],
            counted["relayed_bytes"] // 10**6,
            counted["dropped_slow_frames"],
        )
        if self._clock is not None:
            self._clock.cancel()
        for server in self._servers:
            server.close()
        sessions = list(self._sessions.values())
        spread = min(_RECONNECT_SPREAD_MS, 2 * len(sessions))
        for session in sessions:
            if session.key is not None:
                wait = random.randint(0, spread).to_bytes(4, "big")
                self.hub.send(session.client, _session.RESTARTING, wait + _RECONNECT_TRY_MS.to_bytes(4, "big"))
        self.flush_ready()
        for session in [*sessions, *self._pending]:
            session.end(_session.AWAY)
        if self._observer is not None:
            await asyncio.get_running_loop().run_in_executor(None, self._observer.close)
            self._observer = None
        until = asyncio.get_running_loop().time() + _CLOSE_PATIENCE
        while (self._sessions or self._pending) and asyncio.get_running_loop().time() < until:
            await asyncio.sleep(0.01)
        for session in [*self._sessions.values(), *self._pending]:
            session.abort()
        await asyncio.sleep(0)  # lets the transports report that they are gone


def _listeners(binds: tuple[str, ...]) -> list[socket.socket]:
    """Bind all of them; port 0 is one port that is free on all."""
    addresses = [split_address(bind) for bind in binds]
    for left in reversed(range(_PORT_TRIES)):
        listeners: list[socket.socket] = []
        chosen = 0
        try:
            for host, port in addresses:
                try:
                    listeners.append(_listen(host, port or chosen))
                except OSError as error:
                    if host == "::" and listeners and error.errno in (errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL):
                        log.warning("this host has no IPv6: not listening on [::]")
                        continue
                    raise
                chosen = chosen or (0 if port else listeners[-1].getsockname()[1])
            return listeners
        except OSError as error:
            for listener in listeners:
                listener.close()
            if error.errno != errno.EADDRINUSE or chosen == 0 or left == 0:
                raise
    raise AssertionError("unreachable")


def _listen(host: str, port: int) -> socket.socket:
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if listener.family == socket.AF_INET6:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise OSError(error.errno, f"cannot listen on TCP {join_address(host, port)}: {error.strerror}") from error
    return listener


def _own_address() -> str:
    """The address of the interface with the default route; connecting a UDP socket sends nothing."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
        except OSError:
            return "127.0.0.1"
        return str(probe.getsockname()[0])
