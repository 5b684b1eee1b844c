"""Files of machine code: this user's own, written in one piece, with a checksum. What cannot be used is said once."""

from __future__ import annotations

import hashlib
import warnings
from pathlib import Path

from tilewise import cache, trusted

__all__ = ["load", "store"]

CHECK = hashlib.sha256
CHECK_BYTES = 32
MOST_TOLD = 64
"""Places of which it is remembered that they were named."""


def load(path: Path) -> bytes | None:
    """What :func:`store` kept there; ``None`` where there is nothing, not all of it, or what others may have written.

    Warns once of a file or folder that is not to be trusted (:mod:`tilewise.trusted`), and of one that cannot be read.
    """
    try:
        kept = trusted.read(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except trusted.Untrusted as error:
        _tell(error.place, str(error))
        return None
    except OSError as error:
        _tell(str(path), str(error))
        return None
    check, code = kept[:CHECK_BYTES], kept[CHECK_BYTES:]
    return code if code and CHECK(code).digest() == check else None


def store(path: Path, code: bytes) -> None:
    """Keep ``code``, with a checksum; readers see all of it or nothing.

    Warns once where nothing can be kept, or others may write the folder: the code is then compiled by every process.
    """
    try:
        trusted.write(path, CHECK(code).digest() + code)
    except trusted.Untrusted as error:
        _tell(error.place, str(error))
    except OSError as error:
        _tell(str(path.parent), f"{path.parent}: {error}")


def _tell(place: str, reason: str) -> None:
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
    warnings.warn(f"{text}. {cache.VARIABLE} names another directory", RuntimeWarning, stacklevel=5)


_told: set[str] = set()
