"""Compiled Triton kernels as a solver's run."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from tilewise.problems.base import Problem
from tilewise.solvers.base import SolverUnavailable
from tilewise.solvers.common.buffers import ALIGNMENT

if TYPE_CHECKING:
    from tilewise.kernels.native.sequence import LaunchSequence
    from tilewise.kernels.triton.launch import Launch, Program

__all__ = ["ProgramRun", "compiled", "has_triton", "program", "triton_missing"]


class ProgramRun:
    """A compiled sequence of kernels as a :data:`~tilewise.solvers.base.Run`.

    Called with tensors, or through :meth:`run_pointers` with their addresses. ``added`` are the bias and the residual,
    those that the kernels were compiled for.
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
        *added: torch.Tensor,
    ) -> torch.Tensor:
        assert out is not None
        self._program((a, b, out, workspace, *added))
        return out

    def run_pointers(self, a: int, b: int, out: int, workspace: int, *added: int) -> None:
        """Queue the kernels on the current stream of the device that they were compiled for."""
        self._program.at((a, b, out, workspace, *added))

    @property
    def sequence(self) -> LaunchSequence | None:
        """What the driver is told of the kernels; ``None`` where only Triton can launch them."""
        found: LaunchSequence | None = self._program.sequence
        return found


def compiled(p: Problem, launches: Sequence[Launch], device: torch.device) -> ProgramRun:
    """Compile the launches and return them as one run over operands, result, workspace, bias and residual.

    Kernels may rely on the alignment that the problem declares for each tensor. Raises ``SolverUnavailable`` with
    Triton's reason.
    """
    added = [p.torch_dtype(p.result).itemsize] * p.bias  # it may lie anywhere
    if p.residual:
        added.append(p.alignment_of(p.result))
    alignment = [*(p.alignment_of(role) for role in p.roles), ALIGNMENT, *added]
    return ProgramRun(program(launches, alignment, device))


def program(launches: Sequence[Launch], alignment: Sequence[int], device: torch.device) -> Program:
    """Compile the launches over tensors whose addresses are aligned to ``alignment`` bytes each.

    Raises ``SolverUnavailable`` with Triton's reason.
    """
    from tilewise.kernels.triton.launch import Program

    try:
        return Program(launches, alignment, device)
    except Exception as error:  # Triton raises errors of many kinds when a kernel does not compile or fit
        text = str(error).strip().splitlines()
        raise SolverUnavailable(f"{type(error).__name__}: {text[-1] if text else error!r}"[:300]) from error


@functools.cache
def has_triton() -> bool:
    """Whether the package triton is installed."""
    return importlib.util.find_spec("triton") is not None


def triton_missing() -> list[str]:
    """Why Triton kernels cannot run: the package is not installed. Empty when it is."""
    return [] if has_triton() else ["needs the package triton"]
