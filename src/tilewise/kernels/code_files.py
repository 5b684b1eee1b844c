"""Files of machine code: written in one piece, with a checksum."""

from __future__ import annotations

import contextlib
import hashlib
import os
import tempfile
from pathlib import Path

__all__ = ["load", "store"]

CHECK = hashlib.sha256
CHECK_BYTES = 32


def load(path: Path) -> bytes | None:
    """What :func:`store` kept there; ``None`` where there is nothing, or not all of it."""
    try:
        kept = path.read_bytes()
    except OSError:
        return None
    check, code = kept[:CHECK_BYTES], kept[CHECK_BYTES:]
    return code if code and CHECK(code).digest() == check else None


def store(path: Path, code: bytes) -> None:
    """Keep ``code``, with a checksum; readers see all of it or nothing. ``OSError`` where nothing can be written."""
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
