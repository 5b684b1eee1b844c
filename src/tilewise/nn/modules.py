"""torch's convolution modules: which can be planned, and what their planned ``forward`` does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from tilewise.nn.call import kernel_of
from tilewise.nn.compiled import trace
from tilewise.nn.geometry import Geometry
from tilewise.nn.layer import Layer
from tilewise.nn.overrides import (
    BASES,
    base_of,
    override,
    reads_by_attribute,
    unchanged,
    unchanged_in_trace,
)
from tilewise.nn.swaps import swapped

__all__ = ["geometry_of", "is_convolution", "is_planned", "obstacle", "planned_forward", "tensors_of", "unwrapped"]

MARK = "_tilewise_layer"


def is_convolution(module: nn.Module) -> bool:
    """Whether ``module`` is one of torch's convolutions or derived from one."""
    return base_of(module) is not None


def unwrapped(model: nn.Module) -> nn.Module:
    """The model itself behind DistributedDataParallel or ``torch.compile``."""
    inner = getattr(model, "_orig_mod", model)
    if isinstance(inner, nn.parallel.DistributedDataParallel):
        inner = inner.module
    assert isinstance(inner, nn.Module)
    return inner


def obstacle(module: nn.Module) -> str:
    """Why the computation of this convolution cannot be swapped; empty when it can."""
    reason = override(module)
    if reason:
        return reason
    if module.padding_mode != "zeros" and isinstance(module, nn.modules.conv._ConvTransposeNd):
        return f"padding_mode={module.padding_mode!r}: torch has only zeros here"
    if geometry_of(module) is None:
        return "torch itself does not take its arguments"
    return ""


def geometry_of(module: Any, output_padding: tuple[int, ...] | None = None) -> Geometry | None:
    """The module's geometry; other padding modes than zeros pad beforehand, so that none is left."""
    base = base_of(module)
    assert base is not None
    transposed = isinstance(module, nn.modules.conv._ConvTransposeNd)
    return Geometry.of(
        BASES[base],
        module.stride,
        module.padding if module.padding_mode == "zeros" else 0,
        module.dilation,
        module.groups,
        module.kernel_size,
        transposed,
        module.output_padding if output_padding is None else output_padding,
    )


def tensors_of(
    module: Any, input: torch.Tensor, output_size: Any = None
) -> tuple[Geometry | None, torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Geometry, input, weight and bias with which this call of the module convolves."""
    if output_size is not None:
        extra = module._output_padding(
            input,
            output_size,
            module.stride,
            module.padding,
            module.kernel_size,
            len(module.kernel_size),
            module.dilation,
        )
        return geometry_of(module, tuple(extra)), input, module.weight, module.bias
    if module.padding_mode != "zeros":
        input = F.pad(input, module._reversed_padding_repeated_twice, mode=module.padding_mode)
    return geometry_of(module), input, module.weight, module.bias


def planned_forward(module: nn.Module, layers: Callable[[Geometry], Layer]) -> Callable[..., torch.Tensor]:
    """The function to bind as the module's ``forward``; ``layers`` gives the layer of a geometry.

    It keeps to torch where the module's arguments have been changed since.
    """
    geometry = geometry_of(module)
    assert geometry is not None
    layer = layers(geometry)
    if isinstance(module, nn.modules.conv._ConvTransposeNd):
        forward = _transposed(module, layer, layers)
    elif module.padding_mode != "zeros":
        forward = _padded(module, layer)
    else:
        forward = _plain(module, layer)
    forward.__name__ = "forward"
    forward.__qualname__ = f"{type(module).__qualname__}.forward"
    setattr(forward, MARK, layer)
    return forward


def _arguments(d: dict[str, Any]) -> tuple[Any, ...]:
    return d["stride"], d["padding"], d["dilation"], d["groups"], d["padding_mode"], d["output_padding"]


def _plain(module: Any, layer: Layer) -> Callable[..., torch.Tensor]:
    stride, padding, dilation, groups = module.stride, module.padding, module.dilation, module.groups
    same, same_in_trace = unchanged(module), unchanged_in_trace(module)
    kind, by_attribute = type(module), reads_by_attribute(module)
    kernel = module.kernel_size if isinstance(padding, str) else None  # what the name stands for depends on it

    def forward(self: Any, input: torch.Tensor) -> torch.Tensor:
        if torch.compiler.is_dynamo_compiling():
            traced = trace(layer, input, self.weight, self.bias) if same_in_trace(self) else None
            return type(self).forward(self, input) if traced is None else traced
        d = self.__dict__
        if (
            (same(self) or not override(self))
            and d["stride"] == stride
            and d["padding"] == padding
            and d["dilation"] == dilation
            and d["groups"] == groups
            and d["padding_mode"] == "zeros"
        ):
            parameters = d["_parameters"]
            if (
                "weight" not in parameters  # parametrized, pruned, sharded or set on the instance
                or "weight" in d
                or "bias" in d
                or by_attribute
                or type(self) is not kind
            ):
                weight, bias = self.weight, self.bias
            else:
                weight = parameters["weight"]
                bias = parameters["bias"] if "bias" in parameters else self.bias  # noqa: SIM401 (slow)
            if kernel is None or kernel_of(weight) == kernel:
                y = layer(input, weight, bias)
                if y is not NotImplemented:
                    return y  # type: ignore[no-any-return]
        return type(self).forward(self, input)  # type: ignore[no-any-return]

    return forward


def _padded(module: Any, layer: Layer) -> Callable[..., torch.Tensor]:
    arguments = _arguments(module.__dict__)
    same, same_in_trace = unchanged(module), unchanged_in_trace(module)

    def forward(self: Any, input: torch.Tensor) -> torch.Tensor:
        compiling = torch.compiler.is_dynamo_compiling()
        runs_torch = same_in_trace(self) if compiling else same(self) or not override(self)
        if not runs_torch or _arguments(self.__dict__) != arguments:
            return type(self).forward(self, input)  # type: ignore[no-any-return]
        padded = F.pad(input, self._reversed_padding_repeated_twice, mode=self.padding_mode)
        if compiling:
            traced = trace(layer, padded, self.weight, self.bias)
            y = NotImplemented if traced is None else traced
        else:
            y = layer(padded, self.weight, self.bias)
        if y is NotImplemented:
            convolve = getattr(F, name)
            y = convolve(padded, self.weight, self.bias, self.stride, 0, self.dilation, self.groups)
        return y

    name = f"conv{layer.geometry.dims}d"
    return forward


def _transposed(module: nn.Module, layer: Layer, layers: Callable[[Geometry], Layer]) -> Callable[..., torch.Tensor]:
    arguments = _arguments(module.__dict__)
    same, same_in_trace = unchanged(module), unchanged_in_trace(module)

    def forward(self: Any, input: torch.Tensor, output_size: list[int] | None = None) -> torch.Tensor:
        if torch.compiler.is_dynamo_compiling():
            known = output_size is None and same_in_trace(self)
            traced = trace(layer, input, self.weight, self.bias) if known else None
            return type(self).forward(self, input, output_size) if traced is None else traced
        if (same(self) or not override(self)) and _arguments(self.__dict__) == arguments:
            own = layer
            if output_size is not None:
                geometry = tensors_of(self, input, output_size)[0]
                own = layer if geometry is None else layers(geometry)
            y = own(input, self.weight, self.bias)
            if y is not NotImplemented:
                return y  # type: ignore[no-any-return]
        return type(self).forward(self, input, output_size)  # type: ignore[no-any-return]

    return forward


def is_planned(module: nn.Module) -> bool:
    """Whether the module's computation is swapped."""
    return hasattr(swapped(module), MARK)
