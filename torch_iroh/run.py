"""`torch-iroh run`: torchrun, with workers in which the backends a program names by itself mean "iroh".

$ torch-iroh run --nproc-per-node=2 train.py

Whatever the program asks for, "gloo", "nccl", "cpu:gloo,cuda:nccl" or nothing, its groups run over iroh. Every option
of torchrun is torchrun's own. Also as ``python -m torch_iroh.run``. How it is done: :mod:`torch_iroh._mapping`.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from importlib.metadata import entry_points
from typing import Any

from torch_iroh import _mapping

_DESCRIPTION = """\
torchrun, with workers in which the backends a program names by itself mean "iroh":
"gloo", "nccl", "cpu:gloo,cuda:nccl", or no name, in init_process_group, in new_group and what is built on it
(new_subgroups, DeviceMesh), in split_group, and in torch's table of default backends. dist.get_backend() says "iroh".
Processes that a worker starts are mapped like the worker. Rank 0 logs each kind of mapped call once (logger
"torch_iroh.run"). Start every node of a job in the same way. All options below but --keep are torchrun's."""

_EPILOG = """\
examples:
  torch-iroh run --nproc-per-node=2 train.py
  torch-iroh run --keep gloo --nproc-per-node=2 train.py      # groups that say "gloo" stay gloo"""

_KEEP = """\
leave these as torch has them: gloo, nccl (groups for which the program gives this name), unnamed (groups for which it
gives none, and torch's default backends of devices). Several with commas, or the option several times."""


def _parser() -> argparse.ArgumentParser:
    from torch.distributed import run as torchrun

    parser = torchrun.get_args_parser()
    parser.prog = "torch-iroh run"
    parser.description, parser.epilog = _DESCRIPTION, _EPILOG
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument_group("torch-iroh").add_argument(
        "--keep", action="append", default=[], type=_keep, metavar="NAME[,NAME]", help=_KEEP
    )
    return parser


def _keep(text: str) -> frozenset[str]:
    try:
        return _mapping.parse_sources(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _obstacle(sources: frozenset[str]) -> str:
    """Say why workers would not be mapped, and would silently use what the program names; empty when they will be."""
    if not sources:
        return "--keep leaves nothing to map. Try: torchrun"
    if os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD", "1") != "1":
        return "TORCH_DEVICE_BACKEND_AUTOLOAD is off, and without it workers do not load torch-iroh. Try: unset it"
    if not entry_points(group="torch.backends", name="iroh"):
        return "torch-iroh is not installed in this environment. Try: pip install --no-build-isolation -e ."
    return ""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line; `arguments` default to those of the process."""
    from torch.distributed import run as torchrun
    from torch.distributed.elastic.multiprocessing.errors import record

    parser = _parser()
    options = parser.parse_args(arguments)
    sources = frozenset(_mapping.SOURCES).difference(*options.keep)
    obstacle = _obstacle(sources)
    if obstacle:
        parser.error(obstacle)
    try:
        # Here too: this finds a torch that cannot be mapped, and workers may be forks of this process.
        _mapping.install(sources)
    except RuntimeError as error:
        parser.error(str(error))
    os.environ[_mapping.VARIABLE] = ",".join(sorted(sources))
    launch: Any = record(torchrun.run)
    launch(options)


if __name__ == "__main__":
    main()
