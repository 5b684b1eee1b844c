"""Who does what of the work that several processes share: threads take jobs and tell what came of them."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from dataclasses import replace

from tilewise.planner.messages import Job, effort, largest_first
from tilewise.problem import ConvProblem

__all__ = ["Board"]

TRIES = 2
"""Workers that may be lost over one job before it is left."""
FEW = 4
"""Sizes for each process under which a problem's are not shared."""


class Board:
    """Jobs for ``processes``, the largest problem first; safe from several threads, which wait on :attr:`changed`.

    A problem under ``batch_sizes="all"`` that would take one process more than half of its part of the work comes as
    several jobs: powers of two, then shares of the sizes between, then the whole, for which nothing is left to measure.
    """

    def __init__(self, jobs: Iterable[Job], processes: int) -> None:
        self.changed = threading.Condition()
        self.stopped = False
        self.waiting: list[Job] = []
        self.width = 0
        """Jobs that may run at once."""
        self.running: list[Job] = []
        self.helpers = 0
        """Threads that take jobs beside the one that made the board."""
        self._news: list[ConvProblem] = []
        self._faults: list[str] = []
        self._followers: dict[Job, list[Job]] = {}
        self._needs: dict[Job, int] = {}
        self._lost: dict[Job, int] = {}
        ordered = largest_first(jobs)
        fair = sum(effort(job.problem, job.options) for job in ordered) / processes
        for job in ordered:
            large = job.options.batch_sizes == "all" and 2 * effort(job.problem, job.options) > fair
            if large and processes > 1 and job.problem.batch >= FEW * processes:
                self._divide(job, processes)
                self.width += processes
            else:
                self.waiting.append(job)
                self.width += 1

    def _divide(self, job: Job, processes: int) -> None:
        first = replace(job, share=(0, 0))
        shares = [replace(job, share=(i, processes)) for i in range(processes)]
        self.waiting.append(first)
        self._follow(first, shares)
        for share in shares:
            self._follow(share, [job])

    def _follow(self, job: Job, followers: Sequence[Job]) -> None:
        self._followers[job] = list(followers)
        for follower in followers:
            self._needs[follower] = self._needs.get(follower, 0) + 1

    @property
    def over(self) -> bool:
        """Whether nothing is left to do and nobody is at anything that might be left to others."""
        return self.stopped or not (self.waiting or self.running)

    def take(self, *, block: bool = True) -> Job | None:
        """A job; ``None`` when there will be none any more, or none now where not to ``block``."""
        with self.changed:
            if block:
                self.changed.wait_for(lambda: self.over or self.waiting)
            if self.stopped or not self.waiting:
                return None
            job = self.waiting.pop(0)
            self.running.append(job)
            return job

    def finish(self, job: Job) -> None:
        """``job`` is done."""
        with self.changed:
            if job.share is None:
                self._news.append(job.problem)
            self._close(job)

    def give_back(self, job: Job, fault: str) -> None:
        """``job`` was not done, for the reason ``fault``: another may try, or it is left undone."""
        with self.changed:
            self._faults.append(fault)
            self._lost[job] = self._lost.get(job, 0) + 1
            if self._lost[job] < TRIES:
                self.running.remove(job)
                self.waiting.insert(0, job)
                self.changed.notify_all()
            else:
                self._close(job)

    def _close(self, job: Job) -> None:
        self.running.remove(job)
        for follower in self._followers.get(job, ()):
            self._needs[follower] -= 1
            if not self._needs[follower]:
                self.waiting.insert(0, follower)
        self.changed.notify_all()

    def complain(self, fault: str) -> None:
        """Something went wrong that is no job's fault."""
        with self.changed:
            self._faults.append(fault)
            self.changed.notify_all()

    def join(self) -> None:
        """One helper more."""
        with self.changed:
            self.helpers += 1

    def leave(self) -> None:
        """One helper less."""
        with self.changed:
            self.helpers -= 1
            self.changed.notify_all()

    def stop(self) -> None:
        """Nothing is begun any more."""
        with self.changed:
            self.stopped = True
            self.changed.notify_all()

    def heard(self, *, helping: bool) -> tuple[list[ConvProblem], list[str]]:
        """Wait for problems that were finished, faults, a job to take when ``helping``, or the end: the first two."""

        def something() -> bool:
            able = helping and bool(self.waiting)
            return bool(self._news or self._faults) or able or self.over or not (helping or self.helpers)

        with self.changed:
            self.changed.wait_for(something)
            news, faults = self._news, self._faults
            self._news, self._faults = [], []
            return news, faults
