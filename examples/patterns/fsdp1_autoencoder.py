"""An autoencoder with FullyShardedDataParallel (FSDP1), wrapped by size, its whole state gathered at the end.

torchrun --nproc-per-node=2 examples/patterns/fsdp1_autoencoder.py [--backend gloo]
"""

import argparse
import functools
import itertools

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType
from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backend", default="iroh")
    dist.init_process_group(parser.parse_args().backend)
    torch.manual_seed(0)
    sizes = [40, 24, 6, 24, 40]
    layers: list[torch.nn.Module] = []
    for before, after in itertools.pairwise(sizes):
        layers += [torch.nn.Linear(before, after), torch.nn.ELU()]
    model = FullyShardedDataParallel(
        torch.nn.Sequential(*layers[:-1]),
        auto_wrap_policy=functools.partial(size_based_auto_wrap_policy, min_num_params=500),
        device_id=torch.device("cpu"),
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    mixing = torch.randn(5, 40, generator=torch.Generator().manual_seed(0))  # the data has five dimensions
    draw = torch.Generator().manual_seed(1 + dist.get_rank())
    for _ in range(30):
        inputs = torch.randn(32, 5, generator=draw) @ mixing
        loss = torch.nn.functional.mse_loss(model(inputs), inputs)
        loss.backward()
        model.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
    with FullyShardedDataParallel.state_dict_type(model, StateDictType.FULL_STATE_DICT):
        state = model.state_dict()
    mean = loss.detach() / dist.get_world_size()
    dist.all_reduce(mean)
    if dist.get_rank() == 0:
        count = sum(value.numel() for value in state.values())
        assert count == sum(a * b + b for a, b in itertools.pairwise(sizes))
        print(f"loss {mean:.6f}, {count} parameters gathered")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
