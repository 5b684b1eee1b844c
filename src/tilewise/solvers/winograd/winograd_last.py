"""Winograd convolution on a CPU for images whose channels lie innermost."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch

from tilewise.plan import Config
from tilewise.problems.activations import CONV_ACTIVATIONS
from tilewise.problems.conv.problem import ConvProblem, Pass
from tilewise.solvers.base import Cost, Prepare, Run
from tilewise.solvers.common.channels_last import reasons, strides_of
from tilewise.solvers.common.tiles import config_reasons, integer
from tilewise.solvers.conv import ConvSolver
from tilewise.solvers.winograd._cpu import TAPS, TILES, sizes
from tilewise.solvers.winograd._last import LastTiles, blocked, forms

__all__ = ["WinogradLast"]

EFFICIENCY = 0.8
"""Share of the peak that products and transforms reach together."""


class WinogradLast(ConvSolver):
    """Winograd convolution F(m, r) along each axis with vectors of channels (Lavin and Gray 2016, section 4.1).

    ``tile`` is m. Channels are innermost, so that transforms are sums of whole vectors and nothing is transposed. A
    unit of work transforms one of ``blocks`` blocks of tiles. Then, for each panel of ``vectors`` vectors of output
    channels in one of ``panel_parts``, it multiplies ``rows`` tiles at a time with the transformed filters, and
    transforms the sums back, adding bias and residual and applying the activation. Constant filters are kept
    transformed. At most ``threads`` threads are used; ``team`` says whether they are torch's.
    """

    name, version = "winograd_last", 1
    passes = frozenset({Pass.FPROP})
    dims = frozenset({1, 2})
    devices = frozenset({"cpu"})
    dtypes = frozenset({"fp32"})
    adds_bias = True
    adds_residual = True
    writes_over_residual = True
    activations = frozenset(CONV_ACTIVATIONS)
    error_bound = {"ieee": 1e-5, "tf32": 1e-5}  # noqa: RUF012
    exact_memory = True

    def unsupported(self, p: ConvProblem) -> list[str]:
        """Reasons: no Numba, channels not innermost, stride or dilation, long kernels, rounding, 16-bit results."""
        found = reasons(p)
        for name, axis in zip(p.space, p.axes, strict=True):
            if axis.kernel > TAPS or (axis.stride, axis.dilation) != (1, 1):
                found.append(
                    f"takes kernels of up to {TAPS} without stride or dilation along {name}, not {axis.kernel} with "
                    f"{axis.stride} and {axis.dilation}"
                )
        kernel = "x".join(str(axis.kernel) for axis in p.axes)
        if p.taps == 1:
            found.append(f"has no multiplications to save with a kernel of {kernel}")
        elif not found and not sizes(p):
            found.append(f"tiles of {', '.join(map(str, sorted(TILES)))} round too much with a kernel of {kernel}")
        if p.depthwise:
            found.append("takes groups of several channels, not depthwise ones")
        return found

    def configs(self, p: ConvProblem) -> Iterable[Config]:
        """The division that should be fastest, for each size of tiles."""
        return forms(p)

    def workspace(self, p: ConvProblem, c: Config) -> int:
        """Bytes of every thread's block, or of a copy of filters before it, and of filters that are not kept."""
        divided = blocked(p, c)
        scratch = max(integer(c, "threads") * divided.places()["size"], divided.copied_filter)
        return scratch + -scratch % 64 + (0 if p.constant_weight else p.groups * divided.group_bytes)

    def constant(self, p: ConvProblem, c: Config) -> int:
        """Bytes of transformed filters that are constant."""
        return p.groups * blocked(p, c).group_bytes if p.constant_weight else 0

    def prepare(self, p: ConvProblem, c: Config, weight: torch.Tensor) -> Prepare:
        """What transforms a constant filter ahead of the calls."""
        return LastTiles(p, c, {"x": [0] * (2 + p.dims), "y": [0] * (2 + p.dims)}).prepare

    def cost(self, p: ConvProblem, c: Config) -> Cost:
        """Products of whole tiles, transforms, and filters that blocks read again from a cache shared by cores."""
        divided = blocked(p, c)
        points = p.groups * math.prod(divided.points) * divided.blocks
        products = 2 * points * divided.padded * divided.channels * divided.chunks * divided.lanes
        transforms = (
            2
            * points
            * divided.most
            * sum(divided.points)
            * (divided.channels * divided.panel_parts + divided.chunks * divided.lanes)
        )
        filters = p.groups * divided.group_bytes
        moved = p.bytes - p.nbytes("w") + filters * (1 if p.constant_weight else 3)
        return Cost(products + transforms, moved, 1 if p.constant_weight else 2, EFFICIENCY)

    def bind(self, p: ConvProblem, c: Config, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None) -> Run:
        """Compile the kernels. Raises ``SolverUnavailable`` with the compiler's reason."""
        assert out is not None
        with config_reasons(p, c):
            return LastTiles(p, c, strides_of(a, out)).run
