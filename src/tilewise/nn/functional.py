"""Planned convolutions and linear layers with the signatures of :mod:`torch.nn.functional`.

A shape seen for the first time is planned on sight under the options of :func:`set_defaults`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, Unpack

import torch

from tilewise.machine.recent import trim
from tilewise.nn.arguments import settings_of, takes
from tilewise.nn.layers.bilinear import BilinearLayer
from tilewise.nn.layers.call import kernel_of
from tilewise.nn.layers.finished_convolution import FinishedConvolutions
from tilewise.nn.layers.geometry import Geometry
from tilewise.nn.layers.layer import Layer
from tilewise.nn.layers.linear.layer import LinearLayer
from tilewise.nn.layers.linear.run import BY_TORCH as LINEAR_BY_TORCH
from tilewise.nn.layers.linear.traced import trace as trace_linear
from tilewise.nn.layers.one_input.local_response_norm import LrnLayer
from tilewise.nn.layers.one_input.pooling import PoolingLayer
from tilewise.nn.layers.overrides import BY_TORCH
from tilewise.nn.layers.plan_table import PlanTable
from tilewise.nn.layers.recurrent.layer import RecurrentLayer
from tilewise.nn.layers.traced import trace
from tilewise.planner import Options, Planner
from tilewise.problems.activations import ACTIVATIONS, FROM_RESULT, activated, require_activation
from tilewise.settings import DefaultOptions, Settings

__all__ = [
    "Planned",
    "Table",
    "conv1d",
    "conv2d",
    "conv3d",
    "conv_transpose1d",
    "conv_transpose2d",
    "conv_transpose3d",
    "convolution",
    "linear",
    "set_defaults",
    "traced_by",
    "transposed_convolution",
]

Ints = int | Sequence[int]

Planned = Callable[..., Any]
"""``planned(x, w, b, stride, padding, dilation, groups, output_padding)``: a result, or ``NotImplemented``."""


MOST_LAYERS = 1024
"""Layers, by their strides, paddings and so on, that a table remembers. Plain dictionaries hold them, which Dynamo
follows and which cost nothing at each call: the layer met first goes, and is made anew where it comes again."""


class Table:
    """The layers of one plan table, found by the arguments of torch's function."""

    def __init__(self, plan_table: PlanTable) -> None:
        self._plan_table = plan_table
        self.linear = LinearLayer(plan_table)
        self.activated = {name: LinearLayer(plan_table, activation=name) for name in ACTIVATIONS[1:]}
        self.finished = FinishedConvolutions(plan_table)
        self.bilinear = BilinearLayer(plan_table)
        self.recurrent = RecurrentLayer(plan_table)
        self.lrn = LrnLayer(plan_table)
        self.pooling = PoolingLayer(plan_table)
        self._layers: dict[Geometry, Layer] = {}
        self._by_arguments: dict[tuple[Any, ...], Layer | None] = {}
        self._lock = threading.Lock()

    def layer(self, *arguments: Any) -> Layer | None:
        """The layer for these arguments of :meth:`Geometry.of`; ``None`` where torch must judge the arguments."""
        try:
            return self._by_arguments[arguments]
        except KeyError:
            pass
        except TypeError:  # a list; or what is no argument at all, which torch will say
            hashable = tuple(tuple(a) if isinstance(a, list) else a for a in arguments)
            return None if hashable == arguments else self.layer(*hashable)
        with self._lock:
            geometry = Geometry.of(*arguments)
            layer = None if geometry is None else self._layers.get(geometry)
            if geometry is not None and layer is None:
                trim(self._layers, MOST_LAYERS)
                layer = self._layers[geometry] = Layer(geometry, self._plan_table)
            trim(self._by_arguments, MOST_LAYERS)
            self._by_arguments[arguments] = layer
            return layer

    def forget(self) -> None:
        """Let every layer look its plans up anew."""
        for linear in (self.linear, *self.activated.values()):
            linear.forget()
        self.finished.forget()
        self.bilinear.forget()
        self.recurrent.forget()
        self.lrn.forget()
        self.pooling.forget()
        for layer in list(self._layers.values()):
            layer.forget()

    def traced(self, *arguments: Any) -> Layer | None:
        """As :meth:`layer`, in a form that Dynamo can follow: only layers that exist already are found."""
        geometry = Geometry.of(*arguments)
        for known_geometry, layer in self._layers.items():
            if known_geometry == geometry:
                return layer
        return None


_defaults = Table(PlanTable(Options(), "plan"))


