"""Runs a compiled worker on several threads: torch's own, or threads of this module.

OpenMP's threads spin for a while after each of torch's operators, so that other threads wait for a core. The worker can
be given to OpenMP's threads instead, through the library that torch has loaded (``GOMP_parallel``, the function that
compilers call). That call returns only once all of OpenMP's threads have taken part. Threads of this module need not be
waited for where they have not begun, which is faster where other programs use the cores. Several callers may use either
at the same time.
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

from tilewise.kernels.cpu.recording import recorder
from tilewise.machine.device import cpu_count

__all__ = ["forked", "has_openmp", "openmp_addresses", "share_out"]

WORKER = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


def share_out(worker: int, data: int, threads: int, openmp: bool) -> None:
    """Call the compiled function at ``worker`` with the address ``data`` on up to ``threads`` threads, or a few more.

    The threads divide the work among them by counters in ``data``, so that all is done however many threads come.
    ``openmp`` asks for torch's threads, where they can be reached.
    """
    if recorder.events is not None:
        recorder.launched(worker, data, threads)
    parallel = _parallel() if openmp and threads > 1 else None
    if threads < 2:
        WORKER(worker)(data)
    elif parallel is None:
        _on_ours(worker, data, threads)
    else:
        # A smaller team than torch's would make OpenMP end the threads that are not in it.
        parallel(worker, data, max(threads, torch.get_num_threads()), 0)


def has_openmp() -> bool:
    """Whether torch's own threads can be reached."""
    return _parallel() is not None


def openmp_addresses() -> tuple[int, int]:
    """The addresses of ``GOMP_parallel`` and ``omp_get_num_threads`` for native code.

    They are 0 where torch's own threads cannot be reached.
    """
    library = _library()
    if library is None:
        return 0, 0
    first, second = (
        ctypes.cast(f, ctypes.c_void_p).value for f in (library.GOMP_parallel, library.omp_get_num_threads)
    )
    return first or 0, second or 0


def forked() -> bool:
    """Whether this process was forked from another one that had loaded this module."""
    return _forked


@functools.cache
def _parallel() -> Callable[[int, int, int, int], None] | None:
    """``GOMP_parallel`` of torch's OpenMP, if it can be reached."""
    library = _library()
    if library is None:
        return None
    parallel: Any = library.GOMP_parallel
    parallel.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
    parallel.restype = None
    return parallel


@functools.cache
def _library() -> ctypes.CDLL | None:
    """GCC's OpenMP where it comes with torch, which may not use another library."""
    if torch.backends.openmp.is_available() and not _forked:
        for path in sorted((Path(torch.__file__).parent / "lib").glob("libgomp*.so*")):
            library = ctypes.CDLL(str(path))
            if hasattr(library, "GOMP_parallel"):
                return library
    return None


@functools.cache
def _helpers() -> ThreadPoolExecutor:
    """The threads of this module."""
    return ThreadPoolExecutor(max(1, cpu_count() - 1), thread_name_prefix="tilewise")


def _on_ours(worker: int, data: int, threads: int) -> None:
    """Run the worker on this module's threads and the caller's, without waiting for threads that have not begun."""
    call = WORKER(worker)
    futures = [_helpers().submit(call, data) for _ in range(threads - 1)]
    call(data)
    for future in futures:
        if not future.cancel():
            future.result()


_forked = False


def _after_fork() -> None:
    """Forget threads in a forked process: it has none of its parent's, and OpenMP's library cannot start new ones."""
    global _forked
    _forked = True
    _library.cache_clear()
    _parallel.cache_clear()
    _helpers.cache_clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
