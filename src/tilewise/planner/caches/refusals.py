"""Plans from elsewhere that may not be used here, with the reasons."""

from __future__ import annotations

from tilewise.machine.device import environment
from tilewise.machine.recent import Recent
from tilewise.plan import Measurement, Plan
from tilewise.planner.remembered import is_current, written
from tilewise.problems.base import Problem

__all__ = ["Refusals"]

MOST_REFUSALS = 16384
"""Most refusals that are held in memory. Wisdom has none of them."""

Key = tuple[str, str, tuple[object, ...]]
"""An environment's key, a problem's key, and what the plan does."""


class Refusals:
    """The plans that were refused for each problem. Plans that do the same are one, whatever times they claim."""

    def __init__(self) -> None:
        self._refused: Recent[Key, tuple[Plan, str]] = Recent(MOST_REFUSALS)

    def add(self, problem: Problem, plan: Plan, reason: str) -> None:
        """Refuse ``plan`` for ``problem``."""
        self._refused[_key(problem, plan)] = plan, reason

    def discard(self, problem: Problem, plan: Plan) -> None:
        """Refuse ``plan`` no longer, if it was refused."""
        self._refused.pop(_key(problem, plan), None)

    def reason(self, problem: Problem, plan: Plan) -> str:
        """Why ``plan`` was refused; empty where it was not."""
        refused = self._refused.get(_key(problem, plan)) if self._refused else None
        return "" if refused is None else refused[1]

    def reasons(self, problem: Problem) -> list[str]:
        """Why plans for ``problem`` were refused."""
        return [reason for _, reason in self._of(problem)]

    def as_lost(self, problem: Problem) -> list[Measurement]:
        """The refused plans for ``problem`` as lost candidates, without those of other versions of solvers."""
        return [
            Measurement(p.solver, p.version, p.config, reason=f"its plan from elsewhere was refused: {reason}")
            for p, reason in self._of(problem)
            if is_current(p)
        ]

    def _of(self, problem: Problem) -> list[tuple[Plan, str]]:
        """The refused plans for ``problem``, with the reasons."""
        key = environment(problem.device).key
        return [pair for (device, asked, _), pair in self._refused.items() if (device, asked) == (key, problem.key)]


def _key(problem: Problem, plan: Plan) -> Key:
    """The key of a refusal."""
    return environment(problem.device).key, problem.key, written(plan)
