"""The folder where measurements and compiled kernels are kept between runs."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["VARIABLE", "cache_dir", "first_to_tell", "kernel_dir", "named_path", "nowhere", "why_relative"]

VARIABLE = "TILEWISE_CACHE_DIR"
"""The environment variable that moves the folder."""


def cache_dir() -> Path:
    """The folder where all is kept between runs: ``$TILEWISE_CACHE_DIR``, else the user's cache directory.

    It need not exist. The path is absolute, unless there is no home directory or the current directory is gone; then
    nothing is kept.

    >>> from tilewise.wisdom import cache_dir
    >>> cache_dir().is_absolute()
    True
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
    """A caller's path made absolute, with ``~`` as the home directory.

    It stays relative where there is no home directory or the current directory is gone. Nothing can be kept there then.
    """
    text = os.fspath(path)
    if text.startswith("~"):
        expanded = os.path.expanduser(text)
        return Path(expanded if os.path.isabs(expanded) else text)
    try:
        return Path(os.path.abspath(text))
    except FileNotFoundError:
        return Path(text)


def kernel_dir() -> Path:
    """The folder of kernels compiled for this machine."""
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
    """Whether this is the first call for the present :func:`cache_dir`, so that its fault is told only once."""
    global _told
    here = cache_dir()
    first, _told = _told != here, here
    return first


_told: Path | None = None
"""The folder of which it was last told that nothing can be kept there."""
