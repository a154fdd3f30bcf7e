"""`torch-iroh run`: which names mean "iroh" in a worker, and that all else is as under torchrun.

The launches are real and each takes seconds, so a program asks many things and writes its answers as JSON.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed import run as torchrun

from torch_iroh import _cli, _frameworks, _mapping, _register, run

ALL = frozenset(_mapping.SOURCES)
TORCHRUN = "torch.distributed.run"
OURS = "torch_iroh.run"

# Counts every group of gloo that the process makes, whoever makes it and how soon it goes again.
WATCH = """
    import json, os, sys, torch, torch.distributed as dist
    gloo_groups = []
    make = dist.ProcessGroupGloo.__init__
    def watched(self, *arguments, **named):
        gloo_groups.append(1)
        make(self, *arguments, **named)
    dist.ProcessGroupGloo.__init__ = watched
    def answer(**answers):
        rank = os.environ["RANK"]
        with open(os.path.join(os.environ["ANSWERS"], rank + ".json"), "w") as file:
            json.dump(answers | {"gloo_groups": len(gloo_groups)}, file)
"""


def write(folder: Path, program: str, name: str = "program.py") -> Path:
    path = folder / name
    path.write_text(textwrap.dedent(WATCH) + textwrap.dedent(program))
    return path


def launch(launcher: str, *arguments: str | Path, folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", launcher, *map(str, arguments)]
    settings = os.environ | {"ANSWERS": str(folder), "OMP_NUM_THREADS": "1"} | environment
    return subprocess.run(command, capture_output=True, text=True, timeout=100, cwd=folder, env=settings)


def answers(
    tmp_path: Path, program: str, *options: str, ranks: int = 1, launcher: str = OURS, **environment: str
) -> tuple[list[dict], str]:
    """What each rank answered, and what all printed."""
    path = write(tmp_path, program)
    count = [f"--nproc-per-node={ranks}"]
    done = launch(launcher, *options, *count, path, folder=tmp_path, **environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(ranks)], done.stderr


def said(log: str) -> list[str]:
    return re.findall(r"torch-iroh run: (.*)", log)


# ---- names ----


@pytest.mark.parametrize(
    ("backend", "sources", "meaning"),
    [
        ("gloo", ALL, "iroh"),
        ("NCCL", ALL, "iroh"),
        ("", ALL, "iroh"),
        ("undefined", ALL, "iroh"),
        ("iroh", ALL, "iroh"),
        ("mpi", ALL, "mpi"),
        ("ucc", ALL, "ucc"),
        ("fake", ALL, "fake"),
        ("cpu:gloo,cuda:nccl", ALL, "iroh"),
        ("CUDA:NCCL, cpu:Gloo", ALL, "iroh"),
        ("cuda:nccl", ALL, "iroh"),
        ("cpu:gloo,cuda:iroh", ALL, "iroh"),
        ("cpu:gloo,xpu:xccl", ALL, "cpu:iroh,xpu:xccl"),
        ("cpu:gloo,cuda:nccl", ALL - {"gloo"}, "cpu:gloo,cuda:iroh"),
        ("cpu:gloo,cuda:nccl", ALL - {"nccl"}, "cpu:iroh,cuda:nccl"),
        ("cpu:gloo,cuda:nccl", {"unnamed"}, "cpu:gloo,cuda:nccl"),
        ("gloo", ALL - {"gloo"}, "gloo"),
        ("gloo", {"unnamed"}, "gloo"),
        ("nccl", {"gloo"}, "nccl"),
        ("", ALL - {"unnamed"}, ""),
        ("cpu:gloo:nccl", ALL, "cpu:gloo:nccl"),  # the rest is for torch to refuse
        ("cpu:gloo,cpu:nccl", ALL, "cpu:gloo,cpu:nccl"),
        ("cpu:gloo,", ALL, "cpu:gloo,"),
    ],
)
def test_what_a_name_means(backend, sources, meaning):
    assert _mapping.mapped(backend, sources) == meaning


def test_sources_are_words_separated_by_commas():
    assert _mapping.parse_sources(" gloo, NCCL,") == {"gloo", "nccl"}
    with pytest.raises(ValueError, match="'glo' is none of gloo, nccl, unnamed"):
        _mapping.parse_sources("nccl,glo")


def test_nothing_is_mapped_without_the_launcher():
    assert not _mapping.active()
    assert dist.Backend.default_device_backend_map["cpu"] == "gloo"
    assert dist.new_group.__code__.co_filename != _mapping.__file__


def test_torch_that_cannot_be_mapped_is_left_alone_and_named(monkeypatch):
    monkeypatch.delattr(distributed_c10d, "split_group")
    before = dist.init_process_group
    with pytest.raises(RuntimeError, match=r"cannot map backends in torch .*: no split_group"):
        _mapping.install(ALL)
    assert dist.init_process_group is before
    assert not _mapping.active()


def test_options_of_another_backend_are_an_error_where_nothing_is_mapped():
    with pytest.raises(TypeError, match=r"pg_options=torch_iroh.Options\(...\), not _Options"):
        _register._create(None, dist.ProcessGroupGloo._Options())


def test_ignite_is_told_a_name_that_it_wraps_models_for(monkeypatch):
    class Model:
        actual = "iroh"

        def backend(self):
            return self.actual

    loaded = SimpleNamespace(_NativeDistModel=Model)
    monkeypatch.setitem(sys.modules, "ignite.distributed.comp_models.native", loaded)
    for _ in range(2):  # before every group
        _frameworks.adapt_loaded()
    assert Model().backend() in ("gloo", "nccl")
    Model.actual = "mpi"
    assert Model().backend() == "mpi"


# ---- workers ----

EVERY_CALL = """
    from datetime import timedelta
    from torch.distributed.device_mesh import init_device_mesh
    import torch_iroh

    dist.init_process_group("cpu:gloo,cuda:nccl", timeout=timedelta(seconds=40))
    rank, names, sums = dist.get_rank(), {"world": dist.get_backend()}, {}
    groups = {
        "gloo": dist.new_group(backend="gloo"),
        "nccl": dist.new_group([0, 1], None, "nccl"),
        "inherited": dist.new_group(),
        "options": dist.new_group(backend="gloo", pg_options=dist.ProcessGroupGloo._Options()),
        "long": dist.new_group(backend="gloo", timeout=timedelta(days=10000)),  # Lightning does this
        "subgroup": dist.new_subgroups(group_size=2, backend="gloo")[0],
        "mesh": init_device_mesh("cpu", (2, 1), mesh_dim_names=("a", "b"))["a"].get_group(),
        "mesh override": init_device_mesh("cpu", (2,), backend_override={0: "gloo"}).get_group(),
        "object": dist.new_group(backend=dist.Backend.GLOO),
    }
    for name, group in groups.items():
        tensor = torch.full((3,), rank + 1.0)
        dist.all_reduce(tensor, group=group)
        names[name], sums[name] = dist.get_backend(group), tensor.tolist()
    # A second default group, as OpenRLHF and others make one.
    store = dist.PrefixStore("beside", dist.distributed_c10d._get_default_store())
    beside, _ = dist.distributed_c10d._new_process_group_helper(
        2, rank, [], "gloo", store, group_name="beside", timeout=timedelta(seconds=40)
    )
    names["beside"] = beside._get_backend(torch.device("cpu")).name()
    defaults = {device: dist.get_default_backend_for_device(device) for device in ("cpu", "cuda", "cpu")}
    bytes_sent = torch_iroh.stats().bytes_sent + torch_iroh.stats(groups["gloo"]).bytes_sent
    dist.new_group(backend="gloo")
    answer(names=names, sums=sums, defaults=defaults, bytes_sent=bytes_sent)
    dist.destroy_process_group()
