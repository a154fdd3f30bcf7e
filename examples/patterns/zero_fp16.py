"""ZeRO-1 with half-precision gradients: each rank keeps a part of Adam's moments, DDP sends float16.

torchrun --nproc-per-node=2 examples/patterns/zero_fp16.py [--backend gloo]
"""

import argparse

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backend", default="iroh")
    dist.init_process_group(parser.parse_args().backend)
    torch.manual_seed(0)
    convolutions = torch.nn.Sequential(
        torch.nn.Conv2d(1, 8, 3, padding=1), torch.nn.ReLU(), torch.nn.AdaptiveAvgPool2d(4), torch.nn.Flatten()
    )
    model = DistributedDataParallel(torch.nn.Sequential(convolutions, torch.nn.Linear(128, 4)))
    model.register_comm_hook(dist.group.WORLD, fp16_compress_hook)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), optimizer_class=torch.optim.Adam, lr=0.02)
    draw = torch.Generator().manual_seed(1 + dist.get_rank())
    for _ in range(20):
        labels = torch.randint(0, 4, (16,), generator=draw)
        images = 0.5 * torch.randn(16, 1, 12, 12, generator=draw)
        for image, label in zip(images, labels.tolist(), strict=True):  # a bright quarter, one of four
            row, column = 6 * (label // 2), 6 * (label % 2)
            image[0, row : row + 6, column : column + 6] += 1
        loss = torch.nn.functional.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    optimizer.consolidate_state_dict(to=0)  # Adam's moments, from all ranks
    mean = loss.detach() / dist.get_world_size()
    dist.all_reduce(mean)
    if dist.get_rank() == 0:
        print(f"loss {mean:.6f}, moments of {len(optimizer.state_dict()['state'])} parameters")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
