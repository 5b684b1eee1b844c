"""Rewriting a traced graph: operators that do nothing vanish, norms are folded, and pointwise neighbours are fused.

The order of a fused layer is fixed: ``activation(product + bias + residual)``. A neighbour is fused only where the
result before it is read by nothing else.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from tilewise.nn.regions import fused
from tilewise.nn.regions.joins import join
from tilewise.nn.regions.operators import NORMS, activation_of, constants_of, norm_constants, tensor_of
from tilewise.nn.regions.trace import before, root_of
from tilewise.nn.regions.units import formats, normal

__all__ = ["rewrite"]

aten = torch.ops.aten
VIEWS = (aten.view.default, aten.reshape.default)
SAME = (aten.alias.default, aten.detach.default, aten.lift_fresh_copy.default, aten.clone.default)
"""Operators whose result has the same values. A graph without side effects needs no copies."""

LINEAR_RESIDUALS = frozenset({"cuda"})
"""Devices on which residuals behind views are added by linear layers. On a CPU that gained nothing in ConvNeXt: a
library's product with a sum behind it takes as long as a convolution that adds."""


def rewrite(graph: fx.Graph) -> int:
    """Fold and fuse in ``graph``, in place. Returns the number of operators that were folded or fused."""
    (output,) = (node for node in graph.nodes if node.op == "output")
    wanted = [tensor_of(node) for node in output.args[0]]
    _simplify(graph)
    _constants_first(graph)
    _mark(graph)
    _dropped(graph)
    count = 0
    while True:
        done = sum(_fold(graph, node) for node in list(graph.nodes) if node.users or node.op == "output")
        _dropped(graph)
        if not done:
            break
        count += done
    count += join(graph)
    _dropped(graph)
    _copy_results(graph, output, wanted)
    graph.lint()
    return count


def _copy_results(graph: fx.Graph, output: fx.Node, wanted: Sequence[torch.Tensor | None]) -> None:
    """Copy results that would be an input, share memory with one another, or lie otherwise than ``wanted``.

    No result did before copies were left out, whose callers may write into one and read the other.
    """
    seen: set[fx.Node] = set()
    results: list[fx.Node] = []
    for node, value in zip(output.args[0], wanted, strict=True):  # type: ignore[arg-type]
        base, own = root_of(node), tensor_of(node)
        lies = value is None or own is None or normal(own.shape, own.stride()) == normal(value.shape, value.stride())
        if base.op == "placeholder" or base in seen or not lies:
            with graph.inserting_before(output):
                node = graph.call_function(aten.clone.default, (node,))
            node.meta["val"] = value
        seen.add(base)
        results.append(node)
    output.args = (results,)


def _constants_first(graph: fx.Graph) -> None:
    """Move what depends on no input to the front, so that it can be folded into any layer."""
    constant = constants_of(graph)
    (first, *_) = graph.nodes
    for node in [n for n in graph.nodes if n in constant and n is not first]:
        first.prepend(node)


def _dropped(graph: fx.Graph) -> None:
    """Remove what nothing reads."""
    graph.eliminate_dead_code(lambda node: node.op in ("placeholder", "output"))


def _simplify(graph: fx.Graph) -> None:
    """Remove operators that return what they are given, and write parts of a split or an unbind as slices."""
    for node in list(graph.nodes):
        if node.op != "call_function":
            continue
        if node.target is aten._unsafe_view.default:
            node.target = aten.view.default  # it is of a tensor that nothing else reads or writes
        if node.target in SAME or _changes_nothing(node):
            source = node.args[0]
            node.replace_all_uses_with(source)
        elif node.target is operator.getitem:
            _as_part(graph, node)
    _dropped(graph)


def _changes_nothing(node: fx.Node) -> bool:
    """Whether the node gives its first argument's values in the same shape and dtype."""
    if node.target in (*VIEWS, aten.expand.default, aten._to_copy.default):
        source, value = tensor_of(node.args[0]), tensor_of(node)
        return source is not None and value is not None and source.shape == value.shape and source.dtype is value.dtype
    return False


