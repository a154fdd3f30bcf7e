"""Trouble by plan: equal for equal seeds, one thing at a time, and what is planned is what happens."""

from __future__ import annotations

import doctest

import pytest
from lab_probes import Probe, eventually, reaches

from torch_iroh.lab import Event, LabError, Schedule, _schedule

HOSTS = ["anna", "bert", "carl"]
ALL = list(_schedule.KINDS)


def test_equal_arguments_give_equal_plans_and_other_seeds_others():
    def plan(seed: int) -> tuple[Event, ...]:
        return Schedule(seed, HOSTS, seconds=100, events=10, kinds=ALL).events

    assert plan(1) == plan(1)
    assert len({plan(seed) for seed in range(50)}) == 50


def test_plan_of_a_seed_does_not_change_between_versions():
    plan = Schedule(7, HOSTS, seconds=30, events=3, kinds=ALL)
    assert [str(event) for event in plan.events] == [
        "   0.30 s  unplug anna for 3.76 s",
        "  13.66 s  move anna",
        "  23.79 s  cut carl anna for 1.26 s",
    ]


@pytest.mark.parametrize("seed", range(30))
def test_events_follow_each_other_within_the_time(seed):
    events = Schedule(seed, HOSTS, seconds=60, events=6, kinds=ALL, lasts=(0.5, 9)).events
    assert len(events) == 6
    end = 0.0
    for event in events:
        assert event.at >= end
        assert len(set(event.hosts)) == len(event.hosts) == (2 if event.kind == "cut" else 1)
        assert event.lasts == 0 or 0.5 <= event.lasts <= 9
        end = event.at + event.lasts
    assert end <= 60


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"kinds": ["flood"]}, r"\['flood'\]: the kinds of trouble are cut, partition"),
        ({"kinds": []}, "no kind"),
        ({"hosts": ["anna"]}, "1 hosts are too few"),
        ({"lasts": (0, 1)}, "above zero"),
        ({"events": 30}, r"30 events in 60 s leave 2 s for each, which does not hold 8 s"),
    ],
)
def test_plan_that_cannot_be_is_refused(arguments, text):
    with pytest.raises(ValueError, match=text):
        Schedule(1, arguments.pop("hosts", HOSTS), **{"seconds": 60, "events": 3, **arguments})


def test_example_in_the_docstring_holds():
    assert doctest.testmod(_schedule).failed == 0


@pytest.mark.parametrize("kind", ALL)
def test_each_kind_happens_and_ends(two_homes, kind):
    lab = two_homes
    before = lab["anna"].address
    process = lab["anna"].popen(["sleep", "600"])
    plan = Schedule(
        3, ["anna", "pub"] if kind == "cut" else ["anna"], seconds=0.6, events=1, kinds=[kind], lasts=(0.5, 0.5)
    )
    with Probe(lab["anna"]) as anna, Probe(lab["pub"]) as pub:
        mapped = anna.seen_from(pub)
        lines: list[str] = []
        with plan.start(lab, lines.append) as trouble:
            if kind in ("cut", "partition", "unplug"):
                assert eventually(lambda: bool(trouble.log))
                anna.send("lost", pub.where)
                assert pub.hears(0.2) is None
            assert trouble.wait(10)
            assert trouble.log == lines
            assert kind in lines[0]
            assert len(lines) == (2 if plan.events[0].lasts else 1)
        assert reaches(anna, pub)
        assert (anna.seen_from(pub) != mapped) == (kind in ("rebind", "move"))
    assert (lab["anna"].address != before) == (kind == "move")
    assert (process.poll() == -9) == (kind == "kill")


def test_stop_heals_what_is_broken(two_homes):
    lab = two_homes
    plan = Schedule(1, ["anna", "pub"], seconds=100, events=1, kinds=["cut"], lasts=(99, 99.5))
    with Probe(lab["anna"]) as anna, Probe(lab["pub"]) as pub:
        trouble = plan.start(lab)
        assert not trouble.wait(1.2)
        trouble.stop()
        assert reaches(anna, pub)


def test_hosts_that_the_lab_does_not_have_are_refused_at_the_start(two_homes):
    with pytest.raises(ValueError, match="seed 1: there is no host 'carl'"):
        Schedule(1, ["carl"], seconds=1, events=1, kinds=["move"]).start(two_homes)
    with pytest.raises(ValueError, match="seed 1: pub has NAT kind 'none', which cannot rebind"):
        Schedule(1, ["pub"], seconds=1, events=1, kinds=["rebind"]).start(two_homes)


def test_trouble_that_cannot_be_made_is_raised_by_stop(two_homes):
    plan = Schedule(1, ["anna", "bert"], seconds=0.5, events=1, kinds=["cut"], lasts=(0.1, 0.1))
    trouble = plan.start(two_homes)
    two_homes.close()
    trouble.wait(10)
    with pytest.raises(LabError, match=r"closed|does not answer"):
        trouble.stop()
