"""Programs as people write them, in examples/patterns: under torchrun, on iroh and on gloo at once, the same answer."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from ranks import ENVIRONMENT

PATTERNS = Path(__file__).parents[2] / "examples" / "patterns"
SCRIPTS = sorted(path.stem for path in PATTERNS.glob("*.py"))
RANKS = {"parameter_server": 3, "ddp_uneven": 3}
SECONDS = 100


def start(script: str, backend: str, launcher: list[str], arguments: list[str]) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", *launcher]
    return subprocess.Popen(
        [*command, str(PATTERNS / f"{script}.py"), "--backend", backend, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        # Without the second, torch 2.13's own rendezvous cannot restart ranks: the new ones read the store of the old.
        env={**os.environ, **ENVIRONMENT, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"},
    )


def finish(running: subprocess.Popen[str]) -> str:
    try:
        output, _ = running.communicate(timeout=SECONDS)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(running.pid, signal.SIGKILL)
    assert running.returncode == 0, f"exit {running.returncode}\n{output[-6000:]}"
    return output


def numbers(output: str) -> list[float]:
    """All numbers of the line that rank 0 prints at the end."""
    (line,) = [line for line in output.splitlines() if re.search(r"\bloss \d", line)]
    return [float(one) for one in re.findall(r"-?\d+(?:\.\d+)?", line)]


@pytest.mark.timeout(240)
@pytest.mark.parametrize("script", [name for name in SCRIPTS if name != "resume"])
def test_pattern_gives_on_iroh_what_it_gives_on_gloo(script):
    launcher = [f"--nproc-per-node={RANKS.get(script, 2)}"]
    running = [start(script, backend, launcher, []) for backend in ("iroh", "gloo")]
    ours, theirs = (numbers(finish(one)) for one in running)
    assert ours == pytest.approx(theirs, rel=1e-5, abs=1e-6)


@pytest.mark.timeout(240)
def test_run_that_crashes_and_resumes_ends_like_one_that_does_not(tmp_path):
    crashing = start(
        "resume", "iroh", ["--nproc-per-node=2", "--max-restarts=1"], ["--folder", f"{tmp_path}/crash", "--crash-at", "7"]
    )
    straight = start("resume", "gloo", ["--nproc-per-node=2"], ["--folder", f"{tmp_path}/straight"])
    output = finish(crashing)
    assert "goes on from step 6" in output
    assert numbers(output) == pytest.approx(numbers(finish(straight)), rel=1e-5, abs=1e-6)


def test_there_are_ten_patterns_and_each_says_how_to_run_it():
    assert len(SCRIPTS) >= 10
    for script in SCRIPTS:
        assert f"examples/patterns/{script}.py" in (PATTERNS / f"{script}.py").read_text()
