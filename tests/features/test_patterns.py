"""Programs as people write them, in examples/patterns: under torchrun, on iroh and on gloo, the same answer."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from ranks import ENVIRONMENT

PATTERNS = Path(__file__).parents[2] / "examples" / "patterns"
SCRIPTS = sorted(path.stem for path in PATTERNS.glob("*.py"))
ALONE = {"parameter_server", "resume"}  # started by a torchrun of their own, below
SECONDS = 200


def start(backend: str, launcher: list[str], command: list[str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", *launcher, *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        # Without the second, torch 2.13's own rendezvous cannot restart ranks: the new ones read the store of the old.
        env={**os.environ, **ENVIRONMENT, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"},
    )


def finish(running: subprocess.Popen[str]) -> tuple[int, str]:
    try:
        output, _ = running.communicate(timeout=SECONDS)
    finally:
        with contextlib.suppress(psutil.NoSuchProcess):  # torchrun's workers lead process groups of their own
            for child in psutil.Process(running.pid).children(recursive=True):
                child.kill()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(running.pid, signal.SIGKILL)
    return running.returncode, output


def run_alone(script: str, backend: str, launcher: list[str], *arguments: str) -> str:
    command = [str(PATTERNS / f"{script}.py"), "--backend", backend, *arguments]
    code, output = finish(start(backend, launcher, command))
    assert code == 0, f"exit {code}\n{output[-6000:]}"
    return output


def free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


def numbers(output: str) -> list[float]:
    """All numbers of the line that rank 0 prints at the end."""
    lines = [line for line in output.splitlines() if re.search(r"\bloss \d", line)]
    assert len(lines) == 1, output[-6000:]
    return [float(one) for one in re.findall(r"-?\d+(?:\.\d+)?", lines[0])]


@pytest.fixture(scope="module")
def outputs() -> dict[str, dict[str, str]]:
    """What each script printed, by backend and name: all in two ranks of one torchrun for each backend."""
    together = [name for name in SCRIPTS if name not in ALONE]
    found = {}
    for backend in ("gloo", "iroh"):
        ports = free_ports(len(together))
        tasks = [f"{port}:{PATTERNS / name}.py" for port, name in zip(ports, together, strict=True)]
        runner = str(Path(__file__).parent / "pattern_runner.py")
        _, output = finish(start(backend, ["--nproc-per-node=2"], [runner, backend, *tasks]))
        parts = re.split(r"^## (\w+)\.py$", output, flags=re.MULTILINE)
        found[backend] = dict(zip(parts[1::2], parts[2::2], strict=True))
    return found


@pytest.mark.timeout(500)
@pytest.mark.parametrize("script", [name for name in SCRIPTS if name not in ALONE])
def test_pattern_gives_on_iroh_what_it_gives_on_gloo(outputs, script):
    ours, theirs = (numbers(outputs[backend].get(script, "")) for backend in ("iroh", "gloo"))
    assert ours == pytest.approx(theirs, rel=1e-5, abs=1e-6)


@pytest.mark.timeout(500)
def test_parameter_server_with_three_ranks():
    ours, theirs = (run_alone("parameter_server", one, ["--nproc-per-node=3"]) for one in ("iroh", "gloo"))
    assert numbers(ours) == pytest.approx(numbers(theirs), rel=1e-5, abs=1e-6)


@pytest.mark.timeout(500)
def test_run_that_crashes_and_resumes_ends_like_one_that_does_not(tmp_path):
    restarting = ["--nproc-per-node=2", "--max-restarts=1"]
    crashed = run_alone("resume", "iroh", restarting, "--folder", f"{tmp_path}/crash", "--crash-at", "7")
    assert "goes on from step 6" in crashed
    straight = run_alone("resume", "gloo", ["--nproc-per-node=2"], "--folder", f"{tmp_path}/straight")
    assert numbers(crashed) == pytest.approx(numbers(straight), rel=1e-5, abs=1e-6)


def test_there_are_ten_patterns_and_each_says_how_to_run_it():
    assert len(SCRIPTS) >= 10
    for script in SCRIPTS:
        assert f"examples/patterns/{script}.py" in (PATTERNS / f"{script}.py").read_text()
