"""What rank 0 shows and writes: the progress bar, traffic figures, the closing table, metrics.jsonl and loss.png.

Knows nothing of models or data. A figure that cannot be measured is None here, `-` on screen and null in JSON.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TextIO

from tqdm import tqdm


@dataclasses.dataclass(frozen=True)
class Step:
    """A line of metrics.jsonl. `loss` is the mean over ranks, `tokens_per_s` counts all ranks; the rest is rank 0's."""

    step: int
    loss: float
    seconds: float
    tokens_per_s: float
    communication_share: float | None  # of `seconds`: at least one operation of the group was in flight
    bytes_sent: int | None  # in this step


@dataclasses.dataclass(frozen=True)
class Rank:
    """One row of the closing table. `path` and `rtt_ms` are what rank 0 sees, the rest the rank says of itself."""

    rank: int
    path: str | None
    rtt_ms: float | None
    bytes_sent: int | None
    checksum: int


@dataclasses.dataclass(frozen=True)
class Result:
    steps: Sequence[Step]
    ranks: Sequence[Rank]
    held_out_before: float
    held_out_after: float


class Traffic:
    """The backend's own counters. Only `iroh` has them; with another backend everything but time is None."""

    def __init__(self, backend: str) -> None:
        # `import torch` has registered the backend; the package itself is needed for its figures only.
        self._stats = importlib.import_module("torch_iroh").stats if backend == "iroh" else None
        self._then = (time.perf_counter(), self.now())

    def now(self) -> Any | None:
        """torch_iroh.stats() of the default group: totals since it was made."""
        return self._stats() if self._stats else None

    def bytes_sent(self) -> int | None:
        """Total of this rank since the group was made, the first copy of the model included."""
        stats = self.now()
        return None if stats is None else stats.bytes_sent

    def lap(self) -> tuple[float, float | None, int | None]:
        """(seconds, share of them spent in communication, bytes sent) since the last call."""
        (then, before), (now, after) = self._then, (time.perf_counter(), self.now())
        self._then = (now, after)
        if before is None or after is None:
            return now - then, None, None
        share = (after.busy_seconds - before.busy_seconds) / (now - then)
        return now - then, share, after.bytes_sent - before.bytes_sent


def rank_rows(stats: Any | None, checksums: Sequence[int], bytes_sent: Sequence[int]) -> list[Rank]:
    """Joins what every rank said of itself (bytes_sent -1: not measured) with the peers in rank 0's `stats`."""
    peers = {peer.rank: peer for peer in stats.peers} if stats is not None else {}
    rows = []
    for rank, (checksum, sent) in enumerate(zip(checksums, bytes_sent, strict=True)):
        peer = peers.get(rank)
        path, rtt_ms = (None, None) if peer is None else (peer.path, peer.rtt_ms)
        rows.append(Rank(rank, path, rtt_ms, None if sent < 0 else sent, checksum))
    return rows


def progress(total: int, description: str, shown: bool = True) -> Any:
    """A bar on stderr; a line every ten seconds where stderr is a file."""
    return tqdm(total=total, desc=description, disable=not shown, mininterval=0.2 if sys.stderr.isatty() else 10)


def show_step(bar: Any, step: Step, bytes_sent_so_far: int | None) -> None:
    bar.set_postfix_str(
        f"loss {step.loss:.3f}, {step.tokens_per_s:,.0f} tokens/s, "
        f"communication {percent(step.communication_share)}, sent {megabytes(bytes_sent_so_far)} MB",
        refresh=False,
    )
    bar.update()


def write_step(file: TextIO, step: Step) -> None:
    """One line, on disk at once: a run that dies leaves the steps it made. JSON keeps every bit of the loss."""
    file.write(json.dumps(dataclasses.asdict(step)) + "\n")
    file.flush()


def closing_table(result: Result) -> str:
    width = max(len(row.path or "") for row in result.ranks)
    width = max(width, len("this process"))
    lines = [f"rank  {'path':{width}}  rtt_ms   sent_MB  parameters (SHA-256)"]
    for row in result.ranks:
        path = "this process" if row.rank == 0 else row.path or "-"
        lines.append(
            f"{row.rank:4}  {path:{width}}  {number(row.rtt_ms, '.2f'):>6}  {megabytes(row.bytes_sent):>8}  "
            f"{row.checksum & 0xFFFF_FFFF_FFFF_FFFF:016x}"
        )
    before, after = result.held_out_before, result.held_out_after
    seconds = sum(s.seconds for s in result.steps)
    tokens = sum(s.tokens_per_s * s.seconds for s in result.steps)
    share = mean_share(result.steps)
    lines += [
        "",
        f"held-out loss   {before:.4f} -> {after:.4f} nats per token ({after - before:+.4f})",
        f"tokens/s        {tokens / seconds:,.0f} ({len(result.steps)} steps in {seconds:.1f} s)",
        f"communication   {'not measured' if share is None else f'{percent(share)} of the time of the steps'}",
        f"parameters      {'equal on all ranks' if equal(result.ranks) else 'DIFFER BETWEEN RANKS'}",
    ]
    return "\n".join(lines)


def mean_share(steps: Sequence[Step]) -> float | None:
    shares = [s.communication_share * s.seconds for s in steps if s.communication_share is not None]
    return sum(shares) / sum(s.seconds for s in steps) if len(shares) == len(steps) else None


def equal(ranks: Sequence[Rank]) -> bool:
    return len({row.checksum for row in ranks}) == 1


def number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def percent(share: float | None) -> str:
    return number(share, ".0%")


def megabytes(count: int | None) -> str:
    return "-" if count is None else f"{count / 1e6:.2f}"


def plot_loss(result: Result, title: str, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")  # no screen needed
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4.5), layout="constrained")
    numbers, losses = [s.step for s in result.steps], [s.loss for s in result.steps]
    smooth = [sum(part) / len(part) for part in (losses[max(0, i - 9) : i + 1] for i in range(len(losses)))]
    axes.plot(numbers, losses, color="tab:blue", alpha=0.3, linewidth=1, label="training, each step")
    axes.plot(numbers, smooth, color="tab:blue", label="training, mean of the last 10")
    before, after = result.held_out_before, result.held_out_after
    label = f"held out, {before:.3f} to {after:.3f}"
    axes.plot([0, len(losses)], [before, after], "o", color="tab:orange", label=label)
    axes.set(title=title, xlabel="step", ylabel="loss (nats per token)")
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
