"""Matrix products with few rows or columns, by a kernel of our own that packs nothing."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from tilewise.plan import Config
from tilewise.problems.activations import ACTIVATIONS
from tilewise.problems.gemm.problem import GemmProblem
from tilewise.solvers.base import Cost, Run
from tilewise.solvers.gemm import _thin_cpu as cpu
from tilewise.solvers.gemm import _thin_gpu as gpu
from tilewise.solvers.gemm._product import ProductSolver

__all__ = ["ThinGemm"]


class ThinGemm(ProductSolver):
    """Thin products: the large operand is read once, as it lies, and sums stay in registers.

    Libraries pack panels of both operands (Goto and van de Geijn 2008), which takes as long as a thin product. On a CPU
    vectors lie along the columns of the result (NN and TN), or along the sums (NT). ``tile`` is the most rows and
    vectors of a block of sums, ``columns`` says whether ``threads`` threads divide columns or rows, and ``team``
    whether these are torch's. With ``turned`` the right operand of an NN product is copied with its rows and columns
    exchanged first, so that vectors lie along the sums.

    On a GPU a ``tile`` (rows, columns and a step of the sums) has all of the short side, and ``parts`` of the sums fill
    the multiprocessors (split-K; Osama et al. 2023, "Stream-K", section 2.3). They are added up in order.
    """

    name, version = "thin_gemm", 3
    compiles = True
    adds_bias = True
    activations = frozenset(ACTIVATIONS)
    accumulates = True
    exact_memory = True
    most_configs = 4
    error_bound = {"ieee": 5e-6, "tf32": 5e-3}  # noqa: RUF012 (tensor cores cut the last bits off, so errors add up)

    def unsupported(self, p: GemmProblem) -> list[str]:
        """The reasons of the kernel for the device."""
        return _for(p).unsupported(p)

    def does_add_bias(self, p: GemmProblem, c: Config) -> bool:
        """On a CPU not where it adds to the result already: sums begin with one of both."""
        return p.device_type == "cuda" or not p.accumulate

    def does_activate(self, p: GemmProblem, c: Config) -> bool:
        """On a GPU alone."""
        return p.device_type == "cuda"

    def configs(self, p: GemmProblem) -> Iterable[Config]:
        """Tiles that fill the registers."""
        return _for(p).configs(p)

    def workspace(self, p: GemmProblem, c: Config) -> int:
        """Bytes of the right operand where it is turned, or of the parts of sums."""
        return _for(p).workspace(p, c)

    def cost(self, p: GemmProblem, c: Config) -> Cost:
        """The arithmetic in full tiles, and the operands read once."""
        return _for(p).cost(p, c)

    def bind(self, p: GemmProblem, c: Config, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None) -> Run:
        """Compile the kernel, or read it from disk. Raises ``SolverUnavailable`` with the compiler's reason."""
        assert out is not None
        return _for(p).bind(p, c, a, b, out)


def _for(p: GemmProblem) -> Any:
    """The module for the device of ``p``."""
    return cpu if p.device_type == "cpu" else gpu
