"""The plans of one problem by workspace, so that plans are made for few distinct limits only."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field, replace

from tilewise.machine.recent import Recent
from tilewise.machine.torch_state import undisturbed
from tilewise.nn.layers.plan_table import planning
from tilewise.plan import Plan
from tilewise.planner import NoPlanError, Options, Planner
from tilewise.problems.base import Problem

__all__ = ["PlansByWorkspace", "plans_by_workspace"]


@dataclass
class PlansByWorkspace:
    """The plans of one problem, each with less workspace than the one before and therefore slower.

    The first is the fastest. The others are found only when a limit needs them: first the desirable set (Oyama et al.
    2018, III-C1), and plans with less workspace than all of these only where less is asked for.
    """

    planner: Planner
    problem: Problem
    options: Options
    _plans: dict[int, Plan | None] = field(default_factory=dict)
    _workspaces: list[int] | None = None
    """The workspaces in bytes of the desirable set, the largest first; ``None`` until a limit needs them."""

    def plan(self, room: int) -> Plan:
        """The fastest plan within ``room`` bytes of workspace; where none fits, the one with the least workspace found.

        Raises ``NoPlanError`` where the options by themselves allow no plan.
        """
        free = self._free()
        if free.workspace <= room:
            return free
        workspaces = self._below(free)
        fitting = (self._at(workspace) for workspace in workspaces if workspace <= room)
        fitting_plan = next((plan for plan in fitting if plan is not None), None) or self._at(0)
        return fitting_plan or self._leaner(workspaces, free, room)

    def _leaner(self, workspaces: list[int], free: Plan, room: int) -> Plan:
        """A plan with less workspace than the desirable ones, down to ``room`` bytes.

        Limits are halved, since only a limit that excludes something makes the planner divide more than the batch.
        """
        plans = (self._at(workspace) for workspace in reversed(workspaces))
        lean = next((plan for plan in plans if plan is not None), free)
        while lean.workspace > room:
            leaner = self._at(lean.workspace // 2)
            if leaner is None:
                return lean
            lean = leaner
        return lean

    def _free(self) -> Plan:
        """The plan under no other limit than the options'. Raises ``NoPlanError`` where there is none."""
        plan = self._at(self.options.workspace)
        if plan is None:
            with planning(), undisturbed():
                return self.planner.plan(self.problem, self.options)  # raises as it did
        return plan

    def _below(self, free: Plan) -> list[int]:
        """The workspaces in bytes of desirable plans that need less than ``free``, the largest first."""
        if self._workspaces is None:
            with planning(), undisturbed():
                try:
                    front = self.planner.front(self.problem, self.options)
                except NoPlanError:
                    front = ()
            self._workspaces = sorted({p.workspace for p in front}, reverse=True)
        return [workspace for workspace in self._workspaces if workspace < free.workspace]

    def _at(self, workspace: int | None) -> Plan | None:
        """The checked plan under a limit of ``workspace`` bytes; ``None`` where there is none."""
        key = -1 if workspace is None else workspace
        if key not in self._plans:
            try:
                with planning(), undisturbed():
                    self._plans[key] = self.planner.plan(self.problem, replace(self.options, workspace=workspace))
            except NoPlanError:
                self._plans[key] = None
        return self._plans[key]


MOST_PROBLEMS = 4096
"""Problems of one planner whose plans are kept."""
Kept = Recent[tuple[Problem, Options], PlansByWorkspace]
_kept: weakref.WeakKeyDictionary[Planner, Kept] = weakref.WeakKeyDictionary()


def plans_by_workspace(planner: Planner, problem: Problem, options: Options) -> PlansByWorkspace:
    """The plans of ``problem`` under ``options``, one collection for each planner.

    It is kept while the planner exists, for the last :data:`MOST_PROBLEMS` problems.
    """
    kept = _kept.setdefault(planner, Recent(MOST_PROBLEMS))
    plans: PlansByWorkspace | None = kept.get((problem, options))
    if plans is None:
        plans = kept[problem, options] = PlansByWorkspace(weakref.proxy(planner), problem, options)
    return plans
