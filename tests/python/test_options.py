"""Options and their environment variables, and a library or a build that is missing or another."""

from __future__ import annotations

import contextlib
import copy
import ctypes.util
import os
import re
import shutil
import subprocess
import sys
import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from programs import error_of, free_port, group, meet
from ranks import run_ranks, values_of

import torch_iroh
from torch_iroh import _native

# ---- options ----

ALLOWED = {  # option: (text of what is allowed, wrong values)
    "chunk_bytes": ("1024 to 1048576 bytes", [0, -1, 1023, 1048577, 2**40]),
    "algorithm": ("'auto', 'ring', 'direct'", ["oak", "", "RING"]),
    "plan": ("auto, ring, direct", ["all_reduce=oak", "*=RING"]),
    "probe": ("'auto', 'off'", ["on", ""]),
    "connect": ("'lazy', 'eager'", ["sometimes", ""]),
    "shared_memory": ("'auto', 'single_copy', 'off'", ["on", ""]),
    "site": ("up to 100 printable ASCII characters", ["x" * 101, "two\nlines"]),
    "streams": ("1 to 64", [0, -1, 65, 10**6]),
    "peer_timeout": ("0.2 to 3600 seconds", [0, -1.0, 0.1, 3601.0, float("nan"), float("inf")]),
    "heartbeat": ("0.02 to 1200 seconds", [0, -1.0, 0.01, 1201.0, float("nan")]),
    "connect_timeout": ("0.1 to 3600 seconds", [0, -1.0, 0.05, 3601.0, float("nan")]),
    "bind": ("ip:port", ["nonsense", "127.0.0.1", "127.0.0.1:99999", "host.example:1", ":", "127.0.0.1:-1"]),
    "relay": ("relay URLs", ["relay.example.org", "ftp://x", "http://", "http://a b"]),
    "observer": ("<64 hex digits>@ip:port", ["203.0.113.1:4000", "ab@203.0.113.1:4000", "0" * 64 + "@host:1"]),
}
RIGHT = {
    "chunk_bytes": 65536,
    "algorithm": "ring",
    "connect": "eager",
    "shared_memory": "single_copy",
    "probe": "off",
    "site": "home",
    "streams": 3,
    "peer_timeout": 2.5,
    "heartbeat": 0.25,
    "connect_timeout": 7.0,
    "bind": "127.0.0.1:0",
    "relay": "none",
    "observer": "",
}


@pytest.mark.parametrize(("option", "value"), [(key, value) for key, (_, wrong) in ALLOWED.items() for value in wrong])
def test_wrong_option_is_a_value_error_naming_what_is_allowed(option, value):
    with pytest.raises(ValueError, match=f"{option}.*allowed: .*{re.escape(ALLOWED[option][0])}"):
        torch_iroh.Options(**{option: value})


@pytest.mark.parametrize("option", sorted(RIGHT))
def test_option_of_a_wrong_type_is_a_type_error_naming_it(option):
    wrong: Any = object() if isinstance(RIGHT[option], (int, float)) else 3
    with pytest.raises(TypeError, match=option):
        torch_iroh.Options(**{option: wrong})
    if isinstance(RIGHT[option], int):
        with pytest.raises(TypeError, match=option):
            torch_iroh.Options(**{option: 1.5})


def test_heartbeat_longer_than_half_of_the_peer_timeout_is_refused():
    with pytest.raises(ValueError, match=r"heartbeat is 2.* at most half of peer_timeout \(3"):
        torch_iroh.Options(heartbeat=2.0)
    with pytest.raises(ValueError, match=r"heartbeat.*at most half of peer_timeout \(800 ms"):
        torch_iroh.Options(peer_timeout=0.8, heartbeat=0.5)
    assert torch_iroh.Options(peer_timeout=0.8).heartbeat is None  # half of it, by itself
    assert torch_iroh.Options(heartbeat=2.0, peer_timeout=4.0).heartbeat == 2.0


