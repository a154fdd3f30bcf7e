"""Real processes for tests: N ranks that run functions, with a deadline for all of them and none left behind.

One call, one family of processes:

>>> outcomes = run_ranks(function, 3, "argument", deadline=30)  # doctest: +SKIP


Each rank runs ``function(rank, *arguments)``; `function` is at module level (it is pickled by name). Its result or its
exception comes back in an :class:`Outcome`, in rank order. Starting processes is dear, so several calls may share one
family; a call may leave ranks out, and a rank may be killed while it runs:

>>> with Ranks(3, environment={"TORCH_IROH_PEER_TIMEOUT": "1"}) as ranks:  # doctest: +SKIP
...     ranks.run(join, store_path)                    # all must return; gives the values in rank order
...     ranks.start(train)
...     ranks.kill(1)                                  # SIGKILL; or signal.SIGSTOP, signal.SIGCONT
...     outcomes = ranks.collect(deadline=20)          # rank 1: error is RankDied(exit_code=-9)

When the deadline passes, every process of the family is killed and RanksTimeout tells each silent rank's Python stacks
and the end of what it printed (native stacks too with TEST_RANKS_GDB=1). Leaving the ``with`` block, or the
interpreter, kills what still runs, with the processes those ranks have started.

Methods of starting: "forkserver" (default: forked from a clean process that has imported torch and nothing else, about
0.05 s a rank), "spawn" (a new interpreter, about 2 s), "fork" (a copy of the test process).
Every rank has TORCH_IROH_BIND=127.0.0.1:0, TORCH_IROH_SHARED_MEMORY=off and one OpenMP thread unless `environment`
says otherwise.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import faulthandler
import multiprocessing
import os
import pickle
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from multiprocessing import connection, resource_tracker
from pathlib import Path
from typing import Any

DEFAULT_DEADLINE = 60.0
# Ranks of one host would share memory; most tests are about iroh between them.
ENVIRONMENT = {
    "TORCH_IROH_BIND": "127.0.0.1:0",
    "TORCH_IROH_SHARED_MEMORY": "off",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
}
# None starts a thread. torch._dynamo, 3 s, is imported by the first functional collective and by FSDP2.
_PRELOADED = ["numpy", "torch", "torch.distributed", "torch._dynamo", "pytest"]
_LOG_TAIL = 6000
_STACK_SIGNAL = signal.SIGUSR1

_families: weakref.WeakSet[Ranks] = weakref.WeakSet()


class RankDied(Exception):
    """The process ended without an answer; `exit_code` is -9 after SIGKILL."""

    def __init__(self, rank: int, exit_code: int | None) -> None:
        super().__init__(f"rank {rank} ended without an answer, exit code {exit_code}")
        self.rank = rank
        self.exit_code = exit_code

    def __reduce__(self) -> tuple[Any, ...]:
        return RankDied, (self.rank, self.exit_code)


class RemoteError(Exception):
    """Stands for an exception that cannot be pickled: its type's name and its text."""


class RankFailure(AssertionError):
    """At least one rank raised; `outcomes` has all of them."""

    def __init__(self, text: str, outcomes: list[Outcome]) -> None:
        super().__init__(text)
        self.outcomes = outcomes


class RanksTimeout(AssertionError):
    """At least one rank did not answer before the deadline. The family is gone."""


@dataclass(frozen=True)
class Outcome:
    """What became of one call on one rank; `seconds` counts from the start of the call to its answer."""

    rank: int
    value: Any = None
    error: BaseException | None = None
    trace: str = ""
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        return self.error is None

    def text(self) -> str:
        """One rank's error for a failure message, with the traceback of its own process."""
        return f"--- rank {self.rank}: {type(self.error).__name__}: {self.error}\n{self.trace}"


def values_of(outcomes: Iterable[Outcome]) -> list[Any]:
    """Return the values in rank order, or raise RankFailure with the errors of all ranks that failed."""
    every = list(outcomes)
    failed = [one.text() for one in every if not one.ok]
    if failed:
        raise RankFailure(f"{len(failed)} of {len(every)} ranks failed\n" + "\n".join(failed), every)
    return [one.value for one in every]


