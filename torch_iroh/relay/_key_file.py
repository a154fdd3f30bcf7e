"""The observer's secret key in a file that only its owner can read, so that its id outlives a restart."""

from __future__ import annotations

import os
import stat
from pathlib import Path

_HEX = 64


def default_path() -> Path:
    """Return ``observer.key`` in TORCH_IROH_HOME, or in torch-iroh's folder of this user's configuration."""
    home = os.environ.get("TORCH_IROH_HOME")
    if home:
        return Path(home) / "observer.key"
    base = os.environ.get("XDG_CONFIG_HOME")
    return (Path(base) if base else Path.home() / ".config") / "torch-iroh" / "observer.key"


def read_or_make(path: Path) -> bytes:
    """Return the key in `path`, which is made when it is absent.

    Raises:
        PermissionError: others can read it.
        ValueError: it holds something else.
        OSError: it can be neither read nor made.
    """
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        # Complete under another name first: two that start at once agree, and none reads half a key.
        fresh = path.with_name(f"{path.name}.{os.getpid()}")
        descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            with os.fdopen(descriptor, "w") as file:
                file.write(os.urandom(_HEX // 2).hex() + "\n")
            os.link(fresh, path)
        except FileExistsError:
            pass
        finally:
            fresh.unlink()
    except OSError as error:
        if not path.exists():
            raise OSError(f"cannot make {path}: {error}. Try: --observer-key FILE, or --observer-key none") from error
    with path.open() as file:
        if stat.S_IMODE(os.fstat(file.fileno()).st_mode) & 0o077:
            raise PermissionError(f"others can read {path}, which is a secret key. Try: chmod 600 {path}")
        text = file.read(_HEX + 2).strip()
    try:
        if len(text) != _HEX:
            raise ValueError
        return bytes.fromhex(text)
    except ValueError:
        raise ValueError(f"{path} holds no secret key ({_HEX} hex digits). Move it away to have a new one") from None
