"""Products by torch's operators over copies in the workspace: what solvers that change the layout share."""

from __future__ import annotations

from typing import Any

import torch

from tilewise.plan import Config
from tilewise.problems.gemm.problem import GemmProblem
from tilewise.solvers.common.matmul import library_scratch
from tilewise.solvers.gemm._product import ProductSolver

__all__ = ["ScratchSolver", "product_into", "widening"]


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
