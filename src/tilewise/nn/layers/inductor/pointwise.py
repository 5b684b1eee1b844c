"""Activations as Inductor has taken them apart: what is computed of one value, and the name of the whole.

At this place of Inductor's work all but ReLU are several operators, of which it makes one post-operation of oneDNN's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch.fx import Node

from tilewise.problems.activations import activation_kind, activation_name, activation_parameters

__all__ = ["Activated", "activated_by", "as_onednn_calls_it"]

aten = torch.ops.aten
ONEDNN = {"silu": "swish", "relu6": "hardtanh", "clamp": "hardtanh"}
"""What oneDNN's operator calls an activation, where that is another name."""


class Activated(NamedTuple):
    """The ``last`` of the ``nodes`` that apply an activation to a value, and its name as problems have it."""

    last: Node
    name: str
    nodes: frozenset[Node]


def activated_by(value: Node) -> Activated | None:
    """The activation that alone reads ``value``; ``None`` where there is none that is known."""
    for known in (_relu, _clamp, _hardsigmoid, _hardswish, _silu, _leaky_relu):
        for found in known(value):
            if all(user in found.nodes for node in (value, *found.nodes - {found.last}) for user in node.users):
                return found
    return None


def as_onednn_calls_it(name: str) -> tuple[str, list[float], str]:
    """The operation, its numbers and its algorithm in oneDNN's call for the activation ``name``."""
    kind = activation_kind(name)
    numbers = [0.0, 6.0] if kind == "relu6" else list(activation_parameters(name))
    return ONEDNN.get(kind, kind), numbers, ""


def _users(node: Node, target: Any, *numbers: float) -> Iterator[Node]:
    """The users of ``node`` that are ``target(node, *numbers)``."""
    for user in node.users:
        if user.target is target and user.args == (node, *numbers) and not user.kwargs:
            yield user


def _of_both(first: Node, second: Node, target: Any, *, ordered: bool = False) -> Iterator[Node]:
    """The users that are ``target`` of these two nodes, in any order unless ``ordered``."""
    orders = [(first, second)] if ordered else [(first, second), (second, first)]
    for user in second.users:
        if user.target is target and user.args in orders and not user.kwargs:
            yield user


def _chain(node: Node, *steps: tuple[Any, float]) -> Iterator[list[Node]]:
    """Nodes that follow ``node``, each a user of the one before it: targets, each with a number."""
    if not steps:
        yield []
        return
    (target, number), *rest = steps
    for user in _users(node, target, number):
        for others in _chain(user, *rest):
            yield [user, *others]


def _relu(value: Node) -> Iterator[Activated]:
    for last in _users(value, aten.relu.default):
        yield Activated(last, "relu", frozenset([last]))


def _clamp(value: Node) -> Iterator[Activated]:
    """Between two bounds, first from below and then from above."""
    for low in value.users:
        for high in low.users:
            targets = (low.target, high.target) == (aten.clamp_min.default, aten.clamp_max.default)
            if not targets or low.args[0] is not value or high.args[0] is not low:
                continue
            bounds: Any = low.args[1], high.args[1]
            if all(isinstance(bound, int | float) for bound in bounds) and bounds[0] <= bounds[1]:
                name = "relu6" if bounds == (0, 6) else activation_name("clamp", *bounds)
                yield Activated(high, name, frozenset([low, high]))


SIXTH: tuple[tuple[Callable[..., Any], float], ...] = (
    (aten.add.Tensor, 3),
    (aten.clamp_min.default, 0),
    (aten.clamp_max.default, 6),
)
"""The steps of relu6(x + 3)."""


def _hardsigmoid(value: Node) -> Iterator[Activated]:
    for nodes in _chain(value, *SIXTH, (aten.div.Tensor, 6)):
        yield Activated(nodes[-1], "hardsigmoid", frozenset(nodes))


def _hardswish(value: Node) -> Iterator[Activated]:
    for nodes in _chain(value, *SIXTH):
        for product in _of_both(value, nodes[-1], aten.mul.Tensor):
            for last in _users(product, aten.div.Tensor, 6):
                yield Activated(last, "hardswish", frozenset([*nodes, product, last]))


def _silu(value: Node) -> Iterator[Activated]:
    """x / (1 + exp(-x)), or x times its sigmoid."""
    for negative in _users(value, aten.neg.default):
        for power in _users(negative, aten.exp.default):
            for total in _users(power, aten.add.Tensor, 1):
                for last in _of_both(value, total, aten.div.Tensor, ordered=True):
                    yield Activated(last, "silu", frozenset([negative, power, total, last]))
    for gate in _users(value, aten.sigmoid.default):
        for last in _of_both(value, gate, aten.mul.Tensor):
            yield Activated(last, "silu", frozenset([gate, last]))


def _leaky_relu(value: Node) -> Iterator[Activated]:
    for positive in _users(value, aten.gt.Scalar, 0):
        for scaled in value.users:
            if scaled.target is not aten.mul.Tensor or scaled.args[0] is not value or scaled.kwargs:
                continue
            slope: Any = scaled.args[1]
            if not isinstance(slope, int | float) or not slope:  # oneDNN's with a slope of 0 would cut off NaN
                continue
            for last in positive.users:
                if last.target is aten.where.self and last.args == (positive, value, scaled):
                    name = activation_name("leaky_relu", slope)
                    yield Activated(last, name, frozenset([positive, scaled, last]))
