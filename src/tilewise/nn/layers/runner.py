"""Running one kind of call by its plans, with autograd. torch computes the passes in which it is faster."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from tilewise.kernels.native.autograd import planned_call
from tilewise.kernels.native.sequence import SCALAR_TYPES, Kernels
from tilewise.nn.layers.bound_pass import BoundPass, Slot, lie_alike, with_strides
from tilewise.nn.layers.call import disturbed, is_plain, is_plain_type, without_dispatch
from tilewise.nn.layers.geometry import Geometry
from tilewise.nn.layers.strides import Strides
from tilewise.problems.base import ALIGNMENT, dense_strides

__all__ = ["Run", "Runner"]

Ints = tuple[int, ...]
Run = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]
Gradients = tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]


class Runner:
    """The plans that run one kind of call, ``None`` for each pass that torch computes.

    ``forward``, ``grad_input`` and ``grad_weight`` are the passes. ``direct`` says that this call's operands have the
    layouts that the plans expect. ``strides`` are those that torch would give. ``run(x, w, b)`` computes with autograd
    where that is needed, ``result(x, w, b)`` without; both are the shortest way possible.
    """

    __slots__ = (
        "_copies",
        "_device_type",
        "_gradient_slot",
        "_index",
        "_needs_grad",
        "_operand_strides",
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
        operand_strides: tuple[tuple[int, ...], tuple[int, ...]],
        device: torch.device,
    ) -> None:
        self.geometry = geometry
        self.forward, self.grad_input, self.grad_weight = forward, grad_input, grad_weight
        self.direct, self.strides = direct, strides
        p = None if forward is None else forward.problem
        self._copies = p is not None and dense_strides(p.shape(p.result), p.layout(p.result)) != strides.result
        # With one GPU there is no other to switch to.
        self._index = device.index if device.type == "cuda" and torch.cuda.device_count() > 1 else None
        self._sum_dims = (0, *range(2, geometry.dims + 2))
        self._gradient_slot = _gradient_slot(geometry, grad_input, grad_weight)
        self.result: Run = self.compute
        if forward is not None and direct and self._index is None and not self._copies:
            self.result = forward.call
        self._operand_strides, self._needs_grad, self._device_type = operand_strides, needs_grad, device.type
        self.run: Run = functools.partial(_apply, self) if needs_grad else self.result
        self.use_native()

    def use_native(self) -> None:
        """From now on run by native code, where that is there and takes such calls."""
        launched = self.forward is not None and self.forward.bound.kernels is not None
        if self._needs_grad or launched:  # else ``result`` is as short
            self.run = self.native() or self.run

    def native(self, autocast: torch.dtype | None = None) -> Run | None:
        """``run`` in native code, which first casts the operands to ``autocast``; ``None`` where there is none.

        It takes operands and gradients that lie as plans expect them, and hands all others to :meth:`backward`. Strides
        of a gradient's axes of size 1 are anybody's, and torch's results may follow them: so a second call is told of
        the other way in which they are usual.
        """
        kind = planned_call(self._device_type) if self.planned and self.geometry.symmetric else None
        if kind is None or not self._suits(self.strides):
            return None
        cast, other = -1 if autocast is None else SCALAR_TYPES[autocast], self._strides_otherwise()
        otherwise = None if other is None else self._native_call(kind, *other, cast, None)
        return self._native_call(kind, self.strides.result, self.strides, cast, otherwise)

    def _native_call(self, kind: Callable[..., Any], of_dy: Ints, strides: Strides, cast: int, otherwise: Any) -> Run:
        """The call in native code for gradients of the result with strides ``of_dy``; ``strides`` are the others."""
        g, (of_x, of_w) = self.geometry, self._operand_strides
        of_weight = (of_dy, of_x) if g.transposed else (of_x, of_dy)
        sides = tuple(before for before, _ in g.padding)
        return kind(  # type: ignore[no-any-return]
            forward=_native_pass(self.forward, (of_x, of_w), strides.result),
            grad_input=_native_pass(self.grad_input, (of_dy, of_w), strides.grad_input),
            grad_weight=_native_pass(self.grad_weight, of_weight, strides.grad_weight),
            backward=self.backward,
            geometry=(g.stride, sides, g.dilation, g.output_padding or (0,) * g.dims, g.transposed, g.groups),
            strides=(of_dy, of_x, of_w),
            misaligned=ALIGNMENT - 1,
            autocast=cast,
            otherwise=otherwise,
        )

    def _suits(self, strides: Strides) -> bool:
        """Whether plans take operands and a result's gradient with ``strides`` as they lie, without copies."""
        dy, (x, w) = strides.result, self._operand_strides
        of_weight = (dy, x) if self.geometry.transposed else (x, dy)
        passes = ((self.forward, (x, w)), (self.grad_input, (dy, w)), (self.grad_weight, of_weight))
        return all(
            slot.suits(given)
            for found, operands in passes
            if found is not None
            for slot, given in zip(found.slots, operands, strict=True)
        )

    def _strides_otherwise(self) -> tuple[Ints, Strides] | None:
        """Further strides of the result's gradient that are usual, and torch's strides for it; ``None`` without any.

        They put the same elements into the same places.
        """
        own = self.strides.result
        if self._gradient_slot is not None:
            shape = self._gradient_slot.shape
        elif self.forward is not None:
            shape = self.forward.problem.shape(self.forward.problem.result)
        else:
            return None
        for layout in ("contiguous", "channels_last"):
            other = dense_strides(shape, layout)
            if other != own and lie_alike(shape, other, own):
                return other, self.strides if self.strides.given is None else self.strides.given(other)
        return None

    def backward(self, dy: torch.Tensor, x: torch.Tensor, w: torch.Tensor, mask: tuple[bool, bool, bool]) -> Gradients:
        """As :meth:`gradients`, by torch where they must be differentiable or something watches operators."""
        if not is_plain_type(type(dy)) and without_dispatch(type(dy)):
            with torch._C.DisableTorchFunctionSubclass():
                dy = dy.as_subclass(torch.Tensor)  # as torch's own backward takes it
        if torch.is_grad_enabled() or not is_plain(dy) or disturbed():
            return self.geometry.torch_backward(dy, x, w, mask)
        if torch._C._is_any_autocast_enabled():
            with torch._C._DisableAutocast():
                return self.gradients(dy, x, w, mask)
        return self.gradients(dy, x, w, mask)

    @property
    def planned(self) -> bool:
        """Whether a plan runs any pass."""
        return not (self.forward is None and self.grad_input is None and self.grad_weight is None)

    def compute(self, x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None) -> torch.Tensor:
        """The layer's result, without autograd."""
        if self._index is not None and self._index != torch._C._cuda_getDevice():
            with torch.cuda.device(self._index):
                return self.compute(x, w, b)
        if self.forward is None:
            return self.geometry.torch_forward(x, w, b)
        y = self.forward.call(x, w, b) if self.direct else self.forward(x, w, b)
        return with_strides(y, self.strides.result) if self._copies else y

    def converted(self, x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None) -> torch.Tensor:
        """As :meth:`compute`, for operands in any layout."""
        if self.forward is None or not self.direct:
            return self.compute(x, w, b)
        return self.compute(self.forward.slots[0].take(x), self.forward.slots[1].take(w), b)

    def gradients(self, dy: torch.Tensor, x: torch.Tensor, w: torch.Tensor, mask: tuple[bool, bool, bool]) -> Gradients:
        """The gradients of input, weight and bias that ``mask`` asks for, by plans, the others by one call of torch."""
        if self._index is not None and self._index != torch._C._cuda_getDevice():
            with torch.cuda.device(self._index):
                return self.gradients(dy, x, w, mask)
        dx = dw = db = None
        strides = self.strides
        if strides.given is not None and dy.stride() != strides.result:
            strides = strides.given(dy.stride())
        by_plan = (mask[0] and self.grad_input is not None, mask[1] and self.grad_weight is not None)
        weight_by_torch = mask[1] and not by_plan[1]
        by_torch = (mask[0] and not by_plan[0], weight_by_torch, mask[2] and weight_by_torch)
        if self._gradient_slot is not None:
            dy = self._gradient_slot.take(dy)  # once for both: a slice, as torch.cat's backward gives, is copied
        if by_torch[0] or by_torch[1]:
            dx, dw, db = self.geometry.torch_backward(dy, x, w, by_torch)
        if mask[2] and not weight_by_torch:
            db = dy.sum(self._sum_dims)  # oneDNN would compute the weight's gradient as well
        if by_plan[0]:
            assert self.grad_input is not None
            found = self.grad_input
            dx = with_strides(found.call(dy, found.slots[1].take(w)), strides.grad_input)
        if by_plan[1]:
            assert self.grad_weight is not None
            found = self.grad_weight
            if self.geometry.transposed:
                dw = found.call(dy, found.slots[1].take(x))
            else:
                dw = found.call(found.slots[0].take(x), dy)
            dw = with_strides(dw, strides.grad_weight)
        return dx, dw, db


