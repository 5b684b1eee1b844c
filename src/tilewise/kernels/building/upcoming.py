"""Kernels that will be needed: worker processes compile them while this process does other work."""

from __future__ import annotations

import contextlib
import heapq
import itertools
import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence

from tilewise.kernels.building import workers
from tilewise.kernels.building.target import Architecture, compiling_for
from tilewise.machine import load

__all__ = ["Upcoming", "upcoming"]

SPARE = 1
"""Workers that are left for what is needed at once."""
ENOUGH = 3
"""Kernels for each worker that are wanted before they are needed."""
ROUNDS = 16
"""Most times that a load is begun: each ends at the first program that lacks a kernel."""
UNKNOWN_S = 1.0
"""Seconds that a kernel is taken to need before one of its name was compiled."""
LOOK_S = 0.01
"""Seconds between two looks whether a kernel is there."""


class Upcoming:
    """Kernels that loads will need, in the order in which they were added; of those added together the longest first.

    A load is a function that loads kernels for a GPU ``architecture``, each refused where it is not compiled. It is
    called again when what it lacked is there, until it lacks nothing. ``pool`` compiles. One thread uses this object.
    """

    def __init__(self, pool: workers.Pool, architecture: Architecture) -> None:
        self._pool, self._architecture = pool, architecture
        self._changed = threading.Condition()
        self._queue: list[tuple[int, float, int, str]] = []
        self._numbers = itertools.count()
        self._places: dict[str, int] = {}
        """Where in the order each name was added."""
        self._asked: set[str] = set()
        """Jobs that were queued at any time."""
        self._done: set[str] = set()
        self._took: dict[str, tuple[int, float]] = {}
        """Of each kernel's name, how many were compiled, and in how many seconds together."""
        self._open: dict[str, list[tuple[Callable[[], object] | None, list[str], int]]] = {}
        """By name, loads that lack something, what they lack and how often they were begun; ``None`` for mere jobs."""
        self._threads: list[threading.Thread] = []
        self._closed = False

    def add(self, name: str, loads: Sequence[Callable[[], object]]) -> None:
        """Have compiled what ``loads`` lack, which are known together by ``name``."""
        self._places.setdefault(name, len(self._places))
        self._look(name, [(each, 0) for each in loads])

    def add_jobs(self, name: str, jobs: Sequence[str]) -> bool:
        """Have ``jobs`` done, which are known together by ``name``. Returns whether any is still to be done."""
        lacks = [job for job in jobs if job not in self._done]
        if lacks:
            self._open.setdefault(name, []).append((None, lacks, ROUNDS))
            self._want(self._places.setdefault(name, len(self._places)), lacks)
        return bool(lacks)

    @property
    def count_done(self) -> int:
        """How many kernels were compiled, or found to be impossible, so far."""
        return len(self._done)

    @property
    def has_enough(self) -> bool:
        """Whether workers have enough to do for a while."""
        return len(self._asked) - len(self._done) > ENOUGH * self._pool.size

    def is_ready(self, name: str) -> bool:
        """Whether nothing is missing any more of what was added as ``name``, or it cannot be compiled."""
        waiting = self._open.get(name, [])
        finished = [entry for entry in waiting if all(job in self._done for job in entry[1])]
        if finished:
            self._open[name] = [entry for entry in waiting if entry not in finished]
            if loads := [(each, begun) for each, _, begun in finished if each is not None]:
                self._look(name, loads)
        return not self._open.get(name) or not self._pool.works

    def wait(self) -> None:
        """Wait until something was compiled, or a moment."""
        with self._changed:
            self._changed.wait(LOOK_S)

    def close(self) -> None:
        """Compile no more than what has been begun."""
        with self._changed:
            self._closed = True
            self._queue.clear()
            self._changed.notify_all()

    def _look(self, name: str, loads: Sequence[tuple[Callable[[], object], int]]) -> None:
        """Begin ``loads``, each with how often it was begun before, and queue what they lack."""
        with compiling_for(self._architecture):
            for each, begun in loads:
                with contextlib.suppress(Exception), workers.collecting() as wanted:
                    each()  # what fails here fails again, with its reason, where it is needed
                lacks = [job for job in wanted if job not in self._done]
                if lacks and begun < ROUNDS:
                    self._open.setdefault(name, []).append((each, lacks, begun + 1))
                    self._want(self._places[name], lacks)
        if not self._open.get(name):
            self._open.pop(name, None)

    def _want(self, place: int, jobs: Sequence[str]) -> None:
        """Queue jobs that are not queued yet, and start threads for them."""
        with self._changed:
            for job in jobs:
                if job not in self._asked:
                    self._asked.add(job)
                    heapq.heappush(self._queue, (place, -self._expected(job), next(self._numbers), job))
            while len(self._threads) < min(max(1, self._pool.size - SPARE), len(self._asked)):
                # Not of a pool of threads, for which the end of the program would wait.
                self._threads.append(threading.Thread(target=self._work, daemon=True))
                self._threads[-1].start()
            self._changed.notify_all()

    def _work(self) -> None:
        """Have one job after the other done."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._queue or self._closed)
                if self._closed:
                    return
                job = heapq.heappop(self._queue)[-1]
            start = time.monotonic()
            try:
                with contextlib.suppress(Exception):  # it fails again, with its reason, where the kernel is needed
                    self._pool.try_to_ask(job, waits=True)
            finally:
                with self._changed:
                    count, seconds = self._took.get(_name_of(job), (0, 0.0))
                    self._took[_name_of(job)] = count + 1, seconds + time.monotonic() - start
                    self._done.add(job)
                    self._changed.notify_all()

    def _expected(self, job: str) -> float:
        """Seconds that a job is expected to take."""
        count, seconds = self._took.get(_name_of(job), (0, 0.0))
        return seconds / count if count else UNKNOWN_S


@contextlib.contextmanager
def upcoming(architecture: Architecture) -> Iterator[Upcoming | None]:
    """Have kernels for a GPU ``architecture`` compiled beside the block; ``None`` where no workers may be started.

    What they compute counts as this process's own load. An exception ends them at once.
    """
    most = workers.most_workers()
    if not most:
        yield None
        return
    with workers.opened(most, gently=True) as pool, load.helped_by(pool.processes):
        found = Upcoming(pool, architecture)
        try:
            yield found
        finally:
            found.close()


def _name_of(job: str) -> str:
    """The kernel that a job is of."""
    said = json.loads(job)
    return "CUDA C++" if "cuda" in said else f"{said['module']}.{said['kernel']}"
