"""Winograd convolution: small tiles by fewer multiplications than taps."""

from __future__ import annotations

from collections.abc import Collection, Iterable

import torch

from tilewise.plan import Config
from tilewise.problem import ConvProblem, Pass
from tilewise.solvers._costs import CPU_CACHE
from tilewise.solvers._depthwise_cpu import missing, strides
from tilewise.solvers._tiles import integer
from tilewise.solvers._winograd import TAPS, TILES, Tiles, forms, sizes, tiling
from tilewise.solvers.base import Cost, Prepare, Run, Solver, SolverUnavailable

__all__ = ["Winograd"]

EFFICIENCY = 0.7
"""Share of a matrix product's rate that products and transforms reach together."""

SHARED = 0.25
"""What a byte costs that comes from a cache that cores share, beside one through memory."""


class Winograd(Solver):
    """Winograd convolution F(m, r) along each axis (Lavin and Gray 2016) whose blocks of tiles stay in a core's cache.

    ``tile`` is m, along axes with more than one tap; ``block`` the tile rows and columns of a block, ``vectors`` so
    many vectors of ``lanes`` outputs are summed at a time, each block's outputs go in ``shares``. A filter's gradient
    may be summed over ``parts`` of the blocks, which are added up. ``threads`` bounds threads, and ``team`` says
    whether they are torch's. Transformed filters that are constant are kept.
    """

    name, version = "winograd", 5
    passes = frozenset(Pass)
    devices = frozenset({"cpu"})
    dtypes = frozenset({"fp32"})
    dims = frozenset({1, 2, 3})
    adds_bias = True
    error_bound = {"ieee": 1e-5, "tf32": 1e-5}  # noqa: RUF012

    def unsupported(self, p: ConvProblem) -> list[str]:
        """The absent Numba, strides, dilation, long kernels, no tile that is accurate enough, results of 16 bits."""
        reasons = missing()
        for name, axis in zip(p.space, p.axes, strict=True):
            if axis.kernel > TAPS or (axis.stride, axis.dilation) != (1, 1):
                reasons.append(
                    f"takes kernels of up to {TAPS} without stride or dilation along {name}, not {axis.kernel} with "
                    f"{axis.stride} and {axis.dilation}"
                )
        kernel = "x".join(str(axis.kernel) for axis in p.axes)
        if all(axis.kernel == 1 for axis in p.axes):
            reasons.append(f"has no multiplications to save with a kernel of {kernel}")
        elif not reasons and not sizes(p):
            reasons.append(f"tiles of {', '.join(map(str, sorted(TILES)))} round too much with a kernel of {kernel}")
        if p.out_dtype != "fp32":
            reasons.append(f"gives fp32, not {p.out_dtype}")
        return reasons

    def configs(self, p: ConvProblem) -> Iterable[Config]:
        return forms(p)

    def offers(
        self, p: ConvProblem, ceiling: int | None, only: Collection[Config] | None = None
    ) -> Iterable[tuple[Config, int]]:
        """Under a limit blocks within a core's cache in place of larger ones that break it."""

        def sized(within: bool) -> list[tuple[Config, int]]:
            return [(c, self.workspace(p, c)) for c in forms(p, within=within)]

        if only is not None:
            return [offer for offer in dict.fromkeys((*sized(within=False), *sized(within=True))) if offer[0] in only]
        if ceiling is None:
            return sized(within=False)
        pairs = zip(sized(within=False), sized(within=True), strict=True)
        return [less if more[1] > ceiling >= less[1] else more for more, less in pairs]

    def workspace(self, p: ConvProblem, c: Config) -> int:
        """A block of every thread, and transformed filters that are not kept or gradients that are added up."""
        t = tiling(p, c)
        own = integer(c, "threads") * t.scratch
        if p.pass_ is Pass.WGRAD:
            return own + (t.parts * p.nbytes("w") if t.parts > 1 else 0)
        return own + (0 if p.constant_weight else t.filters)

    def constant(self, p: ConvProblem, c: Config) -> int:
        """Transformed filters that are constant."""
        return tiling(p, c).filters if p.constant_weight else 0

    def prepare(self, p: ConvProblem, c: Config, weight: torch.Tensor) -> Prepare:
        """Transforms of filters."""
        return Tiles(p, c, {"x": [0] * 5, "w": strides(weight), "y": [0] * 5}).prepare

    def cost(self, p: ConvProblem, c: Config) -> Cost:
        """Products of whole tiles, transforms, and what blocks read again, from a cache that cores share."""
        t = tiling(p, c)
        points = p.groups * t.tiles[0] * t.tiles[1] * t.points
        gradient = p.pass_ is Pass.WGRAD  # whose vectors are of inputs, and which transforms outputs for each of them
        products = 2 * points * (t.outputs if gradient else t.inputs) * t.chunks * t.vectors * t.lanes
        transformed = t.inputs * t.shares + t.outputs * (t.chunks if gradient else 1)
        transforms = 2 * points * sum(n for n in t.n if n > 1) * transformed
        if gradient:
            again = p.nbytes("x") * (t.shares - 1) + p.nbytes("y") * (t.chunks - 1)
            moved = p.bytes + (2 * t.parts * p.nbytes("w") if t.parts > 1 else 0)
        else:
            again = 0 if t.filters <= p.groups * CPU_CACHE // 2 else t.filters * (t.blocks - 1)
            moved = p.bytes - p.nbytes("w") + t.filters if p.constant_weight else p.bytes + 2 * t.filters
        return Cost(products + transforms, moved + int(SHARED * again), 1 if p.constant_weight else 2, EFFICIENCY)

    def bind(self, p: ConvProblem, c: Config, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None) -> Run:
        """Compile the kernels. Raises ``SolverUnavailable`` with the compiler's reason."""
        assert out is not None
        tensors = zip((*p.operands, p.result), (a, b, out), strict=True)
        try:
            return Tiles(p, c, {role: strides(t) for role, t in tensors}).run
        except (KeyError, ValueError) as error:
            raise SolverUnavailable(f"{c} is no config of {p.key}: {error}") from error
