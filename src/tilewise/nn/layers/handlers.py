"""Convolutions of tensor subclasses without a ``__torch_dispatch__``, whose data are a plain tensor's.

For such a subclass torch takes the plain tensors, computes, and lets ``__torch_function__`` decide what becomes of the
result. The same happens here, with a plan in place of torch's computation. torch's default handler only gives the
result the type of the subclass. A handler of the subclass' own is called as torch calls it, with torch's own function;
where the handler calls that function, the plan runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch

from tilewise.nn.layers.call import OwnMode, disturbed, is_plain_type, kernel_of, without_dispatch
from tilewise.nn.layers.geometry import Geometry
from tilewise.nn.layers.overrides import BY_TORCH, function_name

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


class PlannedLayer(Protocol):
    """The part of :class:`tilewise.nn.layers.layer.Layer` that handlers use."""

    @property
    def geometry(self) -> Geometry:
        """The convolution that the layer computes."""
        ...

    def __call__(self, x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None) -> Any:
        """The result for plain tensors; ``NotImplemented`` where torch must compute it."""
        ...

    def computed(self, x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None) -> Any:
        """The result for a handler that calls torch's own function, as of :meth:`__call__`."""
        ...

    def leave(self, x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None) -> None:
        """Take note of a call that torch computes."""
        ...


def unwrapped_tensors(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None) -> Operands | None:
    """The operands as plain tensors of the same memory and graph; ``None`` where one computes its own operators."""
    tensors = (x, w) if b is None else (x, w, b)
    if not all(isinstance(t, torch.Tensor) and without_dispatch(type(t)) for t in tensors):
        return None
    with torch._C.DisableTorchFunctionSubclass():
        plain = [t if is_plain_type(type(t)) else t.as_subclass(torch.Tensor) for t in tensors]
    return plain[0], plain[1], None if b is None else plain[2]


def through(layer: PlannedLayer, x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None) -> Any:
    """The result of ``layer`` for operands that are not all plain; ``NotImplemented`` where torch must compute it."""
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
    """One tensor of each type that handles torch's functions, in the order in which torch calls their handlers."""
    handlers: list[torch.Tensor] = []
    if not torch._C._is_torch_function_enabled():
        return handlers
    for t in tensors:
        kind = type(t)
        if not is_plain_type(kind) and all(type(handler) is not kind for handler in handlers):
            before = (i for i, handler in enumerate(handlers) if issubclass(kind, type(handler)))
            handlers.insert(next(before, len(handlers)), t)
    return handlers


def _handled(layer: PlannedLayer, handlers: list[torch.Tensor], operands: Operands) -> Any:
    """What the first handler gives that does not return ``NotImplemented``."""
    geometry = layer.geometry
    by_torch = BY_TORCH[function_name(geometry.dims, geometry.transposed)]
    values = {
        "stride": geometry.stride,
        "padding": tuple(before for before, _ in geometry.padding) if geometry.symmetric else "same",
        "output_padding": geometry.output_padding,
        "groups": geometry.groups,
        "dilation": geometry.dilation,
    }
    arguments = (*operands, *(values[item] for item in ORDER[geometry.transposed]))
    types = tuple(map(type, handlers))
    for item in handlers:
        with _Inside(by_torch, layer):
            kind: Any = type(item)
            result = kind.__torch_function__(by_torch, types, arguments, {})
        if result is not NotImplemented:
            return result
    return NotImplemented


class _Inside(OwnMode):
    """A mode while a handler runs: a call of ``function`` for the convolution of ``layer`` runs the layer's plan."""

    def __init__(self, function: Any, layer: PlannedLayer) -> None:
        super().__init__()
        self._function, self._layer = function, layer

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """The planned result of ``func`` where there is one, else what ``func`` returns."""
        if func is self._function:
            y = self._planned(args, kwargs or {})
            if y is not NotImplemented:
                return y
        return func(*args, **(kwargs or {}))

    def _planned(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The planned result; ``NotImplemented`` where the arguments are those of another convolution."""
        geometry = self._layer.geometry
        arguments = {**DEFAULTS, **dict(zip((*NAMES, *ORDER[geometry.transposed]), args, strict=False)), **kwargs}
        w = arguments.get("weight")
        if not isinstance(w, torch.Tensor) or "input" not in arguments:
            return NotImplemented
        called = Geometry.of(
            geometry.dims,
            arguments["stride"],
            arguments["padding"],
            arguments["dilation"],
            arguments["groups"],
            kernel_of(w),
            geometry.transposed,
            arguments["output_padding"],
        )
        if called != geometry:
            return NotImplemented
        return self._layer.computed(arguments["input"], w, arguments["bias"])
