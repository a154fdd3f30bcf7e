"""Tensors that are not plain memory: views among guard bytes, lazy conjugates, blocks in place, odd shapes."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.distributed as dist
from references import DEFAULT_ROADS, bits, random_bits, random_numbers
from scenarios import Ledger, road_groups

LAYOUTS = ["offset", "strided", "transposed", "columns"]


class Guarded:
    """A view inside random bytes; ``intact`` tells whether everything around it is as before."""

    def __init__(self, layout: str, dtype: str, values: torch.Tensor) -> None:
        rows, columns = values.shape
        self.base = random_bits(dtype, 4 * rows * columns + 64, 99, 0)
        mask = torch.zeros(self.base.shape, dtype=torch.bool)
        self.view = self._cut(layout, self.base, rows, columns)
        self._cut(layout, mask, rows, columns).fill_(True)
        self.view.copy_(values)
        self._around = ~mask
        self._before = self.base[self._around].clone()

    @staticmethod
    def _cut(layout: str, base: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
        if layout == "offset":
            return base[5 : 5 + rows * columns].view(rows, columns)
        if layout == "strided":
            return base[3 : 3 + 4 * rows * columns].view(rows, 2 * columns, 2)[:, ::2, 1]
        if layout == "transposed":
            return base[7 : 7 + rows * columns].view(columns, rows).t()
        return base[1 : 1 + 3 * rows * columns].view(columns, 3 * rows)[:, rows : 2 * rows].t()

    def intact(self) -> bool:
        return bool(np.array_equal(bits(self.base[self._around]), bits(self._before)))


def scenario_views(rank: int, layout: str, dtype: str) -> Ledger:
    ledger, world = Ledger(rank), dist.get_world_size()
    kind = getattr(torch, dtype)
    rows, columns = 2 * world, 3

    def values(peer: int) -> torch.Tensor:
        plain = torch.arange(rows * columns).view(rows, columns) + 10 * peer
        return (plain * (1 + 2j)).to(kind) if kind.is_complex else (plain % 120).to(kind)

    def guarded(peer: int | None) -> Guarded:
        return Guarded(layout, dtype, values(peer) if peer is not None else torch.zeros(rows, columns, dtype=kind))

    def check(op: str, output: Guarded, want: torch.Tensor) -> None:
        label = f"{op} world={world} dtype={dtype} layout={layout}"
        ledger.equal(label, output.view, want)
        ledger.true(label, output.intact(), "bytes around the view have changed")

    peers, everyone = range(world), [values(peer) for peer in range(world)]
    exact = torch.complex128 if kind.is_complex else torch.float64
    total = torch.stack([part.to(exact) for part in everyone]).sum(0).to(kind)
    mine = guarded(rank)
    dist.all_reduce(mine.view)
    check("all_reduce", mine, total)
    for root in peers:
        mine = guarded(rank)
        dist.reduce(mine.view, root)
        check(f"reduce to {root}", mine, total if rank == root else values(rank))
        mine = guarded(rank)
        dist.broadcast(mine.view, root)
        check(f"broadcast from {root}", mine, values(root))
        mine, outputs = guarded(rank), [guarded(None) for _ in peers]
        dist.gather(mine.view, [output.view for output in outputs] if rank == root else None, dst=root)
        check(f"gather at {root}, input", mine, values(rank))
        for peer in peers if rank == root else []:
            check(f"gather at {root}", outputs[peer], values(peer))
        output, inputs = guarded(None), [guarded(peer) for peer in peers]
        dist.scatter(output.view, [one.view for one in inputs] if rank == root else None, src=root)
        check(f"scatter from {root}", output, values(rank))
    mine, outputs = guarded(rank), [guarded(None) for _ in peers]
    dist.all_gather([output.view for output in outputs], mine.view)
    for peer in peers:
        check("all_gather", outputs[peer], values(peer))
    check("all_gather, input", mine, values(rank))

    output, part = guarded(None), Guarded(layout, dtype, values(rank)[:2])
    dist.all_gather_into_tensor(output.view, part.view)
    check("all_gather_into_tensor", output, torch.cat([values(peer)[:2] for peer in peers]))
    mine, output = guarded(rank), Guarded(layout, dtype, torch.zeros(2, columns, dtype=kind))
    dist.reduce_scatter_tensor(output.view, mine.view)
    check("reduce_scatter_tensor", output, total[2 * rank : 2 * rank + 2])
    check("reduce_scatter_tensor, input", mine, values(rank))
    output, inputs = guarded(None), [guarded(rank) for _ in peers]
    dist.reduce_scatter(output.view, [one.view for one in inputs])
    check("reduce_scatter", output, total)
    outputs, inputs = [guarded(None) for _ in peers], [guarded(rank) for _ in peers]
    dist.all_to_all([one.view for one in outputs], [one.view for one in inputs])
    for peer in peers:
        check("all_to_all", outputs[peer], values(peer))
    mine, output = guarded(rank), guarded(None)
    dist.all_to_all_single(output.view, mine.view)
    check("all_to_all_single", output, torch.cat([values(peer)[2 * rank : 2 * rank + 2] for peer in peers]))
    if world > 1:
        mine, output = guarded(rank), guarded(None)
        sending = dist.isend(mine.view, (rank + 1) % world)
        dist.recv(output.view, (rank - 1) % world)
        sending.wait()
        check("recv", output, values((rank - 1) % world))
    return ledger


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("dtype", ["bool", "int16", "uint32", "bfloat16", "float64", "complex64"])
def test_views_are_read_and_written_without_touching_what_lies_around_them(run_scenario, world, dtype):
    for layout in LAYOUTS:
        run_scenario(world, scenario_views, layout, dtype, roads=DEFAULT_ROADS)


def scenario_conjugate(rank: int) -> Ledger:
    """Where torch hands such views on as they are; most of its functions resolve or refuse them before."""
    ledger, world = Ledger(rank), dist.get_world_size()

    def value(peer: int) -> torch.Tensor:
        return (
            torch.arange(1, 6 * world + 1).to(torch.complex64) * (1 + 2j) + 10 * peer
        )  # no zeros, so no signs of zero

    for name, lazy in (("conj", torch.conj), ("neg", lambda tensor: tensor.conj().imag)):

        def view(peer: int, lazy: Callable[[torch.Tensor], torch.Tensor] = lazy) -> torch.Tensor:
            return lazy(value(peer))

        ledger.true(name, view(0).is_conj() or view(0).is_neg(), "not a lazy view; the test is void")
        total = torch.stack([view(peer).clone() for peer in range(world)]).sum(0)
        output = torch.zeros(6, dtype=total.dtype)
        dist.reduce_scatter_tensor(output, view(rank))
        ledger.equal(f"reduce_scatter_tensor {name}", output, total[6 * rank : 6 * rank + 6])
        outputs = [lazy(torch.zeros(6 * world, dtype=torch.complex64)) for _ in range(world)]
        dist.gather(view(rank), outputs if rank == 0 else None, dst=0)
        for peer, got in enumerate(outputs if rank == 0 else []):
            ledger.equal(f"gather {name}", got, view(peer))
    return ledger


@pytest.mark.parametrize("world", [1, 2, 3])
def test_lazy_conjugates_and_negatives_are_values_not_memory(run_scenario, world):
    run_scenario(world, scenario_conjugate, roads=DEFAULT_ROADS)


def scenario_adjacent_blocks(rank: int) -> Ledger:
    """Lists whose tensors lie one after the other in one tensor take the path without copies."""
    ledger, world = Ledger(rank), dist.get_world_size()
    for sizes in ([5] * world, [3 * peer for peer in range(world)]):
        base = torch.full([sum(sizes) + 2], -1, dtype=torch.int32)
        outputs = list(base[1:-1].split(sizes))
        dist.all_gather(outputs, torch.full([sizes[rank]], rank, dtype=torch.int32))
        want = [peer for peer, size in enumerate(sizes) for _ in range(size)]
        ledger.equal(f"adjacent {sizes}", base, torch.tensor([-1, *want, -1], dtype=torch.int32))
        # In place: the input is this rank's block of the output.
        base = torch.full([sum(sizes) + 2], -1, dtype=torch.int32)
        outputs = list(base[1:-1].split(sizes))
        outputs[rank].fill_(rank)
        dist.all_gather(outputs, outputs[rank])
        ledger.equal(f"in place {sizes}", base, torch.tensor([-1, *want, -1], dtype=torch.int32))
    whole = torch.arange(4 * world, dtype=torch.float32)
    dist.reduce_scatter_tensor(whole[4 * rank : 4 * rank + 4], whole)
    want = torch.arange(4 * world, dtype=torch.float32)
    want[4 * rank : 4 * rank + 4] *= world
    ledger.equal("reduce_scatter in place", whole, want)
    return ledger


@pytest.mark.parametrize("world", [1, 2, 3, 5])
def test_lists_that_are_one_stretch_of_memory_and_in_place_use(run_scenario, world):
    run_scenario(world, scenario_adjacent_blocks, roads=DEFAULT_ROADS)


def scenario_odd_tensors(rank: int) -> Ledger:
    ledger, world = Ledger(rank), dist.get_world_size()
    total = float(sum(range(1, world + 1)))

    scalar = torch.tensor(float(rank + 1))
    dist.all_reduce(scalar)
    ledger.true("0-dim all_reduce", scalar.dim() == 0 and scalar.item() == total, f"{scalar}")
    scalar = torch.tensor(rank)
    dist.broadcast(scalar, world - 1)
    ledger.true("0-dim broadcast", scalar.item() == world - 1, f"{scalar}")
    outputs = [torch.tensor(-1) for _ in range(world)]
    dist.all_gather(outputs, torch.tensor(rank))
    ledger.true("0-dim all_gather", [int(one) for one in outputs] == list(range(world)), f"{outputs}")
    into = torch.zeros(world, dtype=torch.int64)
    dist.all_gather_into_tensor(into, torch.tensor(rank))
    ledger.true("0-dim all_gather_into_tensor", into.tolist() == list(range(world)), f"{into}")

    for shape in ([0], [0, 3], [3, 0, 2]):
        empty = torch.empty(shape)
        dist.all_reduce(empty)
        dist.broadcast(empty, 0)
        outputs = [torch.empty(shape) for _ in range(world)]
        dist.all_gather(outputs, empty)
        dist.reduce_scatter(torch.empty(shape), [torch.empty(shape) for _ in range(world)])
        ledger.true("empty", list(empty.shape) == shape, f"{empty.shape}")

    leaf = torch.full([9], float(rank + 1), requires_grad=True)
    with torch.no_grad():
        dist.all_reduce(leaf)
    ledger.equal("leaf all_reduce", leaf, torch.full([9], total))
    ledger.true("leaf all_reduce", leaf.is_leaf and leaf.requires_grad, "no longer a leaf that requires grad")
    leaf = torch.full([9, 2], float(rank + 1), requires_grad=True)
    with torch.no_grad():
        dist.broadcast(leaf.t(), world - 1)  # a view of a leaf, copied back
    ledger.equal("leaf view broadcast", leaf, torch.full([9, 2], float(world)))

    with torch.inference_mode():
        inference = torch.full([9], float(rank + 1))
        columns = torch.full([4, 2], float(rank + 1))[:, 0]
        dist.all_reduce(inference)
        dist.all_reduce(columns)
    dist.all_reduce(inference)  # outside of the mode
    dist.all_reduce(columns)
    ledger.equal("inference tensor", inference, torch.full([9], total * world))
    ledger.equal("inference view", columns, torch.full([4], total * world))

    channels_last = torch.full([2, 3, 4, 5], float(rank + 1)).to(memory_format=torch.channels_last)
    channels_last[0, 1, 2, 3] = 100.0
    dist.all_reduce(channels_last)
    ledger.true("channels_last", channels_last[0, 1, 2, 3].item() == 100.0 * world, f"{channels_last[0, 1, 2, 3]}")
    mixed = torch.arange(24.0).view(2, 3, 2, 2)
    mixed = mixed.to(memory_format=torch.channels_last) if rank == 0 else mixed.clone()
    dist.broadcast(mixed, 0)
    dist.all_reduce(mixed)  # ranks with different strides and equal shapes
    ledger.equal("different strides", mixed, torch.arange(24.0).view(2, 3, 2, 2) * world)
    ledger.equal("expanded input", _all_gather_expanded(world), torch.ones(world, 3, 4))
    return ledger


def _all_gather_expanded(world: int) -> torch.Tensor:
    outputs = [torch.zeros(3, 4) for _ in range(world)]
    dist.all_gather(outputs, torch.ones(1, 1).expand(3, 4))
    return torch.stack(outputs)


@pytest.mark.parametrize("world", [1, 2, 3])
def test_scalars_empties_leaves_inference_tensors_and_other_memory_formats(run_scenario, world):
    run_scenario(world, scenario_odd_tensors, roads=DEFAULT_ROADS)


def scenario_repeat(rank: int, group: str) -> Ledger:
    ledger, world = Ledger(rank), dist.get_world_size()
    for turn in range(4):
        tensor = random_numbers("float32", "SUM", 50_021, 3, rank, world)
        if rank == turn % world:
            time.sleep(0.02)  # timing differs, bits do not
        dist.all_reduce(tensor, group=road_groups[group])
        ledger.same(f"repeated all_reduce world={world} {group}", tensor)
        ledger.checks += 1
        ledger.true(f"turn {turn}", len(set(ledger.digests.values())) == 1, "other bits than the turn before")
    return ledger


@pytest.mark.parametrize("world", [3, 5])
@pytest.mark.parametrize("group", ["ring, small chunks", "direct, small chunks", "shared", "single_copy"])
def test_result_does_not_depend_on_timing(run_scenario, world, group):
    run_scenario(world, scenario_repeat, group)
