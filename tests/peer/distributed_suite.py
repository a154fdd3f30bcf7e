"""PyTorch's own `distributed_test`, which its wheel ships, on backend "iroh": real processes, real iroh over loopback.

    WORLD_SIZE=3 python -m pytest tests/peer/distributed_suite.py [-k NAME]      (BACKEND=gloo: the same on gloo)

Nothing of it is copied here: the module is read from the installed torch and changed in memory where it asks for the
name of a backend. A gate that is not found as often as expected stops the run, so that a new torch is looked at before
it is believed. outcomes.py runs this file in a process of its own (it forks, and must own the environment);
test_peer.py compares the outcome of each test with the ledger, world3.json.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import importlib.util
import os
import re
import shutil
import signal
import sys
import tempfile
import types
import unittest
from collections.abc import Callable
from pathlib import Path
from typing import Any

BACKEND = os.environ.setdefault("BACKEND", "iroh")
WORLD = int(os.environ.setdefault("WORLD_SIZE", "3"))
TEST_SECONDS = 100  # for one test; some take 40 s on two busy cores

# The suite makes its files here, and asks for these three folders.
_folder = Path(tempfile.mkdtemp(prefix="torch-iroh-peer-"))
for name in ("barrier", "test_dir", "init_dir"):
    (_folder / name).mkdir()
os.environ.update(
    TEMP_DIR=str(_folder),
    INIT_METHOD=f"file://{_folder}/shared_init",  # only for tests that make the default group a second time
    DISTRIBUTED_TESTS_DEFAULT_TIMEOUT=str(TEST_SECONDS),
    OMP_NUM_THREADS="1",
)
os.environ.setdefault("TORCH_IROH_BIND", "127.0.0.1:0")
os.environ.setdefault("TORCH_IROH_SHARED_MEMORY", "off")  # "auto": the same over shared memory

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch.distributed import distributed_c10d  # noqa: E402
from torch.testing._internal import common_distributed  # noqa: E402

MODULE = "torch.testing._internal.distributed.distributed_test"

# pattern, replacement, how often torch 2.13 has it. Each asks for a backend by name where the test needs only what that
# backend can do.
GATES = (
    (r'BACKEND != "gloo"', 'BACKEND not in ("gloo", _OURS)', 19),
    (r'BACKEND == "gloo"', 'BACKEND in ("gloo", _OURS)', 1),
    (r'BACKEND != "mpi"', 'BACKEND not in ("mpi", _OURS)', 17),
    (r'require_backend_is_available\(\{"gloo"\}', 'require_backend_is_available({"gloo", _OURS}', 19),
)

# Tests that cannot say anything about a backend outside torch, with the reason.
DESELECTED = {
    "test_ddp_logging_data_cpu": "torch: the C++ logger calls every plug-in 'custom', the test asks for its name",
}


def open_gates(source: str) -> str:
    """The suite's source with "iroh" admitted; SystemExit if it is not the source these gates were written for."""
    for pattern, replacement, expected in GATES:
        source, found = re.subn(pattern, replacement, source)
        if found != expected:
            raise SystemExit(
                f"{MODULE} of torch {torch.__version__}: found {found} times, not {expected}: {pattern}\n"
                f"Read what changed there, then correct GATES in {__file__}."
            )
    return source


def skip_without_gpus(count: int, **_: Any) -> Callable[[Any], Any]:
    """In place of torch's skip_if_lt_x_gpu, which starts all ranks before it finds that there is no GPU."""
    return unittest.skipIf(torch.cuda.device_count() < count, f"Need at least {count} CUDA devices")


def monitored_barrier(group: Any = None, timeout: Any = None, wait_all_ranks: bool = False) -> None:
    """dist.monitored_barrier without its question for the name "gloo"."""
    if distributed_c10d._rank_not_in_group(group):
        return
    group = group or distributed_c10d._get_default_group()
    if timeout is None:
        timeout = distributed_c10d._get_default_timeout(dist.get_backend(group))
    elif isinstance(timeout, float):
        timeout = distributed_c10d.timedelta(seconds=timeout)
    return group.monitored_barrier(timeout, wait_all_ranks=wait_all_ranks)


def load() -> types.ModuleType:
    """Import the suite with the gates open."""
    spec = importlib.util.find_spec(MODULE)
    assert spec is not None and spec.origin is not None
    module = importlib.util.module_from_spec(spec)
    module._OURS = "iroh"
    for feature in ("gpu", "cuda", "ddp", "subgroup", "plugin"):
        common_distributed.DistTestCases.backend_feature[feature].add(BACKEND)
    common_distributed.skip_if_lt_x_gpu = skip_without_gpus
    common_distributed.skip_if_no_gpu = skip_without_gpus(WORLD)
    # Upstream never runs these: it wants 8 ranks. They need 3, for a subgroup of ranks 1 and 2.
    common_distributed.skip_if_small_worldsize = lambda function: function
    if BACKEND == "iroh":
        dist.monitored_barrier = distributed_c10d.monitored_barrier = monitored_barrier
    sys.modules[MODULE] = module
    exec(compile(open_gates(Path(spec.origin).read_text()), spec.origin, "exec", dont_inherit=True), module.__dict__)
    for supported in ("PROFILING_SUPPORTED_BACKENDS", "SEND_RECV_PROFILING_SUPPORTED_BACKENDS"):
        getattr(module, supported).append(BACKEND)
    return module


suite = load()


class TestDistributed(suite.TestDistBackend, suite.DistributedTest._DistTestBase):  # type: ignore[name-defined,misc]
    """The suite, each test in WORLD_SIZE forked processes (upstream spawns: 15 s a test)."""

    def setUp(self) -> None:
        super().setUp()
        self._start_processes(torch.multiprocessing.get_context("fork").Process)

    def tearDown(self) -> None:
        left = list(self.processes)
        super().tearDown()  # terminates them
        for process in left:
            process.join(2)
            if process.is_alive():
                process.kill()
                process.join()
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.file_name)

    @classmethod
    def _run(cls, rank: int, *arguments: Any, **options: Any) -> None:
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: a killed test run leaves no rank behind
        super()._run(rank, *arguments, **options)


for _name, _reason in DESELECTED.items():
    setattr(TestDistributed, _name, unittest.skip(_reason)(getattr(TestDistributed, _name)))


@atexit.register
def _remove_folder(owner: int = os.getpid()) -> None:
    if os.getpid() == owner:
        shutil.rmtree(_folder, ignore_errors=True)
