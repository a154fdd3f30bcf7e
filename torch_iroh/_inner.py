"""Makes the backend of torch that serves the ranks of one host. Called by the native code; moves nothing itself."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store


_WATCHDOG_LATER = timedelta(minutes=1)


@dataclass(frozen=True)
class Facts:
    """What the other ranks must know of this process.

    Attributes:
        has_nccl: torch has NCCL, and there is a CUDA device.
        device: unique name of the CUDA device that this process works on; empty when it has chosen none yet.
    """

    has_nccl: bool
    device: str


def facts() -> Facts:
    """Look at torch and its devices. Takes no device into use: on one that nobody has chosen that costs memory."""
    import torch
    import torch.distributed as dist

    if not (dist.is_nccl_available() and torch.cuda.is_available()):
        return Facts(False, "")
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return Facts(True, "")
    return Facts(True, str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid))


def make(name: str, store: Store, prefix: str, rank: int, size: int, timeout: timedelta) -> Any:
    """Make backend `name` for `size` ranks of one host, which meet in `store` under `prefix`.

    Raises:
        RuntimeError: this torch was built without it, or the ranks did not meet in time.
    """
    import torch.distributed as dist
    from torch._C._distributed_c10d import PrefixStore

    place = PrefixStore(prefix, store)
    if name == "nccl":
        nccl: Any = dist.ProcessGroupNCCL
        options = nccl.Options()
        # The group ends its operations itself, and then aborts NCCL, whose watchdog would end the process.
        options._timeout = timeout + _WATCHDOG_LATER
        return nccl(place, rank, size, options)
    if not dist.is_gloo_available():
        raise RuntimeError("this torch was built without gloo")
    gloo: Any = dist.ProcessGroupGloo
    options = gloo._Options()
    # Ranks of one host share its loopback; which other interface gloo would choose depends on names and DNS.
    options._devices = [gloo.create_device(hostname="127.0.0.1")]
    options._timeout = timeout
    return gloo(place, rank, size, options)