def _gradient_slot(geometry: Geometry, grad_input: BoundPass | None, grad_weight: BoundPass | None) -> Slot | None:
    """What the plans expect of the result's gradient; ``None`` where no plan takes it."""
    if grad_input is not None:
        return grad_input.slots[0]
    if grad_weight is not None:
        return grad_weight.slots[0 if geometry.transposed else 1]
    return None


def _native_pass(
    found: BoundPass | None, operands: tuple[Ints, Ints], strides: Ints
) -> tuple[Callable[..., Any], Kernels | None] | None:
    """What native code runs for a plan whose operands lie as it expects: its call, and its kernels where that is all.

    The operands have these strides, which along axes of size 1 may not be the plan's, and the result gets ``strides``.
    ``None`` where there is no plan.
    """
    if found is None:
        return None
    p, kernels = found.problem, found.bound.kernels
    kernels = None if kernels is None else kernels._replace(range=found.range)
    same = all(slot.strides == given for slot, given in zip(found.slots, operands, strict=True))
    call: Callable[..., Any] = found.call if same else found
    shape, own = p.shape(p.result), dense_strides(p.shape(p.result), p.layout(p.result))
    if own == strides:
        return call, kernels
    if kernels is not None:  # they write to addresses: axes of size 1 are of no concern to them
        kernels = kernels._replace(strides=strides) if lie_alike(shape, own, strides) else None
    return (lambda *tensors: with_strides(call(*tensors), strides)), kernels


class PlannedConv(torch.autograd.Function):
    """A convolution whose passes run by plans.

    Backward is left to torch where the gradients must be differentiable, and where something watches operators.
    """

    @staticmethod
    def forward(ctx: Any, runner: Runner, x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None) -> torch.Tensor:
        ctx.save_for_backward(x, w)
        ctx.runner = runner
        return runner.result(x, w, b)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[Any, ...]:
        runner: Runner = ctx.runner
        x, w = ctx.saved_tensors
        return None, *runner.backward(dy, x, w, ctx.needs_input_grad[1:])


_apply: Any = super(torch.autograd.Function, PlannedConv).apply
"""``PlannedConv.apply`` less its look for ``torch.func`` transforms, under which no call comes here."""
