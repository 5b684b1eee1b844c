"""Shares jobs out among the threads that serve several planning processes, and collects what became of them."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from dataclasses import replace

from tilewise.planner.processes.messages import Job, effort, largest_first
from tilewise.problems.base import Problem

__all__ = ["JobQueue"]

TRIES = 2
"""A job is given up once this many workers were lost over it."""
FEW = 4
"""A problem is divided among processes only if each gets at least this many of its sizes."""


class JobQueue:
    """Jobs for ``processes`` processes, the largest problem first. Several threads may use it at once.

    A problem under ``batch_sizes="all"`` that would take one process more than half of its part of the work comes as
    several jobs: powers of two, then shares of the sizes between, then the whole, for which nothing is left to measure.
    """

    def __init__(self, jobs: Iterable[Job], processes: int) -> None:
        self.changed = threading.Condition()
        self.stopped = False
        self.waiting: list[Job] = []
        self.at_once = 0
        """Jobs that may run at once."""
        self.running: list[Job] = []
        self.helpers = 0
        """Threads that take jobs beside the one that made the queue."""
        self._news: list[Problem] = []
        self._faults: list[str] = []
        self._followers: dict[Job, list[Job]] = {}
        self._needs: dict[Job, int] = {}
        self._lost: dict[Job, int] = {}
        ordered = largest_first(jobs)
        fair = sum(effort(job.problem, job.options) for job in ordered) / processes
        for job in ordered:
            large = job.options.batch_sizes == "all" and 2 * effort(job.problem, job.options) > fair
            if large and processes > 1 and job.problem.batch_size >= FEW * processes:
                self._divide(job, processes)
                self.at_once += processes
            else:
                self.waiting.append(job)
                self.at_once += 1

    def _divide(self, job: Job, processes: int) -> None:
        """Add a large job as several: powers of two, then shares of the sizes between, then the whole."""
        first = replace(job, share=(0, 0))
        shares = [replace(job, share=(i, processes)) for i in range(processes)]
        self.waiting.append(first)
        self._follow(first, shares)
        for share in shares:
            self._follow(share, [job])

    def _follow(self, job: Job, followers: Sequence[Job]) -> None:
        """Let ``followers`` wait until ``job``, and all other jobs that they follow, are done."""
        self._followers[job] = list(followers)
        for follower in followers:
            self._needs[follower] = self._needs.get(follower, 0) + 1

    @property
    def over(self) -> bool:
        """Whether no job is waiting or running, or all was stopped."""
        return self.stopped or not (self.waiting or self.running)

    def take(self, *, block: bool = True) -> Job | None:
        """The next job; ``None`` when no more will come, or without ``block`` when none is waiting now."""
        with self.changed:
            if block:
                self.changed.wait_for(lambda: self.over or self.waiting)
            if self.stopped or not self.waiting:
                return None
            job = self.waiting.pop(0)
            self.running.append(job)
            return job

    def finish(self, job: Job) -> None:
        """Note that ``job`` is done."""
        with self.changed:
            if job.share is None:
                self._news.append(job.problem)
            self._close(job)

    def give_back(self, job: Job, fault: str) -> None:
        """Note that ``job`` failed because of ``fault``: another worker may try it, or after two it is left undone."""
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
        """End a job that is running, and let those that waited for it begin."""
        self.running.remove(job)
        for follower in self._followers.get(job, ()):
            self._needs[follower] -= 1
            if not self._needs[follower]:
                self.waiting.insert(0, follower)
        self.changed.notify_all()

    def note_fault(self, fault: str) -> None:
        """Note a fault that belongs to no job."""
        with self.changed:
            self._faults.append(fault)
            self.changed.notify_all()

    def add_helper(self) -> None:
        """Count one more thread that takes jobs."""
        with self.changed:
            self.helpers += 1

    def remove_helper(self) -> None:
        """Count one thread less that takes jobs."""
        with self.changed:
            self.helpers -= 1
            self.changed.notify_all()

    def stop(self) -> None:
        """Let no further job begin."""
        with self.changed:
            self.stopped = True
            self.changed.notify_all()

    def wait_for_news(self, *, helping: bool) -> tuple[list[Problem], list[str]]:
        """Wait for news; return the problems finished and the faults since the last call.

        It also returns at the end of all work and, when ``helping``, once there is a job to take.
        """

        def has_news() -> bool:
            """Whether there is something to return for."""
            able = helping and bool(self.waiting)
            return bool(self._news or self._faults) or able or self.over or not (helping or self.helpers)

        with self.changed:
            self.changed.wait_for(has_news)
            news, faults = self._news, self._faults
            self._news, self._faults = [], []
            return news, faults
