"""Prints, as make variables, what the native build must know of the Python and the torch that run this script.

Nothing is imported from torch: its files say the same in milliseconds, and an installed torch_iroh is not autoloaded by
its own build. setup.py asks `find_torch` too, so there is one opinion on what a usable torch is.
"""

import importlib.util
import re
import sys
import sysconfig
from pathlib import Path
from typing import NamedTuple

SUPPORTED_TORCH = ("2.13", "2.14")  # named one by one: c10d's virtual tables change between minors
ADVICE = "install torch first, then pip install --no-build-isolation -e ."


class Torch(NamedTuple):
    """One installed torch: where it lies, and its full version ("2.13.0+cpu")."""

    folder: Path
    version: str


def find_torch() -> Torch:
    """Return the torch of this Python, or exit with one line that says what to do."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        sys.exit(f"torch-iroh: no torch in {sys.executable} (pip's build isolation hides it): {ADVICE}")
    folder = Path(spec.origin).parent
    found = re.search(r"^__version__ = '([^']+)'", (folder / "version.py").read_text(), re.MULTILINE)
    version = found[1] if found else "unknown"
    if ".".join(version.split(".")[:2]) not in SUPPORTED_TORCH:
        sys.exit(f"torch-iroh: torch {version} is not one of {', '.join(SUPPORTED_TORCH)}: {ADVICE}")
    return Torch(folder, version)


def main() -> None:
    """Print the variables; paths are quoted for the shell that make runs, since a home folder may hold a space."""
    torch = find_torch()
    headers = (torch.folder / "include", torch.folder / "include/torch/csrc/api/include", sysconfig.get_path("include"))
    print("TORCH_VERSION :=", torch.version)
    print("TORCH_PUBLIC_VERSION :=", torch.version.split("+")[0])
    print("TORCH_LIB :=", f'"{torch.folder / "lib"}"')
    print("PYTHON_HEADERS :=", *(f'-isystem "{folder}"' for folder in headers))
    print("PYTHON_TAG :=", sysconfig.get_config_var("SOABI"))
    print("EXT_SUFFIX :=", sysconfig.get_config_var("EXT_SUFFIX"))


if __name__ == "__main__":
    main()
