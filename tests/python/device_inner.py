"""Compiles tests/accelerator_inner/: what stands in for NCCL on the simulated accelerator (simulated.py)."""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import os
import subprocess
import sys
import sysconfig
from pathlib import Path
from types import ModuleType

import torch

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "tests/accelerator_inner/inner.cpp"
BUILD = ROOT / "build/device_inner"


def build() -> Path:
    """Return the module's file, compiled if none is there that is named after exactly this source, flags and torch."""
    folder = Path(torch.__file__).parent
    command = [
        *(os.environ.get("CXX", "c++").split()),
        *("-std=c++20", "-fPIC", "-pthread", "-O1", "-g1", "-Wall", "-Wextra", "-Wno-attributes"),
        *("-D_GLIBCXX_USE_CXX11_ABI=1", "-isystem", str(folder / "include")),
        *("-isystem", str(folder / "include/torch/csrc/api/include"), "-isystem", sysconfig.get_paths()["include"]),
        *(["-bundle", "-undefined", "dynamic_lookup"] if sys.platform == "darwin" else ["-shared"]),
        f"-L{folder / 'lib'}",
    ]
    text = b"\0".join([" ".join(command).encode(), torch.__version__.encode(), SOURCE.read_bytes()])
    made = BUILD / hashlib.sha256(text).hexdigest()[:16] / "device_inner.so"
    made.parent.mkdir(parents=True, exist_ok=True)
    with (BUILD / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # the ranks of a test start together
        if not made.exists():
            new = made.with_suffix(".new")
            libraries = ["-ltorch_python", "-ltorch", "-ltorch_cpu", "-lc10"]
            subprocess.run([*command, str(SOURCE), *libraries, "-o", str(new)], check=True)
            new.replace(made)
    return made


def load() -> ModuleType:
    """Import it, built if needed."""
    spec = importlib.util.spec_from_file_location("device_inner", build())
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
