"""Plans in memory, in front of those in wisdom. A plan that was not checked by this user is checked before its use."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tilewise.machine.device import environment
from tilewise.machine.recent import Recent
from tilewise.machine.turns import beside
from tilewise.plan import Plan
from tilewise.planner.caches.refusals import Refusals
from tilewise.planner.options import Options
from tilewise.planner.remembered import Entry, fits, plan_text, read_plans, satisfying
from tilewise.problems.base import Problem
from tilewise.wisdom import Kept, Wisdom

__all__ = ["Admit", "PlanCache"]

MOST_PLANS = 16384
"""Most plans that are held in memory. Wisdom has all of them."""

Admit = Callable[[Problem, Plan, Options], Plan | None]
"""Checks a plan that no process of this user checked here: gives it as it is here, or ``None`` to refuse it."""


class PlanCache:
    """The plans that were found for problems under options, read from ``wisdom`` and written to it.

    What is in ``refusals`` is not taken from wisdom.
    """

    def __init__(self, wisdom: Wisdom, refusals: Refusals) -> None:
        self._wisdom, self._refusals = wisdom, refusals
        self.checked: Recent[Entry, Plan] = Recent(MOST_PLANS)
        """Plans that a process of this user found or checked here."""
        self.unchecked: Recent[Entry, Plan] = Recent(MOST_PLANS)
        """Plans from wisdom that no process of this user has checked here."""

    def preload(self, problems: Sequence[Problem], options: Options) -> None:
        """Read the plans of all problems from wisdom, in one query for each effort."""
        for entry, kept in read_plans(self._wisdom, problems, options):
            if entry not in self.checked:
                self._add(entry, kept)

    def keep(self, problem: Problem, options: Options, plan: Plan) -> None:
        """Remember a plan that was just checked, here and in wisdom."""
        key = environment(problem.device).key
        self.checked[key, problem.key, options] = plan
        self._refusals.discard(problem, plan)
        with beside(short=True):
            self._wisdom.remember(key, problem.key, plan_text(options), plan, own=True)

    def forget(self, problem: Problem, options: Options) -> None:
        """Drop a plan from memory, so that it is read from wisdom again."""
        for asked in satisfying(options):
            for plans in (self.checked, self.unchecked):
                plans.pop((environment(problem.device).key, problem.key, asked), None)

    def find(self, problem: Problem, options: Options, admit: Admit) -> Plan | None:
        """A plan made with at least the effort asked for, if it still fits the solvers and the limit, else ``None``.

        An unchecked one goes to ``admit`` first, once.
        """
        key = environment(problem.device).key
        for asked in satisfying(options):
            entry = key, problem.key, asked
            if entry not in self.checked and entry not in self.unchecked:
                kept = self._wisdom.kept_plans(key, [problem.key], plan_text(asked)).get(problem.key)
                if kept is not None:
                    self._add(entry, kept)
            plan = self.checked.get(entry)
            if plan is None and entry in self.unchecked:
                plan = admit(problem, self.unchecked.pop(entry), asked)
                if plan is not None:
                    self.keep(problem, asked, plan)
            if plan is not None and not self._refusals.reason(problem, plan) and fits(plan, problem, options):
                return plan
            self.checked.pop(entry, None)  # another process may have written a newer one by the next time
        return None

    def _add(self, entry: Entry, kept: Kept[Plan]) -> None:
        """Hold a plan from wisdom."""
        (self.checked if kept.own else self.unchecked)[entry] = kept.value
