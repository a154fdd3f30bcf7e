"""The command `torch-iroh relay`: what it prints, what it refuses, its files, and its observer with real endpoints."""

from __future__ import annotations

import ipaddress
import os
import re
import signal
import socket
import ssl
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from relay_support import PING, PONG, ROOT, Client, Relay, eventually

from torch_iroh._native import core_module, open_library
from torch_iroh.relay import _auth, _key_file
from torch_iroh.relay._options import RelayOptions, join_address, split_address


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "torch_iroh", "relay", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
    )


def certificate(folder: Path, name: str = "localhost") -> tuple[Path, Path]:
    """A certificate that signs itself, with its key."""
    import datetime

    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
    now = datetime.datetime.now(datetime.timezone.utc)
    made = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(name)]), critical=False)
        .sign(key, hashes.SHA256())
    )
    cert_file, key_file = folder / "cert.pem", folder / "key.pem"
    cert_file.write_bytes(made.public_bytes(serialization.Encoding.PEM))
    key_file.write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    return cert_file, key_file


def trusting(cert_file: Path) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=str(cert_file))


# ---- what it prints and refuses ----


def test_it_prints_what_a_person_copies(tmp_path: Path) -> None:
    tokens = tmp_path / "tokens"
    tokens.write_text("# of two teams\n\nfirst\nsecond\n")
    command = [sys.executable, "-m", "torch_iroh", "relay", "--bind", "127.0.0.1:0", "--token-file", str(tokens)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TORCH_IROH_HOME": str(tmp_path)}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    ) as process:
        try:
            assert process.stdout is not None
            relay, observer, members = (process.stdout.readline().strip() for _ in range(3))
        finally:
            process.terminate()
        out, log = process.communicate(timeout=30)
    url = relay.removeprefix("relay: ")
    assert re.fullmatch(r"http://127\.0\.0\.1:\d+", url)
    seen = observer.removeprefix("observer: ")
    # The same port number, in UDP: one number to open in a firewall.
    assert re.fullmatch(r"[0-9a-f]{64}@" + re.escape(url.removeprefix("http://")), seen)
    expected = f"export TORCH_IROH_RELAY={url} TORCH_IROH_OBSERVER={seen} TORCH_IROH_RELAY_TOKEN=TOKEN"
    assert members == f"on each machine: {expected}"
    assert process.returncode == 0
    assert "open to everybody" not in log
    for secret in ("first", "second", (tmp_path / "observer.key").read_text().strip()):
        assert secret not in out + log


def test_public_names_replace_what_it_sees_itself() -> None:
    with Relay("--public-url", "https://relay.example.org", "--public-ip", "203.0.113.7", observer=True) as relay:
        assert relay.told["relay"] == "https://relay.example.org"
        assert relay.told["observer"].endswith(f"@203.0.113.7:{relay.address[1]}")
    with Relay("--public-ip", "2001:db8::7", observer=True) as relay:
        assert relay.told["relay"] == f"http://[2001:db8::7]:{relay.address[1]}"
        assert f"@[2001:db8::7]:{relay.address[1]}" in relay.told["observer"]


def test_without_a_token_it_says_that_everybody_is_let_in() -> None:
    with Relay() as relay:
        relay.wait_for_log("open to everybody")


def test_an_address_that_is_not_public_is_said_where_it_listens_everywhere() -> None:
    with Relay(bind="0.0.0.0:0") as relay:
        # Of the interface with the default route, or loopback where there is none.
        address = relay.told["relay"].removeprefix("http://").partition(":")[0]
        if not ipaddress.ip_address(address).is_global:
            relay.wait_for_log(f"{address} is no public address")
    with Relay() as relay:
        relay.wait_for_log("open to everybody")
        relay.stop()
        assert "no public address" not in relay.log


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        (["--bind", "localhost:80"], 2, "'localhost:80' is not an address like 0.0.0.0:3340 or [::]:3340"),
        (["--bind", "127.0.0.1:99999"], 2, "is not an address"),
        (["--bind", "192.0.2.1:3340"], 1, "cannot listen on TCP 192.0.2.1:3340"),
        (["--tls-cert", "/none"], 2, "tls_cert and tls_key: give both"),
        (["--tls-cert", "/none", "--tls-key", "/none"], 1, "/none"),
        (["--token-file", "/none"], 1, "/none"),
        (["--client-buffer", "1Ki"], 2, "queue_bytes is 1024; allowed: from 65536"),
        (["--client-rate", "fast"], 2, "'fast' is not a bandwidth"),
        (["--public-ip", "example.org"], 2, "example.org"),
        (["--public-url", "relay.example.org"], 2, "allowed: http://"),
        (["--max-clients", "0"], 2, "max_clients is 0"),
        (["--client-bufer", "1Mi"], 2, "--client-bufer"),
    ],
)
def test_what_it_cannot_do_is_one_sentence_and_an_exit_code(arguments: list[str], code: int, text: str) -> None:
    given = arguments if "--bind" in arguments else ["--bind", "127.0.0.1:0", *arguments]
    done = run("--no-observer", *given)
    assert done.returncode == code
    assert text in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


