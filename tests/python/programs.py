"""What the tests of the backend share: whole programs, default groups, what a process holds, what a call raises."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
from ranks import ENVIRONMENT

TIMEOUT = timedelta(seconds=30)


def python(code: str, *arguments: str, environment: dict[str, str] | None = None, module: str = "") -> str:
    """Run a program (with `module`, under ``python -m module``) and return what it prints; it must exit with 0."""
    command = [sys.executable, "-c", textwrap.dedent(code)] if not module else [sys.executable, "-m", module]
    done = subprocess.run(
        [*command, *arguments],
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
        env={**os.environ, **ENVIRONMENT, **(environment or {})},
    )
    assert done.returncode == 0, f"exit {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def threads() -> int:
    """Threads of this process, without tokio's pool for blocking calls, which iroh grows and shrinks as it likes."""
    names = []
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # it has ended
            names.append((task / "comm").read_text().strip())
    return sum(name != "tokio-rt-worker" for name in names)


def settled(count: Callable[[], int], at_most: int) -> int:
    """`count()` once it is no more than `at_most`, or after 5 s: what closes in the background needs a moment."""
    until = time.monotonic() + 5
    while (found := count()) > at_most and time.monotonic() < until:
        time.sleep(0.05)
    return found


@contextlib.contextmanager
def group(rank: int, world: int, store: Any, backend: str = "iroh", **options: Any) -> Iterator[None]:
    """The default group, on a FileStore at path `store` or on a given store."""
    if isinstance(store, str):
        store = dist.FileStore(store, world)
    options = {"timeout": TIMEOUT, **options}
    dist.init_process_group(backend, store=store, rank=rank, world_size=world, **options)
    try:
        yield
    finally:
        dist.destroy_process_group()


def meet(store: str, world: int) -> None:
    """A barrier that the backend has no part in."""
    other = dist.FileStore(store + ".meet", world)
    other.add("come", 1)
    while other.add("come", 0) < world:
        time.sleep(0.01)


def error_of(call: Callable[[], Any]) -> str:
    """Type and text of what `call` raises, without C++'s stack; "nothing" if it does not."""
    try:
        call()
    except Exception as error:
        text = str(error).split("\nException raised from")[0]
        return f"{type(error).__name__}: {text}"
    return "nothing"
