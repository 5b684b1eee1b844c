"""Exchanges boxes of a tensor between ranks, and their gradients in backward, as a :class:`Transfer` says."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch

from tilewise.comm.link import Link, Pending
from tilewise.distributed.parts.layout import Box, Grid, Layout, Transfer, transfer

__all__ = ["add_back", "assemble", "bring_home", "fetch", "redistribute", "send_back", "send_boxes", "shape_of", "view"]

Pads = tuple[tuple[int, int], ...]
"""Elements of padding (before, after) along each dimension that is cut."""


def view(tensor: torch.Tensor, dims: Sequence[int], box: Box, origin: Sequence[int] | None = None) -> torch.Tensor:
    """A view of the elements of ``box`` along ``dims``.

    The first element of ``tensor`` along these has the position ``origin`` in the whole tensor, by default 0.
    """
    for i, (dim, (start, stop)) in enumerate(zip(dims, box, strict=True)):
        first = start - (0 if origin is None else origin[i])
        if first or stop - start != tensor.shape[dim]:
            tensor = tensor.narrow(dim, first, stop - start)
    return tensor


def shape_of(like: torch.Tensor, dims: Sequence[int], box: Box) -> list[int]:
    """The shape of ``box``, whose sizes along other dimensions than ``dims`` are those of ``like``."""
    shape = list(like.shape)
    for dim, (start, stop) in zip(dims, box, strict=True):
        shape[dim] = stop - start
    return shape


def send_boxes(link: Link, what: str, layout: Layout, moves: Transfer, local: torch.Tensor) -> Pending:
    """Send the boxes that others need of ``local``, this rank's part, and receive those that this rank needs.

    ``what`` names the exchange in errors.
    """
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
    """Send the gradients of the boxes received to the ranks that own them, and receive those of the boxes sent.

    This is the adjoint of :func:`send_boxes`. ``like`` has the shape of this rank's part.
    """
    return link.exchange(
        what,
        [(index, gradient) for (index, _), gradient in zip(moves.receives, gradients, strict=True)],
        [(index, shape_of(like, grid.dims, box)) for index, box in moves.sends],
        like,
    )


def add_back(layout: Layout, moves: Transfer, pending: Pending, gradient: torch.Tensor) -> torch.Tensor:
    """Add the gradients that arrive to ``gradient``, that of this rank's part, in place, and return it."""
    dims, origin = layout.grid.dims, [start for start, _ in layout.own]
    pending.add_to([view(gradient, dims, box, origin) for _, box in moves.sends])
    return gradient


def assemble(
    layout: Layout, moves: Transfer, local: torch.Tensor, arrived: Sequence[torch.Tensor], out: torch.Tensor
) -> torch.Tensor:
    """Copy what this rank needs into ``out``, each box at its place, and return it.

    ``local`` is this rank's part, ``arrived`` has the boxes of other ranks.
    """
    dims, origin = layout.grid.dims, [start for start, _ in moves.need]
    if moves.own is not None:
        own_box = view(local, dims, moves.own, [start for start, _ in layout.own])
        view(out, dims, moves.own, origin).copy_(own_box)
    for (_, box), tensor in zip(moves.receives, arrived, strict=True):
        view(out, dims, box, origin).copy_(tensor)
    return out


class _Fetch(torch.autograd.Function):
    """Puts together what this rank needs of a cut tensor; backward is the exact adjoint.

    The second result is a token, a tensor without elements. The graph of the backward depends on it, so that a second
    backward goes through this exchange on every rank, even where only some ranks' other results lead here.
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
        part = _BringHome.apply(ctx.link, what, ctx.layout, ctx.moves, ctx.pads, ctx.shape, gradient, token)  # type: ignore[no-untyped-call]
        return None, None, None, None, None, None, part


class _BringHome(torch.autograd.Function):
    """The adjoint of :class:`_Fetch`. The adjoint of this is :class:`_Fetch` with a ``fill`` of zero."""

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
            sent = [view(inside, dims, box, origin) for _, box in moves.receives]
            part = fetched.new_zeros(shape)
            pending = send_back(link, what, layout.grid, moves, sent, part)
            if moves.own is not None:
                own_box = view(part, dims, moves.own, [start for start, _ in layout.own])
                own_box.copy_(view(inside, dims, moves.own, origin))
            return add_back(layout, moves, pending, part)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        what = f"the backward of {ctx.what}"
        fetched = fetch(ctx.link, what, ctx.layout, ctx.moves, gradient, ctx.pads)
        return None, None, None, None, None, None, fetched, ctx.tokens


def _padded(shape: list[int], layout: Layout, pads: Pads) -> list[int]:
    """``shape`` with the padding added, in place."""
    for dim, (before, after) in zip(layout.grid.dims, pads, strict=True):
        shape[dim] += before + after
    return shape


def _inside(tensor: torch.Tensor, layout: Layout, pads: Pads) -> torch.Tensor:
    """A view of ``tensor`` without its padding."""
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
    """Put together what this rank needs of a tensor whose part here is ``local``; differentiable.

    ``pads`` adds (before, after) elements of the value ``fill`` along each dimension that is cut.
    """
    sides = ((0, 0),) * len(layout.grid.dims) if pads is None else pads
    fetched: torch.Tensor = _Fetch.apply(link, what, layout, moves, sides, fill, local)[0]  # type: ignore[no-untyped-call]
    return fetched


def bring_home(
    link: Link, what: str, layout: Layout, moves: Transfer, pads: Pads, shape: Sequence[int], fetched: torch.Tensor
) -> torch.Tensor:
    """The adjoint of :func:`fetch`: add all ranks' ``fetched`` elements on the ranks that own them; differentiable.

    ``shape`` is that of this rank's part, which is returned.
    """
    part: torch.Tensor = _BringHome.apply(link, what, layout, moves, pads, shape, fetched, None)  # type: ignore[no-untyped-call]
    return part


def redistribute(link: Link, what: str, layout: Layout, wanted: Layout, local: torch.Tensor) -> torch.Tensor:
    """This rank's part of a tensor under the layout ``wanted``, from its part under ``layout``; differentiable."""
    needs = tuple(tuple(itertools.pairwise(cuts)) for cuts in wanted.cuts)
    return fetch(link, what, layout, transfer(layout, needs), local)
