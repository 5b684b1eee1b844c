"""Running one kind of call of a linear layer by its plans, with autograd. torch computes what it is faster at."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from tilewise.kernels.native.autograd import linear_call
from tilewise.kernels.native.sequence import SCALAR_TYPES, Kernels
from tilewise.nn.layers.bound_pass import BoundPass
from tilewise.nn.layers.call import disturbed, is_plain
from tilewise.nn.layers.linear.call import LinearCall
from tilewise.problems.activations import activate, gradient_from_result
from tilewise.problems.base import ALIGNMENT, dense_strides

__all__ = ["BY_TORCH", "LinearRun"]

BY_TORCH: Any = torch._C._nn.linear
"""torch's own function, whatever stands in its place in ``torch.nn.functional``."""
Gradients = tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]
Native = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]
Ints = tuple[int, ...]
_reshaped = torch.ops.aten._unsafe_view.default
"""A tensor of other sizes over the same memory, which is no view for autograd: it may be changed in place."""


@dataclass(frozen=True, slots=True, eq=False)
class LinearRun:
    """The plans that run one kind of call, ``None`` for each pass that torch computes.

    ``several`` says that there is more than one GPU: then the call's is made current.
    """

    call: LinearCall
    forward: BoundPass | None
    grad_input: BoundPass | None
    grad_weight: BoundPass | None
    several: bool

    @property
    def planned(self) -> bool:
        """Whether a plan runs any pass."""
        return not (self.forward is None and self.grad_input is None and self.grad_weight is None)

    def __call__(self, x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None) -> torch.Tensor:
        """The layer's result, with autograd where that is needed."""
        if any(self.call.needs):
            y: torch.Tensor = PlannedLinear.apply(self, x, w, b)  # type: ignore[no-untyped-call]
            return y
        return self.result(x, w, b)

    def native(self, autocast: torch.dtype | None = None) -> Native | None:
        """The same in native code, which first casts the tensors to ``autocast``; ``None`` where there is none.

        Gradients that lie otherwise than the result go to :meth:`backward`.
        """
        call, kind = self.call, linear_call(self.call.device.type)
        launched = self.forward is not None and self.forward.bound.kernels is not None
        if kind is None or not self.planned or call.alignment != (ALIGNMENT, ALIGNMENT):
            return None
        if autocast is None and not (any(call.needs) or launched):  # then this object is as short
            return None
        if call.activation != "none" and (any(call.needs) or self.forward is None):
            return None  # native code knows no gradients of activations, and torch's product has none
        into, out = call.shape[-1], call.outputs
        of_y = (*call.shape[:-1], out)
        of_x, of_w = dense_strides(call.shape, "contiguous"), (1, out) if call.turned else (into, 1)
        native: Native = kind(
            forward=_native_pass(self.forward, self._laid_out, of_y, dense_strides(of_y, "contiguous")),
            grad_input=_native_pass(self.grad_input, self._grad_input, call.shape, of_x),
            grad_weight=_native_pass(self.grad_weight, self._grad_weight, (out, into), of_w),
            backward=self.backward,
            shapes=(call.shape, of_y),
            strides=(of_x, dense_strides(of_y, "contiguous"), of_w),
            turned=call.turned,
            misaligned=ALIGNMENT - 1,
            autocast=-1 if autocast is None else SCALAR_TYPES[autocast],
        )
        return native

    def _laid_out(self, x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None = None) -> torch.Tensor:
        """The forward's plan, whose result is no view."""
        assert self.forward is not None
        y: torch.Tensor = self.forward(x.view(self.call.rows, x.shape[-1]), w.t() if self.call.turned else w, b)
        return y if x.dim() == 2 else _reshaped(y, (*self.call.shape[:-1], self.call.outputs))

    def _grad_input(self, dy: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        """The plan of the input's gradient, in the input's shape."""
        assert self.grad_input is not None
        dx = self.grad_input(dy.view(self.call.rows, self.call.outputs), w.t() if self.call.turned else w)
        return dx if dy.dim() == 2 else _reshaped(dx, self.call.shape)  # type: ignore[no-any-return]

    def _grad_weight(self, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        """The plan of the weight's gradient, of (dy, x), or of (x, dy) where the weight is turned."""
        assert self.grad_weight is not None
        rows = self.call.rows
        dw: torch.Tensor = self.grad_weight(first.view(rows, first.shape[-1]), second.view(rows, second.shape[-1]))
        return dw.t() if self.call.turned else dw

    def result(self, x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None) -> torch.Tensor:
        """The layer's result, without autograd."""
        if self.forward is None:
            return activate(BY_TORCH(x, w, b), self.call.activation)
        if self.several:
            with torch.cuda.device(self.call.device):
                return self._by_plan(x, w, b)
        return self._by_plan(x, w, b)

    def _by_plan(self, x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None) -> torch.Tensor:
        """The result by the forward's plan."""
        assert self.forward is not None
        if self.call.turned:
            w = w.t()
        if x.dim() == 2:
            result: torch.Tensor = self.forward(x, w, b)
            return result
        *leading, into = self.call.shape
        y: torch.Tensor = self.forward(x.view(self.call.rows, into), w, b)
        return y.view(*leading, self.call.outputs)

    def gradients(self, dy: torch.Tensor, x: Any, w: Any, mask: tuple[bool, ...]) -> Gradients:
        """The gradients of input, weight and bias that ``mask`` asks for, by plans where there are any."""
        rows, into = self.call.rows, self.call.shape[-1]
        flat = dy.reshape(rows, self.call.outputs)
        dx = dw = db = None
        if mask[0]:
            by_plan = self.grad_input
            dx = flat @ w if by_plan is None else by_plan(flat, w.t() if self.call.turned else w)
            dx = dx.view(self.call.shape)
        if mask[1]:
            factors = (x.view(rows, into), flat) if self.call.turned else (flat, x.view(rows, into))
            dw = factors[0].t() @ factors[1] if self.grad_weight is None else self.grad_weight(*factors)
            dw = dw.t() if self.call.turned else dw
        if mask[2]:
            db = flat.sum(0)
        return dx, dw, db

    def backward(self, dy: torch.Tensor, x: Any, w: Any, mask: tuple[bool, ...]) -> Gradients:
        """As :meth:`gradients`, by torch's operators where they must be differentiable or something watches them."""
        if torch.is_grad_enabled() or not is_plain(dy) or disturbed() or dy.dtype is not self.call.dtype:
            return self.by_torch(dy, x, w, mask)
        with torch._C._DisableAutocast():
            if self.several:
                with torch.cuda.device(self.call.device):
                    return self.gradients(dy, x, w, mask)
            return self.gradients(dy, x, w, mask)

    def by_torch(self, dy: torch.Tensor, x: Any, w: Any, mask: tuple[bool, ...]) -> Gradients:
        """The gradients by torch's operators, which have gradients themselves."""
        flat = dy.reshape(self.call.rows, self.call.outputs)
        dx = (flat @ w).reshape(self.call.shape) if mask[0] else None
        dw = flat.mT @ x.reshape(self.call.rows, self.call.shape[-1]) if mask[1] else None
        return dx, dw, flat.sum(0) if mask[2] else None


def _native_pass(
    found: BoundPass | None, call: Callable[..., Any], shape: Ints, strides: Ints
) -> tuple[Callable[..., Any], Kernels | None] | None:
    """What native code runs for a plan: a call for tensors of the layer's shapes, and its kernels where that is all.

    These write to addresses, so their result may have the layer's ``shape`` and ``strides`` at once. ``None`` where
    there is no plan.
    """
    if found is None:
        return None
    kernels = found.bound.kernels
    if kernels is not None:
        kernels = kernels._replace(shape=shape, strides=strides, bias_dim=len(shape) - 1, range=found.range)
    return call, kernels


class PlannedLinear(torch.autograd.Function):
    """A linear layer whose passes run by plans."""

    @staticmethod
    def forward(ctx: Any, run: LinearRun, x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None) -> torch.Tensor:
        # The input is needed for the weight's gradient alone, and the weight for the input's.
        # The derivative of an activation follows from the result.
        y = run.result(x, w, b)
        kept = y if run.call.activation != "none" else None
        ctx.save_for_backward(x if run.call.needs[1] else None, w if run.call.needs[0] else None, kept)
        ctx.linear_run = run
        return y

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[Any, ...]:
        run: LinearRun = ctx.linear_run
        x, w, y = ctx.saved_tensors
        if y is not None:
            dy = gradient_from_result(dy, y, run.call.activation)
        return None, *run.backward(dy, x, w, ctx.needs_input_grad[1:])
