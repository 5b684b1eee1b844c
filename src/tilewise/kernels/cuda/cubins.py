"""Compiled CUDA C++ kept on disk, so that a machine compiles each kernel once."""

from __future__ import annotations

import hashlib
from pathlib import Path

from tilewise import cache
from tilewise.kernels.code_files import load, store

__all__ = ["load", "path_of", "store"]


def path_of(source: str, architecture: str, compiler: str) -> Path:
    """Where the code of ``source`` for ``architecture`` by ``compiler`` (its version and options) is kept."""
    told_apart = "\0".join((compiler, architecture, source)).encode()
    return cache.kernel_dir() / "cuda" / f"{hashlib.sha256(told_apart).hexdigest()}.cubin"
