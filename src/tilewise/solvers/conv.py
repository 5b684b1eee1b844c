"""What solvers of convolutions declare beside what every solver does: passes and dimensions."""

from __future__ import annotations

from typing import Any, ClassVar

from tilewise.problems.base import Problem
from tilewise.problems.conv.problem import ConvProblem, Pass
from tilewise.solvers.base import Solver, Split

__all__ = ["ConvSolver", "ConvSplit"]


class ConvSolver(Solver):
    """One way to compute convolutions. Subclasses narrow these declarations where they do not do all."""

    solves: ClassVar[type[Problem]] = ConvProblem
    passes: ClassVar[frozenset[Pass]] = frozenset(Pass)
    dims: ClassVar[frozenset[int]] = frozenset({1, 2, 3})
    """Numbers of spatial axes."""

    def declarations(self) -> dict[str, list[Any]]:
        """What it declares of the convolutions that it takes, by name."""
        passes = sorted(pass_.value for pass_ in self.passes)
        return {"passes": passes, **super().declarations(), "dims": sorted(self.dims)}

    def undeclared(self, p: Problem) -> list[str]:
        """Reasons why the declarations leave ``p`` out."""
        if not isinstance(p, ConvProblem):
            return super().undeclared(p)
        reasons = []
        if p.pass_ not in self.passes:
            reasons.append(f"does {'/'.join(sorted(x.value for x in self.passes))}, not {p.pass_.value}")
        reasons += super().undeclared(p)
        if p.dims not in self.dims:
            reasons.append(f"does {'/'.join(map(str, sorted(self.dims)))}-D, not {p.dims}-D")
        return reasons


class ConvSplit(ConvSolver, Split):
    """A solver that cuts convolutions into parts and leaves each to the planner."""
