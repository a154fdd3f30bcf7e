"""What do codecs save, what do they lose, and how fast are they on one core?

Each codec of torch_iroh.codec on standard normal values, and beside it the obvious torch code for the same thing: a
cast for bf16, absmax by block for fp8 and int8, torch.topk for topk. Frames carry a checksum, torch's tensors do not.
Both allocate what they return. All rows take turns in every round of one run. No network is used.

    python benchmarks/compression.py
    python benchmarks/compression.py --values 16Mi --codecs int8:block=64+rounding=stochastic,topk

codec     as in Options; its parameters behind the colon
by        iroh or torch
ratio     bytes of the values as float32 / bytes of the frame; for torch, of the tensors that would be sent
error     |x - decoded x| / |x|, by 2-norms, from the decoded data of the last round
enc_GBps  10^9 bytes of float32 that are encoded per second, at the median of the rounds; dec_GBps likewise
enc_x     torch's median time of encoding / this row's: above 1 is faster than torch; dec_x likewise

The second table: bits that the position of a kept value takes, beside the entropy of a random choice of so many.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import harness
import torch
from harness import parse_bytes, quantile

from torch_iroh import codec

BLOCK = 128
CODECS = ["none", "bf16", "fp8", "fp8-e5m2", "int8", "int8:rounding=stochastic", "int4", "sign"]
SPARSE = ["topk", "topk-int8", "topk-int4"]
DENSITIES = [0.1, 0.01, 0.001, 0.0001]

Encoded = Any  # bytes, or what torch's code would send


# ---- the peers: torch ----


def cast(dtype: torch.dtype) -> tuple[Callable[[torch.Tensor], Encoded], Callable[[Encoded, int], torch.Tensor]]:
    return lambda values: (values.to(dtype),), lambda sent, count: sent[0].float()


def by_absmax(
    dtype: torch.dtype, largest: float
) -> tuple[Callable[[torch.Tensor], Encoded], Callable[[Encoded, int], torch.Tensor]]:
    def encode(values: torch.Tensor) -> Encoded:
        blocks = values.view(-1, BLOCK)
        scales = (blocks.abs().amax(1, keepdim=True) / largest).clamp_(min=2.0**-126)
        scaled = blocks / scales
        return (scaled if dtype.is_floating_point else scaled.round_()).to(dtype), scales.bfloat16()

    return encode, lambda sent, count: (sent[0].float() * sent[1].float()).view(-1)


def top(density: float) -> tuple[Callable[[torch.Tensor], Encoded], Callable[[Encoded, int], torch.Tensor]]:
    def encode(values: torch.Tensor) -> Encoded:
        positions = values.abs().topk(math.ceil(density * values.numel()), sorted=False).indices
        return values[positions], positions.int()

    def decode(sent: Encoded, count: int) -> torch.Tensor:
        return torch.zeros(count).scatter_(0, sent[1].long(), sent[0])

    return encode, decode


def peer_of(spec: str) -> tuple[Callable[[torch.Tensor], Encoded], Callable[[Encoded, int], torch.Tensor]] | None:
    if spec.startswith("topk:density="):
        return top(float(spec.removeprefix("topk:density=")))
    return {
        "bf16": cast(torch.bfloat16),
        "fp8": by_absmax(torch.float8_e4m3fn, 448),
        "fp8-e5m2": by_absmax(torch.float8_e5m2, 57344),
        "int8": by_absmax(torch.int8, 127),
        "topk": top(0.01),
    }.get(spec)


# ---- measuring ----


@dataclass
class Row:
    spec: str
    by: str
    encode: Callable[[torch.Tensor], Encoded]
    decode: Callable[[Encoded, int], torch.Tensor]
    encoding: list[float] = field(default_factory=list)
    decoding: list[float] = field(default_factory=list)
    bytes: int = 0
    error: float = 0.0

    def turn(self, values: torch.Tensor, record: bool) -> None:
        start = time.perf_counter()
        sent = self.encode(values)
        middle = time.perf_counter()
        found = self.decode(sent, values.numel())
        end = time.perf_counter()
        if record:
            self.encoding.append(middle - start)
            self.decoding.append(end - middle)
        self.bytes = len(sent) if isinstance(sent, bytes) else sum(part.nbytes for part in sent)
        self.error = float((found - values).norm() / values.norm())


def rows_of(specs: list[str]) -> list[Row]:
    rows = []
    for spec in specs:
        peer = peer_of(spec)
        if peer is not None:
            rows.append(Row(spec, "torch", *peer))
        rows.append(
            Row(
                spec,
                "iroh",
                lambda values, spec=spec: codec.encode(values, spec),
                lambda frame, count, spec=spec: codec.decode(frame, spec, count),
            )
        )
    return rows


def print_codecs(rows: list[Row], count: int) -> None:
    width = max(len(row.spec) for row in rows)
    table = harness.Table(codec=width, by=5, values=6, ratio=7, error=8, enc_GBps=8, dec_GBps=8, enc_x=6, dec_x=6)
    peers = {row.spec: row for row in rows if row.by == "torch"}
    for row in rows:
        encoding, decoding = quantile(row.encoding, 0.5), quantile(row.decoding, 0.5)
        peer = peers.get(row.spec)
        table.row(
            codec=row.spec,
            by=row.by,
            values=harness.show_bytes(count),
            ratio=f"{4 * count / row.bytes:.2f}",
            error=f"{row.error:.5f}",
            enc_GBps=f"{4 * count / encoding / 1e9:.2f}",
            dec_GBps=f"{4 * count / decoding / 1e9:.2f}",
            enc_x=f"{quantile(peer.encoding, 0.5) / encoding:.2f}" if peer else "-",
            dec_x=f"{quantile(peer.decoding, 0.5) / decoding:.2f}" if peer else "-",
        )


def print_positions(count: int) -> None:
    header = codec.frame_bytes("none", 0)
    table = harness.Table(density=8, kept=8, position_bits=13, entropy=8, over=6)
    for density in DENSITIES:
        kept = max(1, math.ceil(density * count))
        share = kept / count
        bits = 8 * (codec.frame_bytes(f"topk:density={density}", count) - header - 4 * kept) / kept
        entropy = (-share * math.log2(share) - (1 - share) * math.log2(1 - share)) / share
        table.row(
            density=density,
            kept=kept,
            position_bits=f"{bits:.3f}",
            entropy=f"{entropy:.3f}",
            over=f"{bits - entropy:.3f}",
        )


def parse_options() -> argparse.Namespace:
    description, columns = (__doc__ or "").split("\n    python", 1)
    parser = argparse.ArgumentParser(
        description=description, epilog="    python" + columns, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--values", type=parse_bytes, help=f"how many, a multiple of {BLOCK} (default: 4Mi)")
    parser.add_argument("--codecs", help="list, a codec and its parameters with + for , (default: one of each)")
    harness.add_common_options(parser)
    options = parser.parse_args()
    options.values = options.values or (1 << 16 if options.quick else 4 << 20)
    options.rounds = options.rounds or (3 if options.quick else 9)
    options.codecs = (
        [spec.replace("+", ",") for spec in options.codecs.split(",")] if options.codecs else CODECS + SPARSE
    )
    if options.values % BLOCK:
        parser.error(f"--values {options.values} is no multiple of {BLOCK}")
    for spec in options.codecs:
        try:
            codec.frame_bytes(spec, options.values)
        except ValueError as error:
            parser.error(str(error))
    return options


def main() -> int:
    options = parse_options()
    deadline = harness.Deadline(options.deadline)
    torch.set_num_threads(1)
    harness.print_header(
        f"{options.rounds} rounds on one core; figures of float32 bytes; *_x = torch's p50 / this row's; see --help",
        "iroh-tinker 0.5.0 publishes, on its own machine: int8 0.63 GB/s encode, 0.91 GB/s decode; 3.8x (int8), 50x",
        "(topk) and 80x (topk-int8; 122x in its varint form) on the wire",
    )
    values = torch.randn(options.values, generator=torch.Generator().manual_seed(1))
    rows = rows_of(options.codecs)
    for turn in range(options.rounds + 1):  # the first warms up
        for row in rows:
            if deadline.left() == 0:
                raise harness.RanksFailed(f"not done within {options.deadline:g} s. Try: a longer --deadline")
            row.turn(values, record=turn > 0)
    print_codecs(rows, options.values)
    print("#")
    print_positions(options.values)
    return harness.FINE


if __name__ == "__main__":
    harness.run_main(main)
