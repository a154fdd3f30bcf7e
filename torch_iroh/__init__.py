"""torch-iroh: PyTorch training on machines that share no network.

>>> import torch.distributed as dist
>>> dist.init_process_group("iroh")  # doctest: +SKIP

Nothing else has to be imported: torch finds the backend through an entry point. This package adds the options of a
group (:class:`Options`), its statistics (:func:`stats`), ranks that are threads of one process
(:class:`InProcessWorld`) and predictions (:func:`plan`). Importing it costs nothing: torch and the native code are
loaded on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch_iroh import codec, hooks
    from torch_iroh._C import Options
    from torch_iroh._compression import all_reduce_compressed, compression
    from torch_iroh._monitored import monitored_barrier
    from torch_iroh._plan import Link, Plan, plan
    from torch_iroh._statistics import ChoiceStats, GroupStats, NetworkStats, PeerStats, stats
    from torch_iroh.in_process import InProcessRank, InProcessWorld

__all__ = [
    "ChoiceStats",
    "GroupStats",
    "InProcessRank",
    "InProcessWorld",
    "Link",
    "NetworkStats",
    "Options",
    "PeerStats",
    "Plan",
    "all_reduce_compressed",
    "codec",
    "compression",
    "hooks",
    "monitored_barrier",
    "plan",
    "stats",
]
__version__ = "0.1.0"

_HOMES = {
    "ChoiceStats": "torch_iroh._statistics",
    "GroupStats": "torch_iroh._statistics",
    "InProcessRank": "torch_iroh.in_process",
    "InProcessWorld": "torch_iroh.in_process",
    "Link": "torch_iroh._plan",
    "NetworkStats": "torch_iroh._statistics",
    "PeerStats": "torch_iroh._statistics",
    "Plan": "torch_iroh._plan",
    "all_reduce_compressed": "torch_iroh._compression",
    "compression": "torch_iroh._compression",
    "monitored_barrier": "torch_iroh._monitored",
    "plan": "torch_iroh._plan",
    "stats": "torch_iroh._statistics",
}

_MODULES = {"codec", "hooks"}


def _autoload() -> None:
    """Entry point of torch's backend autoload: must neither fail nor do anything but register."""
    from torch_iroh import _register

    _register.register_quietly()


def __getattr__(name: str) -> Any:
    # PEP 562: a lazy module. `import torch_iroh` may run before torch is imported, or while it is.
    if name == "Options":
        from torch_iroh._native import torch_module

        return torch_module().Options
    if name in _MODULES:
        return importlib.import_module(f"torch_iroh.{name}")
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'torch_iroh' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])


def _register_without_autoload() -> None:
    import os
    import sys

    # With TORCH_DEVICE_BACKEND_AUTOLOAD=0 this import is what registers the backend, so it needs torch there. Else
    # torch registers by the entry point, and may be half imported right now (it may be importing us).
    distributed = sys.modules.get("torch.distributed")
    ready = distributed is not None and hasattr(distributed, "Backend")
    if ready or os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD", "1") == "0":
        _autoload()


_register_without_autoload()
