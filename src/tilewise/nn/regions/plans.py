"""The plans of a region's products: the best of each problem, others that are near, and one of each kind."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from tilewise import solvers
from tilewise.nn.layers.plan_table import PlanTable
from tilewise.nn.regions.trace import Untraceable
from tilewise.plan import Plan
from tilewise.planner import NoPlanError
from tilewise.problems.base import Problem

__all__ = ["RegionPlans"]

NEAR, FAR, NEAR_MS, MOST_OTHERS = 1.5, 2.5, 0.2, 3
"""So many other plans are tried in their place, of those within so many times the best's time, and more. Plans of
another kind may take the larger factor."""

UNLIMITED = sys.float_info.max
"""An error limit that all finite errors keep."""


class RegionPlans:
    """Plans with those of ``table``, under its options. What is made and checked once is remembered."""

    def __init__(self, table: PlanTable) -> None:
        self._table = table
        self._errors: dict[tuple[Problem, Plan], float | None] = {}
        """The errors of plans that were checked; ``None`` for one that must not be used."""

    def all(self, problems: Sequence[Problem]) -> Mapping[Problem, Sequence[Plan]]:
        """Plans of problems, made where they are missing; those that no solver can compute are left out.

        Behind the best of each problem follow those of other solvers, tiles and configs that may be as fast in their
        place.
        Raises :class:`Untraceable` where the limits leave a problem without a plan.
        """
        deterministic, table = torch.are_deterministic_algorithms_enabled(), self._table
        try:
            table.plan(problems, deterministic)
        except NoPlanError as error:
            raise Untraceable(f"a layer has no plan within the limits: {str(error).splitlines()[0]}") from error
        found: dict[Problem, Sequence[Plan]] = {}
        for problem in problems:
            plan = table.chosen(problem, deterministic)
            if plan is not None:
                options = table.constraints(problem, deterministic)
                others = [p for p in table.planner.alternatives(problem, options) if _what(p) != _what(plan)]
                found[problem] = [plan, *_near(plan, others)[:MOST_OTHERS]]
                self._note(problem, plan)
        return found

    def some(self, problems: Sequence[Problem]) -> Mapping[Problem, Sequence[Plan]]:
        """As :meth:`all`, without those problems that the limits leave without a plan."""
        wanted = list(dict.fromkeys(problems))
        try:
            return self.all(wanted)
        except Untraceable:  # one of them at least has none
            found: dict[Problem, Sequence[Plan]] = {}
            for problem in wanted:
                with contextlib.suppress(Untraceable):
                    found |= self.all([problem])
            return found

    def error(self, problem: Problem, plan: Plan) -> float | None:
        """The relative L2 error of a plan, which is run and checked once; ``None`` where it breaks a limit."""
        if (problem, plan) not in self._errors:
            options = self._table.constraints(problem, torch.are_deterministic_algorithms_enabled())
            if plan.solver == solvers.baseline(problem).name and options.error_limit is None:
                options = replace(options, error_limit=UNLIMITED)  # torch's own may err as it likes, but by how much?
            checked, reason = self._table.planner.confirm(problem, plan, options)
            self._errors[problem, plan] = None if reason else 0.0 if checked.error is None else checked.error.l2
        return self._errors[problem, plan]

    def kinds(self, problem: Problem) -> Sequence[Plan]:
        """The fastest measured plan of each kind, fastest first. Plans of one kind have similar errors."""
        options = self._table.constraints(problem, torch.are_deterministic_algorithms_enabled())
        fastest: dict[tuple[str, object], Plan] = {}
        for plan in self._table.planner.alternatives(problem, options):
            fastest.setdefault(_kind(plan), plan)
        return list(fastest.values())

    def running(self, problem: Problem, plans: Sequence[Plan]) -> Sequence[Plan]:
        """What ``plans`` of another problem run, as plans of ``problem``, which are not measured: their times stay.

        Those of splits and of torch's own choice are left out, and those that take more memory than is allowed.
        """
        ceiling = self._table.constraints(problem, torch.are_deterministic_algorithms_enabled()).workspace
        found = []
        for plan in plans:
            solver = solvers.get(plan.solver)
            if plan.children or solver.baseline or solver.why_not(problem):
                continue
            for config, workspace in solver.offers(problem, ceiling, {plan.config}):
                if ceiling is None or workspace <= ceiling:
                    found.append(
                        replace(plan, problem=problem.key, config=config, workspace=workspace, constant=0, error=None)
                    )
        return found

    def _note(self, problem: Problem, plan: Plan) -> None:
        """Remember the error of a plan, where planning has checked it: torch's own it takes unchecked."""
        if plan.error is not None:
            self._errors[problem, plan] = plan.error.l2


def _near(best: Plan, plans: Sequence[Plan]) -> list[Plan]:
    """Those of ``plans`` that may be as fast in their place as ``best``, and the fastest of each kind within more.

    Kinds, as solvers tell them apart, have errors of their own, and come first. Where the best plans of all layers are
    together not exact enough, others are there whose times are known, and nothing has to be searched.
    """
    seen = {_kind(best)}
    first: list[Plan] = []
    rest: list[Plan] = []
    for plan in plans:
        if _kind(plan) not in seen and plan.time_ms <= FAR * best.time_ms + NEAR_MS:
            first.append(plan)
            seen.add(_kind(plan))
        elif plan.time_ms <= NEAR * best.time_ms + NEAR_MS:
            rest.append(plan)
    return [*first, *rest]


def _kind(plan: Plan) -> tuple[str, object]:
    """What plans with similar errors have in common."""
    return plan.solver, solvers.get(plan.solver).exactness(plan.config)


def _what(plan: Plan) -> tuple[str, object]:
    """What a plan runs."""
    return plan.solver, plan.config
