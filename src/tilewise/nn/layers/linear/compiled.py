"""Planned linear layers inside ``torch.compile``: operators that refer to their plans by name.

As for convolutions (:mod:`tilewise.nn.layers.compiled`) the name is a digest of what the plans compute and how, since
a compiled graph may be cached on disk and loaded in another process.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import Any

import torch

from tilewise.machine.device import matmul_precision
from tilewise.nn.layers.linear.call import LinearCall
from tilewise.nn.layers.linear.run import BY_TORCH, LinearRun

__all__ = ["KnownLinear", "publish"]

MOST_PUBLISHED = 8192
"""Plans that compiled graphs may name. A graph names its plans for as long as it is there, so none is ever dropped:
once there are so many, layers met for the first time are compiled as torch's."""

_library = torch.library.Library("tilewise", "FRAGMENT")
for _schema in (
    "linear(Tensor x, Tensor w, Tensor? b, str plans) -> Tensor",
    "linear_backward(Tensor dy, Tensor x, Tensor w, str plans, bool[] mask) -> Tensor[]",
    "linear_gradients(Tensor dy, Tensor? x, Tensor? w, int[] shape, int outputs, int mask) -> Tensor[]",
):
    _library.define(_schema, tags=(torch.Tag.pt2_compliant_tag,))


@dataclass(frozen=True)
class KnownLinear:
    """A planned call as tracing recognises it; operators find what runs it by the name ``plans``."""

    plans: str
    shape: tuple[int, ...]
    weight: tuple[int, int]
    bias: bool
    turned: bool
    dtype: torch.dtype
    device_type: str
    needs: tuple[bool, bool, bool]
    deterministic: bool


_published: dict[str, LinearRun] = {}


def publish(run: LinearRun) -> KnownLinear | None:
    """Give ``run`` a name for the operators; ``None`` where :data:`MOST_PUBLISHED` names are in use."""
    call = run.call
    trees = [None if p is None else p.plan.to_json() for p in (run.forward, run.grad_input, run.grad_weight)]
    text = json.dumps(["linear", repr(call), trees], sort_keys=True)
    name = hashlib.sha256(text.encode()).hexdigest()[:24]
    if name not in _published and len(_published) >= MOST_PUBLISHED:
        return None
    _published.setdefault(name, run)
    return KnownLinear(
        plans=name,
        shape=call.shape,
        weight=(call.outputs, call.shape[-1]),
        bias=call.bias,
        turned=call.turned,
        dtype=call.dtype,
        device_type=call.device.type,
        needs=call.needs,
        deterministic=call.deterministic,
    )


def _find(plans: str, x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None = None) -> LinearRun:
    """What was published as ``plans``.

    Raises ``RuntimeError`` where there is nothing, or where operands have other shapes: kernels read addresses without
    checking.
    """
    run = _published.get(plans)
    if run is None:
        raise RuntimeError(f"plans={plans!r} are not known in this process: call tilewise.optimize before this graph")
    call = run.call
    weight = call.outputs, call.shape[-1]
    if x.shape != call.shape or w.shape != weight or (b is not None and b.shape != weight[:1]):
        shapes = [tuple(t.shape) for t in (x, w, b) if t is not None]
        raise RuntimeError(f"plans={plans!r} are for operands of {call.shape} and {weight}, not of {shapes}")
    return run


def _applies(call: LinearCall) -> bool:
    """Whether torch's flags still are those that the plans were made for."""
    if call.deterministic is not torch.are_deterministic_algorithms_enabled():
        return False
    return call.device.type != "cuda" or call.dtype is not torch.float32 or call.precision == matmul_precision()


def _stored(w: torch.Tensor, call: LinearCall) -> torch.Tensor:
    """The weight stored as the plans expect it."""
    return w.t().contiguous().t() if call.turned else w.contiguous()


