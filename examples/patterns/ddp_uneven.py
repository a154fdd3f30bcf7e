"""DDP where each rank has another number of batches: Join lets those that are done keep the others company.

torchrun --nproc-per-node=2 examples/patterns/ddp_uneven.py [--backend gloo]
"""

import argparse

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backend", default="iroh")
    dist.init_process_group(parser.parse_args().backend)
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = DistributedDataParallel(
        torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    draw = torch.Generator().manual_seed(1 + rank)
    batches = 12 + 5 * rank
    with Join([model]):
        for _ in range(batches):
            inputs = torch.randn(16, 4, generator=draw)
            loss = torch.nn.functional.mse_loss(model(inputs), inputs.prod(1, keepdim=True))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    # Who was done early has not seen the last updates: its model is brought to the others' state by Join.
    inputs = torch.randn(256, 4, generator=torch.Generator().manual_seed(99))
    final = torch.nn.functional.mse_loss(model.module(inputs), inputs.prod(1, keepdim=True)).detach()
    everyone = [torch.zeros(()) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, final)
    assert all(torch.allclose(one, final) for one in everyone)
    if rank == 0:
        print(f"loss {final:.6f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
