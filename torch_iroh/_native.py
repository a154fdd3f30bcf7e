"""Loads the native modules and the iroh library, with an error text for each thing that can be wrong."""

from __future__ import annotations

import atexit
import importlib.metadata
import importlib.util
import os
import sys
from datetime import timedelta
from pathlib import Path
from types import ModuleType

_LIBRARY_NAMES = ("libiroh_ffi.so", "libiroh_ffi.dylib")
# How long callbacks may hold up the end of the interpreter.
_CALLBACKS_END = timedelta(seconds=2)
_leaving: set[int] = set()  # processes that will leave politely: a fork does not


def core_module() -> ModuleType:
    """Return ``torch_iroh._core``, which needs no torch.

    Raises:
        ImportError: it was not built; the text says how to build it.
    """
    return _import("_core")


def torch_module() -> ModuleType:
    """Return ``torch_iroh._C`` after checking that it was built for the installed torch.

    Raises:
        ImportError: it was not built, or was built for another minor version of torch.
    """
    import torch

    try:
        module = _import("_C")
    except ImportError as error:
        # A library of another torch often fails before its version can be asked.
        raise ImportError(f"{error} (found torch {torch.__version__})") from error
    built, found = module.built_for_torch, torch.__version__
    if _minor(built) != _minor(found):
        raise ImportError(
            f"torch-iroh was built for torch {built}, found torch {found}. "
            "Try: pip install --no-build-isolation --force-reinstall --no-deps torch-iroh (or -e . in its clone)"
        )
    return module


def _minor(version: str) -> list[str]:
    return version.split(".")[:2]


def _import(name: str) -> ModuleType:
    try:
        return importlib.import_module(f"torch_iroh.{name}")
    except ImportError as error:
        raise ImportError(
            f"torch-iroh's native module {name} cannot be loaded: {error}. "
            "Try: pip install --no-build-isolation -e . (after installing torch)"
        ) from error


def iroh_library() -> tuple[str, str]:
    """Return path and version of the iroh package's shared library; empty strings when it is not installed.

    The package is not imported: its Python binding would start threads of its own.
    """
    spec = importlib.util.find_spec("iroh")
    if spec is None or not spec.submodule_search_locations:
        return "", ""
    try:
        version = importlib.metadata.version("iroh")
    except importlib.metadata.PackageNotFoundError:
        version = ""
    for folder in spec.submodule_search_locations:
        for name in _LIBRARY_NAMES:
            path = Path(folder) / name
            if path.is_file():
                return str(path), version
    return "", version


def open_library() -> None:
    """Open the iroh library once per process; ``TORCH_IROH_LIBRARY`` overrides the installed package.

    Raises:
        RuntimeError: not installed, of an unsupported version, or this process is a fork of one that used it.
    """
    path, version = iroh_library()
    core_module().open_library(path, version)


def prepare_group(network: bool) -> None:
    """Called by the native code before this process makes a group; `network`: of several ranks."""
    if network:
        open_library()
    leave_politely_at_exit()


def leave_politely_at_exit() -> None:
    """See to it that this process ends its groups before its interpreter ends, whoever forgot to.

    Peers hear goodbye, operations in flight fail, and callbacks have ended.
    """
    owner = os.getpid()
    if owner in _leaving:
        return
    _leaving.add(owner)

    def leave() -> None:
        if os.getpid() != owner:
            return
        torch_native = sys.modules.get("torch_iroh._C")
        if torch_native is not None:
            torch_native.leave_all_process_groups()
        core_module().leave_all_groups()
        # A thread that wants the GIL after this ends the process with SIGABRT, when it frees a tensor, for example.
        if torch_native is not None:
            torch_native.finish_callbacks(_CALLBACKS_END)

    atexit.register(leave)
