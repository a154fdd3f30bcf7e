"""What a link of the laboratory does is what was asked of it. Figures are compared as ratios and with wide margins."""

from __future__ import annotations

import math
import re
import socket
import threading
import time
from pathlib import Path

import pytest
from lab_probes import PATIENCE, Probe, reaches, receive, round_trips, tcp, tcp_megabits

from torch_iroh.lab import LabError

UDP_SEGMENT = 103


def test_round_trip_is_twice_the_delay(routable_pair):
    lab = routable_pair(delay=40)
    with Probe(lab["one"]) as one, Probe(lab["two"]) as two:
        times = round_trips(one, two, 10)
        assert min(times) >= 0.080
        assert min(times) < 0.080 * 1.3
        lab.link("one", "two", delay=10)  # while it runs, and for this pair only
        assert 0.020 <= min(round_trips(one, two, 10)) < 0.020 * 2


def test_pair_is_stronger_than_region_and_region_than_all(make_lab):
    lab = make_lab(delay=60)
    for name, region in (("a1", "asia"), ("a2", "asia"), ("e1", "europe"), ("e2", "europe")):
        lab.host(name, region=region)
    lab.link("asia", "asia", delay=5)
    lab.link("a1", "e1", delay=30)
    want = {("a1", "a2"): 10, ("a1", "e1"): 60, ("a2", "e1"): 120, ("e1", "e2"): 120}
    for (first, second), milliseconds in want.items():
        with Probe(lab[first]) as near, Probe(lab[second]) as far:
            assert milliseconds <= min(round_trips(near, far, 3)) * 1000 < milliseconds + 20, (first, second)


def test_one_way_rule_leaves_the_other_way_alone(routable_pair):
    lab = routable_pair()
    lab.link("one", "two", delay=50, one_way=True)
    with Probe(lab["one"]) as one, Probe(lab["two"]) as two:
        assert 0.050 <= min(round_trips(one, two, 3)) < 0.090


@pytest.mark.parametrize("reorder", [False, True])
def test_jitter_reorders_only_when_asked(routable_pair, reorder):
    lab = routable_pair(jitter=20)
    lab.link("one", "two", reorder=reorder)
    with Probe(lab["one"]) as one, Probe(lab["two"]) as two:
        for number in range(200):
            one.send(str(number), two.where)
        heard = [two.hears() for _ in range(200)]
    numbers = [int(text) for text, _ in filter(None, heard)]
    assert sorted(numbers) == list(range(200))
    assert (numbers != sorted(numbers)) == reorder


def test_tcp_reaches_the_rate_and_not_more(routable_pair):
    lab = routable_pair(rate=10, queue=200, delay=5)
    slow = tcp_megabits(lab["one"], lab["two"], 1_000_000)
    lab.rate("one", up=40)
    lab.rate("two", down=40)
    fast = tcp_megabits(lab["one"], lab["two"], 4_000_000)
    # 1448 of 1538 bytes on the line are payload.
    assert 0.6 * 10 < slow < 10
    assert 0.6 * 40 < fast < 40
    assert 3 < fast / slow < 5


def test_narrower_end_of_the_way_decides(routable_pair):
    lab = routable_pair(queue=200)
    lab.rate("two", down=10)
    assert 6 < tcp_megabits(lab["one"], lab["two"], 1_000_000) < 10
    lab.rate("two", down=0)
    lab.rate("one", up=10)
    assert 6 < tcp_megabits(lab["one"], lab["two"], 1_000_000) < 10


def test_full_queue_drops_and_counts(routable_pair):
    lab = routable_pair(rate=1, queue=50)
    with Probe(lab["one"]) as one, Probe(lab["two"]) as two:
        for _ in range(100):  # 120 kB at once into a line that takes 6 in 50 ms
            one.socket.sendto(bytes(1200), two.where)
        while two.hears(0.5):
            pass
    counters = lab.counters()["one"]
    arrived = lab.traffic()["one", "two"].packets
    assert counters["up_dropped"] + arrived >= 100
    assert 5 <= arrived < 20


