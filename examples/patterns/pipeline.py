"""Pipeline parallel: each rank has some of the layers, micro-batches flow through them in the 1F1B order.

torchrun --nproc-per-node=2 examples/patterns/pipeline.py [--backend gloo]
"""

import argparse

import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

WIDTH, MICRO_BATCHES = 12, 4


def layer(index: int) -> torch.nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(index)
        return torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.Tanh())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backend", default="iroh")
    dist.init_process_group(parser.parse_args().backend)
    rank, world = dist.get_rank(), dist.get_world_size()
    mine = torch.nn.Sequential(*(layer(2 * rank + index) for index in range(2)))
    stage = PipelineStage(mine, rank, world, torch.device("cpu"))
    schedule = Schedule1F1B(stage, MICRO_BATCHES, loss_fn=torch.nn.functional.mse_loss)
    optimizer = torch.optim.SGD(mine.parameters(), lr=0.5)
    draw = torch.Generator().manual_seed(1)
    losses: list[torch.Tensor] = []
    for _ in range(20):
        inputs = torch.randn(16, WIDTH, generator=draw)
        wanted = 0.5 * inputs.roll(1, dims=1).tanh()
        losses.clear()
        if rank == 0:
            schedule.step(inputs)
        elif rank == world - 1:
            schedule.step(target=wanted, losses=losses)
        else:
            schedule.step()
        optimizer.step()
        optimizer.zero_grad()
    final = torch.stack(losses).mean().detach() if losses else torch.zeros(())
    dist.broadcast(final, src=world - 1)
    if rank == 0:
        print(f"loss {final:.6f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
