"""What `torch-iroh run` changes in the processes it starts: other backends' names, and no name at all, mean "iroh".

The launcher names what is mapped in the environment variable TORCH_IROH_RUN; where it is set, the autoload entry point
calls :func:`install_from_environment`, so that children of a worker are mapped too and no program is wrapped. This
file knows names and torch's Python functions. It knows no network, starts nothing, and loads no native code.
"""

from __future__ import annotations

import functools
import inspect
import logging
import os
import sys
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any

from torch_iroh import _frameworks

VARIABLE = "TORCH_IROH_RUN"
#: What can be mapped: two names, and a group for which the program names no backend.
SOURCES = ("gloo", "nccl", "unnamed")

_IROH = "iroh"
_log = logging.getLogger("torch_iroh.run")

_sources: frozenset[str] = frozenset()
_said: set[tuple[str, str]] = set()


def parse_sources(text: str) -> frozenset[str]:
    """Read a list like "gloo,nccl".

    Raises:
        ValueError: a word is none of :data:`SOURCES`.
    """
    words = [word.strip().lower() for word in text.split(",") if word.strip()]
    for word in words:
        if word not in SOURCES:
            raise ValueError(f"{word!r} is none of {', '.join(SOURCES)}")
    return frozenset(words)


def active() -> bool:
    """Whether this process runs under `torch-iroh run`."""
    return bool(_sources)


def mapped(backend: str, sources: Iterable[str]) -> str:
    """Return what `backend`, a name or a list like "cpu:gloo,cuda:nccl", means when `sources` are mapped.

    A list becomes one name where every device ends at iroh: torch 2.13 mishandles plug-ins in lists (pytorch#178759).
    What torch would refuse is returned as it is, for torch to refuse.
    """
    name = backend.lower()
    if name in ("", "undefined"):
        return _IROH if "unnamed" in sources else backend
    if ":" not in name:
        return _IROH if name in sources else backend
    pairs = [[word.strip() for word in pair.split(":")] for pair in name.split(",")]
    devices = [pair[0] for pair in pairs]
    if any(len(pair) != 2 for pair in pairs) or len(set(devices)) != len(devices):
        return backend
    targets = [_IROH if target in sources else target for _, target in pairs]
    if targets == [target for _, target in pairs]:
        return backend
    if set(targets) == {_IROH}:
        return _IROH
    return ",".join(f"{device}:{target}" for device, target in zip(devices, targets, strict=True))


def install_from_environment() -> None:
    """Install the mapping that TORCH_IROH_RUN asks for; does nothing without it."""
    text = os.environ.get(VARIABLE, "")
    if text:
        install(parse_sources(text))


def install(sources: frozenset[str]) -> None:
    """Make `sources` mean "iroh" in this process. The first call counts.

    Raises:
        RuntimeError: this torch lacks a function that the mapping stands on.
    """
    global _sources
    import torch.distributed as dist

    if _sources or not sources or not dist.is_available():
        return
    from torch.distributed import distributed_c10d as c10d

    wrappers: dict[str, Callable[[Any], Any]] = {
        "init_process_group": _map_argument,
        "new_group": _map_argument,
        "split_group": _map_argument,
        "monitored_barrier": _open_monitored_barrier,
        "get_default_backend_for_device": _announce_default,
        # Programs that make a group beside the default one copy init_process_group's body and end here.
        "_new_process_group_helper": _map_argument,
        "_create_process_group_wrapper": _check_over_iroh,
    }
    missing = [name for name in wrappers if not callable(getattr(c10d, name, None))]
    if missing:
        import torch

        raise RuntimeError(f"torch-iroh run cannot map backends in torch {torch.__version__}: no {', '.join(missing)}")
    _sources = sources
    for name, wrap in wrappers.items():
        _replace_everywhere(name, getattr(c10d, name), wrap(getattr(c10d, name)))
    if "unnamed" in sources:
        defaults = dist.Backend.default_device_backend_map
        _former_defaults.update({device: name for device, name in defaults.items() if name in ("gloo", "nccl")})
        defaults.update(dict.fromkeys(_former_defaults, _IROH))


def takes_foreign_options(options: Any) -> bool:
    """Whether a group of iroh drops these options, which a mapped program made for another backend. Says so once."""
    from torch._C._distributed_c10d import Backend

    if not active() or not isinstance(options, Backend.Options):
        return False
    kind = type(options).__qualname__
    _say("pg_options", kind, f"{kind} mean nothing to iroh and are left out")
    return True


_former_defaults: dict[str, str] = {}


