"""A part of a plan that another device computes than its whole: operands are copied there, and results back."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import Tensor

from tilewise.execute.node import Node, PlanMismatch, Results, flat_call
from tilewise.machine.device import torch_device
from tilewise.machine.workspaces import Workspaces
from tilewise.problems.base import Problem, Tensors, as_tuple, dense_strides

__all__ = [
    "Elsewhere",
    "check_elsewhere",
    "example_there",
    "release_elsewhere",
    "strides_there",
    "workspace_there",
]

_workspaces = Workspaces()
"""Apart from the workspaces of wholes: a whole on a CPU may hold one while its part runs."""


def release_elsewhere() -> None:
    """Give the memory of this thread's workspace on a CPU back to the system."""
    _workspaces.release()


def check_elsewhere(problem: Problem) -> None:
    """Raise :class:`PlanMismatch` where a part on another device cannot be run: it keeps something of an operand.

    What is kept belongs to one tensor, and a copy is a new tensor in every call.
    """
    if problem.constant_operand:
        raise PlanMismatch(f"{problem.key}: a part on another device than its whole cannot keep a constant operand")


def example_there(problem: Problem, role: str) -> Tensor:
    """An uninitialised tensor of ``role`` on the part's own device, in the layout in which copies are made there."""
    device, strides = torch_device(problem.device), strides_there(problem, role)
    return torch.empty_strided(problem.shape(role), strides, dtype=problem.torch_dtype(role), device=device)


def strides_there(problem: Problem, role: str) -> tuple[int, ...]:
    """The strides of a copy of the tensor of ``role`` on the part's own device: it is dense there."""
    layout = problem.layout(role)
    return dense_strides(problem.shape(role), "contiguous" if layout == "view" else layout)


def workspace_there(size: int, device: torch.device) -> Tensor:
    """A workspace of ``size`` bytes for a part on ``device``, of this thread alone."""
    return _workspaces.take(size, device)


class Elsewhere(Node):
    """Runs ``node``, which is bound to tensors on the device of ``problem``, for tensors on the whole's device.

    Its :attr:`workspace` is 0, since it takes nothing of the whole's device. What it takes of its own, copies of all
    tensors included, is in :attr:`elsewhere`.
    """

    __slots__ = ("_accumulate", "_call", "_device", "_node", "_problem")

    def __init__(self, node: Node, problem: Problem) -> None:
        self._node, self._problem = node, problem
        self._accumulate = problem.accumulate
        self._device = torch_device(problem.device)
        self._call = node.shortest()
        self.adds, self.adds_residual, self.constant, self.workspace = node.adds, False, -1, 0
        copies = sum(problem.nbytes(role) for role in problem.roles)
        self.elsewhere = dict(node.elsewhere)
        self.elsewhere[problem.device] = self.elsewhere.get(problem.device, 0) + node.workspace + copies

    def run(self, operands: Tensors, results: Results, workspace: Tensor | None, *bias: Tensor) -> Tensors:
        there = torch.cuda.device(self._device) if self._device.type == "cuda" else contextlib.nullcontext()
        with there:
            inputs = [self._copied(role, t) for role, t in zip(self._problem.operands, operands, strict=True)]
            outputs = [example_there(self._problem, role) for role in self._problem.results]
            size = self._node.workspace
            space = _workspaces.take(size, self._device) if size else None
            added = (t.to(self._device) for t in bias)
            computed = as_tuple(self._call(*inputs, *outputs, space, *added))
        pairs = zip(results, computed, strict=True)
        return tuple(_put_back(result, value, add=self._accumulate) for result, value in pairs)

    def _copied(self, role: str, operand: Tensor) -> Tensor:
        """A copy of an operand on the part's device."""
        return example_there(self._problem, role).copy_(operand)

    def shortest(self) -> Any:
        """The run as a flat call."""
        return flat_call(self, self._problem)


def _put_back(result: Tensor | None, value: Tensor, *, add: bool) -> Tensor:
    """Copy ``value`` from another device into ``result``, or with ``add`` add it."""
    assert result is not None
    return result.add_(value.to(result.device)) if add else result.copy_(value)
