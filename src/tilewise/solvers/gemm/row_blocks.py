"""Rows of a product in parts, one after the other: micro-batches (Oyama et al. 2018, mu-cuDNN, section III-B) of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from tilewise.problems.gemm.cuts import cut
from tilewise.problems.gemm.problem import GemmProblem
from tilewise.solvers.base import NOTHING_KEPT_OUT
from tilewise.solvers.gemm._product import ProductSplit

__all__ = ["RowBlocks"]

TILE = 16
"""Rows of the smallest tile of a GPU's matrix units, or a multiple of it."""


class RowBlocks(ProductSplit):
    """Divides the rows of the left operand and of the result, as a layer's mini-batch is divided.

    A row that is one too many for a library's tile may cost as much as a whole tile: then a part for it alone pays.
    """

    name, version = "row_blocks", 1
    axis, level = "rows", 2

    def unsupported(self, p: GemmProblem) -> list[str]:
        """A reason where there is one row."""
        return [] if p.m > 1 else ["one row cannot be divided"]

    def idle(self, p: GemmProblem) -> str:
        """A reason on a CPU, and on a GPU where all tiles are whole or there is one: parts then gain only memory."""
        if p.device_type == "cuda" and p.m % TILE and p.m > TILE:
            return ""
        return NOTHING_KEPT_OUT

    def sizes(self, p: GemmProblem, policy: str) -> Sequence[int]:
        """Powers of two below the number of rows, largest first."""
        if policy == "undivided":
            return ()
        return [2**n for n in range((p.m - 1).bit_length() - 1, -1, -1)]

    def between(self, p: GemmProblem, policy: str) -> Sequence[int]:
        """Every other size, under the policy ``all``."""
        return [n for n in range(p.m - 1, 0, -1) if n & (n - 1)] if policy == "all" else ()

    def child(self, p: GemmProblem, size: int) -> GemmProblem:
        """The product of ``size`` rows that start at any multiple of ``size``."""
        _, _, changes = cut(p, self.axis, size % p.m, size)
        return replace(p, **changes)
