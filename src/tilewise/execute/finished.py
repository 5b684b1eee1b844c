"""A pass over a result for what its plan's solvers do not do as they write: bias, residual and activation."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilewise.execute.node import Addressed, Node, Results, flat_call
from tilewise.kernels.building import target
from tilewise.kernels.native.sequence import LaunchSequence, joined
from tilewise.problems.activations import activate, activation_kind, kernel_parameters
from tilewise.problems.base import Problem, Tensors, layout_of
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

    On a GPU with Triton that is one kernel for all that is missing, where the result lies densely or is a matrix.
    Elsewhere, and where the solver allocates the result itself, torch does all in place.
    """

    __slots__ = ("_bias_shape", "_inner", "_problem", "_program", "returns_new")

    def __init__(self, inner: Node, problem: Problem, operands: Tensors, results: Tensors) -> None:
        self._inner, self._problem = inner, problem
        self.adds, self.adds_residual, self.constant = problem.bias, problem.residual, inner.constant
        self.workspace, self.elsewhere = inner.workspace, inner.elsewhere
        self.returns_new = bool(getattr(inner, "returns_new", False))
        (out,) = results
        self._bias_shape = tuple(-1 if dim == problem.bias_dim else 1 for dim in range(out.dim()))
        device = operands[0].device
        on_gpu = problem.device_type == "cuda" and device.type != "cpu" and has_triton()
        there = device.type == "cuda" or target.sought() is not None
        lines = _lines(out, problem) if on_gpu and there and not self.returns_new and out.numel() <= MOST else None
        self._program = None if lines is None else self._compiled(out, lines, device)

    def _compiled(self, out: Tensor, lines: _Lines, device: torch.device) -> Any:
        """The kernel over a result like ``out``, which is made of ``lines``."""
        from tilewise.kernels.triton.gemm.finish import finish
        from tilewise.kernels.triton.launch import Pointer

        p, last = self._problem, len(self._problem.operands) + 2
        result = Pointer(last - 2, 0, out.dtype)
        adds, adds_residual = p.bias and not self._inner.adds, p.residual and not self._inner.adds_residual
        kind, (first, second) = activation_kind(p.activation), kernel_parameters(p.activation)
        one = launch(
            finish, (-(-out.numel() // BLOCK),),
            (
                result,
                Pointer(last, 0, out.dtype) if adds else result,
                Pointer(last + p.bias, 0, out.dtype) if adds_residual else result,
            ),
            (lines.rows, lines.columns, out.numel(), lines.batch_stride, lines.row_stride, lines.channels),
            BIAS=lines.bias if adds else "", RESIDUAL=adds_residual, ACTIVATION=kind, FIRST=first, SECOND=second,
            BLOCK=BLOCK,
        )  # fmt: skip
        alignment = [*(p.alignment_of(role) for role in p.roles), ALIGNMENT, *[out.element_size()] * p.bias]
        if p.residual:
            alignment.append(p.alignment_of(p.results[0]))
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
            self._program((*operands, out, workspace, *bias, *residual))
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
        call, finish = self._inner.addressed(), self._program
        if call is None or finish is None:
            return None
        own = len(self._problem.operands) + 2
        places = [*range(own), *([own] if self._inner.adds else [])]
        if self._inner.adds_residual:
            places.append(own + self._problem.bias)

        def run(*addresses: int) -> None:
            call(*[addresses[place] for place in places])
            finish.at(addresses)

        return run

    def launches(self) -> LaunchSequence | None:
        """The launches of the inner node, and the pass."""
        before = None if self._program is None else self._inner.launches()
        after = None if self._program is None else self._program.sequence
        return None if before is None or after is None else joined([before, after])


class _Lines(NamedTuple):
    """A result as matrices of ``rows`` by ``columns``, and along which of them the numbers of a bias are.

    They repeat every ``channels`` rows where they are along rows.
    """

    rows: int
    columns: int
    batch_stride: int
    row_stride: int
    channels: int
    bias: str


def _lines(out: Tensor, problem: Problem) -> _Lines | None:
    """The lines of a result: of a matrix, or of a dense tensor with two dimensions or more. ``None`` for others."""
    if out.dim() <= 3 and problem.bias_dim == out.dim() - 1 and out.stride(-1) == 1:
        batch_stride = out.stride(0) if out.dim() > 2 else 0
        return _Lines(out.shape[-2], out.shape[-1], batch_stride, out.stride(-2), 1, "columns")
    layout = layout_of(out.shape, out.stride())
    if problem.bias_dim != 1 or layout == "view" or not out.numel():
        return None
    channels = out.shape[1]
    columns = channels if layout == "channels_last" else math.prod(out.shape[2:])
    rows = out.numel() // columns
    return _Lines(rows, columns, 0, columns, channels, "columns" if layout == "channels_last" else "rows")
