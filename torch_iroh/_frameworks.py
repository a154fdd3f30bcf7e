"""Frameworks that act on a backend's name, under `torch-iroh run`: what they must be told so that they do the same.

Only what would otherwise be silently wrong is here, with the version it was seen in. Nothing is imported: a framework
is adapted when it is loaded and makes its first group.
"""

from __future__ import annotations

import sys
from typing import Any


def adapt_loaded() -> None:
    """Adapt the frameworks that this process has imported; cheap, and called before each group is made."""
    _adapt_ignite(sys.modules.get("ignite.distributed.comp_models.native"))


def _adapt_ignite(native: Any) -> None:
    # 0.5.5: auto_model wraps a model in DDP if backend() is "nccl", "gloo" or "mpi". For another name it returns the
    # model as it is, and every rank trains alone.
    model = getattr(native, "_NativeDistModel", None)
    if model is None or getattr(model.backend, "of_torch_iroh", False):
        return
    ask = model.backend

    def backend(self: Any) -> str:
        import torch

        name: str = ask(self)
        if name != "iroh":
            return name
        return "nccl" if torch.cuda.is_available() else "gloo"

    backend.of_torch_iroh = True  # type: ignore[attr-defined]
    model.backend = backend
