"""A run rehearsed: one command in each of several homes, a relay if wanted, and what they print, line by line."""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import IO

from torch_iroh.lab._host import Host
from torch_iroh.lab._lab import Lab
from torch_iroh.lab._schedule import Schedule
from torch_iroh.lab._system import LabError

_RELAY_PORT = 3340
_RELAY_SECONDS = 30.0
_LAST_LINES_SECONDS = 5.0


@dataclass(frozen=True)
class Homes:
    """What the homes of a rehearsal are like; units as in :meth:`Lab.host`, one NAT kind for each or one for all."""

    count: int = 2
    nats: Sequence[str] = ("port",)
    up: float = 20.0
    down: float = 100.0
    queue: float = 50.0
    ipv6: bool = False

    def __post_init__(self) -> None:
        if not 1 <= self.count <= 200:
            raise ValueError(f"{self.count} homes: there can be 1 to 200")
        if len(self.nats) not in (1, self.count):
            raise ValueError(f"{len(self.nats)} NAT kinds for {self.count} homes: give one, or one for each")

    @property
    def names(self) -> list[str]:
        """Their names: home0, home1, ..."""
        return [f"home{number}" for number in range(self.count)]

    def make(self, lab: Lab) -> list[Host]:
        """Add them to a laboratory."""
        nats = self.nats if len(self.nats) > 1 else list(self.nats) * self.count
        return [
            lab.host(name, nat=nat, up=self.up, down=self.down, queue=self.queue, ipv6=self.ipv6)
            for name, nat in zip(self.names, nats, strict=True)
        ]


class Output:
    """Lines of several writers on one stream, each with its writer's name before it."""

    def __init__(self, names: Sequence[str], write: Callable[[str], object]) -> None:
        self._width = max(map(len, names), default=0)
        self._write = write
        self._lock = threading.Lock()

    def line(self, name: str, text: str) -> None:
        """Write one line."""
        with self._lock:
            self._write(f"{name:<{self._width}} | {text}\n")

    def follow(self, name: str, stream: IO[str]) -> threading.Thread:
        """Write the lines of a stream until it ends, on a thread that is returned."""

        def read() -> None:
            with contextlib.suppress(ValueError):  # closed with the laboratory
                for text in stream:
                    self.line(name, text.rstrip("\n"))

        thread = threading.Thread(target=read, name=f"output of {name}", daemon=True)
        thread.start()
        return thread


class Rehearsal:
    """Runs commands in the homes of a laboratory; `output` gets what they print, and what happens to them."""

    def __init__(self, lab: Lab, homes: Sequence[Host], output: Output, environment: Mapping[str, str]) -> None:
        self._lab = lab
        self._homes = list(homes)
        self._output = output
        self._environment = dict(environment)
        self._placeholders = {"n": str(len(homes)), "first": homes[0].address, "relay": "", "observer": ""}

    def start_relay(self, host: Host) -> None:
        """Run `torch-iroh relay` on a public host, and tell the homes of it.

        {relay} and {observer} in a command, TORCH_IROH_RELAY and TORCH_IROH_OBSERVER in its environment.

        Raises:
            LabError: it ended, or said nothing in time.
        """
        # No token: who can reach it is in this laboratory. The key of its observer is as short-lived as the laboratory.
        options = ["--bind", f"0.0.0.0:{_RELAY_PORT}", "--public-ip", host.address, "--observer-key", "none", "--json"]
        relay = host.popen(
            [sys.executable, "-m", "torch_iroh", "relay", *options],
            env=self._environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert relay.stdout is not None and relay.stderr is not None
        last_words = self._output.follow(host.name, relay.stderr)
        ready = select.select([relay.stdout], [], [], _RELAY_SECONDS)[0]
        told = relay.stdout.readline() if ready else ""
        if not told:
            last_words.join(1)
            state = f"ended with exit code {relay.wait(5)}" if ready else f"said nothing within {_RELAY_SECONDS:g} s"
            raise LabError(f"`torch-iroh relay` {state}; its words are above")
        found = json.loads(told)
        for placeholder, variable in (("relay", "TORCH_IROH_RELAY"), ("observer", "TORCH_IROH_OBSERVER")):
            if found[placeholder]:
                self._placeholders[placeholder] = self._environment[variable] = found[placeholder]

    def command_for(self, number: int, command: Sequence[str]) -> list[str]:
        """Fill in {i}, {n}, {name}, {address}, {first}, {relay} and {observer}; other braces stay."""
        home = self._homes[number]
        values = {**self._placeholders, "i": str(number), "name": home.name, "address": home.own_address}
        filled = list(command)
        for name, value in values.items():
            filled = [word.replace("{" + name + "}", value) for word in filled]
        return filled

    def run(
        self, command: Sequence[str], *, schedule: Schedule | None = None, timeout: float | None = None
    ) -> dict[str, int]:
        """Run a command in every home until all have ended, and return their exit codes (128 + N: by signal N).

        Raises:
            LabError: they did not end within `timeout` seconds, or trouble could not be made.
            OSError: the command cannot be started.
        """
        processes = [self._start(number, command) for number in range(len(self._homes))]
        readers = []
        for home, process in zip(self._homes, processes, strict=True):
            assert process.stdout is not None
            readers.append(self._output.follow(home.name, process.stdout))
        trouble = schedule.start(self._lab, lambda line: self._output.line("lab", line)) if schedule else None
        with trouble or contextlib.nullcontext():
            codes = self._wait(processes, timeout)
        for reader in readers:
            reader.join(_LAST_LINES_SECONDS)
        return codes

    def _start(self, number: int, command: Sequence[str]) -> subprocess.Popen[str]:
        home = self._homes[number]
        environment = {
            **self._environment,
            "TORCH_IROH_LAB_HOME": home.name,
            # This machine's name leads to an address that is not here: gloo would bind to loopback.
            "GLOO_SOCKET_IFNAME": home.device,
        }
        return home.popen(
            self.command_for(number, command),
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )

    def _wait(self, processes: Sequence[subprocess.Popen[str]], timeout: float | None) -> dict[str, int]:
        begin = time.monotonic()
        codes: dict[str, int] = {}
        running = {os.pidfd_open(process.pid): number for number, process in enumerate(processes)}
        try:
            while running:
                left = None if timeout is None else max(0.0, begin + timeout - time.monotonic())
                ended = select.select(list(running), [], [], left)[0]
                if not ended:
                    names = ", ".join(self._homes[number].name for number in running.values())
                    raise LabError(f"the command has not ended after {timeout:g} s in {names}")
                for pidfd in ended:
                    number = running.pop(pidfd)
                    os.close(pidfd)
                    code = processes[number].wait()
                    name = self._homes[number].name
                    codes[name] = code if code >= 0 else 128 - code
                    self._output.line("lab", f"{time.monotonic() - begin:7.2f} s  {name}: exit code {codes[name]}")
        finally:
            for pidfd in running:
                os.close(pidfd)
        return codes
