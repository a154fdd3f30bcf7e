"""What a relay counts, as Prometheus reads it (text format 0.0.4)."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Mapping

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_PREFIX = "torch_iroh_relay_"
# Name, type, what it is, key of the hub's counters.
_OF_HUB = (
    ("sessions", "gauge", "Open connections that are websockets.", "clients"),
    ("endpoints", "gauge", "Different endpoint ids that are connected.", "endpoints"),
    ("queued_bytes", "gauge", "Bytes that wait for clients to read them.", "queued_bytes"),
    ("received_bytes_total", "counter", "Bytes from clients, after the upgrade.", "received_bytes"),
    ("sent_bytes_total", "counter", "Bytes to clients, after the upgrade.", "sent_bytes"),
    ("relayed_messages_total", "counter", "Messages with packets that were passed on.", "relayed_frames"),
    ("relayed_bytes_total", "counter", "Bytes of packets that were passed on.", "relayed_bytes"),
    ("dropped_bytes_total", "counter", "Bytes that a slow receiver lost.", "dropped_slow_bytes"),
    ("gone_notices_total", "counter", "Clients told that one they knew has gone.", "gone_notices"),
    ("replaced_total", "counter", "Sessions that a newer one of the same endpoint id replaced.", "replaced"),
)
REFUSALS = ("request", "timeout", "token", "full", "proof", "protocol", "silent", "stuck")


class Metrics:
    """The counters that are not the hub's."""

    def __init__(self) -> None:
        self.accepted = 0
        self.confirmed = 0
        self.throttled = 0
        self.refused: Counter[str] = Counter()

    def text(self, hub: Mapping[str, int], observer: Mapping[str, int]) -> str:
        """Return all of them; `hub` are its counters, `observer` those of the observer, if there is one."""
        return "\n".join([*self._lines(hub, observer), ""])

    def _lines(self, hub: Mapping[str, int], observer: Mapping[str, int]) -> Iterator[str]:
        for name, kind, text, key in _OF_HUB:
            yield from _one(name, kind, text, hub[key])
        name = _PREFIX + "dropped_messages_total"
        yield f"# HELP {name} Messages with packets that were not passed on."
        yield f"# TYPE {name} counter"
        yield f'{name}{{reason="slow_receiver"}} {hub["dropped_slow_frames"]}'
        yield f'{name}{{reason="no_receiver"}} {hub["dropped_unknown_frames"]}'
        name = _PREFIX + "refused_total"
        yield f"# HELP {name} Connections that were ended, by reason."
        yield f"# TYPE {name} counter"
        for reason in REFUSALS:
            yield f'{name}{{reason="{reason}"}} {self.refused[reason]}'
        yield from _one("accepted_total", "counter", "TCP connections.", self.accepted)
        yield from _one("confirmed_total", "counter", "Clients that proved who they are.", self.confirmed)
        yield from _one("throttled_total", "counter", "Times that a client was made to wait.", self.throttled)
        for key, kind, text in (
            ("observer_connections", "gauge", "Peers that the observer keeps."),
            ("observer_answers_total", "counter", "Addresses that the observer has told."),
        ):
            if key in observer:
                yield from _one(key, kind, text, observer[key])
        yield "# HELP process_cpu_seconds_total CPU time of the process."
        yield "# TYPE process_cpu_seconds_total counter"
        yield f"process_cpu_seconds_total {time.process_time():.3f}"


def _one(name: str, kind: str, text: str, value: int) -> Iterator[str]:
    yield f"# HELP {_PREFIX}{name} {text}"
    yield f"# TYPE {_PREFIX}{name} {kind}"
    yield f"{_PREFIX}{name} {value}"
