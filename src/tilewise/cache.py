"""Where everything is kept between runs: measurements, compiled kernels."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["VARIABLE", "cache_dir", "kernel_dir"]

VARIABLE = "TILEWISE_CACHE_DIR"


def cache_dir() -> Path:
    """Where all is kept between runs: ``$TILEWISE_CACHE_DIR``, else the user's cache directory.

    It need not exist. The path is absolute unless the user has no home directory.
    """
    moved = os.environ.get(VARIABLE)
    if moved:
        return Path(os.path.abspath(os.path.expanduser(moved)))
    import platformdirs

    return Path(platformdirs.user_cache_dir("tilewise", appauthor=False))


def kernel_dir() -> Path:
    """Where kernels compiled for this machine are kept."""
    return cache_dir() / "kernels"
