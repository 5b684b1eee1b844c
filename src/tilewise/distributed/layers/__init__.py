"""Computes torch's functions by parts of an image. Each file has a family of functions.

A file of this folder is imported without being listed anywhere. It registers its functions with
:func:`tilewise.distributed.shards.shard.handles`.
"""

from __future__ import annotations

import functools
import importlib
import pkgutil

__all__ = ["load"]


@functools.cache
def load() -> None:
    """Import every file of this package."""
    for module in pkgutil.iter_modules(__path__):
        importlib.import_module(f"{__name__}.{module.name}")
