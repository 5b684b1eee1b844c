"""Matrix products as the first rows and columns of larger ones, of sizes at which libraries are faster."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import torch

from tilewise.plan import Config
from tilewise.problems.base import ALIGNMENT
from tilewise.problems.gemm.layouts import ROLES, matrix_axes
from tilewise.problems.gemm.problem import GemmProblem
from tilewise.solvers.base import Cost, Run
from tilewise.solvers.common.buffers import Arena, Slot
from tilewise.solvers.common.costs import efficiency
from tilewise.solvers.gemm._nested import NestedSolver

GRAIN = 16
"""Bytes: rows that begin at multiples of it are read by a GPU's widest accesses, which its fast kernels need."""
TILES = (16, 32, 64, 128)
"""Sizes whose multiples a larger neighbour may have."""
MOST = 2.0
"""How many times more arithmetic the larger product may have."""


class PaddedGemm(NestedSolver):
    """A product of ``sizes`` rows, columns and terms, of which the result is a corner.

    Operands that grow are copied, and so is the result. Further terms are zeros; what further rows and columns hold
    does not matter, as nobody reads their results. A size of odd numbers of elements keeps libraries from their fast
    kernels, and a size just beyond a tile leaves a second one nearly empty. torch computes the larger product, or
    ``solver`` does: an algorithm of cuBLASLt, or what a larger neighbour that was planned before is computed by.
    """

    name, version = "padded_gemm", 2
    names = ("sizes",)
    most_configs = 4

    def forms(self, p: GemmProblem) -> Iterable[Config]:
        """Rows padded to whole 16 bytes, then rows or columns of the result borrowed from a larger neighbour too."""
        step = GRAIN // p.torch_dtype("a").itemsize
        even = tuple(-(-size // step) * step for size in (p.m, p.n, p.k))
        found = {(p.m, even[1], even[2]): None, even: None}
        for tile in TILES:
            found[-(-p.m // tile) * tile, even[1], even[2]] = None
            found[p.m, -(-p.n // tile) * tile, even[2]] = None
        whole = p.m * p.n * p.k
        for m, n, k in found:
            if (m, n, k) != (p.m, p.n, p.k) and m * n * k <= MOST * whole:
                yield Config(sizes=(m, n, k))

    def child(self, p: GemmProblem, c: Config) -> GemmProblem:
        """The larger product, of copies where matrices grow. Raises ``KeyError`` or ``ValueError`` for other sizes."""
        m, n, k = self._sizes(p, c)
        slots, _ = self.place(p, c)
        leading = [0 if role in slots else lead for role, lead in zip(ROLES, p.leading, strict=True)]
        alignment = [ALIGNMENT if role in slots else align for role, align in zip(ROLES, p.alignment, strict=True)]
        return replace(
            p, m=m, n=n, k=k, bias=False, activation="none", accumulate=False,
            leading=(leading[0], leading[1], leading[2]), alignment=(alignment[0], alignment[1], alignment[2]),
        )  # fmt: skip

    def place(self, p: GemmProblem, c: Config) -> tuple[dict[str, Slot], int]:
        """The places of the matrices that grow."""
        by_axis = dict(zip(("rows", "columns", "depth"), self._sizes(p, c), strict=True))
        arena, slots = Arena(), {}
        for role in p.roles:
            *batch, rows, columns = p.shape(role)
            wanted = tuple(by_axis[axis] for axis in matrix_axes(p.op, role))
            if wanted != (rows, columns):
                slots[role] = arena.add((*batch, *wanted), p.torch_dtype(role))
        return slots, arena.size

    def form_cost(self, p: GemmProblem, c: Config) -> Cost:
        """The larger product, and each padded matrix read and written once."""
        m, n, k = self._sizes(p, c)
        slots, size = self.place(p, c)
        flops = p.flops * m * n * k // (p.m * p.n * p.k)
        zeroed = sum(self._pads_depth(p, role, slots) for role in p.operands)
        rate = efficiency(p.device_type, m, n, k, max(1, p.batch))
        return Cost(flops, p.bytes, 1 + len(slots) + zeroed, rate, apart=2 * size)

    def run_of(self, p: GemmProblem, c: Config, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> Run:
        """A run of copies and one product."""
        slots, _ = self.place(p, c)
        examples = (
            slots[role].example(t.device) if role in slots else t for role, t in zip(ROLES, (a, b, out), strict=True)
        )
        inner, corner = self.bound_inner(p, c, *examples), p.shape("c")[-2:]
        depth = {role: matrix_axes(p.op, role).index("depth") - 2 for role in p.operands}
        pads = {role: self._pads_depth(p, role, slots) for role in p.operands}

        def taken(role: str, tensor: torch.Tensor, workspace: torch.Tensor | None) -> torch.Tensor:
            """The operand itself, or a copy with zeros behind its terms."""
            if role not in slots:
                return tensor
            whole, (rows, columns) = slots[role].of(workspace), tensor.shape[-2:]
            whole[..., :rows, :columns].copy_(tensor)
            if pads[role]:
                whole.narrow(depth[role], p.k, whole.shape[depth[role]] - p.k).zero_()
            return whole

        def run(
            a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None, workspace: torch.Tensor | None
        ) -> torch.Tensor:
            assert out is not None
            left, right = taken("a", a, workspace), taken("b", b, workspace)
            if "c" not in slots:
                inner(left, right, out, workspace)
                return out
            whole = slots["c"].of(workspace)
            inner(left, right, whole, workspace)
            return out.copy_(whole[..., : corner[0], : corner[1]])

        return run

    @staticmethod
    def _pads_depth(p: GemmProblem, role: str, slots: dict[str, Slot]) -> bool:
        """Whether an operand has more terms than the problem: they must be zeros."""
        dim = matrix_axes(p.op, role).index("depth") - 2
        return role in slots and slots[role].sizes[dim] > p.k

    def _sizes(self, p: GemmProblem, c: Config) -> tuple[int, int, int]:
        """The sizes of a config. Raises ``ValueError`` for what is none."""
        sizes = self.form(c)["sizes"]
        if not isinstance(sizes, tuple) or len(sizes) != 3:
            raise ValueError(f"sizes={sizes!r}: three whole numbers would do")
        least = (p.m, p.n, p.k)
        if any(size < own for size, own in zip(sizes, least, strict=True)) or sizes == least:
            raise ValueError(f"sizes={sizes!r}: more than {least} would do")
        if sizes[0] * sizes[1] * sizes[2] > MOST * p.m * p.n * p.k:
            raise ValueError(f"sizes={sizes!r}: at most {MOST:g} times the arithmetic would do")
        return sizes[0], sizes[1], sizes[2]
