"""Lets pip run the native build. How to compile lies in csrc/Makefile, what the package is lies in pyproject.toml."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT / "scripts"))
from native_config import find_torch  # noqa: E402

# Absent: make would find these by itself, but say it in more than one line.
TOOLS = {"make": "make", os.environ.get("CXX", "c++").split()[0]: "a C++20 compiler, for example g++ >= 12"}


class MakeModules(build_ext):
    """Runs `make -C csrc modules`: into the source tree for an editable install, into build_lib for a wheel."""

    def run(self) -> None:
        """Build for the Python that runs this and for the torch that it sees."""
        find_torch()
        for tool, meaning in TOOLS.items():
            if shutil.which(tool) is None:
                sys.exit(f"torch-iroh: '{tool}' not found ({meaning}): scripts/check-system.sh says what to install")
        # Called below another make (`make demo`), its job server and goals are none of ours.
        env = {name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MFLAGS", "MAKELEVEL")}
        command = ["make", "-C", "csrc", f"-j{os.environ.get('MAX_JOBS') or os.cpu_count() or 1}", "modules"]
        # WERROR: a warning that only a newer compiler gives must not refuse an install.
        variables = [f"PYTHON={sys.executable}", f"PACKAGE={self._package()}", "WERROR="]
        if (code := subprocess.run(command + variables, cwd=ROOT, env=env).returncode) != 0:
            sys.exit(f"torch-iroh: the native build failed (make, exit status {code}); the first error is above")

    def get_outputs(self) -> list[str]:
        """Name the three libraries, as setuptools asks when it records what a wheel holds."""
        package = ROOT / "csrc" / self._package()
        return [str(file) for pattern in ("_core.*", "_C.*", "lib/*") for file in package.glob(pattern)]

    def get_output_mapping(self) -> dict[str, str]:
        """Map nothing: no file is built in one place and copied to another."""
        return {}

    def _package(self) -> str:
        folder = ROOT / "torch_iroh" if self.inplace else Path(self.build_lib).absolute() / "torch_iroh"
        return os.path.relpath(folder, ROOT / "csrc")  # relative: make cannot name a folder with a space in its path


setup(
    # No sources: make finds them. The names tell setuptools that the wheel is of one platform and one Python.
    ext_modules=[Extension("torch_iroh._core", []), Extension("torch_iroh._C", [])],
    cmdclass={"build_ext": MakeModules},
)
