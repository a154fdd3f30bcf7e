"""What the backend refuses before anything is sent, and in a forked child; the texts are for people."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from programs import error_of, group
from ranks import ENVIRONMENT, RemoteError, run_ranks

# ---- fork ----

FORKING = r"""
import gc
import os
import sys
import time
import torch
import torch.distributed as dist
import torch.multiprocessing as processes
import torch_iroh

def text_of(call):
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}".splitlines()[0]
    return "nothing"

def say(key, text):  # one write, so that lines of two ranks cannot mix
    os.write(1, f"{key} {text}\n".encode())

def child(rank):
    say("use", text_of(lambda: dist.all_reduce(torch.ones(3))))
    say("send", text_of(lambda: dist.send(torch.ones(3), 1 - rank)))
    say("stats", text_of(lambda: torch_iroh.stats()))
    say("destroy", text_of(dist.destroy_process_group))
    again = lambda: dist.init_process_group("iroh", store=dist.HashStore(), rank=0, world_size=2)
    say("again", text_of(again))
    gc.collect()
    sys.exit(0)  # through the interpreter's whole end

def work(rank, store):
    dist.init_process_group("iroh", store=dist.FileStore(store, 2), rank=rank, world_size=2)
    dist.all_reduce(torch.ones(100_000))
    pending = dist.all_reduce(torch.ones(100_000), async_op=True)
    pid = os.fork()
    if pid == 0:
        child(rank)
    _, status = os.waitpid(pid, 0)
    say("status", status)
    pending.wait()
    for _ in range(20):  # longer than the others would wait for a silent peer
        tensor = torch.full([100_000], rank + 1.0)
        dist.all_reduce(tensor)
        assert tensor.unique().tolist() == [3.0]
        time.sleep(0.1)
    say("parent", "went on")
    dist.destroy_process_group()

if __name__ == "__main__":
    processes.start_processes(work, args=(sys.argv[1],), nprocs=2, start_method="spawn")
