"""Files of machine code: this user's own, written in one piece, with a checksum.

What cannot be used is reported once.
"""

from __future__ import annotations

import hashlib
import warnings
from pathlib import Path

from tilewise.machine import cache, trusted

__all__ = ["load", "store", "write"]

CHECK = hashlib.sha256
CHECK_BYTES = 32
MOST_TOLD = 64
"""Most places that are remembered as reported."""


def load(path: Path) -> bytes | None:
    """The code that :func:`store` wrote to ``path``.

    ``None`` where there is no file, it is incomplete, or others may have written it. Warns once of a file or folder
    that is not to be trusted (:mod:`tilewise.machine.trusted`), and of one that cannot be read.
    """
    try:
        content = trusted.read(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except trusted.Untrusted as error:
        _tell(error.place, str(error))
        return None
    except OSError as error:
        _tell(str(path), str(error))
        return None
    check, code = content[:CHECK_BYTES], content[CHECK_BYTES:]
    return code if code and CHECK(code).digest() == check else None


def store(path: Path, code: bytes) -> None:
    """Write ``code`` to ``path`` with a checksum; readers see all of it or nothing.

    Warns once where nothing can be kept or others may write the folder. Then every process compiles the code itself.
    """
    try:
        write(path, code)
    except trusted.Untrusted as error:
        _tell(error.place, str(error))
    except OSError as error:
        _tell(str(path.parent), f"{path.parent}: {error}")


def write(path: Path, code: bytes) -> None:
    """As :func:`store`, raising ``OSError`` and :class:`~tilewise.machine.trusted.Untrusted` instead of warning."""
    trusted.write(path, CHECK(code).digest() + code)


def _tell(place: str, reason: str) -> None:
    """Warn that code is not loaded or kept at ``place``, once for each place."""
    if why := cache.nowhere():
        if not cache.first_to_tell():
            return
        text = (
            f"{cache.cache_dir()} cannot be used ({why}): what is measured and compiled from now on is kept in memory"
        )
        text += f", for this process only. {cache.VARIABLE} names another directory"
        warnings.warn(text, RuntimeWarning, stacklevel=4)
        return
    if place in _told:
        return
    if len(_told) < MOST_TOLD:
        _told.add(place)
    _warn(f"compiled kernels are not loaded or kept, but compiled anew: {reason}")


def _warn(text: str) -> None:
    """Warn, and say how to name another folder."""
    warnings.warn(f"{text}. {cache.VARIABLE} names another directory", RuntimeWarning, stacklevel=5)


_told: set[str] = set()
"""Files and folders that were reported."""
