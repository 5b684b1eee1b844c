"""Planned convolutions with the signatures of :mod:`torch.nn.functional`.

A shape seen for the first time is planned on sight under the options of :func:`set_defaults`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch

from tilewise.nn.book import Book, make_options
from tilewise.nn.call import kernel_of
from tilewise.nn.compiled import trace
from tilewise.nn.geometry import Geometry
from tilewise.nn.layer import Layer
from tilewise.nn.overrides import BY_TORCH
from tilewise.planner import Options, Planner
from tilewise.recent import trim

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
    """The layers of one book by torch's arguments."""

    def __init__(self, book: Book) -> None:
        self._book = book
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
            layer = None if geometry is None else self._layers.get(geometry)
            if geometry is not None and layer is None:
                trim(self._layers, MOST_LAYERS)
                layer = self._layers[geometry] = Layer(geometry, self._book)
            trim(self._by_arguments, MOST_LAYERS)
            self._by_arguments[arguments] = layer
            return layer

    def traced(self, *arguments: Any) -> Layer | None:
        """:meth:`layer` as Dynamo can follow it: a layer that is there already."""
        geometry = Geometry.of(*arguments)
        for known, layer in self._layers.items():
            if known == geometry:
                return layer
        return None


_defaults = Table(Book(Options(), "plan"))


def set_defaults(
    *,
    workspace: int | str | None = None,
    batch_sizes: str = "powers_of_two",
    rigor: str = "measure",
    deterministic: bool = False,
    error_limit: float | None = None,
    strict: bool = False,
    cuda_graphs: bool = False,
    exclude: Sequence[str] = (),
    unplanned: str = "plan",
    planner: Planner | None = None,
) -> None:
    """Set the options under which the functional operators plan from now on; what they had planned is let go.

    Arguments are those of :func:`tilewise.optimize`. Raises ``ValueError`` naming the argument at fault.
    """
    global _defaults
    options = make_options(workspace, batch_sizes, rigor, deterministic, error_limit, strict, cuda_graphs, exclude)
    _defaults = Table(Book(options, unplanned, planner))


def traced_by(
    table: Table, arguments: tuple[Any, ...], x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None
) -> Any:
    """What Dynamo traces for a call: a plan known in ``table``, or ``NotImplemented``."""
    known = table.traced(*arguments)
    traced = None if known is None else trace(known, x, w, b)
    return NotImplemented if traced is None else traced


def _on_sight(dims: int, transposed: bool) -> Planned:
    """The planned result under the options of :func:`set_defaults`."""

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
    """:func:`convolution` for ``torch.nn.functional.conv_transpose{dims}d``."""
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


def _documented(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    function.__doc__ = f"""As :func:`torch.nn.functional.{function.__name__}`, by a plan where one is faster.

    A shape seen for the first time is planned on sight, under the options of :func:`set_defaults`. Raises what torch
    raises for its arguments, and ``NoPlanError`` when no solver keeps a memory limit.
    """
    return function


conv1d, conv2d, conv3d = (_documented(convolution(dims, _on_sight(dims, False))) for dims in (1, 2, 3))
conv_transpose1d, conv_transpose2d, conv_transpose3d = (
    _documented(transposed_convolution(dims, _on_sight(dims, True))) for dims in (1, 2, 3)
)
