"""What the benchmarks share: ranks as processes of this machine, their end, medians and the table.

Knows neither what is measured nor by whom. Ranks start with a default group of backend gloo, which a benchmark uses to
line them up between two measurements.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import math
import multiprocessing
import os
import platform
import re
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, TypeVar

Result = TypeVar("Result")

FINE, FINDING = 0, 1  # exit statuses; argparse adds 2, wrong usage
INTERRUPTED = 128 + signal.SIGINT

_UNITS = {"": 1, "Ki": 1 << 10, "Mi": 1 << 20, "Gi": 1 << 30}


# ---- options and texts ----


def parse_bytes(text: str) -> int:
    """``64Mi`` -> 67108864."""
    match = re.fullmatch(r"(\d+)(Ki|Mi|Gi|)", text.strip())
    if match is None or int(match[1]) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is no size; sizes look like 1000, 64Ki, 4Mi, 1Gi")
    return int(match[1]) * _UNITS[match[2]]


def show_bytes(count: int) -> str:
    """67108864 -> ``64Mi``."""
    for unit in ("Gi", "Mi", "Ki"):
        if count and count % _UNITS[unit] == 0:
            return f"{count // _UNITS[unit]}{unit}"
    return str(count)


def comma_list(one: Callable[[str], Result]) -> Callable[[str], list[Result]]:
    """An argparse type: several of ``one``, separated by commas."""

    def parse(text: str) -> list[Result]:
        return [one(part) for part in text.split(",")]

    parse.__name__ = f"list of {one.__name__}"  # argparse names it in its errors
    return parse


def positive(text: str) -> int:
    """An argparse type: a whole number from 1."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is less than 1")
    return value


def add_common_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rounds", type=positive, help="measurements of each row; all rows take turns in each round")
    parser.add_argument("--deadline", type=float, default=900, metavar="SECONDS", help="give up (default: %(default)g)")
    parser.add_argument("--quick", action="store_true", help="small and few: does it work? (not: how fast is it?)")


def stay_on_loopback() -> None:
    """Set the environment that the ranks inherit; what the caller has set stays."""
    os.environ.setdefault("TORCH_IROH_BIND", "127.0.0.1:0")
    interfaces = [name for _, name in socket.if_nameindex()]
    loopback = next((name for name in ("lo", "lo0") if name in interfaces), None)
    if loopback is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # as torchrun: ranks share the cores


def print_header(*meanings: str) -> None:
    """Versions, machine and link, then what the columns mean; each line starts with ``#``."""
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("torch-iroh", "torch", "iroh"))
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    load = " ".join(f"{value:.1f}" for value in os.getloadavg())
    python = platform.python_version()
    bind, interface = os.environ["TORCH_IROH_BIND"], os.environ.get("GLOO_SOCKET_IFNAME", "its default interface")
    print(f"# {versions}, Python {python}")
    print(f"# {cores} cores ({_processor()}), {platform.system()} {platform.release()}, load average {load}")
    print(f"# link: iroh bound to {bind} (UDP), gloo on {interface} (TCP)")
    said = {"TORCH_IROH_BIND"}
    settings = [f"{name}={value}" for name, value in sorted(os.environ.items()) if name.startswith("TORCH_IROH_")]
    settings = [setting for setting in settings if setting.split("=")[0] not in said]
    if settings:
        print("# settings:", *settings)
    for line in meanings:
        print(f"# {line}")
    sys.stdout.flush()


def _processor() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


# ---- figures ----


