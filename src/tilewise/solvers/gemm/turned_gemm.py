"""Matrix products with operands or result in another order: equal products that libraries compute at other rates."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import torch

from tilewise.plan import Config
from tilewise.problems.base import ALIGNMENT
from tilewise.problems.gemm.layouts import ROLES
from tilewise.problems.gemm.problem import GemmProblem
from tilewise.solvers.base import Cost, Run
from tilewise.solvers.common.buffers import Arena, Slot
from tilewise.solvers.gemm._nested import NestedSolver
from tilewise.solvers.gemm._product import product_cost

TURNS = ("c", "b", "a", "bc", "ac", "ab", "abc")
"""The matrices that are turned, the cheapest first where few rows meet a large right operand."""
OTHER = {"N": "T", "T": "N"}


class TurnedGemm(NestedSolver):
    """A product with the matrices named in ``turn`` stored with their rows and columns exchanged.

    An operand is copied so first. A result is computed so, as ``c' = b' a'`` (the swap of a row-major product and a
    column-major one), and copied last. torch computes the other product, or ``solver`` does, such as an algorithm of
    cuBLASLt.
    """

    name, version = "turned_gemm", 2
    names = ("turn",)
    most_configs = 3

    def forms(self, p: GemmProblem) -> Iterable[Config]:
        """Every choice of matrices but none, those that move the fewest bytes first."""
        return sorted((Config(turn=turn) for turn in TURNS), key=lambda c: _moved(p, str(c["turn"])))

    def child(self, p: GemmProblem, c: Config) -> GemmProblem:
        """The product of the matrices as they lie then. Raises ``KeyError`` or ``ValueError`` for other choices."""
        turn = self._turn(c)
        ops = [OTHER[op] if role in turn else op for role, op in zip("ab", p.op, strict=True)]
        leading = [0 if role in turn else lead for role, lead in zip(ROLES, p.leading, strict=True)]
        alignment = [ALIGNMENT if role in turn else align for role, align in zip(ROLES, p.alignment, strict=True)]
        m, n = p.m, p.n
        if "c" in turn:
            m, n, ops = n, m, [OTHER[op] for op in reversed(ops)]
            leading, alignment = [leading[1], leading[0], 0], [alignment[1], alignment[0], ALIGNMENT]
        return replace(
            p, m=m, n=n, op="".join(ops), bias=False, activation="none", accumulate=False,
            leading=(leading[0], leading[1], leading[2]), alignment=(alignment[0], alignment[1], alignment[2]),
        )  # fmt: skip

    def place(self, p: GemmProblem, c: Config) -> tuple[dict[str, Slot], int]:
        """The places of turned copies."""
        arena, slots = Arena(), {}
        for role in ROLES:
            if role in self._turn(c):
                *batch, rows, columns = p.shape(role)
                slots[role] = arena.add((*batch, columns, rows), p.torch_dtype(role))
        return slots, arena.size

    def form_cost(self, p: GemmProblem, c: Config) -> Cost:
        """The product, and each turned matrix read and written once."""
        turn = self._turn(c)
        return product_cost(p, apart=2 * _moved(p, turn), kernels=1 + len(turn))

    def run_of(self, p: GemmProblem, c: Config, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> Run:
        """A run of copies and one product."""
        slots, _ = self.place(p, c)
        examples = [
            slots[role].example(t.device) if role in slots else t for role, t in zip(ROLES, (a, b, out), strict=True)
        ]
        if "c" in slots:
            examples = [examples[1], examples[0], examples[2]]
        inner = self.bound_inner(p, c, *examples)

        def run(
            a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None, workspace: torch.Tensor | None
        ) -> torch.Tensor:
            assert out is not None
            if "a" in slots:
                a = slots["a"].of(workspace).copy_(a.mT)
            if "b" in slots:
                b = slots["b"].of(workspace).copy_(b.mT)
            if "c" not in slots:
                inner(a, b, out, workspace)
                return out
            turned = slots["c"].of(workspace)
            inner(b, a, turned, workspace)
            return out.copy_(turned.mT)

        return run

    def _turn(self, c: Config) -> str:
        """The matrices of a config. Raises ``ValueError`` for others than there are."""
        turn = self.form(c)["turn"]
        if turn not in TURNS:
            raise ValueError(f"turn={turn!r}: one of {', '.join(TURNS)} would do")
        return str(turn)


def _moved(p: GemmProblem, turn: str) -> int:
    """Bytes of the matrices in ``turn``."""
    return sum(p.nbytes(role) for role in turn)