def test_unknown_option_is_a_type_error_that_lists_the_known_ones():
    with pytest.raises(TypeError, match=r"no option 'chunks'; it has: .*algorithm.*chunk_bytes.*streams"):
        torch_iroh.Options(chunks=3)
    with pytest.raises(TypeError):
        torch_iroh.Options(65536)  # keyword only


def test_options_repeat_themselves():
    options = torch_iroh.Options(**RIGHT)
    for name, value in RIGHT.items():
        assert getattr(options, name) == value, name
        assert getattr(torch_iroh.Options(), name) is None, name
        with pytest.raises(AttributeError):
            setattr(options, name, value)
    assert repr(torch_iroh.Options()) == "torch_iroh.Options()"
    assert eval(repr(options), {"torch_iroh": torch_iroh}).bind == "127.0.0.1:0"
    for name, value in RIGHT.items():
        assert f"{name}={value!r}" in repr(options)
    for twin in (copy.deepcopy(options), copy.copy(options), copy.deepcopy({"a": [options]})["a"][0]):
        assert twin is not options
        assert repr(twin) == repr(options)
    assert repr(torch_iroh.Options(streams=None, algorithm=None)) == "torch_iroh.Options()"
    for name in RIGHT:
        assert name in torch_iroh.Options.__doc__ or name in torch_iroh.Options.__init__.__doc__, name


@pytest.mark.parametrize(
    ("variable", "value", "text"),
    [
        ("TORCH_IROH_CHUNK_BYTES", "12", "chunk_bytes.*1024 to 1048576 bytes"),
        ("TORCH_IROH_CHUNK_BYTES", "many", "TORCH_IROH_CHUNK_BYTES is 'many'; allowed: a number"),
        ("TORCH_IROH_CHUNK_BYTES", "65536k", "TORCH_IROH_CHUNK_BYTES is '65536k'; allowed: a number"),
        ("TORCH_IROH_ALGORITHM", "oak", "algorithm.*'auto', 'ring', 'direct', .*'tree', 'butterfly', 'bruck'"),
        ("TORCH_IROH_CONNECT", "never", "connect.*'lazy', 'eager'"),
        ("TORCH_IROH_STREAMS", "0", "streams.*1 to 64"),
        ("TORCH_IROH_STREAMS", "2.5", "TORCH_IROH_STREAMS|streams"),
        ("TORCH_IROH_PEER_TIMEOUT", "3s", "TORCH_IROH_PEER_TIMEOUT is '3s'; allowed: a number"),
        ("TORCH_IROH_HEARTBEAT", "nan", "heartbeat.*0.02 to 1200 seconds"),
        ("TORCH_IROH_HEARTBEAT", "2", "heartbeat.*half of peer_timeout"),
        ("TORCH_IROH_CONNECT_TIMEOUT", "-1", "connect_timeout.*0.1 to 3600 seconds"),
        ("TORCH_IROH_BIND", "nowhere", "bind.*ip:port"),
        ("TORCH_IROH_RELAY", "relay.example.org", r"relay.*relay URLs \(http://... or https://...\).*'n0'.*'none'"),
        ("TORCH_IROH_OBSERVER", "203.0.113.1:4000", r"observer.*<64 hex digits>@ip:port"),
    ],
)
def test_environment_variables_are_validated_like_options(run, variable, value, text):
    (found,) = run(1, with_variable, variable, value)
    assert found.startswith("ValueError"), found
    assert re.search(text, found), found


def with_variable(rank: int, variable: str, value: str) -> str:
    before = os.environ.get(variable)
    os.environ[variable] = value
    try:
        return error_of(lambda: group(rank, 1, dist.HashStore()).__enter__())
    finally:
        os.environ.pop(variable) if before is None else os.environ.update({variable: before})
        if dist.is_initialized():
            dist.destroy_process_group()