"""


def test_forked_child_gets_an_error_exits_cleanly_and_leaves_the_parent_alone(tmp_path):
    program = tmp_path / "forking.py"
    program.write_text(FORKING)
    done = subprocess.run(
        [sys.executable, str(program), str(tmp_path / "store")],
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
        env={**os.environ, **ENVIRONMENT, "TORCH_IROH_PEER_TIMEOUT": "1", "TORCH_IROH_HEARTBEAT": "0.2"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found: dict[str, list[str]] = {}
    for line in done.stdout.splitlines():
        key, _, text = line.partition(" ")
        found.setdefault(key, []).append(text)
    assert found["status"] == ["0", "0"], done.stdout + done.stderr
    assert found["parent"] == ["went on", "went on"], done.stdout
    for key in ("use", "send", "stats"):
        for text in found[key]:
            assert text.startswith("RuntimeError: ") and "forked" in text, (key, text)
    assert found["destroy"] == ["nothing", "nothing"], found
    for text in found["again"]:
        assert text.startswith("RuntimeError: ") and "fork" in text, text


# ---- refusals ----


def strange_tensors() -> dict[str, torch.Tensor]:
    return {
        "sparse": torch.eye(3).to_sparse(),
        "sparse_csr": torch.eye(3).to_sparse_csr(),
        "meta": torch.empty(3, device="meta"),
        "quint8": torch.quantize_per_tensor(torch.ones(3), 1.0, 0, torch.quint8),
        "float4": torch.empty(3, dtype=torch.float4_e2m1fn_x2),
        "complex32": torch.zeros(3, dtype=torch.complex32),
    }


def refusals(rank: int, world: int, store: str) -> dict[str, str]:
    found = {}
    with group(rank, world, store):
        backend = dist.group.WORLD._get_backend(torch.device("cpu"))
        for kind, tensor in strange_tensors().items():
            calls: dict[str, Callable[[], Any]] = {
                "backend.allreduce": lambda t=tensor: backend.allreduce([t]),
                "backend.broadcast": lambda t=tensor: backend.broadcast([t]),
                "backend.allgather": lambda t=tensor: backend.allgather([[t, t]], [t]),
                "backend.gather": lambda t=tensor: backend.gather([[t, t]] if rank == 0 else [], [t]),
                "backend.scatter": lambda t=tensor: backend.scatter([t], [[t, t]] if rank == 0 else []),
                "backend.reduce_scatter": lambda t=tensor: backend.reduce_scatter([t], [[t, t]]),
                "backend.alltoall": lambda t=tensor: backend.alltoall([t, t], [t, t]),
                "backend.send": lambda t=tensor: backend.send([t], 1 - rank, 0),
                "backend.recv": lambda t=tensor: backend.recv([t], 1 - rank, 0),
            }
            # Other layouts have no kernel in torch's dispatcher, which on meta tensors does nothing; and it shows
            # complex32 to a backend as float16.
            if kind == "sparse":
                del calls["backend.allreduce"]  # the one operation that takes it
            if kind == "float4":
                calls["all_reduce"] = lambda t=tensor: dist.all_reduce(t)
                calls["broadcast"] = lambda t=tensor: dist.broadcast(t, 0)
                calls["send"] = lambda t=tensor: dist.send(t, 1 - rank)
            for name, call in calls.items():
                found[f"{name} {kind}"] = error_of(call)
        dist.barrier()  # the group is as good as before
    return found


def test_tensors_that_cannot_be_moved_raise_runtime_error(run, store):
    for found in run(2, refusals, 2, store):
        wrong = {label: text for label, text in found.items() if not text.startswith("RuntimeError: ")}
        assert not wrong, "\n".join(f"{label}: {text}" for label, text in wrong.items())


def wrong_arguments(rank: int, world: int, store: str) -> dict[str, str]:
    ones = torch.ones(4)
    lists = [torch.ones(4) for _ in range(world)]
    calls: dict[str, Callable[[], Any]] = {
        "broadcast root 2": lambda: dist.broadcast(ones, 2),
        "broadcast root -1": lambda: dist.broadcast(ones, -1),
        "reduce root 7": lambda: dist.reduce(ones, 7),
        "gather root 2": lambda: dist.gather(ones, None, dst=2),
        "scatter root 2": lambda: dist.scatter(ones, None, src=2),
        "send to 2": lambda: dist.send(ones, 2),
        "send to itself": lambda: dist.send(ones, rank),
        "send tag -1": lambda: dist.send(ones, 1 - rank, tag=-1),
        "recv from 2": lambda: dist.recv(ones, 2),
        "all_gather list of 1": lambda: dist.all_gather(lists[:1], ones),
        "all_gather list of 3": lambda: dist.all_gather([*lists, ones], ones),
        "all_gather own size": lambda: dist.all_gather([torch.ones(3) for _ in lists], ones),
        "all_gather dtypes": lambda: dist.all_gather([one.double() for one in lists], ones),
        "all_gather_into_tensor size": lambda: dist.all_gather_into_tensor(torch.ones(9), ones),
        "all_gather_into_tensor dtypes": lambda: dist.all_gather_into_tensor(torch.ones(8).int(), ones),
        "reduce_scatter list": lambda: dist.reduce_scatter(ones, lists[:1]),
        "reduce_scatter size": lambda: dist.reduce_scatter(torch.ones(3), lists),
        "reduce_scatter_tensor size": lambda: dist.reduce_scatter_tensor(ones, torch.ones(7)),
        "reduce_scatter_tensor dtypes": lambda: dist.reduce_scatter_tensor(ones, torch.ones(8).int()),
        "gather list": lambda: dist.gather(ones, lists[:1] if rank == 0 else lists, dst=0),
        "scatter list": lambda: dist.scatter(ones, lists[:1] if rank == 0 else lists, src=0),
        "scatter uneven": lambda: dist.scatter(ones, [ones, torch.ones(3)] if rank == 0 else lists, src=0),
        "all_to_all list": lambda: dist.all_to_all(lists[:1], lists[:1]),
        "all_to_all dtypes": lambda: dist.all_to_all(lists, [one.double() for one in lists]),
        "all_to_all_single odd": lambda: dist.all_to_all_single(torch.ones(3), torch.ones(3)),
        "all_to_all_single splits": lambda: dist.all_to_all_single(ones, ones, [1, 2], [2, 2]),
        "all_to_all_single three splits": lambda: dist.all_to_all_single(ones, ones, [2, 1, 1], [2, 2]),
        "all_to_all_single negative": lambda: dist.all_to_all_single(ones, ones, [5, -1], [2, 2]),
    }
    with group(rank, world, store):
        found = {name: error_of(call) for name, call in calls.items()}
        tensor = torch.ones(4)
        dist.all_reduce(tensor)  # refused before anything was sent
        found["afterwards"] = str(tensor.tolist())
    return found


def test_wrong_roots_lists_splits_and_dtypes_are_refused_before_anything_is_sent(run, store):
    for found in run(2, wrong_arguments, 2, store):
        assert found.pop("afterwards") == "[2.0, 2.0, 2.0, 2.0]"
        wrong = {}
        for name, text in found.items():
            # Some are refused by torch itself, before the backend is asked.
            if not re.match("RuntimeError: ProcessGroupIroh::|(TypeError|ValueError): ", text):
                wrong[name] = text
        assert not wrong, "\n".join(f"{name}: {text}" for name, text in wrong.items())


def all_to_all_own_size(rank: int, world: int, store: str) -> tuple[str, str]:
    with group(rank, world, store):
        text = error_of(lambda: dist.all_to_all([torch.ones(4), torch.ones(4)], [torch.ones(3), torch.ones(3)]))
        return text, error_of(dist.barrier)


def test_all_to_all_whose_own_block_has_two_sizes_is_refused_and_does_no_harm(run, store):
    for text, afterwards in run(2, all_to_all_own_size, 2, store):
        assert text.startswith("RuntimeError: ProcessGroupIroh::"), text
        assert afterwards == "nothing", afterwards


def mismatch(rank: int, world: int, store: str, which: str) -> str:
    first = rank == 0

    def gathered(count: int) -> None:
        dist.all_gather_into_tensor(torch.ones(count * world), torch.ones(count))

    calls: dict[str, Callable[[], Any]] = {
        "size": lambda: dist.all_reduce(torch.ones(3 if first else 4)),
        "dtype": lambda: dist.all_reduce(torch.ones(3, dtype=torch.float32 if first else torch.int32)),
        "op": lambda: dist.all_reduce(torch.ones(3), dist.ReduceOp.SUM if first else dist.ReduceOp.MAX),
        "call": lambda: dist.all_reduce(torch.ones(3)) if first else dist.broadcast(torch.ones(3), 0),
        "root": lambda: dist.broadcast(torch.ones(3), 0 if first else 1),
        "gathered size": lambda: gathered(3 if first else 4),
        "message size": lambda: dist.send(torch.ones(3), 1) if first else dist.recv(torch.ones(4), 0),
    }

    def call_and_go_on() -> None:
        calls[which]()
        dist.barrier()  # a rank that only sends hears of it here at the latest

    with group(rank, world, store):
        return error_of(call_and_go_on)


MISMATCHES = {
    "size": ("float32[3]", "float32[4]"),
    "dtype": ("float32[3]", "int32[3]"),
    "op": ("all_reduce(sum,", "all_reduce(max,"),
    "call": ("all_reduce(", "broadcast("),
    "root": ("root 0", "root 1"),
    "gathered size": ("float32[3]", "float32[4]"),
    "message size": ("3 elements", "4 elements"),
}


@pytest.mark.parametrize("which", sorted(MISMATCHES))
def test_ranks_that_call_different_things_hear_both(run, which, store):
    for rank, text in enumerate(run(2, mismatch, 2, store, which)):
        assert text.startswith("DistBackendError: "), (rank, text)
        for part in MISMATCHES[which]:
            assert part in text, (rank, text)


def test_remote_errors_are_readable():
    """The helper itself: an exception that cannot be pickled comes back as text."""
    (outcome,) = run_ranks(raise_unpicklable, 1)
    assert isinstance(outcome.error, RemoteError)
    assert "Local: of no use elsewhere" in str(outcome.error)


def raise_unpicklable(rank: int) -> None:
    class Local(Exception):
        pass

    raise Local("of no use elsewhere")