"""


def test_every_group_of_two_ranks_is_iroh_and_each_kind_of_call_is_logged_once_by_rank_0(tmp_path):
    both, log = answers(tmp_path, EVERY_CALL, ranks=2)
    for one in both:
        assert set(one["names"].values()) == {"iroh"}, one["names"]
        assert all(total == [3.0] * 3 for total in one["sums"].values()), one["sums"]
        assert one["defaults"] == {"cpu": "iroh", "cuda": "iroh"}
        assert one["gloo_groups"] == 0
        assert one["bytes_sent"] > 0
    assert sorted(said(log)) == [
        '_new_process_group_helper: "gloo" means "iroh"',
        'get_default_backend_for_device: cpu has "iroh" in place of "gloo"',
        'get_default_backend_for_device: cuda has "iroh" in place of "nccl"',
        'init_process_group: "cpu:gloo,cuda:nccl" means "iroh"',
        'new_group: "gloo" means "iroh"',
        'new_group: "nccl" means "iroh"',
        "pg_options: ProcessGroupGloo._Options mean nothing to iroh and are left out",
    ]


NAMES = """
    dist.init_process_group(**json.loads(sys.argv[1]) if len(sys.argv) > 1 else {})
    names = {"world": dist.get_backend_config(), "inherited": dist.get_backend_config(dist.new_group())}
    for name in ("gloo", "cpu:gloo,cuda:gloo"):
        names[name] = dist.get_backend_config(dist.new_group(backend=name))
    answer(names=names, default=dist.get_default_backend_for_device("cpu"))
    dist.destroy_process_group()
