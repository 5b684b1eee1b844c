"""Triton's compiler in worker processes, which fill its cache on disk.

Triton's front end is Python, so threads that compile at once take turns. While a pool is :func:`opened`, a kernel that
a served thread compiles is first compiled by a worker into Triton's cache on disk, and then loaded from there. Workers
touch no GPU. They end with their parent, however that ends, and when there was nothing to compile for a while.

What a worker cannot do is done in this process as if there were none, and the reason is reported once.
"""

from __future__ import annotations

import atexit
import concurrent.futures
import contextlib
import json
import os
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from tilewise.kernels.building.jobs import describe
from tilewise.kernels.building.kept import NotKept, kept_only, only_kept, refuse
from tilewise.kernels.building.one_worker import Worker, environment
from tilewise.machine.device import cpu_count

__all__ = [
    "VARIABLE",
    "CompileFailed",
    "Lost",
    "Pool",
    "all_of",
    "close",
    "collecting",
    "compile_cuda",
    "is_collecting",
    "most_workers",
    "opened",
    "reroute",
]

VARIABLE = "TILEWISE_COMPILE_WORKERS"
"""The environment variable that limits the number of worker processes."""
MOST_WORKERS = 16
MOST_STRAYS = 3
"""Kernels that workers compile for nothing before none is asked any more."""
IDLE_S = 60.0
"""Seconds without work after which workers are ended."""
ENDING_S = 1.0
"""Seconds that a worker which closed its pipe gets to end by itself, so that its exit status tells why."""


T = TypeVar("T")


class CompileFailed(RuntimeError):
    """A worker could not compile a kernel. Compiling it in this process raises Triton's own error."""


class Lost(Exception):
    """A worker can no longer be used."""


def most_workers() -> int:
    """How many processes may compile at a time, 0 for none beside this one. Raises ``ValueError``."""
    asked = os.environ.get(VARIABLE, "").strip()
    if not asked:
        return min(MOST_WORKERS, cpu_count())
    if not asked.isdecimal():
        raise ValueError(f"{VARIABLE}={asked!r}: a number of processes would do, 0 for none beside this one")
    return int(asked)


@contextlib.contextmanager
def opened(jobs: int, *, gently: bool = False) -> Iterator[Pool]:
    """Open the process's pool for at most ``jobs`` compilations at once. Its workers are kept for the next time.

    With ``gently`` a program goes on beside it: workers have a low priority and leave a core free, if there are two. If
    the block is left by an exception they are ended at once, and what waits for them fails.
    """
    pool = _take(jobs, min(most_workers(), max(1, cpu_count() - 1)) if gently else most_workers())
    pool.gently = gently
    try:
        yield pool
    except BaseException:
        pool.stop()
        raise
    finally:
        _leave(pool)


@contextlib.contextmanager
def collecting() -> Iterator[list[str]]:
    """Within the block kernels are not compiled: the list gets a job for :meth:`Pool.ask` for what would have been.

    The block ends at the first program that lacks any, with all kernels that it lacks.
    """
    jobs: list[str] = []
    _served.collected = jobs
    try:
        with contextlib.suppress(NotKept), kept_only():
            yield jobs
    finally:
        _served.collected = None


def is_collecting() -> bool:
    """Whether this thread is in a block of :func:`collecting`."""
    return getattr(_served, "collected", None) is not None


def all_of(loads: Sequence[Callable[[], T]]) -> list[T]:
    """What each of ``loads`` returns. Where missing kernels are collected, all are called before one is refused."""
    found: list[T] = []
    missing: NotKept | None = None
    for load in loads:
        try:
            found.append(load())
        except NotKept as error:
            if not is_collecting():
                raise
            missing = error
    if missing is not None:
        raise missing
    return found


