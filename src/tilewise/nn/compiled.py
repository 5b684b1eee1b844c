"""Planned layers inside ``torch.compile``: operators that name their plans, and how a layer is traced.

The plans' name is a digest of what they compute and how, not a number: a graph compiled here may be cached on disk and
met again in another process, where a number could mean another layer.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from tilewise.device import conv_precision
from tilewise.nn.call import Call
from tilewise.nn.runner import Runner, settle
from tilewise.nn.strides import backend_layout

if TYPE_CHECKING:
    from tilewise.nn.layer import Layer

__all__ = ["Known", "publish", "trace"]

_library = torch.library.Library("tilewise", "DEF")  # type: ignore[no-untyped-call]
for _schema in (
    "conv(Tensor x, Tensor w, Tensor? b, str plans) -> Tensor",
    "conv_backward(Tensor dy, Tensor x, Tensor w, str plans, bool[] mask) -> Tensor[]",
):
    _library.define(_schema, tags=(torch.Tag.pt2_compliant_tag,))  # type: ignore[no-untyped-call]


@dataclass(frozen=True)
class Known:
    """A planned call as tracing recognises it; ``plans`` is the name under which the operators find its runner."""

    plans: str
    shape: tuple[int, ...]
    layout: str
    dtype: torch.dtype
    device_type: str
    needs: tuple[bool, bool, bool]
    deterministic: bool


@dataclass(frozen=True)
class Published:
    """A runner, whose strides its operators promise to the compiler."""

    runner: Runner
    call: Call
    result_shape: tuple[int, ...]

    @property
    def applies(self) -> bool:
        """Whether torch's flags still are those the plans were made for."""
        call = self.call
        if call.deterministic is not torch.are_deterministic_algorithms_enabled():
            return False
        asks = call.device.type == "cuda" and call.dtype is torch.float32
        return not asks or call.precision == conv_precision()


MOST_PUBLISHED = 8192
"""Plans that compiled graphs may name. A graph names its plans for as long as it is there, so none is ever dropped:
once there are so many, layers met for the first time are compiled as torch's."""
_published: dict[str, Published] = {}


def publish(runner: Runner, call: Call, result_shape: tuple[int, ...]) -> Known | None:
    """Make ``runner`` known to the operators; ``None`` where there is no room for more."""
    layout = call.backend_layout
    passes = (runner.forward, runner.grad_input, runner.grad_weight)
    trees = [None if p is None else p.plan.to_json() for p in passes]
    text = json.dumps([repr(runner.geometry), repr(call), trees], sort_keys=True)
    name = hashlib.sha256(text.encode()).hexdigest()[:24]
    if name not in _published and len(_published) >= MOST_PUBLISHED:
        return None
    _published[name] = Published(runner, call, result_shape)
    return Known(name, call.x.shape, layout, call.dtype, call.device.type, call.needs, call.deterministic)


def trace(layer: Layer, x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None) -> torch.Tensor | None:
    """What Dynamo traces for ``layer``: one operator where plans are known for these tensors, else ``None``.

    Nothing is planned here.
    """
    # An exported program runs without tilewise. (Dynamo of torch 2.11 takes is_exporting() itself to be always true.)
    if torch.compiler._is_exporting_flag or not layer.geometry.symmetric:
        return None
    if torch.is_autocast_enabled(x.device.type):
        dtype = torch.get_autocast_dtype(x.device.type)
        x, w, b = x.to(dtype), w.to(dtype), None if b is None else b.to(dtype)
    grad = torch.is_grad_enabled()
    needs = (grad and x.requires_grad, grad and w.requires_grad, grad and b is not None and b.requires_grad)
    deterministic = torch.are_deterministic_algorithms_enabled()
    for known in layer.known:
        if (
            x.dim() == len(known.shape)
            and x.shape == known.shape
            and x.dtype == w.dtype == known.dtype
            and x.device.type == known.device_type
            and needs == known.needs
            and deterministic == known.deterministic
            and known.layout == backend_layout(x.shape, x.stride(), w.shape, w.stride())
        ):
            return torch.ops.tilewise.conv(x, w, b, known.plans)  # type: ignore[no-any-return]
    return None


def _find(plans: str) -> Published:
    published = _published.get(plans)
    if published is None:
        raise RuntimeError(f"plans={plans!r} are not known in this process: call tilewise.optimize before this graph")
    return published


def _conv(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None, plans: str) -> torch.Tensor:
    found = _find(plans)
    with torch._C._DisableAutocast():
        if not found.applies:
            return settle(found.runner.geometry.torch_forward(x, w, b), found.runner.strides.result)
        return settle(found.runner.converted(x, w, b), found.runner.strides.result)


def _conv_backward(
    dy: torch.Tensor, x: torch.Tensor, w: torch.Tensor, plans: str, mask: list[bool]
) -> list[torch.Tensor]:
    found = _find(plans)
    asked = (mask[0], mask[1], mask[2])
    with torch._C._DisableAutocast():
        if found.applies:
            dx, dw, db = found.runner.gradients(dy, x, w, asked)
        else:
            dx, dw, db = found.runner.geometry.torch_backward(dy, x, w, asked)
    strides = found.runner.strides
    grads = ((dx, strides.grad_input), (dw, strides.grad_weight), (db, (1,)))
    return [settle(t, strides) for (t, strides), want in zip(grads, asked, strict=True) if want and t is not None]


def _conv_fake(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None, plans: str) -> torch.Tensor:
    found = _find(plans)
    return x.new_empty_strided(found.result_shape, found.runner.strides.result)


def _conv_backward_fake(
    dy: torch.Tensor, x: torch.Tensor, w: torch.Tensor, plans: str, mask: list[bool]
) -> list[torch.Tensor]:
    found = _find(plans)
    strides = found.runner.strides
    made = (
        (x.shape, strides.grad_input),
        (w.shape, strides.grad_weight),
        ((found.result_shape[1],), (1,)),
    )
    return [dy.new_empty_strided(shape, strides) for (shape, strides), want in zip(made, mask, strict=True) if want]


def _setup(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    x, w, _, plans = inputs
    ctx.save_for_backward(x, w)
    ctx.plans = plans


def _backward(ctx: Any, dy: torch.Tensor) -> tuple[Any, ...]:
    x, w = ctx.saved_tensors
    mask = list(ctx.needs_input_grad[:3])
    if torch.is_grad_enabled():
        geometry = _find(ctx.plans).runner.geometry
        return *geometry.torch_backward(dy, x, w, (mask[0], mask[1], mask[2])), None
    grads = iter(torch.ops.tilewise.conv_backward(dy, x, w, ctx.plans, mask))
    return *(next(grads) if want else None for want in mask), None


_library.impl("conv", _conv, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
_library.impl("conv_backward", _conv_backward, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
torch.library.register_fake("tilewise::conv", _conv_fake, lib=_library)
torch.library.register_fake("tilewise::conv_backward", _conv_backward_fake, lib=_library)
torch.library.register_autograd("tilewise::conv", _backward, setup_context=_setup, lib=_library)
