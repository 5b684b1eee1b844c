"""Every engine that cuDNN's graph API has for a convolution."""

from __future__ import annotations

from tilewise.problems.conv.problem import ConvProblem
from tilewise.solvers.vendor._catalogue import plain
from tilewise.solvers.vendor._cudnn import CudnnEngines

__all__ = ["Cudnn"]


class Cudnn(CudnnEngines):
    """One engine of cuDNN's graph API for the convolution alone."""

    name, version = "cudnn", 1
    most_configs = 14

    def graphed(self, p: ConvProblem) -> ConvProblem:
        """The convolution alone."""
        return plain(p)