def environment_counts(rank: int, world: int, store: str) -> dict[str, str]:
    """Which values the node runs with shows in what a second group may say."""
    found = {}
    with group(rank, world, store):
        for name, value in {"streams": 5, "peer_timeout": 4.5, "heartbeat": 0.75, "connect_timeout": 6.5}.items():
            for shift in (0, 1):
                made = []

                def second(name: str = name, value: Any = value + shift, made: list[Any] = made) -> None:
                    made.append(dist.new_group(pg_options=torch_iroh.Options(**{name: value})))

                found[f"{name} {shift}"] = error_of(second)
                for one in made:
                    dist.destroy_process_group(one)
        # The algorithm is in the text of a mismatch.
        tensor = torch.ones(3 + rank)
        found["algorithm"] = error_of(lambda: dist.all_reduce(tensor))
    return found


def test_environment_variables_are_honoured(tmp_path):
    environment = {
        "TORCH_IROH_STREAMS": "5",
        "TORCH_IROH_PEER_TIMEOUT": "4.5",
        "TORCH_IROH_HEARTBEAT": "0.75",
        "TORCH_IROH_CONNECT_TIMEOUT": "6.5",
        "TORCH_IROH_ALGORITHM": "ring",
    }
    outcomes = run_ranks(environment_counts, 2, 2, str(tmp_path / "store"), environment=environment)
    for found in values_of(outcomes):
        for name in ("streams", "peer_timeout", "heartbeat", "connect_timeout"):
            assert found[f"{name} 0"] == "nothing", (name, found)
            assert found[f"{name} 1"].startswith("ValueError: streams, heartbeat, peer_timeout, "), (name, found)
            assert "are per process" in found[f"{name} 1"], (name, found)
        assert "[3], ring)" in found["algorithm"] and "[4], ring)" in found["algorithm"], found


def option_beats_environment(rank: int, world: int, store: str) -> str:
    options = torch_iroh.Options(algorithm="direct")
    with group(rank, world, store, pg_options=options):
        assert repr(options) == "torch_iroh.Options(algorithm='direct')"
        return error_of(lambda: dist.all_reduce(torch.ones(3 + rank)))


def test_option_goes_before_the_environment_variable(store):
    outcomes = run_ranks(option_beats_environment, 2, 2, store, environment={"TORCH_IROH_ALGORITHM": "ring"})
    for text in values_of(outcomes):
        assert ", direct)" in text, text


def connect(rank: int, world: int, store: str, how: str) -> list[str]:
    with group(rank, world, store, pg_options=torch_iroh.Options(connect=how)):
        until = time.monotonic() + (5 if how == "eager" else 0.5)
        while time.monotonic() < until:
            paths = [peer.path for peer in torch_iroh.stats().peers]
            if how == "eager" and "not connected" not in paths:
                break
            time.sleep(0.05)
        meet(store, world)
        dist.barrier()
    return paths


@pytest.mark.parametrize("how", ["lazy", "eager"])
def test_eager_groups_connect_before_the_first_operation_and_lazy_ones_do_not(run, how, store):
    for paths in run(3, connect, 3, store, how):
        assert len(paths) == 2
        for path in paths:
            assert (path == "not connected") == (how == "lazy"), paths


def bound(rank: int, world: int, store: str, port: int) -> list[str]:
    options = torch_iroh.Options(bind=f"127.0.0.1:{port}") if rank == 0 else None
    with group(rank, world, store, pg_options=options):
        dist.barrier()
        paths = [peer.path for peer in torch_iroh.stats().peers]
        dist.barrier()
    return paths


def test_bind_decides_where_a_rank_listens(run, store):
    port = free_port()
    _, (path,) = run(2, bound, 2, store, port)
    assert path == f"direct 127.0.0.1:{port}"


def options_of_others(rank: int, store: str) -> list[str]:
    from torch.distributed import ProcessGroupGloo

    found = []
    for wrong in (ProcessGroupGloo._Options(), object(), {"streams": 3}):
        with contextlib.suppress(FileNotFoundError):
            os.remove(store)
        found.append(error_of(lambda wrong=wrong: group(rank, 1, store, pg_options=wrong).__enter__()))
        if dist.is_initialized():
            dist.destroy_process_group()
    return found


