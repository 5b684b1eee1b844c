"""What solvers of local response normalization share: the kind that they solve, and forward and backward apart."""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar, Protocol

from torch import Tensor

from tilewise.plan import Config
from tilewise.problems.base import Problem
from tilewise.problems.lrn.problem import LrnProblem
from tilewise.solvers.base import Solver

__all__ = ["LrnPasses", "LrnSolver"]


class LrnPasses(Protocol):
    """Forward and backward of one normalization, for dense tensors in the problem's layout."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Write the result of ``x`` into ``y`` and return it. Both are (batch, channels, *space)."""
        ...

    def backward(self, x: Tensor, dy: Tensor, dx: Tensor) -> Tensor:
        """Write the gradient of ``x`` into ``dx`` and return it, by that of the result, ``dy``."""
        ...


class LrnSolver(Solver):
    """One way to compute local response normalization."""

    solves: ClassVar[type[Problem]] = LrnProblem
    exact_memory = True

    def unsupported(self, p: LrnProblem) -> list[str]:
        """None: it takes every normalization of the declared types."""
        return []

    def configs(self, p: LrnProblem) -> Iterable[Config]:
        """One empty config."""
        return (Config(),)

    def passes(self, p: LrnProblem, c: Config) -> LrnPasses | None:
        """Forward and backward apart, as a module needs them; ``None`` where there is no such thing.

        Raises :class:`~tilewise.solvers.base.SolverUnavailable` where the config cannot run here.
        """
        return None
