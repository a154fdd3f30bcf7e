"""A simulated accelerator, "sim:0" and "sim:1", on which a forgotten wait or record_stream shows as wrong numbers.

`load()` compiles tests/accelerator/ into build/ when its sources changed (about a minute), then makes this module
`torch.sim`. After that the generic classes serve: `torch.Stream(device="sim")`, `torch.Event("sim")`,
`torch.accelerator`. Streams run in threads and start each piece of work late, by default 0.5 to 3 ms.

    sim = simulated.load()
    with sim.held(sim.current_stream()):       # the device is busy: nothing on this stream happens
        work = dist.all_reduce(tensor, async_op=True)
        work.wait()                            # must not wait for the device
    assert sim.counters()["main"]["device"] == 0
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import hashlib
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from types import ModuleType

import torch
from torch.utils.backend_registration import rename_privateuse1_backend

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ROOT / "tests/accelerator"
BUILD = ROOT / "build/simulated"
WAITS = ("event", "stream", "device", "copy", "scalar", "fallback")

DeviceLike = torch.device | str | int | None


# ---- building ----


def load() -> ModuleType:
    """Build if needed, load and register the accelerator once per process. Returns this module."""
    module = sys.modules[__name__]
    if getattr(torch, "sim", None) is not module:
        torch.ops.load_library(build())
        rename_privateuse1_backend("sim")
        torch._register_device_module("sim", module)
        atexit.register(_finish)
    return module


def _finish() -> None:
    # A kernel that still runs must not meet the destructors of torch's statics.
    for index in range(device_count()):
        with contextlib.suppress(RuntimeError):
            synchronize(index)


def build() -> Path:
    """Return the library, compiled if none is there that is named after exactly these sources, flags and torch."""
    torch_folder = Path(torch.__file__).parent
    command = [
        *(os.environ.get("CXX", "c++"), "-std=c++20", "-fPIC", "-pthread", "-O1", "-g1", "-Wall", "-Wextra"),
        *("-Wno-attributes", "-D_GLIBCXX_USE_CXX11_ABI=1", f"-I{SOURCES}", "-isystem", str(torch_folder / "include")),
        *("-dynamiclib" if sys.platform == "darwin" else "-shared", f"-L{torch_folder / 'lib'}"),
    ]
    libraries = ["-ltorch", "-ltorch_cpu", "-lc10"]
    texts = [path.read_bytes() for path in sorted(SOURCES.iterdir()) if path.suffix in (".cpp", ".hpp")]
    name = hashlib.sha256(b"\0".join([" ".join(command).encode(), torch.__version__.encode(), *texts])).hexdigest()[:16]
    library = BUILD / f"libsim-{name}.so"
    BUILD.mkdir(parents=True, exist_ok=True)
    with (BUILD / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # the ranks of a test start together
        if not library.exists():
            # One translation unit: torch's headers cost most of the time.
            whole = BUILD / f"{name}.cpp"
            whole.write_text("".join(f'#include "{path.name}"\n' for path in sorted(SOURCES.glob("*.cpp"))))
            new = library.with_suffix(".new")
            subprocess.run([*command, str(whole), *libraries, "-o", str(new)], check=True)
            new.replace(library)
    return library


# ---- switches and counters of the tests ----


def set_delay(low_ms: float, high_ms: float, seed: int = 0) -> None:
    """Choose how late all work enqueued from now on starts, uniformly between the bounds."""
    torch.ops.sim.set_delay(low_ms, high_ms, seed)


@contextlib.contextmanager
def held(*streams: torch.Stream) -> Iterator[None]:
    """Let nothing run that is enqueued on these streams inside the block; the host's waits for it end after 60 s."""
    holds = [torch.ops.sim.hold(stream.device_index, stream.stream_id) for stream in streams]
    try:
        yield
    finally:
        for hold in holds:
            torch.ops.sim.release(hold)


def counters() -> dict[str, dict[str, int]]:
    """Count how often the host waited: by "main", the thread that loaded the library, and by "other" threads.

    event, stream, device: calls of synchronize. copy: with unpinned memory or without non_blocking. scalar: item().
    fallback: operators that cannot be enqueued.
    """
    counts = torch.ops.sim.wait_counts()
    kinds = len(WAITS)
    return {
        "main": dict(zip(WAITS, counts[:kinds], strict=True)),
        "other": dict(zip(WAITS, counts[kinds:], strict=True)),
    }


def reset_counters() -> None:
    """Set all counters to 0."""
    torch.ops.sim.reset_wait_counts()


def live_allocations(device: DeviceLike = None) -> int:
    """Count the device's memory blocks that somebody holds (not bytes, and not cached blocks)."""
    return int(torch.ops.sim.live_allocations(_index(device)))


def pool_stream(device: DeviceLike = None) -> torch.Stream:
    """Return the pool's next stream, of 8, as getStreamFromGlobalPool does."""
    index = _index(device)
    return torch.Stream(
        stream_id=torch.ops.sim.pool_stream(index), device_index=index, device_type=_device_type_number()
    )


def _device_type_number() -> int:
    return torch.Stream(device="sim").device_type


# ---- what torch asks of a device module ----

Stream = torch.Stream
Event = torch.Event


def is_available() -> bool:
    return True


def is_initialized() -> bool:
    return True


def device_count() -> int:
    return 2


def current_device() -> int:
    return torch.accelerator.current_device_index()


def set_device(device: DeviceLike) -> None:
    torch.accelerator.set_device_index(_index(device))


def device(device: DeviceLike) -> AbstractContextManager[object]:
    return torch.accelerator.device_index(_index(device))


def current_stream(device: DeviceLike = None) -> torch.Stream:
    return torch.accelerator.current_stream(_index(device))


def default_stream(device: DeviceLike = None) -> torch.Stream:
    return torch.Stream(stream_id=0, device_index=_index(device), device_type=_device_type_number())


def set_stream(stream: torch.Stream) -> None:
    torch.accelerator.set_stream(stream)


def stream(stream: torch.Stream) -> AbstractContextManager[object]:
    return stream


def synchronize(device: DeviceLike = None) -> None:
    torch.accelerator.synchronize(_index(device))


def empty_cache() -> None:
    torch.accelerator.empty_cache()


def get_amp_supported_dtype() -> list[torch.dtype]:
    return [torch.bfloat16, torch.float16]


def get_rng_state(device: DeviceLike = None) -> torch.Tensor:
    return torch.get_rng_state()


def set_rng_state(state: torch.Tensor, device: DeviceLike = None) -> None:
    torch.set_rng_state(state)


def manual_seed_all(seed: int) -> None:
    """Do nothing: random numbers are the CPU's, and torch.manual_seed has set their seed."""


def _is_in_bad_fork() -> bool:
    return False


def _index(device: DeviceLike) -> int:
    if isinstance(device, str):
        device = torch.device(device)
    index = device.index if isinstance(device, torch.device) else device
    return torch.accelerator.current_device_index() if index is None else index