def compile_cuda(text: str, architecture: str) -> bool:
    """Have a worker of the pool that serves this thread compile a program in CUDA C++ and keep it on disk.

    Returns whether one did. Within :func:`kept_only` it is refused, and collected where that is asked for. Raises
    :class:`CompileFailed`.
    """
    job = json.dumps({"cuda": text, "architecture": architecture, "environment": environment()})
    if is_collecting():
        _served.collected.append(job)
    refuse("CUDA C++")
    pool: Pool | None = getattr(_served, "pool", None)
    return pool is not None and pool.have_done(job, "a kernel in CUDA C++") is not None


def reroute(kernel: Any) -> None:
    """Have Triton compile ``kernel`` for the current device through the pool that serves this thread, if one does.

    A kernel in Triton's cache on disk is loaded by this process. Within :func:`kept_only` others are refused.
    """
    if getattr(_served, "pool", None) is None and not only_kept():
        return
    try:
        from triton.runtime import driver

        with _lock:
            # Triton's launcher calls what it keeps as ``compile``, and puts it there on its first look at a device.
            _ = kernel.device_caches[driver.active.get_current_device()]
            if not isinstance(kernel.compile, _Rerouted):
                kernel.compile = _Rerouted(kernel.compile)
    except AttributeError as error:
        _tell(f"this version of Triton compiles kernels in another way than is known here ({error})")


class _Absent(Exception):
    """Triton's cache on disk has no entry for a kernel."""


class _Rerouted:
    """Triton's ``compile``, which first has a worker fill the cache where it has no entry."""

    def __init__(self, original: Any) -> None:
        self._original = original

    def __call__(self, source: Any, *rest: Any, **options: Any) -> Any:
        pool: Pool | None = getattr(_served, "pool", None)
        if pool is None and not only_kept():
            return self._original(source, *rest, **options)
        with contextlib.suppress(_Absent):
            return self._kept(source, *rest, **options)
        collected: list[str] | None = getattr(_served, "collected", None)
        if collected is not None and not rest and options.keys() == {"target", "options"}:
            job = _job(source, options["target"], options["options"])
            collected += [] if job is None else [job]
        refuse(getattr(source, "name", "a kernel"))
        filled = None
        if pool is not None and not rest and options.keys() == {"target", "options"}:
            filled = pool.fill(source, options["target"], options["options"])
        elif pool is not None:
            _tell(f"this version of Triton compiles with other arguments ({len(rest)} and {sorted(options)})")
        kernel = self._original(source, *rest, **options)
        if pool is not None and filled is not None and filled != getattr(kernel, "hash", None):
            pool.stray(f"a worker's entry of Triton's cache is not the one that is looked for ({source.name})")
        return kernel

    def _kept(self, source: Any, *rest: Any, **options: Any) -> Any:
        """The kernel from Triton's cache on disk. Raises :class:`_Absent` where it would be compiled.

        The key of an entry is Triton's own affair. Triton asks a source for its intermediate code only after it found
        no entry.
        """

        def absent(*_: Any) -> None:
            """Stop the compilation: the cache has no entry."""
            raise _Absent

        source.make_ir = absent
        try:
            return self._original(source, *rest, **options)
        finally:
            del source.make_ir


def _job(source: Any, target: Any, options: Any) -> str | None:
    """What a worker is asked to compile; ``None`` for what it cannot be told, which is reported once."""
    try:
        return json.dumps({**describe(source, target, options), "environment": environment()})
    except (AttributeError, TypeError) as error:
        _tell(f"{source.name} cannot be told to a worker ({error})")
        return None


