"""Where everything is kept between runs: measurements, compiled kernels."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["VARIABLE", "cache_dir", "first_to_tell", "kernel_dir", "named_path", "nowhere", "why_relative"]

VARIABLE = "TILEWISE_CACHE_DIR"


def cache_dir() -> Path:
    """Where all is kept between runs: ``$TILEWISE_CACHE_DIR``, else the user's cache directory.

    It need not exist. The path is absolute unless there is no home directory, or the current one is gone: then nothing
    is kept.
    """
    moved = os.environ.get(VARIABLE)
    if moved:
        return named_path(moved)
    import platformdirs

    try:
        return Path(platformdirs.user_cache_dir("tilewise", appauthor=False))
    except RuntimeError:  # newer versions raise; older ones give a path from "~"
        return Path("~/.cache/tilewise")


def named_path(path: Path | str) -> Path:
    """What a caller's path means: absolute, ``~`` being the home directory.

    Without a home directory, or where the current one is gone, it stays relative, and nothing can be kept there.
    """
    text = os.fspath(path)
    if text.startswith("~"):
        found = os.path.expanduser(text)
        return Path(found if os.path.isabs(found) else text)
    try:
        return Path(os.path.abspath(text))
    except FileNotFoundError:
        return Path(text)


def kernel_dir() -> Path:
    """Where kernels compiled for this machine are kept."""
    return cache_dir() / "kernels"


def nowhere() -> str:
    """Why nothing can be kept in :func:`cache_dir`; empty where something can."""
    path = cache_dir()
    if not path.is_absolute():
        return why_relative(path)
    while not os.path.lexists(path) and path.parent != path:
        path = path.parent
    if not os.path.isdir(path):
        return f"{path} is no folder"
    effective = os.access in os.supports_effective_ids
    if not os.access(path, os.W_OK | os.X_OK, effective_ids=effective):
        return f"{path} cannot be written"
    return ""


def why_relative(path: Path) -> str:
    """Why a path that should be absolute is not."""
    return "there is no home directory" if str(path).startswith("~") else "the current directory is gone"


def first_to_tell() -> bool:
    """Whether nobody has said yet that nothing can be kept in :func:`cache_dir`; from now on, somebody has."""
    global _told
    here = cache_dir()
    first, _told = _told != here, here
    return first


_told: Path | None = None
