"""cuDNN's engines for a convolution with bias, residual and activation as one operation graph."""

from __future__ import annotations

from dataclasses import replace

from tilewise.problems.activations import activation_kind
from tilewise.problems.conv.problem import ConvProblem, Pass
from tilewise.solvers.vendor._cudnn import CudnnEngines
from tilewise.solvers.vendor._epilogue import POINTWISE

__all__ = ["CudnnFused"]


class CudnnFused(CudnnEngines):
    """One engine of cuDNN's graph API that adds bias and residual and applies the activation as it writes.

    Most of these engines are compiled when a plan is built (cuDNN's run-time fusion), for up to a second once in a
    process. The sum is kept in fp32 until the activation has been applied.
    """

    name, version = "cudnn_fused", 1
    passes = frozenset({Pass.FPROP})
    adds_bias = True
    adds_residual = True
    activations = frozenset(POINTWISE)
    most_configs = 6

    def graphed(self, p: ConvProblem) -> ConvProblem:
        """What of ``p`` is in cuDNN's operation graph: all but how weights change."""
        return replace(p, constant_weight=False) if p.constant_weight else p

    def unsupported(self, p: ConvProblem) -> list[str]:
        """Reasons: nothing to fuse, an activation that cuDNN lacks, another layout, and those of ``cudnn``."""
        if not p.bias and not p.residual and p.activation == "none":
            return ["nothing follows the convolution: cudnn computes it"]
        if activation_kind(p.activation) not in POINTWISE:
            return [f"cuDNN's graphs have no {activation_kind(p.activation)}"]
        if p.accumulate:
            return ["adds into no result"]
        if any(p.layout(role) != "channels_last" for role in p.roles):
            return ["cuDNN fuses where all tensors are channels_last"]
        return super().unsupported(p)
