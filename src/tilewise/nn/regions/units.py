"""The parts of a rewritten graph that are planned each by itself: fused products, views, and torch's operators."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from tilewise.nn.programs.slots import Place
from tilewise.nn.regions import fused
from tilewise.nn.regions.operators import constants_of
from tilewise.nn.regions.trace import Untraceable, is_view, layer_of
from tilewise.problems.base import dense_strides, layout_of

__all__ = ["JOINED", "PRODUCT", "VIEW", "Strides", "Unit", "formats", "normal", "units_of", "value_of"]

Strides = tuple[int, ...]
"""How a tensor of known shape lies in memory: its format."""
VIEW, PRODUCT, JOINED, OPERATOR = "view", "product", "joined", "operator"


@dataclass(frozen=True, eq=False)
class Unit:
    """One part of a graph, whose result is ``node``.

    ``kind`` is :data:`VIEW`, :data:`PRODUCT`, :data:`JOINED` (:func:`.fused.joined`) or :data:`OPERATOR`. ``inputs``
    are the tensors that it reads, constants among them. An operator is ``overload(*arguments, **keywords)`` with places
    of inputs, of whose results ``result`` is taken. ``name`` is the layer's, or the operator's.
    """

    node: fx.Node
    kind: str
    name: str
    inputs: tuple[fx.Node, ...]
    overload: Any = None
    arguments: tuple[Any, ...] = ()
    keywords: Mapping[str, Any] | None = None
    result: int = 0

    @property
    def value(self) -> torch.Tensor:
        """A tensor without memory that has shape, strides and dtype of the result as it was traced."""
        return value_of(self.node)


def value_of(node: fx.Node) -> torch.Tensor:
    """The tensor without memory that a node stands for. Raises :class:`Untraceable` where it stands for none."""
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor):
        raise Untraceable(f"{getattr(node.target, '__name__', node.target)} gives no tensor")
    return value


def normal(shape: Sequence[int], strides: Sequence[int]) -> Strides:
    """Strides that are equal wherever elements lie alike: those along axes of size 1 say nothing.

    >>> normal((2, 3, 1, 1), (3, 1, 3, 3))
    (3, 1, 1, 1)
    """
    layout = layout_of(shape, strides)
    if layout != "view":
        return dense_strides(shape, layout)
    return tuple(1 if n == 1 else stride for n, stride in zip(shape, strides, strict=True))


def formats(shape: Sequence[int]) -> tuple[Strides, ...]:
    """The formats that a tensor may be converted into: contiguous and, for images, channels_last."""
    layouts = ("contiguous", "channels_last") if len(shape) == 4 else ("contiguous",)
    return tuple(dict.fromkeys(normal(shape, dense_strides(shape, layout)) for layout in layouts))


def units_of(graph: fx.Graph, names: Mapping[str, str]) -> list[Unit]:
    """The parts of a rewritten graph in order. ``names`` are the parameters' by the names of attributes.

    Raises :class:`Untraceable` for what no step can be.
    """
    constant = constants_of(graph)
    return [
        unit
        for node in graph.nodes
        if node.op == "call_function" and node not in constant
        for unit in _units(node, names)
    ]


def _units(node: fx.Node, names: Mapping[str, str]) -> Iterator[Unit]:
    """The part that ends with ``node``; none where a later node does."""
    target = node.target
    if target in (fused.convolution, fused.linear):
        tensors = tuple(argument for argument in node.args[:4] if isinstance(argument, fx.Node))
        yield Unit(node, PRODUCT, _layer(node.args[1], names), tensors)
        return
    if target is fused.joined:
        parts, scale, shift, _ = node.args
        yield Unit(node, JOINED, _layer(scale, names), (*parts, scale, shift))  # type: ignore[misc, arg-type]
        return
    source, result = node, 0
    if target is operator.getitem:
        source, result = node.args  # type: ignore[assignment]
        if sum(bool(user.users) for user in source.users) > 1:
            raise Untraceable(f"reads several results of {source.target}")
    elif not isinstance(node.meta.get("val"), torch.Tensor):
        return  # its items follow
    overload: Any = source.target
    if not isinstance(overload, torch._ops.OpOverload) or not isinstance(result, int):
        raise Untraceable(f"calls {overload}, which is no operator")
    value_of(node)
    inputs: list[fx.Node] = []
    arguments = _placed(tuple(source.args), inputs)
    keywords = {name: _placed(value, inputs) for name, value in source.kwargs.items()}
    for given in inputs:
        value_of(given)
    name = next((_layer(given, names) for given in inputs if given.op == "get_attr"), str(node.name))
    kind = VIEW if is_view(node) and target is not operator.getitem else OPERATOR
    yield Unit(node, kind, name, tuple(inputs), overload, arguments, keywords, result)


def _placed(value: Any, inputs: list[fx.Node]) -> Any:
    """``value`` with places instead of nodes, which are added to ``inputs``."""
    if isinstance(value, fx.Node):
        if value not in inputs:
            inputs.append(value)
        return Place(inputs.index(value))
    if isinstance(value, tuple | list):
        return type(value)([_placed(each, inputs) for each in value])
    return value


def _layer(node: Any, names: Mapping[str, str]) -> str:
    """The layer whose parameter a constant is computed from."""
    todo = [node]
    while todo:
        each = todo.pop(0)
        if each.op == "get_attr":
            return layer_of(names.get(str(each.target), str(each.target)))
        todo += each.all_input_nodes
    return str(node.name)
