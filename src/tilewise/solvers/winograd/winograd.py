"""Winograd convolution on a CPU: small tiles, by fewer multiplications than taps."""

from __future__ import annotations

from collections.abc import Collection, Iterable

import torch

from tilewise.plan import Config
from tilewise.problems.activations import CONV_ACTIVATIONS
from tilewise.problems.conv.problem import ConvProblem, Pass
from tilewise.solvers.base import Cost, Prepare, Run
from tilewise.solvers.common.costs import CPU_CACHE
from tilewise.solvers.common.cpu_run import byte_strides, numba_missing
from tilewise.solvers.common.tiles import config_reasons, integer
from tilewise.solvers.conv import ConvSolver
from tilewise.solvers.winograd._cpu import TAPS, TILES, Tiles, forms, sizes, tiling

__all__ = ["Winograd"]

EFFICIENCY = 0.7
"""Share of a matrix product's rate that products and transforms reach together."""

SHARED = 0.25
"""Cost per byte from a cache shared by cores, relative to memory."""


class Winograd(ConvSolver):
    """Winograd convolution F(m, r) along each axis (Lavin and Gray 2016), with blocks of tiles in a core's cache.

    ``tile`` is m, along axes with more than one tap. ``block`` is the number of tile rows and columns of a block,
    ``vectors`` the number of vectors of ``lanes`` outputs that are summed at a time; each block's outputs are divided
    into ``shares``. Bias, residual and activation follow as transformed sums are written. A weight gradient may be
    summed over ``parts`` of the blocks, which are then added. At most ``threads`` threads are used; ``team`` says
    whether they are torch's. Transformed filters are kept where they are constant.
    """

    name, version = "winograd", 6
    passes = frozenset(Pass)
    devices = frozenset({"cpu"})
    dtypes = frozenset({"fp32"})
    dims = frozenset({1, 2, 3})
    adds_bias = True
    adds_residual = True
    writes_over_residual = True
    activations = frozenset(CONV_ACTIVATIONS)
    error_bound = {"ieee": 1e-5, "tf32": 1e-5}  # noqa: RUF012
    exact_memory = True

    def unsupported(self, p: ConvProblem) -> list[str]:
        """Reasons: no Numba, stride or dilation, long kernels, no tile that is accurate enough, 16-bit results."""
        reasons = numba_missing()
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
        """For each size of tiles the blocks that should be fastest."""
        return forms(p)

    def offers(
        self, p: ConvProblem, ceiling: int | None, only: Collection[Config] | None = None
    ) -> Iterable[tuple[Config, int]]:
        """As :meth:`configs`; blocks over ``ceiling`` bytes are replaced by ones within a core's cache."""

        def sized(within: bool) -> list[tuple[Config, int]]:
            return [(c, self.workspace(p, c)) for c in forms(p, within=within)]

        if only is not None:
            return [offer for offer in dict.fromkeys((*sized(within=False), *sized(within=True))) if offer[0] in only]
        if ceiling is None:
            return sized(within=False)
        pairs = zip(sized(within=False), sized(within=True), strict=True)
        return [small if large[1] > ceiling >= small[1] else large for large, small in pairs]

    def workspace(self, p: ConvProblem, c: Config) -> int:
        """Bytes of every thread's block, and of transformed filters that are not kept or partial weight gradients."""
        t = tiling(p, c)
        scratch = integer(c, "threads") * t.scratch
        if p.pass_ is Pass.WGRAD:
            return scratch + (t.parts * p.nbytes("w") if t.parts > 1 else 0)
        return scratch + (0 if p.constant_weight else t.filters)

    def constant(self, p: ConvProblem, c: Config) -> int:
        """Bytes of transformed filters that are constant."""
        return tiling(p, c).filters if p.constant_weight else 0

    def prepare(self, p: ConvProblem, c: Config, weight: torch.Tensor) -> Prepare:
        """What transforms a constant filter ahead of the calls."""
        return Tiles(p, c, {"x": [0] * 5, "w": byte_strides(weight), "y": [0] * 5}).prepare

    def cost(self, p: ConvProblem, c: Config) -> Cost:
        """Products of whole tiles, transforms, and what blocks read again from a cache shared by cores."""
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
        with config_reasons(p, c):
            return Tiles(p, c, {role: byte_strides(t) for role, t in tensors}).run
