"""`torch-iroh lab`: rehearses a run on this machine, in homes whose NATs and lines you choose.

$ torch-iroh lab --homes 2 --up 20 --down 100 --delay 30 --relay -- env RANK={i} WORLD_SIZE={n} python train.py
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Sequence

from torch_iroh.lab._host import Host
from torch_iroh.lab._lab import Lab, obstacle
from torch_iroh.lab._nat import NATS
from torch_iroh.lab._rehearsal import Homes, Output, Rehearsal
from torch_iroh.lab._schedule import KINDS, Schedule
from torch_iroh.lab._system import LabError

_DESCRIPTION = """\
Rehearses a run: makes homes on this machine, each with a NAT and a line to an emulated internet, and runs the command
in each of them. What they print comes out with the home's name before it. Without a command the homes stand until
Ctrl-C, for commands of your own. Needs root, and removes all it made when it ends, however it ends."""

_EPILOG = """\
NAT kinds:
{nats}

placeholders in the command:
  {{i}} {{n}}                number of this home, how many there are
  {{name}} {{address}}       of this home: home0, and its own (private) IPv4 address
  {{first}}                public IPv4 address of home0
  {{relay}} {{observer}}     what --relay has started; the command also finds them in its environment

trouble (--trouble): one thing at a time, drawn from --seed
{kinds}

exit code: the worst of the command's; 2 if the laboratory cannot be made; 1 if the relay or trouble failed

example, four homes whose direct ways are cut now and then; behind their NATs they meet in a file that all see, so
train.py says dist.init_process_group("iroh", init_method="file:///tmp/run1", rank=..., world_size=...):
  torch-iroh lab --homes 4 --up 20 --down 100 --delay 30 --nat port --relay --trouble 5 --within 60 -- \\
    env RANK={{i}} WORLD_SIZE={{n}} python train.py"""


def _table(of: dict[str, str]) -> str:
    return "\n".join(f"  {name:<13} {text}" for name, text in of.items())


def _seconds(text: str) -> tuple[float, float]:
    try:
        shortest, _, longest = text.partition(":")
        return float(shortest), float(longest or shortest)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not like 1:8 (seconds)") from None


def _words(text: str) -> list[str]:
    return text.split(",")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="torch-iroh lab",
        usage="torch-iroh lab [options] [-- COMMAND ...]",
        description=_DESCRIPTION,
        epilog=_EPILOG.format(nats=_table(NATS), kinds=_table(KINDS)),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    homes = parser.add_argument_group("homes").add_argument
    homes("--homes", type=int, default=2, metavar="N", help="how many (%(default)s)")
    homes("--nat", type=_words, default=["port"], metavar="KIND[,KIND...]", help="one for all, or one for each (port)")
    homes("--up", type=float, default=20.0, metavar="MBIT", help="rate to the internet, 0 for no limit (%(default)g)")
    homes("--down", type=float, default=100.0, metavar="MBIT", help="rate from the internet (%(default)g)")
    homes("--queue", type=float, default=50.0, metavar="MS", help="longest wait for a line (%(default)g)")
    homes("--ipv6", action="store_true", help="a public IPv6 address for each host, too")
    ways = parser.add_argument_group("the ways between them").add_argument
    ways("--delay", type=float, default=15.0, metavar="MS", help="one way, half of what ping shows (%(default)g)")
    ways("--jitter", type=float, default=0.0, metavar="MS", help="packets take up to this longer (%(default)g)")
    ways("--loss", type=float, default=0.0, metavar="PERCENT", help="of packets (%(default)g)")
    ways("--relay", action="store_true", help="run `torch-iroh relay` on a host with a public address")
    trouble = parser.add_argument_group("trouble").add_argument
    trouble("--trouble", type=int, default=0, metavar="N", help="how many times (%(default)s)")
    trouble("--within", type=float, default=60.0, metavar="S", help="seconds in which it happens (%(default)g)")
    trouble("--kinds", type=_words, default=["cut", "unplug"], metavar="KIND[,KIND...]", help="(cut,unplug)")
    trouble("--lasts", type=_seconds, default=(1.0, 8.0), metavar="S[:S]", help="shortest and longest, seconds (1:8)")
    add = parser.add_argument
    add("--seed", type=int, default=1, metavar="N", help="of loss, jitter and trouble (%(default)s)")
    add("--timeout", type=float, metavar="S", help="seconds after which the run is ended, with exit code 1 (never)")
    add(
        "--udp-buffers",
        action="store_true",
        help="raise this machine's limits of UDP buffers to 32 MiB for the time; iroh asks for 7",
    )
    add("--counters", action="store_true", help="say at the end what each line has carried and dropped")
    return parser


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line; `arguments` default to those of the process."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    end = given.index("--") if "--" in given else len(given)
    parser = _parser()
    options = parser.parse_args(given[:end])
    command = given[end + 1 :]
    missing = obstacle()
    if missing:
        print(f"torch-iroh lab: {missing}", file=sys.stderr)
        sys.exit(2)
    if options.trouble and not command:
        parser.error("--trouble happens to a command. Try: -- COMMAND ...")
    try:
        homes = Homes(options.homes, options.nat, options.up, options.down, options.queue, options.ipv6)
        schedule = _schedule(options, homes)
    except ValueError as error:
        parser.error(str(error))
    signal.signal(signal.SIGTERM, _end)
    try:
        code = _rehearse(options, homes, schedule, command)
    except ValueError as error:
        parser.error(str(error))
    except (LabError, OSError) as error:
        print(f"torch-iroh lab: {error}", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)
    sys.exit(code)


def _end(number: int, frame: object) -> None:
    sys.exit(128 + number)


def _schedule(options: argparse.Namespace, homes: Homes) -> Schedule | None:
    if not options.trouble:
        return None
    return Schedule(
        options.seed,
        homes.names,
        seconds=options.within,
        events=options.trouble,
        kinds=options.kinds,
        lasts=options.lasts,
    )


def _rehearse(options: argparse.Namespace, homes: Homes, schedule: Schedule | None, command: Sequence[str]) -> int:
    ways = {"delay": options.delay, "jitter": options.jitter, "loss": options.loss}
    with Lab(**ways, seed=options.seed, udp_buffers=options.udp_buffers) as lab:
        if not lab.realtime:
            print("torch-iroh lab: no real-time priority here: a busy machine looks like slow lines", file=sys.stderr)
        made = homes.make(lab)
        output = Output([*homes.names, "relay"], _write)
        rehearsal = Rehearsal(lab, made, output, os.environ)
        if options.relay:
            rehearsal.start_relay(lab.host("relay", ipv6=options.ipv6))
        if not command:
            _stand(lab)
            return 0
        codes = rehearsal.run(command, schedule=schedule, timeout=options.timeout)
        if options.counters:
            for name, counted in lab.counters().items():
                output.line(name, " ".join(f"{key}={value}" for key, value in counted.items() if value))
        return max(codes.values())


def _stand(lab: Lab) -> None:
    for host in lab.hosts.values():
        print(f"{_described(host)}\n  ip netns exec {host.namespace} bash")
    print("Ctrl-C removes them.", flush=True)
    signal.pause()


def _described(host: Host) -> str:
    behind = "public" if host.is_public else f"{host.own_address}, NAT {host.nat}"
    return f"{host.name}: {host.address} ({behind})"


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


if __name__ == "__main__":
    main()
