"""Compiled CUDA C++ kept on disk, so that a machine compiles each kernel once."""

from __future__ import annotations

import contextlib
import hashlib
from pathlib import Path

from tilewise import cache
from tilewise.kernels import code_files
from tilewise.kernels.code_files import load

__all__ = ["load", "path_of", "store"]


def path_of(source: str, architecture: str, compiler: str) -> Path:
    """Where the code of ``source`` for ``architecture`` by ``compiler`` (its version and options) is kept."""
    told_apart = "\0".join((compiler, architecture, source)).encode()
    return cache.kernel_dir() / "cuda" / f"{hashlib.sha256(told_apart).hexdigest()}.cubin"


def store(path: Path, code: bytes) -> None:
    """Keep ``code`` there.

    Nothing is kept in a folder that cannot be written: the kernel is then compiled again in the next process.
    """
    with contextlib.suppress(OSError):
        code_files.store(path, code)
