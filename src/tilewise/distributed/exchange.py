"""Boxes of a tensor sent and received by a transfer, forwards and backwards."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch

from tilewise.comm.link import Link, Pending
from tilewise.distributed.layout import Box, Grid, Layout, Transfer, transfer

__all__ = ["add_back", "assemble", "fetch", "redistribute", "send_back", "send_boxes", "shape_of", "view"]

Pads = tuple[tuple[int, int], ...]


def view(tensor: torch.Tensor, dims: Sequence[int], box: Box, origin: Sequence[int] | None = None) -> torch.Tensor:
    """The elements of ``box`` along ``dims``, which are counted from ``origin``."""
    for i, (dim, (start, stop)) in enumerate(zip(dims, box, strict=True)):
        first = start - (0 if origin is None else origin[i])
        if first or stop - start != tensor.shape[dim]:
            tensor = tensor.narrow(dim, first, stop - start)
    return tensor


def shape_of(like: torch.Tensor, dims: Sequence[int], box: Box) -> list[int]:
    """Shape of the elements of ``box`` of a tensor like ``like``."""
    shape = list(like.shape)
    for dim, (start, stop) in zip(dims, box, strict=True):
        shape[dim] = stop - start
    return shape


def send_boxes(link: Link, what: str, layout: Layout, moves: Transfer, local: torch.Tensor) -> Pending:
    """Send the others what they need of ``local``, this rank's part, and receive what it needs."""
    dims, origin = layout.grid.dims, [start for start, _ in layout.own]
    return link.exchange(
        what,
        [(index, view(local, dims, box, origin)) for index, box in moves.sends],
        [(index, shape_of(local, dims, box)) for index, box in moves.receives],
        local,
    )


def send_back(
    link: Link, what: str, grid: Grid, moves: Transfer, gradients: Sequence[torch.Tensor], like: torch.Tensor
) -> Pending:
    """The adjoint's exchange: send home the gradients of the boxes received, and receive those of the boxes sent."""
    return link.exchange(
        what,
        [(index, gradient) for (index, _), gradient in zip(moves.receives, gradients, strict=True)],
        [(index, shape_of(like, grid.dims, box)) for index, box in moves.sends],
        like,
    )


def add_back(layout: Layout, moves: Transfer, pending: Pending, gradient: torch.Tensor) -> torch.Tensor:
    """Add what comes home to the gradient of this rank's part, in place."""
    dims, origin = layout.grid.dims, [start for start, _ in layout.own]
    pending.add_to([view(gradient, dims, box, origin) for _, box in moves.sends], moves.apart)
    return gradient


def assemble(
    layout: Layout, moves: Transfer, local: torch.Tensor, arrived: Sequence[torch.Tensor], out: torch.Tensor
) -> torch.Tensor:
    """Put what this rank needs, its own and what arrived, into ``out``, of which each box has its place."""
    dims, origin = layout.grid.dims, [start for start, _ in moves.need]
    if moves.own is not None:
        own = view(local, dims, moves.own, [start for start, _ in layout.own])
        view(out, dims, moves.own, origin).copy_(own)
    for (_, box), tensor in zip(moves.receives, arrived, strict=True):
        view(out, dims, box, origin).copy_(tensor)
    return out


class _Fetch(torch.autograd.Function):
    """All that this rank needs of a cut tensor, put together; backward is the exact adjoint."""

    @staticmethod
    def forward(
        ctx: Any, link: Link, what: str, layout: Layout, moves: Transfer, pads: Pads, fill: float, local: torch.Tensor
    ) -> torch.Tensor:
        ctx.link, ctx.what, ctx.layout, ctx.moves, ctx.pads = link, what, layout, moves, pads
        ctx.shape = local.shape
        with link.telling(what):
            pending = send_boxes(link, what, layout, moves, local)
            out = local.new_empty(_padded(shape_of(local, layout.grid.dims, moves.need), layout, pads))
            if any(side for pair in pads for side in pair):
                out.fill_(fill)
            assemble(layout, moves, local, pending.wait(), _inside(out, layout, pads))
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        link, layout, moves = ctx.link, ctx.layout, ctx.moves
        what = f"the backward of {ctx.what}"
        dims, origin = layout.grid.dims, [start for start, _ in moves.need]
        with link.telling(what):
            inside = _inside(gradient, layout, ctx.pads)
            home = [view(inside, dims, box, origin) for _, box in moves.receives]
            own = gradient.new_zeros(ctx.shape)
            pending = send_back(link, what, layout.grid, moves, home, own)
            if moves.own is not None:
                place = view(own, dims, moves.own, [start for start, _ in layout.own])
                place.copy_(view(inside, dims, moves.own, origin))
            add_back(layout, moves, pending, own)
        return None, None, None, None, None, None, own


def _padded(shape: list[int], layout: Layout, pads: Pads) -> list[int]:
    for dim, (before, after) in zip(layout.grid.dims, pads, strict=True):
        shape[dim] += before + after
    return shape


def _inside(tensor: torch.Tensor, layout: Layout, pads: Pads) -> torch.Tensor:
    for dim, (before, after) in zip(layout.grid.dims, pads, strict=True):
        if before or after:
            tensor = tensor.narrow(dim, before, tensor.shape[dim] - before - after)
    return tensor


def fetch(
    link: Link,
    what: str,
    layout: Layout,
    moves: Transfer,
    local: torch.Tensor,
    pads: Pads | None = None,
    fill: float = 0.0,
) -> torch.Tensor:
    """What this rank needs of a tensor whose part here is ``local``, put together; differentiable.

    ``pads`` adds (before, after) elements of ``fill`` around it along each dimension that is cut.
    """
    sides = ((0, 0),) * len(layout.grid.dims) if pads is None else pads
    found: torch.Tensor = _Fetch.apply(link, what, layout, moves, sides, fill, local)  # type: ignore[no-untyped-call]
    return found


def redistribute(link: Link, what: str, layout: Layout, wanted: Layout, local: torch.Tensor) -> torch.Tensor:
    """This rank's part of a tensor under the layout ``wanted``, from its part under ``layout``; differentiable."""
    needs = tuple(tuple(itertools.pairwise(cuts)) for cuts in wanted.cuts)
    return fetch(link, what, layout, transfer(layout, needs), local)
