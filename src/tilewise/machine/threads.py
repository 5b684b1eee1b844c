"""Python callables run at once, each on a thread of its own with its own limit on torch's threads.

How many threads an operator takes is a setting of each thread, in OpenMP (the ICV ``nthreads``) and in MKL. torch sets
it once in each thread, when that first runs an operator; ``torch.set_num_threads`` would also change later threads.
Threads that nobody else uses can be given other numbers, so that no setting of any caller has to be changed.

Where each callable has one thread, torch's own team takes them, through the OpenMP library that torch has loaded
(``GOMP_parallel``, the entry that compilers call). Its threads spin for some milliseconds after each of torch's
operators, and other threads would compete with them for cores. There OpenMP's setting ends with the parallel region,
and MKL's is put back.
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

__all__ = ["at_once", "bounds_threads", "side_by_side", "with_threads"]

BODY = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
LIBRARIES = ("libtorch_cpu.so", "libtorch_cpu.dylib")


def at_once(job: Callable[[int], object], count: int, threads: int) -> None:
    """Run ``job(0)`` to ``job(count - 1)`` at once on ``threads`` threads together, torch's inside them included.

    With fewer threads than jobs some jobs follow others; with one thread all run in the caller. Each job has the
    caller's inference and gradient modes. Returns when all have ended, then raises the exception of the first job that
    raised one. After a job raised, no further job is begun on its thread.
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
    """Run ``job()`` on a thread where torch has ``threads`` threads. Raises what the job raises."""
    modes = torch.is_inference_mode_enabled(), torch.is_grad_enabled()
    _run([_Task(lambda _: job(), range(1), threads, modes)])


def side_by_side(jobs: Sequence[Callable[[], object]], threads: Sequence[int]) -> None:
    """Run different ``jobs`` at once, each on a thread of its own where torch has as many ``threads`` as are named.

    Each job has the caller's inference and gradient modes. All are waited for, whatever happens, as they may write into
    the caller's memory. Then the exception of the first job that raised one is raised, or the interrupt that came.
    """
    modes = torch.is_inference_mode_enabled(), torch.is_grad_enabled()
    _run([_Task(lambda index: jobs[index](), (index,), count, modes) for index, count in enumerate(threads)])


def bounds_threads() -> bool:
    """Whether the number of torch's threads can be limited for one thread."""
    return bool(_setters())


class _Task:
    """Some jobs for one worker, run one after the other."""

    __slots__ = ("_claim", "_ended", "_errors", "_indices", "_job", "_modes", "threads")

    def __init__(
        self, job: Callable[[int], object], indices: Sequence[int], threads: int, modes: tuple[bool, bool]
    ) -> None:
        self._job, self._indices, self._modes = job, indices, modes
        self._errors: list[tuple[int, BaseException]] = []
        self._claim, self._ended = threading.Lock(), threading.Event()
        self.threads = threads

    def run(self) -> None:
        """Run the jobs, unless :meth:`cancel_or_wait` was called before."""
        if not self._claim.acquire(blocking=False):
            return
        inference, grad = self._modes
        running = 0
        try:
            with torch.inference_mode(inference), torch.set_grad_enabled(grad):
                for index in self._indices:
                    running = index
                    self._job(index)
        except BaseException as error:  # the caller's
            self._errors.append((running, error))
        finally:
            self._ended.set()

    def wait(self) -> None:
        """Wait until the task has ended."""
        self._ended.wait()

    def has_ended(self) -> bool:
        """Whether all its jobs were run or one raised."""
        return self._ended.is_set()

    def cancel_or_wait(self) -> None:
        """Keep the task from beginning, or wait until it has ended where it has begun."""
        if not self._claim.acquire(blocking=False):
            self._ended.wait()

    def errors(self) -> list[tuple[int, BaseException]]:
        """Pairs of a job's number and what it raised. They are handed over, so that no stack frame is kept."""
        errors, self._errors = self._errors, []
        return errors


