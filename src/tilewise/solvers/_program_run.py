"""Compiled Triton kernels as a solver's run, and what keeps them from running as a reason."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from tilewise.problem import ROLES, ConvProblem
from tilewise.solvers._buffers import ALIGNMENT
from tilewise.solvers.base import SolverUnavailable

if TYPE_CHECKING:
    from tilewise.kernels.triton.launch import Launch

__all__ = ["ProgramRun", "compiled", "has_triton"]


class ProgramRun:
    """A compiled program as a :data:`Run`; :meth:`run_pointers` takes addresses in place of tensors.

    ``bias``: the vector that is added, where the program was compiled for one.
    """

    __slots__ = ("_program",)

    def __init__(self, program: Any) -> None:
        self._program = program

    def __call__(
        self,
        a: torch.Tensor,
        b: torch.Tensor,
        out: torch.Tensor | None,
        workspace: torch.Tensor | None,
        *bias: torch.Tensor,
    ) -> torch.Tensor:
        assert out is not None
        self._program((a, b, out, workspace, *bias))
        return out

    def run_pointers(self, a: int, b: int, out: int, workspace: int, *bias: int) -> None:
        """Queue the kernels on the current stream of the device that they were compiled for."""
        self._program.at((a, b, out, workspace, *bias))


def compiled(p: ConvProblem, launches: Sequence[Launch], device: torch.device) -> ProgramRun:
    """The launches as one run over operands, result, workspace and bias, aligned as the problem's are.

    Raises ``SolverUnavailable`` with Triton's reason.
    """
    from tilewise.kernels.triton.launch import Program

    itemsize = p.torch_dtype(p.result).itemsize  # a bias may lie anywhere
    alignment = [*(p.alignment[ROLES.index(role)] for role in (*p.operands, p.result)), ALIGNMENT, itemsize]
    try:
        return ProgramRun(Program(launches, alignment, device))
    except Exception as error:  # Triton raises errors of many kinds when a kernel does not compile or fit
        text = str(error).strip().splitlines()
        raise SolverUnavailable(f"{type(error).__name__}: {text[-1] if text else error!r}"[:300]) from error


@functools.cache
def has_triton() -> bool:
    """Whether the package is installed."""
    return importlib.util.find_spec("triton") is not None
