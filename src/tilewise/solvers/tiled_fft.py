"""Convolution in tiles of small transforms of our own (Vasilache et al. 2014, sections 5 and 6)."""

from __future__ import annotations

from collections.abc import Collection, Iterable

import torch

from tilewise.plan import Config
from tilewise.problem import ConvProblem
from tilewise.solvers import _own_fft_configs as own
from tilewise.solvers.base import Cost, Prepare, Run, Solver

__all__ = ["TiledFFT"]

MOST_PLACES = 4


class TiledFFT(Solver):
    """Overlap-save: each tile of the result from the tile of the image that it reads, by transforms that fit it.

    Of planes and of signals. ``basis`` is the transforms' size, ``tile`` that of a tile of the result (of the output
    gradient for WGRAD, which sums products over all tiles: section 6), ``product`` how frequencies are multiplied
    (``fused``: inside of the inverse transform of planes) and ``gemm`` in what pieces, ``spectra`` in what parts
    numbers of planes' are written for that (absent: complex64). ``block`` images and ``tiles`` of each are in flight at
    a time (absent: all). Numbers that are not finite spread over their tile.
    """

    kin = "Fourier transforms"
    name, version = "tiled_fft", 3
    devices = frozenset({"cuda"})
    dims = frozenset({1, 2})
    blocks_itself = True
    compiles = True
    most_configs = 4
    error_bound = {"ieee": 3e-6, "tf32": 3e-3}  # noqa: RUF012

    def unsupported(self, p: ConvProblem) -> list[str]:
        """What our own transforms do not reach, and images that one of them holds whole, which are the solver fft's."""
        reasons = own.limits(p)
        if not reasons and not self._places(p):
            reasons.append("has no smaller tiles: one transform holds the image, or the kernel's rim takes nearly all")
        return reasons

    @staticmethod
    def _places(p: ConvProblem) -> list[own.Place]:
        return [place for place in own.places(p) if own.count(p, place[1]) > 1]

    def configs(self, p: ConvProblem) -> Iterable[Config]:
        """The bases that move least, with the products and pieces that fill best, on all images or fewer."""
        return [c for c, _ in self.offers(p, None)]

    def offers(
        self, p: ConvProblem, ceiling: int | None, only: Collection[Config] | None = None
    ) -> Iterable[tuple[Config, int]]:
        """As :meth:`configs`, with as many images in flight as fit ``ceiling``, and then as many tiles of one."""
        if only is not None:
            return [(c, self.workspace(p, c)) for c in only if "tile" in c and own.fits(p, c)]
        return list(own.offered(p, self._places(p), ceiling, MOST_PLACES, tiled=True))

    def workspace(self, p: ConvProblem, c: Config) -> int:
        """The spectra in flight and the filter's."""
        return own.plan_of(p, c).arena.size

    def constant(self, p: ConvProblem, c: Config) -> int:
        """The spectrum of a constant filter."""
        return own.plan_of(p, c).constants.size

    def prepare(self, p: ConvProblem, c: Config, weight: torch.Tensor) -> Prepare:
        """Transforms of filters."""
        return own.plan_of(p, c).prepare(weight, weight.device)

    def hidden_workspace(self, p: ConvProblem, c: Config) -> int:
        """What the library's products allocate."""
        return own.hidden(p, c)

    def cost(self, p: ConvProblem, c: Config) -> Cost:
        """The products' arithmetic, and the passes over operands, spectra and result."""
        return own.cost(p, c)

    def bind(self, p: ConvProblem, c: Config, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None) -> Run:
        """Compile the kernels for these strides. Raises ``SolverUnavailable`` with the reason."""
        if out is None:
            raise ValueError(f"out=None: {self.name} writes into a tensor of shape {p.shape(p.result)}")
        return own.bind(p, c, a, b, out)
