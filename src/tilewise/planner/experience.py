"""What estimates were worth: measured times beside them, which correct the estimates of later problems."""

from __future__ import annotations

import math
import statistics
from typing import Any

from tilewise.machine.recent import Recent, trim
from tilewise.plan import Config
from tilewise.problems.base import Problem
from tilewise.solvers import Solver

__all__ = ["Experience"]

NEAR = 3.0
"""Problems whose work differs by no more than two to the power of this are alike."""
LEAST, MOST = 0.5, 4.0
"""Bounds on a correction."""
KEPT = 32
"""Most times of a solver's family that are kept of one kind of problems."""


class Experience:
    """Measured times over estimates, by device, computation, types, layouts and the family of a solver's config."""

    def __init__(self) -> None:
        self._ratios: Recent[tuple[Any, ...], dict[tuple[str, Config], tuple[float, float]]] = Recent(4096)
        """By kind of problem: for each candidate the work of its problem, as a logarithm, and the ratio."""

    def note(self, problem: Problem, solver: Solver, config: Config, ratio: float) -> None:
        """Note that ``config`` took ``ratio`` times its estimate by cost."""
        noted = self._ratios.get(_kind(problem, solver, config))
        if noted is None:
            noted = self._ratios[_kind(problem, solver, config)] = {}
        trim(noted, KEPT)
        noted[problem.key, config] = _work(problem), ratio

    def factor(self, problem: Problem, solver: Solver, config: Config) -> float:
        """By what to multiply an estimate: the median of what alike problems before took; 1 where there were none.

        What is known of the problem itself does not count, so that it is estimated alike however often it is searched.
        """
        noted = self._ratios.get(_kind(problem, solver, config)) or {}
        work = _work(problem)
        alike = [ratio for (key, _), (w, ratio) in noted.items() if key != problem.key and abs(w - work) <= NEAR]
        return min(max(statistics.median(alike), LEAST), MOST) if alike else 1.0


def _work(problem: Problem) -> float:
    """The logarithm of a problem's arithmetic, to the base of two."""
    return math.log2(max(problem.flops, 1))


def _kind(problem: Problem, solver: Solver, config: Config) -> tuple[Any, ...]:
    """What alike problems have in common, with the solver's name for configs whose estimates are alike."""
    roles = (*problem.operands, *problem.results)
    layouts = tuple(problem.layout(role) for role in roles)
    types = (problem.dtype, problem.out_dtype, problem.precision)
    return problem.device, problem.task, *types, layouts, solver.name, solver.family(config)
