"""Convolution in tiles by this package's small transforms (Vasilache et al. 2014, sections 5 and 6)."""

from __future__ import annotations

from collections.abc import Collection, Iterable

import torch

from tilewise.plan import Config
from tilewise.problems.conv.problem import ConvProblem
from tilewise.solvers.base import Cost, Prepare, Run
from tilewise.solvers.conv import ConvSolver
from tilewise.solvers.fourier import _own_configs as own

__all__ = ["TiledFFT"]

MOST_PLACES = 4


class TiledFFT(ConvSolver):
    """Overlap-save: each tile of the result from the part of the image that it reads, by small transforms.

    For planes and signals. ``basis`` is the transforms' size, ``tile`` that of a tile of the result (in WGRAD of the
    output gradient; products are summed over all tiles, section 6). ``product`` says how frequencies are multiplied
    (``fused``: inside the inverse transform of planes), ``gemm`` in what pieces, and ``spectra`` in what parts numbers
    are held for that (absent: complex64). ``block`` images and ``tiles`` of each are in flight at a time (absent: all).
    Infinities and NaN spread over their tile.
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
        """Reasons: the limits of this package's transforms, or images that one transform holds (solver ``fft`` does
        those).
        """
        reasons = own.limits(p)
        if not reasons and not self._places(p):
            reasons.append("has no smaller tiles: one transform holds the image, or the kernel's rim takes nearly all")
        return reasons

    @staticmethod
    def _places(p: ConvProblem) -> list[own.Place]:
        """Bases and tiles with more than one tile."""
        return [place for place in own.places(p) if own.count(p, place[1]) > 1]

    def configs(self, p: ConvProblem) -> Iterable[Config]:
        """The bases that move least, with the products and pieces that fill best, on all images or fewer."""
        return [c for c, _ in self.offers(p, None)]

    def offers(
        self, p: ConvProblem, ceiling: int | None, only: Collection[Config] | None = None
    ) -> Iterable[tuple[Config, int]]:
        """As :meth:`configs`, with as many images at a time as fit into ``ceiling``, else tiles of one image."""
        if only is not None:
            return [(c, self.workspace(p, c)) for c in only if "tile" in c and own.fits(p, c)]
        return list(own.offered(p, self._places(p), ceiling, MOST_PLACES, tiled=True))

    def workspace(self, p: ConvProblem, c: Config) -> int:
        """Bytes of the spectra in flight and of the filter's."""
        return own.plan_of(p, c).arena.size

    def constant(self, p: ConvProblem, c: Config) -> int:
        """Bytes of a constant filter's spectrum."""
        return own.plan_of(p, c).constants.size

    def prepare(self, p: ConvProblem, c: Config, weight: torch.Tensor) -> Prepare:
        """What transforms a constant filter ahead of the calls."""
        return own.plan_of(p, c).prepare(weight, weight.device)

    def hidden_workspace(self, p: ConvProblem, c: Config) -> int:
        """Bytes that products by the library allocate."""
        return own.hidden(p, c)

    def cost(self, p: ConvProblem, c: Config) -> Cost:
        """The products' arithmetic, and the traffic over operands, spectra and result."""
        return own.cost(p, c)

    def bind(self, p: ConvProblem, c: Config, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None) -> Run:
        """Compile the kernels for these strides. Raises ``SolverUnavailable`` with the reason."""
        if out is None:
            raise ValueError(f"out=None: {self.name} writes into a tensor of shape {p.shape(p.result)}")
        return own.bind(p, c, a, b, out)
