"""Where this process stands among the ranks, and the few things the example says to all of them.

Needs an initialized default group (except Place). Small values travel as CPU tensors, whatever the model's device.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
from collections.abc import Iterable

import torch
import torch.distributed as dist


@dataclasses.dataclass(frozen=True)
class Place:
    rank: int
    world: int
    device: torch.device

    @staticmethod
    def from_environment(device: str, threads: int | None) -> Place:
        """From torchrun's variables; also sets torch's threads.

        By default this rank's share of the cores less one for the transport, at least one. OpenMP threads spin while
        they wait for each other: one more than there are free cores slows a step tenfold and more.
        """
        local_rank, local_world = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        torch.set_num_threads(threads or max(1, cores // local_world - 1))
        if device == "cuda":
            torch.cuda.set_device(local_rank % torch.cuda.device_count())
            return Place(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), torch.device("cuda"))
        return Place(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), torch.device(device))


def broadcast_rows(rows: torch.Tensor | None) -> torch.Tensor:
    """Rank 0's matrix of token ids, to all; the others pass None. int32 on the wire."""
    shape = torch.zeros(2, dtype=torch.int64) if rows is None else torch.tensor(rows.shape)
    dist.broadcast(shape, src=0)
    data = torch.empty(tuple(shape.tolist()), dtype=torch.int32) if rows is None else rows.int()
    dist.broadcast(data, src=0)
    return data.long()


def all_gather_int(value: int) -> list[int]:
    """Every rank's signed 64-bit value, by rank."""
    values = [torch.zeros(1, dtype=torch.int64) for _ in range(dist.get_world_size())]
    dist.all_gather(values, torch.tensor([value]))
    return [int(v.item()) for v in values]


def sum_over_ranks(values: list[float]) -> list[float]:
    total = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(total)
    return [float(v) for v in total.tolist()]


def mean_over_ranks(value: float) -> float:
    return sum_over_ranks([value])[0] / dist.get_world_size()


def checksum(parameters: Iterable[tuple[str, torch.Tensor]]) -> int:
    """The first 8 bytes of SHA-256 over names, types, shapes and all bits, as a signed integer (it fits a tensor)."""
    digest = hashlib.sha256()
    for name, tensor in parameters:
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return int.from_bytes(digest.digest()[:8], "big", signed=True)
