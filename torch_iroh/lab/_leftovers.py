"""What a laboratory leaves on the machine, and how it goes away however its owner ends.

Each laboratory has a folder below /run/torch-iroh-lab, and a guardian: this file as a process of its own, which waits
until the owner closes the laboratory or dies, and then removes all of it. Imports nothing of this package, so that the
guardian starts fast and from any folder. Should the guardian be killed too, the next laboratory sweeps.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

FOLDER = Path("/run/torch-iroh-lab")
NAMESPACES = Path("/run/netns")
BUFFER_LIMITS = ("net.core.rmem_max", "net.core.wmem_max")
_POLITE_SECONDS = 2.0  # from SIGTERM to SIGKILL
_KILL_SECONDS = 10.0


@contextlib.contextmanager
def one_at_a_time() -> Iterator[None]:
    """Hold the lock under which laboratories are made and swept, and the buffer limits change."""
    FOLDER.mkdir(mode=0o755, exist_ok=True)
    with open(FOLDER / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def make(owner: int) -> tuple[str, int]:
    """Make the folder of a new laboratory; its name, and the descriptor whose lock says that someone cares for it."""
    with one_at_a_time():
        for number in range(1, 1000):
            name = f"til{owner}n{number}"
            try:
                (FOLDER / name).mkdir(mode=0o700)
            except FileExistsError:
                continue
            lock = os.open(FOLDER / name / "lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
            fcntl.flock(lock, fcntl.LOCK_EX)
            return name, lock
    raise RuntimeError(f"process {owner} has 999 laboratories")


def sweep_abandoned() -> list[str]:
    """Remove laboratories whose owner and guardian are both gone; their names."""
    swept = []
    with one_at_a_time():
        for folder in _folders():
            with open(folder / "lock", "a") as lock:
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    continue
                _sweep(folder.name, spare=())
                swept.append(folder.name)
    return swept


def namespaces_of(name: str) -> list[str]:
    """Name the network namespaces of a laboratory."""
    if not NAMESPACES.is_dir():
        return []
    return sorted(entry for entry in os.listdir(NAMESPACES) if entry.startswith(f"{name}-"))


def processes_in(namespaces: Sequence[str]) -> list[int]:
    """Name the processes that are in one of these network namespaces."""
    wanted = set()
    for namespace in namespaces:
        with contextlib.suppress(OSError):
            found = os.stat(NAMESPACES / namespace)
            wanted.add((found.st_dev, found.st_ino))
    pids = []
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with contextlib.suppress(OSError):  # ended meanwhile
                found = os.stat(f"/proc/{entry}/ns/net")
                if (found.st_dev, found.st_ino) in wanted:
                    pids.append(int(entry))
    return pids


def raise_buffer_limits(name: str, nbytes: int) -> None:
    """Let UDP sockets of the whole machine have buffers of `nbytes`, until the last laboratory that asked is gone."""
    with one_at_a_time():
        before = {limit: int(_sysctl(limit).read_text()) for limit in BUFFER_LIMITS}
        for folder in _folders():
            before = _limits_before(folder) or before
        (FOLDER / name / "limits.json").write_text(json.dumps(before))
        for limit in BUFFER_LIMITS:
            if int(_sysctl(limit).read_text()) < nbytes:
                _sysctl(limit).write_text(str(nbytes))


def _folders() -> list[Path]:
    return [folder for folder in sorted(FOLDER.iterdir()) if (folder / "lock").exists()]


def _sysctl(limit: str) -> Path:
    return Path("/proc/sys", *limit.split("."))


def _limits_before(folder: Path) -> dict[str, int]:
    try:
        found: dict[str, int] = json.loads((folder / "limits.json").read_text())
    except (FileNotFoundError, ValueError):
        return {}
    return {limit: value for limit, value in found.items() if limit in BUFFER_LIMITS}


def sweep(name: str, *, spare: Sequence[int]) -> None:
    """End the processes of a laboratory but those of `spare`, and remove its namespaces, limits and folder."""
    # Before the lock is taken: this may wait, and other laboratories need not.
    _end_processes(name, spare)
    with one_at_a_time():
        _sweep(name, spare)


def _sweep(name: str, spare: Sequence[int]) -> None:
    _end_processes(name, spare)
    for namespace in namespaces_of(name):
        subprocess.run(["ip", "netns", "del", namespace], capture_output=True, check=False)
    folder = FOLDER / name
    limits = _limits_before(folder)
    if limits and not any(_limits_before(other) for other in _folders() if other != folder):
        for limit, value in limits.items():
            _sysctl(limit).write_text(str(value))
    shutil.rmtree(folder, ignore_errors=True)
    left = namespaces_of(name)
    if left:
        raise RuntimeError(f"network namespaces cannot be removed: {', '.join(left)}. Try: ip netns del NAME")


def _end_processes(name: str, spare: Sequence[int]) -> None:
    ours = {os.getpid(), *spare}
    started = time.monotonic()
    signalled: set[int] = set()
    while True:
        pids = [pid for pid in processes_in(namespaces_of(name)) if pid not in ours and not _is_zombie(pid)]
        waited = time.monotonic() - started
        if not pids:
            return
        if waited > _KILL_SECONDS:
            raise RuntimeError(f"processes {pids} do not end on SIGKILL")
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                if waited > _POLITE_SECONDS:
                    os.kill(pid, signal.SIGKILL)
                elif pid not in signalled:
                    signalled.add(pid)
                    os.kill(pid, signal.SIGTERM)
                    os.kill(pid, signal.SIGCONT)
        time.sleep(0.02)


def _is_zombie(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def _guard(name: str, owner: int) -> None:
    """Be the guardian: wait for a byte, for the end of the pipe or of the owner, then sweep."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # meant for the owner, whose end is what counts
    poll = select.poll()
    poll.register(0, select.POLLIN)
    pidfd = os.pidfd_open(owner)
    poll.register(pidfd, select.POLLIN)
    print("ready", flush=True)
    poll.poll()
    alive = not _ended(pidfd)
    sweep(name, spare=[owner] if alive else [])


def _ended(pidfd: int) -> bool:
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(0))


if __name__ == "__main__":
    _guard(sys.argv[1], int(sys.argv[2]))
