"""Maxima, minima and where they are, over an image to what every rank gets, or over channels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tilewise.comm.link import Link
from tilewise.distributed.layers.reductions import axes_of, remaining, whole
from tilewise.distributed.layers.shapes import free
from tilewise.distributed.names import current_layer
from tilewise.distributed.replicated import sum_gradient
from tilewise.distributed.shard import Shard, handles, operand, space_of

Tensor = torch.Tensor


class _Extreme(torch.autograd.Function):
    """Maxima (or minima) over ``axes`` of all parts; as torch's, the gradient is shared by all that are as large."""

    @staticmethod
    def forward(ctx: Any, link: Link, what: str, part: Tensor, axes: list[int], largest: bool) -> Tensor:
        ctx.link, ctx.what, ctx.axes = link, what, axes
        find = torch.amax if largest else torch.amin
        with link.telling(what):
            if part.numel():
                own = find(part, axes, True)
            else:
                shape = [1 if d in axes else n for d, n in enumerate(part.shape)]
                own = part.new_full(shape, _least(part.dtype) if largest else _most(part.dtype))
            # Not a reduction by the backend, of which none says what becomes of NaN.
            pending = link.exchange(what, [(i, own) for i in link.others], [(i, own.shape) for i in link.others], own)
            found = find(torch.stack([own, *pending.wait()]), 0)
        ctx.save_for_backward(part, found)
        return found

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None, Tensor, None, None]:
        part, found = ctx.saved_tensors
        what = f"the backward of {ctx.what}"
        with ctx.link.telling(what):
            mine = (part == found) | (part.isnan() & found.isnan())
            count = ctx.link.sum(what, mine.sum(ctx.axes, True))
            return None, None, mine * sum_gradient(ctx.link, what, gradient / count), None, None


def _least(dtype: torch.dtype) -> Any:
    return -float("inf") if dtype.is_floating_point else False if dtype is torch.bool else torch.iinfo(dtype).min


def _most(dtype: torch.dtype) -> Any:
    return float("inf") if dtype.is_floating_point else True if dtype is torch.bool else torch.iinfo(dtype).max


def extreme(x: Shard, dim: Any, keepdim: bool, largest: bool, what: str) -> Tensor:
    """The maximum over ``dim`` (``None``: over all): whole on every rank where all that is cut is reduced.

    Raises ``ValueError`` where some of it is and some not, and for an image without elements.
    """
    axes = axes_of(x, dim, what)
    if not x.numel():
        raise ValueError(f"{what}: an image of {tuple(x.shape)} has no elements")
    if not whole(x, axes, what):
        return remaining(x, (torch.amax if largest else torch.amin)(x.local, axes, keepdim), axes, keepdim)
    found: Tensor = _Extreme.apply(x.space.link, what, x.local, axes, largest)  # type: ignore[no-untyped-call]
    return found if keepdim else found.squeeze(axes)


def _extremes(name: str, largest: bool) -> None:
    values, indices, meets = f"a{name}", f"arg{name}", getattr(torch, f"{name}imum")

    @handles(getattr(torch, values), getattr(Tensor, values))
    def several(input: Shard, dim: Any = (), keepdim: bool = False) -> Tensor:
        return extreme(input, dim, keepdim, largest, current_layer(values))

    @handles(getattr(torch, name), getattr(Tensor, name))
    def one(input: Any, dim: Any = None, keepdim: bool = False, *, other: Any = None) -> Any:
        """Of all, of one dimension with the places of the extremes, or of two images element by element."""
        what = current_layer(name)
        other = dim if isinstance(dim, Tensor) else other
        if other is not None:
            like = space_of(input, other)
            return like.like(meets(operand(like, input, what), operand(like, other, what)))
        return (
            extreme(input, None, False, largest, what)
            if dim is None
            else _along(input, getattr(torch, name), dim, keepdim, what)
        )

    @handles(getattr(torch, indices), getattr(Tensor, indices))
    def where(input: Shard, dim: int | None = None, keepdim: bool = False) -> Any:
        what = current_layer(indices)
        if dim is None:
            raise ValueError(f"{what}: dim=None: a dimension that is not cut across ranks would do")
        return _along(input, getattr(torch, indices), dim, keepdim, what)


def _along(x: Shard, function: Callable[..., Any], dim: int, keepdim: bool, what: str) -> Any:
    """``function`` of one dimension that is not cut, which gives one tensor or several."""
    front = free(x, dim, what)
    found = function(x.local, front, keepdim)
    if isinstance(found, Tensor):
        return remaining(x, found, [front], keepdim)
    return type(found)([remaining(x, part, [front], keepdim) for part in found])


_extremes("max", True)
_extremes("min", False)


@handles(torch.any, Tensor.any)
def _any(input: Shard, dim: Any = None, keepdim: bool = False) -> Tensor:
    return extreme(input.like(input.local != 0), dim, keepdim, True, current_layer("any"))


@handles(torch.all, Tensor.all)
def _all(input: Shard, dim: Any = None, keepdim: bool = False) -> Tensor:
    return extreme(input.like(input.local != 0), dim, keepdim, False, current_layer("all"))