@takes(DefaultOptions)
def set_defaults(
    *, settings: Settings | None = None, planner: Planner | None = None, **options: Unpack[DefaultOptions]
) -> None:
    """Set the options under which the functional operators plan from now on. Plans that they had are dropped.

    Options, each by keyword:

    {options}

    Further arguments:

    {arguments}

    Raises ``ValueError`` naming the argument at fault.

    >>> tilewise.nn.set_defaults(workspace="16MiB", rigor="estimate")
    >>> tilewise.conv2d(torch.ones(1, 3, 8, 8), torch.ones(4, 3, 3, 3)).shape
    torch.Size([1, 4, 6, 6])
    >>> tilewise.nn.set_defaults()  # the defaults of the library again
    """
    global _defaults
    merged = settings_of("set_defaults", DefaultOptions, settings, options)
    _defaults = Table(PlanTable(merged.options(), merged.unplanned, planner))


def traced_by(
    table: Table, arguments: tuple[Any, ...], x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None
) -> Any:
    """What Dynamo traces for a call: an operator for plans known to ``table``, or ``NotImplemented``."""
    layer = table.traced(*arguments)
    traced = None if layer is None else trace(layer, x, w, b)
    return NotImplemented if traced is None else traced


def _on_sight(dims: int, transposed: bool) -> Planned:
    """A function that computes a convolution by a plan, made at first use under the options of :func:`set_defaults`."""

    def planned(
        x: torch.Tensor,
        w: torch.Tensor,
        b: torch.Tensor | None,
        stride: Any,
        padding: Any,
        dilation: Any,
        groups: Any,
        extra: Any = 0,
    ) -> Any:
        if not isinstance(w, torch.Tensor):
            return NotImplemented
        arguments = (dims, stride, padding, dilation, groups, kernel_of(w), transposed, extra)
        if torch.compiler.is_dynamo_compiling():
            return traced_by(_defaults, arguments, x, w, b)
        layer = _defaults.layer(*arguments)
        return NotImplemented if layer is None else layer(x, w, b)

    return planned


def convolution(dims: int, planned: Planned) -> Callable[..., torch.Tensor]:
    """A function with the signature of ``torch.nn.functional.conv{dims}d`` that asks ``planned`` first."""
    by_torch = BY_TORCH[f"conv{dims}d"]

    def conv(
        input: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        stride: Ints = 1,
        padding: str | Ints = 0,
        dilation: Ints = 1,
        groups: int = 1,
    ) -> torch.Tensor:
        y = planned(input, weight, bias, stride, padding, dilation, groups)
        if y is not NotImplemented:
            return y  # type: ignore[no-any-return]
        return by_torch(input, weight, bias, stride, padding, dilation, groups)

    conv.__name__ = conv.__qualname__ = f"conv{dims}d"
    return conv


def transposed_convolution(dims: int, planned: Planned) -> Callable[..., torch.Tensor]:
    """As :func:`convolution`, for ``torch.nn.functional.conv_transpose{dims}d``."""
    by_torch = BY_TORCH[f"conv_transpose{dims}d"]

    def conv_transpose(
        input: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        stride: Ints = 1,
        padding: Ints = 0,
        output_padding: Ints = 0,
        groups: int = 1,
        dilation: Ints = 1,
    ) -> torch.Tensor:
        y = planned(input, weight, bias, stride, padding, dilation, groups, output_padding)
        if y is not NotImplemented:
            return y  # type: ignore[no-any-return]
        return by_torch(input, weight, bias, stride, padding, output_padding, groups, dilation)

    conv_transpose.__name__ = conv_transpose.__qualname__ = f"conv_transpose{dims}d"
    return conv_transpose


