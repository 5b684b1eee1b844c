"""Torch's own matrix product: the baseline that every plan of one is measured against."""

from __future__ import annotations

from typing import Any

import torch

from tilewise.plan import Config
from tilewise.problems.gemm.problem import GemmProblem
from tilewise.solvers.base import Run
from tilewise.solvers.gemm._product import ProductSolver, multiplied

LINEAR: Any = torch._C._nn.linear
"""torch's own ``F.linear``, whatever stands in its place."""


class AtenGemm(ProductSolver):
    """``aten::linear``, ``addmm``, ``mm``, ``baddbmm`` or ``bmm``, with torch's flags as they are.

    Plain ``NT`` products are ``F.linear``, as layers call it.
    """

    name, version = "aten_gemm", 1
    own_output = True
    adds_bias = True
    baseline = True

    def bind(self, p: GemmProblem, c: Config, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None) -> Run:
        """A run that calls the operator."""
        if p.op == "NT" and not p.batch:
            return _linear
        if p.bias:
            return _with_bias(p)
        views, product = multiplied(p), torch.bmm if p.batch else torch.mm

        def run(a: torch.Tensor, b: torch.Tensor, _: torch.Tensor | None, __: torch.Tensor | None) -> torch.Tensor:
            return product(*views(a, b))

        return run


def _linear(
    a: torch.Tensor,
    b: torch.Tensor,
    _: torch.Tensor | None,
    __: torch.Tensor | None,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """A run of ``F.linear``."""
    c: torch.Tensor = LINEAR(a, b, bias)
    return c


def _with_bias(p: GemmProblem) -> Run:
    """A run of a product that adds a bias."""
    views, product = multiplied(p), torch.baddbmm if p.batch else torch.addmm

    def run(
        a: torch.Tensor, b: torch.Tensor, _: torch.Tensor | None, __: torch.Tensor | None, bias: torch.Tensor
    ) -> torch.Tensor:
        return product(bias, *views(a, b))

    return run
