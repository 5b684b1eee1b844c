"""Matrix products with operands or result in another order: equal products that libraries compute at other rates."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from tilewise.plan import Config
from tilewise.problems.gemm.layouts import ROLES
from tilewise.problems.gemm.problem import GemmProblem
from tilewise.solvers.base import Cost, Run, SolverUnavailable
from tilewise.solvers.common.buffers import Arena, Slot
from tilewise.solvers.common.matmul import at_precision
from tilewise.solvers.gemm._product import multiplied, product_cost
from tilewise.solvers.gemm._scratch import ScratchSolver, product_into

TURNS = ("c", "b", "a", "bc", "ac", "ab", "abc")
"""The matrices that are turned, the cheapest first where few rows meet a large right operand."""


class TurnedGemm(ScratchSolver):
    """The library's product with the matrices named in ``turn`` stored with their rows and columns exchanged.

    An operand is copied so first. A result is computed so, as ``c' = b' a'`` (the swap of a row-major product and a
    column-major one), and copied last.
    """

    name, version = "turned_gemm", 1
    most_configs = 3

    def configs(self, p: GemmProblem) -> Iterable[Config]:
        """Every choice of matrices but none, those that move the fewest bytes first."""
        return sorted((Config(turn=turn) for turn in TURNS), key=lambda c: _moved(p, str(c["turn"])))

    def workspace(self, p: GemmProblem, c: Config) -> int:
        """Bytes of the turned copies."""
        return _slots(p, str(c["turn"]))[1]

    def cost(self, p: GemmProblem, c: Config) -> Cost:
        """The product, and each turned matrix read and written once."""
        turn = str(c["turn"])
        return product_cost(p, apart=2 * _moved(p, turn), kernels=1 + len(turn))

    def bind(self, p: GemmProblem, c: Config, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None) -> Run:
        """A run of copies and one product. Raises ``SolverUnavailable`` for a config of no such matrices."""
        turn = c.get("turn")
        if set(c) != {"turn"} or turn not in TURNS:
            raise SolverUnavailable(f"{c} is no config of {p.key}: turn is one of {', '.join(TURNS)}")
        slots, views, product = _slots(p, str(turn))[0], multiplied(p), product_into(p)

        def run(
            a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None, workspace: torch.Tensor | None
        ) -> torch.Tensor:
            assert out is not None
            if "a" in slots:
                a = slots["a"].of(workspace).copy_(a.mT).mT
            if "b" in slots:
                b = slots["b"].of(workspace).copy_(b.mT).mT
            left, right = views(a, b)
            if "c" not in slots:
                product(left, right, out)
                return out
            turned = slots["c"].of(workspace)
            product(right.mT, left.mT, turned)
            return out.copy_(turned.mT)

        return at_precision(p, run)


def _moved(p: GemmProblem, turn: str) -> int:
    """Bytes of the matrices in ``turn``."""
    return sum(p.nbytes(role) for role in turn)


def _slots(p: GemmProblem, turn: str) -> tuple[dict[str, Slot], int]:
    """The places of turned copies in the workspace by role, and the bytes of all."""
    arena, slots = Arena(), {}
    for role in ROLES:
        if role in turn:
            *batch, rows, columns = p.shape(role)
            slots[role] = arena.add((*batch, columns, rows), p.torch_dtype(role))
    return slots, arena.size
