"""Runs one kind of call by its plans, with autograd; torch does the passes that it does best itself."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from tilewise import execute
from tilewise.nn.call import disturbed, is_plain, is_plain_type, without_dispatch
from tilewise.nn.geometry import Geometry
from tilewise.nn.strides import Strides
from tilewise.plan import Plan
from tilewise.problem import ConvProblem, dense_strides

__all__ = ["BoundPass", "Run", "Runner", "settle"]

Run = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]
Gradients = tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]


class BoundPass:
    """A plan bound to the problem's own dense layouts; operands that come otherwise are brought to them."""

    __slots__ = ("bound", "first", "plan", "problem", "second")

    def __init__(self, plan: Plan, problem: ConvProblem, device: torch.device) -> None:
        self.plan, self.problem = plan, problem
        self.first, self.second = (Slot(problem, role) for role in problem.operands)
        self.bound = execute.bind(plan, problem, self.first.example(device), self.second.example(device))

    def __call__(self, a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return self.bound(self.first.take(a), self.second.take(b), bias)


class Slot:
    """Where an operand goes: its strides, layout and alignment."""

    __slots__ = ("_dtype", "_misaligned", "_shape", "strides")

    def __init__(self, problem: ConvProblem, role: str) -> None:
        self._shape = problem.shape(role)
        self._dtype = problem.torch_dtype(role)
        self.strides = dense_strides(self._shape, problem.layout(role))
        self._misaligned = problem.alignment[("x", "w", "y").index(role)] - 1

    def example(self, device: torch.device) -> torch.Tensor:
        return torch.empty_strided(self._shape, self.strides, dtype=self._dtype, device=device)

    def take(self, t: torch.Tensor) -> torch.Tensor:
        """``t`` itself where it fits, a view of it where only strides of size-1 axes differ, else a copy."""
        if t.stride() != self.strides:
            return settle(t, self.strides)
        if t.data_ptr() & self._misaligned:
            return t.clone(memory_format=torch.preserve_format)
        return t


def settle(t: torch.Tensor, strides: tuple[int, ...]) -> torch.Tensor:
    """``t`` with these dense strides: the same memory where only strides of size-1 axes differ, else a copy."""
    if t.stride() == strides:
        return t
    if all(n == 1 or have == want for n, have, want in zip(t.shape, t.stride(), strides, strict=True)):
        return t.as_strided(t.shape, strides)
    return torch.empty_strided(t.shape, strides, dtype=t.dtype, device=t.device).copy_(t)


class Runner:
    """What one kind of call resolved to: a plan for each pass, or ``None`` where torch does that pass.

    ``forward``, ``grad_input`` and ``grad_weight`` are the layer's three computations. ``direct`` says that operands of
    this call come in the plans' own layouts, and ``strides`` are what torch would give. ``run`` takes input, weight and
    bias, with autograd where they need it, and ``result`` the same without; both are as short a way as there is.
    """

    __slots__ = (
        "_gradient_slot",
        "_index",
        "_settles",
        "_sum_dims",
        "direct",
        "forward",
        "geometry",
        "grad_input",
        "grad_weight",
        "result",
        "run",
        "strides",
    )

    def __init__(
        self,
        geometry: Geometry,
        forward: BoundPass | None,
        grad_input: BoundPass | None,
        grad_weight: BoundPass | None,
        *,
        needs_grad: bool,
        strides: Strides,
        direct: bool,
        device: torch.device,
    ) -> None:
        self.geometry = geometry
        self.forward, self.grad_input, self.grad_weight = forward, grad_input, grad_weight
        self.direct, self.strides = direct, strides
        p = None if forward is None else forward.problem
        self._settles = p is not None and dense_strides(p.shape(p.result), p.layout(p.result)) != strides.result
        # With one GPU there is no other to switch to.
        self._index = device.index if device.type == "cuda" and torch.cuda.device_count() > 1 else None
        self._sum_dims = (0, *range(2, geometry.dims + 2))
        self._gradient_slot = _gradient_slot(geometry, grad_input, grad_weight)
        self.result: Run = self.compute
        if forward is not None and direct and self._index is None and not self._settles:
            self.result = forward.bound
        self.run: Run = functools.partial(_apply, self) if needs_grad else self.result

    @property
    def planned(self) -> bool:
        """Whether any pass is not torch's."""
        return not (self.forward is None and self.grad_input is None and self.grad_weight is None)

    def compute(self, x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None) -> torch.Tensor:
        """The layer's result, without autograd."""
        if self._index is not None and self._index != torch._C._cuda_getDevice():
            with torch.cuda.device(self._index):
                return self.compute(x, w, b)
        if self.forward is None:
            return self.geometry.torch_forward(x, w, b)
        y = self.forward.bound(x, w, b) if self.direct else self.forward(x, w, b)
        return settle(y, self.strides.result) if self._settles else y

    def converted(self, x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None) -> torch.Tensor:
        """:meth:`compute` for operands in any layout."""
        if self.forward is None or not self.direct:
            return self.compute(x, w, b)
        return self.compute(self.forward.first.take(x), self.forward.second.take(w), b)

    def gradients(self, dy: torch.Tensor, x: torch.Tensor, w: torch.Tensor, mask: tuple[bool, bool, bool]) -> Gradients:
        """Gradients of input, weight and bias where ``mask`` asks for them, by plans and, in one call, by torch."""
        if self._index is not None and self._index != torch._C._cuda_getDevice():
            with torch.cuda.device(self._index):
                return self.gradients(dy, x, w, mask)
        dx = dw = db = None
        by_plan = (mask[0] and self.grad_input is not None, mask[1] and self.grad_weight is not None)
        weight_by_torch = mask[1] and not by_plan[1]
        rest = (mask[0] and not by_plan[0], weight_by_torch, mask[2] and weight_by_torch)
        if self._gradient_slot is not None:
            dy = self._gradient_slot.take(dy)  # once for all: a slice, as torch.cat's backward gives, is copied
        if rest[0] or rest[1]:
            dx, dw, db = self.geometry.torch_backward(dy, x, w, rest)
        if mask[2] and not weight_by_torch:
            db = dy.sum(self._sum_dims)  # oneDNN would compute the weight's gradient as well
        if by_plan[0]:
            assert self.grad_input is not None
            dx = settle(self.grad_input(dy, w), self.strides.grad_input)
        if by_plan[1]:
            assert self.grad_weight is not None
            dw = self.grad_weight(dy, x) if self.geometry.transposed else self.grad_weight(x, dy)
            dw = settle(dw, self.strides.grad_weight)
        return dx, dw, db


def _gradient_slot(geometry: Geometry, grad_input: BoundPass | None, grad_weight: BoundPass | None) -> Slot | None:
    """Where the result's gradient goes in the plans; ``None`` where none takes it."""
    if grad_input is not None:
        return grad_input.first
    if grad_weight is not None:
        return grad_weight.first if geometry.transposed else grad_weight.second
    return None


class PlannedConv(torch.autograd.Function):
    """A convolution whose passes run by plans. Backward under grad mode, and when disturbed, is torch's own."""

    @staticmethod
    def forward(ctx: Any, runner: Runner, x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None) -> torch.Tensor:
        ctx.save_for_backward(x, w)
        ctx.runner = runner
        return runner.result(x, w, b)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[Any, ...]:
        x, w = ctx.saved_tensors
        mask = ctx.needs_input_grad[1:]
        runner: Runner = ctx.runner
        if not is_plain_type(type(dy)) and without_dispatch(type(dy)):
            with torch._C.DisableTorchFunctionSubclass():
                dy = dy.as_subclass(torch.Tensor)  # as torch's own backward takes it
        if torch.is_grad_enabled() or not is_plain(dy) or disturbed():
            return None, *runner.geometry.torch_backward(dy, x, w, mask)
        if torch._C._is_any_autocast_enabled():
            with torch._C._DisableAutocast():
                return None, *runner.gradients(dy, x, w, mask)
        return None, *runner.gradients(dy, x, w, mask)


_apply: Any = super(torch.autograd.Function, PlannedConv).apply
"""``PlannedConv.apply`` less its look for ``torch.func`` transforms, under which no call comes here."""
