"""torch's convolution modules: which can be planned, what their planned ``forward`` does, swapping and restoring.

The swap is an instance attribute ``forward``, a method bound to the module. So the module's class, parameters, hooks
and ``state_dict`` stay what they were, :func:`copy.deepcopy` binds the method to the copy, and :mod:`pickle` writes a
bound method as its name: a pickled module loads as torch's own, without tilewise.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from tilewise.nn.compiled import trace
from tilewise.nn.geometry import Geometry
from tilewise.nn.layer import Layer

__all__ = [
    "geometry_of",
    "is_convolution",
    "is_planned",
    "obstacle",
    "planned_forward",
    "swap",
    "swap_back",
    "tensors_of",
]

BASES: dict[type[nn.Module], int] = {
    nn.Conv1d: 1,
    nn.Conv2d: 2,
    nn.Conv3d: 3,
    nn.ConvTranspose1d: 1,
    nn.ConvTranspose2d: 2,
    nn.ConvTranspose3d: 3,
}
FUNCTIONS: dict[int, Callable[..., torch.Tensor]] = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
METHODS = ("forward", "_conv_forward", "_output_padding")
MARK = "_tilewise_layer"


def is_convolution(module: nn.Module) -> bool:
    """Whether ``module`` is one of torch's convolutions or derived from one."""
    return _base(module) is not None


def _base(module: nn.Module) -> type[nn.Module] | None:
    return next((base for base in BASES if isinstance(module, base)), None)


def obstacle(module: nn.Module) -> str:
    """Why the computation of this convolution cannot be swapped; empty when it can."""
    base = _base(module)
    assert base is not None
    for name in METHODS:
        if getattr(type(module), name, None) is not getattr(base, name, None):
            return f"{type(module).__name__} has a {name} of its own"
    own = module.__dict__.get("forward")
    if own is not None and not is_planned(module) and getattr(own, "__func__", None) is not type(module).forward:
        return "has a forward set on the instance"
    if module.padding_mode != "zeros" and isinstance(module, nn.modules.conv._ConvTransposeNd):
        return f"padding_mode={module.padding_mode!r}: torch has only zeros here"
    if geometry_of(module) is None:
        return "torch itself does not take its arguments"
    return ""


def geometry_of(module: Any, output_padding: tuple[int, ...] | None = None) -> Geometry | None:
    """The module's geometry; other padding modes than zeros pad beforehand, so that none is left."""
    base = _base(module)
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

    def forward(self: Any, input: torch.Tensor) -> torch.Tensor:
        if torch.compiler.is_dynamo_compiling():
            traced = trace(layer, input, self.weight, self.bias)
            return type(self).forward(self, input) if traced is None else traced
        d = self.__dict__
        if (
            d["stride"] == stride
            and d["padding"] == padding
            and d["dilation"] == dilation
            and d["groups"] == groups
            and d["padding_mode"] == "zeros"
        ):
            parameters = d["_parameters"]
            weight = parameters.get("weight")
            if weight is None:  # parametrized, pruned or sharded
                weight = self.weight
            bias = parameters["bias"] if "bias" in parameters else self.bias  # noqa: SIM401 (slow)
            y = layer(input, weight, bias)
            if y is not NotImplemented:
                return y  # type: ignore[no-any-return]
        return type(self).forward(self, input)  # type: ignore[no-any-return]

    return forward


def _padded(module: Any, layer: Layer) -> Callable[..., torch.Tensor]:
    arguments = _arguments(module.__dict__)
    convolve = FUNCTIONS[layer.geometry.dims]

    def forward(self: Any, input: torch.Tensor) -> torch.Tensor:
        if _arguments(self.__dict__) != arguments:
            return type(self).forward(self, input)  # type: ignore[no-any-return]
        padded = F.pad(input, self._reversed_padding_repeated_twice, mode=self.padding_mode)
        if torch.compiler.is_dynamo_compiling():
            traced = trace(layer, padded, self.weight, self.bias)
            y = NotImplemented if traced is None else traced
        else:
            y = layer(padded, self.weight, self.bias)
        if y is NotImplemented:
            y = convolve(padded, self.weight, self.bias, self.stride, 0, self.dilation, self.groups)
        return y

    return forward


def _transposed(module: nn.Module, layer: Layer, layers: Callable[[Geometry], Layer]) -> Callable[..., torch.Tensor]:
    arguments = _arguments(module.__dict__)

    def forward(self: Any, input: torch.Tensor, output_size: list[int] | None = None) -> torch.Tensor:
        if torch.compiler.is_dynamo_compiling():
            traced = None if output_size is not None else trace(layer, input, self.weight, self.bias)
            return type(self).forward(self, input, output_size) if traced is None else traced
        if _arguments(self.__dict__) == arguments:
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
    return hasattr(getattr(module.__dict__.get("forward"), "__func__", None), MARK)


def swap(module: nn.Module, forward: Callable[..., Any]) -> None:
    """Make ``forward`` the module's own, and no replica's of :class:`torch.nn.DataParallel`."""
    module.__dict__["forward"] = types.MethodType(forward, module)
    module.__dict__["_replicate_for_data_parallel"] = types.MethodType(_replicate_for_data_parallel, module)


def swap_back(module: nn.Module) -> None:
    """Undo :func:`swap`."""
    module.__dict__.pop("forward", None)
    module.__dict__.pop("_replicate_for_data_parallel", None)


def _replicate_for_data_parallel(self: Any) -> nn.Module:
    """A replica whose planned methods are bound to itself, not to the module it was copied from."""
    replica: nn.Module = type(self)._replicate_for_data_parallel(self)
    swap(replica, self.__dict__["forward"].__func__)
    return replica
