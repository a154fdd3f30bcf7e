"""A small causal transformer with FSDP2 (fully_shard): parameters, gradients and optimizer state are shared out.

torchrun --nproc-per-node=2 examples/patterns/fsdp2_transformer.py [--backend gloo]
"""

import argparse

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


class Transformer(torch.nn.Module):
    """Predicts the next of 32 symbols."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(32, 24)
        self.place = torch.nn.Parameter(torch.zeros(16, 24))
        make = torch.nn.TransformerEncoderLayer
        self.layers = torch.nn.ModuleList(make(24, 4, 48, dropout=0.0, batch_first=True) for _ in range(2))
        self.head = torch.nn.Linear(24, 32)

    def forward(self, symbols: torch.Tensor) -> torch.Tensor:
        length = symbols.shape[1]
        hidden, mask = self.embedding(symbols) + self.place[:length], torch.triu(torch.full((length, length), -1e9), 1)
        for layer in self.layers:
            hidden = layer(hidden, src_mask=mask)
        return self.head(hidden)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backend", default="iroh")
    dist.init_process_group(parser.parse_args().backend)
    torch.manual_seed(0)
    model = Transformer()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in (*model.layers, model):
        fully_shard(layer, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    draw = torch.Generator().manual_seed(1 + dist.get_rank())
    for _ in range(15):
        starts, strides = (torch.randint(1, 8, (8, 1), generator=draw) for _ in range(2))
        symbols = (starts + strides * torch.arange(12)) % 32
        loss = torch.nn.functional.cross_entropy(model(symbols[:, :-1]).flatten(0, 1), symbols[:, 1:].flatten())
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    mean = loss.detach() / dist.get_world_size()
    dist.all_reduce(mean)
    norm = norm.full_tensor()
    if dist.get_rank() == 0:
        print(f"loss {mean:.6f}, norm of the last gradient {norm:.5f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