"""
IROH = ",".join(f"{device}:iroh" for device in dist.Backend.backend_capability["iroh"])
GLOO = "cpu:gloo,cuda:gloo"


@pytest.mark.parametrize(
    ("keep", "world", "named", "default"),
    [
        ([], IROH, IROH, "iroh"),
        (["--keep", "gloo"], IROH, GLOO, "iroh"),
        (["--keep=nccl", "--keep=unnamed"], "cpu:gloo", IROH, "gloo"),
        (["--keep", "gloo,unnamed"], "cpu:gloo", GLOO, "gloo"),
    ],
    ids=["nothing", "gloo", "nccl+unnamed", "gloo+unnamed"],
)
def test_what_is_kept_stays_as_torch_has_it(tmp_path, keep, world, named, default):
    (one,), log = answers(tmp_path, NAMES, *keep)
    assert one["names"] == {"world": world, "inherited": world, "gloo": named, "cpu:gloo,cuda:gloo": named}
    assert one["default"] == default
    assert (one["gloo_groups"] > 0) == (GLOO in (named, world) or world == "cpu:gloo")
    assert any("no backend means" in line for line in said(log)) == (world == IROH)


def test_processes_that_a_worker_starts_are_mapped_too(tmp_path):
    children = """
        def child(rank, path):
            dist.init_process_group("gloo", init_method="file://" + path, rank=rank, world_size=2)
            tensor = torch.ones(1)
            dist.all_reduce(tensor)
            with open(f"{path}.{rank}", "w") as file:
                file.write(f"{dist.get_backend()} {tensor.item()} {len(gloo_groups)}")
            dist.destroy_process_group()

        if __name__ == "__main__":
            path = os.path.join(os.environ["ANSWERS"], "store")
            torch.multiprocessing.spawn(child, (path,), nprocs=2)
            answer(children=[open(f"{path}.{rank}").read() for rank in range(2)])
    """
    (one,), _ = answers(tmp_path, children)
    assert one["children"] == ["iroh 2.0 0"] * 2


def test_program_run_inside_a_worker_of_run_path_is_mapped(tmp_path):
    (one,), _ = answers(tmp_path, NAMES, "--run-path")
    assert one["names"]["world"] == IROH


def test_monitored_barrier_is_open_to_iroh_and_for_others_as_torch_has_it(tmp_path):
    program = """
        import torch.testing._internal.distributed.fake_pg
        dist.init_process_group("nccl")
        class Asked(Exception):
            pass
        def ask(timeout, wait_all_ranks=False):
            raise Asked(f"{timeout.total_seconds()} {wait_all_ranks}")
        world = dist.distributed_c10d._get_default_group()
        seen = []
        type(world).monitored_barrier = lambda self, *arguments, **named: ask(*arguments, **named)
        for arguments in ({}, {"timeout": 2.5}, {"group": world, "wait_all_ranks": True}):
            try:
                dist.monitored_barrier(**arguments)
            except Asked as asked:
                seen.append(str(asked))
        fake = dist.new_group(backend="fake")
        try:
            dist.monitored_barrier(fake)
        except (ValueError, Asked) as error:
            seen.append(str(error))
        answer(seen=seen)
        dist.destroy_process_group()
    """
    (one,), _ = answers(tmp_path, program)
    assert one["seen"][:3] == ["1800.0 False", "2.5 False", "1800.0 True"]
    # torch 2.14 opens it to every group with a CPU backend.
    assert one["seen"][3:] in (["monitored_barrier is only implemented for GLOO backend."], ["1800.0 False"])


def test_calls_that_detail_debugging_compares_are_compared_over_iroh(tmp_path):
    program = """
        dist.init_process_group("gloo")
        dist.all_reduce(torch.ones(3))
        wrapped = type(dist.group.WORLD._get_backend(torch.device("cpu"))).__name__
        try:
            dist.all_reduce(torch.ones(3 + dist.get_rank()))
        except RuntimeError as error:
            answer(wrapped=wrapped, error=str(error))
    """
    both, log = answers(tmp_path, program, ranks=2, TORCH_DISTRIBUTED_DEBUG="DETAIL")
    assert any("helper groups" in line for line in said(log))
    for one in both:
        assert one["wrapped"] == "_ProcessGroupWrapper"
        assert "Detected mismatch between collectives on ranks" in one["error"]
        assert one["gloo_groups"] == 0


def test_failing_program_fails_the_launcher_and_its_traceback_is_seen(tmp_path):
    path = write(tmp_path, "    dist.init_process_group()\n    raise ZeroDivisionError('on purpose')\n")
    done = launch(OURS, path, folder=tmp_path)
    assert done.returncode == 1
    assert "ZeroDivisionError: on purpose" in done.stderr
    assert "ChildFailedError" in done.stderr


@pytest.mark.parametrize("as_module", [False, True], ids=["script", "module"])
def test_program_sees_itself_as_under_torchrun(tmp_path, as_module):
    program = """
        answer(
            argv=sys.argv, file=__file__, name=__name__, path=sys.path, package=__package__,
            spec=__spec__ and __spec__.name, main=sys.modules["__main__"].__dict__ is globals(),
            flags=[sys.flags.utf8_mode, sys.flags.unbuffered if hasattr(sys.flags, "unbuffered") else None],
            environment=sorted(set(os.environ) - {"TORCH_IROH_RUN"}), cwd=os.getcwd(),
        )
    """
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").touch()
    path = write(tmp_path / "package", program)
    how = ["-m", "package.program"] if as_module else [str(path)]
    seen = []
    for launcher in (TORCHRUN, OURS):
        done = launch(launcher, "--nproc-per-node=1", *how, "--keep", "a b", "-m", folder=tmp_path)
        assert done.returncode == 0, done.stderr
        seen.append(json.loads((tmp_path / "0.json").read_text()))
    assert seen[0] == seen[1]
    assert seen[0]["argv"] == [str(path), "--keep", "a b", "-m"]


# ---- the command line ----


def usage_error(capsys: pytest.CaptureFixture[str], main, *arguments: str) -> str:
    with pytest.raises(SystemExit) as error:
        main(list(arguments))
    assert error.value.code == 2
    return capsys.readouterr().err.splitlines()[-1].partition(": error: ")[2]


@pytest.mark.parametrize(
    "arguments",
    [[], ["--no-such-option"], ["--tee"], ["--start-method=teleport", "x.py"]],
    ids=["none", "unknown", "half", "value"],
)
def test_wrong_use_gets_torchruns_answer(capsys, arguments):
    ours = usage_error(capsys, run.main, *arguments)
    assert ours == usage_error(capsys, torchrun.main, *arguments)
    assert ours


@pytest.mark.parametrize(
    ("arguments", "autoload", "text"),
    [
        (["--keep", "mpi"], "1", "argument --keep: 'mpi' is none of gloo, nccl, unnamed"),
        (["--keep", "gloo,nccl", "--keep", "unnamed"], "1", "--keep leaves nothing to map. Try: torchrun"),
        ([], "0", "TORCH_DEVICE_BACKEND_AUTOLOAD is off, and without it workers do not load torch-iroh"),
    ],
)
def test_a_launch_that_would_map_nothing_is_refused(capsys, monkeypatch, arguments, autoload, text):
    monkeypatch.setenv("TORCH_DEVICE_BACKEND_AUTOLOAD", autoload)
    assert text in usage_error(capsys, run.main, *arguments, "x.py")


def test_help_is_torchruns_with_what_is_added(capsys):
    with pytest.raises(SystemExit) as end:
        run.main(["--help"])
    assert end.value.code == 0
    assert capsys.readouterr().out.startswith("usage: torch-iroh run ")
    ours, theirs = (
        {name for action in parser._actions for name in action.option_strings}
        for parser in (run._parser(), torchrun.get_args_parser())
    )
    assert ours - theirs == {"--keep"}
    assert theirs < ours


def test_command_finds_its_verb(capsys):
    assert _cli.main(["--version"]) == 0
    assert re.fullmatch(r"torch-iroh \d+\.\d+\.\d+\n", capsys.readouterr().out)
    assert _cli.main(["--help"]) == 0
    assert "  run " in capsys.readouterr().out
    assert _cli.main([]) == 2
    assert _cli.main(["rnu"]) == 2
    assert "no verb 'rnu'. Did you mean 'run'?" in capsys.readouterr().err
    assert usage_error(capsys, _cli.main, "run").startswith("the following arguments are required: training_script")


def test_installed_command_is_that_one():
    (point,) = importlib.metadata.entry_points(group="console_scripts", name="torch-iroh")
    assert point.load() is _cli.main
