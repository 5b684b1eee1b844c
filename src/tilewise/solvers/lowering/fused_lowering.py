"""Lowering whose matrix is never in memory: each block is lowered into cache, multiplied and lifted."""

from __future__ import annotations

from collections.abc import Collection, Iterable

import torch

from tilewise.kernels.cpu.lowering.lowered import Lowered
from tilewise.plan import Config
from tilewise.problems.activations import CONV_ACTIVATIONS
from tilewise.problems.conv.problem import ConvProblem
from tilewise.solvers.base import Cost, Prepare, Run
from tilewise.solvers.common.costs import CPU_CACHE
from tilewise.solvers.common.cpu_run import byte_strides, numba_missing
from tilewise.solvers.common.tiles import config_reasons, integer
from tilewise.solvers.conv import ConvSolver
from tilewise.solvers.lowering._fused import FILTERS, Units, forms, lowered, smaller

__all__ = ["FusedLowering"]

EFFICIENCY = 0.85
"""Share of a matrix product's rate that products in registers reach."""


class FusedLowering(ConvSolver):
    """Lowering of types 1 to 3 with its three steps in one (Hadjis et al. 2015, section 2.1, Fusion).

    ``type`` says which axes are lowered: all (1), the last with several taps (2), or none (3). ``block`` is the images,
    rows and columns of places whose windows are lowered into a core's cache at a time, ``channels`` channels at a time.
    Products with ``tile`` vectors and rows of sums run over taps too, so that they are lifted in registers. DGRAD takes
    the phases of the stride one by one, so that it multiplies no zeros. WGRAD sums each of ``shares`` of the blocks.
    Residual and activation follow as the last sums are written. At most ``threads`` threads are used; ``team`` says
    whether they are torch's. Constant filters are kept in the products' order.
    """

    name, version = "fused_lowering", 3
    devices = frozenset({"cpu"})
    dtypes = frozenset({"fp32"})
    adds_bias = True
    adds_residual = True
    activations = frozenset(CONV_ACTIVATIONS)
    most_configs = 4
    error_bound = {"ieee": 5e-6, "tf32": 5e-6}  # noqa: RUF012
    exact_memory = True

    def unsupported(self, p: ConvProblem) -> list[str]:
        """Reasons: Numba is not installed, or the result is 16-bit."""
        reasons = numba_missing()
        if p.out_dtype != "fp32":
            reasons.append(f"gives fp32, not {p.out_dtype}")
        return reasons

    def configs(self, p: ConvProblem) -> Iterable[Config]:
        """The tile and block that should be fastest, for each type of lowering."""
        return forms(p)

    def workspace(self, p: ConvProblem, c: Config) -> int:
        """Bytes of every thread's block, of filters that are not kept, and of a weight gradient's partial sums."""
        blocked = lowered(p, c)
        kept = p.constant_weight or blocked.gradient
        return integer(c, "threads") * _scratch(blocked) + (0 if kept else p.groups * blocked.filters) + blocked.partial

    def offers(
        self, p: ConvProblem, ceiling: int | None, only: Collection[Config] | None = None
    ) -> Iterable[tuple[Config, int]]:
        """As :meth:`configs`; configs over ``ceiling`` bytes get smaller blocks where some keep it."""
        for c in self.configs(p):
            if only is not None:
                if c in only:
                    yield c, self.workspace(p, c)
                continue
            fitting = c
            while (
                ceiling is not None
                and self.workspace(p, fitting) > ceiling
                and (next_smaller := smaller(fitting)) is not None
            ):
                fitting = next_smaller
            c = fitting if ceiling is None or self.workspace(p, fitting) <= ceiling else c
            yield c, self.workspace(p, c)

    def constant(self, p: ConvProblem, c: Config) -> int:
        """Bytes of constant filters in the order of the products."""
        return p.groups * lowered(p, c).filters if p.constant_weight else 0

    def prepare(self, p: ConvProblem, c: Config, weight: torch.Tensor) -> Prepare:
        """What puts filters into the order of the products."""
        return Units(p, c, {"x": [0] * 5, "w": byte_strides(weight), "y": [0] * 5}).prepare

    def cost(self, p: ConvProblem, c: Config) -> Cost:
        """Products of whole tiles, including the gaps between lines, and moving numbers into and out of strips."""
        blocked = lowered(p, c)
        rows, columns = blocked.stored
        width = blocked.tile[0] * blocked.lanes
        filled = rows * columns / (blocked.block.rows * blocked.block.columns)
        step = width if blocked.gradient else blocked.tile[1]
        outputs = -(-blocked.outputs // step) * step
        places = p.batch * blocked.sides[0].count * blocked.sides[1].count * blocked.sides[2].count
        terms = blocked.groups * blocked.sources * blocked.taps
        flops = 2 * places * outputs * terms * (1 if blocked.gradient else columns / blocked.block.columns)
        moved = 2 * blocked.groups * blocked.sources * blocked.variants * places * filled * 4 // 8
        filters = 0 if p.constant_weight or blocked.gradient else 2 * p.nbytes("w")
        kernels = 1 + (not p.constant_weight and not blocked.gradient) + (blocked.shares > 1)
        return Cost(int(flops), int(p.bytes + moved + filters), kernels, EFFICIENCY)

    def bind(self, p: ConvProblem, c: Config, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None) -> Run:
        """Compile the kernels. Raises ``SolverUnavailable`` with the compiler's reason."""
        assert out is not None
        tensors = zip((*p.operands, p.result), (a, b, out), strict=True)
        with config_reasons(p, c):
            return Units(p, c, {role: byte_strides(t) for role, t in tensors}).run


def _scratch(blocked: Lowered) -> int:
    """Bytes of one thread's scratch."""
    return blocked.scratch(blocked.output_chunk(int(FILTERS * CPU_CACHE)))