def run_ranks(
    function: Callable[..., Any],
    world: int,
    *arguments: Any,
    method: str = "forkserver",
    environment: Mapping[str, str] | None = None,
    deadline: float = DEFAULT_DEADLINE,
) -> list[Outcome]:
    """Run ``function(rank, *arguments)`` in `world` new processes and return every rank's outcome in rank order."""
    with Ranks(world, method=method, environment=environment) as ranks:
        ranks.start(function, *arguments)
        return ranks.collect(deadline=deadline)


class Ranks:
    """A family of `world` processes that run one call after the other. See the module's docstring."""

    def __init__(self, world: int, *, method: str = "forkserver", environment: Mapping[str, str] | None = None) -> None:
        self.world = world
        self.usable = True  # False once a rank is dead: the next test needs a new family
        self._folder = Path(tempfile.mkdtemp(prefix="ranks-"))
        self._pending: dict[int, float] = {}
        self._processes: list[Any] = []
        self._pipes: list[connection.Connection] = []
        _families.add(self)
        settings = {**ENVIRONMENT, **(environment or {})}
        try:
            context = _context(method)
            for rank in range(world):
                ours, theirs = context.Pipe()
                # A forked child holds the parent's ends of the ranks before it; it must close them to see its own end.
                others = [*self._pipes, ours] if method == "fork" else []
                process = context.Process(target=_serve, args=(theirs, rank, settings, self._log(rank), others))
                process.start()
                theirs.close()
                self._processes.append(process)
                self._pipes.append(ours)
        except BaseException:
            self.close()
            raise

    @property
    def pids(self) -> list[int]:
        """Process ids by rank, also of dead ones."""
        return [process.pid for process in self._processes]

    def is_alive(self, rank: int) -> bool:
        """Whether the rank's process runs (a stopped one does)."""
        return bool(self._processes[rank].is_alive())

    def output(self, rank: int) -> str:
        """What the rank has written to stdout and stderr so far."""
        return self._log(rank).read_text(errors="replace") if self._log(rank).exists() else ""

    def start(self, function: Callable[..., Any], *arguments: Any, only: Iterable[int] | None = None) -> None:
        """Begin ``function(rank, *arguments)`` on all ranks, or on those in `only`; returns at once.

        A rank runs one call at a time; one that still has a call must be collected first.
        """
        for rank in range(self.world) if only is None else only:
            if rank in self._pending:
                raise ValueError(f"rank {rank} has a call that was not collected")
            self._pending[rank] = time.monotonic()
            with contextlib.suppress(BrokenPipeError):  # dead: collect() says so
                self._pipes[rank].send((function, arguments))

    def collect(self, deadline: float = DEFAULT_DEADLINE, *, only: Iterable[int] | None = None) -> list[Outcome]:
        """Wait for the ranks that were started (or for those of them in `only`); outcomes in rank order.

        A rank that died has the error RankDied. Raises RanksTimeout, after killing the family, when `deadline`
        seconds pass before all have answered.
        """
        chosen = set(self._pending) if only is None else set(only)
        until = time.monotonic() + deadline
        outcomes: dict[int, Outcome] = {}
        while len(outcomes) < len(chosen):
            waiting = {self._pipes[rank]: rank for rank in chosen - set(outcomes)}
            left = until - time.monotonic()
            ready = connection.wait(list(waiting), max(0.0, left)) if left > 0 else []
            if not ready:
                self._give_up(sorted(waiting.values()), list(outcomes.values()), deadline)
            for pipe in ready:
                rank = waiting[pipe]  # type: ignore[index]
                outcomes[rank] = self._receive(rank)
        return [outcomes[rank] for rank in sorted(outcomes)]

    def run(self, function: Callable[..., Any], *arguments: Any, deadline: float = DEFAULT_DEADLINE) -> list[Any]:
        """``start``, ``collect``, and the values in rank order; raises RankFailure if any rank failed."""
        self.start(function, *arguments)
        return values_of(self.collect(deadline))

    def kill(self, rank: int, number: signal.Signals = signal.SIGKILL) -> None:
        """Send a signal to one rank's process. Waits for its end after SIGKILL."""
        os.kill(self.pids[rank], number)
        if number == signal.SIGKILL:
            self.usable = False
            self._processes[rank].join(10)

    def close(self) -> None:
        """End all processes: idle ones leave their group and exit, busy ones are killed. May be called twice."""
        idle = [rank for rank in range(len(self._pipes)) if rank not in self._pending and self.usable]
        for rank in idle:
            with contextlib.suppress(OSError):
                self._pipes[rank].send(None)
        until = time.monotonic() + 5
        for rank in idle:
            self._processes[rank].join(max(0.0, until - time.monotonic()))
        self._kill_all()
        for pipe in self._pipes:
            pipe.close()
        self.usable = False
        shutil.rmtree(self._folder, ignore_errors=True)

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _log(self, rank: int) -> Path:
        return self._folder / f"{rank}.log"

    def _receive(self, rank: int) -> Outcome:
        started = self._pending.pop(rank)
        try:
            value, error, trace = pickle.loads(self._pipes[rank].recv_bytes())
        except (EOFError, ConnectionResetError):
            self.usable = False
            process = self._processes[rank]
            process.join(10)
            value, error, trace = None, RankDied(rank, process.exitcode), self.output(rank)[-_LOG_TAIL:]
        return Outcome(rank, value, error, trace, time.monotonic() - started)

    def _give_up(self, silent: list[int], outcomes: list[Outcome], deadline: float) -> None:
        native = {rank: _native_stacks(self.pids[rank]) for rank in silent}
        for rank in silent:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pids[rank], signal.SIGCONT)
                os.kill(self.pids[rank], _STACK_SIGNAL)
        time.sleep(0.5)
        parts = [f"no answer from ranks {silent} of {self.world} within {deadline:g} s"]
        parts += [f"--- rank {rank}:\n{self.output(rank)[-_LOG_TAIL:]}{native[rank]}" for rank in silent]
        parts += [one.text() for one in outcomes if not one.ok]
        self._kill_all()
        raise RanksTimeout("\n".join(parts))

    def _kill_all(self) -> None:
        self.usable = False
        for process in self._processes:
            if process.is_alive():
                process.kill()
            # Also what it has started: each rank leads a process group of its own.
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
        for process in self._processes:
            process.join(10)


