"""From torch's process group to the native one behind it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def iroh_backend(group: ProcessGroup | None) -> Any:
    """Return the native process group of a group (default: the default group), whichever device it serves.

    Raises:
        ValueError: no device of the group has backend "iroh", or there is no default group.
    """
    import torch.distributed as dist

    from torch_iroh._native import torch_module

    chosen: Any = dist.group.WORLD if group is None else group
    if chosen is None:
        raise ValueError("there is no default process group: call init_process_group first")
    for device in chosen._device_types:
        candidate = chosen._get_backend(device)
        candidate = getattr(candidate, "wrapped_pg", candidate)  # TORCH_DISTRIBUTED_DEBUG=DETAIL
        if isinstance(candidate, torch_module().ProcessGroupIroh):
            return candidate
    raise ValueError(f'the group\'s backend is {dist.get_backend(chosen)!r}, not "iroh"')
