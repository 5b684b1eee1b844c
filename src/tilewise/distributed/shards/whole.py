"""Gathers the parts of a tensor to the whole on every rank, and scatters a whole tensor to parts."""

from __future__ import annotations

from typing import Any

import torch

from tilewise.comm.link import Link
from tilewise.distributed.parts.exchange import assemble, send_boxes, shape_of, view
from tilewise.distributed.parts.layout import Layout, Transfer, transfer
from tilewise.distributed.parts.names import current_layer
from tilewise.distributed.shards.shard import Shard, Space

__all__ = ["gather", "scatter"]


def _gather_transfer(layout: Layout) -> Transfer:
    """The transfer by which every rank gets all parts."""
    return transfer(
        layout, tuple(((0, size),) * ranks for size, ranks in zip(layout.sizes, layout.grid.shape, strict=True))
    )


def _gathered(link: Link, what: str, layout: Layout, part: torch.Tensor) -> torch.Tensor:
    """The whole tensor, from this rank's ``part`` and those of the others."""
    moves = _gather_transfer(layout)
    with link.telling(what):
        pending = send_boxes(link, what, layout, moves, part)
        out = part.new_empty(shape_of(part, layout.grid.dims, moves.need))
        return assemble(layout, moves, part, pending.wait(), out)


class _Gather(torch.autograd.Function):
    """The whole tensor; ``token`` is that of :class:`_Scatter` in its second backward."""

    @staticmethod
    def forward(
        ctx: Any, link: Link, what: str, layout: Layout, part: torch.Tensor, token: torch.Tensor | None
    ) -> torch.Tensor:
        ctx.link, ctx.layout = link, layout
        ctx.tokens = None if token is None else token.new_zeros(0)
        return _gathered(link, what, layout, part)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        if torch.is_grad_enabled():
            part: torch.Tensor = _Scatter.apply(ctx.link, ctx.layout, gradient)[0]  # type: ignore[no-untyped-call]
        else:
            part = view(gradient, ctx.layout.grid.dims, ctx.layout.own)
        return None, None, None, part, ctx.tokens


class _Scatter(torch.autograd.Function):
    """This rank's part, and a token without elements.

    The graph of the backward depends on the token, so that a second backward goes through this on every rank.
    """

    @staticmethod
    def forward(ctx: Any, link: Link, layout: Layout, whole: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.link, ctx.layout = link, layout
        token = whole.new_empty(0)
        ctx.save_for_backward(token)
        return view(whole, layout.grid.dims, layout.own).clone(memory_format=torch.contiguous_format), token

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor, _: torch.Tensor) -> tuple[None, None, torch.Tensor]:
        what, (token,) = "the backward of scatter", ctx.saved_tensors
        whole: torch.Tensor = _Gather.apply(ctx.link, what, ctx.layout, gradient, token)  # type: ignore[no-untyped-call]
        return None, None, whole


def gather(shard: Shard) -> torch.Tensor:
    """The whole tensor on every rank. Its gradient, the same on all ranks, is cut again."""
    what = current_layer("gather")
    whole: torch.Tensor = _Gather.apply(shard.space.link, what, shard.spatial, shard.local, None)  # type: ignore[no-untyped-call]
    return whole


def scatter(whole: torch.Tensor, layout: Layout, space: Space) -> Shard:
    """This rank's part of ``whole``, which is the same on every rank. The gradient is put together on all ranks."""
    return Shard.of(_Scatter.apply(space.link, layout, whole)[0], layout, space)  # type: ignore[no-untyped-call]