def _as_part(graph: fx.Graph, node: fx.Node) -> None:
    """Replace an item of a split by the slice that it is, and one of an unbind by what it selects."""
    source, index = node.args
    if not isinstance(source, fx.Node) or not isinstance(index, int) or not source.args:
        return
    value = tensor_of(source.args[0])
    if value is None:
        return
    if source.target is aten.unbind.int:
        tensor, dim = (*source.args, *source.kwargs.values(), 0)[:2]
        replacement: tuple[Any, ...] = (aten.select.int, (tensor, dim, index))
    elif source.target in (aten.split.Tensor, aten.split_with_sizes.default):
        tensor, sizes, dim = (*source.args, *source.kwargs.values(), 0)[:3]
        if not isinstance(dim, int):
            return
        replacement = (aten.slice.Tensor, (tensor, dim, *_bounds(sizes, index, value.shape[dim])))
    else:
        return
    with graph.inserting_before(node):
        part = graph.call_function(*replacement)
    part.meta.update(node.meta)
    node.replace_all_uses_with(part)


def _bounds(sizes: Any, index: int, extent: int) -> tuple[int, int]:
    """Where part ``index`` of a split of ``extent`` begins and ends, in parts of one size or of several ``sizes``."""
    if isinstance(sizes, int):
        return index * sizes, min((index + 1) * sizes, extent)
    start = sum(sizes[:index])
    return start, start + sizes[index]


def _mark(graph: fx.Graph) -> None:
    """Write convolutions and linear layers with constant weights as functions of :mod:`fused`."""
    constant = constants_of(graph)
    for node in list(graph.nodes):
        if node.op != "call_function" or node in constant:
            continue
        if node.target is aten.convolution.default:
            x, w, b, stride, padding, dilation, transposed, _, groups = node.args
            if transposed or w not in constant or (b is not None and b not in constant) or x in constant:
                continue
            arguments: tuple[Any, ...] = (x, w, b, None, "none", *map(tuple, (stride, padding, dilation)), groups)
            _replace(graph, node, fused.convolution, arguments)
        elif node.target in (aten.mm.default, aten.addmm.default):
            *bias, x, w = node.args
            if node.kwargs or w not in constant or x in constant or (bias and not _is_row(bias[0], constant, node)):
                continue
            _replace(
                graph, node, fused.linear, (x, _transposed(graph, node, w), bias[0] if bias else None, None, "none")
            )


def _is_row(bias: Any, constant: set[fx.Node], node: fx.Node) -> bool:
    """Whether ``bias`` is a constant with one number for each column of the node's result."""
    value, result = tensor_of(bias), tensor_of(node)
    return bias in constant and value is not None and result is not None and value.shape == result.shape[1:]


def _transposed(graph: fx.Graph, node: fx.Node, w: Any) -> fx.Node:
    """The transpose of a weight: what it is the transpose of, where it is one."""
    if w.target is aten.t.default:
        return w.args[0]  # type: ignore[no-any-return]
    with graph.inserting_before(node):
        turned = graph.call_function(aten.t.default, (w,))
    turned.meta["val"] = tensor_of(w).t()  # type: ignore[union-attr]
    return turned


def _replace(graph: fx.Graph, node: fx.Node, target: Callable[..., Any], arguments: tuple[Any, ...]) -> fx.Node:
    """Let a call of ``target`` take the place of ``node``, whose result has the same value."""
    with graph.inserting_before(node):
        new = graph.call_function(target, arguments)
    new.meta.update(node.meta)
    node.replace_all_uses_with(new)
    return new


def _fold(graph: fx.Graph, node: fx.Node) -> bool:
    """Fold or fuse one node into the product before it (or after it); whether that was done."""
    if node.op != "call_function" or not node.users or node.target in fused.CONSTANTS:
        return False
    if node.target in (fused.convolution, fused.linear):
        return _fold_before(graph, node)
    target = node.target
    if target is operator.getitem and node.args[1] == 0 and getattr(node.args[0], "target", None) in NORMS:
        return _fold_norm(graph, node)
    if target in (aten.mul.Tensor, aten.add.Tensor):
        return _fold_factor(graph, node) or (target is aten.add.Tensor and _fuse_residual(graph, node))
    name = activation_of(node)
    return bool(name) and _fuse_activation(graph, node, name)


def _product(node: Any, reader: fx.Node) -> fx.Node | None:
    """The fused product that ``node`` is, where ``reader`` alone reads it and no activation follows the sum."""
    if not isinstance(node, fx.Node) or node.target not in (fused.convolution, fused.linear):
        return None
    return node if list(node.users) == [reader] and node.args[4] == "none" else None


def _fold_norm(graph: fx.Graph, node: fx.Node) -> bool:
    """Fold a norm with fixed statistics into the product before it."""
    norm = node.args[0]
    assert isinstance(norm, fx.Node)
    if len(norm.users) != 1:
        return False
    found = norm_constants(graph, norm)
    product = _product(norm.args[0], norm)
    if found is None or product is None or product.args[3] is not None:
        return False
    _fold_scale_and_shift(graph, product, node, *found)
    return True


