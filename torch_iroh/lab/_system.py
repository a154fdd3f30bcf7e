"""Commands of the system, and code that runs inside a network namespace. Knows nothing of hosts and NATs."""

from __future__ import annotations

import ctypes
import os
import shutil
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from torch_iroh.lab._leftovers import NAMESPACES

_CLONE_NEWNET = 0x40000000
_TOOLS = {"ip": "iproute2", "nft": "nftables"}
_COMMAND_SECONDS = 20.0
_Result = TypeVar("_Result")


class LabError(RuntimeError):
    """The laboratory cannot do what was asked; the text says why and what to try."""


def obstacle_of_system() -> str:
    """Say what this machine lacks for network namespaces; empty when nothing."""
    if not sys.platform.startswith("linux"):
        return "the laboratory is made of Linux network namespaces"
    if os.geteuid() != 0:
        return "the laboratory makes network namespaces and needs root. Try: sudo, or a container with --privileged"
    missing = [package for tool, package in _TOOLS.items() if shutil.which(tool) is None]
    if missing:
        return f"the laboratory needs {', '.join(missing)}. Try: apt-get install -y {' '.join(missing)}"
    if not os.path.exists("/dev/net/tun"):
        return "the laboratory needs /dev/net/tun. Try: modprobe tun, or a container with --device /dev/net/tun"
    return ""


def command(arguments: Sequence[str], *, text: str | None = None) -> str:
    """Run a command of the system and return what it printed.

    Raises:
        LabError: it failed; the text has its own words.
    """
    try:
        done = subprocess.run(
            arguments, input=text, capture_output=True, text=True, timeout=_COMMAND_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        raise LabError(f"`{' '.join(arguments)}` did not end within {_COMMAND_SECONDS:g} s") from None
    if done.returncode != 0:
        raise LabError(f"`{' '.join(arguments)}`: exit code {done.returncode}: {done.stderr.strip()}")
    return done.stdout


def ip(namespace: str, *lines: str) -> None:
    """Run lines of `ip` in a namespace, at once."""
    command(["ip", "-n", namespace, "-batch", "-"], text="\n".join(lines) + "\n")


def set_sysctl(namespace: str, **values: int) -> None:
    """Set /proc/sys/net/... of a namespace; a dot in a name is written as two underscores."""

    def write() -> None:
        for name, value in values.items():
            Path("/proc/sys/net", *name.split("__")).write_text(str(value))

    call(namespace, write)


def call(namespace: str, function: Callable[..., _Result], *arguments: Any) -> _Result:
    """Run a function in a namespace, on a thread of its own.

    Sockets that it makes stay there, usable from anywhere; processes that it starts are there from their first moment.
    """
    outcome: list[_Result] = []
    failure: list[BaseException] = []

    def run() -> None:
        try:
            _enter(namespace)
            outcome.append(function(*arguments))
        except BaseException as error:
            failure.append(error)

    thread = threading.Thread(target=run, name=f"in {namespace}")
    thread.start()
    thread.join()
    if failure:
        raise failure[0]
    return outcome[0]


def _enter(namespace: str) -> None:
    with open(NAMESPACES / namespace) as file:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.setns(file.fileno(), _CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), f"setns({namespace})")


def forget_connections(namespace: str) -> None:
    """Empty a namespace's table of connections, and with it all mappings of a NAT (what `conntrack -F` does)."""

    def flush() -> None:
        netfilter, delete, request, acknowledge = 12, 1 << 8 | 2, 1, 4
        family, version, resource = socket.AF_UNSPEC, 0, 0
        message = struct.pack("=IHHIIBBH", 20, delete, request | acknowledge, 1, 0, family, version, resource)
        with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, netfilter) as netlink:
            netlink.settimeout(_COMMAND_SECONDS)
            netlink.sendto(message, (0, 0))
            (error,) = struct.unpack_from("=i", netlink.recv(4096), 16)
        if error:
            raise LabError(f"connections of {namespace} cannot be forgotten: {os.strerror(-error)}")

    call(namespace, flush)
