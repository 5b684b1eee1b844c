"""Asking for kernels that this process has loaded, so that a caller learns what it would have to compile."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

__all__ = ["NotLoaded", "loaded_only", "only_loaded", "refuse"]

_asked = threading.local()


class NotLoaded(BaseException):
    """A kernel is not loaded in this process: it has to be compiled, or read from where it is kept.

    No ``Exception``, for it says nothing of the kernel: what takes a failure as a reason must not take this for one.
    """


@contextlib.contextmanager
def loaded_only() -> Iterator[None]:
    """In this thread, ask for kernels that are not loaded in vain: :class:`NotLoaded`."""
    before, _asked.for_loaded = only_loaded(), True
    try:
        yield
    finally:
        _asked.for_loaded = before


def only_loaded() -> bool:
    """Whether this thread asks for loaded kernels alone."""
    return getattr(_asked, "for_loaded", False)


def refuse(name: str) -> None:
    """Raise :class:`NotLoaded` where only loaded kernels are asked for: called by what loads the kernel ``name``."""
    if only_loaded():
        raise NotLoaded(name)
