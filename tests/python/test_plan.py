"""`torch_iroh.plan` and `torch-iroh topology`: what they say, what they refuse, and what they cost."""

from __future__ import annotations

import dataclasses
import json
import re
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

import torch_iroh
from torch_iroh import Link, plan
from torch_iroh._native import core_module

MEBI = 1 << 20
EXACT = Link(latency=0.01, bandwidth=1e6, message_seconds=0.0, byte_seconds=0.0)


def test_one_message_takes_its_latency_and_its_bytes():
    found = plan("broadcast", bytes=100_000, world=2, wan=EXACT, algorithm="direct")
    assert found.predicted_seconds == pytest.approx(0.01 + 0.1)
    assert (found.depth, found.fan_out, found.messages_per_rank, found.bytes_per_rank) == (1, 1, 1, 100_000)
    assert (found.op, found.algorithm, found.world, found.bytes) == ("broadcast", "direct", 2, 100_000)


def test_a_ring_takes_its_formula():
    world, shard = 8, 1000
    found = plan(bytes=world * shard, world=world, wan=EXACT, algorithm="ring")
    assert found.predicted_seconds == pytest.approx(2 * (world - 1) * (0.01 + shard / 1e6), rel=0.01)
    assert (found.depth, found.fan_out, found.messages_per_rank) == (14, 1, 14)
    assert found.bytes_per_rank == 2 * (world - 1) * shard


def test_auto_is_the_fastest_of_all():
    for size in (64, 64 * MEBI):
        found = plan(bytes=size, world=6)
        assert found.predicted_seconds == min(found.alternatives.values()) == found.alternatives[found.algorithm]
        for name, seconds in found.alternatives.items():
            assert plan(bytes=size, world=6, algorithm=name).predicted_seconds == seconds


def test_levels_have_links_of_their_own():
    slow = dataclasses.replace(EXACT, latency=1.0)
    for ranks_per_host, hosts_per_site, expected in ((2, 1, 0.11), (1, 2, 0.21), (1, 1, 1.1)):
        found = plan(
            "broadcast",
            bytes=100_000,
            world=2,
            ranks_per_host=ranks_per_host,
            hosts_per_site=hosts_per_site,
            host=EXACT,
            site=dataclasses.replace(EXACT, latency=0.11),
            wan=slow,
        )
        assert found.predicted_seconds == pytest.approx(expected)


@pytest.mark.parametrize(
    ("places", "levels"),
    [
        ({"world": 24, "ranks_per_host": 4, "hosts_per_site": 3}, "4x3x2, at most 32: groups of 4, 3, 2"),
        ({"world": 24, "ranks_per_host": 100}, "24, at most 32: groups of 24"),
        ({"world": 40}, "40, at most 32: groups of 20, 2"),
        ({"world": 10, "ranks_per_host": 4}, r"groups 3/3/1 #\d+, at most 32: groups of 2-4, 3"),
        ({"world": 1}, ""),
    ],
)
def test_hierarchical_follows_hosts_and_sites(places, levels):
    found = plan(bytes=MEBI, algorithm="hierarchical", **places)
    assert found.algorithm == "hierarchical"
    assert re.fullmatch(levels, found.levels)


def test_slow_links_between_hosts_make_auto_hierarchical():
    found = plan(bytes=4 * MEBI, world=16, ranks_per_host=4)
    assert found.algorithm == "hierarchical"
    assert found.predicted_seconds < 0.6 * found.alternatives["ring"]
    assert plan(bytes=4 * MEBI, world=16, ranks_per_host=4, algorithm="ring").levels == ""


def test_equal_blocks_of_all_to_all_can_go_by_bruck():
    fast = Link(latency=20e-6, bandwidth=1.25e9)
    found = plan("all_to_all", bytes=64 * 4, world=64, wan=fast, algorithm="bruck")
    assert found.algorithm == "bruck"
    assert plan("all_to_all", bytes=64 * 4, world=64, wan=fast).algorithm == "direct"  # as a group would
    assert found.depth == 6


def test_jitter_is_the_same_for_the_same_seed():
    link = dataclasses.replace(EXACT, jitter=0.01)
    times = [plan(bytes=MEBI, world=5, wan=link, algorithm="ring", seed=seed).predicted_seconds for seed in (1, 1, 2)]
    assert times[0] == times[1] != times[2]


