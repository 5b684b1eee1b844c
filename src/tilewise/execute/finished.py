"""A pass over a result for what its plan's solvers do not do as they write: bias, residual and activation."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tilewise.execute.node import Addressed, Node, Results, flat_call
from tilewise.kernels.building import target
from tilewise.kernels.native.sequence import LaunchSequence, joined
from tilewise.problems.activations import activate
from tilewise.problems.base import Problem, Tensors
from tilewise.solvers import Run
from tilewise.solvers.common.buffers import ALIGNMENT
from tilewise.solvers.common.triton_run import has_triton, program
from tilewise.solvers.common.views import launch

__all__ = ["Finished"]

BLOCK = 1024
"""Numbers that a program of the pass finishes."""
MOST = 2**31 - 2**20
"""Most numbers of a result that the kernel counts."""


class Finished(Node):
    """A node with one pass over its result behind it.

    On a GPU with Triton that is one kernel for bias and activation of a product. Elsewhere, and where the solver
    allocates the result itself, torch does all in place.
    """

    __slots__ = ("_bias_shape", "_inner", "_problem", "_program", "returns_new")

    def __init__(self, inner: Node, problem: Problem, operands: Tensors, results: Tensors) -> None:
        self._inner, self._problem = inner, problem
        self.adds, self.adds_residual, self.constant = problem.bias, problem.residual, inner.constant
        self.workspace, self.elsewhere = inner.workspace, inner.elsewhere
        self.returns_new = bool(getattr(inner, "returns_new", False))
        (out,) = results
        self._bias_shape = tuple(-1 if dim == problem.bias_dim else 1 for dim in range(out.dim()))
        on_gpu = problem.device_type == "cuda" and operands[0].device.type != "cpu" and has_triton()
        last = problem.bias_dim == out.dim() - 1 and not problem.residual
        compiles = on_gpu and last and not self.returns_new and out.stride(-1) == 1 and out.numel() <= MOST
        there = operands[0].device.type == "cuda" or target.sought() is not None
        self._program = self._compiled(out, operands[0].device) if compiles and there else None

    def _compiled(self, out: Tensor, device: torch.device) -> Any:
        """The kernel over a result like ``out``."""
        from tilewise.kernels.triton.gemm.finish import finish
        from tilewise.kernels.triton.launch import Pointer

        p = self._problem
        result, bias = Pointer(2, 0, out.dtype), Pointer(4, 0, out.dtype)
        adds = p.bias and not self._inner.adds
        one = launch(
            finish, (-(-out.numel() // BLOCK),), (result, bias if adds else result),
            (out.shape[-2], out.shape[-1], out.numel(), out.stride(0) if out.dim() > 2 else 0, out.stride(-2)),
            BIAS=adds, ACTIVATION=p.activation, BLOCK=BLOCK,
        )  # fmt: skip
        alignment = [*(p.alignment_of(role) for role in p.roles), ALIGNMENT, out.element_size()]
        return program([one], alignment, device)

    def taken(self, operand: Tensor, workspace: Tensor | None) -> Tensor:
        """As the inner node."""
        return self._inner.taken(operand, workspace)

    def run(self, operands: Tensors, results: Results, workspace: Tensor | None, *added: Tensor) -> Tensors:
        """Compute the result and finish it."""
        inner = self._inner
        bias, residual = added[: self.adds], added[self.adds :]
        own = (*(bias if inner.adds else ()), *(residual if inner.adds_residual else ()))
        (out,) = inner.run(operands, results, workspace, *own)
        if self._program is not None:
            self._program((*operands, out, workspace, *bias))
            return (out,)
        if bias and not inner.adds:
            out.add_(bias[0].view(self._bias_shape))
        if residual and not inner.adds_residual:
            out.add_(residual[0])
        return (activate(out, self._problem.activation),)

    def shortest(self) -> Run:
        """The run as a flat call."""
        return flat_call(self, self._problem)

    def addressed(self) -> Addressed | None:
        """Both by address, where the inner node has such a call and the pass is a kernel."""
        call, finish, adds = self._inner.addressed(), self._program, self._inner.adds
        if call is None or finish is None:
            return None

        def run(*addresses: int) -> None:
            call(*(addresses if adds else addresses[:4]))
            finish.at(addresses)

        return run

    def launches(self) -> LaunchSequence | None:
        """The launches of the inner node, and the pass."""
        before = None if self._program is None else self._inner.launches()
        after = None if self._program is None else self._program.sequence
        return None if before is None or after is None else joined([before, after])
