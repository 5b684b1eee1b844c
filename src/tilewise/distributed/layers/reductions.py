"""Sums and means, over an image to what every rank gets, or over channels."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from tilewise.distributed.names import current_layer
from tilewise.distributed.shard import Shard, handles
from tilewise.distributed.whole import sum_over_ranks


def reduced(x: Shard, dim: Any, keepdim: bool, what: str, dtype: torch.dtype | None) -> torch.Tensor | Shard:
    """The sum over ``dim`` (``None``: over all): whole on every rank where all dimensions that are cut are summed.

    Raises ``ValueError`` where some of them are and some not, or where one that is cut would change its place.
    """
    dims = x.dim()
    summed = (
        set(range(dims)) if dim is None or dim == [] or dim == () else {_front(d, dims, what) for d in _several(dim)}
    )
    cut = {dims + d for d in x.spatial.grid.dims}
    axes = sorted(summed)
    total = x.local.sum(axes, keepdim, dtype=dtype)
    if cut <= summed:
        return sum_over_ranks(x.space.link, what, total)
    if cut & summed:
        raise ValueError(f"{what}: dim={dim}: sums some of the dimensions that are cut across ranks, and not others")
    if not keepdim and any(d > min(cut) for d in summed):
        raise ValueError(f"{what}: dim={dim} without keepdim=True would move dimensions that are cut across ranks")
    return x.like(total)


def _several(dim: int | Sequence[int]) -> Sequence[int]:
    return (dim,) if isinstance(dim, int) else dim


def _front(dim: int, dims: int, what: str) -> int:
    if not -dims <= dim < dims:
        raise ValueError(f"{what}: dim={dim}: the image has {dims} dimensions")
    return dim % dims


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
    total = reduced(input, dim, keepdim, current_layer("mean"), dtype)
    shape = input.shape
    over = shape if dim is None or dim == [] or dim == () else [shape[d] for d in _several(dim)]
    return total / math.prod(over)
