"""A compiled worker on several threads: torch's own, or ours.

OpenMP's threads spin for a while after each of torch's operators, so that others beside them wait for a core. The
worker can be handed to them instead, through the OpenMP library that torch has loaded (``GOMP_parallel``, the entry
that compilers call); but all of them must come by before that returns, while of ours nobody waits for one that has not
begun, which is faster where other programs have taken cores. Any number of callers may be at either.
"""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

__all__ = ["has_openmp", "share_out"]

WORKER = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


def share_out(worker: int, data: int, threads: int, openmp: bool) -> None:
    """Call the compiled function at ``worker`` with the address ``data`` on up to ``threads`` threads, or a few more.

    They share out what there is to do by counting in ``data``, so that however many come all is done. ``openmp`` asks
    for torch's threads, where there are some.
    """
    parallel = _parallel() if openmp and threads > 1 else None
    if threads < 2:
        WORKER(worker)(data)
    elif parallel is None:
        _on_ours(worker, data, threads)
    else:
        # A team smaller than torch's would end the threads that it leaves out.
        parallel(worker, data, max(threads, torch.get_num_threads()), 0)


def has_openmp() -> bool:
    """Whether torch's own threads can be reached."""
    return _parallel() is not None


@functools.cache
def _parallel() -> Callable[[int, int, int, int], None] | None:
    """``GOMP_parallel`` of the library that comes with torch; any other may not be the one that torch uses."""
    if torch.backends.openmp.is_available() and not _forked:
        for path in sorted((Path(torch.__file__).parent / "lib").glob("libgomp*.so*")):
            function: Any = getattr(ctypes.CDLL(str(path)), "GOMP_parallel", None)
            if function is not None:
                function.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
                function.restype = None
                found: Callable[[int, int, int, int], None] = function
                return found
    return None


@functools.cache
def _helpers() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(max(1, (os.cpu_count() or 2) - 1), thread_name_prefix="tilewise")


def _on_ours(worker: int, data: int, threads: int) -> None:
    """Whoever calls works too, and never waits for a helper that has not begun."""
    call = WORKER(worker)
    futures = [_helpers().submit(call, data) for _ in range(threads - 1)]
    call(data)
    for future in futures:
        if not future.cancel():
            future.result()


_forked = False


def _after_fork() -> None:
    """A child has none of its parent's threads, and OpenMP's library cannot make new ones there."""
    global _forked
    _forked = True
    _parallel.cache_clear()
    _helpers.cache_clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
