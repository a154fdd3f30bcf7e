"""`torch-iroh topology N`: what a collective of N ranks would take on links that the options describe.

$ torch-iroh topology 1000 --bytes 64Mi --bandwidth 1Gbit --latency 25ms

Connects to nothing. The public function behind it is :func:`torch_iroh.plan`.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
import sys
from collections.abc import Sequence

from torch_iroh import _plan, _units
from torch_iroh._plan import Link, Plan, plan

_DESCRIPTION = """\
What a collective of N ranks would take: its real schedules on a virtual clock. --bandwidth and --latency are those
between sites; without --hosts-per-site every host is a site. Within sites and hosts: the defaults of torch_iroh.plan.
Latency is one way, half of what ping shows."""

_EPILOG = """\
example:
  torch-iroh topology 1000 --bytes 64Mi --bandwidth 1Gbit --latency 25ms"""


def _positive(text: str) -> int:
    if not re.fullmatch(r"[0-9]{1,9}", text) or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 1 to 999999999")
    return int(text)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "torch-iroh topology",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("ranks", type=_positive, metavar="N", help="ranks")
    parser.add_argument("--op", default="all_reduce", help="the collective (all_reduce)")
    parser.add_argument("--bytes", type=_units.size, default=64 << 20, metavar="SIZE", help="of the whole (64Mi)")
    parser.add_argument("--dtype", default="float32", help="of the elements (float32)")
    parser.add_argument("--ranks-per-host", type=_positive, default=1, metavar="K", help="(1)")
    parser.add_argument("--hosts-per-site", type=_positive, default=None, metavar="M", help="(no sites: all are apart)")
    parser.add_argument(
        "--bandwidth", type=_units.bandwidth, default=_plan.WAN.bandwidth, metavar="RATE", help="(1Gbit)"
    )
    parser.add_argument(
        "--latency", type=_units.seconds, default=_plan.WAN.latency, metavar="TIME", help="one way (25ms)"
    )
    parser.add_argument(
        "--algorithm",
        default="auto",
        help="ring, direct, ring_bidirectional, tree, butterfly, bruck, hierarchical (auto: the fastest)",
    )
    parser.add_argument(
        "--plan",
        default=None,
        metavar="RULES",
        help="instead of --algorithm, as TORCH_IROH_PLAN: 'all_reduce<=64KiB=tree, *=auto'",
    )
    parser.add_argument("--json", action="store_true", help="one object with the fields of torch_iroh.Plan")
    return parser


def _time(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"


def table(found: Plan) -> str:
    """Lay a plan out for people."""
    how = {
        "everyone": "all ranks simulated",
        "period": f"{found.simulated_ranks} of {found.world} ranks simulated; the others do the same at the same time",
        "kinds": f"a sample: {found.simulated_ranks} of {found.world} ranks simulated, one host of each kind",
    }[found.method]
    rows = {"algorithm": found.algorithm, **({"levels": found.levels} if found.levels else {})}
    rows |= {
        "predicted time": f"{_time(found.predicted_seconds)} (half of the ranks: {_time(found.median_seconds)})",
        "depth": f"{found.depth} messages one after the other",
        "fan-out": f"{found.fan_out} peers, at most",
        "messages per rank": f"{found.messages_per_rank}, at most",
        "bytes per rank": f"{found.bytes_per_rank}, at most",
        "chunk": f"{found.chunk_bytes} bytes",
        "simulated": how,
        "to pin it": f"TORCH_IROH_PLAN='{found.op}={found.algorithm}'",
    }
    for name, seconds in sorted(found.alternatives.items(), key=lambda item: item[1]):
        if name != found.algorithm:
            rows[f"instead, {name}"] = _time(seconds)
    for name, why in found.refused.items():
        rows[f"not {name}"] = why
    width = max(map(len, rows))
    title = f"{found.op} of {found.bytes} bytes, {found.world} ranks"
    return "\n".join([title, *(f"  {name:<{width}}  {value}" for name, value in rows.items())])


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line; `arguments` default to those of the process."""
    parser = _parser()
    options = parser.parse_args(arguments)
    try:
        found = plan(
            options.op,
            bytes=options.bytes,
            world=options.ranks,
            ranks_per_host=options.ranks_per_host,
            hosts_per_site=options.hosts_per_site or 1,
            wan=Link(latency=options.latency, bandwidth=options.bandwidth),
            algorithm=options.algorithm,
            pins=options.plan,
            dtype=options.dtype,
        )
    except ValueError as error:
        print(f"torch-iroh topology: {error}", file=sys.stderr)
        sys.exit(2)
    print(json.dumps(dataclasses.asdict(found)) if options.json else table(found))


if __name__ == "__main__":
    main()
