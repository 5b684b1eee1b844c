"""Lowering whose matrix is never in memory: a block is lowered into cache, multiplied and lifted."""

from __future__ import annotations

from collections.abc import Collection, Iterable

import torch

from tilewise.kernels.cpu.lowered import Lowered
from tilewise.plan import Config
from tilewise.problem import ConvProblem
from tilewise.solvers._costs import CPU_CACHE
from tilewise.solvers._depthwise_cpu import missing, strides
from tilewise.solvers._fused_lowering import FILTERS, Units, forms, lowered, smaller
from tilewise.solvers._tiles import integer
from tilewise.solvers.base import Cost, Prepare, Run, Solver, SolverUnavailable

__all__ = ["FusedLowering"]

EFFICIENCY = 0.85
"""Share of a matrix product's rate that products reach in registers."""


class FusedLowering(Solver):
    """Lowering types 1 to 3 with the three steps in one (Hadjis et al. 2015, section 2.1, Fusion).

    ``type`` says which axes are lowered: all, the last of several taps, or none. Of ``block`` images, rows and columns
    of places the windows are lowered into a core's cache, ``channels`` at a time; products with ``tile`` vectors and
    rows of sums go over taps too, so that they are lifted in registers. DGRAD goes by phases of the stride, so that it
    multiplies no zeros between the gradient's elements, and WGRAD sums each of ``shares`` of the blocks. ``threads``
    bounds threads, ``team`` says whether they are torch's. Constant filters are kept in the order of the products.
    """

    name, version = "fused_lowering", 2
    devices = frozenset({"cpu"})
    dtypes = frozenset({"fp32"})
    adds_bias = True
    most_configs = 4
    error_bound = {"ieee": 5e-6, "tf32": 5e-6}  # noqa: RUF012

    def unsupported(self, p: ConvProblem) -> list[str]:
        """The absent Numba, results of 16 bits."""
        reasons = missing()
        if p.out_dtype != "fp32":
            reasons.append(f"gives fp32, not {p.out_dtype}")
        return reasons

    def configs(self, p: ConvProblem) -> Iterable[Config]:
        return forms(p)

    def workspace(self, p: ConvProblem, c: Config) -> int:
        """A block of every thread, filters that are not kept, and what shares of a filter's gradient come to."""
        found = lowered(p, c)
        kept = p.constant_weight or found.gradient
        return integer(c, "threads") * _scratch(found) + (0 if kept else p.groups * found.filters) + found.partial

    def offers(
        self, p: ConvProblem, ceiling: int | None, only: Collection[Config] | None = None
    ) -> Iterable[tuple[Config, int]]:
        """Under a limit smaller blocks in place of those that break it, where there are some that keep it."""
        for c in self.configs(p):
            if only is not None:
                if c in only:
                    yield c, self.workspace(p, c)
                continue
            kept = c
            while ceiling is not None and self.workspace(p, kept) > ceiling and (less := smaller(kept)) is not None:
                kept = less
            c = kept if ceiling is None or self.workspace(p, kept) <= ceiling else c
            yield c, self.workspace(p, c)

    def constant(self, p: ConvProblem, c: Config) -> int:
        """Constant filters in the order of the products."""
        return p.groups * lowered(p, c).filters if p.constant_weight else 0

    def prepare(self, p: ConvProblem, c: Config, weight: torch.Tensor) -> Prepare:
        """Filters in the order of the products."""
        return Units(p, c, {"x": [0] * 5, "w": strides(weight), "y": [0] * 5}).prepare

    def cost(self, p: ConvProblem, c: Config) -> Cost:
        """Products with whole tiles and what lies between lines, and the ways in and out of strips."""
        found = lowered(p, c)
        rows, columns = found.stored
        width = found.tile[0] * found.lanes
        filled = rows * columns / (found.block.rows * found.block.columns)
        step = width if found.gradient else found.tile[1]
        outputs = -(-found.outputs // step) * step
        places = p.batch * found.sides[0].count * found.sides[1].count * found.sides[2].count
        terms = found.groups * found.sources * found.taps
        flops = 2 * places * outputs * terms * (1 if found.gradient else columns / found.block.columns)
        moved = 2 * found.groups * found.sources * found.variants * places * filled * 4 // 8
        filters = 0 if p.constant_weight or found.gradient else 2 * p.nbytes("w")
        kernels = 1 + (not p.constant_weight and not found.gradient) + (found.shares > 1)
        return Cost(int(flops), int(p.bytes + moved + filters), kernels, EFFICIENCY)

    def bind(self, p: ConvProblem, c: Config, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None) -> Run:
        """Compile the kernels. Raises ``SolverUnavailable`` with the compiler's reason."""
        assert out is not None
        tensors = zip((*p.operands, p.result), (a, b, out), strict=True)
        try:
            return Units(p, c, {role: strides(t) for role, t in tensors}).run
        except (KeyError, ValueError) as error:
            raise SolverUnavailable(f"{c} is no config of {p.key}: {error}") from error


def _scratch(found: Lowered) -> int:
    return found.scratch(found.output_chunk(int(FILTERS * CPU_CACHE)))
