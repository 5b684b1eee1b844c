"""Planned layers inside ``torch.compile``: operators that refer to their plans by name.

The name is a digest of what the plans compute and how. It is no running number, because a compiled graph may be cached
on disk and loaded in another process, where a number could mean another layer.
"""

from __future__ import annotations

import hashlib
import json
import threading
from dataclasses import dataclass
from typing import Any

import torch

from tilewise.kernels.native import autograd
from tilewise.machine.device import conv_precision
from tilewise.nn.layers.bound_pass import with_strides
from tilewise.nn.layers.call import Call
from tilewise.nn.layers.runner import Runner

__all__ = ["Known", "Published", "publish", "published_as"]

_library = torch.library.Library("tilewise", "DEF")
for _schema in (
    "conv(Tensor x, Tensor w, Tensor? b, str plans) -> Tensor",
    "conv_backward(Tensor dy, Tensor x, Tensor w, str plans, bool[] mask) -> Tensor[]",
):
    _library.define(_schema, tags=(torch.Tag.pt2_compliant_tag,))


@dataclass(frozen=True)
class Known:
    """A planned call as tracing recognises it; operators find its runner by the name ``plans``."""

    plans: str
    shape: tuple[int, ...]
    weight: tuple[int, ...]
    bias: int | None
    layout: str
    dtype: torch.dtype
    device_type: str
    needs: tuple[bool, bool, bool]
    deterministic: bool
    table: int
    """The number of the plan table, see :func:`tilewise.nn.layers.plan_table.table_of`."""


@dataclass(frozen=True)
class Published:
    """A runner under a name. The operators promise the strides of its results to the compiler."""

    runner: Runner
    call: Call
    result_shape: tuple[int, ...]

    @property
    def applies(self) -> bool:
        """Whether torch's flags still are those that the plans were made for."""
        call = self.call
        if call.deterministic is not torch.are_deterministic_algorithms_enabled():
            return False
        asks = call.device.type == "cuda" and call.dtype is torch.float32
        return not asks or call.precision == conv_precision()


MOST_PUBLISHED = 8192
"""Plans that compiled graphs may name. A graph names its plans for as long as it is there, so none is ever dropped:
once there are so many, layers met for the first time are compiled as torch's."""
_published: dict[str, Published] = {}


def publish(runner: Runner, call: Call, result_shape: tuple[int, ...], table: int) -> Known | None:
    """Give ``runner`` a name for the operators; ``None`` where :data:`MOST_PUBLISHED` names are in use.

    ``table`` is the number of the plan table that the plans are from.
    """
    layout = call.backend_layout
    passes = (runner.forward, runner.grad_input, runner.grad_weight)
    trees = [None if p is None else p.plan.to_json() for p in passes]
    text = json.dumps([repr(runner.geometry), repr(call), trees], sort_keys=True)
    name = hashlib.sha256(text.encode()).hexdigest()[:24]
    if name not in _published and len(_published) >= MOST_PUBLISHED:
        return None
    if name not in _published:
        _published[name] = Published(runner, call, result_shape)
        _operators.publish(name)
    return Known(
        name, call.x.shape, call.w.shape, call.bias, layout, call.dtype, call.device.type, call.needs,
        call.deterministic, table,
    )  # fmt: skip


class _Operators:
    """Has the operators find plans in C++, where that is there: a call of Python takes a graph's host 200 us."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._implemented = False

    def publish(self, name: str) -> None:
        """Let C++ find what is published as ``name``; what it cannot run stays Python's."""
        published = _published[name]
        call = published.call
        module = autograd.native_calls(call.device.type)
        if module is None:
            autograd.when_there(self)
            return
        native = published.runner.native()
        if native is None:
            return
        with self._lock:
            if not self._implemented:
                keys = tuple(kind.upper() for kind in sorted(autograd.DEVICES))
                module.implement(_conv, _conv_backward, conv_precision, keys)
                self._implemented = True
        asks = call.device.type == "cuda" and call.dtype is torch.float32
        bias = -1 if call.bias is None else call.bias
        precision = call.precision if asks else None
        module.publish(name, native, tuple(call.x.shape), tuple(call.w.shape), bias, call.deterministic, precision)

    def use_native(self) -> None:
        """Publish all: C++ has come to be there."""
        for name in list(_published):
            self.publish(name)