def _fold_scale_and_shift(
    graph: fx.Graph, product: fx.Node, node: fx.Node, scale: fx.Node | None, shift: fx.Node | None
) -> None:
    """Let ``product`` with a factor and a summand for each channel of its result take the place of ``node``."""
    x, w, b, *rest = product.args
    with graph.inserting_before(node):
        weight = w if scale is None else graph.call_function(fused.scaled, (w, scale))
        bias = b if scale is None and shift is None else graph.call_function(fused.shifted, (b, scale, shift))
        if isinstance(bias, fx.Node) and bias.args == (None, scale, None):
            bias = None
    _replace(graph, node, product.target, (x, weight, bias, *rest))  # type: ignore[arg-type]


def _fold_before(graph: fx.Graph, product: fx.Node) -> bool:
    """Fold a norm that is computed before a product without padding into the product."""
    x, w, b, *rest = product.args
    if not isinstance(x, fx.Node) or x.target is not operator.getitem or x.args[1] != 0 or list(x.users) != [product]:
        return False
    norm = x.args[0]
    assert isinstance(norm, fx.Node)
    padded = product.target is fused.convolution and any(rest[3])  # type: ignore[arg-type]
    if norm.target not in NORMS or len(norm.users) != 1 or padded:
        return False
    found = norm_constants(graph, norm)
    if found is None:
        return False
    scale, shift = found
    groups = rest[-1] if product.target is fused.convolution else 1
    with graph.inserting_before(product):
        weight = graph.call_function(fused.scaled_inputs, (w, scale, groups))
        bias = graph.call_function(fused.shifted_inputs, (w, b, shift, groups))
    _replace(graph, product, product.target, (norm.args[0], weight, bias, *rest))  # type: ignore[arg-type]
    return True


def _fold_factor(graph: fx.Graph, node: fx.Node) -> bool:
    """Fold a factor or a summand for each channel, which is constant, into the product before it."""
    if node.kwargs or len(node.args) != 2:
        return False
    constant = constants_of(graph)
    for value, other in (node.args, node.args[::-1]):
        if not isinstance(other, fx.Node) or other not in constant or not isinstance(value, fx.Node):
            continue
        product, views = _product_behind_views(value, node)
        if product is None or not _of_channels(product, views, other, node):
            continue
        if node.target is aten.mul.Tensor and product.args[3] is not None:
            continue
        scale, shift = (other, None) if node.target is aten.mul.Tensor else (None, other)
        _fold_scale_and_shift(graph, product, node if not views else product, scale, shift)
        if views:
            views[-1].meta["val"] = tensor_of(node)
            node.replace_all_uses_with(views[-1])
        return True
    return False


def _product_behind_views(value: fx.Node, reader: fx.Node) -> tuple[fx.Node | None, list[fx.Node]]:
    """The fused product of which ``value`` is a view, and the views in order; nothing else reads any of them."""
    views: list[fx.Node] = []
    while value.target in (*VIEWS, aten.permute.default, aten.transpose.int):
        source = value.args[0]
        if list(value.users) != [reader] or not isinstance(source, fx.Node):
            return None, []
        views.insert(0, value)
        value, reader = source, value
    return _product(value, reader), views


def _of_channels(product: fx.Node, views: Sequence[fx.Node], other: fx.Node, node: fx.Node) -> bool:
    """Whether ``other`` has one number for each channel of the product, as the product is viewed."""
    result, value, given = tensor_of(product), tensor_of(node), tensor_of(other)
    if result is None or value is None or given is None or given.dtype is not value.dtype:
        return False
    # Of these strides only that of the channels is not 0, wherever views put them.
    strides = [int(dim == 1) for dim in range(result.dim())]
    told = torch.empty_strided(result.shape, strides, dtype=result.dtype, device="meta")
    try:
        for view in views:
            told = view.target(told, *view.args[1:])  # type: ignore[operator]
    except RuntimeError:  # channels are divided, or joined with something else
        return False
    if told.shape != value.shape or given.dim() > value.dim():
        return False
    shape = [1] * (value.dim() - given.dim()) + list(given.shape)
    return all(n == 1 or (told.stride(dim) == 1 and n == result.shape[1]) for dim, n in enumerate(shape)) and (
        math.prod(shape) == result.shape[1]
    )


