"""Writes docs/compatibility.md: what of torch.distributed works on backend "iroh", from what can be looked up.

    python scripts/compatibility.py [--check]

The table of virtuals compares csrc/c10d/process_group.hpp with the header of the torch that is installed; the suites
come from the ledgers tests/peer/world*.json and from the tests in tests/features. `--check` writes nothing and exits 1
if the page is not what would be written (a test does this).
"""

from __future__ import annotations

import argparse
import ast
import importlib.util
import json
import re
import sys
from collections import Counter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "compatibility.md"
OURS = ROOT / "csrc" / "c10d" / "process_group.hpp"

# Who in torch 2.13 calls a virtual; seen with a backend that counted calls (two ranks, CPU).
CALLERS = {
    "_allgather_base": "all_gather_into_tensor, FSDP2 forward",
    "_reduce_scatter_base": "reduce_scatter_tensor, FSDP1 and FSDP2 backward",
    "abort": "_abort_process_group, fault-tolerant trainers",
    "allgather": "all_gather, object collectives, DDP's check of shapes, FSDP1 on CPU, ZeRO-1, checkpoints",
    "allgather_coalesced": "all_gather_coalesced (deprecated)",
    "allgather_into_tensor_coalesced": "every functional all-gather: DTensor, torch.compile; coalescing manager",
    "allocateTensor": "FSDP2, if asked for",
    "allreduce": "all_reduce, DDP buckets and hooks, FSDP1 NO_SHARD, HSDP, DTensor, functional collectives",
    "allreduce_coalesced": "all_reduce_coalesced, coalescing manager",
    "allreduce_sparse": "nobody: DDP's sparse gradients come through allreduce",
    "alltoall": "all_to_all, backward of autograd's all_gather",
    "alltoall_base": "all_to_all_single, expert parallel, DTensor on devices",
    "barrier": "barrier",
    "broadcast": "broadcast, DDP's start and buffers, ZeRO-1, object lists, checkpoints",
    "eagerConnectSingleDevice": "init_process_group(device_id=...)",
    "enableCollectivesTiming": "NCCL's timing of collectives",
    "endCoalescing": "coalescing manager, if supportsCoalescing",
    "gather": "gather, gather_object, checkpoints",
    "getBackendName": "error texts, profiler",
    "getBackendOptions": "split_group",
    "getError": "watchers of failures",
    "getMemAllocator": "NCCL's memory pools",
    "getMemoryStats": "NCCL's memory",
    "getSequenceNumberForGroup": "debugging",
    "merge": "merge_remote_group",
    "monitoredBarrier": "group.monitored_barrier; torch_iroh.monitored_barrier",
    "recv": "recv, irecv, pipelining, objects",
    "recvAnysource": "recv without src",
    "reduce": "reduce",
    "reduce_scatter": "reduce_scatter",
    "reduce_scatter_tensor_coalesced": "every functional reduce-scatter: DTensor, torch.compile; coalescing manager",
    "registerOnCompletionHook": "hooks of NCCL's watchdog",
    "resume": "NCCL's memory",
    "scatter": "scatter, scatter_object_list, distribute_tensor",
    "send": "send, isend, pipelining, objects",
    "setGroupUid": "new_group",
    "setSequenceNumberForGroup": "split_group",
    "setTimeout": "group.set_timeout",
    "shrink": "shrink_group",
    "shutdown": "destroy_process_group",
    "split": "split_group, meshes of two dimensions after device_id",
    "startCoalescing": "coalescing manager, if supportsCoalescing",
    "supportsCoalescing": "batch_isend_irecv, coalescing manager",
    "supportsShrinking": "shrink_group",
    "supportsSplitting": "split_group, init_device_mesh",
    "supportsTensorAlloc": "FSDP2, if asked for",
    "supportsTimeEstimation": "inductor's estimates for NCCL",
    "suspend": "NCCL's memory",
    "waitForPendingWorks": "hooks of NCCL's watchdog",
}

# Why a virtual keeps the definition of c10d::Backend. Every one that is not overridden must be here.
INHERITED = {
    "allocateTensor": "torch's own allocators serve",
    "enableCollectivesTiming": "raises; gloo times its collectives, we count them in torch_iroh.stats",
    "endCoalescing": "not called",
    "getMemAllocator": "raises, as on gloo",
    "getMemoryStats": "raises, as on gloo",
    "registerOnCompletionHook": "raises, as on gloo",
    "resume": "raises, as on gloo",
    "setGroupUid": "the base keeps it",
    "shrink": "raises; make a group of the ranks that are left",
    "startCoalescing": "not called",
    "supportsCoalescing": "false: the manager then calls the *_coalesced forms",
    "supportsShrinking": "false",
    "supportsTensorAlloc": "false",
    "supportsTimeEstimation": "false",
    "suspend": "raises, as on gloo",
    "waitForPendingWorks": "raises, as on gloo",
}

# A reason for not running a test of torch's suite -> why that says nothing about this backend; the first that matches.
CATEGORIES = (
    (r"CUDA devices?|CUDA is not|CUDA device", "needs several GPUs"),
    (r"issues/|pull/|flak|Currently failing", "switched off by PyTorch itself"),
    (r"(?i)nccl|Coalescing manager", "asks for NCCL by name"),
    (r"world size", "needs another world size"),
    (r"torchvision", "needs torchvision"),
    (r"^torch: ", "torch cannot do it for a backend outside torch"),
    (r"", "other"),
)

SUITES = {
    "test_fsdp.py": "FSDP1, FSDP2, HSDP",
    "test_dtensor.py": "DTensor: redistribution, operations, tensor parallel, with FSDP2",
    "test_pipelining.py": "pipelining schedules",
    "test_checkpoint.py": "distributed checkpoints, resharding, async_save",
    "test_ddp.py": "DDP, comm hooks, local SGD, ZeRO-1, join, sparse gradients",
    "test_compile.py": "torch.compile, autograd and object collectives",
    "test_patterns.py": "programs of examples/patterns under torchrun",
}


