"""Between whole tensors, the same on every rank, and parts of them."""

from __future__ import annotations

from typing import Any

import torch

from tilewise.comm.link import Link
from tilewise.distributed.exchange import assemble, send_boxes, shape_of, view
from tilewise.distributed.layout import Layout, Transfer, transfer
from tilewise.distributed.names import current_layer
from tilewise.distributed.shard import Shard, Space

__all__ = ["gather", "scatter", "sum_over_ranks"]


def _all(layout: Layout) -> Transfer:
    """The transfer by which every rank gets everything."""
    return transfer(
        layout, tuple(((0, size),) * ranks for size, ranks in zip(layout.sizes, layout.grid.shape, strict=True))
    )


def _gathered(link: Link, what: str, layout: Layout, part: torch.Tensor) -> torch.Tensor:
    moves = _all(layout)
    with link.telling(what):
        pending = send_boxes(link, what, layout, moves, part)
        out = part.new_empty(shape_of(part, layout.grid.dims, moves.need))
        return assemble(layout, moves, part, pending.wait(), out)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, link: Link, what: str, layout: Layout, part: torch.Tensor) -> torch.Tensor:
        ctx.layout = layout
        return _gathered(link, what, layout, part)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[None, None, None, torch.Tensor]:
        return None, None, None, view(gradient, ctx.layout.grid.dims, ctx.layout.own)


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, link: Link, layout: Layout, whole: torch.Tensor) -> torch.Tensor:
        ctx.link, ctx.layout = link, layout
        return view(whole, layout.grid.dims, layout.own).clone(memory_format=torch.contiguous_format)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[None, None, torch.Tensor]:
        return None, None, _gathered(ctx.link, "the backward of scatter", ctx.layout, gradient)


class _SumOverRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, link: Link, what: str, term: torch.Tensor) -> torch.Tensor:
        with link.telling(what):
            return link.sum(what, term.clone(memory_format=torch.contiguous_format))

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[None, None, torch.Tensor]:
        return None, None, gradient


def gather(shard: Shard) -> torch.Tensor:
    """The whole tensor on every rank; its gradient, the same on all, is cut again."""
    what = current_layer("gather")
    whole: torch.Tensor = _Gather.apply(shard.space.link, what, shard.spatial, shard.local)  # type: ignore[no-untyped-call]
    return whole


def scatter(whole: torch.Tensor, layout: Layout, space: Space) -> Shard:
    """This rank's part of ``whole``, which is the same on every rank; its gradient is put together on all."""
    return Shard.of(_Scatter.apply(space.link, layout, whole), layout, space)  # type: ignore[no-untyped-call]


def sum_over_ranks(link: Link, what: str, term: torch.Tensor) -> torch.Tensor:
    """The sum of the ranks' terms, a replicated tensor: its gradient is the same on all ranks, and each term's too."""
    total: torch.Tensor = _SumOverRanks.apply(link, what, term)  # type: ignore[no-untyped-call]
    return total
