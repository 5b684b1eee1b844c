"""Compiled CUDA C++ on disk, so that a machine compiles each kernel once."""

from __future__ import annotations

import hashlib
from pathlib import Path

from tilewise.kernels.building.code_files import load, store
from tilewise.machine import cache

__all__ = ["load", "path_of", "store"]


def path_of(source: str, architecture: str, compiler: str) -> Path:
    """The file of the code of ``source`` for ``architecture``; ``compiler`` is its version and options."""
    told_apart = "\0".join((compiler, architecture, source)).encode()
    return cache.kernel_dir() / "cuda" / f"{hashlib.sha256(told_apart).hexdigest()}.cubin"
