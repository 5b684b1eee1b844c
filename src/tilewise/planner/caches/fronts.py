"""Fronts in memory, in front of those in wisdom. One that was not checked by this user is checked before its use."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from tilewise.machine.device import environment
from tilewise.machine.recent import Recent
from tilewise.plan import Plan
from tilewise.planner.caches.plans import Admit
from tilewise.planner.fronts import MOST_POINTS, front
from tilewise.planner.options import Options
from tilewise.planner.remembered import Entry, fits, place_text, read_fronts, satisfying
from tilewise.problems.base import Problem
from tilewise.wisdom import Wisdom

__all__ = ["FrontCache"]

MOST_PROBLEMS = 16384
"""Most problems whose fronts are held in memory. Wisdom has all of them."""

Plans = tuple[Plan, ...]


class FrontCache:
    """The fronts that were found for problems under options, read from ``wisdom`` and written to it."""

    def __init__(self, wisdom: Wisdom) -> None:
        self._wisdom = wisdom
        self._checked: Recent[tuple[str, str], dict[Options, Plans]] = Recent(MOST_PROBLEMS)
        """Fronts that a process of this user found or checked here, by an environment's and a problem's key."""
        self._unchecked: Recent[Entry, Plans] = Recent(MOST_PROBLEMS)
        """Fronts from wisdom with plans that no process of this user has checked here."""

    def preload(self, problems: Sequence[Problem], options: Options) -> None:
        """Read the fronts of all problems from wisdom, in one query for each effort and place of a front."""
        known = [(*key, asked) for key, fronts in self._checked.items() for asked in fronts]
        for entry, kept in read_fronts(self._wisdom, problems, options, [*known, *self._unchecked]):
            plans = tuple(kept_plan.value for kept_plan in kept)
            if all(kept_plan.own for kept_plan in kept):
                self._checked.setdefault(entry[:2], {})[entry[2]] = plans
            else:
                self._unchecked[entry] = plans

    def keep(self, problem: Problem, options: Options, plans: Plans) -> None:
        """Remember a front that was just found or checked, here and in wisdom."""
        key = environment(problem.device).key
        self._checked.setdefault((key, problem.key), {})[options] = plans
        for place, plan in enumerate([*plans, *plans[-1:]]):  # the last one twice: that is its end
            self._wisdom.remember(key, problem.key, place_text(place, options), plan, own=True)

    def find(self, problem: Problem, options: Options, admit: Admit) -> Plans:
        """A front made with at least the effort asked for, if all of it still fits; empty where there is none.

        Only those are looked at that :meth:`preload` read or that were found here. The plans of an unchecked one go to
        ``admit`` first, once.
        """
        key = environment(problem.device).key, problem.key
        for asked in satisfying(options):
            unchecked = self._unchecked.pop((*key, asked), ())
            if unchecked and (checked := _admitted(problem, unchecked, asked, admit)):
                self.keep(problem, asked, checked)
            known_front = self._of(problem).get(asked, ())
            if known_front and all(fits(plan, problem, options) for plan in known_front):
                return known_front
        return ()

    def divisions(self, problem: Problem, options: Options) -> Plans:
        """Divisions within the limit from fronts of ``problem`` that were asked for with all else the same."""
        return tuple(
            plan
            for asked, plans in self._of(problem).items()
            if replace(asked, workspace=options.workspace) == options
            for plan in plans
            if not plan.leaf and fits(plan, problem, options)
        )

    def _of(self, problem: Problem) -> dict[Options, Plans]:
        """The checked fronts of ``problem``."""
        return self._checked.get((environment(problem.device).key, problem.key)) or {}


def _admitted(problem: Problem, plans: Plans, options: Options, admit: Admit) -> Plans:
    """A front from elsewhere, with its plans checked here; empty where one of them may not be used."""
    admitted_plans = []
    for plan in plans[:MOST_POINTS]:
        admitted = admit(problem, plan, options)
        if admitted is None or not math.isfinite(admitted.time_ms):
            return ()
        admitted_plans.append(admitted)
    return tuple(admitted_plans[i] for i in front((plan.time_ms, plan.workspace) for plan in admitted_plans))
