"""What a relay allows one client: who it may say it is, how much it may send and leave unread, how long it may take.

The clients are raw sockets (relay_support.Client), written apart from the server.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from relay_support import (
    AUTH,
    BATCH_IN,
    BATCH_OUT,
    CHALLENGE,
    DATAGRAM_IN,
    DATAGRAM_OUT,
    DENIED,
    GONE,
    PING,
    PONG,
    RESTARTING,
    STATUS,
    Client,
    Closed,
    Relay,
    eventually,
    frame,
    http_get,
    parse_metrics,
)

from torch_iroh._native import core_module
from torch_iroh.relay import _http
from torch_iroh.relay._limits import TokenBucket

REASONS = "silent", "timeout"
POLICY, PROTOCOL, TOO_BIG, AWAY = 1008, 1002, 1009, 1001


@pytest.fixture(scope="module")
def relay() -> Iterator[Relay]:
    with Relay() as made:
        yield made
        assert "Traceback" not in made.log


def join(relay: Relay, seed: bytes | None = None) -> Client:
    return Client(relay.address, seed=seed).join()


# ---- who a client is ----


def test_the_packets_of_a_key_go_to_who_has_proved_it(relay: Relay) -> None:
    with join(relay) as a, join(relay) as b:
        a.send(DATAGRAM_OUT, b.key + b"\x02hello")
        assert b.receive(PING) == (DATAGRAM_IN, a.key + b"\x02hello")
        b.send(BATCH_OUT, a.key + b"\x00\x00\x03abcdef")
        assert a.receive(PING) == (BATCH_IN, b.key + b"\x00\x00\x03abcdef")


def test_who_claims_the_key_of_another_is_denied_and_receives_nothing(relay: Relay) -> None:
    before = relay.metrics()['torch_iroh_relay_refused_total{reason="proof"}']
    with join(relay) as sender, Client(relay.address) as thief:
        victim = Client(relay.address)
        thief.upgrade()
        kind, challenge = thief.receive()
        assert kind == CHALLENGE
        # The victim's key with the thief's signature.
        thief.send(AUTH, victim.key + thief.proof(challenge)[32:])
        kind, text = thief.receive()
        assert (kind, text[0]) == (DENIED, len(text) - 1)
        assert b"signature" in text
        assert thief.wait_closed() == POLICY
        sender.send_to(victim.key, b"secret")
        victim.join()
        sender.send_to(victim.key, b"after")
        assert victim.receive(PING) == (DATAGRAM_IN, sender.key + b"\x00after")
        victim.close()
    assert relay.metrics()['torch_iroh_relay_refused_total{reason="proof"}'] == before + 1


def test_a_signature_is_good_for_one_challenge_only(relay: Relay) -> None:
    seed = os.urandom(32)
    with Client(relay.address, seed=seed) as heard, Client(relay.address, seed=seed) as replayed:
        heard.upgrade()
        _, challenge = heard.receive()
        replayed.upgrade()
        replayed.receive()
        replayed.send(AUTH, heard.proof(challenge))
        assert replayed.receive()[0] == DENIED


@pytest.mark.parametrize("length", [0, 96, 98])
def test_a_proof_of_another_form_is_denied(relay: Relay, length: int) -> None:
    with Client(relay.address) as client:
        client.upgrade()
        _, challenge = client.receive()
        client.send(AUTH, (client.proof(challenge) + b"x")[:length])
        assert client.receive() == (DENIED, b"\x27its proof of who it is has another form")
        assert client.wait_closed() == POLICY


def test_nothing_is_relayed_before_the_proof(relay: Relay) -> None:
    with join(relay) as target, Client(relay.address) as client:
        client.upgrade()
        client.receive()
        client.send_to(target.key, b"too early")
        assert client.wait_closed() == PROTOCOL
        target.send(PING, b"12345678")
        assert target.receive(PING) == (PONG, b"12345678")


def test_the_newer_of_two_with_one_key_receives_and_the_older_is_told(relay: Relay) -> None:
    seed = os.urandom(32)
    with join(relay) as sender, join(relay, seed) as older:
        with join(relay, seed) as newer:
            assert older.receive(PING) == (STATUS, b"\x01")
            sender.send_to(older.key, b"one")
            assert newer.receive(PING) == (DATAGRAM_IN, sender.key + b"\x00one")
        assert older.receive(PING) == (STATUS, b"\x00")
        sender.send_to(older.key, b"two")
        assert older.receive(PING) == (DATAGRAM_IN, sender.key + b"\x00two")


def test_many_sessions_of_one_key_push_out_the_oldest(relay: Relay) -> None:
    seed = os.urandom(32)
    clients = [join(relay, seed) for _ in range(6)]
    assert [client.wait_closed() for client in clients[:2]] == [POLICY, POLICY]
    clients[-1].send(PING, b"12345678")
    assert clients[-1].receive(PING, STATUS) == (PONG, b"12345678")
    for client in clients:
        client.close()


def test_who_exchanged_packets_hears_that_the_other_has_gone(relay: Relay) -> None:
    with join(relay) as sent, join(relay) as received, join(relay) as neither:
        leaver = join(relay)
        sent.send_to(leaver.key, b"x")
        assert leaver.receive(PING)[0] == DATAGRAM_IN
        leaver.send_to(received.key, b"x")
        assert received.receive(PING)[0] == DATAGRAM_IN
        leaver.close()
        assert sent.receive(PING) == (GONE, leaver.key)
        assert received.receive(PING) == (GONE, leaver.key)
        neither.send(PING, b"12345678")
        assert neither.receive(PING) == (PONG, b"12345678")


# ---- how much ----


def test_who_sends_too_fast_is_read_more_slowly_and_told() -> None:
    rate = 2e6
    with Relay("--client-rate", "16Mbit") as relay, join(relay) as fast, join(relay) as target:
        count, size = 60, 50_000
        begin = time.monotonic()
        received = 0
        sender = socket.fromfd(fast.socket.fileno(), socket.AF_INET, socket.SOCK_STREAM)
        sender.settimeout(60)
        data = b"".join(frame(bytes([DATAGRAM_OUT]) + target.key + b"\x00" + bytes(size)) for _ in range(count))
        thread = threading.Thread(target=sender.sendall, args=(data,))
        thread.start()
        while received < count:
            kind, body = target.receive(PING)
            assert (kind, len(body)) == (DATAGRAM_IN, 33 + size)
            received += 1
        thread.join()
        took = time.monotonic() - begin
        sender.close()
        # Not one is lost, and they took at least the time that the rate allows after the first burst.
        assert took >= (count * size - 256 * 1024) / rate * 0.9
        assert fast.receive(PING) == (STATUS, b"\x02")
        assert relay.metrics()["torch_iroh_relay_throttled_total"] >= 1


def test_a_receiver_that_does_not_read_costs_a_bounded_buffer_and_loses_the_oldest() -> None:
    cap = 256 * 1024
    with Relay("--client-buffer", "256Ki") as relay, join(relay) as sender, Client(relay.address) as slow:
        slow.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 16 * 1024)
        slow.join()
        size, count = 1200, 40_000
        before = relay.memory()
        for number in range(count):
            sender.send_to(slow.key, number.to_bytes(4, "big") + bytes(size))
        sender.send(PING, b"12345678")
        assert sender.receive(PING) == (PONG, b"12345678")
        metrics = relay.metrics()
        assert 0 < metrics["torch_iroh_relay_queued_bytes"] <= cap
        dropped = metrics['torch_iroh_relay_dropped_messages_total{reason="slow_receiver"}']
        assert dropped > 0
        assert relay.memory() - before < 32 << 20
        numbers = []
        slow.socket.settimeout(1.0)
        with pytest.raises(TimeoutError):
            while True:
                kind, body = slow.receive(PING)
                assert kind == DATAGRAM_IN
                numbers.append(int.from_bytes(body[33:37], "big"))
        assert len(numbers) == count - dropped
        assert numbers == sorted(numbers)
        assert numbers[-1] == count - 1  # the newest is there
        assert metrics["torch_iroh_relay_relayed_messages_total"] == count


def test_no_more_clients_than_allowed_and_room_again_when_one_leaves() -> None:
    with Relay("--max-clients", "2") as relay, join(relay), join(relay) as leaver:
        with Client(relay.address) as third:
            assert " 503 " in third.upgrade()
        leaver.close()
        eventually(lambda: relay.metrics()["torch_iroh_relay_sessions"] == 1)
        join(relay).close()


# ---- how long ----


SHORT_TIMES = """
import asyncio
from torch_iroh.relay import RelayOptions, RelayServer
async def main():
    server = RelayServer(RelayOptions(bind=("127.0.0.1:0",), observer=None, keepalive=1.5, handshake_timeout=1.0))
    await server.start()
    print(server.port, flush=True)
    await asyncio.sleep(600)
