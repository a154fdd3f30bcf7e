"""How much a relay carries, what it costs the relay's core, and how long packets wait in it.

$ python benchmarks/relay.py                 (needs root: hosts that reach nothing but the relay are namespaces)
$ python benchmarks/relay.py --buffer 8Mi    (another --client-buffer)

Two iroh endpoints send each other bytes through one `torch-iroh relay`. All three share this machine's cores, so on a
small machine the endpoints' own cryptography is the limit of the unshaped rows; cpu is what the relay itself used.

link      the slow link: of both hosts in both directions, or that of the receiver alone; "memory" is the machine's
streams   of one connection, one way
Mbps      bytes of the streams, without headers
cpu_s_GB  CPU seconds of the relay for each GB of streams
rtt_p50, rtt_max   round-trip time of the connection in ms, each 50 ms while bytes flow; it is 0 when nothing does
dropped   messages that the relay dropped because the receiver was slower
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from statistics import median

from harness import parse_bytes, show_bytes

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests" / "python"))
import shaped
from relay_support import HUB, Peer, Relay, star

# Name, rates of the sender's and of the receiver's link, bytes.
LINKS = (
    ("memory", (0, 0), 256 << 20),
    ("100Mbit", (100_000_000, 100_000_000), 64 << 20),
    ("20Mbit", (20_000_000, 20_000_000), 16 << 20),
    ("to100Mbit", (0, 100_000_000), 64 << 20),
    ("to20Mbit", (0, 20_000_000), 16 << 20),
)
STREAMS = (1, 4)
TIMEOUT = 300.0


def cpu_seconds(process: int) -> float:
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def measure(rates: tuple[int, int], count: int, streams: int, buffer: int) -> str:
    with (
        star(2, rates) as (middle, (left, right)),
        Relay("--client-buffer", str(buffer), namespace=middle, bind="0.0.0.0:0") as relay,
    ):
        url = f"http://{HUB}:{relay.address[1]}"
        with (
            Peer([(url, None)], namespace=left, bind="0.0.0.0:0") as sender,
            Peer([(url, None)], namespace=right, bind="0.0.0.0:0") as receiver,
        ):
            sender("online")
            receiver("online")
            receiver.start("accept")
            sender("connect", receiver.id, url)
            receiver.result()
            paths = sender("paths")
            if [path[1] for path in paths] != [True]:
                raise RuntimeError(f"not by the relay only: {paths}")
            before = cpu_seconds(relay.process.pid)
            receiver.start("transfer", 0, count, streams, TIMEOUT)
            sender.start("transfer_watched", count, 0, streams, TIMEOUT)
            receiver.result(TIMEOUT)
            took, seen = sender.result(TIMEOUT)
            cpu = cpu_seconds(relay.process.pid) - before
            # The relay's metrics are for its own host, which is the namespace in the middle.
            relay.stop()
            dropped = [line for line in relay.log.splitlines() if "dropped" in line]
    what = dropped[-1].rpartition(": ")[2] if dropped else "?"
    row = f"{count * 8 / took / 1e6:8.0f}{cpu / count * 1e9:10.2f}{median(seen):9.0f}{max(seen):9}"
    return f"{streams:8}{row}  {what}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--buffer", type=parse_bytes, default=1 << 20, metavar="SIZE", help="--client-buffer (1Mi)")
    parser.add_argument("--links", nargs="+", choices=[link[0] for link in LINKS], default=[link[0] for link in LINKS])
    given = parser.parse_args()
    if obstacle := shaped.obstacle():
        print(f"relay.py: {obstacle}", file=sys.stderr)
        return 1
    print(f"# client buffer {show_bytes(given.buffer)}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
    print("link       streams    Mbps  cpu_s_GB  rtt_p50  rtt_max  dropped")
    for name, rates, count in LINKS:
        if name in given.links:
            for streams in STREAMS:
                print(f"{name:10}{measure(rates, count, streams, given.buffer)}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
