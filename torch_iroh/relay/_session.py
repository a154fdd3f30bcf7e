"""One connection of a relay: its request, its proof of who it is, then buffers to and from the hub.

    head --GET /relay--> websocket --signature--> confirmed --silent, stuck, rule broken, goodbye--> closed
      '--other request--> answered and closed

Python's work is per buffer that a socket gives or takes; packets are the hub's business (csrc/relay/hub.hpp).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import random
import re
import socket
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol, cast

from torch_iroh.relay import _auth, _http
from torch_iroh.relay._limits import TokenBucket
from torch_iroh.relay._metrics import CONTENT_TYPE

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch_iroh.relay._metrics import Metrics
    from torch_iroh.relay._options import RelayOptions

log = logging.getLogger("torch_iroh.relay")

# Types of messages (csrc/relay/hub.hpp has them all).
CHALLENGE, DENIED, PING, RESTARTING, STATUS = 0, 3, 9, 12, 13
_HEALTHY, _RATE_LIMITED = b"\x00", b"\x02"
POLICY = 1008  # close code: sent away
AWAY = 1001  # close code: this server ends

_PORTION = 128 * 1024  # as much as may lie in front of an answer that is in a hurry
# What the kernel may hold that it has not sent: it would be delay, and the hub could not drop it.
_UNSENT = 128 * 1024
_CLOSE_PATIENCE = 5.0
_SILENCE = 3  # keep-alive intervals
_CHALLENGE_TEXT = re.compile(r"[A-Za-z0-9._-]{1,64}")
_PROXY_FIELDS = ("forwarded", "x-forwarded-for", "x-real-ip", "via")


class Owner(Protocol):
    """What a session needs of its server."""

    options: RelayOptions
    access: _auth.Access
    metrics: Metrics
    hub: Any
    proved: Callable[[bytes, bytes], bytes]
    read_buffer: memoryview
    closing: bool

    def welcome(self, session: Session) -> bool:
        """Count a connection; False: there are too many that have not said what they want."""

    def admit(self, session: Session) -> bool:
        """Open a client for a session; False: there is no room."""

    def confirmed(self, session: Session, surplus: int | None) -> None:
        """Hear that a client has proved who it is; `surplus` is a session that has to go for it."""

    def flush_ready(self) -> None:
        """Write what the hub has queued."""

    def forget(self, session: Session) -> None:
        """Hear that the connection has ended."""

    def report(self, text: str) -> None:
        """Log why a connection was ended."""

    def metrics_text(self) -> str:
        """Return what ``/metrics`` says."""


class Session(asyncio.BufferedProtocol):
    """A connection, from its first byte to its last."""

    def __init__(self, owner: Owner, metrics_only: bool = False) -> None:
        self._owner = owner
        self._metrics_only = metrics_only
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport
        self._peer = "?"
        self._head: bytearray | None = bytearray()
        self._challenge = b""
        self._ending = False
        self._paused_since: float | None = None
        self._waiting = False  # its limit's time has not come yet
        self._told_to_slow_down = False
        self._throttled = False  # since the last ping
        self._bucket: TokenBucket | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._heard = self._loop.time()
        self._next_ping = 0.0
        self.client: int | None = None  # of the hub, from the upgrade on
        self.key: bytes | None = None  # once proved

    # ---- asyncio's side ----

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin to wait for a request."""
        self._transport = cast(asyncio.Transport, transport)  # that of uvloop is none by its class
        self._peer = str((transport.get_extra_info("peername") or ("?",))[0])
        if not self._owner.welcome(self):
            self.abort()
            return
        # Nothing is to wait here. Not 0: a TLS transport would pause at 0 bytes, and then nothing makes it resume.
        self._transport.set_write_buffer_limits(high=1)
        if hasattr(socket, "TCP_NOTSENT_LOWAT"):
            transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, _UNSENT)
        self._timer = self._loop.call_later(self._owner.options.handshake_timeout, self._on_slow)

    def get_buffer(self, sizehint: int) -> memoryview:
        """Lend the one buffer that all sessions read into: what is in it is used before the next read."""
        return self._owner.read_buffer

    def buffer_updated(self, nbytes: int) -> None:
        """Use what has come."""
        if self._ending:
            return
        data = self._owner.read_buffer[:nbytes]
        self._heard = self._loop.time()
        if self._head is not None:
            self._on_head(data)
        else:
            self._on_frames(data)

    def eof_received(self) -> bool:
        """Close our side too."""
        return False

    def pause_writing(self) -> None:
        """Leave what follows to the hub, which may drop it."""
        self._paused_since = self._loop.time()

    def resume_writing(self) -> None:
        """Go on with what the hub has."""
        self._paused_since = None
        self.flush()

    def connection_lost(self, exc: Exception | None) -> None:
        """Tell those who knew this client."""
        self._ending = True
        if self._timer is not None:
            self._timer.cancel()
        self._owner.forget(self)
        if exc is not None:
            log.debug("%s: connection lost: %s", self, exc)

    def __str__(self) -> str:
        return f"{self.key.hex()[:10]} ({self._peer})" if self.key else self._peer

    # ---- the request ----

    def _on_head(self, data: memoryview) -> None:
        assert self._head is not None
        self._head += data
        end = self._head.find(b"\r\n\r\n")
        if 0 <= end <= _http.MOST_HEAD:
            rest = bytes(self._head[end + 4 :])
            head = bytes(self._head[:end])
            self._head = None
            try:
                self._on_request(_http.parse(head), rest)
            except _http.Refusal as refusal:
                self._refuse(refusal)
        elif len(self._head) > _http.MOST_HEAD:
            self._refuse(_http.Refusal(431, f"a request's head of more than {_http.MOST_HEAD} bytes"))

    def _on_request(self, request: _http.Request, rest: bytes) -> None:
        if request.method not in ("GET", "HEAD"):
            raise _http.Refusal(405, "only GET is answered here", allow="GET, HEAD")
        if request.path == "/relay" and not self._metrics_only:
            return self._on_relay(request, rest)
        answer = self._plain(request)
        if answer is None:
            raise _http.Refusal(404, f"no {request.path[:100]} here: this is a relay for iroh endpoints")
        status, body, fields = answer
        self._answer(_http.response(status, body, **fields))

    def _plain(self, request: _http.Request) -> tuple[int, str, Mapping[str, str]] | None:
        if request.path == "/healthz":
            return (503, "closing\n", {}) if self._owner.closing else (200, "ok\n", {})
        if request.path == "/metrics" and self._may_see_metrics(request):
            return 200, self._owner.metrics_text(), {"content_type": CONTENT_TYPE}
        if self._metrics_only:
            return None
        if request.path == "/":
            return 200, "A relay for iroh endpoints (torch-iroh relay).\n", {}
        if request.path == "/ping":
            # How a client measures the way to its relays.
            return 200, "", {"access_control_allow_origin": "*"}
        if request.path == "/generate_204":
            challenge = request.fields.get("x-iroh-challenge", "")
            echo = {"x_iroh_response": f"response {challenge}"} if _CHALLENGE_TEXT.fullmatch(challenge) else {}
            return 204, "", echo
        return None

    def _may_see_metrics(self, request: _http.Request) -> bool:
        if self._metrics_only:
            return True
        if self._owner.options.metrics_bind is not None:
            return False
        here = self._peer.startswith("127.") or self._peer == "::1"
        return here and not any(name in request.fields for name in _PROXY_FIELDS)

    def _on_relay(self, request: _http.Request, rest: bytes) -> None:
        if not self._owner.access.allows(request.fields.get("authorization", "")):
            given = "authorization" in request.fields
            text = "this is not a token of this relay" if given else "this relay wants a token"
            raise _http.Refusal(401, text, www_authenticate="Bearer")
        answer = _http.upgrade(request)
        if self._owner.closing or not self._owner.admit(self):
            raise _http.Refusal(503, "this relay is full or closing: use another", retry_after="10")
        self._transport.write(answer)
        self._challenge = _auth.new_challenge()
        self._owner.hub.send(self.client, CHALLENGE, self._challenge)
        if rest:
            self._on_frames(memoryview(rest))
        self._owner.flush_ready()

    def _refuse(self, refusal: _http.Refusal) -> None:
        reason = {401: "token", 503: "full"}.get(refusal.status, "request")
        self._count(reason, str(refusal))
        self._answer(_http.response(refusal.status, f"{refusal}\n", **refusal.fields))

    def _answer(self, answer: bytes) -> None:
        self._head = None
        self._transport.write(answer)
        self._close()

    # ---- the websocket ----

    def _on_frames(self, data: memoryview) -> None:
        hello, leaves, violation = self._owner.hub.feed(self.client, data)
        if hello is not None and not leaves:
            self._on_proof(hello)
        if violation:
            self._count("protocol", violation)
        if leaves:
            self.end()
        elif self._bucket is not None:
            self._limit(len(data))
        self._owner.flush_ready()

    def _on_proof(self, body: bytes) -> None:
        try:
            key = self._owner.proved(self._challenge, body)
        except ValueError as error:
            self._count("proof", str(error))
            self._owner.hub.send(self.client, DENIED, _auth.denial(str(error)))
            self.end(POLICY)
            return
        if self._timer is not None:
            self._timer.cancel()
        self.key = key
        now = self._loop.time()
        rate = self._owner.options.client_rate
        if rate is not None:
            self._bucket = TokenBucket(rate, now)
        self._next_ping = now + random.uniform(0.5, 1) * self._owner.options.keepalive
        log.debug("%s: let in", self)
        self._owner.confirmed(self, self._owner.hub.confirm(self.client, key))

    def _limit(self, count: int) -> None:
        assert self._bucket is not None
        wait = self._bucket.take(count, self._loop.time())
        if wait <= 0 or self._waiting:
            return
        self._waiting = self._throttled = True
        self._owner.metrics.throttled += 1
        self._transport.pause_reading()
        self._loop.call_later(wait, self._go_on)
        if not self._told_to_slow_down:
            self._told_to_slow_down = True
            self._owner.hub.send(self.client, STATUS, _RATE_LIMITED)

    def _go_on(self) -> None:
        self._waiting = False
        self._heard = self._loop.time()
        if not self._transport.is_closing():
            self._transport.resume_reading()

    def flush(self) -> None:
        """Write what the hub has for this client, as much as the socket takes."""
        while self._paused_since is None and self.client is not None and not self._transport.is_closing():
            data = self._owner.hub.take(self.client, _PORTION)
            if not data:
                return
            self._transport.write(data)

    def tick(self, now: float) -> None:
        """Ping the client when it is time, and drop it when it is dead."""
        if self.key is None or self._ending:
            return
        patience = _SILENCE * self._owner.options.keepalive
        if not self._waiting and now - self._heard > patience:
            self._count("silent", f"nothing heard for {patience:.0f} s")
            self.abort()
        elif self._paused_since is not None and now - self._paused_since > patience:
            self._count("stuck", f"has read nothing for {patience:.0f} s")
            self.abort()
        elif now >= self._next_ping:
            self._next_ping = now + self._owner.options.keepalive
            self._owner.hub.send(self.client, PING, os.urandom(8))
            if self._told_to_slow_down and not self._throttled:
                self._told_to_slow_down = False
                self._owner.hub.send(self.client, STATUS, _HEALTHY)
            self._throttled = False

    # ---- the end ----

    def end(self, code: int | None = None) -> None:
        """Say goodbye with this close code (None: it is said already), and close when that is written."""
        if self._ending:
            return
        if code is not None and self.client is not None:
            self._owner.hub.send_close(self.client, code)
        self.flush()
        self._close()

    def _close(self) -> None:
        self._ending = True
        self._transport.close()
        if self._timer is not None:
            self._timer.cancel()
        # A client that does not read would keep it open.
        self._timer = self._loop.call_later(_CLOSE_PATIENCE, self.abort)

    def abort(self) -> None:
        """End without a word."""
        self._ending = True
        with contextlib.suppress(OSError):
            self._transport.abort()

    def _on_slow(self) -> None:
        if not self._ending:
            self._count("timeout", f"not ready after {self._owner.options.handshake_timeout:.0f} s")
            self.abort()

    def _count(self, reason: str, text: str) -> None:
        self._owner.metrics.refused[reason] += 1
        self._owner.report(f"{self}: {text}")
