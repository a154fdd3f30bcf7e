"""Hosts with a known link each, on one machine: namespaces whose only way to each other is this file's emulator.

A packet waits for its host's uplink (rate), travels (delay), waits for the other host's downlink (rate), and arrives.
Nothing is lost before a queue holds `QUEUE_SECONDS`. The kernel here has no netem, so each namespace has a TUN device
and one process carries the packets, super-frames as they are (UDP GSO): 100 Mbit/s is some 900 of them per second.

Needs root, /dev/net/tun and `ip`; :func:`obstacle` says what is missing.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import heapq
import os
import select
import shutil
import struct
import subprocess
import sys
import time
from collections.abc import Iterator

QUEUE_SECONDS = 2.0
_TUNSETIFF, _TUNSETOFFLOAD = 0x400454CA, 0x400454D0
_IFF_TUN, _IFF_NO_PI, _IFF_VNET_HDR = 0x1, 0x1000, 0x4000
_OFFLOAD = 0x01 | 0x02 | 0x04 | 0x08 | 0x20 | 0x40  # CSUM, TSO4, TSO6, TSO_ECN, USO4, USO6
_VNET_HEADER = 10
_CLONE_NEWNET = 0x40000000


def address(host: int) -> str:
    return f"10.77.0.{host + 1}"


def obstacle() -> str:
    """Why there can be no such network here; empty when there can."""
    if not sys.platform.startswith("linux"):
        return "namespaces are Linux's"
    if os.geteuid() != 0:
        return "making network namespaces needs root"
    if shutil.which("ip") is None:
        return "there is no `ip` (iproute2)"
    if not os.path.exists("/dev/net/tun"):
        return "there is no /dev/net/tun"
    name = f"ti{os.getpid()}probe"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True, check=False)
    if made.returncode != 0:
        return f"no namespace can be made: {made.stderr.strip()}"
    _ip("netns", "del", name)
    probe = [sys.executable, "-c", "import os; os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))"]
    if subprocess.run(probe, capture_output=True, check=False).returncode != 0:
        return "no real-time scheduling: a busy machine would be measured as a slow link"
    return ""


def enter(namespace: str) -> None:
    """Move this thread, and those it will start, into a namespace."""
    with open(f"/run/netns/{namespace}") as file:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.setns(file.fileno(), _CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), f"setns({namespace})")


def first_in_line() -> None:
    """Run this process, and the threads it will start, before others: what else a machine does is no part of a link."""
    os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))


@contextlib.contextmanager
def shaped(
    hosts: int, *, bits_per_second: float, delay: float, sites: list[int] | None = None, near: float = 0.0
) -> Iterator[list[str]]:
    """Give the namespaces of `hosts` hosts, each with a link of that rate; `delay` is seconds, one way.

    Between hosts of one site (`sites` has a number for each) the delay is `near`.
    """
    names = [f"ti{os.getpid()}h{host}" for host in range(hosts)]
    tuns: list[int] = []
    emulator = None
    try:
        for host, name in enumerate(names):
            _ip("netns", "add", name)
            tuns.append(_tun(f"{name}t"))
            _ip("link", "set", f"{name}t", "netns", name)
            _ip("-n", name, "link", "set", "lo", "up")
            _ip("-n", name, "addr", "add", f"{address(host)}/24", "dev", f"{name}t")
            _ip("-n", name, "link", "set", f"{name}t", "mtu", "1500", "txqueuelen", "4000", "up")
        places = ",".join(map(str, sites or range(hosts)))
        command = [sys.executable, __file__, str(bits_per_second / 8), str(delay), str(near), places, *map(str, tuns)]
        emulator = subprocess.Popen(command, pass_fds=tuns)
        yield names
        if emulator.poll() is not None:
            raise RuntimeError(f"the emulator ended with exit code {emulator.returncode}")
    finally:
        if emulator is not None:
            emulator.kill()
            emulator.wait()
        for tun in tuns:
            os.close(tun)
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)


def _tun(name: str) -> int:
    tun = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(tun, _TUNSETIFF, struct.pack("16sH14x", name.encode(), _IFF_TUN | _IFF_NO_PI | _IFF_VNET_HDR))
    fcntl.ioctl(tun, _TUNSETOFFLOAD, _OFFLOAD)
    return tun


def _carry(bytes_per_second: float, delay: float, near: float, sites: list[int], tuns: list[int]) -> None:
    """Be the network, until killed."""
    poll = select.epoll()
    for tun in tuns:
        poll.register(tun, select.EPOLLIN)
    host_of = {tun: host for host, tun in enumerate(tuns)}
    up, down = [0.0] * len(tuns), [0.0] * len(tuns)
    # (when, order, arrives, host, packet): first at the far end's downlink, then into its namespace
    waiting: list[tuple[float, int, bool, int, bytes]] = []
    order = 0
    dropped = 0
    while True:
        pause = -1.0
        while waiting:
            now = time.monotonic()
            if waiting[0][0] > now:
                pause = waiting[0][0] - now
                break
            when, _, arrives, host, packet = heapq.heappop(waiting)
            if arrives:
                with contextlib.suppress(OSError):  # what a namespace does not take is lost
                    os.write(tuns[host], packet)
                continue
            down[host] = max(when, down[host]) + (len(packet) - _VNET_HEADER) / bytes_per_second
            order += 1
            heapq.heappush(waiting, (down[host], order, True, host, packet))
        # epoll counts in milliseconds and rounds up: the last one is waited for here.
        for tun, _ in poll.poll(0 if 0 <= pause < 0.001 else pause):
            for _ in range(16):
                try:
                    packet = os.read(tun, 65_600)
                except BlockingIOError:
                    break
                ip = packet[_VNET_HEADER:]
                target = ip[19] - 1 if ip[0] >> 4 == 4 and ip[16:19] == b"\x0a\x4d\x00" else -1
                source = host_of[tun]
                if not 0 <= target < len(tuns):
                    continue
                now = time.monotonic()
                begin = max(now, up[source])
                if begin - now > QUEUE_SECONDS:
                    dropped += 1
                    print(f"shaped.py: host {source}: {dropped} packets dropped", file=sys.stderr, flush=True)
                    continue
                # A super-frame's first packet arrives before its last has left: the downlink begins with the uplink.
                up[source] = begin + len(ip) / bytes_per_second
                order += 1
                way = near if sites[source] == sites[target] else delay
                heapq.heappush(waiting, (begin + way, order, False, target, packet))


if __name__ == "__main__":
    first_in_line()
    _carry(
        float(sys.argv[1]),
        float(sys.argv[2]),
        float(sys.argv[3]),
        [int(site) for site in sys.argv[4].split(",")],
        [int(tun) for tun in sys.argv[5:]],
    )