def _fuse_residual(graph: fx.Graph, node: fx.Node) -> bool:
    """Fuse a sum of two tensors of one shape into the later product among them, or the later that is viewed.

    A residual that is a constant, such as an embedding of positions, stays an operator's summand.
    """
    alpha = node.kwargs.get("alpha", 1)
    if len(node.args) != 2 or alpha != 1 or set(node.kwargs) > {"alpha"}:
        return False
    order = {n: index for index, n in enumerate(graph.nodes)}
    constant = constants_of(graph)
    sides = [(a, b) for a, b in (node.args, node.args[::-1]) if isinstance(a, fx.Node) and isinstance(b, fx.Node)]
    for value, other in sorted(sides, key=lambda side: -order[side[0]]):
        product, views = _product_behind_views(value, node)
        if product is None or product.args[3] is not None or value is other or other in constant:
            continue
        result, given, own = tensor_of(node), tensor_of(other), tensor_of(value)
        if result is None or given is None or own is None or product in before(other):
            continue
        if given.shape != own.shape or given.dtype is not own.dtype or result.dtype is not own.dtype:
            continue
        is_linear = product.target is fused.linear
        if views and (not _can_be_unviewed(given, views) or (is_linear and own.device.type not in LINEAR_RESIDUALS)):
            continue
        with graph.inserting_before(node):
            residual = _unviewed(graph, other, views)
            x, w, b, _, *rest = product.args
            new = graph.call_function(product.target, (x, w, b, residual, *rest))  # type: ignore[arg-type]
            new.meta.update(product.meta)
            for view in views:
                new = _called(graph, view.target, new, view.args[1:], tensor_of(view))
        new.meta["val"] = result  # whose strides are those of the region's result, if it is one
        node.replace_all_uses_with(new)
        return True
    return False


def _backwards(views: Sequence[fx.Node]) -> list[tuple[Any, tuple[Any, ...]]]:
    """Operators with their arguments that undo ``views`` one after the other, the last first."""
    found: list[tuple[Any, tuple[Any, ...]]] = []
    for view in reversed(views):
        arguments: Any = view.args[1:]
        if view.target is aten.transpose.int:
            found.append((aten.transpose.int, arguments))
        elif view.target is aten.permute.default:
            (dims,) = arguments
            inverse = sorted(range(len(dims)), key=lambda dim, dims=dims: dims[dim] % len(dims))  # type: ignore[misc]
            found.append((aten.permute.default, (inverse,)))
        else:
            source = tensor_of(view.args[0])
            assert source is not None
            found.append((aten.view.default, (list(source.shape),)))
    return found


def _can_be_unviewed(value: torch.Tensor, views: Sequence[fx.Node]) -> bool:
    """Whether a tensor like ``value`` has the views that undo ``views``, in one of its formats at least."""
    for strides in formats(value.shape):
        seen = torch.empty_strided(value.shape, strides, dtype=value.dtype, device="meta")
        try:
            for target, arguments in _backwards(views):
                seen = target(seen, *arguments)
        except RuntimeError:
            continue
        return True
    return False


def _unviewed(graph: fx.Graph, node: fx.Node, views: Sequence[fx.Node]) -> fx.Node:
    """The tensor of which ``views`` give ``node``: the same numbers seen as the product gives its own."""
    for target, arguments in _backwards(views):
        value = tensor_of(node)
        assert value is not None
        # As it is traced a tensor need not have the view: a region brings it into a format that has it.
        seen = value.reshape(*arguments) if target is aten.view.default else target(value, *arguments)
        node = _called(graph, target, node, arguments, seen)
    return node


def _called(graph: fx.Graph, target: Any, node: fx.Node, arguments: tuple[Any, ...], value: Any) -> fx.Node:
    """A call of an operator on ``node``, whose result is like ``value``."""
    new = graph.call_function(target, (node, *arguments))
    new.meta["val"] = value
    return new


def _fuse_activation(graph: fx.Graph, node: fx.Node, name: str) -> bool:
    """Fuse an activation into the product before it, through a view of the product where there is one."""
    value = node.args[0]
    if not isinstance(value, fx.Node):
        return False
    viewed = value if value.target in VIEWS and list(value.users) == [node] else None
    product = _product(value.args[0] if viewed else value, viewed or node)
    result, own = tensor_of(node), tensor_of(value)
    if product is None or result is None or own is None or result.dtype is not own.dtype:
        return False
    x, w, b, residual, _, *rest = product.args
    _replace(graph, product if viewed else node, product.target, (x, w, b, residual, name, *rest))  # type: ignore[arg-type]
    if viewed:
        node.replace_all_uses_with(viewed)
    return True
