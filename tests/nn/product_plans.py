"""Plans of matrix products that do not depend on the machine, and a planner that makes them."""

from __future__ import annotations

from typing import Any

from tilewise import solvers
from tilewise.plan import Config, Plan
from tilewise.planner import Options, Planner
from tilewise.problems.base import Problem

__all__ = ["Thin", "plan_of"]


def plan_of(problem: Problem) -> Plan:
    """The first plan by ``thin_gemm``, or one by ``turned_gemm`` where it offers none: small products, other types."""
    solver: Any = solvers.get("thin_gemm")
    config: Config | None = None if solver.why_not(problem) else next(iter(solver.configs(problem)), None)
    if config is None:
        solver, config = solvers.get("turned_gemm"), Config(turn="c")
    return Plan(problem.key, solver.name, solver.version, config, time_ms=1.0)


class Thin(Planner):
    """Plans products of the storages given (``nt`` for a layer's forward) by :func:`plan_of`; others are torch's."""

    def __init__(self, *tasks: str) -> None:
        super().__init__()
        self.tasks = tasks or ("nt", "nn", "tn")
        self.planned: list[Problem] = []

    def plan(self, problem: Problem, options: Options | None = None) -> Plan:
        self.planned.append(problem)
        if problem.task in self.tasks:
            return plan_of(problem)
        baseline = solvers.baseline(problem)
        return Plan(problem.key, baseline.name, baseline.version, time_ms=2.0)
