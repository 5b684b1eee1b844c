"""The workspaces at which a problem's fastest plan changes, so that few distinct limits are planned for."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field, replace

from tilewise.nn.book import planning
from tilewise.plan import Plan
from tilewise.planner import NoPlanError, Options, Planner
from tilewise.problem import ConvProblem
from tilewise.recent import Recent
from tilewise.torch_state import undisturbed

__all__ = ["Ladder", "ladder_of"]


@dataclass
class Ladder:
    """Plans of one problem, each in less workspace than the one before: at most one for each desirable plan.

    The fastest comes first. What is below it is looked for only when asked for: the desirable set (Oyama et al. 2018,
    III-C1) once, and a plan in no workspace at all only where a room is smaller than all of these.
    """

    planner: Planner
    problem: ConvProblem
    options: Options
    _plans: dict[int, Plan | None] = field(default_factory=dict)
    _rungs: list[int] | None = None

    def plan(self, room: int) -> Plan:
        """The fastest plan within ``room`` bytes of workspace, or the one in the least where none is.

        Raises ``NoPlanError`` where the options themselves leave none.
        """
        free = self._free()
        if free.workspace <= room:
            return free
        rungs = self._below(free)
        fitting = (self._at(rung) for rung in rungs if rung <= room)
        found = next((plan for plan in fitting if plan is not None), None) or self._at(0)
        return found or self._leaner(rungs, free, room)

    def _leaner(self, rungs: list[int], free: Plan, room: int) -> Plan:
        """The plan in the least, or one within ``room`` on the way there. Below the desirable plans, limits are halved:

        only a limit that keeps something out has the planner cut more than the batch.
        """
        plans = (self._at(rung) for rung in reversed(rungs))
        lean = next((plan for plan in plans if plan is not None), free)
        while lean.workspace > room:
            found = self._at(lean.workspace // 2)
            if found is None:
                return lean
            lean = found
        return lean

    def _free(self) -> Plan:
        plan = self._at(self.options.workspace)
        if plan is None:
            with planning(), undisturbed():
                return self.planner.plan(self.problem, self.options)  # raises as it did
        return plan

    def _below(self, free: Plan) -> list[int]:
        """Workspaces of the desirable plans, the largest first."""
        if self._rungs is None:
            with planning(), undisturbed():
                try:
                    front = self.planner.front(self.problem, self.options)
                except NoPlanError:
                    front = ()
            self._rungs = sorted({p.workspace for p in front}, reverse=True)
        return [rung for rung in self._rungs if rung < free.workspace]

    def _at(self, workspace: int | None) -> Plan | None:
        """The plan under a limit, whole and checked; ``None`` where there is none."""
        key = -1 if workspace is None else workspace
        if key not in self._plans:
            try:
                with planning(), undisturbed():
                    self._plans[key] = self.planner.plan(self.problem, replace(self.options, workspace=workspace))
            except NoPlanError:
                self._plans[key] = None
        return self._plans[key]


MOST_LADDERS = 4096
"""Of the problems that one planner met."""
_ladders: weakref.WeakKeyDictionary[Planner, Recent[tuple[ConvProblem, Options], Ladder]] = weakref.WeakKeyDictionary()


def ladder_of(planner: Planner, problem: ConvProblem, options: Options) -> Ladder:
    """The ladder of ``problem`` under ``options``, the same one while ``planner`` and room are there."""
    own = _ladders.setdefault(planner, Recent(MOST_LADDERS))
    found: Ladder | None = own.get((problem, options))
    if found is None:
        found = own[problem, options] = Ladder(weakref.proxy(planner), problem, options)
    return found