class Pool:
    """Up to ``size`` worker processes, all started when the first is needed. Threads may share it."""

    def __init__(self) -> None:
        self.size = self.users = 0
        self.stopped = self.gently = False
        self._useless = False
        self._strays = 0
        self._needed = 0
        """Jobs without a worker that a thread needs at once: others wait for them."""
        self._workers: list[Worker] = []
        self._idle: list[Worker] = []
        self._changed = threading.Condition()
        self._asked: dict[str, concurrent.futures.Future[dict[str, str]]] = {}

    @contextlib.contextmanager
    def serving(self) -> Iterator[None]:
        """Serve what this thread compiles within the block."""
        _served.pool = self
        try:
            yield
        finally:
            _served.pool = None

    def fill(self, source: Any, target: Any, options: Any) -> str | None:
        """Have a worker compile into Triton's cache and return the entry's hash; ``None`` where no worker can do it.

        Raises :class:`CompileFailed`.
        """
        job = _job(source, target, options) if self.works else None
        return None if job is None else self.have_done(job, source.name)

    @property
    def works(self) -> bool:
        """Whether workers may be asked."""
        return self.size > 0 and not self._useless

    def have_done(self, job: str, name: str) -> str | None:
        """The hash of the entry that a worker makes for a job; ``None`` where none can. Raises :class:`CompileFailed`.

        ``name`` is that of the kernel.
        """
        if not self.works:
            return None
        try:
            answer = self.ask(job)
        except Lost as lost:
            if self.stopped:
                raise CompileFailed("given up: the workers were ended") from lost
            _tell(str(lost))
            return None
        if "failed" in answer:
            raise CompileFailed(answer["failed"])
        if "refused" in answer:
            _tell(f"a worker refuses what it is asked of {name}: {answer['refused']}")
        return answer.get("hash")

    def compile_all(self, jobs: Sequence[str]) -> Callable[[], bool]:
        """Begin to have all ``jobs`` done, and return what tells whether all are. What fails is not reported here."""
        if not self.works:
            return lambda: True

        # Not of a pool of threads, for which the end of the program would wait.
        threads = [threading.Thread(target=self.try_to_ask, args=(job,), daemon=True) for job in jobs]
        for thread in threads:
            thread.start()
        return lambda: not any(thread.is_alive() for thread in threads)

    def try_to_ask(self, job: str, *, waits: bool = False) -> None:
        """Have a job done, if a worker can; what comes of it shows where the kernel is needed.

        One that ``waits`` gets a worker when nothing else needs one.
        """
        if self.works:
            with contextlib.suppress(Lost):
                self.ask(job, waits=waits)

    def ask(self, job: str, *, waits: bool = False) -> dict[str, str]:
        """A worker's answer to a job, which ``waits`` as for :meth:`try_to_ask`.

        A job that several threads ask for at once is done once. Raises :class:`Lost`.
        """
        with self._changed:
            pending = self._asked.get(job)
            if pending is None:
                answer = self._asked[job] = concurrent.futures.Future()
        if pending is not None:
            return pending.result()
        try:
            answer.set_result(self._ask(job, waits))
        except BaseException as error:
            answer.set_exception(error)
        finally:
            with self._changed:
                del self._asked[job]
        return answer.result()

    def _ask(self, job: str, waits: bool) -> dict[str, str]:
        """The answer of an idle worker, waiting until there is one. Raises :class:`Lost`."""
        with self._changed:
            self._start()
            self._needed += not waits
            try:
                self._changed.wait_for(lambda: (self._idle and not (waits and self._needed)) or not self._workers)
            finally:
                self._needed -= not waits
                self._changed.notify_all()
            if not self._idle:
                raise Lost("no worker is left")
            worker = self._idle.pop()
        try:
            answer = worker.ask(job)
        except (OSError, EOFError, ValueError) as error:
            status = worker.end(ENDING_S if isinstance(error, EOFError) else 0.0)
            text = f"a worker was lost ({str(error) or 'it ended'}, exit status {status})"
            with self._changed:
                if worker in self._workers:
                    self._workers.remove(worker)
                if not worker.ready:
                    self._useless = True  # others would not start either
                    text += " before it was ready, and no other is asked"
                self._changed.notify_all()
            raise Lost(text) from error
        with self._changed:
            kept = not self.stopped and len(self._workers) <= self.size
            if kept:
                self._idle.append(worker)
            elif worker in self._workers:
                self._workers.remove(worker)
            self._changed.notify_all()
        if not kept:
            worker.end()
        return answer

    def _start(self) -> None:
        """Bring the number of workers to ``size``, replacing those that have ended."""
        if self.stopped or self._useless:
            return
        for worker in [w for w in self._idle if w.process.poll() is not None]:
            worker.end()
            self._idle.remove(worker)
            self._workers.remove(worker)
        try:
            while len(self._workers) < self.size:
                worker = Worker()
                if self.gently:
                    worker.step_back()
                self._workers.append(worker)
                self._idle.append(worker)
        except OSError as error:
            self.size = len(self._workers)
            _tell(f"no more than {self.size} workers can be started ({error})")

    def processes(self) -> list[int]:
        """The workers' process ids."""
        with self._changed:
            return [worker.process.pid for worker in self._workers]

    def resize(self, size: int) -> None:
        """Keep ``size`` workers from now on; busy ones beyond that finish their job first."""
        with self._changed:
            self.size = size
            extra = max(0, len(self._workers) - size)
            for worker in self._idle[:extra]:
                worker.end()
                self._idle.remove(worker)
                self._workers.remove(worker)

    def stray(self, reason: str) -> None:
        """Count a kernel that was compiled for nothing, and report why. From some on, this process compiles itself."""
        self._strays += 1
        self._useless |= self._strays >= MOST_STRAYS
        _tell(reason)

    def stop(self) -> None:
        """End all workers now. What waits for one fails, and so does every later request."""
        with self._changed:
            self.stopped = True
            workers, idle = self._workers, self._idle
            self._workers, self._idle = [], []
            self._changed.notify_all()
        for worker in workers:
            worker.process.kill()
        for worker in idle:
            worker.end()  # threads that wait for others end those

    def forget(self) -> None:
        """In a forked child, drop the parent's workers and close the pipes to them."""
        self.stopped = True
        for worker in self._workers:
            worker.forget()