@pytest.mark.parametrize("op", core_module().collectives())
@pytest.mark.parametrize("world", [1, 2, 5, 16])
def test_every_collective_has_a_plan(op, world):
    found = plan(op, bytes=4096, world=world, ranks_per_host=2)
    assert found.predicted_seconds >= found.median_seconds >= 0
    assert (found.predicted_seconds > 0) == (world > 1)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"op": "all_redduce"}, "unknown collective 'all_redduce'; known: all_reduce, "),
        ({"algorithm": "torus"}, f"unknown algorithm 'torus'; known: {', '.join(core_module().algorithms())}"),
        ({"dtype": "float33"}, "unknown dtype 'float33'; known: bool, "),
        ({"world": 0}, "world 0 is out of range"),
        ({"bytes": -1}, "bytes -1 is out of range"),
        ({"ranks_per_host": 0}, "ranks_per_host 0 is out of range"),
        ({"local_byte_seconds": float("nan")}, "local_byte_seconds nan"),
        ({"op": "all_gather", "world": 20_000}, "at most 16384 ranks"),
        ({"op": "broadcast", "algorithm": "ring", "world": 1_000_000}, "cannot be sampled"),
        (
            {"world": 10_000, "ranks_per_host": 8, "hosts_per_site": 125, "algorithm": "ring"},
            "more than 16000000 steps",
        ),
        (
            {"world": 100_001, "ranks_per_host": 8, "algorithm": "hierarchical"},
            "100001 ranks do not fill their hosts and sites evenly: such levels are planned for at most 65536 ranks",
        ),
    ],
)
def test_what_cannot_be_planned_is_an_error_that_says_so(arguments, text):
    with pytest.raises(ValueError, match=text):
        plan(**{"bytes": 64 * MEBI, "world": 8, **arguments})


def test_a_number_of_the_wrong_type_is_a_type_error():
    with pytest.raises(TypeError, match="world must be an int, not float"):
        plan(bytes=1, world=2.0)  # type: ignore[arg-type]


@pytest.mark.parametrize("field", [{"latency": -1.0}, {"bandwidth": 0.0}, {"jitter": float("nan")}])
def test_a_link_that_cannot_be_is_refused(field):
    with pytest.raises(ValueError, match=f"Link: {next(iter(field))}"):
        Link(**{"latency": 0.1, "bandwidth": 1e6, **field})


# ---- the command line ----


def topology(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "torch_iroh", "topology", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize("algorithm", ["auto", "hierarchical"])
def test_topology_prints_what_plan_says(algorithm):
    wan = Link(latency=0.05, bandwidth=125e6)
    found = plan(bytes=4 * MEBI, world=32, ranks_per_host=4, wan=wan, algorithm=algorithm)
    options = [
        "--bytes",
        "4Mi",
        "--ranks-per-host",
        "4",
        "--bandwidth",
        "1Gbit",
        "--latency",
        "50ms",
        "--algorithm",
        algorithm,
    ]
    done = topology("32", *options, "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == dataclasses.asdict(found)
    text = topology("32", *options).stdout
    assert text.startswith("all_reduce of 4194304 bytes, 32 ranks\n")
    for line in (
        f"algorithm +{found.algorithm}\n",
        f"depth +{found.depth} ",
        f"fan-out +{found.fan_out} ",
    ):
        assert re.search(line, text), text
    assert ("\n  levels " in text) == (found.algorithm == "hierarchical")
    assert found.levels in text


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["0"], "'0' is not a number from 1"),
        (["many"], "'many' is not a number from 1"),
        (["8", "--bytes", "12Xi"], "'12Xi' is not a size like"),
        (["8", "--bandwidth", "0Gbit"], "'0Gbit' is not a bandwidth like"),
        (["8", "--latency", "50"], "'50' is not a time like"),
        (["8", "--op", "sum"], "unknown collective 'sum'"),
        (["8", "--algorithm", "torus"], "unknown algorithm 'torus'"),
    ],
)
def test_topology_refuses_in_one_sentence(arguments, text):
    done = topology(*arguments)
    assert done.returncode == 2
    assert done.stdout == ""
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("torch-iroh topology: ")
    assert text in last


# ---- what it costs: the limits are 60 s and 2 GiB ----
#
# Seconds are those of the processor: a plan is one thread that waits for nothing, and other processes' load is not its.

