"""Padding (constant, reflected, replicated or circular) and cropping; some of them need elements of other ranks."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F

from tilewise.distributed.parts.exchange import fetch
from tilewise.distributed.parts.layout import Cuts, Interval, transfer
from tilewise.distributed.parts.names import current_layer
from tilewise.distributed.shards.shard import Shard, handles


@functools.lru_cache(maxsize=1024)
def _check(shape: tuple[int, ...], pad: tuple[int, ...], mode: str) -> None:
    """Raise torch's errors for wrong arguments."""
    F.pad(torch.empty(shape, dtype=torch.float32, device="meta"), pad, mode)


def padded_cuts(cuts: Cuts, before: int, after: int) -> Cuts:
    """The cut points of a dimension that is padded, or cropped by negative numbers: they stay at the same elements."""
    out = cuts[-1] + before + after
    return (0, *(min(max(cut + before, 0), out) for cut in cuts[1:-1]), out)


def _constant(x: Shard, sides: dict[int, Interval], value: float) -> Shard:
    """Pad with ``value``, or crop, without any exchange: padding belongs to the ranks at the image's borders.

    ``sides`` has (before, after) for each dimension that is padded or cut.
    """
    layout, part = x.spatial, x.local
    out = layout.with_cuts(
        {dim: padded_cuts(cuts, *sides[dim]) for dim, cuts in zip(layout.grid.dims, layout.cuts, strict=True)}
    )
    flat = []
    for i in range(part.dim()):
        dim = -1 - i
        before, after = sides.get(dim, (0, 0))
        if dim in layout.grid.dims:
            at = layout.grid.dims.index(dim)
            (start, stop), (first, last) = layout.own[at], out.own[at]
            first, last = first - before, last - before
            low, high = min(max(first, start), stop), max(min(last, stop), start)
            part = part.narrow(dim, low - start, max(high - low, 0))
            kept = max(high - low, 0)
            before = max(min(start, last) - first, 0)
            after = last - first - kept - before
        flat += [before, after]
    return x.like(F.pad(part, flat, "constant", value), out)


class _Beside(torch.autograd.Function):
    """Returns ``x``, which depends on ``piece`` in the graph, so that all ranks join the backward of its exchange.

    The gradient of ``piece`` is zero. It depends on that of ``x``, so that all ranks join a second backward, too.
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, piece: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(piece)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        (piece,) = ctx.saved_tensors
        return gradient, torch.zeros_like(piece) + gradient.flatten()[:0].sum()


def _around(x: Shard, dim: int, before: int, after: int, mode: str, what: str) -> Shard:
    """Pad along a dimension that is cut, with elements of the image, which are sent to the ranks at its borders."""
    layout, size = x.spatial, x.shape[dim]
    if mode == "circular" and max(before, after) > size:
        raise ValueError(
            f"{what}: pads of {before} and {after}: at most the {size} elements that cropping leaves would do"
        )
    at = layout.grid.dims.index(dim)
    coord, last = layout.grid.coords[at], layout.grid.shape[at] - 1
    first_source, last_source = {
        "reflect": ((1, before + 1), (size - 1 - after, size - 1)),
        "replicate": ((0, min(before, 1)), (size - min(after, 1), size)),
        "circular": ((size - before, size), (0, after)),
    }[mode]
    needs: list[tuple[Interval, ...]] = [tuple(itertools.pairwise(cuts)) for cuts in layout.cuts]
    needs[at] = (first_source, *((0, 0),) * (last - 1), last_source)
    piece = fetch(x.space.link, what, layout, transfer(layout, tuple(needs)), x.local)
    count = before if coord == 0 else after if coord == last else 0
    if not count:
        part: torch.Tensor = _Beside.apply(x.local, piece)  # type: ignore[no-untyped-call]
    else:
        if mode == "replicate":
            piece = piece.expand(*(count if d == piece.dim() + dim else -1 for d in range(piece.dim())))
        elif mode == "reflect":
            piece = piece.flip(dim)
        part = torch.cat([piece, x.local] if coord == 0 else [x.local, piece], dim)
    return x.like(part, layout.with_cuts({dim: padded_cuts(layout.cuts[at], before, after)}))


@handles(F.pad, torch._C._nn.pad)
def _pad(input: Shard, pad: Sequence[int], mode: str = "constant", value: float | None = None) -> Shard:
    what = current_layer("pad")
    x, amounts = input, tuple(pad)
    _check(tuple(x.shape), amounts, mode)
    sides = {-1 - i: (amounts[2 * i], amounts[2 * i + 1]) for i in range(len(amounts) // 2)}
    if mode == "constant":
        all_sides = {dim: sides.get(dim, (0, 0)) for dim in {*sides, *x.spatial.grid.dims}}
        return _constant(x, all_sides, 0.0 if value is None else value)
    cut_dims = {dim for dim, points in zip(x.spatial.grid.dims, x.spatial.cuts, strict=True) if len(points) > 2}
    crops = {dim: (min(a, 0), min(b, 0)) if dim in cut_dims else (0, 0) for dim, (a, b) in sides.items()}
    crops = {**dict.fromkeys(x.spatial.grid.dims, (0, 0)), **crops}
    cropped = any(side for pair in crops.values() for side in pair)
    # Circular padding takes elements of the cropped image, the other modes of the image before cropping.
    if cropped and mode == "circular":
        x = _constant(x, crops, 0.0)
    for dim in sorted(cut_dims & set(sides)):
        before, after = (max(side, 0) for side in sides[dim])
        if before or after:
            x = _around(x, dim, before, after, mode, what)
    if cropped and mode != "circular":
        x = _constant(x, crops, 0.0)
    free = [side for i in range(len(sides)) for side in ((0, 0) if -1 - i in cut_dims else sides[-1 - i])]
    if not any(free):
        return x
    part, layout = x.local, x.spatial
    alone = {dim: cuts for dim, cuts in zip(layout.grid.dims, layout.cuts, strict=True) if dim in sides}
    out = layout.with_cuts(
        {dim: padded_cuts(cuts, *((0, 0) if dim in cut_dims else sides[dim])) for dim, cuts in alone.items()}
    )
    if part.numel():
        return x.like(F.pad(part, free, mode), out)
    # The backward of torch's padding depends on its input. An empty part must have the same graph as those of others.
    zero = (part * part).sum() if mode != "circular" else 0
    return x.like(F.pad(part, free, "constant") + zero, out)
