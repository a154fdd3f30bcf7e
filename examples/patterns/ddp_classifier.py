"""DistributedDataParallel with a DistributedSampler, and an accuracy that counts every rank's share.

torchrun --nproc-per-node=2 examples/patterns/ddp_classifier.py [--backend gloo]
"""

import argparse

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def blobs(count: int, seed: int) -> TensorDataset:
    """Points around ten centres; the label is the centre."""
    centres = 3 * torch.randn(10, 16, generator=torch.Generator().manual_seed(0))
    draw = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, 10, (count,), generator=draw)
    return TensorDataset(centres[labels] + torch.randn(count, 16, generator=draw), labels)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backend", default="iroh")
    dist.init_process_group(parser.parse_args().backend)
    torch.manual_seed(0)
    training, held_out = blobs(2000, seed=1), blobs(401, seed=2)
    sampler: DistributedSampler = DistributedSampler(training, seed=3)
    model = DistributedDataParallel(
        torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 10))
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for inputs, labels in DataLoader(training, batch_size=50, sampler=sampler):
            loss = torch.nn.functional.cross_entropy(model(inputs), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    counts = torch.zeros(3)  # right, seen, sum of losses
    mine = torch.utils.data.Subset(held_out, range(dist.get_rank(), len(held_out), dist.get_world_size()))
    with torch.no_grad():
        for inputs, labels in DataLoader(mine, batch_size=100):
            scores = model.module(inputs)
            loss = torch.nn.functional.cross_entropy(scores, labels, reduction="sum")
            counts += torch.tensor([(scores.argmax(1) == labels).sum(), len(labels), loss])
    dist.all_reduce(counts)
    if dist.get_rank() == 0:
        print(f"accuracy {counts[0] / counts[1]:.4f} of {int(counts[1])}, loss {counts[2] / counts[1]:.6f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