def test_a_port_in_use_is_named() -> None:
    with Relay() as relay:
        address = join_address(*relay.address)
        done = run("--bind", address, "--no-observer")
        assert done.returncode == 1
        assert f"cannot listen on TCP {address}: Address already in use" in done.stderr
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as taken:
        taken.bind(("127.0.0.1", 0))
        address = join_address(*taken.getsockname())
        done = run("--bind", "127.0.0.1:0", "--observer-bind", address, "--observer-key", "none")
        assert done.returncode == 1
        assert f"the observer cannot use UDP {address}" in done.stderr


def test_without_its_packages_it_says_how_to_install_them(tmp_path: Path) -> None:
    (tmp_path / "blake3.py").write_text("raise ImportError('No module named blake3')")
    done = run("--bind", "127.0.0.1:0", "--no-observer", PYTHONPATH=f"{tmp_path}:{ROOT}")
    assert done.returncode == 1
    assert "pip install 'torch-iroh[relay]'" in done.stderr


@pytest.mark.parametrize("text", ["0.0.0.0:3340", "[::]:3340", "[2001:db8::1]:0"])
def test_addresses_are_taken_apart_and_put_together(text: str) -> None:
    assert join_address(*split_address(text)) == text


@pytest.mark.parametrize("text", ["", ":", "1.2.3.4", "1.2.3.4:", "::1:80", "[1.2.3.4]:80", "[::1]80", "1.2.3.4:-1"])
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not an address"):
        RelayOptions(bind=(text,))


def test_it_runs_without_torch_being_loaded() -> None:
    code = "import sys, torch_iroh.relay.command; print('torch' in sys.modules, 'iroh' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, cwd=ROOT)
    assert done.stdout.split() == ["False", "False"], done.stderr


# ---- its files ----


def test_tokens_are_lines_without_comments(tmp_path: Path) -> None:
    file = tmp_path / "tokens"
    file.write_text("# a comment\n one \ntwo\n\n")
    assert _auth.read_tokens(file) == {"one", "two"}
    for wrong in ("", "# only this\n", "two words\n", "caf\u00e9\n"):
        file.write_text(wrong)
        with pytest.raises(ValueError, match=re.escape(str(file))) as error:
            _auth.read_tokens(file)
        assert "caf" not in str(error.value) and "words" not in str(error.value)


def test_access_wants_the_whole_bearer_token() -> None:
    access = _auth.Access({"one", "two"})
    assert access.allows("Bearer one")
    assert access.allows("bearer two")
    for wrong in (
        "",
        "one",
        "Bearer",
        "Bearer ",
        "Bearer on",
        "Bearer onee",
        "Basic one",
        "Bearer one two",
        "Bearer \xe9",
    ):
        assert not access.allows(wrong), wrong
    assert _auth.Access(()).allows("")


def test_sighup_reads_tokens_again_and_a_wrong_file_changes_nothing(tmp_path: Path) -> None:
    tokens = tmp_path / "tokens"
    tokens.write_text("old\n")
    with Relay("--token-file", str(tokens)) as relay, Client(relay.address).join("old") as connected:
        tokens.write_text("new\n")
        relay.process.send_signal(signal.SIGHUP)
        relay.wait_for_log("are read again")
        Client(relay.address).join("new").close()
        with Client(relay.address) as refused:
            assert " 401 " in refused.upgrade("old")
        connected.send(PING, b"12345678")
        assert connected.receive(PING) == (PONG, b"12345678")
        tokens.write_text("")
        relay.process.send_signal(signal.SIGHUP)
        relay.wait_for_log("what was in force before stays")
        Client(relay.address).join("new").close()


