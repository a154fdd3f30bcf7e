"""A hyperparameter search: settings are scattered as objects, results gathered, the best model broadcast.

torchrun --nproc-per-node=2 examples/patterns/search.py [--backend gloo]
"""

import argparse
from typing import Any

import torch
import torch.distributed as dist


def fit(setting: dict[str, Any]) -> tuple[float, torch.nn.Module]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(3, setting["width"]), torch.nn.Tanh(), torch.nn.Linear(setting["width"], 1)
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=setting["lr"])
    draw = torch.Generator().manual_seed(1)
    for _ in range(60):
        inputs = torch.randn(32, 3, generator=draw)
        loss = torch.nn.functional.mse_loss(model(inputs), inputs.sin().sum(1, keepdim=True))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return float(loss), model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backend", default="iroh")
    dist.init_process_group(parser.parse_args().backend)
    rank, world = dist.get_rank(), dist.get_world_size()
    grid = [{"lr": lr, "width": width} for lr in (0.003, 0.03) for width in (4, 16)]
    mine: list[Any] = [None]
    dist.scatter_object_list(mine, [grid[one::world] for one in range(world)] if rank == 0 else None, src=0)
    tried = [(setting, *fit(setting)) for setting in mine[0]]
    results: list[Any] = [None] * world
    dist.all_gather_object(results, [(loss, setting) for setting, loss, _ in tried])
    ranked = sorted(((loss, owner, setting) for owner, some in enumerate(results) for loss, setting in some), key=str)
    loss, owner, setting = min(ranked, key=lambda one: one[0])
    best = [next((model for one, _, model in tried if one == setting), None)]
    dist.broadcast_object_list(best, src=owner)
    assert best[0] is not None
    norm = sum(float(one.detach().square().sum()) for one in best[0].parameters())
    everyone = torch.full([world], norm)
    dist.all_to_all_single(everyone.clone(), everyone)
    if rank == 0:
        print(f"loss {loss:.6f} with {setting}, squared norm {norm:.5f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
