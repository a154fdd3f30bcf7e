"""A laboratory leaves the machine as it found it, however it ends."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from lab_probes import Probe, eventually, reaches

from torch_iroh.lab import Lab, LabError, _emulator, _leftovers, _system, obstacle

LIMITS = [Path("/proc/sys", *limit.split(".")) for limit in _leftovers.BUFFER_LIMITS]

# Prints the laboratory's name, the guardian's id and that of a process on a host.
OWNER = """
import time
from torch_iroh.lab import Lab
with Lab(udp_buffers=True) as lab:
    lab.host("anna", nat="port")
    lab.host("pub")
    sleeper = lab["anna"].popen(["sh", "-c", "{trap}while :; do sleep 1; done"])
    print(lab.name, lab._guardian.pid, sleeper.pid, flush=True)
    time.sleep(600)
"""


@pytest.fixture(autouse=True)
def _needs() -> None:
    if missing := obstacle():
        pytest.skip(missing)


def traces(name: str) -> list[str]:
    """What is there of a laboratory: namespaces, processes in them, its folder."""
    namespaces = _leftovers.namespaces_of(name)
    folder = _leftovers.FOLDER / name
    return [*namespaces, *map(str, _leftovers.processes_in(namespaces)), *([str(folder)] if folder.exists() else [])]


def limits() -> list[int]:
    return [int(path.read_text()) for path in LIMITS]


@contextlib.contextmanager
def owner(trap: str = "") -> Iterator[tuple[subprocess.Popen[str], str, int, int]]:
    process = subprocess.Popen(
        [sys.executable, "-c", OWNER.format(trap=trap)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    with process:
        assert process.stdout is not None
        name, guardian, sleeper = process.stdout.readline().split()
        try:
            yield process, name, int(guardian), int(sleeper)
        finally:
            process.kill()


def ended(pid: int) -> bool:
    return not Path(f"/proc/{pid}").exists() or _leftovers._is_zombie(pid)


def test_close_removes_all_and_ends_processes_politely(tmp_path):
    with Lab() as lab:
        lab.host("anna", nat="port")
        lab.host("pub")
        said = tmp_path / "said"
        process = lab["anna"].popen(["sh", "-c", f"trap 'echo goodbye > {said}; exit 5' TERM; echo up; read never"],
                                    stdin=subprocess.PIPE, stdout=subprocess.PIPE)  # fmt: skip
        assert process.stdout is not None and process.stdout.readline() == b"up\n"
        assert len(_leftovers.namespaces_of(lab.name)) == 3
    assert traces(lab.name) == []
    assert said.read_text() == "goodbye\n"
    assert process.returncode == 5
    lab.close()
    with pytest.raises(LabError, match="this laboratory is closed"):
        lab.host("bert")


def test_exception_in_the_middle_removes_all():
    with pytest.raises(KeyError), Lab() as lab:
        lab.host("anna", nat="port").popen(["sleep", "600"])
        raise KeyError("a test failed")
    assert traces(lab.name) == []


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_killed_owner_leaves_nothing(number):
    before = limits()
    with owner("trap '' TERM; " if number == signal.SIGKILL else "") as (process, name, guardian, sleeper):
        assert len(traces(name)) >= 4
        os.kill(process.pid, number)
        process.wait(10)
        assert eventually(lambda: not traces(name)), traces(name)
        assert eventually(lambda: ended(sleeper) and ended(guardian))
    assert limits() == before


def test_leftovers_of_a_run_killed_with_its_guardian_are_swept_by_the_next():
    before = limits()
    with owner() as (process, name, guardian, sleeper):
        os.kill(guardian, signal.SIGKILL)
        os.kill(process.pid, signal.SIGKILL)
        process.wait(10)
        assert eventually(lambda: ended(guardian))
    assert len(traces(name)) >= 4
    assert not ended(sleeper)
    with Lab() as lab:
        assert lab.name != name
        assert traces(name) == []
    assert eventually(lambda: ended(sleeper))
    assert limits() == before


def test_lab_whose_guardian_was_killed_still_ends_well():
    with Lab() as lab:
        lab.host("anna", nat="port").popen(["sleep", "600"])
        lab._guardian.kill()
    assert traces(lab.name) == []


def test_two_labs_at_once_do_not_meet():
    with Lab() as first, Lab() as second:
        for lab in (first, second):
            lab.host("anna", nat="port")
            lab.host("pub")
        with Probe(first["anna"]) as anna, Probe(first["pub"], 7000) as pub, Probe(second["pub"], 7000) as other:
            assert first["pub"].address == second["pub"].address
            assert reaches(anna, pub)
            assert other.hears_nothing()
            second.close()
            assert reaches(anna, pub)


def test_buffer_limits_are_raised_on_request_and_the_last_lab_restores_them():
    before = limits()
    with Lab():
        assert limits() == before, "only on request"
    first, second = Lab(udp_buffers=True), Lab(udp_buffers=True)
    with first, second:
        assert min(limits()) >= 32 << 20
        first.close()
        assert min(limits()) >= 32 << 20, "the second still needs them"
    assert limits() == before


def test_sigkill_of_the_emulator_is_said_in_words():
    with Lab() as lab:
        lab.host("anna")
        os.kill(lab._running._process.pid, signal.SIGKILL)
        lab._running._process.wait(10)
        with pytest.raises(LabError, match=r"the emulator does not answer .*; exit code -9"):
            lab.counters()
    assert traces(lab.name) == []


def test_without_root_one_sentence_says_so(monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert "needs root" in obstacle()
    with pytest.raises(LabError, match="needs root"):
        Lab()


def test_without_tools_one_sentence_names_their_packages(monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    assert obstacle() == ("the laboratory needs iproute2, nftables. Try: apt-get install -y iproute2 nftables")


def test_without_compiler_one_sentence_says_so(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert "finds no C++20 compiler" in obstacle()
    with pytest.raises(LabError, match="finds no C\\+\\+20 compiler"):
        _emulator.program()


def test_compiler_that_fails_is_quoted_and_leaves_nothing(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CXX", "sh -c 'echo no such flag >&2; exit 1' compiler")
    with pytest.raises(LabError, match=r"the emulator does not compile [\s\S]*no such flag"):
        _emulator.program()
    assert list((tmp_path / "torch-iroh").iterdir()) == []


def test_command_that_fails_has_its_own_words():
    with pytest.raises(LabError, match=r"`ip netns del nobody-has-this`: exit code 1: Cannot remove"):
        _system.command(["ip", "netns", "del", "nobody-has-this"])
