"""The relay with real iroh endpoints in processes of their own, on hosts that reach nothing but the relay."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import shaped
import torch
import torch.distributed as dist
from ranks import run_ranks
from relay_support import HUB, Peer, Relay, eventually, star

import torch_iroh

pytestmark = pytest.mark.skipif(bool(shaped.obstacle()), reason=shaped.obstacle())

BIND = "0.0.0.0:0"
MESSAGE = "through the relay"


@pytest.fixture(scope="module")
def hosts() -> Iterator[tuple[str, list[str]]]:
    with star(2) as made:
        yield made


def url_of(relay: Relay) -> str:
    return f"http://{HUB}:{relay.address[1]}"


def connect(dialer: Peer, listener: Peer, url: str) -> None:
    listener.start("accept")
    dialer("connect", listener.id, url)
    assert listener.result() == dialer.id


def say(sender: Peer, receiver: Peer, text: str = MESSAGE) -> None:
    sender("write", text)
    assert receiver("read", len(text)) == text


def test_two_that_know_only_the_relay_exchange_bytes(hosts: tuple[str, list[str]]) -> None:
    middle, (left, right) = hosts
    with Relay(namespace=middle, bind=BIND) as relay:
        url = url_of(relay)
        with Peer([(url, None)], namespace=left, bind=BIND) as a, Peer([(url, None)], namespace=right, bind=BIND) as b:
            a("online")
            b("online")
            connect(a, b, url)
            say(a, b)
            say(b, a)
            count = 4 << 20
            b.start("transfer", count, count)
            a("transfer", count, count)
            b.result()
            paths = a("paths")
            assert [path[:3] for path in paths] == [[f"{url}/", True, True]]
        assert relay.stop() == 0
        assert "Traceback" not in relay.log


def test_each_may_have_another_relay(hosts: tuple[str, list[str]]) -> None:
    middle, (left, right) = hosts
    with Relay(namespace=middle, bind=BIND) as one, Relay(namespace=middle, bind=BIND) as two:
        both: list[tuple[str, str | None]] = [(url_of(one), None), (url_of(two), None)]
        with (
            Peer(both[:1], namespace=left, bind=BIND) as a,
            Peer(both[1:], namespace=right, bind=BIND) as b,
            Peer(both, namespace=right, bind=BIND) as c,
        ):
            for peer in (a, b, c):
                peer("online")
            assert a("relay_url") == f"{both[0][0]}/"
            # The dialer goes to the relay where its peer is at home, though it is none of its own.
            connect(a, b, b("relay_url"))
            say(a, b)
            connect(a, c, c("relay_url"))
            say(c, a)


def test_a_token_is_wanted_where_there_is_one(hosts: tuple[str, list[str]], tmp_path: Path) -> None:
    middle, (left, right) = hosts
    tokens = tmp_path / "tokens"
    tokens.write_text("first-token\nsecond-token\n")
    with Relay("--token-file", str(tokens), namespace=middle, bind=BIND) as relay:
        url = url_of(relay)
        with (
            Peer([(url, "first-token")], namespace=left, bind=BIND) as a,
            Peer([(url, "second-token")], namespace=right, bind=BIND) as b,
            Peer([(url, "another-token")], namespace=right, bind=BIND) as wrong,
            Peer([(url, None)], namespace=right, bind=BIND) as none,
        ):
            a("online")
            b("online")
            connect(a, b, url)
            say(a, b)
            for refused in (wrong, none):
                with pytest.raises(RuntimeError, match="TimeoutError"):
                    refused("online", 1.0)
        relay.wait_for_log("this is not a token of this relay")
        relay.wait_for_log("this relay wants a token")
        for token in ("first-token", "second-token", "another-token"):
            assert token not in relay.log


def test_endpoints_that_the_relay_slows_down_lose_nothing(hosts: tuple[str, list[str]]) -> None:
    middle, (left, right) = hosts
    with Relay("--client-rate", "16Mbit", namespace=middle, bind=BIND) as relay:
        url = url_of(relay)
        with Peer([(url, None)], namespace=left, bind=BIND) as a, Peer([(url, None)], namespace=right, bind=BIND) as b:
            a("online")
            b("online")
            connect(a, b, url)
            count = 4 << 20
            b.start("transfer", 0, count)
            took, _ = a("transfer_watched", count, 0, 1, 60.0)
            b.result()
            # What is under way when the last byte is handed over: QUIC's windows, and the first burst.
            assert took > (count - (3 << 20)) / 2e6
            say(b, a)
            assert relay.log.count("let in") == 2  # both kept their connection


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_connection_outlives_a_restart_of_the_relay(hosts: tuple[str, list[str]], number: int) -> None:
    middle, (left, right) = hosts
    with Relay(namespace=middle, bind=BIND) as relay:
        url = url_of(relay)
        bind = f"0.0.0.0:{relay.address[1]}"
        with Peer([(url, None)], namespace=left, bind=BIND) as a, Peer([(url, None)], namespace=right, bind=BIND) as b:
            a("online")
            b("online")
            connect(a, b, url)
            say(a, b)
            assert relay.stop(number) == (0 if number == signal.SIGTERM else -number)
            with Relay(namespace=middle, bind=bind) as again:
                say(a, b, "after the restart")
                say(b, a, "and back")
                eventually(lambda: again.log.count("let in") == 2)


def train(rank: int, names: list[str], store: str, url: str) -> list[str]:
    shaped.enter(names[rank])
    os.environ.update(TORCH_IROH_BIND=BIND, TORCH_IROH_RELAY=url, TORCH_IROH_PROBE="off")
    dist.init_process_group(
        "iroh", store=dist.FileStore(store, 2), rank=rank, world_size=2, timeout=timedelta(seconds=60)
    )
    for size in (1, 1000, 1 << 20):
        tensor = torch.full((size,), float(rank + 1))
        dist.all_reduce(tensor)
        assert torch.all(tensor == 3)
    paths = [peer.path for peer in torch_iroh.stats().peers]
    dist.barrier()  # whoever leaves first ends the other's connection
    dist.destroy_process_group()
    return paths


def test_ranks_that_reach_only_the_relay_reduce_through_it(hosts: tuple[str, list[str]], tmp_path: Path) -> None:
    middle, names = hosts
    with Relay(namespace=middle, bind=BIND) as relay:
        url = url_of(relay)
        outcomes = run_ranks(train, 2, names, str(tmp_path / "store"), url, deadline=60)
        assert [outcome.error or outcome.value for outcome in outcomes] == [[f"relay {url}/"]] * 2


def test_an_endpoint_that_is_killed_and_comes_back_is_reached_again(hosts: tuple[str, list[str]]) -> None:
    middle, (left, right) = hosts
    with Relay(namespace=middle, bind=BIND) as relay:
        url = url_of(relay)
        with Peer([(url, None)], namespace=left, bind=BIND) as a:
            a("online")
            for _ in range(2):
                with Peer([(url, None)], namespace=right, bind=BIND) as b:
                    b("online")
                    connect(a, b, url)
                    say(a, b)
        eventually(lambda: relay.log.count("let in") == 3)


def test_the_observer_says_so_when_the_address_of_a_peer_changes() -> None:
    with star(1) as (middle, (name,)), Relay(namespace=middle, bind=BIND, observer=True) as relay:
        observer = f"{relay.told['observer'].partition('@')[0]}@{HUB}:{relay.address[1]}"
        with Peer([], namespace=name, bind=BIND, alpn="torch-iroh/observe/1") as peer:
            peer("observe", observer)
            assert peer("read", 64).startswith("10.79.0.2:")
            for change in (["del", "10.79.0.2/24"], ["add", "10.79.0.77/24"]):
                shaped._ip("-n", name, "addr", change[0], change[1], "dev", "up0")
            shaped._ip("-n", name, "route", "add", f"{HUB}/32", "via", "10.79.0.1")
            assert peer("read", 64).startswith("10.79.0.77:")
