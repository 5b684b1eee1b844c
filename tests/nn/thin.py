"""A planner whose choice for matrix products does not depend on the machine: ``thin_gemm`` where it is offered."""

from __future__ import annotations

from typing import Any

from tilewise import solvers
from tilewise.plan import Config, Plan
from tilewise.planner import Options, Planner
from tilewise.problems.base import Problem

__all__ = ["Thin", "thin_plan"]


def thin_plan(problem: Problem) -> Plan | None:
    """The first plan by ``thin_gemm``; ``None`` where there is none, as for the smallest products."""
    solver: Any = solvers.get("thin_gemm")
    config: Config | None = None if solver.why_not(problem) else next(iter(solver.configs(problem)), None)
    return None if config is None else Plan(problem.key, solver.name, solver.version, config, time_ms=1.0)


class Thin(Planner):
    """Plans products of the storages given (``nt`` for a layer's forward); all others are torch's."""

    def __init__(self, *tasks: str) -> None:
        super().__init__()
        self.tasks = tasks or ("nt", "nn", "tn")
        self.planned: list[Problem] = []

    def plan(self, problem: Problem, options: Options | None = None) -> Plan:
        self.planned.append(problem)
        baseline = solvers.baseline(problem)
        by_torch = Plan(problem.key, baseline.name, baseline.version, time_ms=2.0)
        return (thin_plan(problem) if problem.task in self.tasks else None) or by_torch
