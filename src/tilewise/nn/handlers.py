"""Convolutions of tensor subclasses without a ``__torch_dispatch__``: their data are a plain tensor's.

torch unwraps them, computes, and lets a ``__torch_function__`` say what becomes of the result. So does this, with a
plan in place of torch's computation. torch's default handler only gives the result the subclass' type. One of the
subclass' own is called as torch calls it, with torch's own function: where it calls that, the plan runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from tilewise.nn.call import OwnMode, disturbed, is_plain_type, kernel_of, without_dispatch
from tilewise.nn.geometry import Geometry
from tilewise.nn.overrides import BY_TORCH, function_name

if TYPE_CHECKING:
    from tilewise.nn.layer import Layer

__all__ = ["through", "unwrapped_tensors"]

DEFAULT: Any = torch.Tensor.__torch_function__.__func__  # type: ignore[attr-defined]
NAMES = ("input", "weight", "bias")
ORDER = {
    False: ("stride", "padding", "dilation", "groups"),
    True: ("stride", "padding", "output_padding", "groups", "dilation"),
}
"""The arguments of torch's functions after the tensors, by whether the convolution is transposed."""
DEFAULTS = {"bias": None, "stride": 1, "padding": 0, "output_padding": 0, "dilation": 1, "groups": 1}

Operands = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]


def unwrapped_tensors(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None) -> Operands | None:
    """The operands as plain tensors of the same memory and graph; ``None`` where one is no such subclass."""
    tensors = (x, w) if b is None else (x, w, b)
    if not all(isinstance(t, torch.Tensor) and without_dispatch(type(t)) for t in tensors):
        return None
    with torch._C.DisableTorchFunctionSubclass():
        plain = [t if is_plain_type(type(t)) else t.as_subclass(torch.Tensor) for t in tensors]
    return plain[0], plain[1], None if b is None else plain[2]


def through(layer: Layer, x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None) -> Any:
    """``layer`` of operands of which one is not plain; ``NotImplemented`` where torch is to do it."""
    plain = None if disturbed() else unwrapped_tensors(x, w, b)
    if plain is None:
        layer.leave(x, w, b)
        return NotImplemented
    handlers = _handlers((x, w) if b is None else (x, w, b))
    kind = type(handlers[0]) if handlers else torch.Tensor
    if not handlers or (len(handlers) == 1 and getattr(kind.__torch_function__, "__func__", None) is DEFAULT):
        with torch._C.DisableTorchFunctionSubclass():
            y = layer(*plain)
            return y if y is NotImplemented or not handlers else y.as_subclass(kind)
    return _handled(layer, handlers, (x, w, b))


def _handlers(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """One tensor of each type that handles torch's functions, in the order in which torch asks them."""
    found: list[torch.Tensor] = []
    if not torch._C._is_torch_function_enabled():
        return found
    for t in tensors:
        kind = type(t)
        if not is_plain_type(kind) and all(type(one) is not kind for one in found):
            before = (i for i, one in enumerate(found) if issubclass(kind, type(one)))
            found.insert(next(before, len(found)), t)
    return found


def _handled(layer: Layer, handlers: list[torch.Tensor], operands: Operands) -> Any:
    geometry = layer.geometry
    by_torch = BY_TORCH[function_name(geometry.dims, geometry.transposed)]
    values = {
        "stride": geometry.stride,
        "padding": tuple(before for before, _ in geometry.padding) if geometry.symmetric else "same",
        "output_padding": geometry.output_padding,
        "groups": geometry.groups,
        "dilation": geometry.dilation,
    }
    arguments = (*operands, *(values[one] for one in ORDER[geometry.transposed]))
    types = tuple(map(type, handlers))
    for one in handlers:
        with _Inside(by_torch, layer):
            kind: Any = type(one)
            result = kind.__torch_function__(by_torch, types, arguments, {})
        if result is not NotImplemented:
            return result
    return NotImplemented


class _Inside(OwnMode):
    """While a handler runs: where it calls torch's ``function`` for the convolution of ``layer``, the layer's plan."""

    def __init__(self, function: Any, layer: Layer) -> None:
        super().__init__()
        self._function, self._layer = function, layer

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is self._function:
            y = self._planned(args, kwargs or {})
            if y is not NotImplemented:
                return y
        return func(*args, **(kwargs or {}))

    def _planned(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        own = self._layer.geometry
        given = {**DEFAULTS, **dict(zip((*NAMES, *ORDER[own.transposed]), args, strict=False)), **kwargs}
        w = given.get("weight")
        if not isinstance(w, torch.Tensor) or "input" not in given:
            return NotImplemented
        asked = Geometry.of(
            own.dims,
            given["stride"],
            given["padding"],
            given["dilation"],
            given["groups"],
            kernel_of(w),
            own.transposed,
            given["output_padding"],
        )
        if asked != own:
            return NotImplemented
        return self._layer.computed(given["input"], w, given["bias"])
