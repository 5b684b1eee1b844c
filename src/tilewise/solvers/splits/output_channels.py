"""Output channels in parts, for algorithms that keep the whole filter in their workspace.

Transformed filters are the part of an FFT's workspace that micro-batches (Oyama et al. 2018) cannot divide.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from tilewise.plan import Config
from tilewise.problems.base import dense_strides, layout_of
from tilewise.problems.conv.problem import ConvProblem, Pass
from tilewise.solvers.base import Cost
from tilewise.solvers.conv import ConvSplit

WAYS = (2, 3, 4, 6, 8)
"""Numbers of equal parts that are tried."""


class OutputChannels(ConvSplit):
    """Divides the output channels of an ungrouped convolution.

    DGRAD adds its parts in order; in other passes each part writes its own range of the result.
    """

    name, version = "output_channels", 1
    axis, level = "out_channels", 4

    def unsupported(self, p: ConvProblem) -> list[str]:
        """Reasons: several groups, or no equal parts of a multiple of 8 channels."""
        if p.groups > 1:
            return ["cuts ungrouped convolutions"]
        return [] if self._cuts(p) else [f"{p.out_channels} output channels have no equal parts of a multiple of 8"]

    def sizes(self, p: ConvProblem, policy: str) -> Sequence[int]:
        """Sizes of equal parts, largest first."""
        return () if policy == "undivided" else self._cuts(p)

    def child(self, p: ConvProblem, size: int) -> ConvProblem:
        """The problem of ``size`` channels that start at a multiple of ``size``."""
        if size == p.out_channels:
            return p
        sums = p.pass_ is Pass.DGRAD
        lx, _, ly = p.layouts
        ax, aw, ay = p.alignment
        shape, strides = list(p.shape("y")), dense_strides(p.shape("y"), ly)
        shape[1] = size
        plane = strides[1] * size * p.torch_dtype("y").itemsize
        return replace(
            p,
            out_channels=size,
            bias=False,
            accumulate=p.accumulate or sums,
            out_dtype="fp32" if sums else p.out_dtype,
            layouts=(lx, p.layouts[1], "view" if ly == "view" else layout_of(shape, strides)),
            alignment=(ax, math.gcd(aw, p.nbytes("w") // p.out_channels * size), math.gcd(ay, plane)),
        )

    def cost(self, p: ConvProblem, c: Config) -> Cost:
        """Nothing beside the cost of its parts."""
        return Cost(0, 0, kernels=0)

    def _cuts(self, p: ConvProblem) -> list[int]:
        """Sizes of equal parts, multiples of 8, for each number of parts in :data:`WAYS`."""
        return [p.out_channels // n for n in WAYS if p.out_channels % (8 * n) == 0]
