"""The benchmarks run, verify their data, print tables that can be read, and leave no process behind.

No figure is judged here: these machines are shared, and --quick measures next to nothing.
"""

from __future__ import annotations

import functools
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
OPS = {"all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all", "barrier"}


def run(name: str, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(BENCHMARKS / name), *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=200)


def run_quick(name: str, *options: str) -> list[list[dict[str, str]]]:
    """The tables of a quick run: a table is a list of rows, a row its cells by column."""
    done = run(name, "--quick", "--deadline", "150", *options)
    assert done.returncode == 0, done.stdout + done.stderr
    return tables(done.stdout)


def tables(text: str) -> list[list[dict[str, str]]]:
    found: list[list[dict[str, str]]] = []
    columns: list[str] = []
    for line in text.splitlines():
        cells = line.split()
        if not cells or line.startswith("#"):
            columns = []
        elif not columns:
            columns = cells
            found.append([])
        else:
            assert len(cells) == len(columns), line
            found[-1].append(dict(zip(columns, cells, strict=True)))
    return found


@pytest.mark.timeout(240)
def test_stream_prints_the_raw_road_beside_gloo():
    (table,) = run_quick("stream.py")
    assert [*table[0]][-1] == "ratio"
    assert "wrong" not in table[0]  # nobody looks at these bytes
    seen = {(row["road"], row["ways"], row["conns"]) for row in table}
    assert seen == {(road, *way) for road in ("gloo", "iroh") for way in (("one", "1"), ("both", "1"))} | {
        ("iroh", "both", "2")
    }
    for row in table:
        assert float(row["GBps"]) > 0
        assert 0 < float(row["p50_ms"]) <= float(row["p95_ms"])
        assert float(row["ratio"]) > 0
    assert [row["ratio"] for row in table if row["road"] == "gloo"] == ["1.00", "1.00"]


@pytest.mark.timeout(240)
def test_allreduce_verifies_every_collective_on_both_backends():
    collectives, issuing = run_quick("allreduce.py", "--op", "all")
    for table in (collectives, issuing):
        assert [*table[0]][-2:] == ["wrong", "ratio"]
    raw = [row for row in collectives if row["backend"] == "raw"]
    assert [row["op"] for row in raw] == ["raw_one_way", "raw_both_ways"]
    for backend in ("gloo", "iroh"):
        rows = [row for row in collectives if row["backend"] == backend]
        assert {row["op"] for row in rows} == OPS
        verified = [row for row in rows if row["op"] != "barrier"]
        assert {row["bytes"] for row in verified} == {"1Ki", "1Mi"}
        assert {row["wrong"] for row in verified} == {"0"}
    assert [(row["backend"], row["wrong"]) for row in issuing] == [("gloo", "0"), ("iroh", "0")]
    for row in collectives:
        assert 0 < float(row["p50_ms"]) <= float(row["p95_ms"])
    for row in issuing:
        assert 0 < float(row["p50_us"]) <= float(row["p95_us"])


@pytest.mark.timeout(240)
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="shared memory needs Linux")
def test_host_verifies_every_collective_and_says_when_open_mpi_is_left_out():
    (table,) = run_quick("host.py", "--op", "all", "--no-mpi")
    assert {row["op"] for row in table} == OPS
    assert {row["backend"] for row in table} == {"gloo", "iroh"}
    assert {row["wrong"] for row in table} == {"0"}
    assert {row["to_mpi"] for row in table} == {"-"}
    done = run("host.py", "--quick", "--no-mpi", "--op", "barrier", "--rounds", "1")
    assert "Open MPI is left out" in done.stdout


@pytest.mark.timeout(240)
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="shared memory needs Linux")
def test_messages_are_verified_on_every_road():
    (table,) = run_quick("messages.py")
    assert [row["road"] for row in table] == ["gloo", "shared", "iroh"] * 2
    assert {row["wrong"] for row in table} == {"0"}
    assert all(0 < float(row["p50_us"]) <= float(row["p95_us"]) for row in table)