asyncio.run(main())
"""


def test_dead_and_slow_clients_are_dropped_and_those_that_answer_are_kept() -> None:
    # The command has no option for these times; the server object has.
    with subprocess.Popen([sys.executable, "-c", SHORT_TIMES], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            address = ("127.0.0.1", int(process.stdout.readline()))
            with (
                Client(address).join() as dead,
                Client(address).join() as alive,
                Client(address) as loris,
                Client(address) as half,
            ):
                half.upgrade()
                loris.socket.sendall(b"GET /relay HTTP/1.1\r\n")

                def ended() -> bool:
                    kind, body = alive.receive()
                    if kind == PING:
                        alive.send(PONG, body)
                    # A slow loris: one more field each time, and never the end of the request.
                    with contextlib.suppress(OSError):
                        loris.socket.sendall(b"x: y\r\n")
                    metrics = parse_metrics(http_get(address, "/metrics")[1])
                    refused = [metrics[f'torch_iroh_relay_refused_total{{reason="{why}"}}'] for why in REASONS]
                    return refused == [1, 2]

                eventually(ended, 60)
                for client in (loris, half, dead):
                    assert client.wait_closed() is None
                alive.send(PING, b"12345678")
                assert alive.receive(PING) == (PONG, b"12345678")
        finally:
            process.kill()


def test_at_the_end_clients_are_told_to_come_back() -> None:
    with Relay() as relay, join(relay) as client:
        assert relay.stop() == 0
        kind, body = client.receive(PING)
        assert kind == RESTARTING
        assert int.from_bytes(body[:4], "big") <= 2000
        assert int.from_bytes(body[4:], "big") == 5000
        with pytest.raises(Closed) as closed:
            client.receive()
        assert closed.value.code == AWAY


# ---- HTTP ----


def test_plain_requests_are_answered(relay: Relay) -> None:
    assert http_get(relay.address, "/ping") == (200, "")
    assert http_get(relay.address, "/healthz") == (200, "ok\n")
    assert http_get(relay.address, "/nothing")[0] == 404
    assert http_get(relay.address, "/relay")[0] == 426
    with socket.create_connection(relay.address) as plain:
        plain.sendall(b"GET /generate_204 HTTP/1.1\r\nX-Iroh-Challenge: ts_example.org\r\n\r\n")
        answer = plain.makefile("rb").read()
    assert answer.startswith(b"HTTP/1.1 204 ")
    assert b"x-iroh-response: response ts_example.org\r\n" in answer


def test_metrics_are_for_this_host_and_not_for_who_comes_through_a_proxy(relay: Relay) -> None:
    before = relay.metrics()
    with join(relay) as a, join(relay) as b:
        a.send_to(b.key, bytes(100))
        b.receive(PING)
        after = relay.metrics()
    assert after["torch_iroh_relay_relayed_bytes_total"] == before["torch_iroh_relay_relayed_bytes_total"] + 100
    assert after["torch_iroh_relay_confirmed_total"] == before["torch_iroh_relay_confirmed_total"] + 2
    assert http_get(relay.address, "/metrics", X_Forwarded_For="192.0.2.1")[0] == 404


def test_metrics_may_have_a_listener_of_their_own() -> None:
    with Relay("--metrics-bind", "127.0.0.1:0") as relay:
        assert http_get(relay.address, "/metrics")[0] == 404
        port = int(relay.told["metrics"].rpartition(":")[2])
        assert "torch_iroh_relay_sessions 0" in http_get(("127.0.0.1", port), "/metrics")[1]
        assert http_get(("127.0.0.1", port), "/relay")[0] == 404


@pytest.mark.parametrize(
    ("request_bytes", "status"),
    [
        (b"POST /relay HTTP/1.1\r\n\r\n", 405),
        (b"GET relay HTTP/1.1\r\n\r\n", 400),
        (b"GET /relay HTTP/2\r\n\r\n", 400),
        (b"GET /relay HTTP/1.1\r\nno field\r\n\r\n", 400),
        (b"\x16\x03\x01\x02\x00\x01\x00\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * 100 + b"\r\n", 431),
        (b"GET / HTTP/1.1\r\na: " + b"b" * 9000, 431),
    ],
)
def test_a_request_that_is_none_is_answered_and_closed(relay: Relay, request_bytes: bytes, status: int) -> None:
    with socket.create_connection(relay.address, timeout=10) as plain:
        plain.sendall(request_bytes)
        assert plain.makefile("rb").read().startswith(b"HTTP/1.1 %d " % status)


@pytest.mark.parametrize(
    ("changes", "status"),
    [
        ({"Sec_WebSocket_Version": "12"}, 426),
        ({"Sec_WebSocket_Protocol": "iroh-relay-v1"}, 400),
        ({"Sec_WebSocket_Protocol": None}, 400),
        ({"Sec_WebSocket_Key": "short"}, 400),
        ({"Sec_WebSocket_Key": None}, 400),
        ({"Upgrade": "h2c"}, 426),
        ({"Connection": "close"}, 426),
    ],
)
def test_another_upgrade_is_refused(relay: Relay, changes: dict[str, str | None], status: int) -> None:
    with Client(relay.address) as client:
        assert f" {status} " in client.upgrade(**changes)


def test_upgrade_as_the_example_of_rfc_6455() -> None:
    request = _http.parse(
        b"GET /relay HTTP/1.1\r\nHost: example.org\r\nUpgrade: websocket\r\nConnection: keep-alive, Upgrade\r\n"
        b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n"
        b"Sec-WebSocket-Protocol: iroh-relay-v2"
    )
    assert b"sec-websocket-accept: s3pPLMBiTxaQ9kYGzzhZRbK+xOo=\r\n" in _http.upgrade(request)


def test_a_request_in_single_bytes_is_one_request(relay: Relay) -> None:
    with socket.create_connection(relay.address, timeout=10) as plain:
        plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for byte in b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n":
            plain.sendall(bytes([byte]))
        assert plain.makefile("rb").read().endswith(b"\r\n\r\nok\n")


# ---- hostile bytes ----


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.binary(max_size=400))
def test_any_head_is_a_request_or_a_refusal(head: bytes) -> None:
    try:
        request = _http.parse(head)
        _http.upgrade(request)
    except _http.Refusal as refusal:
        assert refusal.status in (400, 426, 431)


MESSAGES = st.tuples(
    st.sampled_from([0x82, 0x82, 0x82, 0x02, 0x00, 0x80, 0x89, 0x8A, 0x81, 0x88]),
    st.integers(0, 15),
    st.binary(max_size=200),
)


@settings(max_examples=300, deadline=None)
@given(st.lists(MESSAGES, max_size=8), st.lists(st.tuples(st.integers(0, 4000), st.integers(0, 255)), max_size=4))
def test_any_frames_leave_the_hub_whole(messages: list[tuple[int, int, bytes]], changes: list[tuple[int, int]]) -> None:
    hub = core_module().RelayHub(65536, 1)
    clients = [hub.open(), hub.open()]
    for number, client in enumerate(clients):
        hub.confirm(client, bytes([number]) * 32)
    data = bytearray(
        b"".join(
            frame(bytes([kind]) + (bytes([1]) * 32 if kind in (4, 5) else b"") + body, first)
            for first, kind, body in messages
        )
    )
    for at, value in changes:
        if at < len(data):
            data[at] = value
    _, leaves, violation = hub.feed(clients[0], data)
    assert leaves or not violation
    assert hub.take_ready()
    for client in clients:
        while hub.take(client, 1000):
            pass
        hub.close(client)
    assert hub.counters()["clients"] == hub.counters()["endpoints"] == hub.counters()["queued_bytes"] == 0


def test_garbage_on_the_wire_ends_its_connection_and_no_other(relay: Relay) -> None:
    with join(relay) as bystander:
        for garbage in (os.urandom(5000), bytes(5000), b"\xff" * 5000, frame(b"\x04" + bytes(70_000))):
            with join(relay) as client:
                client.socket.sendall(garbage)
                assert client.wait_closed() in (PROTOCOL, TOO_BIG, None)
        bystander.send(PING, b"12345678")
        assert bystander.receive(PING) == (PONG, b"12345678")


def test_a_flood_of_refusals_does_not_fill_the_log() -> None:
    with Relay() as relay:
        for _ in range(300):
            with Client(relay.address) as client:
                assert " 400 " in client.upgrade(Sec_WebSocket_Key=None)
        relay.wait_for_log("more connections were ended")
        assert relay.log.count("a Sec-WebSocket-Key that is none") < 300
        assert relay.metrics()['torch_iroh_relay_refused_total{reason="request"}'] == 300


def test_a_bucket_allows_its_rate_on_average_and_a_burst_at_once() -> None:
    bucket = TokenBucket(1e6, 0.0)
    assert bucket.take(256 * 1024, 0.0) == 0
    assert bucket.take(500_000, 0.0) == pytest.approx(0.5)
    assert bucket.take(0, 0.5) == pytest.approx(0)
    assert bucket.take(1_000_000, 100.0) == pytest.approx((1_000_000 - 256 * 1024) / 1e6)
