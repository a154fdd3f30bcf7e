"""Sizes, bandwidths and times as people write them on a command line: 64Mi, 100Mbit, 25ms."""

from __future__ import annotations

import argparse
import re

_BYTES = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}
_BITS = {"bit": 1, "kbit": 10**3, "mbit": 10**6, "gbit": 10**9, "tbit": 10**12}
_SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6}


def _quantity(text: str) -> tuple[float, str]:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-z]*)", text.strip().lower())
    return (float(match[1]), match[2]) if match else (-1.0, "")


def size(text: str) -> int:
    """Return bytes; raises argparse.ArgumentTypeError, as the others here do."""
    number, unit = _quantity(text)
    unit = unit.removesuffix("b") if unit.endswith("ib") or unit in ("b", "kb", "mb", "gb") else unit
    if number < 0 or unit not in _BYTES:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size like 4096, 64Ki or 64Mi")
    return int(number * _BYTES[unit])


def bandwidth(text: str) -> float:
    """Return bytes per second."""
    number, unit = _quantity(text)
    unit = unit.removesuffix("/s").removesuffix("ps")
    if number <= 0 or unit not in _BITS:
        raise argparse.ArgumentTypeError(f"{text!r} is not a bandwidth like 100Mbit or 10Gbit")
    return number * _BITS[unit] / 8


def seconds(text: str) -> float:
    """Return seconds."""
    number, unit = _quantity(text)
    if number < 0 or unit not in _SECONDS:
        raise argparse.ArgumentTypeError(f"{text!r} is not a time like 50ms or 200us")
    return number * _SECONDS[unit]