def quantile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least ``share`` of the values do not exceed (so p95 of 9 values is their maximum)."""
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


class Table:
    """Lines of right-aligned cells under one line of names; a row is printed as soon as it is known."""

    def __init__(self, **widths: int) -> None:
        self.widths = {name: max(width, len(name)) for name, width in widths.items()}
        self._line(list(self.widths))

    def row(self, **cells: object) -> None:
        self._line([str(cells[name]) for name in self.widths])

    def _line(self, cells: list[str]) -> None:
        pairs = zip(cells, self.widths.values(), strict=True)
        print("  ".join(cell.rjust(width) for cell, width in pairs), flush=True)


# ---- ranks ----


class RanksFailed(RuntimeError):
    """A rank raised, died, or was late; the text says which and how."""


@dataclass(frozen=True)
class Rank:
    """Who a process is: the first argument of the function that every rank runs."""

    index: int
    world: int


class Deadline:
    """A moment after which the benchmark gives up."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.at = time.monotonic() + seconds

    def left(self) -> float:
        return max(0.0, self.at - time.monotonic())


def run_ranks(work: Callable[[Rank, Any], Result], world: int, plan: object, *, deadline: Deadline) -> list[Result]:
    """Run ``work(rank, plan)`` in ``world`` new processes and return the results in rank order.

    ``work`` is a function of a module, ``plan`` and the results can be pickled. When one rank fails the others are
    killed, and no process is left behind whichever way this ends: Ctrl-C, SIGTERM and SIGKILL included.

    Raises:
        RanksFailed: with the traceback of the first rank that failed.
    """
    context = multiprocessing.get_context("spawn")
    answers: list[Connection] = []
    processes: list[BaseProcess] = []
    with tempfile.TemporaryDirectory(prefix="torch-iroh-bench-") as folder:
        try:
            for index in range(world):
                receiver, sender = context.Pipe(duplex=False)
                arguments = (work, Rank(index, world), plan, folder, deadline.left(), sender)
                process: BaseProcess = context.Process(target=_run_rank, args=arguments, daemon=True)
                with _interrupts_blocked():  # inherited: Ctrl-C is this process's business alone
                    process.start()
                    processes.append(process)
                sender.close()
                answers.append(receiver)
            results = _collect(answers, processes, deadline)
            for process in processes:
                process.join(deadline.left())
            return results
        finally:
            for process in processes:
                process.kill()
                process.join()


def _collect(answers: list[Connection], processes: list[BaseProcess], deadline: Deadline) -> list[Any]:
    results: dict[int, Any] = {}
    waiting = {answer: index for index, answer in enumerate(answers)}
    while waiting:
        ready = wait(list(waiting), deadline.left())
        if not ready:
            late = ", ".join(str(index) for index in sorted(waiting.values()))
            raise RanksFailed(f"nothing from rank {late} within {deadline.seconds:g} s. Try: a longer --deadline")
        for answer in ready:
            assert isinstance(answer, Connection)
            index = waiting.pop(answer)
            try:
                failure, results[index] = answer.recv()
            except EOFError:
                processes[index].join(5)
                raise RanksFailed(f"rank {index} ended with status {processes[index].exitcode}") from None
            if failure:
                raise RanksFailed(f"rank {index} of {len(answers)} failed:\n{failure}")
    return [results[index] for index in range(len(answers))]


def _run_rank(
    work: Callable[[Rank, Any], Any], rank: Rank, plan: object, folder: str, seconds: float, answer: Connection
) -> None:
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        import torch.distributed as dist

        dist.init_process_group(
            "gloo",
            init_method=f"file://{folder}/store",
            rank=rank.index,
            world_size=rank.world,
            timeout=timedelta(seconds=seconds),
        )
        result = work(rank, plan)
        dist.barrier()
        dist.destroy_process_group()
        answer.send((None, result))
    except BaseException:
        answer.send((traceback.format_exc(), None))


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


@contextlib.contextmanager
def _interrupts_blocked() -> Iterator[None]:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def run_main(main: Callable[[], int]) -> None:
    """Exit with ``main``'s status; a failed rank or Ctrl-C is a line on stderr, not a traceback of this process."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # runs the `finally`s
    stay_on_loopback()
    try:
        status = main()
    except RanksFailed as failure:
        print(f"{Path(sys.argv[0]).name}: {failure}", file=sys.stderr)
        status = FINDING
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        status = INTERRUPTED
    sys.exit(status)
