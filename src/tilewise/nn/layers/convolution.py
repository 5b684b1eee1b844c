"""torch's convolution modules as a kind: which of them can be planned, their problems, and how they run by plans."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from tilewise.machine.recent import Recent
from tilewise.nn.layers.call import kernel_of, why_not_described, why_torchs
from tilewise.nn.layers.geometry import Geometry
from tilewise.nn.layers.kinds import Call, ModuleKind, register
from tilewise.nn.layers.kinds import Layer as AnyLayer
from tilewise.nn.layers.layer import Layer
from tilewise.nn.layers.overrides import (
    BASES,
    CONV,
    ClassCode,
    base_of,
    override,
    reads_by_attribute,
    unchanged,
    unchanged_in_trace,
)
from tilewise.nn.layers.plan_table import PlanTable
from tilewise.nn.layers.repeated import Repeated
from tilewise.nn.layers.traced import trace
from tilewise.nn.layers.weights import Weights

__all__ = ["MOST_LAYERS", "Convolutions", "LayersByGeometry", "geometry_of", "is_convolution", "obstacle"]

MOST_LAYERS = 128
"""Geometries of one module that are remembered: a transposed one has as many as its stride allows output sizes."""


class LayersByGeometry:
    """The layers of one module by geometry.

    A transposed convolution has several, since its geometry varies with the output size that it is asked for.
    """

    def __init__(self, plan_table: PlanTable, weights: Weights) -> None:
        self._plan_table, self._weights = plan_table, weights
        self.name = ""
        self._layers: Recent[Geometry, Layer] = Recent(MOST_LAYERS)

    def __call__(self, geometry: Geometry) -> Layer:
        """The layer of ``geometry``."""
        layer = self._layers.get(geometry)
        if layer is None:
            layer = self._layers[geometry] = Layer(geometry, self._plan_table, weights=self._weights, name=self.name)
        return layer

    def forget(self) -> None:
        """Let every layer look its plans up anew."""
        for layer in self._layers.values():
            layer.forget()


class Convolutions(ModuleKind):
    """``nn.Conv1d`` to ``nn.ConvTranspose3d``, and classes derived from them that compute as they do."""

    classes = tuple(BASES)
    named = True

    def obstacle(self, module: nn.Module) -> str:
        """As :func:`obstacle`."""
        return obstacle(module)

    def layers(self, plan_table: PlanTable, weights: Weights) -> LayersByGeometry:
        """The module's layers by geometry."""
        return LayersByGeometry(plan_table, weights)

    def calls(
        self,
        module: Any,
        layers: LayersByGeometry,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        gradients_later: bool,
    ) -> tuple[list[tuple[AnyLayer, Call]], str]:
        """The one call of a convolution; none where torch must judge its arguments."""
        with torch._C.DisableTorchFunctionSubclass():  # a subclass' handler has seen the call
            geometry, x, w, b = _tensors_of(module, *args, **kwargs)
            if geometry is None:
                return [], ""
            calls = list(layers(geometry).visit(x, w, b))
        if gradients_later:
            needs = (True, w.requires_grad, b is not None and b.requires_grad)
            calls = [(layer, replace(call, needs=needs)) for layer, call in calls]
        return [*calls], "" if calls else why_torchs((x, w, b)) or why_not_described(x, w, b)

    def forward(self, module: Any, layers: LayersByGeometry) -> Callable[..., torch.Tensor]:
        """The module's ``forward``, by plans where the module's arguments are as they were."""
        return _planned_forward(module, layers)


register(Convolutions())


def is_convolution(module: nn.Module) -> bool:
    """Whether ``module`` is one of torch's convolutions, or of a class derived from one."""
    return base_of(module) is not None


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
    """The module's geometry, ``None`` where torch must judge it.

    Padding modes other than zeros pad the input beforehand, so that the geometry has no padding.
    """
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


