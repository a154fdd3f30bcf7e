"""What the tests of DDP hooks share: a small model, its steps, and DDP with a hook."""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from torch_iroh import hooks

HOOKS = ["bf16_compress", "fp8", "int8", "int4", "sign", "topk", "topk_int8", "topk_int4"]
SPARSE = ["topk", "topk_int8", "topk_int4"]
MANY_BUCKETS = 0.004  # MB: one layer of make_model() each


def make_model() -> torch.nn.Module:
    torch.manual_seed(0)
    layers: list[torch.nn.Module] = []
    for width in (24, 40, 40, 40):
        layers += [torch.nn.Linear(width, 40), torch.nn.Tanh()]
    return torch.nn.Sequential(*layers)


def step_of(model: Any, optimizer: torch.optim.Optimizer, rank: int, number: int) -> None:
    generator = torch.Generator().manual_seed(1000 * number + rank)
    dtype = next(model.parameters()).dtype
    model(torch.randn(8, 24, generator=generator).to(dtype)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def sgd(model: torch.nn.Module, lr: float = 0.1) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=lr)


def digest(model: torch.nn.Module) -> str:
    parts = [parameter.detach().flatten().view(torch.uint8) for parameter in model.parameters()]
    return hashlib.sha256(torch.cat(parts).numpy().tobytes()).hexdigest()


def wrapped(model: torch.nn.Module, hook: str, options: dict[str, Any], **ddp: Any) -> tuple[Any, hooks.State]:
    state = hooks.State(parameters=model.parameters(), **options)
    ddp = {"bucket_cap_mb": MANY_BUCKETS, **ddp}
    distributed = DistributedDataParallel(model, process_group=options.get("group"), **ddp)
    distributed.register_comm_hook(state, getattr(hooks, hook))
    return distributed, state
