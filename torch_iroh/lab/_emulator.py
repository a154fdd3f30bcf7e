"""The process that is the internet: compiles csrc/lab on first use, starts it, and speaks its commands."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import select
import shlex
import shutil
import socket
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

from torch_iroh.lab._system import LabError

_COMPILERS = ("c++", "g++", "clang++")
_FLAGS = ("-std=c++20", "-O2")
_COMPILE_SECONDS = 300.0
_START_SECONDS = 10.0
_REPLY_SECONDS = 5.0
_REPLY_BYTES = 1 << 18
# Where a wheel has the sources, and where a source tree has them.
_SOURCES = (Path(__file__).parent / "emulator", Path(__file__).parents[2] / "csrc" / "lab")


@dataclass(frozen=True)
class Traffic:
    """What has arrived from one host at another."""

    packets: int
    bytes: int


def _sources() -> list[Path]:
    for folder in _SOURCES:
        found = sorted([*folder.glob("*.cpp"), *folder.glob("*.hpp")])
        if found:
            return found
    raise LabError(f"the emulator's sources are missing from {_SOURCES[0]}. Try: reinstall torch-iroh")


def _compiler() -> list[str]:
    chosen = shlex.split(os.environ.get("CXX", ""))
    if chosen:
        return chosen if shutil.which(chosen[0]) else []
    return [next(filter(shutil.which, _COMPILERS), "")] if any(map(shutil.which, _COMPILERS)) else []


def _cached() -> Path:
    digest = hashlib.sha256(repr((platform.machine(), _FLAGS)).encode())
    for file in _sources():
        digest.update(file.name.encode() + b"\0" + file.read_bytes())
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "torch-iroh" / f"lab-emulator-{digest.hexdigest()[:16]}"


def obstacle_of_emulator() -> str:
    """Say why the emulator can be neither found nor compiled; empty when it can."""
    if _cached().exists() or _compiler():
        return ""
    return (
        "the laboratory compiles its emulator once and finds no C++20 compiler. Try: apt-get install -y g++, or set CXX"
    )


def program() -> Path:
    """Return the emulator's program, compiled unless it was.

    Raises:
        LabError: there is no compiler, or it failed; the text has its first words.
    """
    target = _cached()
    if target.exists():
        return target
    obstacle = obstacle_of_emulator()
    if obstacle:
        raise LabError(obstacle)
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        made = Path(folder) / "emulator"
        files = [str(file) for file in _sources() if file.suffix == ".cpp"]
        arguments = [*_compiler(), *_FLAGS, *files, "-o", str(made)]
        try:
            done = subprocess.run(arguments, capture_output=True, text=True, timeout=_COMPILE_SECONDS, check=False)
        except subprocess.TimeoutExpired:
            raise LabError(f"compiling the emulator took more than {_COMPILE_SECONDS:g} s") from None
        if done.returncode != 0:
            raise LabError(f"the emulator does not compile ({' '.join(arguments)}):\n{done.stderr[:2000]}")
        made.replace(target)  # in one step: another laboratory may start at the same time
    return target


class Emulator:
    """A running emulator. Ends with :meth:`close`, or with this process."""

    def __init__(self, folder: Path, seed: int) -> None:
        self._control = str(folder / "control")
        self._log = folder / "emulator.log"
        with open(self._log, "w") as log:
            self._process = subprocess.Popen(
                [str(program()), self._control, str(os.getpid()), str(seed)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                start_new_session=True,  # Ctrl-C is for the owner
            )
        #: Whether it runs before other processes; else a busy machine looks like a slow link.
        self.realtime = self._first_line().endswith("realtime=1")

    def _first_line(self) -> str:
        assert self._process.stdout is not None
        if not select.select([self._process.stdout], [], [], _START_SECONDS)[0]:
            self.close()
            raise LabError(f"the emulator did not start within {_START_SECONDS:g} s")
        line = self._process.stdout.readline().strip()
        if not line.startswith("ready"):
            self.close()
            raise LabError(f"the emulator did not start: {self._log.read_text().strip()}")
        return line

    def request(self, *lines: str) -> str:
        """Send commands (csrc/lab/control.hpp lists them) and return the reply to the last.

        Raises:
            LabError: a command was refused, or the emulator is gone.
        """
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as own:
            own.bind("")  # the kernel chooses the name to reply to
            own.settimeout(_REPLY_SECONDS)
            try:
                own.sendto("\n".join(lines).encode(), self._control)
                reply = own.recv(_REPLY_BYTES).decode()
            except (TimeoutError, ConnectionRefusedError, FileNotFoundError) as error:
                raise LabError(f"the emulator does not answer ({error}); exit code {self._process.poll()}") from None
        if reply.startswith("error: "):
            raise LabError(f"the emulator refuses {reply.removeprefix('error: ')}")
        return reply

    def counters(self) -> dict[str, dict[str, int]]:
        """Return each site's counters."""
        found: dict[str, dict[str, int]] = json.loads(self.request("counters"))
        return found

    def traffic(self) -> dict[tuple[str, str], Traffic]:
        """Return what has arrived, by (from, to)."""
        return {(row[0], row[1]): Traffic(row[2], row[3]) for row in json.loads(self.request("traffic"))}

    def close(self) -> None:
        """End the process."""
        self._process.terminate()
        try:
            self._process.wait(_REPLY_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()