class _Worker(threading.Thread):
    """A thread that waits for tasks. Nobody else uses it, so its settings may be changed."""

    def __init__(self) -> None:
        super().__init__(name="tilewise-part", daemon=True)
        self.tasks: queue.SimpleQueue[_Task] = queue.SimpleQueue()
        self.threads = 0
        """Torch's threads in the last task."""

    def run(self) -> None:
        """Run tasks for ever, each with its number of torch's threads."""
        torch.get_num_threads()  # torch sets a thread's number when first asked, and then no more
        while True:
            task = self.tasks.get()
            if task.threads != self.threads:
                self.threads = task.threads
                for setter in _setters():
                    setter(task.threads)
            task.run()
            del task  # what it holds is the caller's


_idle: list[_Worker] = []
"""Idle workers; the last to end is taken first. As many are kept as ever ran at once, so none is waited for."""


def _run(tasks: Sequence[_Task]) -> None:
    """Run each task on a worker. All are waited for, whatever happens, as they write into the caller's memory."""
    workers: list[_Worker] = []
    try:
        workers.extend(_take(task.threads) for task in tasks)
        for worker, task in zip(workers, tasks, strict=True):
            worker.tasks.put(task)
        for task in tasks:
            task.wait()
    except BaseException:  # no thread can be started, or an interrupt
        for task in tasks:
            task.cancel_or_wait()
        raise
    finally:
        _idle.extend(workers)
    _raise_first(tasks)


def _raise_first(tasks: Sequence[_Task]) -> None:
    """Raise what the job with the least number raised, if any did."""
    errors = sorted((failure for task in tasks for failure in task.errors()), key=lambda failure: failure[0])
    if errors:
        raise errors[0][1]


def _run_on_team(parallel: Callable[..., None], tasks: Sequence[_Task], threads: int) -> None:
    """Run the tasks on torch's team of ``threads`` threads, the caller among them; idle threads take the next task."""
    caller, left = threading.get_ident(), set[int]()

    def work(_: object) -> None:
        torch.get_num_threads()  # as in a worker
        before = [setter(1) for setter in _setters()]
        try:
            for task in tasks:
                task.run()
        finally:
            for setter, value in list(zip(_setters(), before, strict=True))[1:]:
                setter(value)
        left.add(threading.get_ident())

    parallel(BODY(work), None, threads, 0)
    _raise_first(tasks)
    if caller not in left or not all(task.has_ended() for task in tasks):
        raise KeyboardInterrupt  # before, between or after tasks, where no exception leaves a team


def _take(threads: int) -> _Worker:
    """An idle worker, or a new one.

    One that had as many ``threads`` before is preferred: OpenMP ends and starts threads where the number changes.
    """
    try:
        worker = next((each for each in reversed(_idle) if each.threads == threads), None)
        if worker is None:
            return _idle.pop()
        _idle.remove(worker)
        return worker
    except (IndexError, ValueError, RuntimeError):  # none is idle, or another thread took it meanwhile
        worker = _Worker()
        worker.start()
        return worker


@functools.cache
def _setters() -> tuple[Callable[[int], Any], ...]:
    """Functions that set a thread's numbers of threads, from torch's own libraries; empty unless all are found."""
    if not torch.backends.openmp.is_available():
        return ()
    names = ["omp_set_num_threads"]
    if torch.backends.mkl.is_available():
        names.append("MKL_Set_Num_Threads_Local")
    setters: list[Any] = [getattr(_library(), name, None) for name in names]
    if None in setters:
        return ()
    for setter in setters:
        setter.argtypes = [ctypes.c_int]
    return tuple(setters)


@functools.cache
def _parallel() -> Callable[..., None] | None:
    """``GOMP_parallel`` of the OpenMP library that torch uses; ``None`` where it cannot be used."""
    function: Any = getattr(_library(), "GOMP_parallel", None)
    if _forked or not _setters() or function is None:
        return None
    function.argtypes = [BODY, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
    function.restype = None
    parallel: Callable[..., None] = function
    return parallel


@functools.cache
def _library() -> ctypes.CDLL | None:
    """torch's own library, through which the libraries it was linked with are found, and no others."""
    paths = (Path(torch.__file__).parent / "lib" / name for name in LIBRARIES)
    return next((ctypes.CDLL(str(path)) for path in paths if path.exists()), None)


_forked = False


def _after_fork() -> None:
    """Forget threads: a child has none of its parent's, and OpenMP's library would wait for those of its team."""
    global _forked
    _forked = True
    _parallel.cache_clear()
    _idle.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