@pytest.mark.timeout(240)
def test_ddp_compares_a_step_with_what_it_must_cost():
    done = run("ddp.py", "--quick", "--deadline", "150")
    assert done.returncode == 0, done.stdout + done.stderr
    (table,) = tables(done.stdout)
    assert [row["what"] for row in table] == ["compute", "raw", "gloo", "gloo_all_reduce", "iroh", "shared"]
    assert all(0 < float(row["p50_ms"]) <= float(row["p95_ms"]) for row in table)
    assert "of the bound" in done.stdout and "equal: yes" in done.stdout


@pytest.mark.timeout(240)
def test_compression_compares_each_codec_with_torch_and_positions_with_their_entropy():
    codecs, positions = run_quick("compression.py")
    assert {row["by"] for row in codecs if row["codec"] in ("bf16", "fp8", "int8", "topk")} == {"torch", "iroh"}
    for row in codecs:
        assert float(row["enc_GBps"]) > 0 and float(row["dec_GBps"]) > 0
        assert float(row["ratio"]) >= 0.99
        assert row["codec"] == "none" or 0 < float(row["error"]) < 1
    assert all(0 <= float(row["over"]) < 1 for row in positions if int(row["kept"]) > 50)  # few: whole bytes


@pytest.mark.timeout(240)
def test_compression_quality_trains_equal_ranks_with_fewer_bytes(tmp_path):
    output, plot = tmp_path / "curves.json", tmp_path / "curves.svg"
    (table,) = run_quick("compression_quality.py", "--ranks", "2", "--output", str(output), "--plot", str(plot))
    assert [row["codec"] for row in table] == ["exact"] * 2 + ["int8"] * 2 + ["int4"] * 2 + ["topk-int8"] * 2
    assert {row["equal"] for row in table} == {"yes"}
    fewer = [float(row["fewer"]) for row in table if row["seed"] == "mean"]
    assert fewer == sorted(fewer) and fewer[0] == 1.0 and fewer[1] > 3
    assert [one["codec"] for one in json.loads(output.read_text())["runs"]] == ["exact", "int8", "int4", "topk-int8"]
    assert "<svg" in plot.read_text()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--op", "all_reduced"], "all_reduced"),
        (["--raw-bytes", "3Mi"], "3Mi is not in --bytes"),
    ],
)
def test_wrong_usage_exits_2_and_says_what(options, said):
    done = run("allreduce.py", *options)
    assert done.returncode == 2, done.stderr
    assert said in done.stderr


@pytest.mark.timeout(240)
@pytest.mark.skipif(os.name != "posix", reason="signals")
def test_interrupted_benchmark_leaves_no_rank_behind():
    command = [sys.executable, str(BENCHMARKS / "stream.py"), "--rounds", "100000"]
    # A shell that runs the tests in the background has them ignore SIGINT, and every program that they start.
    listen = functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, text=True, preexec_fn=listen, **pipes) as process:
        ranks = wait_for_ranks(psutil.Process(process.pid))
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors
    assert errors == "interrupted\n"
    by = time.monotonic() + 10
    while any(is_alive(rank) for rank in ranks) and time.monotonic() < by:
        time.sleep(0.1)
    assert not [rank for rank in ranks if is_alive(rank)]


def wait_for_ranks(parent: psutil.Process) -> list[psutil.Process]:
    """All its children, once both ranks have loaded torch."""
    by = time.monotonic() + 90
    while time.monotonic() < by:
        ranks = [child for child in parent.children() if is_rank(child)]
        if len(ranks) == 2:
            return parent.children()
        time.sleep(0.1)
    raise AssertionError(f"no two ranks under {parent}")


def is_rank(process: psutil.Process) -> bool:
    try:
        return any("libtorch" in mapped.path for mapped in process.memory_maps())
    except (psutil.NoSuchProcess, psutil.AccessDenied, NotImplementedError):
        return False


def is_alive(process: psutil.Process) -> bool:
    try:  # an orphan may stay a zombie for long where process 1 reaps nobody
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
