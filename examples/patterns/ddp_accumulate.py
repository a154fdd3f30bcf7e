"""DDP with gradient accumulation: four micro-batches for one exchange of gradients, clipped, with a warm-up.

torchrun --nproc-per-node=2 examples/patterns/ddp_accumulate.py [--backend gloo]
"""

import argparse
import contextlib

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

MICRO_BATCHES = 4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backend", default="iroh")
    dist.init_process_group(parser.parse_args().backend)
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.GRU(8, 24, num_layers=2, batch_first=True))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 5))
    draw = torch.Generator().manual_seed(1 + dist.get_rank())
    for _ in range(20):
        total = torch.zeros(())
        for micro in range(MICRO_BATCHES):
            waves = torch.sin(torch.rand(6, 1, 8, generator=draw) * 6 + torch.arange(12.0)[None, :, None] / 3)
            last = micro == MICRO_BATCHES - 1
            with contextlib.nullcontext() if last else model.no_sync():
                output, _ = model(waves[:, :-1])
                loss = torch.nn.functional.mse_loss(output[..., :8], waves[:, 1:]) / MICRO_BATCHES
                loss.backward()
            total += loss.detach()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    dist.reduce(total, dst=0)
    if dist.get_rank() == 0:
        print(f"loss {total / dist.get_world_size():.6f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
