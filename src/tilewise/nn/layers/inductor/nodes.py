"""Reading and adding nodes of a graph that Inductor compiles."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Graph, Node

__all__ = ["added", "plain", "unconverted", "unviewed", "value_of"]

CONVERTED = torch.ops.prims.convert_element_type.default
ALIASES = (torch.ops.aten.alias.default, torch.ops.aten.detach.default)
VIEWS = (torch.ops.aten.unsqueeze.default, torch.ops.aten.squeeze.dims, torch.ops.aten.view.default)


def value_of(node: Any) -> torch.Tensor | None:
    """The tensor without memory that describes the node's value; ``None`` for other values."""
    value = node.meta.get("val") if isinstance(node, Node) else None
    return value if isinstance(value, torch.Tensor) else None


def plain(node: Any) -> Node | None:
    """The node behind aliases."""
    while isinstance(node, Node) and node.target in ALIASES:
        node = node.args[0]
    return node if isinstance(node, Node) else None


def unconverted(node: Any) -> Node | None:
    """The node behind aliases and changes of its type."""
    found = plain(node)
    while found is not None and found.target is CONVERTED:
        found = plain(found.args[0])
    return found


def unviewed(node: Any) -> Node | None:
    """The node behind aliases and views that only add or drop axes of one element."""
    found = plain(node)
    while found is not None and found.target in VIEWS:
        found = plain(found.args[0])
    return found


def added(graph: Graph, like: Node, target: Callable[..., Any], *args: Any, **kwargs: Any) -> Node:
    """A new node at the graph's place for such, described as far as ``like`` is, with its own value."""
    node = graph.call_function(target, args, kwargs)
    node.meta.update({key: value for key, value in like.meta.items() if key not in ("val", "tensor_meta")})
    values = torch.fx.node.map_arg((args, kwargs), lambda each: each.meta["val"])
    node.meta["val"] = target(*values[0], **values[1])
    return node
