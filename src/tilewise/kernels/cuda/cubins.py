"""Compiled CUDA C++ kept on disk, so that a machine compiles each kernel once."""

from __future__ import annotations

import contextlib
import hashlib
import os
import tempfile
from pathlib import Path

from tilewise import cache

__all__ = ["load", "path_of", "store"]

CHECK = hashlib.sha256
CHECK_BYTES = 32


def path_of(source: str, architecture: str, compiler: str) -> Path:
    """Where the code of ``source`` for ``architecture`` by ``compiler`` (its version and options) is kept."""
    told_apart = "\0".join((compiler, architecture, source)).encode()
    return cache.kernel_dir() / "cuda" / f"{hashlib.sha256(told_apart).hexdigest()}.cubin"


def load(path: Path) -> bytes | None:
    """What :func:`store` kept there; ``None`` where there is nothing, or not all of it."""
    try:
        kept = path.read_bytes()
    except OSError:
        return None
    check, code = kept[:CHECK_BYTES], kept[CHECK_BYTES:]
    return code if code and CHECK(code).digest() == check else None


def store(path: Path, code: bytes) -> None:
    """Keep ``code``, with a checksum; readers see all of it or nothing.

    Nothing is kept in a folder that cannot be written: the kernel is then compiled again in the next process.
    """
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=path.stem[:16])
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(CHECK(code).digest() + code)
            os.replace(name, path)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(name)
            raise
