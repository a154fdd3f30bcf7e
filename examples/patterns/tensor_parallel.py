"""Tensor parallel: the two matrices of each feed-forward block are cut across the ranks, which see the same batch.

torchrun --nproc-per-node=2 examples/patterns/tensor_parallel.py [--backend gloo]
"""

import argparse

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module


class FeedForward(torch.nn.Module):
    """One gated block."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gate = torch.nn.Linear(width, hidden, bias=False)
        self.up = torch.nn.Linear(width, hidden, bias=False)
        self.down = torch.nn.Linear(hidden, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.nn.functional.silu(self.gate(x)) * self.up(x))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backend", default="iroh")
    dist.init_process_group(parser.parse_args().backend)
    torch.manual_seed(0)  # on every rank: the same whole model, of which each keeps its part
    model = torch.nn.Sequential(FeedForward(20, 48), FeedForward(20, 48), torch.nn.Linear(20, 3))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in (model[0], model[1]):
        parallelize_module(block, mesh, {"gate": ColwiseParallel(), "up": ColwiseParallel(), "down": RowwiseParallel()})
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    draw = torch.Generator().manual_seed(1)
    for _ in range(25):
        inputs = torch.randn(32, 20, generator=draw)
        labels = (inputs[:, :10].sum(1) > 0).long() + (inputs[:, 10:].sum(1) > 0).long()
        loss = torch.nn.functional.cross_entropy(model(inputs), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    if dist.get_rank() == 0:
        print(f"loss {loss:.6f}, this rank keeps {tuple(model[0].up.weight.to_local().shape)} of {48, 20}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