def _context(method: str) -> Any:
    context = multiprocessing.get_context(method)
    if method == "forkserver":
        # The server is started by the first process; what it imports and inherits, every rank inherits.
        context.set_forkserver_preload(_PRELOADED)
        before = {name: os.environ.get(name) for name in ENVIRONMENT}
        os.environ.update(ENVIRONMENT)
        try:
            from multiprocessing import forkserver

            forkserver.ensure_running()
        finally:
            for name, value in before.items():
                os.environ.pop(name) if value is None else os.environ.update({name: value})
    resource_tracker.ensure_running()  # here, and not in a rank, whose process group dies with it
    return context


def _serve(
    pipe: connection.Connection,
    rank: int,
    settings: Mapping[str, str],
    log: Path,
    others: list[connection.Connection],
) -> None:
    """The life of one rank's process."""
    with contextlib.suppress(OSError):
        os.setpgid(0, 0)
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: not even a killed test run leaves ranks behind
    for other in others:
        other.close()
    os.environ.update(settings)
    file = os.open(log, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    # Under pytest these may be objects that capture elsewhere.
    sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
    faulthandler.enable(file)
    faulthandler.register(_STACK_SIGNAL, file=file, all_threads=True)
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(int(settings["OMP_NUM_THREADS"]))
    while True:
        try:
            call = pipe.recv()
        except EOFError:
            break
        except Exception as error:  # the function cannot be imported here
            pipe.send_bytes(_answer(rank, None, error))
            continue
        if call is None:
            break
        function, arguments = call
        try:
            reply = _answer(rank, function(rank, *arguments), None)
        except BaseException as error:
            reply = _answer(rank, None, error)
        pipe.send_bytes(reply)
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        distributed.destroy_process_group()


def _answer(rank: int, value: Any, error: BaseException | None) -> bytes:
    trace = "" if error is None else "".join(traceback.format_exception(error))
    try:
        packed = pickle.dumps((value, error, trace))
        pickle.loads(packed)
        return packed
    except Exception as unpicklable:
        cause = error if error is not None else unpicklable
        return pickle.dumps((None, RemoteError(f"rank {rank}: {type(cause).__name__}: {cause}"), trace))


def _native_stacks(pid: int) -> str:
    if os.environ.get("TEST_RANKS_GDB") != "1" or shutil.which("gdb") is None:
        return ""
    command = ["gdb", "-batch", "-p", str(pid), "-ex", "thread apply all bt 16"]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False).stdout


@atexit.register
def _kill_families() -> None:
    owner = os.getpid()
    for family in list(_families):
        if family._processes and family._processes[0]._parent_pid == owner:
            family._kill_all()
