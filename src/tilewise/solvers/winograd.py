"""Winograd convolution: small tiles by fewer multiplications than taps."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from tilewise.plan import Config
from tilewise.problem import ConvProblem, Pass
from tilewise.solvers._depthwise_cpu import missing, strides
from tilewise.solvers._tiles import integer
from tilewise.solvers._winograd import Tiles, forms, tiling
from tilewise.solvers.base import Cost, Prepare, Run, Solver, SolverUnavailable

__all__ = ["Winograd"]

TAPS = 3
EFFICIENCY = 0.7
"""Share of a matrix product's rate that products and transforms reach together."""


class Winograd(Solver):
    """Winograd convolution F(m x m, 3 x 3) (Lavin and Gray 2016) whose blocks of tiles stay in a core's cache.

    ``tile`` is m, ``block`` the tile rows and columns of a block, ``vectors`` so many vectors of ``lanes`` outputs are
    summed at a time, each block's outputs go in ``shares``; ``threads`` bounds threads, and ``team`` says whether they
    are torch's. Transformed filters that are constant are kept.
    """

    name, version = "winograd", 1
    passes = frozenset(Pass)
    devices = frozenset({"cpu"})
    dtypes = frozenset({"fp32"})
    dims = frozenset({2})
    error_bound = {"ieee": 1e-5, "tf32": 1e-5}  # noqa: RUF012

    def unsupported(self, p: ConvProblem) -> list[str]:
        """The absent Numba, other kernels than 3x3 ones, strides, dilation, results of 16 bits."""
        reasons = missing()
        for name, axis in zip(p.space, p.axes, strict=True):
            if (axis.kernel, axis.stride, axis.dilation) != (TAPS, 1, 1):
                reasons.append(
                    f"takes kernels of {TAPS} without stride or dilation along {name}, not {axis.kernel} with "
                    f"{axis.stride} and {axis.dilation}"
                )
        if p.out_dtype != "fp32":
            reasons.append(f"gives fp32, not {p.out_dtype}")
        return reasons

    def configs(self, p: ConvProblem) -> Iterable[Config]:
        return forms(p)

    def workspace(self, p: ConvProblem, c: Config) -> int:
        """A block of every thread, and transformed filters that are not kept."""
        t = tiling(p, c)
        return integer(c, "threads") * t.scratch + (0 if p.constant_weight or p.pass_ is Pass.WGRAD else t.filters)

    def constant(self, p: ConvProblem, c: Config) -> int:
        """Transformed filters that are constant."""
        return tiling(p, c).filters if p.constant_weight else 0

    def prepare(self, p: ConvProblem, c: Config, weight: torch.Tensor) -> Prepare:
        """Transforms of filters."""
        return Tiles(p, c, {"x": [0] * 4, "w": strides(weight), "y": [0] * 4}).prepare

    def cost(self, p: ConvProblem, c: Config) -> Cost:
        """Products of whole tiles, transforms, and filters once a block from memory that cores share."""
        t = tiling(p, c)
        tiles, n = p.groups * t.tiles[0] * t.tiles[1], t.n
        products = 2 * tiles * n * n * t.inputs * t.chunks * t.vectors * t.lanes
        transforms = 4 * tiles * n * n * n * (t.inputs * t.shares + t.outputs)
        moved = p.bytes + 2 * t.filters * (1 + t.blocks // 4)
        return Cost(products + transforms, moved, 1 if p.constant_weight else 2, EFFICIENCY)

    def bind(self, p: ConvProblem, c: Config, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None) -> Run:
        """Compile the kernels. Raises ``SolverUnavailable`` with the compiler's reason."""
        assert out is not None
        tensors = zip((*p.operands, p.result), (a, b, out), strict=True)
        try:
            return Tiles(p, c, {role: strides(t) for role, t in tensors}).run
        except (KeyError, ValueError) as error:
            raise SolverUnavailable(f"{c} is no config of {p.key}: {error}") from error
