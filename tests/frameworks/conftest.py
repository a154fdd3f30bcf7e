"""Environments for the frameworks: own ones, made by pip under build/frameworks/, that borrow torch from this one.

An environment is made once per requirement line and kept; `make clean` removes it.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "build" / "frameworks"
_INSTALL_SECONDS = 600


@pytest.fixture(scope="session")
def environment() -> Callable[..., Path]:
    """Return the Python of an environment with these requirements; skips, with pip's words, where pip has them not."""
    made: dict[tuple[str, ...], Path | str] = {}

    def python_with(*requirements: str) -> Path:
        if requirements not in made:
            made[requirements] = _make(requirements)
        python = made[requirements]
        if isinstance(python, str):
            pytest.skip(python)
        return python

    return python_with


def _make(requirements: tuple[str, ...]) -> Path | str:
    # What is borrowed decides what pip adds, so another torch or interpreter gets another environment.
    borrowed = sysconfig.get_path("purelib")
    key = hashlib.sha256("\n".join([sys.version, borrowed, _version("torch"), *requirements]).encode()).hexdigest()
    folder = FOLDER / f"{requirements[0].partition('=')[0].partition('>')[0]}-{key[:10]}"
    python = folder / "bin" / "python"
    FOLDER.mkdir(parents=True, exist_ok=True)
    with open(folder.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # two test runs may want it at once
        if (folder / "done").is_file():
            return python
        subprocess.run([sys.executable, "-m", "venv", "--clear", "--without-pip", str(folder)], check=True)
        site = next((folder / "lib").glob("python*")) / "site-packages"
        # addsitedir, unlike a plain path, also follows the .pth of an editable install of torch-iroh.
        (site / "borrowed.pth").write_text(f"import site; site.addsitedir({borrowed!r})\n")
        pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--no-build-isolation", "-q"]
        keep = folder / "constraints.txt"
        keep.write_text(f"torch=={_version('torch').partition('+')[0]}\nnumpy=={_version('numpy')}\n")
        command = [*pip, "-c", str(keep), *requirements]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=_INSTALL_SECONDS)
        except subprocess.TimeoutExpired:
            return f"pip did not install {', '.join(requirements)} within {_INSTALL_SECONDS} s"
        if done.returncode != 0:
            return f"pip cannot install {', '.join(requirements)}: {done.stderr.strip().splitlines()[-1]}"
        (folder / "done").touch()
    return python


def _version(package: str) -> str:
    from importlib.metadata import version

    return version(package)


@pytest.fixture
def launch(tmp_path: Path) -> Callable[..., tuple[list[dict], str]]:
    """Return a function that runs a program on two ranks and gives what each reported, and all that was printed."""

    def run(python: Path, program: str, how: str, named: str = "") -> tuple[list[dict], str]:
        import torch

        folder = tmp_path / f"{how}{named}"
        folder.mkdir()
        settings = os.environ | {
            "ANSWERS": str(folder),
            "NAMED_BACKEND": named,
            "OMP_NUM_THREADS": "1",
            "TORCH_IROH_BIND": "127.0.0.1:0",
            "TORCH_IROH_SHARED_MEMORY": "off",
            "TORCH_IROH_PEER_TIMEOUT": "30",  # a rank that imports a framework on a busy machine may be silent
            "HF_HUB_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false",
        }
        path = Path(__file__).parent / "programs" / program
        command = [str(python), "-m", how, "--nproc-per-node=2", str(path)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=280, cwd=folder, env=settings)
        assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-8000:]
        return [torch.load(folder / f"{rank}.pt") for rank in range(2)], done.stderr

    return run
