"""Parts with what lies around them: the general way for functions that read windows."""

from __future__ import annotations

import itertools
from collections.abc import Mapping

import torch

from tilewise.axis import Axis
from tilewise.distributed.exchange import fetch
from tilewise.distributed.layout import Interval, Layout, output_cuts, transfer
from tilewise.distributed.shard import Shard

__all__ = ["window", "windows", "with_halo"]


def with_halo(
    x: Shard, before: Mapping[int, int], after: Mapping[int, int], what: str, fill: float = 0.0
) -> torch.Tensor:
    """This rank's part with ``before`` and ``after`` more elements along dimensions that are cut.

    Dimensions are counted from the end; ``fill`` stands for what is outside of the image. An empty part gets nothing.
    Backward sends the gradients of what came from other ranks home and adds them there. ``what`` names the layer.
    Every rank calls it at the same point of the program.
    """
    layout = x.spatial
    needs, pads = [], []
    for dim, cuts, coord in zip(layout.grid.dims, layout.cuts, layout.grid.coords, strict=True):
        wider = []
        for start, stop in itertools.pairwise(cuts):
            empty = start == stop
            wider.append((start, stop) if empty else (start - before.get(dim, 0), stop + after.get(dim, 0)))
        clipped = [(min(max(start, 0), cuts[-1]), max(min(stop, cuts[-1]), 0)) for start, stop in wider]
        needs.append(tuple(clipped))
        pads.append((clipped[coord][0] - wider[coord][0], wider[coord][1] - clipped[coord][1]))
    return fetch(x.space.link, what, layout, transfer(layout, tuple(needs)), x.local, tuple(pads), fill)


def windows(x: Shard, axes: Mapping[int, Axis], what: str, fill: float = 0.0) -> tuple[torch.Tensor, Layout]:
    """All that this rank's outputs read along dimensions that are cut, and the layout of the outputs.

    ``axes`` has those dimensions, counted from the end. An output belongs to the rank that holds the centre of its
    window. ``fill`` stands for padding; nothing is left to be padded along these dimensions. Where this rank has no
    outputs, nor has the tensor elements.
    """
    layout = x.spatial
    out = layout.with_cuts(
        {dim: output_cuts(cuts, axes[dim]) for dim, cuts in zip(layout.grid.dims, layout.cuts, strict=True)}
    )
    needs: list[tuple[Interval, ...]] = []
    pads: list[Interval] = []
    for dim, cuts, coord in zip(layout.grid.dims, out.cuts, layout.grid.coords, strict=True):
        found = [window(axes[dim], start, stop) for start, stop in itertools.pairwise(cuts)]
        needs.append(tuple(need for need, _ in found))
        pads.append(found[coord][1])
    moves = transfer(layout, tuple(needs))
    return fetch(x.space.link, what, layout, moves, x.local, tuple(pads), fill), out


def window(axis: Axis, start: int, stop: int) -> tuple[Interval, Interval]:
    """The inputs that outputs ``[start, stop)`` read, and how many elements of padding before and after them."""
    if start == stop:
        return (0, 0), (0, 0)
    first, last = start * axis.stride - axis.before, (stop - 1) * axis.stride - axis.before + axis.reach
    begin = min(max(first, 0), axis.size)
    end = max(min(last, axis.size), begin)
    return (begin, end), (max(min(0, last) - first, 0), max(last - max(first, axis.size), 0))
