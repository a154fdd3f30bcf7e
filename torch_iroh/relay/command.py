"""`torch-iroh relay`: runs a relay and an observer until it is told to stop, and says what to give to others.

$ torch-iroh relay --token-file tokens
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import ipaddress
import json
import logging
import os
import resource
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from torch_iroh import _units
from torch_iroh.relay import _auth, _key_file
from torch_iroh.relay._options import DEFAULT_BIND, DEFAULT_PORT, RelayOptions, split_address
from torch_iroh.relay._server import RelayServer
from torch_iroh.relay._session import log

_DESCRIPTION = """\
A relay for iroh endpoints that cannot reach each other directly, and an observer that tells them the address that the
world sees. Packets are encrypted from endpoint to endpoint. Runs until SIGTERM or Ctrl-C; SIGHUP reads tokens and
certificate again. One process uses one core."""

_EPILOG = """\
example, on a host with a public address (open its TCP and UDP port 3340):
  openssl rand -hex 16 > tokens && torch-iroh relay --token-file tokens"""

_LEVELS = {"error": logging.ERROR, "warn": logging.WARNING, "info": logging.INFO, "debug": logging.DEBUG}
_SPARE_FILES = 512  # beside the clients' sockets


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="torch-iroh relay",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add(
        "--bind",
        action="append",
        metavar="IP:PORT",
        help=f"TCP address to listen on, several times for several (0.0.0.0:{DEFAULT_PORT} and [::]:{DEFAULT_PORT})",
    )
    add(
        "--token-file",
        action="append",
        type=Path,
        default=[],
        metavar="FILE",
        help="let in who shows one of its lines; may be repeated. TORCH_IROH_RELAY_TOKEN adds one token",
    )
    add("--tls-cert", type=Path, metavar="FILE", help="certificate chain (PEM): makes it an https relay")
    add("--tls-key", type=Path, metavar="FILE", help="its private key")
    add("--public-url", metavar="URL", help="the relay's URL as others see it, where a proxy stands before it")
    add("--public-ip", metavar="IP", help="this host's address as others see it (that of the default route)")
    add("--observer-bind", metavar="IP:PORT", default="0.0.0.0:0", help="its UDP address (the relay's port number)")
    add("--no-observer", action="store_true", help="run the relay alone")
    add(
        "--observer-key", metavar="FILE", help=f"its secret key, made when absent, or none ({_key_file.default_path()})"
    )
    add("--metrics-bind", metavar="IP:PORT", help="a listener for /metrics (the relay's port, for this host only)")
    add("--max-clients", type=int, default=4096, metavar="N", help="(%(default)s)")
    add(
        "--client-rate", type=_units.bandwidth, metavar="RATE", help="what one client may send, like 100Mbit (no limit)"
    )
    add(
        "--client-buffer",
        type=_units.size,
        default=1 << 20,
        metavar="SIZE",
        help="what waits for one slow client before its oldest packets are dropped (1Mi)",
    )
    add("--log-level", choices=_LEVELS, help="(TORCH_IROH_LOG, else info)")
    add("--json", action="store_true", help="what to give to others, as one line of JSON")
    return parser


def _tokens(files: Sequence[Path]) -> frozenset[str]:
    tokens = frozenset[str]().union(*(_auth.read_tokens(file) for file in files))
    own = os.environ.get("TORCH_IROH_RELAY_TOKEN")
    return tokens | {_auth.checked_token(own, "TORCH_IROH_RELAY_TOKEN")} if own else tokens


def _level(given: argparse.Namespace) -> int:
    name = given.log_level or os.environ.get("TORCH_IROH_LOG") or "info"
    if name not in _LEVELS:
        raise ValueError(f"TORCH_IROH_LOG is {name!r}; allowed: {', '.join(_LEVELS)}")
    return _LEVELS[name]


def _options(given: argparse.Namespace) -> RelayOptions:
    key = None
    if not given.no_observer and given.observer_key != "none":
        key = _key_file.read_or_make(Path(given.observer_key or _key_file.default_path()))
    return RelayOptions(
        bind=tuple(given.bind or DEFAULT_BIND),
        tokens=_tokens(given.token_file),
        tls_cert=given.tls_cert,
        tls_key=given.tls_key,
        metrics_bind=given.metrics_bind,
        observer=None if given.no_observer else given.observer_bind,
        observer_key=key,
        public_url=given.public_url,
        public_ip=given.public_ip,
        max_clients=given.max_clients,
        client_rate=given.client_rate,
        queue_bytes=given.client_buffer,
    )


def _allow_files(clients: int) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = clients + _SPARE_FILES
    if soft != resource.RLIM_INFINITY and soft < wanted:
        allowed = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
        if allowed < wanted:
            log.warning("this process may open %d files: fewer clients than --max-clients. Try: ulimit -n", allowed)


def _announce(server: RelayServer, given: argparse.Namespace) -> None:
    """Print what a person copies to others; never a token."""
    if given.json:
        told = {
            "relay": server.relay_url,
            "observer": server.observer,
            "listening": server.listening,
            "metrics": server.metrics_listening,
            "token": not server.access.open_to_all,
        }
        print(json.dumps(told), flush=True)
        return
    members = [f"TORCH_IROH_RELAY={server.relay_url}"]
    print(f"relay: {server.relay_url}")
    if server.observer is not None:
        print(f"observer: {server.observer}")
        members.append(f"TORCH_IROH_OBSERVER={server.observer}")
    if not server.access.open_to_all:
        members.append("TORCH_IROH_RELAY_TOKEN=TOKEN")
    print(f"on each machine: export {' '.join(members)}", flush=True)


async def _run(given: argparse.Namespace, options: RelayOptions) -> None:
    server = RelayServer(options)
    _allow_files(options.max_clients)
    await server.start()
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    loop.add_signal_handler(signal.SIGHUP, _reload, server, given)
    log.info("listening on %s (%s)", ", ".join(server.listening), type(loop).__module__)
    if server.access.open_to_all:
        log.warning("no token is set: this relay is open to everybody who finds it. Try: --token-file FILE")
    if options.public_ip is None:
        _warn_of_private(server)
    _announce(server, given)
    await stop.wait()
    log.info("closing: clients are told to come back")
    await server.close()


def _warn_of_private(server: RelayServer) -> None:
    everywhere = ipaddress.ip_address(split_address(server.listening[0])[0]).is_unspecified
    if everywhere and not ipaddress.ip_address(server.public_ip).is_global:
        log.warning("%s is no public address: others may need --public-ip (or --public-url)", server.public_ip)


def _reload(server: RelayServer, given: argparse.Namespace) -> None:
    try:
        server.set_tokens(_tokens(given.token_file))
        server.reload_certificate()
        log.info("tokens and certificate are read again")
    except (OSError, ValueError) as error:
        log.error("SIGHUP: %s; what was in force before stays", error)


def _new_loop() -> asyncio.AbstractEventLoop:
    """That of uvloop where it is installed, which takes less of the core; the log says which."""
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()
    return loop


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line; `arguments` default to those of the process."""
    given = _parser().parse_args(arguments)
    logging.basicConfig(stream=sys.stderr, format="torch-iroh relay: %(levelname)s: %(message)s")
    loop = _new_loop()
    try:
        log.setLevel(_level(given))
        asyncio.set_event_loop(loop)
        loop.run_until_complete(_run(given, _options(given)))
    except ValueError as error:
        print(f"torch-iroh relay: {error}", file=sys.stderr)
        sys.exit(2)
    except (OSError, ImportError, RuntimeError) as error:
        print(f"torch-iroh relay: {error}", file=sys.stderr)
        sys.exit(1)
    finally:
        with contextlib.suppress(RuntimeError):
            loop.close()


if __name__ == "__main__":
    main()
