# The native process group. `Options` is what users see of it.
from datetime import timedelta
from typing import Any

class Options:
    chunk_bytes: int | None
    algorithm: str | None
    plan: str | None
    connect: str | None
    shared_memory: str | None
    probe: str | None
    site: str | None
    compression: str | None
    inner: str | None
    streams: int | None
    peer_timeout: float | None
    heartbeat: float | None
    connect_timeout: float | None
    bind: str | None
    relay: str | None
    relay_token: str | None
    observer: str | None
    _timeout: timedelta

    def __init__(
        self,
        *,
        chunk_bytes: int | None = None,
        algorithm: str | None = None,
        plan: str | None = None,
        connect: str | None = None,
        shared_memory: str | None = None,
        probe: str | None = None,
        site: str | None = None,
        compression: str | None = None,
        inner: str | None = None,
        streams: int | None = None,
        peer_timeout: float | None = None,
        heartbeat: float | None = None,
        connect_timeout: float | None = None,
        bind: str | None = None,
        relay: str | None = None,
        relay_token: str | None = None,
        observer: str | None = None,
    ) -> None: ...

def __getattr__(name: str) -> Any: ...
