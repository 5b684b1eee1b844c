"""A plan table whose problems are planned in the background, one at a time."""

from __future__ import annotations

import functools
import time
import weakref
from collections.abc import Callable, Iterable

import torch

from tilewise.comm.agreement import several_ranks
from tilewise.machine.device import is_capturing
from tilewise.machine.torch_state import undisturbed
from tilewise.machine.turns import in_turns
from tilewise.nn.background.ahead import Ahead, Entry
from tilewise.nn.background.prepare import prepare, warm_up
from tilewise.nn.background.room import Room
from tilewise.nn.layers.plan_table import MOST_ON_SIGHT, PlanTable, planning
from tilewise.plan import Plan
from tilewise.planner import NoPlanError, Options, Planner
from tilewise.planner.options import first_line
from tilewise.problems.base import Problem

__all__ = ["PENDING", "LaterTable"]

PENDING = "still to be planned in the background"
"""The reason in reports why a pass is torch's until it is planned."""
AGAIN_S = 10.0
"""Seconds until a problem that found too little memory is tried again."""
MOST_TRIES = 6
"""So often a problem is put off for want of memory before it is left to torch."""


class LaterTable(PlanTable):
    """As :class:`PlanTable`, but what has no plan yet is torch's until a turn in the background has planned it.

    The thread in the background has a planner of its own, with the same wisdom: a search that is stopped between two
    turns must not keep the program from using the other.
    """

    def __init__(self, options: Options, unplanned: str, planner: Planner | None = None) -> None:
        super().__init__(options, unplanned, planner)
        self.partly: set[Problem] = set()
        """Problems still to be planned of layers that run by plan already as far as is decided."""
        self.asked: Callable[[], object] = lambda: None
        """Called when there is something new to plan."""
        self._queue: dict[Entry, int] = {}
        """What is to be planned, and how often it was put off."""
        self._not_before: dict[Entry, float] = {}
        self._behind: Planner | None = None
        self._prepared = False
        self._warm: set[Entry] = set()
        """Problems for which libraries have loaded kernels."""
        self._ahead = Ahead()
        weakref.finalize(self, self._ahead.close).atexit = False  # workers end with the process

    @property
    def planner(self) -> Planner:
        """The planner of this thread: the program's, or that of the thread in the background."""
        own = super().planner
        if not in_turns():
            return own
        if self._behind is None:
            self._behind = Planner(own.wisdom) if type(own) is Planner else own
        return self._behind

    @property
    def pending(self) -> int:
        """How many problems are still to be planned."""
        return len(self._queue)

    def plan(self, problems: Iterable[Problem], deterministic: bool) -> None:
        """Take the plans that wisdom has; the others are asked for by :meth:`ask`."""
        self.take_known(problems, deterministic)

    def take_known(self, problems: Iterable[Problem], deterministic: bool) -> None:
        """Take the plans that wisdom has; nothing is measured, but a plan from elsewhere is checked first."""
        with planning(), undisturbed():
            for problem in self.missing(problems, deterministic):
                plan = self.planner.remembered(problem, self.constraints(problem, deterministic))
                if plan is not None:
                    self.learn(problem, deterministic, plan)

    def ask(self, problems: Iterable[Problem], deterministic: bool) -> None:
        """Have the problems planned in the background that are not planned yet."""
        for problem in self.missing(problems, deterministic):
            if (problem, deterministic) not in self._queue:
                self._queue[problem, deterministic] = 0
                self.reasons[problem] = PENDING
        self.asked()

    def ready(self, problems: Iterable[Problem], deterministic: bool, device: torch.device) -> bool:
        """As :meth:`PlanTable.ready`, but a shape seen first is planned in the background. ``False`` until then.

        What is still to be planned of a layer that runs :attr:`partly` by plan is torch's meanwhile.
        """
        required = list(problems)
        missing = self.missing(required, deterministic)
        if missing and self.partly.issuperset(missing):
            return super().ready((p for p in required if p not in missing), deterministic, device)
        if not missing or self.unplanned == "torch" or several_ranks():
            return super().ready(required, deterministic, device)
        if not is_capturing(device) and len(self._queue) < MOST_ON_SIGHT:
            for problem in missing:
                self._on_sight[problem, deterministic] = None
            self.ask(missing, deterministic)
        return False

    def next(self, room: Room | None) -> Entry | None:
        """The problem to go on with now, one that fits into ``room``; ``None`` where there is none."""
        now = time.monotonic()

        def fits(entry: Entry) -> bool:
            """Whether there is room. A problem for which there is none is put off."""
            if room is None:
                return True
            if self._not_before.get(entry, now) > now:
                return False
            if shortage := room.why_not(entry[0]):
                self._put_off(entry, shortage, now + AGAIN_S)
            return not shortage

        return self._ahead.pick(list(self._queue), fits)

    @property
    def is_waiting(self) -> bool:
        """Whether workers compile what is needed next."""
        return self._ahead.is_waiting

    def wait(self) -> None:
        """On the thread in the background: wait a moment for workers."""
        self._ahead.wait()

    def _put_off(self, entry: Entry, shortage: str, until: float) -> None:
        """Try a problem again later, unless that was done often enough."""
        self._queue[entry] += 1
        self._not_before[entry] = until
        if self._queue[entry] >= MOST_TRIES:
            self.refuse(*entry, shortage)

    def advance(self, problem: Problem, deterministic: bool) -> bool:
        """Plan one problem, or begin it where kernels are still to be compiled. Returns whether it is decided.

        Where that fails, for whatever reason, it is torch's, and the reason is in the report.
        """
        entry, options = (problem, deterministic), self.constraints(problem, deterministic)
        is_decided = True
        try:
            if not self._prepared:
                self._prepared = True
                prepare(each for each, _ in list(self._queue))
            if entry not in self._warm:
                self._warm.add(entry)
                warm_up(problem)
            with undisturbed():
                one_by_one = functools.partial(self._one_by_one, [problem], deterministic, options)
                plans = self._ahead.planned(entry, self.planner, options, one_by_one)
            is_decided = plans is not None
            if plans is not None and problem in plans:
                self.learn(problem, deterministic, plans[problem])
        except NoPlanError as error:
            self.refuse(problem, deterministic, str(error))
        except Exception as error:  # nobody waits who could be told otherwise
            self.refuse(problem, deterministic, f"planning raised {type(error).__name__}: {first_line(error)}")
        finally:
            if is_decided:
                self._decided(problem, deterministic)
        return is_decided

    def learn(self, problem: Problem, deterministic: bool, plan: Plan) -> None:
        """As :meth:`PlanTable.learn`."""
        if self.reasons.get(problem) == PENDING:
            del self.reasons[problem]
        super().learn(problem, deterministic, plan)
        self._decided(problem, deterministic)

    def refuse(self, problem: Problem, deterministic: bool, reason: str) -> None:
        """As :meth:`PlanTable.refuse`."""
        super().refuse(problem, deterministic, reason)
        self._decided(problem, deterministic)

    def _decided(self, problem: Problem, deterministic: bool) -> None:
        """A problem waits for nothing any more."""
        self._queue.pop((problem, deterministic), None)
        self.partly.discard(problem)
        self._not_before.pop((problem, deterministic), None)
        self._ahead.forget((problem, deterministic))
        self._warm.discard((problem, deterministic))
        if not self._queue:
            self._ahead.close()
