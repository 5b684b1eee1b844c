"""Views of a cut tensor, cropping, and linear layers.

Where a view would merge a cut dimension with another, the tensor is gathered, and every rank has it whole.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F

from tilewise.distributed.parts.layout import Cuts, Layout
from tilewise.distributed.parts.names import current_layer
from tilewise.distributed.shards.shard import Shard, handles, sharded
from tilewise.nn.layers.linear.run import BY_TORCH as LINEAR

Tensor = torch.Tensor


def moved(layout: Layout, places: Sequence[int], dims: int) -> Layout:
    """``layout`` for a tensor with ``dims`` dimensions whose cut ones are now ``places``, counted from the front."""
    return replace(layout, grid=replace(layout.grid, dims=tuple(place - dims for place in places)))


def fronts(x: Shard) -> list[int]:
    """The dimensions of ``x`` that are cut, counted from the front."""
    dims = x.dim()
    return [dims + dim for dim in x.spatial.grid.dims]


def reshaped(x: Shard, shape: Sequence[int]) -> Tensor:
    """``x`` in another shape: a shard where each dimension that is cut stays as it is, else a whole tensor."""
    old, new = x.shape, list(shape)
    if -1 in new:
        known = math.prod(n for n in new if n != -1)
        if new.count(-1) > 1 or known == 0 or old.numel() % known:
            raise ValueError(f"{current_layer('reshape')}: shape={tuple(shape)} does not fit an image of {tuple(old)}")
        new[new.index(-1)] = old.numel() // known
    if math.prod(new) != old.numel():
        raise ValueError(f"{current_layer('reshape')}: shape={tuple(shape)} does not fit an image of {tuple(old)}")
    places, part = [], list(new)
    for place, (start, stop) in zip(fronts(x), x.spatial.own, strict=True):
        stride = math.prod(old[place + 1 :])
        candidates = [i for i, size in enumerate(new) if size == old[place] and math.prod(new[i + 1 :]) == stride]
        if not candidates or candidates[-1] in places:
            return x.gather().reshape(new)
        places.append(candidates[-1])
        part[candidates[-1]] = stop - start
    return x.like(x.local.reshape(part), moved(x.spatial, places, len(new)))


def _sizes(shape: tuple[Any, ...]) -> Sequence[int]:
    """Sizes that were given as several arguments or as one sequence."""
    return shape[0] if len(shape) == 1 and not isinstance(shape[0], int) else shape


@handles(Tensor.view, Tensor.reshape, torch.reshape)
def _reshape(x: Shard, *shape: Any, **kwargs: Any) -> Tensor:
    return reshaped(x, _sizes(shape) if shape else next(iter(kwargs.values())))


@handles(Tensor.view_as)
def _view_as(x: Tensor, other: Tensor) -> Tensor:
    """``x`` in the shape of ``other``.

    Autograd calls it for the same shape where a function returns its input, as the hooks of modules do.
    """
    if not isinstance(x, Shard):
        return x.view(other.shape)
    return x.like(x.local.view_as(x.local)) if x.shape == other.shape else reshaped(x, other.shape)


@handles(Tensor.flatten, torch.flatten)
def _flatten(x: Shard, start_dim: int = 0, end_dim: int = -1) -> Tensor:
    shape = list(x.shape)
    first, last = start_dim % len(shape), end_dim % len(shape)
    return reshaped(x, [*shape[:first], math.prod(shape[first : last + 1]), *shape[last + 1 :]])


@handles(Tensor.unflatten, torch.unflatten)
def _unflatten(x: Shard, dim: int, sizes: Sequence[int]) -> Tensor:
    shape = list(x.shape)
    dim %= len(shape)
    sizes = list(sizes)
    if -1 in sizes:
        sizes[sizes.index(-1)] = shape[dim] // -math.prod(sizes)
    return reshaped(x, [*shape[:dim], *sizes, *shape[dim + 1 :]])


def _permuted(x: Shard, order: Sequence[int]) -> Shard:
    """``x`` with its dimensions in another order."""
    order = [d % x.dim() for d in order]
    return x.like(x.local.permute(order), moved(x.spatial, [order.index(place) for place in fronts(x)], len(order)))


@handles(Tensor.permute, torch.permute)
def _permute(x: Shard, *dims: Any, **kwargs: Any) -> Shard:
    return _permuted(x, _sizes(dims) if dims else kwargs["dims"])


@handles(Tensor.transpose, torch.transpose, Tensor.swapaxes, torch.swapaxes, Tensor.swapdims, torch.swapdims)
def _transpose(x: Shard, first: int, second: int) -> Shard:
    order = list(range(x.dim()))
    order[first], order[second] = order[second], order[first]
    return _permuted(x, order)


@handles(Tensor.movedim, torch.movedim, Tensor.moveaxis, torch.moveaxis)
def _movedim(x: Shard, source: Any, destination: Any) -> Shard:
    # A tensor whose sizes are 1, 2, ... shows the new order of the dimensions.
    numbered = torch.empty((1,) * x.dim(), dtype=torch.float32, device="meta").expand(*range(1, x.dim() + 1))
    order = numbered.movedim(source, destination).shape
    return _permuted(x, [size - 1 for size in order])


@handles(Tensor.unsqueeze, torch.unsqueeze)
def _unsqueeze(x: Shard, dim: int) -> Shard:
    dims = x.dim() + 1
    dim %= dims
    return x.like(x.local.unsqueeze(dim), moved(x.spatial, [p + (p >= dim) for p in fronts(x)], dims))


@handles(Tensor.squeeze, torch.squeeze)
def _squeeze(x: Shard, dim: Any = None) -> Shard:
    """Remove dimensions of size 1, but not those that are cut."""
    shape, cut = x.shape, set(fronts(x))
    given = range(len(shape)) if dim is None else (dim,) if isinstance(dim, int) else dim
    removed = sorted(dim % len(shape) for dim in given if shape[dim] == 1 and dim % len(shape) not in cut)
    places = [place - sum(dim < place for dim in removed) for place in fronts(x)]
    return x.like(x.local.squeeze(removed), moved(x.spatial, places, len(shape) - len(removed)))


@handles(Tensor.__getitem__)
def _getitem(x: Shard, index: Any) -> Shard:
    """Index with slices, numbers and ``None``; dimensions that are cut take only slices without a step, which crop."""
    what, shape, cut = current_layer("indexing"), x.shape, fronts(x)
    given = list(index) if isinstance(index, tuple) else [index]
    indexed = sum(item is not None and item is not Ellipsis for item in given)
    if Ellipsis in [item for item in given if not isinstance(item, Tensor)]:
        at = next(i for i, item in enumerate(given) if item is Ellipsis)
        given[at : at + 1] = [slice(None)] * (len(shape) - indexed)
    given += [slice(None)] * (len(shape) - sum(item is not None for item in given))
    taken: list[Any] = []
    cuts: dict[int, Cuts] = {}
    places: dict[int, int] = {}
    dim = result_dim = 0
    for item in given:
        if item is not None and not isinstance(item, (int, slice)):
            raise ValueError(f"{what}: [{item!r}]: numbers, slices and None would do on an image cut across ranks")
        if item is not None and dim in cut:
            if not isinstance(item, slice) or item.step not in (None, 1):
                raise ValueError(f"{what}: dimension {dim} is cut across ranks: a slice without a step would do")
            start, stop, _ = item.indices(shape[dim])
            points = x.spatial.cuts[cut.index(dim)]
            cuts[dim] = tuple(min(max(point, start), max(stop, start)) - start for point in points)
            first, last = x.spatial.own[cut.index(dim)]
            item = slice(max(start - first, 0), max(min(stop, last) - first, 0))
            places[dim] = result_dim
        taken.append(item)
        dim += item is not None
        result_dim += not isinstance(item, int)
    layout = replace(x.spatial, cuts=tuple(cuts[d] for d in cut))
    return x.like(x.local[tuple(taken)], moved(layout, [places[d] for d in cut], result_dim))


@handles(LINEAR)  # torch's own function, even where tilewise.enable() has replaced it before
def _linear(input: Any, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """A linear layer, by parts; where the last dimension is cut, the tensor is gathered and computed whole."""
    what = current_layer("linear")
    x = sharded(input, what)
    if -1 in x.spatial.grid.dims:
        return F.linear(x.gather(), weight, bias)
    space = x.space
    b = None if bias is None else space.replicated(what, bias)
    return x.like(F.linear(x.local, space.replicated(what, weight), b))
