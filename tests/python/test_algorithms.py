"""The algorithms beside ring and direct, between real processes: every collective of a group that pins each of them."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from ranks import Ranks
from references import TIMEOUT, joined, random_bits, random_numbers, reduced, seed_of, wide
from scenarios import Ledger, settle

ALGORITHMS = ["ring_bidirectional", "tree", "butterfly", "bruck", "hierarchical"]
CHUNK = 1024  # bytes: a thousand elements are several chunks


def join(rank: int, world: int, store: str) -> None:
    dist.init_process_group("iroh", store=dist.FileStore(store, world), rank=rank, world_size=world, timeout=TIMEOUT)


def scenario_every_collective(rank: int, algorithm: str) -> Ledger:
    import torch_iroh

    options = torch_iroh.Options(algorithm=algorithm, chunk_bytes=CHUNK)
    group = dist.new_group(backend="iroh", pg_options=options, timeout=TIMEOUT)
    ledger, world = Ledger(rank), dist.get_world_size()
    for dtype in ("float32", "bfloat16", "int64"):
        for size in (0, 1, 13, 1009):
            label = f"world={world} dtype={dtype} size={size} {algorithm}"
            seed = seed_of(label)
            parts = [random_numbers(dtype, "SUM", size, seed, peer, world) for peer in range(world)]
            want, bound = reduced(dtype, "SUM", [wide(part) for part in parts])
            tensor = parts[rank].clone()
            dist.all_reduce(tensor, group=group)
            ledger.near(f"all_reduce {label} seed={seed}", tensor, want, bound)
            ledger.same(f"all_reduce {label}", tensor)

            blocks = [random_numbers(dtype, "SUM", size * world, seed + 1, peer, world) for peer in range(world)]
            output = torch.empty(size, dtype=parts[0].dtype)
            dist.reduce_scatter_tensor(output, blocks[rank].clone(), group=group)
            own = [wide(block)[rank * size : (rank + 1) * size] for block in blocks]
            ledger.near(f"reduce_scatter {label} seed={seed + 1}", output, *reduced(dtype, "SUM", own))

            bits = [random_bits(dtype, size, seed, peer) for peer in range(world)]
            whole = torch.zeros(world * size, dtype=bits[0].dtype)
            dist.all_gather_into_tensor(whole, bits[rank], group=group)
            ledger.equal(f"all_gather {label} seed={seed}", whole, joined(bits))
            blocks = [random_bits(dtype, size * world, seed + 2, peer) for peer in range(world)]
            dist.all_to_all_single(whole, blocks[rank].clone(), group=group)
            crossed = joined([block[rank * size : (rank + 1) * size] for block in blocks])
            ledger.equal(f"all_to_all {label} seed={seed + 2}", whole, crossed)

            for root in range(world):
                tensor = parts[rank].clone()
                dist.reduce(tensor, root, group=group)
                if rank == root:
                    ledger.near(f"reduce {label} root={root} seed={seed}", tensor, want, bound)
                tensor = bits[rank].clone()
                dist.broadcast(tensor, root, group=group)
                ledger.equal(f"broadcast {label} root={root} seed={seed}", tensor, bits[root])
                outputs = [torch.zeros_like(part) for part in bits] if rank == root else None
                dist.gather(bits[rank], outputs, dst=root, group=group)
                if outputs is not None:
                    ledger.equal(f"gather {label} root={root} seed={seed}", joined(outputs), joined(bits))
                tensor = torch.zeros_like(bits[rank])
                dist.scatter(tensor, bits if rank == root else None, src=root, group=group)
                ledger.equal(f"scatter {label} root={root} seed={seed}", tensor, bits[rank])
            dist.barrier(group=group)
    dist.destroy_process_group(group)
    return ledger


@pytest.mark.parametrize("world", [2, 3, 5])
def test_every_collective_by_every_other_algorithm(world, tmp_path):
    ranks = Ranks(world)
    try:
        ranks.run(join, world, str(tmp_path / "store"))
        for algorithm in ALGORITHMS:
            settle(ranks.run(scenario_every_collective, algorithm, deadline=100.0))
    finally:
        ranks.close()