def _tensors_of(
    module: Any, input: torch.Tensor, output_size: Any = None
) -> tuple[Geometry | None, torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """The geometry, input, weight and bias of the convolution that this call of the module computes."""
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
        input = CONV.F.pad(input, module._reversed_padding_repeated_twice, mode=module.padding_mode)
    return geometry_of(module), input, module.weight, module.bias


def _planned_forward(module: nn.Module, layers: Callable[[Geometry], Layer]) -> Callable[..., torch.Tensor]:
    """The function to bind as the module's ``forward``. ``layers`` gives the module's layer for a geometry.

    It computes by torch where the module's arguments have changed since.
    """
    geometry = geometry_of(module)
    assert geometry is not None
    layer = layers(geometry)
    if isinstance(module, nn.modules.conv._ConvTransposeNd):
        return _transposed(module, layer, layers)
    if module.padding_mode != "zeros":
        return _padded(module, layer)
    return _plain(module, layer)


def _arguments(module: Any) -> tuple[Any, ...]:
    """The module's arguments, read as torch's own code reads them: as attributes, which a class may define."""
    return (
        module.stride,
        module.padding,
        module.dilation,
        module.groups,
        module.padding_mode,
        module.output_padding,
    )


def _plain(module: Any, layer: Layer) -> Callable[..., torch.Tensor]:
    """The planned ``forward`` of a convolution that pads with zeros."""
    arguments = stride, padding, dilation, groups, mode, _ = _arguments(module)
    same, same_in_trace, repeated = unchanged(module), unchanged_in_trace(module), _repeated(module, layer)
    kind, by_attribute = type(module), reads_by_attribute(module)
    kernel = module.kernel_size if isinstance(padding, str) else None  # what the name stands for depends on it

    def forward(self: Any, input: torch.Tensor) -> torch.Tensor:
        if torch.compiler.is_dynamo_compiling():
            is_unchanged = same_in_trace(self) and _arguments(self) == arguments
            traced = trace(layer, input, self.weight, self.bias) if is_unchanged else None
            return type(self).forward(self, input) if traced is None else traced
        if repeated is not None and repeated.call is not None:
            y = repeated.call(self, input)
            if y is not None:
                return y
        if (
            (same(self) or not override(self))
            and self.stride == stride
            and self.padding == padding
            and self.dilation == dilation
            and self.groups == groups
            and self.padding_mode == mode
        ):
            d = self.__dict__
            parameters = d["_parameters"]
            usual = not (
                "weight" not in parameters  # parametrized, pruned, sharded or set on the instance
                or "weight" in d
                or "bias" in d
                or by_attribute()
                or type(self) is not kind
            )
            if usual:
                weight = parameters["weight"]
                bias = parameters["bias"] if "bias" in parameters else self.bias  # noqa: SIM401 (slow)
            else:
                weight, bias = self.weight, self.bias
            if kernel is None or kernel_of(weight) == kernel:
                y = layer(input, weight, bias)
                if repeated is not None and layer.latest is not repeated.entry and usual and same(self):
                    repeated.learn(input, weight, bias)
                if y is not NotImplemented:
                    return y  # type: ignore[no-any-return]
        return type(self).forward(self, input)  # type: ignore[no-any-return]

    return forward


def _repeated(module: Any, layer: Layer) -> Repeated | None:
    """The module's calls that C++ may recognise; ``None`` where they are only known as they come.

    Padding that is given by a name depends on the weight.
    """
    code = ClassCode.of(module)
    if code is None or isinstance(module.padding, str):
        return None
    names = ("stride", "padding", "dilation", "groups", "padding_mode")
    return Repeated(layer, code, {name: getattr(module, name) for name in names})


def _padded(module: Any, layer: Layer) -> Callable[..., torch.Tensor]:
    """The planned ``forward`` of a convolution with another padding mode: pad by torch, then convolve by plan."""
    arguments = _arguments(module)
    same, same_in_trace = unchanged(module), unchanged_in_trace(module)

    def forward(self: Any, input: torch.Tensor) -> torch.Tensor:
        compiling = torch.compiler.is_dynamo_compiling()
        runs_torch = same_in_trace(self) if compiling else same(self) or not override(self)
        if not runs_torch or _arguments(self) != arguments:
            return type(self).forward(self, input)  # type: ignore[no-any-return]
        padded = CONV.F.pad(input, self._reversed_padding_repeated_twice, mode=self.padding_mode)
        if compiling:
            traced = trace(layer, padded, self.weight, self.bias)
            y = NotImplemented if traced is None else traced
        else:
            y = layer(padded, self.weight, self.bias)
        if y is NotImplemented:
            convolve = getattr(CONV.F, name)
            y = convolve(padded, self.weight, self.bias, self.stride, 0, self.dilation, self.groups)
        return y

    name = f"conv{layer.geometry.dims}d"
    return forward


def _transposed(module: nn.Module, layer: Layer, layers: Callable[[Geometry], Layer]) -> Callable[..., torch.Tensor]:
    """The planned ``forward`` of a transposed convolution, whose geometry depends on ``output_size``."""
    arguments = _arguments(module)
    same, same_in_trace = unchanged(module), unchanged_in_trace(module)

    def forward(self: Any, input: torch.Tensor, output_size: list[int] | None = None) -> torch.Tensor:
        if torch.compiler.is_dynamo_compiling():
            is_unchanged = output_size is None and same_in_trace(self) and _arguments(self) == arguments
            traced = trace(layer, input, self.weight, self.bias) if is_unchanged else None
            return type(self).forward(self, input, output_size) if traced is None else traced
        if (same(self) or not override(self)) and _arguments(self) == arguments:
            call_layer = layer
            if output_size is not None:
                geometry = _tensors_of(self, input, output_size)[0]
                call_layer = layer if geometry is None else layers(geometry)
            y = call_layer(input, self.weight, self.bias)
            if y is not NotImplemented:
                return y  # type: ignore[no-any-return]
        return type(self).forward(self, input, output_size)  # type: ignore[no-any-return]

    return forward