def torch_folder() -> Path:
    """Where torch is installed, without importing it."""
    found = importlib.util.find_spec("torch")
    assert found is not None and found.origin is not None
    return Path(found.origin).parent


def virtuals_of_torch() -> list[str]:
    """Names of the virtual functions of c10d::Backend, in the order of the header."""
    header = torch_folder() / "include/torch/csrc/distributed/c10d/Backend.hpp"
    text = re.sub(r"//[^\n]*", "", header.read_text())
    return list(dict.fromkeys(re.findall(r"\bvirtual\s[^;{]*?(\w+)\s*\(", text)))


def virtuals_of_ours() -> set[str]:
    """Names that ProcessGroupIroh overrides."""
    text = re.sub(r"//[^\n]*", "", OURS.read_text())
    return set(re.findall(r"(\w+)\s*\([^;{}]*\)\s*(?:const\s*)?override", text))


def table(*rows: tuple[Any, ...]) -> list[str]:
    """Lines of a Markdown table; the first row is its head."""
    lines = [f"| {' | '.join(str(cell) for cell in row)} |" for row in rows]
    return [lines[0], f"|{' --- |' * len(rows[0])}", *lines[1:]]


def virtuals() -> list[str]:
    """The section on virtuals."""
    names, ours = virtuals_of_torch(), virtuals_of_ours()
    unknown = [name for name in names if name not in ours and name not in INHERITED]
    if unknown:
        raise SystemExit(f"neither overridden nor explained in INHERITED of scripts/compatibility.py: {unknown}")
    rows = [
        (f"`{name}`", CALLERS.get(name, ""), "ours" if name in ours else f"torch's: {INHERITED[name]}")
        for name in names
    ]
    done = sum(name in ours for name in names)
    return [
        "## The interface `c10d::Backend`",
        "",
        f"{done} of {len(names)} virtual functions are ours; each of the others keeps torch's definition for a reason.",
        "",
        *table(("function", "called by", "here"), *rows),
    ]


def category(reason: str) -> str:
    """Which of CATEGORIES a reason belongs to."""
    return next(name for pattern, name in CATEGORIES if re.search(pattern, reason))


def peer_suite() -> list[str]:
    """The section on PyTorch's own suite."""
    ledgers = {int(path.stem[5:]): json.loads(path.read_text()) for path in sorted(ROOT.glob("tests/peer/world*.json"))}
    rows: list[tuple[Any, ...]] = [("world", "torch", "passed", "failed", "not run", "gloo: passed, failed, not run")]
    for world, known in ledgers.items():
        gloo = known.get("gloo", {})
        beside = ", ".join(str(gloo[state]) for state in ("passed", "failed", "skipped")) if gloo else ""
        rows.append((world, known["torch"], len(known["passed"]), len(known["failed"]), len(known["not run"]), beside))
    lines = [
        "## PyTorch's own suite: `distributed_test`",
        "",
        "`make test-peer` runs it over real iroh on loopback; `make test` runs world 3. Where a test asks for gloo by",
        "name, it is let through in memory (`tests/peer/distributed_suite.py`); so are tests that PyTorch runs with 8",
        "ranks or more though 3 are enough, in the column of gloo as well. With its own gates gloo passes 90 tests at",
        "world 3 and 93 at world 4.",
        "",
        *table(*rows),
    ]
    for world, known in ledgers.items():
        reasons = known["not run"]
        counted = Counter(category(reason) for reason in reasons.values())
        lines += ["", f"Not run at world {world}:", ""]
        lines += table(("why", "tests"), *counted.most_common())
        lines += ["", f"<details><summary>each test not run at world {world}</summary>", ""]
        each = ((f"`{name}`", " ".join(text.split()).replace("|", "/")) for name, text in reasons.items())
        lines += table(("test", "reason"), *each)
        lines += ["", "</details>"]
    return lines


def count_tests(path: Path) -> int:
    """Test functions in a file (parameters not counted)."""
    body = ast.parse(path.read_text()).body
    return sum(isinstance(one, ast.FunctionDef) and one.name.startswith("test_") for one in body)


def features() -> list[str]:
    """The section on our own tests of torch's features."""
    folder = ROOT / "tests" / "features"
    rows = [(f"`{name}`", what, count_tests(folder / name)) for name, what in SUITES.items()]
    missing = {path.name for path in folder.glob("test_*.py")} - set(SUITES)
    if missing:
        raise SystemExit(f"not in SUITES of scripts/compatibility.py: {sorted(missing)}")
    return [
        "## Features of torch on top",
        "",
        "`tests/features` runs each program on gloo and on iroh in the same processes and compares the results (to",
        "1e-6 in float32; exactly where numbers are only moved), most of them with one process as well. What torch",
        "itself ties to CUDA, or what fails on gloo too, is said in the test.",
        "",
        *table(("file", "what", "test functions"), *rows),
    ]


def page() -> str:
    """The whole text."""
    head = [
        "# Compatibility",
        "",
        "What of `torch.distributed` works on backend `iroh`. Written by `scripts/compatibility.py`; a test checks",
        "that it is fresh.",
    ]
    return "\n".join([*head, "", *virtuals(), "", *peer_suite(), "", *features(), ""])


def main() -> None:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if the page is not fresh")
    if not parser.parse_args().check:
        PAGE.write_text(page())
    elif not PAGE.exists() or PAGE.read_text() != page():
        sys.exit("docs/compatibility.md is not fresh: python scripts/compatibility.py")


if __name__ == "__main__":
    main()
