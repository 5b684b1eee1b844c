"""Sums, means, counts and variances: of a whole image, known to every rank, or over channels by parts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from tilewise.distributed.layers.views import fronts, moved
from tilewise.distributed.parts.names import current_layer
from tilewise.distributed.parts.replicated import sum_over_ranks
from tilewise.distributed.shards.shard import Shard, handles


def axes_of(x: Shard, dim: Any, what: str) -> list[int]:
    """The dimensions that ``dim`` names, counted from the front; all dimensions for ``None``."""
    dims = x.dim()
    if dim is None or dim == [] or dim == ():
        return list(range(dims))
    return sorted({_front(d, dims, what) for d in ((dim,) if isinstance(dim, int) else dim)})


def _front(dim: int, dims: int, what: str) -> int:
    """``dim`` counted from the front. Raises ``ValueError`` where it is out of range."""
    if not -dims <= dim < dims:
        raise ValueError(f"{what}: dim={dim}: the image has {dims} dimensions")
    return dim % dims


def whole(x: Shard, axes: Sequence[int], what: str) -> bool:
    """Whether ``axes`` are all dimensions that are cut, or none. Raises ``ValueError`` where they are only some."""
    cut = set(fronts(x))
    if cut <= set(axes):
        return True
    if cut & set(axes):
        raise ValueError(
            f"{what}: dim={tuple(axes)}: reduces some of the dimensions that are cut across ranks, {sorted(cut)}, and "
            "not others: all or none would do"
        )
    return False


def remaining(x: Shard, part: torch.Tensor, axes: Sequence[int], keepdim: bool) -> Shard:
    """The shard with ``part`` on this rank, which is left of ``x`` once ``axes``, none of which is cut, are reduced."""
    if keepdim:
        return x.like(part)
    return x.like(part, moved(x.spatial, [p - sum(a < p for a in axes) for p in fronts(x)], part.dim()))


def reduced(x: Shard, dim: Any, keepdim: bool, what: str, dtype: torch.dtype | None = None) -> torch.Tensor | Shard:
    """The sum over ``dim``; ``None`` stands for all dimensions.

    Where all dimensions that are cut are summed, the result is a whole tensor on every rank; where none is, a shard.
    Raises ``ValueError`` where only some of them are summed.
    """
    axes = axes_of(x, dim, what)
    all_cut = whole(x, axes, what)
    total = x.local.sum(axes, keepdim, dtype=dtype)
    return sum_over_ranks(x.space.link, what, total) if all_cut else remaining(x, total, axes, keepdim)


@handles(torch.sum, torch.Tensor.sum)
def _sum(
    input: Shard, dim: Any = None, keepdim: bool = False, *, dtype: torch.dtype | None = None, axis: Any = None
) -> torch.Tensor:
    return reduced(input, axis if dim is None else dim, keepdim, current_layer("sum"), dtype)


@handles(torch.mean, torch.Tensor.mean)
def _mean(
    input: Shard, dim: Any = None, keepdim: bool = False, *, dtype: torch.dtype | None = None, axis: Any = None
) -> torch.Tensor:
    dim = axis if dim is None else dim
    what = current_layer("mean")
    return reduced(input, dim, keepdim, what, dtype) / _count(input, axes_of(input, dim, what))


def _count(x: Shard, axes: Sequence[int]) -> int:
    """The number of elements that are reduced to one."""
    return math.prod(x.shape[axis] for axis in axes)


@handles(torch.count_nonzero, torch.Tensor.count_nonzero)
def _count_nonzero(input: Shard, dim: Any = None) -> torch.Tensor:
    return reduced(input.like(input.local != 0), dim, False, current_layer("count_nonzero"))


@handles(torch.var, torch.Tensor.var)
def _var(
    input: Shard, dim: Any = None, unbiased: bool | None = None, keepdim: bool = False, *,
    correction: float | None = None,
) -> torch.Tensor:  # fmt: skip
    """The variance, from the distances to the mean, which is computed first, as sums of squares would lose digits."""
    if isinstance(dim, bool):
        dim, unbiased = None, dim
    what = current_layer("var")
    axes = axes_of(input, dim, what)
    correction = correction if correction is not None else 1.0 if unbiased is None else float(unbiased)
    all_cut = whole(input, axes, what)
    if not all_cut:
        return remaining(input, input.local.var(axes, correction=correction, keepdim=keepdim), axes, keepdim)
    distances: Any = (input - input.mean(axes, keepdim=True)).square()
    return reduced(distances, axes, keepdim, what) / max(_count(input, axes) - correction, 0.0)


@handles(torch.std, torch.Tensor.std)
def _std(input: Shard, *args: Any, **kwargs: Any) -> torch.Tensor:
    return _var(input, *args, **kwargs).sqrt()
