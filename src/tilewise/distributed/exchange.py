"""Boxes of a tensor sent and received by a transfer, forwards and backwards."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch

from tilewise.comm.link import Link, Pending
from tilewise.distributed.layout import Box, Grid, Layout, Transfer, transfer

__all__ = ["add_back", "assemble", "bring_home", "fetch", "redistribute", "send_back", "send_boxes", "shape_of", "view"]

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
    pending.add_to([view(gradient, dims, box, origin) for _, box in moves.sends])
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
    """All that this rank needs of a cut tensor, put together; backward is the exact adjoint.

    Gives a token as well, without elements, of which a graph of the backward depends: the ranks meet again in the
    backward of this for what is computed of that graph, even where some ranks' graphs alone lead here.
    """

    @staticmethod
    def forward(
        ctx: Any, link: Link, what: str, layout: Layout, moves: Transfer, pads: Pads, fill: float, local: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.link, ctx.what, ctx.layout, ctx.moves, ctx.pads = link, what, layout, moves, pads
        ctx.shape = local.shape
        with link.telling(what):
            pending = send_boxes(link, what, layout, moves, local)
            out = local.new_empty(_padded(shape_of(local, layout.grid.dims, moves.need), layout, pads))
            if any(side for pair in pads for side in pair):
                out.fill_(fill)
            assemble(layout, moves, local, pending.wait(), _inside(out, layout, pads))
        token = local.new_empty(0)
        ctx.save_for_backward(token)
        return out, token

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor, _: torch.Tensor) -> tuple[Any, ...]:
        (token,) = ctx.saved_tensors
        what = f"the backward of {ctx.what}"
        own = _BringHome.apply(ctx.link, what, ctx.layout, ctx.moves, ctx.pads, ctx.shape, gradient, token)  # type: ignore[no-untyped-call]
        return None, None, None, None, None, None, own


class _BringHome(torch.autograd.Function):
    """The adjoint of :class:`_Fetch`, of which that is the adjoint too where ``fill`` is zero."""

    @staticmethod
    def forward(
        ctx: Any, link: Link, what: str, layout: Layout, moves: Transfer, pads: Pads, shape: Sequence[int],
        fetched: torch.Tensor, token: torch.Tensor | None,
    ) -> torch.Tensor:  # fmt: skip
        ctx.link, ctx.what, ctx.layout, ctx.moves, ctx.pads = link, what, layout, moves, pads
        ctx.tokens = None if token is None else token.new_zeros(0)
        dims, origin = layout.grid.dims, [start for start, _ in moves.need]
        with link.telling(what):
            inside = _inside(fetched, layout, pads)
            home = [view(inside, dims, box, origin) for _, box in moves.receives]
            own = fetched.new_zeros(shape)
            pending = send_back(link, what, layout.grid, moves, home, own)
            if moves.own is not None:
                place = view(own, dims, moves.own, [start for start, _ in layout.own])
                place.copy_(view(inside, dims, moves.own, origin))
            return add_back(layout, moves, pending, own)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        what = f"the backward of {ctx.what}"
        found = fetch(ctx.link, what, ctx.layout, ctx.moves, gradient, ctx.pads)
        return None, None, None, None, None, None, found, ctx.tokens


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
    found: torch.Tensor = _Fetch.apply(link, what, layout, moves, sides, fill, local)[0]  # type: ignore[no-untyped-call]
    return found


def bring_home(
    link: Link, what: str, layout: Layout, moves: Transfer, pads: Pads, shape: Sequence[int], fetched: torch.Tensor
) -> torch.Tensor:
    """The adjoint of :func:`fetch`: all ranks' ``fetched`` added up where they are at home; differentiable.

    ``shape`` is that of this rank's part.
    """
    own: torch.Tensor = _BringHome.apply(link, what, layout, moves, pads, shape, fetched, None)  # type: ignore[no-untyped-call]
    return own


def redistribute(link: Link, what: str, layout: Layout, wanted: Layout, local: torch.Tensor) -> torch.Tensor:
    """This rank's part of a tensor under the layout ``wanted``, from its part under ``layout``; differentiable."""
    needs = tuple(tuple(itertools.pairwise(cuts)) for cuts in wanted.cuts)
    return fetch(link, what, layout, transfer(layout, needs), local)
