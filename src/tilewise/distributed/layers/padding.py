"""Padding by a number, mirrored, repeated or from the other side, and cropping: each may need other ranks' elements."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F

from tilewise.distributed.exchange import fetch
from tilewise.distributed.layout import Cuts, Interval, transfer
from tilewise.distributed.names import current_layer
from tilewise.distributed.shard import Shard, handles


@functools.lru_cache(maxsize=1024)
def _check(shape: tuple[int, ...], pad: tuple[int, ...], mode: str) -> None:
    """Raise torch's errors."""
    F.pad(torch.empty(shape, dtype=torch.float32, device="meta"), pad, mode)


def padded_cuts(cuts: Cuts, before: int, after: int) -> Cuts:
    """Cut points of a dimension with that many elements more on each side, or fewer: each stays where it is."""
    out = cuts[-1] + before + after
    return (0, *(min(max(cut + before, 0), out) for cut in cuts[1:-1]), out)


def _constant(x: Shard, sides: dict[int, Interval], value: float) -> Shard:
    """Nothing travels: what is around the image belongs to the ranks at its borders."""
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
    """``x`` alone, in a graph that goes on to ``piece`` too: all ranks take part in the backward of its exchange.

    In the backward of that as well, for which ``piece``'s gradient is to depend on ``x``'s.
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
    """More elements along a dimension that is cut among several, of the image's own: for the ranks at its borders."""
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
        every = {dim: sides.get(dim, (0, 0)) for dim in {*sides, *x.spatial.grid.dims}}
        return _constant(x, every, 0.0 if value is None else value)
    mine = {dim for dim, points in zip(x.spatial.grid.dims, x.spatial.cuts, strict=True) if len(points) > 2}
    crops = {dim: (min(a, 0), min(b, 0)) if dim in mine else (0, 0) for dim, (a, b) in sides.items()}
    crops = {**dict.fromkeys(x.spatial.grid.dims, (0, 0)), **crops}
    cropped = any(side for pair in crops.values() for side in pair)
    # A circle closes where the image is cropped to; mirrors and borders stay where they were.
    if cropped and mode == "circular":
        x = _constant(x, crops, 0.0)
    for dim in sorted(mine & set(sides)):
        before, after = (max(side, 0) for side in sides[dim])
        if before or after:
            x = _around(x, dim, before, after, mode, what)
    if cropped and mode != "circular":
        x = _constant(x, crops, 0.0)
    free = [side for i in range(len(sides)) for side in ((0, 0) if -1 - i in mine else sides[-1 - i])]
    if not any(free):
        return x
    part, layout = x.local, x.spatial
    alone = {dim: cuts for dim, cuts in zip(layout.grid.dims, layout.cuts, strict=True) if dim in sides}
    out = layout.with_cuts(
        {dim: padded_cuts(cuts, *((0, 0) if dim in mine else sides[dim])) for dim, cuts in alone.items()}
    )
    if part.numel():
        return x.like(F.pad(part, free, mode), out)
    # In graphs of the backward torch has its pads depend on what is padded: so that all ranks' do, this does too.
    of_none = (part * part).sum() if mode != "circular" else 0
    return x.like(F.pad(part, free, "constant") + of_none, out)
