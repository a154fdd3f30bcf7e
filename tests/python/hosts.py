"""Several hosts on one machine: ranks in different IPC namespaces count as ranks of different hosts.

They still share the network, so gloo and iroh reach everyone by loopback. Where the link between hosts matters, too,
see shaped.py. Needs root; :func:`obstacle` says what is missing.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import subprocess
import time
from collections.abc import Iterator

from ranks import Ranks

_CLONE_NEWIPC = 0x08000000

# Which host each rank is on.
LAYOUTS = {"2x2": [0, 0, 1, 1], "2x2 interleaved": [0, 1, 0, 1], "2+1": [0, 0, 1], "3x1": [0, 1, 2]}
EVEN = LAYOUTS["2x2"]
DEADLINE = 100.0  # of one call of all ranks


def obstacle() -> str:
    """Why there can be no such hosts here; empty when there can."""
    if shutil.which("unshare") is None:
        return "there is no `unshare` (util-linux)"
    made = subprocess.run(["unshare", "--ipc", "true"], capture_output=True, text=True, check=False)
    return "" if made.returncode == 0 else f"no namespace can be made: {made.stderr.strip()}"


@contextlib.contextmanager
def hosts(count: int) -> Iterator[list[int]]:
    """Make `count` hosts, each held by a process whose id stands for it."""
    keepers = [subprocess.Popen(["unshare", "--ipc", "sleep", "infinity"]) for _ in range(count)]
    try:
        until = time.monotonic() + 10
        while len({_namespace(keeper.pid) for keeper in keepers} | {_namespace(os.getpid())}) <= count:
            if time.monotonic() > until:
                raise RuntimeError("unshare made no namespace within 10 s")
            time.sleep(0.01)
        yield [keeper.pid for keeper in keepers]
    finally:
        for keeper in keepers:
            keeper.kill()
            keeper.wait()


def move_to(host: int) -> None:
    """Move this process to a host, before it makes its first group."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/proc/{host}/ns/ipc") as file:
        if libc.setns(file.fileno(), _CLONE_NEWIPC) != 0:
            raise OSError(ctypes.get_errno(), f"setns(ipc of process {host})")


def _namespace(pid: int) -> str:
    return os.readlink(f"/proc/{pid}/ns/ipc")


@contextlib.contextmanager
def on_hosts(layout: list[int], environment: dict[str, str] | None = None) -> Iterator[Ranks]:
    """Processes of ranks that are on their hosts and have no group."""
    with hosts(max(layout) + 1) as ids, Ranks(len(layout), environment=environment) as ranks:
        ranks.run(move, [ids[host] for host in layout])
        yield ranks


def move(rank: int, host_of: list[int]) -> None:
    move_to(host_of[rank])
