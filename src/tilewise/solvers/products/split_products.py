"""Convolution in fp32 by the bf16 products of tile registers (Intel's AMX)."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from tilewise.plan import Config
from tilewise.problems.activations import CONV_ACTIVATIONS
from tilewise.problems.conv.problem import ConvProblem, Pass
from tilewise.solvers.base import Cost, Prepare, Run
from tilewise.solvers.common.tiles import config_reasons, integer
from tilewise.solvers.conv import ConvSolver
from tilewise.solvers.products._split import (
    RATE,
    divisions,
    filter_bytes,
    forms,
    refused,
)
from tilewise.solvers.products._split_run import SplitFilters, SplitRun

__all__ = ["SplitProducts"]


class SplitProducts(ConvSolver):
    """Numbers of fp32 as sums of ``parts`` numbers of bf16, whose products tile registers multiply (Henry et al. 2019).

    The products of parts are exact in fp32. Six of three parts have the accuracy of fp32, three of two parts an error
    of about 3e-6. A tile has ``rows`` pixels and 32 outputs, whose sums stay in registers over all taps and channels. A
    unit of work has ``lines`` by ``columns`` results of each of ``images``. Their pixels are split once for all
    outputs, or for those of one of ``panel_parts``. Constant filters are kept in parts, others are split at every call.
    The gradient of a strided layer is computed for places that are alike modulo the stride, one after the other.

    Where an image or a filter holds infinities, results that read one may be NaN; numbers below 1e-33 count as fewer
    digits or none. At most ``threads`` threads are used; ``team`` says whether they are torch's.
    """

    name, version = "split_products", 3
    passes = frozenset({Pass.FPROP, Pass.DGRAD})
    devices = frozenset({"cpu"})
    dtypes = frozenset({"fp32"})
    dims = frozenset({1, 2})
    adds_bias = True
    adds_residual = True
    activations = frozenset(CONV_ACTIVATIONS)
    amounts = frozenset({"rows", "images", "lines", "columns", "panel_parts"})
    error_bound = {"ieee": 1e-5, "tf32": 1e-5}  # noqa: RUF012
    exact_memory = True

    def unsupported(self, p: ConvProblem) -> list[str]:
        """Reasons: no Numba, no tile registers, images that are views, groups, 16-bit results."""
        return refused(p)

    def configs(self, p: ConvProblem) -> Iterable[Config]:
        """For two and three parts the divisions that should be fastest."""
        return forms(p)

    def workspace(self, p: ConvProblem, c: Config) -> int:
        """Bytes of every thread's parts of pixels, and of filters in parts that are not kept."""
        divided = divisions(p, c)
        scratch = integer(c, "threads") * max(each.places()["size"] for each in divided)
        return scratch + (0 if p.constant_weight else filter_bytes(divided))

    def constant(self, p: ConvProblem, c: Config) -> int:
        """Bytes of a constant filter's parts."""
        return filter_bytes(divisions(p, c)) if p.constant_weight else 0

    def exactness(self, c: Config) -> object:
        """The number of parts."""
        return c.get("parts")

    def prepare(self, p: ConvProblem, c: Config, weight: torch.Tensor) -> Prepare:
        """What splits constant filters and puts them into tiles."""
        return SplitFilters(c, divisions(p, c), weight).prepare

    def cost(self, p: ConvProblem, c: Config) -> Cost:
        """Products of whole tiles at the rate of so many parts, and filters that are split."""
        divided = divisions(p, c)
        filters = filter_bytes(divided)
        moved = p.bytes + (filters // 2 if p.constant_weight else 2 * filters)
        flops = int(sum(each.flops for each in divided) / RATE[divided[0].parts])
        return Cost(flops, moved, len(divided))

    def bind(self, p: ConvProblem, c: Config, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None) -> Run:
        """Compile the kernels. Raises ``SolverUnavailable`` with the compiler's reason."""
        assert out is not None
        with config_reasons(p, c):
            return SplitRun(p, c, a, b, out).run
