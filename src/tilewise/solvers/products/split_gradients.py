"""Gradients of filters in fp32 by the bf16 products of tile registers (Intel's AMX)."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from tilewise.plan import Config
from tilewise.problems.conv.problem import ConvProblem, Pass
from tilewise.solvers.base import Cost, Run
from tilewise.solvers.common.tiles import config_reasons, integer
from tilewise.solvers.conv import ConvSolver
from tilewise.solvers.products._split import RATE, refused
from tilewise.solvers.products._split_gradients import division, forms
from tilewise.solvers.products._split_gradients_run import GradientRun

__all__ = ["SplitGradients"]


class SplitGradients(ConvSolver):
    """Gradients of filters by numbers of fp32 that are sums of ``parts`` numbers of bf16, as in ``split_products``.

    Tile registers sum over pixels. Both images lie on one grid with zeros between lines, so that a tap multiplies the
    input's pixels with as many of the output's gradient that follow each other, some places further. With a stride, the
    input's pixels that are alike modulo the stride have a grid of their own. A strip has ``lines`` by ``columns`` of
    the grid of each of ``images``; its parts and the tiles made of them stay in a core's cache. A unit of work has the
    input's channels of one of ``channel_parts``, and the strips of one of ``shares``, whose sums are added in the end.
    With ``line_taps`` of a filter's width, the input's few channels count once for each tap of a line.

    Where an image or a gradient holds infinities or NaN, all results of its channel may be NaN; numbers below 1e-33
    count as fewer digits or none. At most ``threads`` threads are used; ``team`` says whether they are torch's.
    """

    name, version = "split_gradients", 1
    passes = frozenset({Pass.WGRAD})
    devices = frozenset({"cpu"})
    dtypes = frozenset({"fp32"})
    dims = frozenset({1, 2})
    accumulates = True
    amounts = frozenset({"images", "lines", "columns", "channel_parts", "shares"})
    error_bound = {"ieee": 1e-5, "tf32": 1e-5}  # noqa: RUF012
    exact_memory = True

    def unsupported(self, p: ConvProblem) -> list[str]:
        """Reasons: no Numba, no tile registers, images that are views, groups, 16-bit results."""
        return refused(p)

    def configs(self, p: ConvProblem) -> Iterable[Config]:
        """For two and three parts the divisions that should be fastest."""
        return forms(p)

    def workspace(self, p: ConvProblem, c: Config) -> int:
        """Bytes of every thread's strip and sums, and of the sums of several shares."""
        divided = division(p, c)
        return integer(c, "threads") * divided.places()["size"] + divided.partial

    def exactness(self, c: Config) -> object:
        """The number of parts."""
        return c.get("parts")

    def cost(self, p: ConvProblem, c: Config) -> Cost:
        """Products of whole tiles, and the sums of several shares.

        The operations are as many as vector registers do in the same time, since tile registers exceed their peak.
        """
        divided = division(p, c)
        flops = int(divided.flops / RATE[divided.parts])
        return Cost(flops, p.bytes + 2 * divided.partial, 2 if divided.partial else 1)

    def bind(self, p: ConvProblem, c: Config, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None) -> Run:
        """Compile the kernels. Raises ``SolverUnavailable`` with the compiler's reason."""
        assert out is not None
        with config_reasons(p, c):
            return GradientRun(p, c, a, b, out).run
