"""One host of a laboratory: its namespace, the router before it, its addresses, and what happens to them mid-run."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from torch_iroh.lab import _nat, _system
from torch_iroh.lab._leftovers import processes_in
from torch_iroh.lab._system import LabError, command, ip

if TYPE_CHECKING:
    from torch_iroh.lab._emulator import Emulator

_Result = TypeVar("_Result")


@dataclass(frozen=True)
class Place:
    """A number of the emulated internet, and the addresses that belong to it (RFC 5737, RFC 3849)."""

    number: int

    @property
    def address(self) -> str:
        """The public IPv4 address."""
        network, host = divmod(self.number - 1, 250)
        return f"{('203.0.113', '198.51.100', '192.0.2')[network]}.{host + 1}"

    def private(self, host: int) -> str:
        """An IPv4 address of the home at this place."""
        return f"10.{self.number // 250}.{self.number % 250}.{host}"

    def address6(self, subnet: int, host: int) -> str:
        """An IPv6 address of this place's prefix."""
        return f"2001:db8:{self.number:x}:{subnet:x}::{host:x}"

    @property
    def prefix6(self) -> str:
        """The IPv6 prefix that is routed to this place."""
        return f"2001:db8:{self.number:x}::/48"


LAST_PLACE = 750


class Host:
    """A host, made by :meth:`Lab.host`. Its addresses change when it moves."""

    def __init__(self, prefix: str, name: str, *, nat: str, mtu: int, ipv6: bool, places: Iterable[Place]) -> None:
        self.name = name
        #: The network namespace; `ip netns exec` takes it.
        self.namespace = f"{prefix}-{name}"
        #: The router's, or the same where there is none.
        self.router = self.namespace if nat == "none" else f"{prefix}-{name}.nat"
        self._nat = nat
        self._mtu = mtu
        self._ipv6 = ipv6
        self._places = iter(places)
        self._first_place = self._place = next(self._places)
        self._rebinds = 0
        self._processes: list[subprocess.Popen[Any]] = []
        self._emulator: Emulator | None = None

    # ---- what it is ----

    @property
    def nat(self) -> str:
        """The kind of its NAT."""
        return self._nat

    @property
    def is_public(self) -> bool:
        """Whether there is no router before it."""
        return self.router == self.namespace

    @property
    def address(self) -> str:
        """The public IPv4 address: its own, or its router's."""
        return self._place.address

    @property
    def own_address(self) -> str:
        """The IPv4 address that the host itself has: behind a NAT a private one."""
        return self.address if self.is_public else self._first_place.private(2)

    @property
    def address6(self) -> str:
        """The host's IPv6 address, which no NAT changes; empty without IPv6."""
        return self._place.address6(1, 2) if self._ipv6 else ""

    @property
    def device(self) -> str:
        """The host's network interface."""
        return "wan0" if self.is_public else "eth0"

    # ---- how it is made: called by Lab ----

    def make(self, emulator: Emulator, region: str) -> None:
        """Make the namespaces, the NAT and the line to the internet."""
        self._emulator = emulator
        for namespace in {self.router, self.namespace}:
            command(["ip", "netns", "add", namespace])
            ip(namespace, "link set lo up")
        emulator.request(f"site {self.name} {self.router} {region}", f"line {self.name} mtu={self._mtu}")
        ip(self.router, f"link set wan0 mtu {self._mtu} txqueuelen 10000 up")
        if not self.is_public:
            self._make_home()
        self._take_place()

    def _make_home(self) -> None:
        ends = f"lan0 netns {self.router} type veth peer name eth0 netns {self.namespace}"
        command(["ip", "link", "add", *ends.split()])
        gateway = self._first_place.private(1)
        ip(self.router, f"addr add {gateway}/24 dev lan0", f"link set lan0 mtu {self._mtu} up")
        ip(
            self.namespace,
            f"addr add {self.own_address}/24 dev eth0",
            f"link set eth0 mtu {self._mtu} up",
            f"route add default via {gateway}",
        )
        _system.set_sysctl(self.router, ipv4__ip_forward=1)
        if self._ipv6:
            _system.set_sysctl(self.router, ipv6__conf__all__forwarding=1, ipv6__conf__lan0__keep_addr_on_down=1)
        self._apply_nat()

    def _take_place(self) -> None:
        """Give the addresses of the present place to the devices, and tell the internet."""
        place = self._place
        ip(self.router, f"addr add {place.address}/32 dev wan0", "route replace default dev wan0")
        prefixes = [place.address]
        if self._ipv6:
            prefixes.append(place.prefix6)
            if self.is_public:
                ip(self.router, f"addr add {self.address6}/128 dev wan0 nodad")
            else:
                ip(
                    self.router,
                    f"addr add {place.address6(0, 1)}/128 dev wan0 nodad",
                    f"addr add {place.address6(1, 1)}/64 dev lan0 nodad",
                )
                ip(
                    self.namespace,
                    f"addr add {self.address6}/64 dev eth0 nodad",
                    f"route replace ::/0 via {place.address6(1, 1)} dev eth0",
                )
            ip(self.router, "route replace ::/0 dev wan0")
        self._ask(f"route {self.name} {' '.join(prefixes)}")

    def _apply_nat(self) -> None:
        rules = _nat.rules(self._nat, self.own_address, self._rebinds)
        _system.call(self.router, lambda: command(["nft", "-f", "-"], text=rules))

    def _ask(self, *lines: str) -> None:
        assert self._emulator is not None
        self._emulator.request(*lines)

    # ---- what runs on it ----

    def popen(self, arguments: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
        """Start a command on this host; `options` are those of :class:`subprocess.Popen`.

        It ends with the laboratory: SIGTERM, and SIGKILL two seconds later. All but the network is this machine's.
        """
        # In the namespace before it runs: one that was still on its way there would outlive the laboratory.
        process: subprocess.Popen[Any] = self.call(lambda: subprocess.Popen(arguments, **options))
        self._processes.append(process)
        return process

    def run(
        self, arguments: Sequence[str], *, timeout: float = 60.0, check: bool = True, **options: Any
    ) -> subprocess.CompletedProcess[str]:
        """Run a command on this host and return its output as text.

        Raises:
            LabError: it failed (and `check`), or did not end within `timeout` seconds.
        """
        process = self.popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options)
        with process:
            try:
                output, errors = process.communicate(timeout=timeout)
            except subprocess.TimeoutExpired:
                process.kill()
                raise LabError(f"{self.name}: `{' '.join(arguments)}` did not end within {timeout:g} s") from None
        if check and process.returncode != 0:
            raise LabError(f"{self.name}: `{' '.join(arguments)}`: exit code {process.returncode}: {errors.strip()}")
        return subprocess.CompletedProcess(list(arguments), process.returncode, output, errors)

    def call(self, function: Callable[..., _Result], *arguments: Any) -> _Result:
        """Run a function of this process on this host, on a thread of its own, and return its result.

        Sockets that it makes belong to this host for good: ``host.call(socket.socket)``.
        """
        return _system.call(self.namespace, function, *arguments)

    def kill(self) -> list[int]:
        """Kill every process on this host (SIGKILL), and return their ids."""
        killed = []
        for pid in processes_in([self.namespace]):
            if pid != os.getpid():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                    killed.append(pid)
        return killed

    def reap(self) -> None:
        """Wait for processes that :meth:`popen` started and that have been ended; called by Lab."""
        for process in self._processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(5)
            for stream in (process.stdin, process.stdout, process.stderr):
                if stream is not None:
                    with contextlib.suppress(OSError):
                        stream.close()

    # ---- what happens to it ----

    def set_nat(self, nat: str) -> None:
        """Put another kind of NAT into its router; connections of the old one are forgotten.

        Raises:
            ValueError: no such kind, or a change from or to "none": there is, or is not, a router.
        """
        check_nat(nat)
        if (nat == "none") != self.is_public:
            raise ValueError(f"{self.name}: a host {'with' if self.is_public else 'without'} a public address stays so")
        if not self.is_public:
            self._nat, self._rebinds = nat, 0
            self._apply_nat()
            _system.forget_connections(self.router)

    def rebind(self) -> None:
        """Let its NAT forget all mappings and give out others, as one does that restarts.

        Raises:
            ValueError: it has no NAT, or a full cone, whose public ports are the host's own: move it instead.
        """
        if self._nat in ("none", "full"):
            raise ValueError(f"{self.name}: the mappings of NAT kind {self._nat!r} cannot change. Try: move()")
        self._rebinds += 1
        self._apply_nat()
        _system.forget_connections(self.router)

    def move(self) -> str:
        """Give it, or its router, another public address (and another IPv6 prefix), and return it.

        As when a provider renews a line: the old address leads nowhere, the NAT's mappings are forgotten. The host's
        own private address stays.
        """
        old, old6 = self._place, self.address6
        self._place = next(self._places)
        self._take_place()
        gone = [(self.router, f"addr del {old.address}/32 dev wan0")]
        if self._ipv6:
            if self.is_public:
                gone.append((self.router, f"addr del {old6}/128 dev wan0"))
            else:
                gone.append((self.router, f"addr del {old.address6(0, 1)}/128 dev wan0"))
                gone.append((self.router, f"addr del {old.address6(1, 1)}/64 dev lan0"))
                gone.append((self.namespace, f"addr del {old6}/64 dev eth0"))
        for namespace, line in gone:
            ip(namespace, line)
        if not self.is_public:
            _system.forget_connections(self.router)
        return self.address

    def unplug(self) -> None:
        """Pull its cable: the interface loses its carrier, addresses and routes stay."""
        self._carrier(False)

    def plug(self) -> None:
        """Put its cable back; the kernel takes up to a second to use it."""
        self._carrier(True)

    def _carrier(self, there: bool) -> None:
        if self.is_public:
            self._ask(f"line {self.name} plugged={int(there)}")
            ip(self.namespace, f"link set wan0 carrier {'on' if there else 'off'}")
        else:
            ip(self.router, f"link set lan0 {'up' if there else 'down'}")


def check_nat(nat: str) -> None:
    """Raise ValueError unless there is such a kind of NAT."""
    if nat not in _nat.NATS:
        raise ValueError(f"NAT kind {nat!r} is none of {', '.join(_nat.NATS)}")
