"""Each NAT kind is what its definition says, seen by UDP sockets from two public addresses with two ports each."""

from __future__ import annotations

import itertools
from contextlib import ExitStack

import pytest
from lab_probes import SILENCE, Probe, reaches, receive, tcp

PUNCHING = ("full", "port", "symmetric")


@pytest.mark.parametrize("nat", ["full", "port", "symmetric"])
def test_mapping_and_filtering(nat_pair, nat):
    lab = nat_pair(nat, "port")
    with ExitStack() as stack:
        anna = stack.enter_context(Probe(lab["anna"]))
        public = [stack.enter_context(Probe(lab[name])) for name in ("pub", "pub", "pub2", "pub2")]
        known, same_host, other_host, _ = public
        mapped = anna.seen_from(known)
        assert mapped[0] == lab["anna"].address != lab["anna"].own_address

        for stranger in (same_host, other_host):
            stranger.send("knock", mapped)
            assert (anna.hears(SILENCE) is not None) == (nat == "full"), stranger.where
        known.send("answer", mapped)
        assert anna.hears() == ("answer", known.where)

        ports = {mapped} | {anna.seen_from(probe) for probe in public}
        assert len(ports) == (len(public) if nat == "symmetric" else 1)


@pytest.mark.parametrize(("first", "second"), list(itertools.combinations_with_replacement(PUNCHING, 2)))
def test_hole_punching_succeeds_where_theory_allows(nat_pair, first, second):
    """Both send to where the other was seen by a third: all that a program without a relay can do."""
    lab = nat_pair(first, second)
    possible = "full" in (first, second) or (first, second) == ("port", "port")
    with Probe(lab["anna"]) as anna, Probe(lab["bert"]) as bert, Probe(lab["pub"]) as pub:
        places = {anna: bert.seen_from(pub), bert: anna.seen_from(pub)}
        heard: set[Probe] = set()
        for _ in range(5):
            for probe in (anna, bert):
                probe.send("punch", places[probe])
            for probe in (anna, bert):
                found = probe.hears(SILENCE / 3)
                if found is not None:
                    heard.add(probe)
                    places[probe] = found[1]  # a symmetric NAT shows its port here only
        assert heard == ({anna, bert} if possible else set())


def test_udp_blocked_lets_tcp_through_and_no_udp(nat_pair):
    lab = nat_pair("udp-blocked", "port")
    with Probe(lab["anna"]) as anna, Probe(lab["pub"]) as pub:
        anna.send("lost", pub.where)
        assert pub.hears_nothing()
    near, far = tcp(lab["anna"], lab["pub"])
    with near, far:
        assert far.getpeername()[0] == lab["anna"].address
        near.sendall(b"through")
        assert receive(far, 7) == b"through"


@pytest.mark.parametrize("nat", ["port", "symmetric", "udp-blocked"])
def test_tcp_from_outside_is_not_let_in(nat_pair, nat):
    lab = nat_pair(nat, "port")
    done = lab["pub"].run(
        ["bash", "-c", f"exec timeout 0.5 bash -c '</dev/tcp/{lab['anna'].address}/22'"], check=False, timeout=10
    )
    assert done.returncode == 124, "silence, not a refusal"


def test_rebind_gives_another_port_that_is_one_again(nat_pair):
    lab = nat_pair("port", "port")
    with Probe(lab["anna"]) as anna, Probe(lab["pub"]) as pub, Probe(lab["pub2"]) as pub2:
        old = anna.seen_from(pub)
        seen = [old]
        for _ in range(3):
            lab["anna"].rebind()
            pub.send("lost", seen[-1])
            assert anna.hears_nothing(), "the old mapping still leads in"
            new = anna.seen_from(pub)
            assert new[0] == old[0] and new not in seen
            assert anna.seen_from(pub2) == new
            seen.append(new)


def test_move_gives_another_address(nat_pair):
    lab = nat_pair("port", "port")
    with Probe(lab["anna"]) as anna, Probe(lab["pub"]) as pub:
        old = anna.seen_from(pub)
        address = lab["anna"].move()
        pub.send("lost", old)
        assert anna.hears_nothing()
        new = anna.seen_from(pub)
        assert new[0] == address == lab["anna"].address != old[0]
        pub.send("answer", new)
        assert anna.hears() is not None


def test_nat_kind_changes_while_it_runs(nat_pair):
    lab = nat_pair("port", "port")
    with Probe(lab["anna"]) as anna, Probe(lab["pub"]) as pub, Probe(lab["pub2"]) as pub2:
        assert anna.seen_from(pub) == anna.seen_from(pub2)
        lab["anna"].set_nat("symmetric")
        assert anna.seen_from(pub) != anna.seen_from(pub2)
        lab["anna"].set_nat("udp-blocked")
        anna.send("lost", pub.where)
        assert pub.hears_nothing()
        lab["anna"].set_nat("full")
        assert reaches(anna, pub)