def _documented(dims: int, function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Give ``function``, of ``dims`` dimensions, its docstring, and return it."""
    function.__doc__ = f"""As :func:`torch.nn.functional.{function.__name__}`, by a plan where one is faster.

    ``input`` is (batch, in_channels, *sizes), ``weight`` (in_channels, out_channels / groups, *kernels) and ``bias``
    (out_channels). A shape seen for the first time is planned on sight, under the options of :func:`set_defaults`.
    Raises what torch raises for its arguments, and ``NoPlanError`` when no solver keeps a memory limit.

    >>> x, w = torch.ones(1, 3{", 8" * dims}), torch.ones(3, 4{", 3" * dims})
    >>> tilewise.{function.__name__}(x, w).shape
    torch.Size([1, 4{", 10" * dims}])
    """
    return function


def _finishing(dims: int) -> Callable[..., torch.Tensor]:
    """``conv{dims}d`` with what follows it."""
    alone = convolution(dims, _on_sight(dims, False))

    def conv(
        input: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        stride: Ints = 1,
        padding: str | Ints = 0,
        dilation: Ints = 1,
        groups: int = 1,
        *,
        residual: torch.Tensor | None = None,
        activation: str = "none",
    ) -> torch.Tensor:
        if residual is None and activation == "none":
            return alone(input, weight, bias, stride, padding, dilation, groups)
        require_activation(activation)
        plain = isinstance(weight, torch.Tensor) and not torch.compiler.is_dynamo_compiling()
        if plain and not _needs_gradients(input, weight, bias, residual):
            layer = _defaults.layer(dims, stride, padding, dilation, groups, kernel_of(weight), False, 0)
            if layer is not None:
                y = _defaults.finished(layer, input, weight, bias, residual, activation)
                if y is not NotImplemented:
                    return y  # type: ignore[no-any-return]
        y = alone(input, weight, bias, stride, padding, dilation, groups)
        return activated(y if residual is None else y + residual, activation)

    conv.__name__ = conv.__qualname__ = f"conv{dims}d"
    conv.__doc__ = f"""As :func:`torch.nn.functional.conv{dims}d`, by a plan where one is faster.

    ``input`` is (batch, in_channels, *sizes), ``weight`` (out_channels, in_channels / groups, *kernels) and ``bias``
    (out_channels). A shape seen for the first time is planned on sight, under the options of :func:`set_defaults`.

    ``residual``, a tensor like the result, is added to it, and ``activation`` is applied last: ``relu``, ``relu6``,
    ``leaky_relu:SLOPE``, ``clamp:MIN:MAX``, ``gelu`` (by the error function), ``gelu_tanh``, ``silu``, ``hardswish``,
    ``hardsigmoid``, ``tanh`` or ``sigmoid`` (:mod:`tilewise.problems.activations`). Where no gradient is asked one plan
    computes all three. Where gradients are asked, within ``torch.compile``, under autocast, and for a residual that
    torch would broadcast or cast, the convolution is planned alone and torch does the rest, so that its derivatives are
    torch's.

    Raises what torch raises for its arguments, ``ValueError`` for another activation, and ``NoPlanError`` when no
    solver keeps a memory limit.

    >>> x, w = torch.ones(1, 3{", 8" * dims}), torch.ones(4, 3{", 3" * dims})
    >>> tilewise.conv{dims}d(x, w, activation="relu").shape
    torch.Size([1, 4{", 6" * dims}])
    """
    return conv


conv1d, conv2d, conv3d = (_finishing(dims) for dims in (1, 2, 3))
conv_transpose1d, conv_transpose2d, conv_transpose3d = (
    _documented(dims, transposed_convolution(dims, _on_sight(dims, True))) for dims in (1, 2, 3)
)


def linear(
    input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, *, activation: str = "none"
) -> torch.Tensor:
    """As :func:`torch.nn.functional.linear`, by planned matrix products where these are faster.

    ``input`` is (..., in_features), ``weight`` (out_features, in_features) and ``bias`` (out_features); the result is
    (..., out_features). A call with gradients is three products: the forward and the gradients of input and weight.
    Sizes seen for the first time are planned on sight, under the options of :func:`set_defaults`. Under autocast the
    tensors are cast as torch casts them. Within ``torch.compile`` calls run by plans that were
    made before, and are torch's otherwise.

    ``activation`` is applied to the result: ``relu``, ``gelu`` (by the error function) or ``gelu_tanh``, ``silu``,
    ``tanh`` or ``sigmoid``. The forward's plan applies it, in the product's own kernel where that can. In backward the
    derivatives of ``relu``, ``tanh`` and ``sigmoid`` follow from the result, which is kept. Those of ``gelu``,
    ``gelu_tanh`` and ``silu`` need the numbers before the activation. So where gradients are needed a product without
    activation computes these, they are kept, and torch applies the activation. It does so within ``torch.compile``,
    too, where the compiler fuses it with what follows.

    Raises what torch raises for its arguments, ``ValueError`` for another activation, and ``NoPlanError`` when no
    solver keeps a memory limit.

    >>> tilewise.linear(torch.ones(2, 3), torch.ones(4, 3), activation="relu").shape
    torch.Size([2, 4])
    """
    if activation != "none":
        return _activated_linear(input, weight, bias, activation)
    if torch.compiler.is_dynamo_compiling():
        y = trace_linear(_defaults.linear, input, weight, bias)
    else:
        y = _defaults.linear(input, weight, bias)
    if y is not None and y is not NotImplemented:
        return y
    result: torch.Tensor = LINEAR_BY_TORCH(input, weight, bias)
    return result


def _activated_linear(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None, activation: str) -> torch.Tensor:
    """The linear layer and its activation: by one plan where backward needs nothing that this would not keep."""
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation={activation!r}: one of {', '.join(ACTIVATIONS)} would do")
    if not torch.compiler.is_dynamo_compiling() and (activation in FROM_RESULT or not _needs_gradients(x, w, b)):
        y = _defaults.activated[activation](x, w, b)
        if y is not NotImplemented:
            return y  # type: ignore[no-any-return]
    return activated(linear(x, w, b), activation)


def _needs_gradients(*tensors: torch.Tensor | None) -> bool:
    """Whether autograd follows what is computed of these tensors."""
    return torch.is_grad_enabled() and any(isinstance(t, torch.Tensor) and t.requires_grad for t in tensors)