COST = textwrap.dedent("""
    import json, resource, sys
    import torch_iroh
    found = torch_iroh.plan(**json.loads(sys.argv[1]))
    used = resource.getrusage(resource.RUSAGE_SELF)
    seconds = used.ru_utime + used.ru_stime
    print(json.dumps([seconds, used.ru_maxrss * 1024, found.algorithm, found.method, found.simulated_ranks]))
""")


LARGE: list[tuple[dict[str, Any], str, str, int | None]] = [
    # All ranks, chunks and all: a chain of 10,000.
    ({"op": "broadcast", "algorithm": "ring", "world": 10_000}, "ring", "everyone", 10_000),
    ({"algorithm": "hierarchical", "world": 10_000}, "hierarchical", "everyone", 10_000),
    (
        {"bytes": 4 * MEBI, "world": 10_000, "ranks_per_host": 8, "hosts_per_site": 125},
        "hierarchical",
        "everyone",
        10_000,
    ),
    ({"algorithm": "ring", "world": 1_000_000}, "ring", "period", 1),
    ({"algorithm": "hierarchical", "world": 1_000_000}, "hierarchical", "kinds", None),
    (
        {"op": "broadcast", "algorithm": "direct", "world": 1_000_000, "bytes": MEBI},
        "direct",
        "everyone",
        1_000_000,
    ),
]


def cost(arguments: dict[str, Any]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", COST, json.dumps({"bytes": 64 * MEBI, **arguments})],
        capture_output=True,
        text=True,
        timeout=290,
        check=False,
    )


@pytest.fixture(scope="module")
def plans() -> Iterator[list[Future[subprocess.CompletedProcess[str]]]]:
    """All of them, two at a time."""
    with ThreadPoolExecutor(2) as pool:
        yield [pool.submit(cost, arguments) for arguments, _, _, _ in LARGE]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("index", range(len(LARGE)))
def test_large_worlds_are_planned_within_time_and_memory(
    plans: list[Future[subprocess.CompletedProcess[str]]], index: int
):
    arguments, algorithm, method, ranks = LARGE[index]
    done = plans[index].result()
    assert done.returncode == 0, done.stderr
    seconds, peak, *found, simulated = json.loads(done.stdout)
    assert found == [algorithm, method]
    assert simulated == ranks or (ranks is None and 1 < simulated < arguments["world"] / 10)
    assert seconds < 60
    assert peak < 2 << 30


def test_planning_needs_no_torch():
    code = "import sys, torch_iroh; torch_iroh.plan(bytes=64, world=4); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "False"


def test_the_public_names_are_here():
    assert {"Link", "Plan", "plan"} <= set(torch_iroh.__all__)


def test_pins_fix_the_algorithm_and_the_chunk_by_size():
    pins = "all_reduce<=64KiB=tree, all_reduce=ring/64KiB"
    small = torch_iroh.plan(bytes=64 << 10, world=8, pins=pins)
    assert (small.algorithm, small.chunk_bytes) == ("tree", 256 << 10)
    large = torch_iroh.plan(bytes=(64 << 10) + 4, world=8, pins=pins)
    assert (large.algorithm, large.chunk_bytes) == ("ring", 64 << 10)
    assert large == torch_iroh.plan(bytes=(64 << 10) + 4, world=8, algorithm="ring", chunk_bytes=64 << 10)
    free = torch_iroh.plan("broadcast", bytes=64, world=8, pins=pins)
    assert free == torch_iroh.plan("broadcast", bytes=64, world=8)


def test_wrong_pins_are_a_value_error_that_names_the_rule():
    with pytest.raises(ValueError, match="rule 2: 'oak' is no algorithm"):
        torch_iroh.plan(bytes=64, world=8, pins="gather=tree, *=oak")
    with pytest.raises(ValueError, match="algorithm 'ring' beside pins"):
        torch_iroh.plan(bytes=64, world=8, algorithm="ring", pins="*=ring")


def test_what_topology_prints_is_a_plan_that_it_takes(capsys):
    from torch_iroh import topology

    topology.main(["8", "--bytes", "64Ki", "--plan", "all_reduce=butterfly"])
    printed = capsys.readouterr().out
    rule = re.search(r"TORCH_IROH_PLAN='([^']+)'", printed)
    assert rule is not None and rule[1] == "all_reduce=butterfly", printed
    topology.main(["8", "--bytes", "64Ki", "--plan", rule[1]])
    assert capsys.readouterr().out == printed
