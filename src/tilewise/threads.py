"""Python callables at once, each on a thread of its own with its own bound on torch's threads.

How many threads an operator takes is a thread's own setting in OpenMP (the ICV ``nthreads``) and in MKL, which torch
sets once in each thread, when that first runs an operator; ``torch.set_num_threads`` would also tell later threads.
Threads that nobody else uses can so be given other numbers, and nothing of any caller has to be changed.

Where each callable has one thread, torch's own team takes them, through the OpenMP library that torch has loaded
(``GOMP_parallel``, the entry that compilers call): its threads spin for some milliseconds after each of torch's
operators, and others would wait beside them for a core. There OpenMP's setting ends with the parallel region, and MKL's
is put back.
"""

from __future__ import annotations

import ctypes
import functools
import os
import queue
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

__all__ = ["at_once", "bounds_threads", "with_threads"]

BODY = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
LIBRARIES = ("libtorch_cpu.so", "libtorch_cpu.dylib")


def at_once(job: Callable[[int], object], count: int, threads: int) -> None:
    """``job(0)`` to ``job(count - 1)`` at once, on ``threads`` threads together, torch's inside them included.

    With fewer threads than jobs some follow others, with one all run in the caller. Each has the caller's inference and
    gradient modes. Returns when all have ended, then raises the exception of the first job that raised one, behind
    which none is begun on its thread.
    """
    workers = min(count, threads)
    if workers < 2:
        for index in range(count):
            job(index)
        return
    share, more = divmod(threads, workers)
    modes = torch.is_inference_mode_enabled(), torch.is_grad_enabled()
    parallel = _parallel() if share == 1 else None
    if parallel is not None:  # a smaller team than torch's would end the threads that it leaves out
        _run_on_team(parallel, [_Task(job, range(index, index + 1), 1, modes) for index in range(count)], threads)
    else:
        _run([_Task(job, range(index, count, workers), share + (index < more), modes) for index in range(workers)])


def with_threads(job: Callable[[], object], threads: int) -> None:
    """``job()`` on a thread where torch has so many threads; its exception is the caller's."""
    modes = torch.is_inference_mode_enabled(), torch.is_grad_enabled()
    _run([_Task(lambda _: job(), range(1), threads, modes)])


def bounds_threads() -> bool:
    """Whether torch's threads can be bounded for one thread."""
    return bool(_setters())


class _Task:
    """Some jobs, one after the other, on one worker."""

    __slots__ = ("_claim", "_ended", "_errors", "_indices", "_job", "_modes", "threads")

    def __init__(
        self, job: Callable[[int], object], indices: Sequence[int], threads: int, modes: tuple[bool, bool]
    ) -> None:
        self._job, self._indices, self._modes = job, indices, modes
        self._errors: list[tuple[int, BaseException]] = []
        self._claim, self._ended = threading.Lock(), threading.Event()
        self.threads = threads

    def run(self) -> None:
        """The jobs, unless :meth:`settle` came first."""
        if not self._claim.acquire(blocking=False):
            return
        inference, grad = self._modes
        done = 0
        try:
            with torch.inference_mode(inference), torch.set_grad_enabled(grad):
                for index in self._indices:
                    done = index
                    self._job(index)
        except BaseException as error:  # the caller's
            self._errors.append((done, error))
        finally:
            self._ended.set()

    def wait(self) -> None:
        """Until it has ended."""
        self._ended.wait()

    def has_ended(self) -> bool:
        """Whether all its jobs were run, or raised."""
        return self._ended.is_set()

    def settle(self) -> None:
        """Have it never begin, or wait until it has ended."""
        if not self._claim.acquire(blocking=False):
            self._ended.wait()

    def errors(self) -> list[tuple[int, BaseException]]:
        """What was raised by which job; handed over, so that no frame is kept."""
        found, self._errors = self._errors, []
        return found


class _Worker(threading.Thread):
    """Waits for tasks. A thread of ours alone: its settings are nobody else's."""

    def __init__(self) -> None:
        super().__init__(name="tilewise-part", daemon=True)
        self.tasks: queue.SimpleQueue[_Task] = queue.SimpleQueue()
        self._threads = 0

    def run(self) -> None:
        torch.get_num_threads()  # torch sets a thread's number when first asked, and then no more
        while True:
            task = self.tasks.get()
            if task.threads != self._threads:
                self._threads = task.threads
                for setter in _setters():
                    setter(task.threads)
            task.run()
            del task  # what it holds is the caller's


_idle: list[_Worker] = []
"""The last to end is the first to be taken. As many are kept as ever ran at once: nobody waits for a worker."""


def _run(tasks: Sequence[_Task]) -> None:
    """One worker for each task; all are waited for, whatever happens, as they write into what the caller owns."""
    workers: list[_Worker] = []
    try:
        workers.extend(_take() for _ in tasks)
        for worker, task in zip(workers, tasks, strict=True):
            worker.tasks.put(task)
        for task in tasks:
            task.wait()
    except BaseException:  # no thread can be started, or an interrupt
        for task in tasks:
            task.settle()
        raise
    finally:
        _idle.extend(workers)
    _raise_first(tasks)


def _raise_first(tasks: Sequence[_Task]) -> None:
    errors = sorted((found for task in tasks for found in task.errors()), key=lambda found: found[0])
    if errors:
        raise errors[0][1]


def _run_on_team(parallel: Callable[..., None], tasks: Sequence[_Task], threads: int) -> None:
    """The tasks on torch's team of so many threads, the caller among them; they share them out."""

    def work(_: object) -> None:
        torch.get_num_threads()  # as in a worker
        before = [setter(1) for setter in _setters()]
        try:
            for task in tasks:
                task.run()
        finally:
            for setter, value in list(zip(_setters(), before, strict=True))[1:]:
                setter(value)

    parallel(BODY(work), None, threads, 0)
    _raise_first(tasks)
    if not all(task.has_ended() for task in tasks):
        raise KeyboardInterrupt  # between two tasks, where no exception leaves a team


def _take() -> _Worker:
    try:
        return _idle.pop()
    except IndexError:
        worker = _Worker()
        worker.start()
        return worker


@functools.cache
def _setters() -> tuple[Callable[[int], Any], ...]:
    """What sets a thread's numbers, looked up through torch's own library; empty where not all there is is found."""
    if not torch.backends.openmp.is_available():  # type: ignore[no-untyped-call]
        return ()
    names = ["omp_set_num_threads"]
    if torch.backends.mkl.is_available():  # type: ignore[no-untyped-call]
        names.append("MKL_Set_Num_Threads_Local")
    found: list[Any] = [getattr(_library(), name, None) for name in names]
    if None in found:
        return ()
    for setter in found:
        setter.argtypes = [ctypes.c_int]
    return tuple(found)


@functools.cache
def _parallel() -> Callable[..., None] | None:
    """``GOMP_parallel`` of the OpenMP library that torch uses."""
    function: Any = getattr(_library(), "GOMP_parallel", None)
    if _forked or not _setters() or function is None:
        return None
    function.argtypes = [BODY, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
    function.restype = None
    found: Callable[..., None] = function
    return found


@functools.cache
def _library() -> ctypes.CDLL | None:
    """torch's own, through which what it was linked with is found and nothing else of that name."""
    paths = (Path(torch.__file__).parent / "lib" / name for name in LIBRARIES)
    return next((ctypes.CDLL(str(path)) for path in paths if path.exists()), None)


_forked = False


def _after_fork() -> None:
    """A child has none of its parent's threads, and OpenMP's library would wait for those of its team."""
    global _forked
    _forked = True
    _parallel.cache_clear()
    _idle.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
