"""Telling other ranks that this program ends, whether with an error or in order."""

from __future__ import annotations

import atexit
import functools
import os
import sys
from collections.abc import Callable
from multiprocessing import util
from types import TracebackType

__all__ = ["on_end"]

FIRST = 1000
"""Among what a process of ``multiprocessing`` does at its end: before queues and pools wait for anybody."""


@functools.cache
def on_end(failed: Callable[[BaseException], object], ended: Callable[[], object]) -> None:
    """Call ``failed`` with an error that nobody catches, and ``ended`` at the program's end.

    Calls with the same two functions register them once. Neither is called where ``os._exit`` or a signal ends the
    program.
    """
    before = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        """Report the error, then show it as before."""
        failed(error)
        before(kind, error, trace)

    def finish() -> None:
        """Report the error that ends a process of ``multiprocessing``, and its end."""
        # A process of multiprocessing gets here with what its function raised, which sys.excepthook never sees.
        error = sys.exc_info()[1]
        if isinstance(error, SystemExit) and error.__context__ is not None:
            error = error.__context__  # torch.multiprocessing.spawn turns every error into an exit
        if error is not None and not (isinstance(error, SystemExit) and error.code in (None, 0)):
            failed(error)
        ended()

    sys.excepthook = hook
    atexit.register(ended)
    util.Finalize(None, finish, exitpriority=FIRST)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=on_end.cache_clear)  # multiprocessing forgets there what it was to do at the end
