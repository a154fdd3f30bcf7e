"""The HTTP/1.1 of a relay: one request at a connection's beginning, and the upgrade to a websocket. No sockets here."""

from __future__ import annotations

import base64
import binascii
import hashlib
import re
from dataclasses import dataclass

MOST_HEAD = 8192
PROTOCOL = "iroh-relay-v2"

_MOST_FIELDS = 64
_TOKEN = re.compile(rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_REASONS = {
    101: "Switching Protocols",
    200: "OK",
    204: "No Content",
    400: "Bad Request",
    401: "Unauthorized",
    403: "Forbidden",
    404: "Not Found",
    405: "Method Not Allowed",
    408: "Request Timeout",
    426: "Upgrade Required",
    431: "Request Header Fields Too Large",
    503: "Service Unavailable",
}


class Refusal(Exception):
    """An answer that is not what the client asked for."""

    def __init__(self, status: int, text: str, **fields: str) -> None:
        super().__init__(text)
        self.status = status
        self.fields = fields


@dataclass(frozen=True)
class Request:
    """A request's head; the names of its fields are in lower case, repeated fields are joined by commas."""

    method: str
    path: str
    fields: dict[str, str]

    def lists(self, name: str, value: str) -> bool:
        """Whether `value` is an element of a field, whatever its case."""
        return value.lower() in (part.strip().lower() for part in self.fields.get(name, "").split(","))


def parse(head: bytes) -> Request:
    """Read a head, without the empty line at its end.

    Raises:
        Refusal: it is none that HTTP/1.1 allows.
    """
    line, *lines = head.split(b"\r\n")
    parts = line.split(b" ")
    if len(parts) != 3 or parts[2] not in (b"HTTP/1.1", b"HTTP/1.0") or not parts[1].startswith(b"/"):
        raise Refusal(400, "this is no HTTP/1.1 request")
    if len(lines) > _MOST_FIELDS:
        raise Refusal(431, f"more than {_MOST_FIELDS} header fields")
    fields: dict[str, str] = {}
    for one in lines:
        name, colon, value = one.partition(b":")
        if not colon or not _TOKEN.fullmatch(name):
            raise Refusal(400, "a header field that is none")
        key, text = name.decode().lower(), value.strip(b" \t").decode("latin-1")
        fields[key] = f"{fields[key]}, {text}" if key in fields else text
    path = parts[1].partition(b"?")[0].decode("latin-1")
    return Request(parts[0].decode("latin-1"), path, fields)


def response(status: int, body: str = "", content_type: str = "text/plain; charset=utf-8", **fields: str) -> bytes:
    """Return a whole answer after which the connection is closed; `x_y` names the field x-y."""
    payload = body.encode()
    lines = [f"HTTP/1.1 {status} {_REASONS[status]}", "connection: close"]
    if status != 204:
        lines += [f"content-type: {content_type}", f"content-length: {len(payload)}"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in fields.items()]
    return "\r\n".join([*lines, "", ""]).encode("latin-1") + payload


def upgrade(request: Request) -> bytes:
    """Return the answer that makes the connection a websocket of iroh's relay protocol.

    Raises:
        Refusal: the client asks for something else.
    """
    if not request.lists("upgrade", "websocket") or not request.lists("connection", "upgrade"):
        raise Refusal(426, "this is a relay for iroh endpoints: it wants a websocket", upgrade="websocket")
    if request.fields.get("sec-websocket-version") != "13":
        raise Refusal(426, "only version 13 of websockets is spoken here", sec_websocket_version="13")
    if not request.lists("sec-websocket-protocol", PROTOCOL):
        raise Refusal(400, f"only {PROTOCOL} is spoken here (iroh 1.x)")
    key = request.fields.get("sec-websocket-key", "")
    try:
        if len(base64.b64decode(key, validate=True)) != 16:
            raise ValueError
    except (binascii.Error, ValueError):
        raise Refusal(400, "a Sec-WebSocket-Key that is none") from None
    # RFC 6455, section 1.3: this UUID proves that the server knows what a websocket is.
    digest = hashlib.sha1(key.encode() + b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11", usedforsecurity=False).digest()
    return (
        "HTTP/1.1 101 Switching Protocols\r\nupgrade: websocket\r\nconnection: Upgrade\r\n"
        f"sec-websocket-accept: {base64.b64encode(digest).decode()}\r\nsec-websocket-protocol: {PROTOCOL}\r\n\r\n"
    ).encode()
