"""The simulator against the world: predicted and measured times of all_reduce between hosts of known links.

Each rank is a process in a namespace of its own (shaped.py). What the processors cost is measured in the same run, on
loopback; rate and delay are those of the shaper. What the model has not is kept out: connections are warm, queues lose
nothing, and all ranks begin at one moment of the clock they share.
"""

from __future__ import annotations

import os
import statistics
import time
from dataclasses import dataclass
from datetime import timedelta

import pytest
import shaped
import torch
import torch.distributed as dist
from ranks import Ranks

import torch_iroh
from torch_iroh import Link

MEBI = 1 << 20
DELAY = 0.010  # one way: 20 ms as ping shows it
# Of a full IP packet: UDP, QUIC and its authentication take the rest.
PAYLOAD = 1410 / 1480
WARM, ROUNDS = 3, 5


@dataclass(frozen=True)
class Costs:
    message_seconds: float
    byte_seconds: float


def together() -> None:
    """Return at the same moment at all ranks."""
    start = torch.tensor([time.monotonic() + 0.3], dtype=torch.float64)
    dist.all_reduce(start, op=dist.ReduceOp.MAX)
    time.sleep(max(0.0, float(start) - time.monotonic()))


def spans(count: int, rounds: int) -> list[tuple[float, float]]:
    tensor = torch.ones(count)
    found = []
    for _ in range(rounds):
        together()
        begun = time.monotonic()
        dist.all_reduce(tensor)
        found.append((begun, time.monotonic()))
        tensor.fill_(1.0)
    return found


def median_seconds(of_ranks: list[list[tuple[float, float]]]) -> float:
    """From the moment the last rank begins to when the last ends."""
    return statistics.median(
        max(end for _, end in one) - max(begun for begun, _ in one) for one in zip(*of_ranks, strict=True)
    )


def join(rank: int, world: int, store: str, **options: object) -> None:
    dist.init_process_group(
        "iroh",
        store=dist.FileStore(store),
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=60),
        pg_options=torch_iroh.Options(**options),
    )


Spans = list[list[tuple[float, float]]]  # by size and round: begun, ended


def timed(rank: int, world: int, names: list[str], store: str, algorithm: str, counts: list[int]) -> Spans:
    """The hosts of `names` have equally many ranks, in order; none: loopback."""
    shaped.first_in_line()
    if names:
        host = rank * len(names) // world
        shaped.enter(names[host])
        os.environ["TORCH_IROH_BIND"] = f"{shaped.address(host)}:0"
    join(rank, world, store, algorithm=algorithm)
    found = []
    for count in counts:
        spans(count, WARM)
        found.append(spans(count, ROUNDS))
    dist.destroy_process_group()
    return found


@pytest.fixture(scope="module")
def costs(tmp_path_factory: pytest.TempPathFactory) -> Costs:
    """What a message and a byte cost a processor, by all_reduces of two ranks over loopback."""
    if why := shaped.obstacle():
        pytest.skip(why)
    store = str(tmp_path_factory.mktemp("costs") / "store")
    counts = [1, 4 * MEBI]  # elements of 4 bytes
    with Ranks(2) as ranks:
        of_ranks = ranks.run(timed, 2, [], store, "direct", counts, deadline=60)
    small, large = (median_seconds([one[i] for one in of_ranks]) for i in range(len(counts)))
    # Of a direct all_reduce between two, each rank sends and receives the whole once, in two messages of half of it;
    # of one element there are two messages, one after the other, each with a processor at both its ends.
    return Costs(message_seconds=small / 4, byte_seconds=max(0.0, large - small) / (2 * counts[1] * 4))


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("world", "hosts", "bits_per_second", "algorithm"),
    [
        (2, 2, 100e6, "direct"),
        (4, 4, 100e6, "ring"),
        (4, 4, 100e6, "direct"),
        (8, 8, 30e6, "ring"),
        (4, 2, 100e6, "hierarchical"),
        (6, 3, 30e6, "hierarchical"),
    ],
)
def test_prediction_is_within_25_percent_of_what_is_measured(costs, tmp_path, world, hosts, bits_per_second, algorithm):
    # The largest first: its rounds open the congestion windows.
    sizes = [int(seconds * bits_per_second / 8) // 4 * 4 for seconds in (0.5, 0.05)]
    with shaped.shaped(hosts, bits_per_second=bits_per_second, delay=DELAY) as names, Ranks(world) as ranks:
        counts = [size // 4 for size in sizes]
        of_ranks = ranks.run(timed, world, names, str(tmp_path / "store"), algorithm, counts, deadline=200)
    link = Link(
        latency=DELAY,
        bandwidth=bits_per_second / 8 * PAYLOAD,
        message_seconds=costs.message_seconds,
        byte_seconds=costs.byte_seconds,
    )
    inside = Link(
        latency=0.0, bandwidth=float("inf"), message_seconds=costs.message_seconds, byte_seconds=costs.byte_seconds
    )
    lines = [f"{costs}, {bits_per_second / 1e6:g} Mbit/s, {DELAY * 1e3:g} ms"]
    ratios = []
    for i, size in enumerate(sizes):
        measured = median_seconds([one[i] for one in of_ranks])
        predicted = torch_iroh.plan(
            bytes=size, world=world, ranks_per_host=world // hosts, host=inside, wan=link, algorithm=algorithm
        ).predicted_seconds
        ratios.append(predicted / measured)
        lines.append(
            f"{algorithm:>8} {world} ranks {size:>8} bytes: predicted {predicted * 1e3:7.1f} ms, "
            f"measured {measured * 1e3:7.1f} ms, ratio {ratios[-1]:.2f}"
        )
    print("\n" + "\n".join(lines))
    assert all(0.75 <= ratio <= 1.25 for ratio in ratios), "\n".join(lines)
