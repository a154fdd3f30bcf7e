"""What the tests of the relay share: its process, clients written apart from it, hosts that reach only the relay."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import itertools
import json
import os
import queue
import re
import signal
import socket
import ssl
import struct
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import shaped
from blake3 import blake3
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

ROOT = Path(__file__).resolve().parents[2]
PEER = Path(__file__).with_name("relay_peer.py")
DEADLINE = 20.0
# Message types of iroh's relay protocol.
CHALLENGE, AUTH, CONFIRMED, DENIED = 0, 1, 2, 3
DATAGRAM_OUT, BATCH_OUT, DATAGRAM_IN, BATCH_IN = 4, 5, 6, 7
GONE, PING, PONG, RESTARTING, STATUS = 8, 9, 10, 12, 13


def eventually(condition: Callable[[], Any], deadline: float = DEADLINE) -> Any:
    """The first true value of `condition`."""
    until = time.monotonic() + deadline
    while True:
        value = condition()
        if value:
            return value
        assert time.monotonic() < until, f"not within {deadline:.0f} s"
        time.sleep(0.02)


def _environment(python_path: str = "") -> dict[str, str]:
    """That of a child, which looks for its packages in `python_path` first."""
    path = f"{python_path}:{ROOT}" if python_path else str(ROOT)
    return {**os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}


class Relay:
    """A `torch-iroh relay` in a process of its own."""

    def __init__(
        self,
        *arguments: str,
        namespace: str = "",
        bind: str = "127.0.0.1:0",
        observer: bool = False,
        python_path: str = "",
    ) -> None:
        command = [sys.executable, "-m", "torch_iroh", "relay", "--json", "--log-level", "debug", "--bind", bind]
        command += ["--observer-key", "none"] if observer else ["--no-observer"]
        command += arguments
        if namespace:
            command = ["ip", "netns", "exec", namespace, *command]
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=_environment(python_path), cwd=ROOT
        )
        self._log: list[str] = []
        self._reader = threading.Thread(target=self._read_log, daemon=True)
        self._reader.start()
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            self._reader.join(5)
            raise RuntimeError(f"the relay ended with {self.process.wait(5)}: {self.log}")
        self.told: dict[str, Any] = json.loads(line)
        self.url: str = self.told["relay"]
        self.address = ("127.0.0.1", int(self.told["listening"][0].rpartition(":")[2]))

    def _read_log(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self._log.append(line)

    @property
    def log(self) -> str:
        return "".join(self._log)

    def wait_for_log(self, text: str) -> None:
        """Wait until the log says `text`: it is read by a thread, later than what the relay prints for others."""
        try:
            eventually(lambda: text in self.log)
        except AssertionError:
            raise AssertionError(f"no {text!r} in the relay's log: {self.log}") from None

    def metrics(self) -> dict[str, float]:
        return parse_metrics(http_get(self.address, "/metrics")[1])

    def memory(self) -> int:
        """Resident bytes."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        match = re.search(r"VmRSS:\s+(\d+) kB", status)
        assert match
        return int(match[1]) * 1024

    def stop(self, number: int = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        try:
            return self.process.wait(DEADLINE)
        finally:
            self._reader.join(5)

    def __enter__(self) -> Relay:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        self._reader.join(5)
        for pipe in (self.process.stdout, self.process.stderr):
            if pipe is not None:
                pipe.close()


def parse_metrics(text: str) -> dict[str, float]:
    """Read the text format strictly: every sample belongs to a HELP and a TYPE before it."""
    values: dict[str, float] = {}
    helped: set[str] = set()
    typed: set[str] = set()
    assert text.endswith("\n")
    for line in text.splitlines():
        if line.startswith("# HELP "):
            name = line.split(" ")[2]
            assert name not in helped
            helped.add(name)
        elif line.startswith("# TYPE "):
            _, _, name, kind = line.split(" ")
            assert kind == ("counter" if name.endswith("_total") else "gauge"), line
            typed.add(name)
        else:
            match = re.fullmatch(r'([a-z_]+)(\{[a-z]+="[a-z_]+"\})? ([0-9.]+)', line)
            assert match, line
            assert match[1] in helped & typed, line
            values[match[1] + (match[2] or "")] = float(match[3])
    return values


def http_get(address: tuple[str, int], path: str, **fields: str) -> tuple[int, str]:
    request = urllib.request.Request(f"http://{address[0]}:{address[1]}{path}")
    for name, value in fields.items():
        request.add_header(name.replace("_", "-"), value)
    try:
        with urllib.request.urlopen(request, timeout=DEADLINE) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


class Closed(Exception):
    """The relay has closed; `code` of its websocket, if it said one."""

    def __init__(self, code: int | None) -> None:
        super().__init__(f"closed with {code}")
        self.code = code


class Client:
    """A relay client, written from the protocol and RFC 6455, that can also do what none should."""

    def __init__(
        self, address: tuple[str, int], *, seed: bytes | None = None, tls: ssl.SSLContext | None = None
    ) -> None:
        self.secret = Ed25519PrivateKey.from_private_bytes(seed or os.urandom(32))
        self.key = self.secret.public_key().public_bytes_raw()
        self.socket: socket.socket = socket.create_connection(address, timeout=DEADLINE)
        if tls is not None:
            self.socket = tls.wrap_socket(self.socket, server_hostname="localhost")
        self._received = b""

    def upgrade(self, token: str | None = None, **changes: str | None) -> str:
        """Ask for the websocket; the whole head of the answer."""
        fields: dict[str, str | None] = {
            "Host": "relay",
            "Upgrade": "websocket",
            "Connection": "Upgrade",
            "Sec-WebSocket-Key": base64.b64encode(os.urandom(16)).decode(),
            "Sec-WebSocket-Version": "13",
            "Sec-WebSocket-Protocol": "iroh-relay-v2, iroh-relay-v1",
            "Authorization": None if token is None else f"Bearer {token}",
        }
        fields.update({name.replace("_", "-"): value for name, value in changes.items()})
        lines = [f"{name}: {value}" for name, value in fields.items() if value is not None]
        self.socket.sendall("\r\n".join(["GET /relay HTTP/1.1", *lines, "", ""]).encode())
        while b"\r\n\r\n" not in self._received:
            self._more()
        head, _, self._received = self._received.partition(b"\r\n\r\n")
        text = head.decode()
        if " 101 " in text.splitlines()[0]:
            key = fields["Sec-WebSocket-Key"] or ""
            wanted = hashlib.sha1(key.encode() + b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11").digest()
            assert f"sec-websocket-accept: {base64.b64encode(wanted).decode()}" in text
            assert "sec-websocket-protocol: iroh-relay-v2" in text
        return text

    def proof(self, challenge: bytes) -> bytes:
        signed = blake3(challenge, derive_key_context="iroh-relay handshake v1 challenge signature").digest()
        return self.key + b"\x40" + self.secret.sign(signed)

    def join(self, token: str | None = None) -> Client:
        head = self.upgrade(token)
        assert " 101 " in head.splitlines()[0], head
        kind, challenge = self.receive()
        assert (kind, len(challenge)) == (CHALLENGE, 16)
        self.send(AUTH, self.proof(challenge))
        assert self.receive() == (CONFIRMED, b"")
        return self

    def send(self, kind: int, body: bytes) -> None:
        self.socket.sendall(frame(bytes([kind]) + body))

    def send_to(self, key: bytes, packet: bytes) -> None:
        self.send(DATAGRAM_OUT, key + b"\x00" + packet)

    def receive(self, *skipping: int) -> tuple[int, bytes]:
        """The next message whose type is not in `skipping`; raises Closed."""
        while True:
            opcode, payload = self._frame()
            if opcode == 8:
                raise Closed(struct.unpack("!H", payload[:2])[0] if payload else None)
            if opcode == 2 and payload[0] not in skipping:
                return payload[0], payload[1:]

    def wait_closed(self) -> int | None:
        """Read until the relay has closed, and return its close code."""
        try:
            while True:
                self.receive()
        except Closed as closed:
            return closed.code
        except OSError:
            return None

    def _frame(self) -> tuple[int, bytes]:
        self._need(2)
        size = self._received[1]
        begin = 2
        if size == 126:
            begin = 4
            self._need(begin)
            size = struct.unpack("!H", self._received[2:4])[0]
        elif size == 127:
            begin = 10
            self._need(begin)
            size = struct.unpack("!Q", self._received[2:10])[0]
        self._need(begin + size)
        opcode, payload = self._received[0] & 15, self._received[begin : begin + size]
        self._received = self._received[begin + size :]
        return opcode, payload

    def _need(self, count: int) -> None:
        while len(self._received) < count:
            self._more()

    def _more(self) -> None:
        data = self.socket.recv(1 << 18)
        if not data:
            raise Closed(None)
        self._received += data

    def close(self) -> None:
        self.socket.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def frame(payload: bytes, first: int = 0x82) -> bytes:
    """A masked frame of a client."""
    size = len(payload)
    head = bytes([first])
    if size < 126:
        head += bytes([0x80 | size])
    elif size < 65536:
        head += b"\xfe" + struct.pack("!H", size)
    else:
        head += b"\xff" + struct.pack("!Q", size)
    mask = os.urandom(4)
    repeated = (mask * (size // 4 + 1))[:size]
    masked = (int.from_bytes(payload, "big") ^ int.from_bytes(repeated, "big")).to_bytes(size, "big")
    return head + mask + masked


class Peer:
    """A process with one real iroh endpoint, which does as it is told (relay_peer.py)."""

    def __init__(
        self,
        relays: list[tuple[str, str | None]],
        *,
        namespace: str = "",
        bind: str = "127.0.0.1:0",
        alpn: str = "relay-test/1",
    ) -> None:
        command = [sys.executable, str(PEER), bind, json.dumps(relays), alpn]
        if namespace:
            command = ["ip", "netns", "exec", namespace, *command]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=_environment(), cwd=ROOT
        )
        self._answers: queue.Queue[str] = queue.Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self.id: str = self("id")

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._answers.put(line)
        self._answers.put("")

    def start(self, operation: str, *arguments: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps([operation, *arguments]) + "\n")
        self.process.stdin.flush()

    def result(self, deadline: float = 60) -> Any:
        line = self._answers.get(timeout=deadline)
        assert line, "the peer's process ended"
        value, error = json.loads(line)
        if error is not None:
            raise RuntimeError(error)
        return value

    def __call__(self, operation: str, *arguments: Any) -> Any:
        self.start(operation, *arguments)
        return self.result()

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        self._reader.join(5)
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()


_stars = itertools.count()
HUB = "10.79.255.1"  # the address of the middle host, the same for all


@contextlib.contextmanager
def star(hosts: int, bits_per_second: tuple[int, ...] = ()) -> Iterator[tuple[str, list[str]]]:
    """A namespace in the middle, which has the address HUB, and `hosts` namespaces that reach it and nothing else.

    `bits_per_second`: the rate of each host's link, in both directions; 0 is that of memory, and so is none.
    """
    prefix = f"ti{os.getpid()}n{next(_stars)}"
    middle = f"{prefix}m"
    names = [f"{prefix}s{host}" for host in range(hosts)]
    try:
        shaped._ip("netns", "add", middle)
        shaped._ip("-n", middle, "link", "set", "lo", "up")
        shaped._ip("-n", middle, "addr", "add", f"{HUB}/32", "dev", "lo")
        for host, name in enumerate(names):
            shaped._ip("netns", "add", name)
            shaped._ip("-n", name, "link", "set", "lo", "up")
            there, here = f"v{host}", "up0"
            shaped._ip("-n", middle, "link", "add", there, "type", "veth", "peer", "name", here, "netns", name)
            for namespace, device, last in ((middle, there, 1), (name, here, 2)):
                shaped._ip("-n", namespace, "addr", "add", f"10.79.{host}.{last}/24", "dev", device)
                shaped._ip("-n", namespace, "link", "set", device, "up")
                if any(bits_per_second[host : host + 1]):
                    limit = ["rate", str(bits_per_second[host]), "burst", "32k", "latency", "50ms"]
                    command = ["tc", "-n", namespace, "qdisc", "add", "dev", device, "root", "tbf", *limit]
                    subprocess.run(command, check=True, capture_output=True)
            shaped._ip("-n", name, "route", "add", f"{HUB}/32", "via", f"10.79.{host}.1")
        yield middle, names
    finally:
        for name in (*names, middle):
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)
