"""Convolution of images whose channels lie innermost, without a copy of the image."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from tilewise.plan import Config
from tilewise.problems.activations import CONV_ACTIVATIONS
from tilewise.problems.conv.problem import ConvProblem, Pass
from tilewise.solvers.base import Cost, Prepare, Run
from tilewise.solvers.common.channels_last import reasons, strides_of
from tilewise.solvers.common.tiles import config_reasons, integer
from tilewise.solvers.conv import ConvSolver
from tilewise.solvers.products._indirect import Pixels, division, forms, in_panels, reads_planes

__all__ = ["Indirect"]

EFFICIENCY = 0.95
"""Share of the peak that tiles reach."""


class Indirect(ConvSolver):
    """Products of tiles of pixels with panels of the filter (Dukhan 2019, "The Indirect Convolution Algorithm").

    A tile has ``rows`` pixels and ``vectors`` vectors of output channels, whose sums stay in registers over all taps
    and channels. Its pixels are found by a table of addresses, so that strides, dilation, padding and the ends of rows
    cost nothing, and a kernel of one tap is a matrix product. Pixels are divided into ``parts`` and panels into
    ``panel_parts``. With ``lines``, for images of few channels, a unit copies the rows that so many rows of results
    read, and these images may be contiguous. Groups whose outputs fill vectors badly are computed ``interleaved`` at a
    time: their channels take turns in the lanes, which the copied rows already have in that order. Constant filters
    are kept in panels. At most ``threads`` threads are used; ``team`` says whether they are torch's.
    """

    name, version = "indirect", 5
    passes = frozenset({Pass.FPROP})
    devices = frozenset({"cpu"})
    dtypes = frozenset({"fp32"})
    adds_bias = True
    adds_residual = True
    writes_over_residual = True
    activations = frozenset(CONV_ACTIVATIONS)
    error_bound = {"ieee": 5e-6, "tf32": 5e-6}  # noqa: RUF012
    exact_memory = True

    def unsupported(self, p: ConvProblem) -> list[str]:
        """Reasons: Numba is not installed, channels are not innermost, one channel in each group, 16-bit results."""
        found = reasons(p, ("y",) if reads_planes(p) else ("x", "y"))
        if p.depthwise:
            found.append("takes groups of several channels, not depthwise ones")
        return found

    def configs(self, p: ConvProblem) -> Iterable[Config]:
        """The division that should be fastest, for each number of vectors and of groups side by side."""
        return forms(p)

    def workspace(self, p: ConvProblem, c: Config) -> int:
        """Bytes of every thread's tables and copied rows, and of filters that are not kept."""
        divided = division(p, c)
        filters = 0 if p.constant_weight else divided.filter_bytes
        return integer(c, "threads") * divided.places()["size"] + filters

    def constant(self, p: ConvProblem, c: Config) -> int:
        """Bytes of constant filters in panels."""
        return division(p, c).filter_bytes if p.constant_weight else 0

    def prepare(self, p: ConvProblem, c: Config, weight: torch.Tensor) -> Prepare:
        """What puts filters into panels."""
        divided = division(p, c)

        def prepared(weight: torch.Tensor, kept: torch.Tensor, workspace: torch.Tensor | None) -> None:
            in_panels(divided, weight, kept)

        return prepared

    def cost(self, p: ConvProblem, c: Config) -> Cost:
        """Products of whole tiles and panels."""
        divided = division(p, c)
        tiles = divided.tiles * (divided.parts if divided.lines else 1)
        flops = 2 * divided.groups * tiles * divided.rows * divided.chunks * divided.lanes * divided.depth
        filters = 0 if p.constant_weight else 2 * p.nbytes("w")
        return Cost(flops, p.bytes + filters, 1 if p.constant_weight else 2, EFFICIENCY)

    def bind(self, p: ConvProblem, c: Config, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None) -> Run:
        """Compile the kernels. Raises ``SolverUnavailable`` with the compiler's reason."""
        assert out is not None
        with config_reasons(p, c):
            return Pixels(p, c, strides_of(a, out), b).run