def _replace_everywhere(name: str, old: Any, new: Any) -> None:
    # torch's own modules imported it by name before any backend was loaded; what is imported later finds the new one.
    for module in list(sys.modules.values()):
        if getattr(module, "__dict__", {}).get(name) is old:
            setattr(module, name, new)


def _say(kind: str, source: str, text: str) -> None:
    """Log once per kind of call and source: a warning on the job's rank 0, so that it is seen, and elsewhere info."""
    if (kind, source) in _said:
        return
    _said.add((kind, source))
    import torch.distributed as dist

    try:
        rank = dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK", "0"))
    except ValueError:
        rank = 0
    _log.log(logging.WARNING if rank == 0 else logging.INFO, "torch-iroh run: %s: %s", kind, text)


def _map_argument(function: Any) -> Any:
    """Wrap a function of torch whose argument `backend` names one; a program that names none in new_group inherits."""
    signature = inspect.signature(function)
    unnamed_is_mapped = function.__name__ in ("init_process_group", "_new_process_group_helper")

    @functools.wraps(function)
    def wrapper(*arguments: Any, **named: Any) -> Any:
        _frameworks.adapt_loaded()
        try:
            bound = signature.bind(*arguments, **named)
        except TypeError:
            return function(*arguments, **named)  # torch's own error
        backend = bound.arguments.get("backend")
        if (backend is None and unnamed_is_mapped) or (isinstance(backend, str) and backend):
            target = mapped(backend or "", _sources)
            if target != (backend or ""):
                _say_mapped(function.__name__, backend, target)
                bound.arguments["backend"] = target
        return function(*bound.args, **bound.kwargs)

    return wrapper


def _say_mapped(kind: str, backend: str | None, target: str) -> None:
    source = "no backend" if backend in (None, "", "undefined") else f'"{backend}"'
    _say(kind, source, f'{source} means "{target}"')


def _announce_default(function: Any) -> Any:
    """Wrap get_default_backend_for_device, which reads the mapped table, to say so."""

    @functools.wraps(function)
    def wrapper(device: Any) -> Any:
        backend = function(device)
        kind = str(device).partition(":")[0]
        if backend == _IROH and kind in _former_defaults:
            _say(function.__name__, kind, f'{kind} has "{_IROH}" in place of "{_former_defaults[kind]}"')
        return backend

    return wrapper


def _open_monitored_barrier(function: Any) -> Any:
    """Wrap monitored_barrier, which torch keeps for groups that are called "gloo"."""

    @functools.wraps(function)
    def wrapper(group: Any = None, timeout: timedelta | float | None = None, wait_all_ranks: bool = False) -> Any:
        from torch.distributed import distributed_c10d as c10d

        chosen: Any = c10d._get_default_group() if group is None else group
        if c10d._rank_not_in_group(chosen) or c10d.get_backend(chosen) != _IROH:
            return function(group, timeout, wait_all_ranks)
        if timeout is None:
            timeout = c10d._get_default_timeout(c10d.get_backend(chosen))
        elif isinstance(timeout, float):  # as torch
            timeout = timedelta(seconds=timeout)
        c10d._check_valid_timeout(timeout)
        return chosen.monitored_barrier(timeout, wait_all_ranks=wait_all_ranks)

    return wrapper


def _check_over_iroh(function: Any) -> Any:
    """Wrap the maker of TORCH_DISTRIBUTED_DEBUG=DETAIL's checking group: its helper is iroh where the group is."""
    signature = inspect.signature(function)

    @functools.wraps(function)
    def wrapper(*arguments: Any, **named: Any) -> Any:
        from torch._C import _distributed_c10d as native
        from torch.distributed import distributed_c10d as c10d

        from torch_iroh import _register

        bound = signature.bind(*arguments, **named)
        bound.apply_defaults()
        given = bound.arguments
        if "gloo" not in _sources or given["wrapped_pg"].name() != _IROH:
            return function(*arguments, **named)
        options = native._DistributedBackendOptions()
        options.store = c10d.PrefixStore(f"{c10d.PG_WRAPPER_STORE_PREFIX}:{given['store_prefix']}", given["store"])
        options.group_rank, options.group_size = given["rank"], given["world_size"]
        options.timeout = given["timeout"]
        options.group_id = f"{given['store_prefix']}:debug"
        options.global_ranks_in_group = given["wrapped_pg"].options.global_ranks_in_group
        _say("TORCH_DISTRIBUTED_DEBUG=DETAIL", "gloo", 'the helper groups that check calls are "iroh"')
        return native._ProcessGroupWrapper(given["wrapped_pg"], _register._create(options))

    return wrapper
