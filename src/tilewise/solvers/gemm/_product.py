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
from tilewise.solvers.common.matmul import library_scratch

__all__ = ["ProductSolver", "ProductSplit", "ScratchSolver", "multiplied", "product_cost", "product_into", "widening"]


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


class ScratchSolver(ProductSolver):
    """A product by the library over operands or sums that lie otherwise than the problem says."""

    def unsupported(self, p: GemmProblem) -> list[str]:
        """A reason on a CPU where the result is wider than the operands, which torch's products there cannot give."""
        if p.device_type == "cpu" and p.dtype != p.out_dtype:
            return [f"on a CPU gives results of the operands' type, not {p.out_dtype} of {p.dtype}"]
        return []

    def hidden_workspace(self, p: GemmProblem, c: Config) -> int:
        """The library's scratch."""
        return library_scratch(p)


def widening(p: GemmProblem) -> dict[str, Any]:
    """What torch's products are told where the result is wider than the operands."""
    return {} if p.dtype == p.out_dtype else {"out_dtype": p.torch_dtype("c")}


def product_into(p: GemmProblem) -> Any:
    """``product(left, right, out)`` of operands as they are multiplied, one or a batch of them."""
    multiply, told = torch.bmm if p.batch else torch.mm, widening(p)

    def product(left: torch.Tensor, right: torch.Tensor, out: torch.Tensor) -> None:
        multiply(left, right, **told, out=out)

    return product
