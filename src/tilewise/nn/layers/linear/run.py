"""Running one kind of call of a linear layer by its plans, with autograd. torch computes what it is faster at."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from tilewise.nn.layers.bound_pass import BoundPass
from tilewise.nn.layers.call import disturbed, is_plain
from tilewise.nn.layers.linear.call import LinearCall

__all__ = ["BY_TORCH", "LinearRun"]

BY_TORCH: Any = torch._C._nn.linear
"""torch's own function, whatever stands in its place in ``torch.nn.functional``."""
Gradients = tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]


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

    def result(self, x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None) -> torch.Tensor:
        """The layer's result, without autograd."""
        if self.forward is None:
            y: torch.Tensor = BY_TORCH(x, w, b)
            return y
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


class PlannedLinear(torch.autograd.Function):
    """A linear layer whose passes run by plans."""

    @staticmethod
    def forward(ctx: Any, run: LinearRun, x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None) -> torch.Tensor:
        # The input is needed for the weight's gradient alone, and the weight for the input's.
        ctx.save_for_backward(x if run.call.needs[1] else None, w if run.call.needs[0] else None)
        ctx.linear_run = run
        return run.result(x, w, b)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[Any, ...]:
        run: LinearRun = ctx.linear_run
        x, w = ctx.saved_tensors
        return None, *run.backward(dy, x, w, ctx.needs_input_grad[1:])