def test_options_of_another_backend_are_a_type_error_that_names_the_right_ones(run, store):
    for text in run(1, options_of_others, store)[0]:
        assert re.match(r"TypeError: backend \"iroh\" takes pg_options=torch_iroh\.Options\(\.\.\.\), not \w+", text), (
            text
        )


# ---- the library and the build ----


def library_error(rank: int, patch: str = "") -> str:
    if patch:  # a folder with an iroh package of another kind, or "absent"
        import importlib.util

        if patch == "absent":
            real = importlib.util.find_spec
            importlib.util.find_spec = lambda name, *rest: None if name == "iroh" else real(name, *rest)
        else:
            sys.path.insert(0, patch)
            importlib.invalidate_caches()
    return error_of(lambda: group(0, 2, dist.HashStore(), timeout=timedelta(seconds=3)).__enter__())


def test_library_that_is_not_there_is_named_with_what_to_install():
    (text,) = values_of(run_ranks(library_error, 1, environment={"TORCH_IROH_LIBRARY": "/absent/libiroh_ffi.so"}))
    assert text.startswith("RuntimeError: cannot open the iroh library: "), text
    for part in ("/absent/libiroh_ffi.so", "iroh>=1.2,<1.3", "TORCH_IROH_LIBRARY"):
        assert part in text, text


def test_library_without_irohs_symbols_is_refused_with_the_supported_version():
    libc = ctypes.util.find_library("c")
    assert libc
    (text,) = values_of(run_ranks(library_error, 1, environment={"TORCH_IROH_LIBRARY": libc}))
    assert text.startswith(f"RuntimeError: the iroh library at {libc} (installed version: "), text
    assert re.search(r"does not fit: symbol \w+ is missing\. Supported: iroh 1\.2\.x", text), text


def test_iroh_that_is_not_installed_is_named_with_the_supported_version():
    (text,) = values_of(run_ranks(library_error, 1, "absent"))
    assert text.startswith("RuntimeError: the iroh package is not installed. torch-iroh needs iroh 1.2.x"), text
    assert "pip install 'iroh>=1.2,<1.3'" in text, text


@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler to make a library of another version")
def test_iroh_of_another_version_is_refused_with_both_versions(tmp_path):
    (tmp_path / "iroh").mkdir()
    (tmp_path / "iroh" / "__init__.py").touch()
    (tmp_path / "iroh-9.8.7.dist-info").mkdir()
    (tmp_path / "iroh-9.8.7.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: iroh\nVersion: 9.8.7\n")
    source = "unsigned ffi_iroh_ffi_uniffi_contract_version(void) { return 4711; }"
    made = ["cc", "-shared", "-fPIC", "-x", "c", "-", "-o", str(tmp_path / "iroh" / "libiroh_ffi.so")]
    subprocess.run(made, input=source, text=True, check=True, timeout=60)
    (text,) = values_of(run_ranks(library_error, 1, str(tmp_path)))
    assert text.startswith("RuntimeError: the iroh library at "), text
    for part in ("installed version: 9.8.7", "contract version is 4711", "Supported: iroh 1.2.x", "iroh>=1.2,<1.3"):
        assert part in text, text


def test_module_built_for_another_torch_says_both_versions(monkeypatch):
    built = _native.torch_module().built_for_torch
    assert built.split(".")[:2] == torch.__version__.split(".")[:2]
    monkeypatch.setattr(torch, "__version__", "2.99.1+cpu")
    text = rf"built for torch {re.escape(built)}, found torch 2\.99\.1\+cpu.*pip install --no-build-isolation"
    with pytest.raises(ImportError, match=text):
        _native.torch_module()
    patch_release = ".".join([*built.split("+")[0].split(".")[:2], "77"])
    monkeypatch.setattr(torch, "__version__", patch_release)
    _native.torch_module()  # c10d keeps its ABI within a minor version


def test_native_module_that_is_not_built_says_how_to_build_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch_iroh._C", None)
    with pytest.raises(
        ImportError, match=r"native module _C cannot be loaded.*pip install --no-build-isolation.*found"
    ):
        _native.torch_module()
