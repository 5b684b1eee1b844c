"""Separable convolutions of images whose channels lie innermost, by strips that stay in cache, on a CPU."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from tilewise.plan import Config
from tilewise.problems.activations import CONV_ACTIVATIONS
from tilewise.problems.separable.problem import SeparableProblem
from tilewise.solvers.base import Cost, Prepare, Run
from tilewise.solvers.common.channels_last import LONGEST, strides_of
from tilewise.solvers.common.cpu_run import numba_missing
from tilewise.solvers.common.tiles import config_reasons, integer
from tilewise.solvers.separable._separable import SeparableSolver
from tilewise.solvers.separable._strips import Strips, division, forms, in_panels

__all__ = ["SeparableLast"]

EFFICIENCY = 0.7
"""Share of the peak that tiles reach, of all stages together."""


class SeparableLast(SeparableSolver):
    """All convolutions of a block strip by strip of rows, so that nothing between them leaves a core's cache.

    Each image's results are divided into ``pieces`` of rows. A piece is computed by ``strip`` rows at a time: the rows
    that they need of the expansion and that are not there yet, then the depthwise convolution, then the projection
    (Sandler et al. 2018, section 5.1, do so by channels, for memory; by rows no sum is written twice). Tiles are those
    of ``indirect`` and ``depthwise_last``: ``expand_rows``, ``filter_rows`` and ``project_rows`` pixels by as many
    ``_vectors`` of channels. Filters are kept in panels. At most ``threads`` threads are used; ``team`` says whether
    they are torch's.
    """

    name, version = "separable_last", 1
    devices = frozenset({"cpu"})
    dtypes = frozenset({"fp32"})
    adds_residual = True
    activations = frozenset(CONV_ACTIVATIONS)
    error_bound = {"ieee": 1e-5, "tf32": 1e-5}  # noqa: RUF012
    exact_memory = True
    amounts = frozenset({"strip", "pieces"})

    def unsupported(self, p: SeparableProblem) -> list[str]:
        """Reasons: Numba is not installed, long lines of the filter."""
        found = numba_missing()
        if p.axes[1].kernel > LONGEST:
            found.append(f"unrolls lines of the filter: of at most {LONGEST} taps, not {p.axes[1].kernel}")
        return found

    def configs(self, p: SeparableProblem) -> Iterable[Config]:
        """Strips and pieces of several sizes, the most promising first."""
        return forms(p)

    def workspace(self, p: SeparableProblem, c: Config) -> int:
        """Bytes of every thread's tables and rows."""
        return integer(c, "threads") * division(p, c).places()["size"]

    def constant(self, p: SeparableProblem, c: Config) -> int:
        """Bytes of filters in panels, and of biases."""
        return division(p, c).filter_places()[2]

    def prepare(self, p: SeparableProblem, c: Config, weight: torch.Tensor) -> Prepare:
        """What puts filters into panels."""
        divided = division(p, c)

        def prepared(weight: torch.Tensor, kept: torch.Tensor, workspace: torch.Tensor | None) -> None:
            in_panels(divided, weight, kept)

        return prepared

    def cost(self, p: SeparableProblem, c: Config) -> Cost:
        """Products of the problem: what neighbouring pieces compute twice is little."""
        return Cost(p.flops, p.bytes, 1, EFFICIENCY)

    def bind(self, p: SeparableProblem, c: Config, x: torch.Tensor, w: torch.Tensor, out: torch.Tensor | None) -> Run:
        """Compile the kernels. Raises ``SolverUnavailable`` with the compiler's reason."""
        assert out is not None
        with config_reasons(p, c):
            return Strips(p, c, strides_of(x, out)).run
