"""How torch's functions compute by parts: one file a family, found by being here.

A file registers its functions with :func:`tilewise.distributed.shard.handles`.
"""

from __future__ import annotations

import functools
import importlib
import pkgutil

__all__ = ["load"]


@functools.cache
def load() -> None:
    """Import every file of this package."""
    for found in pkgutil.iter_modules(__path__):
        importlib.import_module(f"{__name__}.{found.name}")
