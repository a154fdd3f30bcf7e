"""The laboratory as a whole: its hosts, the ways between them, and its end."""

from __future__ import annotations

import os
import re
import select
import subprocess
import sys
from collections.abc import Iterator
from types import TracebackType

from torch_iroh.lab import _leftovers
from torch_iroh.lab._emulator import Emulator, Traffic, obstacle_of_emulator, program
from torch_iroh.lab._host import LAST_PLACE, Host, Place, check_nat
from torch_iroh.lab._system import LabError, obstacle_of_system

UDP_BUFFER_BYTES = 32 << 20
_GUARDIAN_SECONDS = 10.0
_SWEEP_SECONDS = 30.0
_NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,30}")


def obstacle() -> str:
    """Say in one sentence why there can be no laboratory here; empty when there can."""
    return obstacle_of_system() or obstacle_of_emulator()


class Lab:
    """A laboratory, until :meth:`close` or the end of the `with`; also gone when this process dies, however it does.

    Args:
        delay: From any host to any other, one way, in milliseconds; :meth:`link` says otherwise for some.
        jitter: Packets take up to this much longer, in milliseconds, evenly distributed; they stay in order.
        loss: In percent of packets.
        seed: Of loss and jitter.
        udp_buffers: Raise this machine's limits of UDP buffers to 32 MiB until the end.

    Raises:
        LabError: something is missing; see :func:`obstacle`.
    """

    def __init__(
        self, *, delay: float = 0.0, jitter: float = 0.0, loss: float = 0.0, seed: int = 1, udp_buffers: bool = False
    ) -> None:
        missing = obstacle()
        if missing:
            raise LabError(missing)
        program()  # compiled before anything is made that would have to go again
        _leftovers.sweep_abandoned()
        self.hosts: dict[str, Host] = {}
        self._regions: set[str] = set()
        self._cuts: set[str] = set()
        self._places: Iterator[Place] = map(Place, range(1, LAST_PLACE + 1))
        self._closed = False
        self._emulator: Emulator | None = None
        #: What the names of its namespaces begin with.
        self.name, self._lock = _leftovers.make(os.getpid())
        self._guardian = self._start_guardian()
        try:
            if udp_buffers:
                _leftovers.raise_buffer_limits(self.name, UDP_BUFFER_BYTES)
            self._emulator = Emulator(_leftovers.FOLDER / self.name, seed)
            self._ask(f"everywhere {_rule(delay=delay, jitter=jitter, loss=loss)}")
        except BaseException:
            self.close()
            raise

    def _start_guardian(self) -> subprocess.Popen[str]:
        guardian = subprocess.Popen(
            [sys.executable, "-I", "-S", _leftovers.__file__, self.name, str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            pass_fds=[self._lock],
            start_new_session=True,
        )
        assert guardian.stdout is not None
        ready = select.select([guardian.stdout], [], [], _GUARDIAN_SECONDS)[0]
        if not ready or guardian.stdout.readline() != "ready\n":
            guardian.kill()
            _, errors = guardian.communicate()
            _leftovers.sweep(self.name, spare=[os.getpid()])
            os.close(self._lock)
            raise LabError(f"the laboratory's guardian did not start: {errors.strip()}")
        return guardian

    def __enter__(self) -> Lab:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End everything that runs in the laboratory and remove it. Harmless when repeated.

        Raises:
            LabError: something could not be removed; the text says what.
        """
        if self._closed:
            return
        self._closed = True
        try:
            errors = self._let_guardian_sweep()
        finally:
            for host in self.hosts.values():
                host.reap()
            if self._emulator is not None:
                self._emulator.close()
            os.close(self._lock)
        if errors:
            raise LabError(f"the laboratory could not be removed: {errors.splitlines()[-1]}")

    def _let_guardian_sweep(self) -> str:
        """Have the guardian sweep, the one that would after a crash; its error text."""
        guardian = self._guardian
        try:
            _, errors = guardian.communicate("close", timeout=_SWEEP_SECONDS)
        except subprocess.TimeoutExpired:
            guardian.kill()
            _, errors = guardian.communicate()
            errors = errors or f"its guardian did not end within {_SWEEP_SECONDS:g} s"
        if guardian.returncode < 0:  # killed by somebody
            _leftovers.sweep(self.name, spare=[os.getpid()])
            return ""
        return errors.strip() if guardian.returncode != 0 else ""

    # ---- hosts ----

    def host(
        self,
        name: str,
        *,
        nat: str = "none",
        up: float = 0.0,
        down: float = 0.0,
        queue: float = 50.0,
        region: str = "world",
        ipv6: bool = False,
        mtu: int = 1500,
    ) -> Host:
        """Add a host and return it.

        Args:
            name: Lower-case letters, digits and hyphens.
            nat: A key of :data:`NATS`; "none" gives the host itself a public address.
            up: Rate of its line to the internet in Mbit/s of Ethernet, as lines are sold; 0 for no limit.
            down: The same, from the internet.
            queue: What would wait longer for the line is dropped, in milliseconds.
            region: Hosts of one region share the rules of :meth:`link` for it.
            ipv6: Give it a public IPv6 address too; behind a NAT, its router lets in only what answers.
            mtu: Largest packet of its line, in bytes; larger ones that others send are lost in silence.

        Raises:
            ValueError: a name that is taken or odd, a NAT kind that there is not, a rate or size below zero.
        """
        for word in (name, region):
            if not _NAME.fullmatch(word):
                raise ValueError(f"{word!r} is no name like 'home-1': lower-case letters, digits, hyphens, at most 31")
        if name in self.hosts or name in self._regions or region in self.hosts or name == region:
            raise ValueError(f"there is a host or a region {name!r} already, or a host {region!r}")
        check_nat(nat)
        if not 1280 <= mtu <= 65_000:
            raise ValueError(f"mtu={mtu} is outside 1280 .. 65000")
        host = Host(self.name, name, nat=nat, mtu=mtu, ipv6=ipv6, places=self._places)
        host.make(self._running, region)
        self.hosts[name] = host
        self._regions.add(region)
        self.rate(host, up=up, down=down, queue=queue)
        return host

    def __getitem__(self, name: str) -> Host:
        """Return the host of that name; KeyError if there is none."""
        return self.hosts[name]

    # ---- the ways between them, at any time ----

    def link(
        self,
        a: Host | str,
        b: Host | str,
        *,
        delay: float | None = None,
        jitter: float | None = None,
        loss: float | None = None,
        reorder: bool | None = None,
        one_way: bool = False,
    ) -> None:
        """Set the way between two hosts, or between two regions (or inside one), for packets that leave from now on.

        A host's rule is stronger than that of its region. What is None stays as it is. `one_way`: from `a` to `b` only.
        Units as in :class:`Lab`; `reorder` lets jitter change the order of packets.
        """
        rule = _rule(delay=delay, jitter=jitter, loss=loss, reorder=None if reorder is None else int(reorder))
        self._ask(*(f"{way} {rule}" for way in self._ways(a, b, one_way)))

    def rate(
        self, host: Host | str, *, up: float | None = None, down: float | None = None, queue: float | None = None
    ) -> None:
        """Change a host's line; units as in :meth:`host`, and what is None stays as it is."""
        self._ask(f"line {self._name(host)} {_rule(up=up, down=down, queue=queue)}")

    def cut(self, a: Host | str, b: Host | str | None = None, *, one_way: bool = False) -> None:
        """Let nothing pass between two hosts or two regions, or, without `b`, between a host and all others.

        What is under way still arrives. `one_way`: nothing from `a` to `b`.
        """
        ways = [f"line {self._name(a)}"] if b is None else self._ways(a, b, one_way)
        self._ask(*(f"{way} cut=1" for way in ways))
        self._cuts.update(ways)

    def heal(self, a: Host | str | None = None, b: Host | str | None = None) -> None:
        """Undo :meth:`cut` with the same arguments, in both directions; without arguments, every cut."""
        if a is None:
            ways = sorted(self._cuts)
        else:
            ways = [f"line {self._name(a)}"] if b is None else self._ways(a, b, one_way=False)
        self._ask(*(f"{way} cut=0" for way in ways))
        self._cuts.difference_update(ways)

    def _ways(self, a: Host | str, b: Host | str, one_way: bool) -> list[str]:
        first, second = (end.name if isinstance(end, Host) else end for end in (a, b))
        kinds = {"sites" if end in self.hosts else "regions" if end in self._regions else "" for end in (first, second)}
        if "" in kinds or len(kinds) > 1:
            known = ", ".join([*self.hosts, *sorted(self._regions)])
            raise ValueError(f"{first!r} and {second!r} are not two hosts or two regions; there are: {known}")
        (kind,) = kinds
        ways = [f"{kind} {first} {second}"]
        return ways if one_way or first == second else [*ways, f"{kind} {second} {first}"]

    def _name(self, host: Host | str) -> str:
        name = host.name if isinstance(host, Host) else host
        if name not in self.hosts:
            raise ValueError(f"there is no host {name!r}; there are: {', '.join(self.hosts)}")
        return name

    # ---- what is seen ----

    @property
    def realtime(self) -> bool:
        """Whether the emulator runs before other processes; if not, a busy machine looks like a slow link."""
        return self._running.realtime

    def counters(self) -> dict[str, dict[str, int]]:
        """Count, for each host's line: packets and bytes sent and received, and dropped, by reason."""
        return self._running.counters()

    def traffic(self) -> dict[tuple[str, str], Traffic]:
        """Count what has arrived, by (from, to); pairs between which nothing has are absent."""
        return self._running.traffic()

    @property
    def _running(self) -> Emulator:
        if self._emulator is None or self._closed:
            raise LabError("this laboratory is closed")
        return self._emulator

    def _ask(self, *lines: str) -> None:
        self._running.request(*lines)


# As csrc/lab/control.cpp has them.
_LARGEST = {"loss": 100.0, "delay": 60e3, "jitter": 60e3, "queue": 60e3, "up": 1e6, "down": 1e6}


def _rule(**values: float | None) -> str:
    """Write the settings of a command; what is None is left out."""
    for name, value in values.items():
        if value is not None and not 0 <= value <= _LARGEST.get(name, 1):
            raise ValueError(f"{name}={value} is outside 0 .. {_LARGEST.get(name, 1):g}")
    return " ".join(f"{name}={value}" for name, value in values.items() if value is not None)
