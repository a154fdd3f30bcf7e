"""Draws docs/scaling.md's plots and prints its tables: predicted time and fan-out of all_reduce against world size.

    python scripts/scaling.py            # every algorithm that exists; minutes
    python scripts/scaling.py --most 1000

Writes docs/images/scaling-*.png. Points that cannot be predicted are left out, and said on stderr.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import torch_iroh
from torch_iroh import Link
from torch_iroh._native import core_module

WORLDS = [2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 4096, 10_000, 100_000, 1_000_000]
BYTES = 64 << 20
LINKS = {
    "1gbit-50ms": ("1 Gbit/s, 50 ms", Link(latency=0.050, bandwidth=125e6)),
    "10gbit-1ms": ("10 Gbit/s, 1 ms", Link(latency=0.001, bandwidth=1.25e9)),
}
TABLE = (8, 64, 1024, 10_000, 1_000_000)
MARKERS = {"everyone": "", "period": " p", "kinds": " k"}
IMAGES = Path(__file__).resolve().parent.parent / "docs" / "images"


def points(algorithm: str, link: Link, most: int) -> list[torch_iroh.Plan]:
    """Predict one algorithm for every world up to `most` where that can be done."""
    found = []
    for world in WORLDS:
        if world > most:
            break
        begun = time.monotonic()
        try:
            plan = torch_iroh.plan(bytes=BYTES, world=world, wan=link, algorithm=algorithm)
        except ValueError as error:
            print(f"{algorithm} {world}: {error}", file=sys.stderr)
            continue
        if plan.algorithm != algorithm:
            break  # it has no all_reduce: another was planned
        print(f"{algorithm} {world}: {time.monotonic() - begun:.1f} s", file=sys.stderr)
        found.append(plan)
    return found


def cell(plan: torch_iroh.Plan) -> str:
    """Say what the tables say of one plan: time, depth, fan-out, and how it was simulated."""
    seconds = plan.predicted_seconds
    time_text = f"{seconds:.2g} s" if seconds < 100 else f"{seconds:,.0f} s"
    return f"{time_text}, {plan.depth:,}, {plan.fan_out:,}{MARKERS[plan.method]}"


def main() -> None:
    """Draw and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--most", type=int, default=max(WORLDS), help="largest world")
    most = parser.parse_args().most

    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    IMAGES.mkdir(exist_ok=True)
    for name, (title, link) in LINKS.items():
        lines = {algorithm: points(algorithm, link, most) for algorithm in core_module().algorithms()}
        figure, (times, fans) = pyplot.subplots(1, 2, figsize=(10, 4))
        for algorithm, plans in lines.items():
            if not plans:
                continue  # bruck has no all_reduce
            worlds = [plan.world for plan in plans]
            times.plot(worlds, [plan.predicted_seconds for plan in plans], marker=".", label=algorithm)
            fans.plot(worlds, [plan.fan_out for plan in plans], marker=".", label=algorithm)
        for axes, what in ((times, "predicted seconds"), (fans, "fan-out: peers one rank sends to, at most")):
            axes.set(xscale="log", yscale="log", xlabel="ranks", title=what)
            axes.grid(True, alpha=0.3)
        times.legend(fontsize=8)
        figure.suptitle(f"all_reduce of 64 MiB, {title} one way")
        figure.tight_layout()
        figure.savefig(IMAGES / f"scaling-{name}.png", dpi=110)
        print(f"\n{title}:\n\n| algorithm | " + " | ".join(f"{world:,}" for world in TABLE) + " |")
        print("| --- " * (len(TABLE) + 1) + "|")
        for algorithm, plans in lines.items():
            if plans:
                cells = {plan.world: cell(plan) for plan in plans}
                print(f"| {algorithm} | " + " | ".join(cells.get(world, "") for world in TABLE) + " |")


if __name__ == "__main__":
    main()
