"""Matrix products as the first rows and columns of larger ones, of sizes at which libraries are faster."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from tilewise.plan import Config
from tilewise.problems.gemm.layouts import matrix_axes
from tilewise.problems.gemm.problem import GemmProblem
from tilewise.solvers.base import Cost, Run, SolverUnavailable
from tilewise.solvers.common.buffers import Arena, Slot
from tilewise.solvers.common.costs import efficiency
from tilewise.solvers.common.matmul import at_precision
from tilewise.solvers.gemm._product import multiplied
from tilewise.solvers.gemm._scratch import ScratchSolver, product_into

GRAIN = 16
"""Bytes: rows that begin at multiples of it are read by a GPU's widest accesses, which its fast kernels need."""
TILES = (16, 32, 64, 128)
"""Sizes whose multiples a larger neighbour may have."""
MOST = 2.0
"""How many times more arithmetic the larger product may have."""


class PaddedGemm(ScratchSolver):
    """The library's product of ``sizes`` rows, columns and terms, of which the result is a corner.

    Further terms are zeros. The operands that grow are copied, and so is the result. A size of odd numbers of elements
    keeps libraries from their fast kernels, and a size just beyond a tile leaves a second one nearly empty.
    """

    name, version = "padded_gemm", 1
    most_configs = 4

    def configs(self, p: GemmProblem) -> Iterable[Config]:
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

    def workspace(self, p: GemmProblem, c: Config) -> int:
        """Bytes of the padded matrices."""
        return _Padded(p, _sizes(p, c)).size

    def cost(self, p: GemmProblem, c: Config) -> Cost:
        """The larger product, and each padded matrix read and written once."""
        m, n, k = _sizes(p, c)
        flops = p.flops * m * n * k // (p.m * p.n * p.k)
        padded = _Padded(p, (m, n, k))
        rate = efficiency(p.device_type, m, n, k, max(1, p.batch))
        return Cost(flops, p.bytes, 1 + 2 * len(padded.slots), rate, apart=2 * padded.size)

    def bind(self, p: GemmProblem, c: Config, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None) -> Run:
        """A run of copies and one product. Raises ``SolverUnavailable`` for sizes that are no larger product's."""
        try:
            padded = _Padded(p, _sizes(p, c))
        except (KeyError, ValueError) as error:
            raise SolverUnavailable(f"{c} is no config of {p.key}: {error}") from error
        views, product, corner = multiplied(p), product_into(p), p.shape("c")[-2:]

        def run(
            a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None, workspace: torch.Tensor | None
        ) -> torch.Tensor:
            assert out is not None
            left, right = views(padded.taken("a", a, workspace), padded.taken("b", b, workspace))
            if "c" not in padded.slots:
                product(left, right, out)
                return out
            whole = padded.slots["c"].of(workspace)
            product(left, right, whole)
            return out.copy_(whole[..., : corner[0], : corner[1]])

        return at_precision(p, run)


class _Padded:
    """The padded matrices of a product of larger ``sizes`` in the workspace, by role, and the bytes of all."""

    def __init__(self, p: GemmProblem, sizes: tuple[int, int, int]) -> None:
        by_axis = dict(zip(("rows", "columns", "depth"), sizes, strict=True))
        self.slots: dict[str, Slot] = {}
        arena = Arena()
        for role in p.roles:
            *batch, rows, columns = p.shape(role)
            wanted = tuple(by_axis[axis] for axis in matrix_axes(p.op, role))
            if wanted != (rows, columns):
                self.slots[role] = arena.add((*batch, *wanted), p.torch_dtype(role))
        self.size = arena.size

    def taken(self, role: str, tensor: torch.Tensor, workspace: torch.Tensor | None) -> torch.Tensor:
        """An operand as the larger product takes it: itself, or a copy with zeros behind its rows and columns."""
        slot = self.slots.get(role)
        if slot is None:
            return tensor
        whole, (rows, columns) = slot.of(workspace), tensor.shape[-2:]
        whole[..., :rows, :columns].copy_(tensor)
        whole[..., rows:, :].zero_()
        whole[..., :rows, columns:].zero_()
        return whole


def _sizes(p: GemmProblem, c: Config) -> tuple[int, int, int]:
    """The sizes of a config. Raises ``KeyError`` or ``ValueError`` for what is none."""
    sizes = c["sizes"]
    if not isinstance(sizes, tuple) or len(sizes) != 3 or len(c) != 1:
        raise ValueError(f"sizes={sizes!r}: three whole numbers would do")
    least = (p.m, p.n, p.k)
    if any(size < own for size, own in zip(sizes, least, strict=True)) or sizes == least:
        raise ValueError(f"sizes={sizes!r}: more than {least} would do")
    if sizes[0] * sizes[1] * sizes[2] > MOST * p.m * p.n * p.k:
        raise ValueError(f"sizes={sizes!r}: at most {MOST:g} times the arithmetic would do")
    return sizes[0], sizes[1], sizes[2]
