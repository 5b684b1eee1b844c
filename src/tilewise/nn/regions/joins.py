"""Norms that no layer can take: with what follows them, and the concatenation before them, they are one pass.

Where a norm follows a concatenation (DenseNet: Huang et al. 2017) or a sum that others read as well, it cannot be
folded into a layer. By operators such a network copies every result three times: joined, scaled, and cut off at 0.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from tilewise.nn.regions import fused
from tilewise.nn.regions.operators import NORMS, activation_of, constants_of, norm_constants, tensor_of

__all__ = ["join"]

aten = torch.ops.aten


def join(graph: fx.Graph) -> int:
    """Write norms with fixed statistics as :func:`.fused.joined`; returns how many operators became part of them."""
    count, constant = 0, constants_of(graph)
    for node in list(graph.nodes):
        norm = node.args[0] if node.target is operator.getitem and node.args[1] == 0 else None
        if isinstance(norm, fx.Node) and norm.target in NORMS and len(norm.users) == 1:
            count += _joined(graph, node, norm, constant)
    return count


def _joined(graph: fx.Graph, node: fx.Node, norm: fx.Node, constant: set[fx.Node]) -> int:
    """Write one norm, whose result is ``node``, with its neighbours; 0 where it stays."""
    value, x = tensor_of(node), norm.args[0]
    if value is None or value.dim() != 4 or value.dtype is not torch.float32 or not isinstance(x, fx.Node):
        return 0
    if x in constant or not node.users:
        return 0
    found = norm_constants(graph, norm)
    if found is None:
        return 0
    for each in found:
        each.meta["val"] = value.new_empty(value.shape[1])
    parts = _parts(x, norm, constant)
    last = _activation_behind(node) or node
    name = "none" if last is node else activation_of(last)
    with graph.inserting_before(last):
        new = graph.call_function(fused.joined, (parts, *found, name))
    new.meta.update(last.meta)
    last.replace_all_uses_with(new)
    return 1 + (last is not node) + (len(parts) > 1)


def _activation_behind(node: fx.Node) -> fx.Node | None:
    """The activation that alone reads a node and keeps its dtype; ``None`` where there is none."""
    (reader, *others) = node.users
    if others or reader.op != "call_function" or not activation_of(reader) or reader.args[0] is not node:
        return None
    value, result = tensor_of(node), tensor_of(reader)
    return reader if value is not None and result is not None and result.dtype is value.dtype else None


def _parts(x: fx.Node, norm: fx.Node, constant: set[fx.Node]) -> tuple[Any, ...]:
    """What is joined along channels to give the norm's input; itself where others read it, or nothing is."""
    if x.target is not aten.cat.default or list(x.users) != [norm]:
        return (x,)
    given: tuple[Any, ...] = (*x.args, 0)
    tensors, dim = given[:2]
    alike = all(_is_image(each) and each not in constant for each in tensors)
    return tuple(tensors) if alike and dim in (1, -3) and not x.kwargs else (x,)


def _is_image(node: fx.Node) -> bool:
    """Whether a node gives images in fp32 with some pixels."""
    value = tensor_of(node)
    return value is not None and value.dim() == 4 and value.dtype is torch.float32 and value.numel() > 0
