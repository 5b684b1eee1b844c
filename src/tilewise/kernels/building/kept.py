"""Asking only for kernels that are compiled already, so that a caller learns which would have to be compiled."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

__all__ = ["NotKept", "kept_only", "only_kept", "refuse"]

_asked = threading.local()


class NotKept(BaseException):
    """A kernel would have to be compiled: this process has not loaded it, and it is not on disk.

    It is no ``Exception``, as it says nothing about the kernel: code that takes a failure as a reason must not catch
    it.
    """


@contextlib.contextmanager
def kept_only() -> Iterator[None]:
    """In this thread, raise :class:`NotKept` for kernels that would have to be compiled."""
    before, _asked.for_kept = only_kept(), True
    try:
        yield
    finally:
        _asked.for_kept = before


def only_kept() -> bool:
    """Whether this thread may use only kernels that are compiled already."""
    return getattr(_asked, "for_kept", False)


def refuse(name: str) -> None:
    """Called before ``name`` is compiled: raises :class:`NotKept` within :func:`kept_only`."""
    if only_kept():
        raise NotKept(name)
