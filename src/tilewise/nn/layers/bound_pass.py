"""A plan bound for use in a layer: operands in any layout are brought into the one that the plan expects."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch

from tilewise import execute
from tilewise.nn.ranges import in_range, range_name
from tilewise.plan import Plan
from tilewise.problems.base import Problem, dense_strides

__all__ = ["BoundPass", "Slot", "bind_pass", "lie_alike", "with_strides"]


class Slot:
    """The shape, strides, dtype and alignment that a plan expects of one operand."""

    __slots__ = ("_dtype", "_misaligned", "shape", "strides")

    def __init__(self, problem: Problem, role: str) -> None:
        self.shape = problem.shape(role)
        self._dtype = problem.torch_dtype(role)
        self.strides = dense_strides(self.shape, problem.layout(role))
        self._misaligned = problem.alignment_of(role) - 1

    def example(self, device: torch.device) -> torch.Tensor:
        """An uninitialised tensor as the plan expects it."""
        return torch.empty_strided(self.shape, self.strides, dtype=self._dtype, device=device)

    def suits(self, strides: tuple[int, ...]) -> bool:
        """Whether an operand with ``strides`` lies in memory as the plan expects it."""
        return lie_alike(self.shape, self.strides, strides)

    def take(self, t: torch.Tensor) -> torch.Tensor:
        """``t`` as the plan expects it: itself, a view where only strides of axes of size 1 differ, or a copy."""
        if t.stride() != self.strides:
            return with_strides(t, self.strides)
        if t.data_ptr() & self._misaligned:
            return t.clone(memory_format=torch.preserve_format)
        return t


class BoundPass:
    """A plan bound to the dense layouts of its problem.

    ``bound`` is the plan, and ``call`` the shortest way to call it: both take operands in exactly these layouts. The
    object itself takes them in any layout, and copies where that is needed: ``bound_pass(*operands)`` or, for a problem
    that adds one, ``bound_pass(*operands, bias)``. ``slots`` say what is expected of each operand. ``range`` is the
    name under which a profiler sees its calls, empty for one that it does not see.
    """

    __slots__ = ("bound", "call", "plan", "problem", "range", "slots")

    def __init__(self, plan: Plan, problem: Problem, device: torch.device) -> None:
        self.plan, self.problem = plan, problem
        self.slots = tuple(Slot(problem, role) for role in problem.operands)
        self.bound = execute.bind(plan, problem, *(slot.example(device) for slot in self.slots))
        self.call: Callable[..., Any] = self.bound.call
        self.range = ""

    def named(self, layer: str, role: str) -> BoundPass:
        """The same for one pass of one layer, which a profiler sees in a range of its own."""
        named = copy.copy(self)
        named.range = range_name(layer, role, self.plan.solver)
        named.call = in_range(named.range, self.bound.call)
        return named

    def __call__(self, *tensors: torch.Tensor | None) -> Any:
        """The result, or a tuple where there are several."""
        operands = [slot.take(t) for slot, t in zip(self.slots, tensors, strict=False) if t is not None]
        return self.call(*operands, *tensors[len(operands) :])


class BoundPair(BoundPass):
    """A bound plan of two operands, as that of every convolution is: half a microsecond less a call."""

    __slots__ = ("_first", "_second")

    def __init__(self, plan: Plan, problem: Problem, device: torch.device) -> None:
        super().__init__(plan, problem, device)
        self._first, self._second = self.slots

    def __call__(self, a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None = None) -> Any:  # type: ignore[override]
        """The result, or a tuple where there are several."""
        return self.call(self._first.take(a), self._second.take(b), bias)


def bind_pass(plan: Plan, problem: Problem, device: torch.device) -> BoundPass:
    """Bind ``plan`` on ``device``. Raises what :func:`tilewise.execute.bind` raises."""
    kind = BoundPair if len(problem.operands) == 2 else BoundPass
    return kind(plan, problem, device)


def lie_alike(shape: Sequence[int], first: Sequence[int], second: Sequence[int]) -> bool:
    """Whether both strides put every element in the same place: they differ along axes of size 1 at the most."""
    return all(n == 1 or one == other for n, one, other in zip(shape, first, second, strict=True))


def with_strides(t: torch.Tensor, strides: tuple[int, ...]) -> torch.Tensor:
    """``t`` with these dense strides: a view where only strides of axes of size 1 differ, else a copy."""
    if t.stride() == strides:
        return t
    if lie_alike(t.shape, t.stride(), strides):
        return t.as_strided(t.shape, strides)
    return torch.empty_strided(t.shape, strides, dtype=t.dtype, device=t.device).copy_(t)
