"""A run that goes on after a crash: distributed checkpoints, and torchrun, which starts the ranks again.

    torchrun --nproc-per-node=2 --max-restarts=1 examples/patterns/resume.py --folder runs/resume [--crash-at 7]

`--crash-at` ends one rank in its first life. The result is that of a run that was never interrupted.
"""

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

STEPS, EVERY = 12, 3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", default="iroh")
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--crash-at", type=int, default=-1)
    arguments = parser.parse_args()
    dist.init_process_group(arguments.backend)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(9, 21), torch.nn.ReLU(), torch.nn.Linear(21, 1))
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    done = sorted(path for path in arguments.folder.glob("step-*") if (path / ".metadata").exists())
    begin = 0
    if done:
        state, moments = get_state_dict(model, optimizer)
        dcp.load({"model": state, "optimizer": moments}, checkpoint_id=done[-1])
        set_state_dict(model, optimizer, model_state_dict=state, optim_state_dict=moments)
        begin = int(done[-1].name.split("-")[1])
        if dist.get_rank() == 0:
            print(f"goes on from step {begin}", flush=True)
    for step in range(begin, STEPS):
        if step == arguments.crash_at and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and dist.get_rank() == 1:
            os._exit(1)
        draw = torch.Generator().manual_seed(100 * step + dist.get_rank())
        inputs = torch.randn(16, 9, generator=draw)
        loss = torch.nn.functional.mse_loss(model(inputs), inputs.square().mean(1, keepdim=True))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if (step + 1) % EVERY == 0:
            state, moments = get_state_dict(model, optimizer)
            dcp.save({"model": state, "optimizer": moments}, checkpoint_id=arguments.folder / f"step-{step + 1:04}")
    mean = loss.detach() / dist.get_world_size()
    dist.all_reduce(mean)
    if dist.get_rank() == 0:
        print(f"loss {mean:.6f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
