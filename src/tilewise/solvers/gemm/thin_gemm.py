"""Matrix products with few rows or columns, by a kernel of our own that packs nothing."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from tilewise.plan import Config
from tilewise.problems.gemm.problem import GemmProblem
from tilewise.solvers.base import Cost, Run
from tilewise.solvers.gemm import _thin_cpu as cpu
from tilewise.solvers.gemm._product import ProductSolver

__all__ = ["ThinGemm"]


class ThinGemm(ProductSolver):
    """Thin products: the large operand is read once, as it lies, and sums stay in registers.

    Libraries pack panels of both operands (Goto and van de Geijn 2008), which takes as long as a thin product. On a CPU
    vectors lie along the columns of the result (NN and TN), or along the sums (NT). ``tile`` is the most rows and
    vectors of a block of sums, ``columns`` says whether ``threads`` threads divide columns or rows, and ``team``
    whether these are torch's. With ``turned`` the right operand of an NN product is copied with its rows and columns
    exchanged first, so that vectors lie along the sums.
    """

    name, version = "thin_gemm", 1
    devices = frozenset({"cpu"})
    dtypes = frozenset({"fp32"})
    adds_bias = True
    accumulates = True
    exact_memory = True
    error_bound = {"ieee": 5e-6, "tf32": 5e-6}  # noqa: RUF012

    def unsupported(self, p: GemmProblem) -> list[str]:
        """As the kernel's own reasons; besides, it cannot add both a bias and to the result."""
        return cpu.unsupported(p)

    def does_add_bias(self, p: GemmProblem, c: Config) -> bool:
        """Not where it adds to the result already: sums begin with one of both."""
        return not p.accumulate

    def configs(self, p: GemmProblem) -> Iterable[Config]:
        """Tiles that fill the registers."""
        return cpu.configs(p)

    def workspace(self, p: GemmProblem, c: Config) -> int:
        """Bytes of the right operand where it is turned."""
        return cpu.workspace(p, c)

    def cost(self, p: GemmProblem, c: Config) -> Cost:
        """The arithmetic in full tiles, and the operands read once."""
        return cpu.cost(p, c)

    def bind(self, p: GemmProblem, c: Config, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None) -> Run:
        """Compile the kernel, or read it from disk. Raises ``SolverUnavailable`` with Numba's reason."""
        assert out is not None
        return cpu.bind(p, c, a, b, out)
