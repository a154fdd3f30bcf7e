"""Trouble by plan: what happens to which host when, drawn from a seed, so that a run can be had again."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType

from torch_iroh.lab._lab import Lab

KINDS: dict[str, str] = {
    "cut": "nothing passes between two hosts",
    "partition": "nothing passes between one host and all others",
    "unplug": "the cable of one host is pulled",
    "rebind": "the NAT of one host forgets its mappings",
    "move": "one host gets another public address",
    "kill": "every process of one host is killed (SIGKILL)",
}
_LASTING = ("cut", "partition", "unplug")


@dataclass(frozen=True)
class Event:
    """One thing that happens: `kind` to `hosts`, `at` seconds after the start, for `lasts` seconds (0: for good)."""

    at: float
    kind: str
    hosts: tuple[str, ...]
    lasts: float = 0.0

    def __str__(self) -> str:
        lasting = f" for {self.lasts:.2f} s" if self.lasts else ""
        return f"{self.at:7.2f} s  {self.kind} {' '.join(self.hosts)}{lasting}"


class Schedule:
    """A plan of trouble, one thing at a time, equal for equal arguments.

    >>> plan = Schedule(7, ["anna", "bert"], seconds=60, events=3, kinds=["cut", "unplug"])
    >>> plan.events == Schedule(7, ["anna", "bert"], seconds=60, events=3, kinds=["cut", "unplug"]).events
    True

    Args:
        seed: Another seed, another plan.
        hosts: Names of the hosts to which it may happen.
        seconds: The time in which it happens, of which each event gets an equal part.
        events: How many.
        kinds: Of :data:`KINDS`, each as likely as the others.
        lasts: Shortest and longest time of a cut, a partition or a pulled cable, in seconds.

    Raises:
        ValueError: an unknown kind, too few hosts, or a time that its part of `seconds` does not hold.
    """

    def __init__(
        self,
        seed: int,
        hosts: Sequence[str],
        *,
        seconds: float,
        events: int,
        kinds: Sequence[str] = ("cut", "unplug"),
        lasts: tuple[float, float] = (1.0, 8.0),
    ) -> None:
        unknown = [kind for kind in kinds if kind not in KINDS]
        if unknown or not kinds:
            raise ValueError(f"{unknown or 'no kind'}: the kinds of trouble are {', '.join(KINDS)}")
        if len(hosts) < (2 if "cut" in kinds else 1):
            raise ValueError(f"{len(hosts)} hosts are too few")
        if not 0 < lasts[0] <= lasts[1]:
            raise ValueError(f"lasts={lasts}: shortest and longest, above zero")
        part = seconds / max(events, 1)
        if events and lasts[1] >= part and any(kind in _LASTING for kind in kinds):
            raise ValueError(
                f"{events} events in {seconds:g} s leave {part:g} s for each, which does not hold {lasts[1]:g} s of "
                "trouble. Try: fewer events, or more seconds"
            )
        self.seed = seed
        draw = random.Random(seed)
        planned = []
        for number in range(events):
            kind = kinds[draw.randrange(len(kinds))]
            chosen = tuple(draw.sample(list(hosts), 2 if kind == "cut" else 1))
            lasting = draw.uniform(*lasts) if kind in _LASTING else 0.0
            planned.append(Event(part * number + draw.uniform(0, part - lasting), kind, chosen, lasting))
        self.events: tuple[Event, ...] = tuple(planned)

    def start(self, lab: Lab, tell: Callable[[str], None] | None = None) -> Trouble:
        """Let it happen from now on, on a thread; `tell` is called there with a line for each thing done.

        Raises:
            ValueError: a host that the laboratory does not have, or whose NAT cannot rebind.
        """
        for event in self.events:
            for name in event.hosts:
                if name not in lab.hosts:
                    raise ValueError(f"seed {self.seed}: there is no host {name!r}")
                if event.kind == "rebind" and lab[name].nat in ("none", "full"):
                    raise ValueError(f"seed {self.seed}: {name} has NAT kind {lab[name].nat!r}, which cannot rebind")
        return Trouble(self, lab, tell)


class Trouble:
    """A schedule at work: a context manager that stops it, and heals what it has cut or unplugged."""

    def __init__(self, schedule: Schedule, lab: Lab, tell: Callable[[str], None] | None) -> None:
        #: What was done, with the second in which it really was.
        self.log: list[str] = []
        self._lab = lab
        self._tell = tell
        self._stop = threading.Event()
        self._failure: Exception | None = None
        self._started = time.monotonic()
        self._thread = threading.Thread(target=self._run, args=(schedule.events,), name="lab schedule")
        self._thread.start()

    def __enter__(self) -> Trouble:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def wait(self, timeout: float) -> bool:
        """Wait until all of it has happened; False if it has not within `timeout` seconds."""
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def stop(self) -> None:
        """Let nothing more happen, and heal what is broken at this moment.

        Raises:
            LabError: something could not be done; nothing after it was.
        """
        self._stop.set()
        self._thread.join()
        if self._failure is not None:
            raise self._failure

    def _run(self, events: Sequence[Event]) -> None:
        try:
            for event in events:
                if self._stop.wait(max(0.0, self._started + event.at - time.monotonic())):
                    return
                undo = self._do(event)
                self._note(event.kind, event.hosts)
                if undo is None:
                    continue
                self._stop.wait(event.lasts)
                undo()
                self._note(f"end of {event.kind}", event.hosts)
        except Exception as failure:
            self._failure = failure

    def _do(self, event: Event) -> Callable[[], None] | None:
        lab, names = self._lab, event.hosts
        host = lab[names[0]]
        if event.kind == "cut":
            lab.cut(*names)
            return lambda: lab.heal(*names)
        if event.kind == "partition":
            lab.cut(host)
            return lambda: lab.heal(host)
        if event.kind == "unplug":
            host.unplug()
            return host.plug
        if event.kind == "rebind":
            host.rebind()
        elif event.kind == "move":
            host.move()
        else:
            host.kill()
        return None

    def _note(self, what: str, hosts: Sequence[str]) -> None:
        line = f"{time.monotonic() - self._started:7.2f} s  {what} {' '.join(hosts)}"
        self.log.append(line)
        if self._tell is not None:
            self._tell(line)
