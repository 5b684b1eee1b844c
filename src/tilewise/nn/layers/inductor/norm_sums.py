"""Sums of norms in training graphs of Inductor, by our kernels. The graph must be sorted anew afterwards.

Inductor's reductions over pixels reach a half to three quarters of a GPU's memory bandwidth where channels lie
innermost. Our kernels come nearer to it, and the gradient's sums take the gate of a ReLU behind the norm from the
norm's input, so that they read two tensors in place of three. What programs have summed up is left to Inductor to add
up, together with what follows: running statistics, the reciprocal deviation.
"""

from __future__ import annotations

import operator
from typing import NamedTuple

import torch
from torch.fx import Graph, Node

from tilewise.nn.layers.inductor import channel_sums
from tilewise.nn.layers.inductor.nodes import added, plain, unconverted, unviewed, value_of

__all__ = ["Gate", "norm_behind", "sum_by_kernels"]

aten = torch.ops.aten
PIXELS = [0, 2, 3]
"""The axes that a norm by channel sums over."""
LEAST = 4 * 2**20
"""Elements of a tensor from which on kernels of ours are used: sums of smaller ones wait for launches, not memory."""


class Gate(NamedTuple):
    """What a ReLU behind a norm saw, by channel."""

    mean: Node
    scale: Node
    weight: Node
    bias: Node


def sum_by_kernels(graph: Graph, least: int = LEAST) -> int:
    """Have norms of at least so many elements summed by our kernels; returns how many sums were replaced."""
    sums = [node for node in graph.find_nodes(op="call_function", target=aten.sum.dim_IntList) if _sums_pixels(node)]
    backward = sum(_replace_gradient_sums(graph, node, least) for node in sums)
    forward = sum(
        _replace_moments(graph, node, least)
        for node in list(graph.find_nodes(op="call_function", target=aten.var_mean.correction))
    )
    graph.eliminate_dead_code()
    return backward + forward


def _takes(node: Node | None, least: int) -> bool:
    value = value_of(node)
    return value is not None and channel_sums.fits(value) and value.numel() >= least


def _replace_moments(graph: Graph, node: Node, least: int) -> bool:
    """Replace variance and mean of a tensor by what its sums give."""
    x = unconverted(node.args[0])
    exact = node.kwargs.get("correction") == 0 and node.kwargs.get("keepdim") is True
    if not exact or node.args[1:] != (PIXELS,) or x is None or not _takes(x, least):
        return False
    if any(user.target is not operator.getitem for user in node.users):
        return False
    shape, value = [1, -1, 1, 1], value_of(x)
    assert value is not None
    count = value.numel() // value.shape[1]
    with graph.inserting_before(node):
        parts = added(graph, node, torch.ops.tilewise.channel_moments.default, x)
        first, squares = (_total(graph, node, parts, row) for row in (0, 1))
        pixel = x
        for axis in PIXELS:
            pixel = added(graph, node, aten.slice.Tensor, pixel, axis, 0, 1)
        shift = added(graph, node, torch.ops.prims.convert_element_type.default, pixel, torch.float32)
        less = added(graph, node, aten.div.Tensor, first, count)
        mean = added(graph, node, aten.add.Tensor, added(graph, node, aten.view.default, less, shape), shift)
        square = added(graph, node, aten.div.Tensor, squares, count)
        apart = added(graph, node, aten.sub.Tensor, square, added(graph, node, aten.mul.Tensor, less, less))
        positive = added(graph, node, aten.clamp_min.default, apart, 0.0)
        variance = added(graph, node, aten.view.default, positive, shape)
    for user in list(node.users):
        user.replace_all_uses_with(mean if user.args[1] else variance)
    return True


def _total(graph: Graph, like: Node, parts: Node, row: int) -> Node:
    """The sum of one row over all programs."""
    rows = added(graph, like, aten.select.int, parts, 1, row)
    return added(graph, like, aten.sum.dim_IntList, rows, [0])


