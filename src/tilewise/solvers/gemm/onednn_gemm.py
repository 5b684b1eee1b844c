"""Matrix products on a CPU by oneDNN, where torch's own fp32 products call another library."""

from __future__ import annotations

import torch

from tilewise.plan import Config
from tilewise.problems.gemm.problem import GemmProblem
from tilewise.solvers.base import Run
from tilewise.solvers.gemm._product import ProductSolver, multiplied

POINTWISE = {
    "none": ("none", ""),
    "gelu": ("gelu", "none"),
    "gelu_tanh": ("gelu", "tanh"),
    "silu": ("swish", ""),
    "tanh": ("tanh", ""),
    "sigmoid": ("sigmoid", ""),
}
"""Activations by the names that the operator has for them: the operation, and its algorithm.

ReLU is not among them: oneDNN makes 0 of a NaN, which torch keeps.
"""


class OneDNNGemm(ProductSolver):
    """``mkldnn::_linear_pointwise``: oneDNN's own matrix product, with the activation as its pointwise operation.

    It takes operands with either dimension contiguous. torch's products of 16-bit types are oneDNN's already.
    """

    name, version = "onednn_gemm", 2
    devices = frozenset({"cpu"})
    dtypes = frozenset({"fp32"})
    own_output = True
    adds_bias = True
    activations = frozenset(POINTWISE)

    def unsupported(self, p: GemmProblem) -> list[str]:
        """Reasons: a batch, or a torch without oneDNN's operator."""
        reasons = ["takes one product, not a batch of them"] if p.batch else []
        if not torch.backends.mkldnn.is_available() or not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
            reasons.append("needs a torch with oneDNN's operator mkldnn::_linear_pointwise")
        return reasons

    def bind(self, p: GemmProblem, c: Config, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None) -> Run:
        """A run that calls the operator."""
        operation, algorithm = POINTWISE[p.activation]
        views, product = multiplied(p), torch.ops.mkldnn._linear_pointwise.default

        def run(
            a: torch.Tensor,
            b: torch.Tensor,
            _: torch.Tensor | None,
            __: torch.Tensor | None,
            bias: torch.Tensor | None = None,
        ) -> torch.Tensor:
            left, right = views(a, b)
            result: torch.Tensor = product(left, right.mT, bias, operation, [], algorithm)
            return result

        return run
