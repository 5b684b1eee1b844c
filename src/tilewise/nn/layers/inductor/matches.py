"""Finding convolutions with what surrounds them in a graph that Inductor has frozen.

By the time that this is looked for, norms are folded into filters, filters are packed for oneDNN, and what follows a
convolution is still an operator of its own, which Inductor is about to give to oneDNN.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, Node

from tilewise.nn.layers.geometry import Geometry, Role
from tilewise.nn.layers.inductor.pointwise import activated_by
from tilewise.nn.layers.weights import Weights
from tilewise.problems.conv.problem import ConvProblem

__all__ = ["Match", "matches"]

aten = torch.ops.aten
FUSED_BY_ONEDNN = frozenset({
    "sigmoid", "mul", "div", "clamp_min", "clamp_max", "gt", "where", "tanh", "erf", "exp", "neg", "hardtanh", "add",
    "sub", "leaky_relu", "gelu", "silu", "hardswish", "hardsigmoid", "minimum", "maximum", "clamp", "relu",
})  # fmt: skip
"""Names of pointwise operators of which Inductor makes post-operations, or loops that it fuses."""
LAYOUT = "channels_last"
"""How Inductor lays out the tensors of convolutions in a frozen graph."""


@dataclass(frozen=True)
class Match:
    """A convolution of the graph: its nodes, its packed and its plain filter, and the problem that it is.

    ``last`` is the node whose value is the problem's result. ``options`` are padding, stride, dilation and groups.
    """

    first: Node
    last: Node
    x: Node
    bias: Node | None
    residual: Node | None
    packed: torch.Tensor
    weight: torch.Tensor
    options: tuple[Any, ...]
    problem: ConvProblem
    behind: frozenset[Node]
    """The nodes of what follows the convolution."""


def matches(graph: Graph) -> Iterator[Match]:
    """Every convolution of ``graph`` that a problem can hold with all that oneDNN would fuse behind it, last one first.

    An addition of two convolutions belongs to the later one. What is not matched stays Inductor's.
    """
    target = torch.ops.mkldnn._convolution_pointwise.default
    taken: set[Node] = set()
    for node in reversed(list(graph.find_nodes(op="call_function", target=target))):
        match = _match(graph, node, taken)
        if match is not None:
            taken |= match.behind
            yield match


def _match(graph: Graph, node: Node, taken: set[Node]) -> Match | None:
    x, packed_node, bias, padding, stride, dilation, groups, *attributes = node.args
    if attributes[0] != "none" or not isinstance(x, Node) or not isinstance(packed_node, Node):
        return None
    packed = _constant(graph, packed_node)
    shapes = [_shape(x), _shape(node)]
    if packed is None or not packed.is_mkldnn or None in shapes or packed.dtype is not torch.float32:
        return None
    weight = packed.to_dense()
    if weight.dim() != 4 or len(shapes[0] or ()) != 4:
        return None
    last, residual, activation, behind = _epilogue(node, taken)
    if activation == "none" and any(_name(user) in FUSED_BY_ONEDNN for user in last.users if user not in taken):
        return None  # an activation that oneDNN would apply as it writes
    geometry = Geometry.of(2, stride, padding, dilation, groups, tuple(weight.shape[2:]))  # type: ignore[arg-type]
    if geometry is None:
        return None
    problem = geometry.problem(
        Role.FORWARD, shapes[0] or (), tuple(weight.shape), dtype="fp32", precision="ieee", bias=bias is not None,
        layouts=(LAYOUT,) * 3, alignment=(16, 16, 16), device="cpu", weights=Weights.FROZEN,
    ).changed(residual=residual is not None, activation=activation)  # fmt: skip
    if problem.shape("y") != shapes[1]:
        return None
    options = (padding, stride, dilation, groups)
    weight = weight.contiguous(memory_format=torch.channels_last)
    return Match(node, last, x, bias, residual, packed, weight, options, problem, behind)  # type: ignore[arg-type]


def _epilogue(node: Node, taken: set[Node]) -> tuple[Node, Node | None, str, frozenset[Node]]:
    """What follows a convolution and belongs to it: its last node, its residual, its activation, and all its nodes.

    Behind a residual that is ReLU alone, since oneDNN applies no other there.
    """
    last, residual, activation, behind = node, None, "none", frozenset[Node]()
    user = _only_user(last)
    if user is not None and user.target is aten.add.Tensor and not user.kwargs and user not in taken:
        other = next((arg for arg in user.args if arg is not node), None)
        if isinstance(other, Node) and _shape(other) == _shape(node) and _dtype(other) is torch.float32:
            last, residual, behind = user, other, frozenset([user])
    found = activated_by(last)
    if found is not None and not found.nodes & taken and (residual is None or found.name == "relu"):
        last, activation, behind = found.last, found.name, behind | found.nodes
    return last, residual, activation, behind


def _only_user(node: Node) -> Node | None:
    return next(iter(node.users)) if len(node.users) == 1 else None


def _name(node: Node) -> str:
    packet = getattr(node.target, "overloadpacket", None)
    return getattr(packet, "__name__", "")


def _constant(graph: Graph, node: Node) -> torch.Tensor | None:
    found = getattr(graph.owning_module, str(node.target), None) if node.op == "get_attr" else None
    return found if isinstance(found, torch.Tensor) else None


def _shape(node: Node) -> tuple[int, ...] | None:
    """The shape of the node's value; ``None`` where it is no tensor or has sizes that are not known."""
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor) or not all(isinstance(n, int) for n in value.shape):
        return None
    return tuple(value.shape)


def _dtype(node: Node) -> torch.dtype | None:
    value = node.meta.get("val")
    return value.dtype if isinstance(value, torch.Tensor) else None