def _replace_gradient_sums(graph: Graph, node: Node, least: int) -> bool:
    """Replace the sum ``node`` of a gradient times centred elements, and the gradient's own sum."""
    product = plain(node.args[0])
    if product is None or product.target is not aten.mul.Tensor:
        return False
    gradient, centred = (plain(each) for each in product.args)
    if gradient is None or centred is None or centred.target is not aten.sub.Tensor:
        return False
    x, mean = unconverted(centred.args[0]), unviewed(centred.args[1])
    if x is None or mean is None or not _takes(x, least) or not _is_by_channel(mean, x):
        return False
    source, gate = _gated(gradient, x)
    if source is None or not _takes(source, least) or not _is_alike(source, x):
        return False
    if not (_is_in_memory(source) if gate else _is_kept(source, gradient)):
        return False
    with graph.inserting_before(node):
        vectors = [_flat(graph, node, each) for each in (mean, *gate)]
        sums = torch.ops.tilewise.channel_gradient_sums.default
        parts = added(graph, node, sums, source, x, vectors[0], vectors[1:])
        first, second = (_total(graph, node, parts, row) for row in (0, 1))
    node.replace_all_uses_with(second)
    for each in list(gradient.users):
        if _sums_pixels(each):
            each.replace_all_uses_with(first)
    return True


def _gated(gradient: Node, x: Node) -> tuple[Node | None, tuple[Node, ...]]:
    """The gradient as it lies in memory, and the gate of a ReLU behind the norm of ``x``, empty where there is none."""
    source = unconverted(gradient)
    if source is None or source.target is not aten.where.self:
        return source, ()
    gate, zero, upstream = (plain(each) for each in source.args)
    if gate is None or zero is None or zero.target is not aten.full.default or zero.args[1] != 0:
        return source, ()
    seen = norm_behind(gate)
    return (source, ()) if seen is None or seen[0] is not x else (upstream, tuple(seen[1]))


def norm_behind(gate: Node) -> tuple[Node, Gate] | None:
    """The input of a norm in training and what it was computed with, of ``relu(norm) <= 0`` or ``norm <= 0``.

    Backward reads that input anyway. Of a norm with running statistics it may not, so none is found.
    """
    if gate.target is not aten.le.Scalar or gate.args[1] != 0:
        return None
    relu = plain(gate.args[0])
    result = unconverted(relu.args[0]) if relu is not None and relu.target is aten.relu.default else unconverted(relu)
    numbers = []
    for operator_ in (aten.add.Tensor, aten.mul.Tensor, aten.mul.Tensor, aten.sub.Tensor):
        if result is None or result.target is not operator_ or result.kwargs:
            return None
        number = unviewed(result.args[1])
        if number is None:
            return None
        numbers.append(number)
        result = unconverted(result.args[0])
    if result is None or not all(_is_by_channel(number, result) for number in numbers):
        return None
    bias, weight, scale, mean = numbers
    if not _is_mean_of(mean, result):
        return None
    return result, Gate(mean, scale, weight, bias)


def _sums_pixels(node: Node) -> bool:
    """Whether a node is the sum over all pixels by channel."""
    return node.target is aten.sum.dim_IntList and node.args[1:] == (PIXELS,) and not node.kwargs


def _is_mean_of(node: Node, x: Node) -> bool:
    """Whether the node is the mean of ``x`` in a norm."""
    source = node.args[0] if node.target is operator.getitem else None
    return isinstance(source, Node) and source.target is aten.var_mean.correction and unconverted(source.args[0]) is x


def _is_by_channel(node: Node, x: Node) -> bool:
    """Whether the node's value has one number for each channel of ``x``."""
    value, whole = value_of(node), value_of(x)
    return value is not None and whole is not None and value.numel() == whole.shape[1] == max(value.shape)


def _is_alike(a: Node, b: Node) -> bool:
    one, other = value_of(a), value_of(b)
    return one is not None and other is not None and one.shape == other.shape and one.dtype == other.dtype


def _is_in_memory(node: Node) -> bool:
    """Whether Inductor has the node's value in memory in any case, and does not compute it where it is read."""
    tags = getattr(node.target, "tags", ())
    return torch.Tag.pointwise not in tags and node.target is not torch.ops.prims.convert_element_type.default


def _is_kept(source: Node, gradient: Node) -> bool:
    """Whether ``source`` is in memory, or would be written since others than one norm's gradient read it.

    ``gradient`` is the same in fp32. A norm multiplies it by centred elements, sums it, and subtracts from it.
    """
    products = [user for user in gradient.users if any(_sums_pixels(each) for each in user.users)]
    subtracted = [user for user in gradient.users if user.target is aten.sub.Tensor]
    own = {gradient, *products, *subtracted, *filter(_sums_pixels, gradient.users)}
    return _is_in_memory(source) or len(products) > 1 or any(user not in own for user in source.users)


def _flat(graph: Graph, like: Node, node: Node) -> Node:
    """The numbers by channel as one row."""
    value = value_of(node)
    assert value is not None
    return node if value.dim() == 1 else added(graph, like, aten.view.default, node, [-1])
