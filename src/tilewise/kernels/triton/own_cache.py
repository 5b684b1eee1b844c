"""Triton's cache on disk, where entries that others may have written count as absent.

Triton loads machine code and libraries from a folder (``TRITON_CACHE_DIR``) without checking whose they are. Within
:func:`own_cache` it uses a manager that checks, with the same entries in the same places. Where the folder is not to be
trusted or cannot be written, the process keeps what it compiles in a temporary folder of its own.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import shutil
import tempfile
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from triton import knobs
from triton.runtime.cache import FileCacheManager

from tilewise.machine import cache, trusted

__all__ = ["OwnCache", "folder", "own_cache", "settings"]


class OwnCache(FileCacheManager):  # type: ignore[misc]  # Triton has no types
    """Triton's manager of one entry, reading and writing through :mod:`tilewise.machine.trusted`.

    What Triton's developers dump or override by hand is left to Triton.
    """

    def __init__(self, key: str, override: bool = False, dump: bool = False) -> None:
        self._plain = override or dump
        if self._plain:
            super().__init__(key, override, dump)
            return
        self._places = [str(folder / key) for folder in _folders()]
        self.key, self.cache_dir = key, self._places[-1]
        self.lock_path = os.path.join(self.cache_dir, "lock")

    def get_file(self, filename: str) -> str | None:
        """The path of a file of the entry, or ``None``."""
        if self._plain:
            plain_path: str | None = super().get_file(filename)
            return plain_path
        paths = (os.path.join(place, filename) for place in self._places)
        return next((path for path in paths if _is_ours(path)), None)

    def get_group(self, filename: str) -> dict[str, str] | None:
        """The paths of all files of the entry by name, or ``None`` unless all are there."""
        if self._plain:
            whole: dict[str, str] | None = super().get_group(filename)
            return whole
        path = self.get_file(f"__grp__{filename}")
        try:
            paths = dict(json.loads(trusted.read(Path(path or "")))["child_paths"])
        except (OSError, trusted.Untrusted, ValueError, KeyError, TypeError):
            return None  # as where there is no entry: it is written again
        # All or nothing: of an entry that lacks files Triton fails to load the kernel.
        return paths if all(isinstance(path, str) and _is_ours(path) for path in paths.values()) else None

    def put(self, data: Any, filename: str, binary: bool = True) -> str:
        """Write a file of the entry and return its path."""
        if self._plain:
            return str(super().put(data, filename, binary))
        content = data if isinstance(data, bytes) else str(data).encode()
        try:
            trusted.write(Path(self._make_path(filename)), content)
        except (OSError, trusted.Untrusted) as error:  # a full disk, an entry of somebody else's
            self.cache_dir = str(_fall_back(error) / self.key)
            self._places.append(self.cache_dir)
            trusted.write(Path(self._make_path(filename)), content)
        return self._make_path(filename)


@contextlib.contextmanager
def own_cache() -> Iterator[None]:
    """Have Triton compile and load through :class:`OwnCache`, unless the user has set a manager.

    It is a setting of the process: what other threads compile meanwhile goes the same way, to the same entries.
    """
    global _within
    with _lock:
        if not _within and knobs.cache.manager_class is None:
            # By its dictionary: assigned, it would go to the environment of all children as well.
            vars(knobs.cache)["manager_class"] = OwnCache
        _within += 1
    try:
        yield
    finally:
        with _lock:
            _within -= 1
            if not _within and vars(knobs.cache).get("manager_class") is OwnCache:
                del vars(knobs.cache)["manager_class"]


def folder() -> Path:
    """The folder in which entries last. It need not exist, nor be one that may be trusted.

    Raises ``OSError`` where there is none, as there is no home directory.
    """
    asked = knobs.cache.dir
    if asked.startswith("~"):
        raise FileNotFoundError(f"{asked}: there is no home directory; TRITON_CACHE_DIR would name a folder")
    return Path(os.path.abspath(asked))


def settings() -> dict[str, str]:
    """Environment variables with which another process keeps entries where this one does."""
    folder = str(_folders()[-1])
    return {} if folder == knobs.cache.dir else {"TRITON_CACHE_DIR": folder}


def _is_ours(path: str) -> bool:
    """Whether a file is there and to be trusted; warns where it is not to be trusted."""
    try:
        trusted.require_file(Path(path))
    except (FileNotFoundError, NotADirectoryError):
        return False
    except (OSError, trusted.Untrusted) as error:
        _tell(str(error))
        return False
    return True


def _folders() -> tuple[Path, ...]:
    """Folders in which entries are looked for; in the last one they are kept. Raises ``OSError`` and ``Untrusted``."""
    asked = knobs.cache.dir
    with _lock:
        if asked not in _found:
            _found.clear()
            _found[asked] = _usable(asked)
        return _found[asked]


def _usable(asked: str) -> tuple[Path, ...]:
    """Triton's folder if it is to be trusted, with a temporary one where it cannot be written."""
    place = Path(os.path.abspath(asked))
    try:
        if asked.startswith("~"):
            raise FileNotFoundError("there is no home directory")
        trusted.require(place, make=True)
    except (OSError, trusted.Untrusted) as error:
        _tell(str(error))
        return (_temporary(),)
    if os.access(place, os.W_OK | os.X_OK):
        return (place,)
    _tell(f"{place} cannot be written")
    return place, _temporary()


def _fall_back(error: Exception) -> Path:
    """Keep entries in a temporary folder from now on, and return it."""
    _tell(str(error))
    with _lock:
        folder = _temporary()
        _found[knobs.cache.dir] = (*(place for place in _folders() if place != folder), folder)
    return folder


def _temporary() -> Path:
    """A folder that is removed when this process ends."""
    global _own
    if _own is None or _own[0] != os.getpid():
        place = Path(tempfile.mkdtemp(prefix="tilewise-triton-"))
        trusted.require(place)
        _own = os.getpid(), place
        atexit.register(_remove, *_own)
    return _own[1]


def _remove(process: int, place: Path) -> None:
    """Remove the folder at the end of the process that made it."""
    if os.getpid() == process:
        shutil.rmtree(place, ignore_errors=True)


def _tell(reason: str) -> None:
    """Warn once that kernels are kept only for this process, unless it was said that nothing can be kept at all."""
    if reason in _told or (cache.nowhere() and not cache.first_to_tell()):
        return
    if len(_told) < MOST_TOLD:
        _told.add(reason)
    text = f"Triton's kernels are compiled anew and kept for this process only: {reason}"
    warnings.warn(f"{text}. TRITON_CACHE_DIR names another directory", RuntimeWarning, stacklevel=4)


def _forget() -> None:
    """In a forked child: drop what the parent's other threads were doing."""
    global _lock, _within
    _lock, _within = threading.RLock(), 0
    _found.clear()
    if vars(knobs.cache).get("manager_class") is OwnCache:
        del vars(knobs.cache)["manager_class"]


MOST_TOLD = 64
_lock = threading.RLock()
_within = 0
_found: dict[str, tuple[Path, ...]] = {}
"""The folder that Triton was last told, and the folders in use for it."""
_own: tuple[int, Path] | None = None
_told: set[str] = set()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