def _linear(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None, plans: str) -> torch.Tensor:
    """The operator's forward, by plan, or by torch where its flags have changed."""
    run = _find(plans, x, w, b)
    with torch._C._DisableAutocast():
        if not _applies(run.call):
            y: torch.Tensor = BY_TORCH(x, w, b)
            return y.contiguous()
        return run.result(x.contiguous(), _stored(w, run.call), None if b is None else b.contiguous())


def _linear_backward(
    dy: torch.Tensor, x: torch.Tensor, w: torch.Tensor, plans: str, mask: list[bool]
) -> list[torch.Tensor]:
    """The gradients that ``mask`` asks for, of input, weight and bias."""
    run = _find(plans, x, w)
    compute = run.gradients if _applies(run.call) else run.by_torch
    with torch._C._DisableAutocast():
        dx, dw, db = compute(dy, x.contiguous(), _stored(w, run.call), (mask[0], mask[1], mask[2]))
    if dw is not None:
        dw = _stored(dw, run.call)
    return [t for t in (dx, dw, db) if t is not None]


def _linear_fake(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None, plans: str) -> torch.Tensor:
    """An empty result with the promised shape and strides, for tracing."""
    call = _find(plans, x, w, b).call
    return x.new_empty((*call.shape[:-1], call.outputs))


def _linear_backward_fake(
    dy: torch.Tensor, x: torch.Tensor, w: torch.Tensor, plans: str, mask: list[bool]
) -> list[torch.Tensor]:
    """Empty gradients with the promised shapes and strides, for tracing."""
    call = _find(plans, x, w).call
    of_w = dy.new_empty(w.shape[::-1]).t() if call.turned else dy.new_empty(w.shape)
    made = (dy.new_empty(call.shape), of_w, dy.new_empty((call.outputs,)))
    return [t for t, want in zip(made, mask, strict=True) if want]


def _gradients(
    dy: torch.Tensor, x: torch.Tensor | None, w: torch.Tensor | None, shape: list[int], outputs: int, mask: int
) -> list[torch.Tensor]:
    """The gradients of input, weight and bias whose bits are set in ``mask``, by torch's own operators.

    Compiled autograd traces a layer's backward by this operator, since it does not know the shape of ``dy`` then.
    ``shape`` is that of the input. The input is there for the weight's gradient, and the weight for the input's.
    """
    flat, grads = dy.reshape(-1, outputs), []
    if mask & 1:
        assert w is not None
        grads.append((flat @ w).reshape(shape))
    if mask & 2:
        assert x is not None
        grads.append(flat.t() @ x.reshape(-1, shape[-1]))
    if mask & 4:
        grads.append(flat.sum(0))
    return grads


def _gradients_fake(
    dy: torch.Tensor, x: torch.Tensor | None, w: torch.Tensor | None, shape: list[int], outputs: int, mask: int
) -> list[torch.Tensor]:
    """Empty gradients with the promised shapes, for tracing."""
    made = (shape, (outputs, shape[-1]), (outputs,))
    return [dy.new_empty(sizes) for bit, sizes in enumerate(made) if mask & 1 << bit]


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
        return *_find(ctx.plans, x, w).by_torch(dy, x, w, (mask[0], mask[1], mask[2])), None
    grads = iter(torch.ops.tilewise.linear_backward(dy, x, w, ctx.plans, mask))
    return *(next(grads) if want else None for want in mask), None


_library.impl("linear", _linear, "CompositeExplicitAutograd")
_library.impl("linear_backward", _linear_backward, "CompositeExplicitAutograd")
_library.impl("linear_gradients", _gradients, "CompositeExplicitAutograd")
torch.library.register_fake("tilewise::linear_gradients", _gradients_fake, lib=_library)
torch.library.register_fake("tilewise::linear", _linear_fake, lib=_library)
torch.library.register_fake("tilewise::linear_backward", _linear_backward_fake, lib=_library)
torch.library.register_autograd("tilewise::linear", _backward, setup_context=_setup, lib=_library)
