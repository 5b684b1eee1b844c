"""Depthwise convolution of images whose channels lie innermost, for inference on a CPU."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from tilewise.plan import Config
from tilewise.problems.activations import CONV_ACTIVATIONS
from tilewise.problems.conv.problem import ConvProblem, Pass
from tilewise.solvers.base import Cost, Prepare, Run
from tilewise.solvers.common.channels_last import LONGEST, reasons, strides_of
from tilewise.solvers.common.tiles import config_reasons, integer
from tilewise.solvers.conv import ConvSolver
from tilewise.solvers.depthwise._last import Lines, division, forms, in_panels

__all__ = ["DepthwiseLast"]

EFFICIENCY = 0.5
"""Share of the peak that tiles reach, as pixels and taps are read for few products."""


class DepthwiseLast(ConvSolver):
    """Sums of neighbouring pixels in registers, with vectors along channels (Georganas et al. 2018, section II).

    A tile has ``rows`` neighbouring pixels of a row of results and ``vectors`` vectors of channels. Line by line of the
    filter it reads the line's taps, and each pixel of the image once for all the sums that it belongs to. Pixels are
    found by tables of addresses, so that padding of any kind costs nothing. Tiles are divided into ``parts`` and
    channels into ``panel_parts``. Constant filters are kept in panels of ``vectors`` vectors. At most ``threads``
    threads are used; ``team`` says whether they are torch's.
    """

    name, version = "depthwise_last", 1
    passes = frozenset({Pass.FPROP})
    devices = frozenset({"cpu"})
    dtypes = frozenset({"fp32"})
    adds_bias = True
    adds_residual = True
    activations = frozenset(CONV_ACTIVATIONS)
    error_bound = {"ieee": 5e-6, "tf32": 5e-6}  # noqa: RUF012
    exact_memory = True

    def unsupported(self, p: ConvProblem) -> list[str]:
        """Reasons: no Numba, channels are not innermost, no depthwise layer of one filter a channel, long lines."""
        found = reasons(p)
        if not p.depthwise or p.out_channels != p.in_channels:
            found.append("takes depthwise layers with one filter to a channel")
        if p.axes[-1].kernel > LONGEST:
            found.append(f"unrolls lines of the filter: of at most {LONGEST} taps, not {p.axes[-1].kernel}")
        return found

    def configs(self, p: ConvProblem) -> Iterable[Config]:
        """The division that should be fastest, for each number of vectors."""
        return forms(p)

    def workspace(self, p: ConvProblem, c: Config) -> int:
        """Bytes of every thread's tables, and of filters that are not kept."""
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
        flops = 2 * divided.tiles * divided.rows * divided.chunks * divided.lanes * p.taps
        filters = 0 if p.constant_weight else 2 * p.nbytes("w")
        return Cost(flops, p.bytes + filters, 1 if p.constant_weight else 2, EFFICIENCY)

    def bind(self, p: ConvProblem, c: Config, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None) -> Run:
        """Compile the kernels. Raises ``SolverUnavailable`` with the compiler's reason."""
        assert out is not None
        with config_reasons(p, c):
            return Lines(p, c, strides_of(a, out)).run
