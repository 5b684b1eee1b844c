"""What solvers of separable convolutions share: the kind that they solve."""

from __future__ import annotations

from typing import ClassVar

from tilewise.problems.base import Problem
from tilewise.problems.separable.problem import SeparableProblem
from tilewise.solvers.base import Solver

__all__ = ["SeparableSolver"]


class SeparableSolver(Solver):
    """One way to compute separable convolutions."""

    solves: ClassVar[type[Problem]] = SeparableProblem
