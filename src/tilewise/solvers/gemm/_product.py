"""What solvers of matrix products share: the kind that they solve, operands as they are multiplied, and precision."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, ClassVar

import torch

from tilewise.plan import Config
from tilewise.problems.base import Problem
from tilewise.problems.gemm.problem import GemmProblem
from tilewise.solvers.base import Cost, Solver, Split
from tilewise.solvers.common.costs import efficiency

__all__ = ["ProductSolver", "ProductSplit", "multiplied", "product_cost"]


class ProductSolver(Solver):
    """One way to compute matrix products."""

    solves: ClassVar[type[Problem]] = GemmProblem

    def unsupported(self, p: GemmProblem) -> list[str]:
        """None: it takes every product of the declared types."""
        return []

    def configs(self, p: GemmProblem) -> Iterable[Config]:
        """One empty config."""
        return (Config(),)

    def cost(self, p: GemmProblem, c: Config) -> Cost:
        """The product's arithmetic at the rate that libraries reach with its sizes, and its operands read once."""
        return product_cost(p)


class ProductSplit(ProductSolver, Split):
    """A solver that cuts products into parts and leaves each to the planner."""

    def configs(self, p: GemmProblem) -> Iterable[Config]:
        """None: the planner composes the sizes of the parts."""
        return ()

    def cost(self, p: GemmProblem, c: Config) -> Cost:
        """Nothing beside the cost of its parts."""
        return Cost(0, 0, kernels=0)


def product_cost(p: GemmProblem, apart: int = 0, kernels: int = 1) -> Cost:
    """The cost of ``p`` by a library, beside ``apart`` bytes that are moved before or after by further kernels."""
    rate = efficiency(p.device_type, p.m, p.n, p.k, max(1, p.batch))
    return Cost(p.flops, p.bytes, kernels, efficiency=rate, apart=apart)


def multiplied(p: GemmProblem) -> Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]:
    """A function that makes views of stored ``a`` and ``b`` with their rows and columns as they are multiplied."""
    turns: Any = {
        "NN": lambda a, b: (a, b),
        "NT": lambda a, b: (a, b.mT),
        "TN": lambda a, b: (a.mT, b),
        "TT": lambda a, b: (a.mT, b.mT),
    }
    views: Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]] = turns[p.op]
    return views
