"""Registers backend "iroh" with torch.distributed. Loads no native code: that happens when a group is made."""

from __future__ import annotations

import warnings
from typing import Any

_NAME = "iroh"
# Device tensors go through pinned host memory with torch's generic device classes, so any of these will do.
DEVICES = ["cpu", "cuda", "xpu", "mps"]


def _create(options: Any, pg_options: Any = None) -> Any:
    """Make one process group; torch calls this with its own description of the group."""
    from torch_iroh import _mapping, _native

    module = _native.torch_module()
    if isinstance(pg_options, module.Options):
        chosen = pg_options.__copy__()  # the caller's object may serve several groups
    elif pg_options is None or _mapping.takes_foreign_options(pg_options):
        chosen = module.Options()
    else:
        raise TypeError(f'backend "iroh" takes pg_options=torch_iroh.Options(...), not {type(pg_options).__name__}')
    chosen._timeout = options.timeout
    chosen.group_name = options.group_id
    chosen.global_ranks_in_group = options.global_ranks_in_group
    return module.ProcessGroupIroh(options.store, options.group_rank, options.group_size, chosen)


def register() -> None:
    """Register the backend; does nothing when it is there or when torch has no distributed support."""
    import torch.distributed as dist

    if dist.is_available() and _NAME.upper() not in dist.Backend._plugins:
        dist.Backend.register_backend(_NAME, _create, extended_api=True, devices=DEVICES)


def register_quietly() -> None:
    """Register the backend; a failure is a warning, because it would make ``import torch`` fail for every program.

    Under `torch-iroh run` it also maps other backends' names; the launcher has tried that before it starts a worker.
    """
    from torch_iroh import _mapping

    try:
        register()
        _mapping.install_from_environment()
    except Exception as error:
        warnings.warn(f"torch-iroh could not register its backend: {error}", RuntimeWarning, stacklevel=2)
