"""Imported first by each program here: sees every group of gloo, and writes what a rank learnt for the test to compare.

The programs are a user's: none of them knows torch-iroh, except where its framework is told a backend by name.
"""

from __future__ import annotations

import os
from collections.abc import Iterable

import torch
import torch.distributed as dist

#: The backend for the framework's own option, "" where it shall choose by itself.
NAMED = os.environ.get("NAMED_BACKEND", "")

_gloo_groups: list[str] = []
_make = dist.ProcessGroupGloo.__init__


def _watched(self: dist.ProcessGroupGloo, *arguments: object, **named: object) -> None:
    _gloo_groups.append(str(named or arguments))
    _make(self, *arguments, **named)


dist.ProcessGroupGloo.__init__ = _watched
torch.set_num_threads(1)


def report(losses: Iterable[float], parameters: Iterable[torch.Tensor], **more: object) -> None:
    """Save this rank's answers; the default group must still be there."""
    backend = dist.get_backend()
    sent = 0
    if backend == "iroh":
        import torch_iroh

        sent = torch_iroh.stats().bytes_sent
    answers = {
        "losses": [float(loss) for loss in losses],
        "parameters": [parameter.detach().clone() for parameter in parameters],
        "backend": backend,
        "bytes_sent": sent,
        "gloo_groups": _gloo_groups,
        **more,
    }
    torch.save(answers, os.path.join(os.environ["ANSWERS"], f"{dist.get_rank()}.pt"))


def data(rows: int = 32, columns: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
    """A regression problem, the same in every process."""
    generator = torch.Generator().manual_seed(3)
    inputs = torch.randn(rows, columns, generator=generator)
    return inputs, inputs.sin().sum(1, keepdim=True)


def perceptron(columns: int = 8) -> torch.nn.Sequential:
    torch.manual_seed(5)
    return torch.nn.Sequential(torch.nn.Linear(columns, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))


def tiny_llama(vocabulary: int = 64) -> torch.nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(5)
    shape = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    return LlamaForCausalLM(
        LlamaConfig(vocab_size=vocabulary, max_position_embeddings=64, bos_token_id=0, eos_token_id=1, **shape)
    )
