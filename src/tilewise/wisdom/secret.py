"""The seal that tells what this user's own processes recorded from what came from elsewhere.

A row's checksum can be computed by anyone, its seal cannot. The seal is a keyed hash (BLAKE2) of the row. Its key is a
secret of 32 random bytes in a file that only this user can read, together with that file's number in its file system,
which a copy does not have. A row that was imported, copied with its database or its whole directory, or changed by hand
has no valid seal.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import hmac
import os
import secrets
import stat
from pathlib import Path

from tilewise.machine import trusted
from tilewise.machine.cache import cache_dir

__all__ = ["NAME", "seal_of", "sealed"]

NAME = "wisdom.secret"
"""Name of the file with the secret, in :func:`cache_dir`."""
SIZE = 32
"""Bytes of the secret."""
SEAL = 16
"""Bytes of a seal: too many to guess one."""

_found: dict[Path, bytes] = {}
"""Keys that were read, by path."""


def seal_of(text: str) -> bytes:
    """The seal of a row's canonical text, 16 bytes. The user's secret is made where there is none yet.

    Where no file can hold the secret, seals are valid only for as long as this process lives.
    """
    path = _path()
    key = None if path is None else _found.get(path) or _read(path) or _make(path)
    if path is not None and key is not None:
        _found[path] = key
    return _hash(text, key or _own())


def sealed(text: str, seal: object) -> bool:
    """Whether a process of this user sealed a row with this text. Makes no file."""
    if not isinstance(seal, bytes) or len(seal) != SEAL:
        return False
    path = _path()
    key = None if path is None else _found.get(path) or _read(path)
    if path is not None and key is not None:
        _found[path] = key
    return any(
        hmac.compare_digest(seal, _hash(text, candidate)) for candidate in (key, _own()) if candidate is not None
    )


def _hash(text: str, key: bytes) -> bytes:
    """The keyed hash of ``text``."""
    return hashlib.blake2b(text.encode(), key=key, digest_size=SEAL).digest()


@functools.cache
def _own() -> bytes:
    """A key for this process and its forks alone."""
    return secrets.token_bytes(SIZE)


def _path() -> Path | None:
    """Where the secret is kept; ``None`` where there is no place for it."""
    try:
        folder = cache_dir()
    except (OSError, RuntimeError, KeyError):  # no home directory, nor a user who has one
        return None
    return folder / NAME if folder.is_absolute() else None


def _read(path: Path) -> bytes | None:
    """The key from a file of this user that nobody else can read or write; ``None`` for any other file."""
    try:
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0))
    except OSError:
        return None
    try:
        status = os.fstat(descriptor)
        private = not hasattr(os, "geteuid") or (status.st_uid == os.geteuid() and not status.st_mode & 0o077)
        if not stat.S_ISREG(status.st_mode) or not private or status.st_size != SIZE:
            return None
        data = os.read(descriptor, SIZE)
    except OSError:
        return None
    finally:
        os.close(descriptor)
    return data + status.st_ino.to_bytes(16, "big") if len(data) == SIZE else None


def _make(path: Path) -> bytes | None:
    """Write a new secret, whole or not at all, and return the key. Of several processes all use the first one's."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(8)}")
    try:
        trusted.make_folders(path.parent)
        descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except OSError:
        return None
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(secrets.token_bytes(SIZE))
        os.link(partial, path)
    except OSError:
        pass  # another was first, or there are no links here: what lies there is read, or none is kept
    finally:
        with contextlib.suppress(OSError):
            partial.unlink()
    return _read(path)
