"""Planned convolutions with the signatures of :mod:`torch.nn.functional`.

A shape seen for the first time is planned on sight under the options of :func:`set_defaults`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from tilewise.nn.book import Book, make_options
from tilewise.nn.compiled import trace
from tilewise.nn.geometry import Geometry
from tilewise.nn.layer import Layer
from tilewise.planner import Options, Planner

__all__ = [
    "conv1d",
    "conv2d",
    "conv3d",
    "conv_transpose1d",
    "conv_transpose2d",
    "conv_transpose3d",
    "set_defaults",
]

Ints = int | Sequence[int]


class Defaults:
    """The options of the functional operators, and their layers by torch's arguments."""

    def __init__(self, options: Options, unplanned: str, planner: Planner | None) -> None:
        self._book = Book(options, unplanned, planner)
        self._layers: dict[Geometry, Layer] = {}
        self._by_arguments: dict[tuple[Any, ...], Layer | None] = {}
        self._lock = threading.Lock()

    def layer(self, *arguments: Any) -> Layer | None:
        """The layer of these arguments of :meth:`Geometry.of`, ``None`` where torch must judge them."""
        try:
            return self._by_arguments[arguments]
        except KeyError:
            pass
        except TypeError:  # a list; or what is no argument at all, which torch will say
            hashable = tuple(tuple(a) if isinstance(a, list) else a for a in arguments)
            return None if hashable == arguments else self.layer(*hashable)
        with self._lock:
            geometry = Geometry.of(*arguments)
            layer = None if geometry is None else self._layers.setdefault(geometry, Layer(geometry, self._book))
            self._by_arguments[arguments] = layer
            return layer

    def traced(self, *arguments: Any) -> Layer | None:
        """:meth:`layer` as Dynamo can follow it: a layer that is there already."""
        geometry = Geometry.of(*arguments)
        for known, layer in self._layers.items():
            if known == geometry:
                return layer
        return None


_defaults = Defaults(Options(), "plan", None)


def set_defaults(
    *,
    workspace: int | str | None = None,
    batch_sizes: str = "powers_of_two",
    rigor: str = "measure",
    deterministic: bool = False,
    error_limit: float | None = None,
    strict: bool = False,
    unplanned: str = "plan",
    planner: Planner | None = None,
) -> None:
    """Set the options under which the functional operators plan from now on; what they had planned is let go.

    Arguments are those of :func:`tilewise.optimize`. Raises ``ValueError`` naming the argument at fault.
    """
    global _defaults
    options = make_options(workspace, batch_sizes, rigor, deterministic, error_limit, strict)
    _defaults = Defaults(options, unplanned, planner)


def _planned(arguments: tuple[Any, ...], x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None) -> Any:
    """The planned result, or ``NotImplemented`` where torch is to do it."""
    if torch.compiler.is_dynamo_compiling():
        known = _defaults.traced(*arguments)
        traced = None if known is None else trace(known, x, w, b)
        return NotImplemented if traced is None else traced
    layer = _defaults.layer(*arguments)
    return NotImplemented if layer is None else layer(x, w, b)


def _convolution(dims: int, by_torch: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def conv(
        input: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        stride: Ints = 1,
        padding: str | Ints = 0,
        dilation: Ints = 1,
        groups: int = 1,
    ) -> torch.Tensor:
        if isinstance(weight, torch.Tensor):
            y = _planned((dims, stride, padding, dilation, groups, weight.shape[2:]), input, weight, bias)
            if y is not NotImplemented:
                return y  # type: ignore[no-any-return]
        return by_torch(input, weight, bias, stride, padding, dilation, groups)

    return _named(conv, f"conv{dims}d")


def _transposed_convolution(dims: int, by_torch: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
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
        if isinstance(weight, torch.Tensor):
            arguments = (dims, stride, padding, dilation, groups, weight.shape[2:], True, output_padding)
            y = _planned(arguments, input, weight, bias)
            if y is not NotImplemented:
                return y  # type: ignore[no-any-return]
        return by_torch(input, weight, bias, stride, padding, output_padding, groups, dilation)

    return _named(conv_transpose, f"conv_transpose{dims}d")


def _named(function: Callable[..., torch.Tensor], name: str) -> Callable[..., torch.Tensor]:
    function.__name__ = function.__qualname__ = name
    function.__doc__ = f"""As :func:`torch.nn.functional.{name}`, by a plan where one is faster.

    A shape seen for the first time is planned on sight, under the options of :func:`set_defaults`. Raises what torch
    raises for its arguments, and ``NoPlanError`` when no solver keeps a memory limit.
    """
    return function


conv1d = _convolution(1, F.conv1d)
conv2d = _convolution(2, F.conv2d)
conv3d = _convolution(3, F.conv3d)
conv_transpose1d = _transposed_convolution(1, F.conv_transpose1d)
conv_transpose2d = _transposed_convolution(2, F.conv_transpose2d)
conv_transpose3d = _transposed_convolution(3, F.conv_transpose3d)
