"""`torch-iroh lab`: what it runs where, what it prints, and its exit code."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence

import pytest
from lab_probes import eventually

from torch_iroh._cli import _VERBS
from torch_iroh.lab import _leftovers, obstacle
from torch_iroh.lab.command import main

# Home 1 says hello to home 0.
TALK = """
import socket, sys, time
number, first = sys.argv[1:]
if number == "0":
    connection, (address, _) = socket.create_server(("", 5000)).accept()
    print(connection.recv(100).decode(), "from", address)
else:
    for _ in range(100):
        try:
            connection = socket.create_connection((first, 5000))
        except ConnectionRefusedError:
            time.sleep(0.1)
            continue
        connection.sendall(b"hello")
        break
"""
COMMAND = [sys.executable, "-m", "torch_iroh", "lab"]


@pytest.fixture(autouse=True)
def _needs() -> None:
    if missing := obstacle():
        pytest.skip(missing)


def rehearse(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*COMMAND, *arguments], capture_output=True, text=True, timeout=60, check=False)


def lines_of(done: subprocess.CompletedProcess[str], name: str) -> list[str]:
    rows = [line.partition(" | ") for line in done.stdout.splitlines()]
    return [text for who, _, text in rows if who.strip() == name]


def test_each_home_runs_the_command_in_its_own_network():
    script = "echo {i}/{n} {name} {address} {first} {x} $TORCH_IROH_LAB_HOME; ip -o -4 addr show scope global"
    done = rehearse("--homes", "3", "--nat", "port,symmetric,none", "--", "sh", "-c", script)
    assert done.returncode == 0, done.stderr
    for number, address in enumerate(["10.0.1.2", "10.0.2.2", "203.0.113.3"]):
        name = f"home{number}"
        said, device = lines_of(done, name)
        assert said == f"{number}/3 {name} {address} 203.0.113.1 {{x}} {name}"
        assert address in device


def test_exit_code_is_the_worst_and_all_are_waited_for():
    done = rehearse("--homes", "3", "--", "sh", "-c", "sleep 0.{i}; test {i} = 1 && kill -9 $$; exit {i}")
    assert done.returncode == 137
    assert [line.split("s  ")[1] for line in lines_of(done, "lab")] == [
        "home0: exit code 0",
        "home1: exit code 137",
        "home2: exit code 2",
    ]


def test_homes_reach_a_public_one_and_its_line_counts(tmp_path):
    program = tmp_path / "talk.py"
    program.write_text(TALK)
    done = rehearse(
        "--nat", "none,port", "--counters", "--delay", "1", "--", sys.executable, str(program), "{i}", "{first}"
    )
    assert done.returncode == 0, done.stdout
    assert lines_of(done, "home0")[0] == "hello from 203.0.113.2"
    assert "received_packets=" in lines_of(done, "home0")[-1]


def test_trouble_is_told_and_equal_for_equal_seeds():
    def troubled(seed: int) -> list[str]:
        done = rehearse("--trouble", "2", "--within", "0.6", "--lasts", "0.1:0.2", "--kinds", "cut,move,rebind",
                        "--seed", str(seed), "--", "sleep", "0.8")  # fmt: skip
        assert done.returncode == 0, done.stderr
        return sorted(line.split("s  ")[1] for line in lines_of(done, "lab"))

    first = troubled(4)
    assert first == troubled(4)
    assert len(first) >= 4


def test_command_that_does_not_exist_is_named():
    done = rehearse("--", "no-such-command")
    assert done.returncode == 1
    assert done.stderr == "torch-iroh lab: [Errno 2] No such file or directory: 'no-such-command'\n"


def test_timeout_ends_the_run():
    done = rehearse("--timeout", "0.5", "--", "sleep", "600")
    assert done.returncode == 1
    assert "the command has not ended after 0.5 s in home0, home1" in done.stderr


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_ends_the_run_and_removes_the_lab(number):
    process = subprocess.Popen([*COMMAND, "--homes", "1", "--", "sh", "-c", "echo up; exec sleep 600"],
                               stdout=subprocess.PIPE, text=True)  # fmt: skip
    with process:
        assert process.stdout is not None
        assert process.stdout.readline() == "home0 | up\n"
        process.send_signal(number)
        assert process.wait(20) == 128 + number
    assert _leftovers.namespaces_of(f"til{process.pid}n1") == []


def test_without_a_command_the_homes_stand_and_say_how_to_enter():
    process = subprocess.Popen([*COMMAND, "--homes", "1"], stdout=subprocess.PIPE, text=True)
    with process:
        assert process.stdout is not None
        assert process.stdout.readline() == "home0: 203.0.113.1 (10.0.1.2, NAT port)\n"
        entry = process.stdout.readline().split()
        assert entry[-1] == "bash"
        there = subprocess.run([*entry[:-1], "ip", "addr"], capture_output=True, text=True, check=True)
        assert "10.0.1.2" in there.stdout
        process.terminate()
        assert process.wait(20) == 143
    assert eventually(lambda: not _leftovers.namespaces_of(f"til{process.pid}n1"))


def usage_error(arguments: Sequence[str], capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as end:
        main(arguments)
    assert end.value.code == 2
    return capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--homes", "0", "--", "true"], "0 homes: there can be 1 to 200"),
        (["--nat", "port,cone", "--", "true"], "NAT kind 'cone' is none of none, full"),
        (["--nat", "port,port,port", "--", "true"], "3 NAT kinds for 2 homes"),
        (["--loss", "200", "--", "true"], "loss=200.0 is outside 0 .. 100"),
        (["--up", "-1", "--", "true"], "up=-1.0 is outside 0 .."),
        (["--trouble", "3"], "--trouble happens to a command"),
        (["--trouble", "3", "--kinds", "flood", "--", "true"], "the kinds of trouble are cut"),
        (["--trouble", "3", "--lasts", "x", "--", "true"], "'x' is not like 1:8"),
        (["true"], "unrecognized arguments: true"),
    ],
)
def test_wrong_options_are_refused(arguments, text, capsys):
    assert text in usage_error(arguments, capsys)


def test_without_root_one_sentence_and_exit_code_2(capsys, monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    text = usage_error(["--", "true"], capsys)
    assert text.startswith("torch-iroh lab: ") and "needs root" in text
    assert text.count("\n") == 1


@pytest.mark.skipif("relay" not in _VERBS, reason="this version has no relay")
def test_relay_is_told_to_the_homes():
    done = rehearse(
        "--relay", "--homes", "1", "--", "sh", "-c", "echo {relay} $TORCH_IROH_RELAY; echo $TORCH_IROH_OBSERVER"
    )
    assert done.returncode == 0, done.stdout + done.stderr
    relay, observer = lines_of(done, "home0")
    assert relay == "http://203.0.113.2:3340 http://203.0.113.2:3340"
    assert observer.endswith("@203.0.113.2:3340")


@pytest.mark.skipif("relay" in _VERBS, reason="this version has a relay")
def test_relay_that_does_not_start_is_said():
    done = rehearse("--relay", "--", "true")
    assert done.returncode == 1
    assert "`torch-iroh relay` ended with exit code 2; its words are above" in done.stderr