@pytest.mark.parametrize("ipv6", [False, True])
def test_loss_is_per_packet_also_inside_super_frames(routable_pair, ipv6):
    """Each sendto is 40 packets for the kernel to cut; what arrives is whole packets, and as many as were not lost."""
    percent, segments, sends = 5.0, 40, 250
    lab = routable_pair(loss=percent, ipv6=ipv6)
    seen: list[int] = []
    with Probe(lab["one"], ipv6=ipv6) as one, Probe(lab["two"], ipv6=ipv6) as two:
        one.socket.setsockopt(socket.SOL_UDP, UDP_SEGMENT, 100)
        two.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4 << 20)
        two.socket.settimeout(0.5)
        to = (lab["two"].address6 if ipv6 else lab["two"].address, two.port)

        def listen() -> None:
            while True:
                try:
                    data = two.socket.recv(2000)
                except TimeoutError:
                    return
                assert len(data) == 100
                assert len(set(data[4:])) == 1
                seen.append(int.from_bytes(data[:4], "big"))

        listener = threading.Thread(target=listen)
        listener.start()
        for send in range(sends):
            numbers = range(send * segments, (send + 1) * segments)
            one.socket.sendto(b"".join(n.to_bytes(4, "big") + bytes([n % 251]) * 96 for n in numbers), to)
            time.sleep(0.002)  # the receiver is slower than the link
        listener.join()
    lost = lab.counters()["one"]["lost"]
    count = segments * sends
    expected = count * percent / 100
    assert abs(lost - expected) < 5 * math.sqrt(expected * (1 - percent / 100))
    assert len(set(seen)) == len(seen)
    assert lab.traffic()["one", "two"].packets >= count - lost
    assert len(seen) >= 0.5 * count  # its own receive buffer may drop some on a busy machine


def test_tcp_through_loss_is_exact(routable_pair):
    lab = routable_pair(rate=100, delay=1, loss=2)
    data = bytes(range(256)) * 2000
    near, far = tcp(lab["one"], lab["two"])
    with near, far:
        sending = threading.Thread(target=near.sendall, args=(data,))
        sending.start()
        assert receive(far, len(data)) == data
        sending.join()
    assert lab.counters()["one"]["lost"] > 0


def test_cut_is_silence_until_healed(two_homes):
    lab = two_homes
    lab.host("pub2")
    with Probe(lab["anna"]) as anna, Probe(lab["pub"]) as pub, Probe(lab["pub2"]) as pub2:
        assert reaches(anna, pub)
        lab.cut("anna", "pub")
        anna.send("lost", pub.where)
        assert pub.hears_nothing()
        assert reaches(anna, pub2), "another pair"
        lab.heal("anna", "pub")
        assert reaches(anna, pub)
        lab.cut("anna")
        anna.send("lost", pub.where)
        anna.send("lost", pub2.where)
        assert pub.hears_nothing() and pub2.hears_nothing()
        lab.heal()
        assert reaches(anna, pub2)
        assert lab.counters()["anna"]["cut"] == 3


def test_cut_of_one_direction(routable_pair):
    lab = routable_pair(delay=1)
    lab.cut("one", "two", one_way=True)
    with Probe(lab["one"]) as one, Probe(lab["two"]) as two:
        one.send("lost", two.where)
        assert two.hears_nothing()
        assert reaches(two, one)


def test_regions_are_parted_and_joined(make_lab):
    lab = make_lab()
    for name, region in (("a1", "asia"), ("e1", "europe"), ("e2", "europe")):
        lab.host(name, region=region)
    lab.cut("asia", "europe")
    with Probe(lab["a1"]) as asia, Probe(lab["e1"]) as first, Probe(lab["e2"]) as second:
        asia.send("lost", first.where)
        assert first.hears_nothing()
        assert reaches(second, first)
        lab.heal("asia", "europe")
        assert reaches(asia, first)


@pytest.mark.parametrize("name", ["anna", "pub"])
def test_pulled_cable_is_silence_in_both_directions(two_homes, name):
    lab = two_homes
    other = "pub" if name == "anna" else "anna"
    with Probe(lab["anna"]) as anna, Probe(lab["pub"]) as pub:
        back = anna.seen_from(pub)
        lab[name].unplug()
        assert "NO-CARRIER" in lab[name].run(["ip", "link", "show", lab[name].device]).stdout
        pub.send("lost", back)
        assert anna.hears_nothing(), f"{name} hears {other} through a pulled cable"
        lab[name].plug()
        assert reaches(anna, pub)


def test_moved_public_host_answers_at_its_new_address_only(two_homes):
    lab = two_homes
    old = lab["pub"].address
    with Probe(lab["anna"]) as anna, Probe(lab["pub"]) as pub:
        assert reaches(anna, pub)
        assert lab["pub"].move() != old
        anna.send("lost", (old, pub.port))
        assert pub.hears_nothing()
        assert reaches(anna, pub)


