"""Asking for kernels that are compiled already, here or on disk, so that a caller learns what would have to be."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

__all__ = ["NotKept", "kept_only", "only_kept", "refuse"]

_asked = threading.local()


class NotKept(BaseException):
    """A kernel has to be compiled: this process has not loaded it, and it is not kept on disk.

    No ``Exception``, for it says nothing of the kernel: what takes a failure as a reason must not take this for one.
    """


@contextlib.contextmanager
def kept_only() -> Iterator[None]:
    """In this thread, ask for kernels that have to be compiled in vain: :class:`NotKept`."""
    before, _asked.for_kept = only_kept(), True
    try:
        yield
    finally:
        _asked.for_kept = before


def only_kept() -> bool:
    """Whether this thread asks for compiled kernels alone."""
    return getattr(_asked, "for_kept", False)


def refuse(name: str) -> None:
    """Raise :class:`NotKept` where only compiled kernels are asked for: called by what would compile ``name``."""
    if only_kept():
        raise NotKept(name)