def test_the_token_of_the_environment_is_let_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_IROH_RELAY_TOKEN", "from-the-environment")
    with Relay() as relay:
        assert relay.told["token"] is True
        Client(relay.address).join("from-the-environment").close()
        with Client(relay.address) as refused:
            assert " 401 " in refused.upgrade()


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("TORCH_IROH_RELAY_TOKEN", "sesame\n", "TORCH_IROH_RELAY_TOKEN: a token with spaces"),
        ("TORCH_IROH_LOG", "loud", "TORCH_IROH_LOG is 'loud'; allowed: error, warn, info, debug"),
    ],
)
def test_a_wrong_environment_is_said(name: str, value: str, text: str) -> None:
    done = run("--bind", "127.0.0.1:0", "--no-observer", **{name: value})
    assert done.returncode == 2
    assert text in done.stderr
    assert "sesame" not in done.stderr and "Traceback" not in done.stderr


def test_the_observers_key_is_made_once_for_its_owner_only(tmp_path: Path) -> None:
    file = tmp_path / "new" / "folder" / "observer.key"
    key = _key_file.read_or_make(file)
    assert len(key) == 32
    assert _key_file.read_or_make(file) == key
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert os.listdir(file.parent) == [file.name]
    file.chmod(0o644)
    with pytest.raises(PermissionError, match=r"others can read .*chmod 600"):
        _key_file.read_or_make(file)
    file.write_text("not a key")
    file.chmod(0o600)
    with pytest.raises(ValueError, match="holds no secret key"):
        _key_file.read_or_make(file)


def test_the_observers_id_outlives_a_restart(tmp_path: Path) -> None:
    seen = set()
    for _ in range(2):
        with Relay("--observer-key", str(tmp_path / "key"), observer=True) as relay:
            seen.add(relay.told["observer"].partition("@")[0])
            relay.stop()
    assert len(seen) == 1


# ---- TLS and IPv6 ----


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
def test_https_with_a_certificate_of_files_that_sighup_reads_again(tmp_path: Path, loop: str) -> None:
    if loop == "asyncio":
        (tmp_path / "uvloop.py").write_text("raise ImportError('hidden by a test')")
    else:
        pytest.importorskip("uvloop")
    cert_file, key_file = certificate(tmp_path)
    first = trusting(cert_file)
    arguments = ["--tls-cert", str(cert_file), "--tls-key", str(key_file)]
    with Relay(*arguments, python_path=str(tmp_path)) as relay:
        relay.wait_for_log(f"({loop}")
        assert relay.told["relay"].startswith("https://127.0.0.1:")
        with Client(relay.address, tls=first).join() as a, Client(relay.address, tls=first).join() as b:
            packet = os.urandom(60_000)
            for _ in range(50):
                a.send_to(b.key, packet)
                assert b.receive(PING) == (6, a.key + b"\x00" + packet)
            certificate(tmp_path)
            relay.process.send_signal(signal.SIGHUP)
            relay.wait_for_log("are read again")
            Client(relay.address, tls=trusting(cert_file)).join().close()
            with pytest.raises(ssl.SSLError):
                Client(relay.address, tls=first)
            a.send(PING, b"12345678")
            assert a.receive(PING) == (PONG, b"12345678")
        # Who does not speak TLS is sent away, and nobody else.
        with socket.create_connection(relay.address, timeout=10) as plain:
            plain.sendall(b"GET /ping HTTP/1.1\r\n\r\n")
            assert b"200" not in plain.makefile("rb").read()


def test_one_port_for_ipv4_and_ipv6() -> None:
    with Relay("--bind", "[::1]:0") as relay:
        first, second = relay.told["listening"]
        assert second == f"[::1]:{split_address(first)[1]}"
        with Client(relay.address).join() as a, Client(split_address(second)).join() as b:
            a.send_to(b.key, b"x")
            assert b.receive(PING) == (6, a.key + b"\x00x")


# ---- the observer ----


def test_the_observer_tells_real_endpoints_their_address() -> None:
    open_library()
    core = core_module()
    with Relay(observer=True) as relay:
        identity, _, address = relay.told["observer"].partition("@")
        endpoint = core.RawEndpoint("127.0.0.1:0", "torch-iroh/observe/1")
        connection = endpoint.connect(identity, [address])
        assert connection.read(64).decode() in endpoint.addresses()
        assert relay.metrics()["torch_iroh_relay_observer_connections"] == 1
        connection.close()
        eventually(lambda: relay.metrics()["torch_iroh_relay_observer_connections"] == 0)
        assert relay.metrics()["torch_iroh_relay_observer_answers_total"] == 1
        endpoint.close()
        assert relay.stop() == 0
