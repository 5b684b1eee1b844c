"""Maxima, minima and their positions: of a whole image, known to every rank, or over channels by parts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tilewise.comm.link import Link
from tilewise.distributed.layers.reductions import axes_of, remaining, whole
from tilewise.distributed.layers.shapes import free
from tilewise.distributed.parts.names import current_layer
from tilewise.distributed.parts.replicated import sum_gradient
from tilewise.distributed.shards.shard import Shard, handles, operand, space_of

Tensor = torch.Tensor


class _Extreme(torch.autograd.Function):
    """Maxima (or minima) over ``axes`` of all parts. As in torch, all equal extremes share the gradient."""

    @staticmethod
    def forward(ctx: Any, link: Link, what: str, part: Tensor, axes: list[int], largest: bool) -> Tensor:
        ctx.link, ctx.what, ctx.axes = link, what, axes
        find = torch.amax if largest else torch.amin
        with link.telling(what):
            if part.numel():
                local = find(part, axes, True)
            else:
                shape = [1 if dim in axes else size for dim, size in enumerate(part.shape)]
                local = part.new_full(shape, _least(part.dtype) if largest else _most(part.dtype))
            # Not an all-reduce of the backend, since no backend says how it treats NaN.
            sends, receives = [(i, local) for i in link.others], [(i, local.shape) for i in link.others]
            pending = link.exchange(what, sends, receives, local)
            extremes = find(torch.stack([local, *pending.wait()]), 0)
        ctx.save_for_backward(part, extremes)
        return extremes

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None, Tensor, None, None]:
        part, extremes = ctx.saved_tensors
        what = f"the backward of {ctx.what}"
        with ctx.link.telling(what):
            is_extreme = (part == extremes) | (part.isnan() & extremes.isnan())
            count = ctx.link.sum(what, is_extreme.sum(ctx.axes, True))
            return None, None, is_extreme * sum_gradient(ctx.link, what, gradient / count), None, None


def _least(dtype: torch.dtype) -> Any:
    """The least value of ``dtype``."""
    return -float("inf") if dtype.is_floating_point else False if dtype is torch.bool else torch.iinfo(dtype).min


def _most(dtype: torch.dtype) -> Any:
    """The largest value of ``dtype``."""
    return float("inf") if dtype.is_floating_point else True if dtype is torch.bool else torch.iinfo(dtype).max


def extreme(x: Shard, dim: Any, keepdim: bool, largest: bool, what: str) -> Tensor:
    """The maximum, or with ``largest`` off the minimum, over ``dim``; ``None`` stands for all dimensions.

    Where all dimensions that are cut are reduced, the result is a whole tensor on every rank; where none is, a shard.
    Raises ``ValueError`` where only some of them are reduced, and for an image without elements.
    """
    axes = axes_of(x, dim, what)
    if not x.numel():
        raise ValueError(f"{what}: an image of {tuple(x.shape)} has no elements")
    if not whole(x, axes, what):
        return remaining(x, (torch.amax if largest else torch.amin)(x.local, axes, keepdim), axes, keepdim)
    extremes: Tensor = _Extreme.apply(x.space.link, what, x.local, axes, largest)  # type: ignore[no-untyped-call]
    return extremes if keepdim else extremes.squeeze(axes)


def _register(name: str, largest: bool) -> None:
    """Register the functions of torch for the extremes called ``name``, "max" or "min"."""
    values, indices, elementwise = f"a{name}", f"arg{name}", getattr(torch, f"{name}imum")

    @handles(getattr(torch, values), getattr(Tensor, values))
    def values_over(input: Shard, dim: Any = (), keepdim: bool = False) -> Tensor:
        return extreme(input, dim, keepdim, largest, current_layer(values))

    @handles(getattr(torch, name), getattr(Tensor, name))
    def values_and_indices(input: Any, dim: Any = None, keepdim: bool = False, *, other: Any = None) -> Any:
        """The extreme of all elements, those along one dimension with their positions, or those of two images."""
        what = current_layer(name)
        other = dim if isinstance(dim, Tensor) else other
        if other is not None:
            like = space_of(input, other)
            return like.like(elementwise(operand(like, input, what), operand(like, other, what)))
        return (
            extreme(input, None, False, largest, what)
            if dim is None
            else _along(input, getattr(torch, name), dim, keepdim, what)
        )

    @handles(getattr(torch, indices), getattr(Tensor, indices))
    def indices_along(input: Shard, dim: int | None = None, keepdim: bool = False) -> Any:
        what = current_layer(indices)
        if dim is None:
            raise ValueError(f"{what}: dim=None: a dimension that is not cut across ranks would do")
        return _along(input, getattr(torch, indices), dim, keepdim, what)


def _along(x: Shard, function: Callable[..., Any], dim: int, keepdim: bool, what: str) -> Any:
    """``function``, which returns one tensor or several, along a dimension that is not cut."""
    front = free(x, dim, what)
    result = function(x.local, front, keepdim)
    if isinstance(result, Tensor):
        return remaining(x, result, [front], keepdim)
    return type(result)([remaining(x, part, [front], keepdim) for part in result])


_register("max", True)
_register("min", False)


@handles(torch.any, Tensor.any)
def _any(input: Shard, dim: Any = None, keepdim: bool = False) -> Tensor:
    return extreme(input.like(input.local != 0), dim, keepdim, True, current_layer("any"))


@handles(torch.all, Tensor.all)
def _all(input: Shard, dim: Any = None, keepdim: bool = False) -> Tensor:
    return extreme(input.like(input.local != 0), dim, keepdim, False, current_layer("all"))
