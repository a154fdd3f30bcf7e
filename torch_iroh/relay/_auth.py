"""Whom a relay lets in: those who show a token, and prove that they hold the key whose packets they want."""

from __future__ import annotations

import hashlib
import hmac
import os
from collections.abc import Callable, Iterable
from pathlib import Path

_CHALLENGE_BYTES = 16
_CONTEXT = "iroh-relay handshake v1 challenge signature"
_KEY_BYTES = 32
_SIGNATURE_BYTES = 64
_BODY_BYTES = _KEY_BYTES + 1 + _SIGNATURE_BYTES


class Access:
    """The tokens that are let in; without any, everybody is."""

    def __init__(self, tokens: Iterable[str]) -> None:
        # Hashed, so that all have one length and a comparison tells nothing of it.
        self._digests = [hashlib.sha256(token.encode()).digest() for token in tokens]

    @property
    def open_to_all(self) -> bool:
        """Whether no token is needed."""
        return not self._digests

    def allows(self, authorization: str) -> bool:
        """Judge the value of an ``Authorization`` field, in a time that does not depend on which token it is."""
        scheme, _, token = authorization.partition(" ")
        shown = hashlib.sha256(token.strip().encode("latin-1")).digest()
        found = False
        for digest in self._digests:
            found |= hmac.compare_digest(digest, shown)
        return self.open_to_all or (found and scheme.lower() == "bearer")


def read_tokens(path: Path) -> frozenset[str]:
    """Read one token a line; empty lines and those that begin with # are left out.

    Raises:
        ValueError: there is no token in it, or one that an HTTP header cannot carry.
        OSError: it cannot be read.
    """
    lines = (line.strip() for line in path.read_text().splitlines())
    tokens = frozenset(line for line in lines if line and not line.startswith("#"))
    if not tokens:
        raise ValueError(f"{path}: no token in it; one a line, for example from: openssl rand -hex 16")
    return frozenset(checked_token(token, str(path)) for token in tokens)


def checked_token(token: str, source: str) -> str:
    """Return `token` if an HTTP header can carry it, else raise ValueError, which names `source` and not the token."""
    if not token.isascii() or not token.isprintable() or " " in token:
        raise ValueError(f"{source}: a token with spaces, line ends or characters that are not ASCII")
    return token


def new_challenge() -> bytes:
    """Return random bytes for a client to sign."""
    return os.urandom(_CHALLENGE_BYTES)


def load_verifier() -> Callable[[bytes, bytes], bytes]:
    """Return ``proved(challenge, body) -> key``: whose key a client's answer proves, or ValueError.

    Raises:
        ImportError: the packages for it are not installed; the text says how to.
    """
    try:
        from blake3 import blake3
        from cryptography.exceptions import InvalidSignature
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
    except ImportError as error:
        raise ImportError(f"a relay needs two packages more ({error}). Try: pip install 'torch-iroh[relay]'") from error

    def proved(challenge: bytes, body: bytes) -> bytes:
        # The body is key, length of the signature, signature.
        if len(body) != _BODY_BYTES or body[_KEY_BYTES] != _SIGNATURE_BYTES:
            raise ValueError("its proof of who it is has another form")
        key, signature = body[:_KEY_BYTES], body[_KEY_BYTES + 1 :]
        message = blake3(challenge, derive_key_context=_CONTEXT).digest()
        try:
            Ed25519PublicKey.from_public_bytes(key).verify(signature, message)
        except (InvalidSignature, ValueError):
            raise ValueError("its signature is not that of the key that it claims") from None
        return key

    return proved


def denial(text: str) -> bytes:
    """Return the body of the message that says why a client is sent away (a short text, as postcard has it)."""
    payload = text.encode()[:127]
    return bytes([len(payload)]) + payload