_operators = _Operators()


def published_as(plans: str) -> Published | None:
    """The runner published as ``plans``, if any."""
    return _published.get(plans)


def _find(plans: str, x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None = None) -> Published:
    """The runner published as ``plans``.

    Raises ``RuntimeError`` where there is none, or where operands have other shapes: kernels read addresses without
    checking.
    """
    published = _published.get(plans)
    if published is None:
        raise RuntimeError(f"plans={plans!r} are not known in this process: call tilewise.optimize before this graph")
    call = published.call
    if x.shape != call.x.shape or w.shape != call.w.shape or (b is not None and b.shape != (call.bias,)):
        shapes = [tuple(t.shape) for t in (x, w, b) if t is not None]
        raise RuntimeError(f"plans={plans!r} are for operands of {call.x.shape} and {call.w.shape}, not of {shapes}")
    return published


def _conv(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None, plans: str) -> torch.Tensor:
    """The operator's forward, by plan, or by torch where its flags have changed."""
    published = _find(plans, x, w, b)
    with torch._C._DisableAutocast():
        if not published.applies:
            return with_strides(published.runner.geometry.torch_forward(x, w, b), published.runner.strides.result)
        return with_strides(published.runner.converted(x, w, b), published.runner.strides.result)


def _conv_backward(
    dy: torch.Tensor, x: torch.Tensor, w: torch.Tensor, plans: str, mask: list[bool]
) -> list[torch.Tensor]:
    """The gradients that ``mask`` asks for, of input, weight and bias."""
    published = _find(plans, x, w)
    asked = (mask[0], mask[1], mask[2])
    with torch._C._DisableAutocast():
        if published.applies:
            dx, dw, db = published.runner.gradients(dy, x, w, asked)
        else:
            dx, dw, db = published.runner.geometry.torch_backward(dy, x, w, asked)
    strides = published.runner.strides
    grads = ((dx, strides.grad_input), (dw, strides.grad_weight), (db, (1,)))
    return [with_strides(t, strides) for (t, strides), want in zip(grads, asked, strict=True) if want and t is not None]


def _conv_fake(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None, plans: str) -> torch.Tensor:
    """An empty result with the promised shape and strides, for tracing."""
    published = _find(plans, x, w, b)
    return x.new_empty_strided(published.result_shape, published.runner.strides.result)


def _conv_backward_fake(
    dy: torch.Tensor, x: torch.Tensor, w: torch.Tensor, plans: str, mask: list[bool]
) -> list[torch.Tensor]:
    """Empty gradients with the promised shapes and strides, for tracing."""
    published = _find(plans, x, w)
    strides = published.runner.strides
    forms = (
        (x.shape, strides.grad_input),
        (w.shape, strides.grad_weight),
        ((published.result_shape[1],), (1,)),
    )
    return [dy.new_empty_strided(shape, strides) for (shape, strides), want in zip(forms, mask, strict=True) if want]


def _setup(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    """Save for backward what the gradients need."""
    x, w, _, plans = inputs
    ctx.save_for_backward(x, w)
    ctx.plans = plans


def _backward(ctx: Any, dy: torch.Tensor) -> tuple[Any, ...]:
    """The gradients by the operator, or by torch where they must be differentiable themselves."""
    x, w = ctx.saved_tensors
    mask = list(ctx.needs_input_grad[:3])
    if torch.is_grad_enabled():
        geometry = _find(ctx.plans, x, w).runner.geometry
        return *geometry.torch_backward(dy, x, w, (mask[0], mask[1], mask[2])), None
    grads = iter(torch.ops.tilewise.conv_backward(dy, x, w, ctx.plans, mask))
    return *(next(grads) if want else None for want in mask), None


_library.impl("conv", _conv, "CompositeExplicitAutograd")
_library.impl("conv_backward", _conv_backward, "CompositeExplicitAutograd")
torch.library.register_fake("tilewise::conv", _conv_fake, lib=_library)
torch.library.register_fake("tilewise::conv_backward", _conv_backward_fake, lib=_library)
torch.library.register_autograd("tilewise::conv", _backward, setup_context=_setup, lib=_library)