def test_both_families_reach_both_kinds_of_host(make_lab):
    lab = make_lab(delay=1)
    home, pub = lab.host("home", nat="symmetric", ipv6=True), lab.host("pub", ipv6=True)
    for _ in range(2):
        with Probe(home, ipv6=True) as near, Probe(pub, ipv6=True) as far:
            near.send("hello", (pub.address6, far.port))
            heard = far.hears()
            assert heard is not None and heard[1] == (home.address6, near.port), "no NAT for IPv6"
            far.send("answer", heard[1])
            assert near.hears() is not None
            with Probe(pub, ipv6=True) as stranger:
                stranger.send("knock", heard[1])
                assert near.hears_nothing()
        home.move()
        pub.move()


def test_packets_larger_than_the_mtu_of_the_far_line_are_lost(make_lab):
    lab = make_lab()
    lab.host("wide")
    lab.host("narrow", nat="port", mtu=1400)
    with Probe(lab["wide"]) as wide, Probe(lab["narrow"]) as narrow:
        back = narrow.seen_from(wide)
        wide.send("x" * 1373, back)
        wide.send("y" * 1372, back)
        assert narrow.hears() == ("y" * 1372, wide.where)
    assert lab.counters()["wide"]["too_big"] == 1
    near, far = tcp(lab["narrow"], lab["wide"])
    with near, far:
        far.sendall(bytes(100_000))
        receive(near, 100_000)


def test_many_hosts_each_with_its_own_line(four_homes):
    lab = four_homes
    with Probe(lab["pub"]) as pub:
        for number in range(4):
            with Probe(lab[f"home{number}"]) as probe:
                assert probe.seen_from(pub)[0] == lab[f"home{number}"].address
    assert {receiver for _, receiver in lab.traffic()} == {"pub"}


def test_process_on_a_host_sees_its_network(two_homes):
    anna = two_homes["anna"]
    assert anna.own_address in anna.run(["ip", "-4", "addr", "show", "eth0"]).stdout
    with pytest.raises(LabError, match=r"anna: `false`: exit code 1"):
        anna.run(["false"])
    with pytest.raises(LabError, match=r"anna: `sleep 60` did not end within 0.2 s"):
        anna.run(["sleep", "60"], timeout=0.2)
    assert anna.popen(["sh", "-c", "exit 3"]).wait(PATIENCE) == 3


WRONG_USE = [
    (lambda lab: lab.host("Anna"), "'Anna' is no name"),
    (lambda lab: lab.host("one"), "'one' already"),
    (lambda lab: lab.host("three", nat="cone"), "NAT kind 'cone' is none of none, full, port"),
    (lambda lab: lab.host("three", mtu=100), "mtu=100 is outside"),
    (lambda lab: lab.link("one", "three", delay=1), "'one' and 'three' are not two hosts or two regions"),
    (lambda lab: lab.link("one", "world", delay=1), "are not two hosts or two regions"),
    (lambda lab: lab.cut("three"), "there is no host 'three'; there are: one, two"),
    (lambda lab: lab.rate("one", up=-1), "up=-1 is outside 0 .. 1e\\+06"),
    (lambda lab: lab.link("one", "two", loss=101), "loss=101 is outside 0 .. 100"),
    (lambda lab: lab.link("one", "two", delay=math.nan), "delay=nan"),
    (lambda lab: lab["one"].rebind(), "one: the mappings of NAT kind 'none' cannot change"),
    (lambda lab: lab["one"].set_nat("port"), "one: a host with a public address stays so"),
]


def test_wrong_use_is_refused_in_words(routable_pair):
    lab = routable_pair()
    for wrong, text in WRONG_USE:
        with pytest.raises(ValueError, match=text):
            wrong(lab)


def test_emulator_refuses_what_it_cannot_do(routable_pair):
    lab = routable_pair()
    with pytest.raises(LabError, match=r"the emulator refuses sites one two loss=101: loss=101 is not a number"):
        lab._ask("sites one two loss=101")
    with pytest.raises(LabError, match=r"site three no-such-space x: /run/netns/no-such-space: No such file"):
        lab._ask("site three no-such-space x")
    with pytest.raises(LabError, match=r"the request is longer than 8192 bytes"):
        lab._ask("x" * 9000)
    with Probe(lab["one"]) as one, Probe(lab["two"]) as two:
        assert reaches(one, two), "it goes on"


def test_example_of_the_documentation_runs(make_lab):
    make_lab()  # or skips
    text = (Path(__file__).parents[2] / "docs" / "lab.md").read_text()
    (example,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    exec(example.replace('["python", "train.py"]', '["sleep", "600"]'), {})