_lock = threading.RLock()
_pool: Pool | None = None
_served = threading.local()
_told: set[str] = set()
_telling = threading.Lock()
_closing: threading.Timer | None = None


def _take(jobs: int, most: int) -> Pool:
    """The process's pool, with room for ``jobs`` but no more than ``most`` workers."""
    global _closing, _pool
    with _lock:
        if _closing is not None:
            _closing.cancel()
            _closing = None
        if _pool is None or _pool.stopped:
            _pool = Pool()
        _pool.resize(min(most, max(jobs, _pool.size)))
        _pool.users += 1
        return _pool


def _leave(pool: Pool) -> None:
    """Give the pool back; unused workers are ended after a while."""
    global _closing
    with _lock:
        pool.users -= 1
        if pool is _pool and not pool.users:
            _closing = threading.Timer(IDLE_S, _close_unused)
            _closing.daemon = True
            _closing.start()


def _close_unused() -> None:
    """End the workers unless the pool is in use."""
    with _lock:
        if _pool is not None and not _pool.users:
            close()


def close() -> None:
    """End all workers now. The next compilation starts new ones."""
    global _pool
    with _lock:
        if _pool is not None:
            _pool.stop()
        _pool = None


def _forget() -> None:
    """In a forked child: drop the pool, which is the parent's."""
    global _lock, _telling, _closing, _pool
    if _pool is not None:
        _pool.forget()
    _lock, _telling, _closing, _pool = threading.RLock(), threading.Lock(), None, None
    _served.pool = None


def _tell(reason: str) -> None:
    """Warn once that kernels are compiled in this process, and why."""
    with _telling:  # a lock of its own: others may be held
        if reason in _told:
            return
        _told.add(reason)
    warnings.warn(f"Triton kernels are compiled in this process: {reason}", RuntimeWarning, stacklevel=3)


atexit.register(close)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
