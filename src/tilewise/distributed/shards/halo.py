"""Fetches a rank's part together with its halo, for functions that read windows, such as pooling."""

from __future__ import annotations

import itertools
from collections.abc import Mapping

import torch

from tilewise.distributed.parts.exchange import fetch
from tilewise.distributed.parts.layout import Interval, Layout, output_cuts, transfer
from tilewise.distributed.shards.shard import Shard
from tilewise.problems.conv.axis import Axis

__all__ = ["window", "windows"]


def windows(x: Shard, axes: Mapping[int, Axis], what: str, fill: float = 0.0) -> tuple[torch.Tensor, Layout]:
    """All elements that this rank's outputs read along dimensions that are cut, and the layout of the outputs.

    ``axes`` has those dimensions, counted from the end. An output belongs to the rank that holds the centre of its
    window. ``fill`` stands for padding, so that nothing is left to be padded along these dimensions. Where this rank
    has no outputs, the tensor has no elements.
    """
    layout = x.spatial
    out = layout.with_cuts(
        {dim: output_cuts(cuts, axes[dim]) for dim, cuts in zip(layout.grid.dims, layout.cuts, strict=True)}
    )
    needs: list[tuple[Interval, ...]] = []
    pads: list[Interval] = []
    for dim, cuts, coord in zip(layout.grid.dims, out.cuts, layout.grid.coords, strict=True):
        needs_and_pads = [window(axes[dim], start, stop) for start, stop in itertools.pairwise(cuts)]
        needs.append(tuple(need for need, _ in needs_and_pads))
        pads.append(needs_and_pads[coord][1])
    moves = transfer(layout, tuple(needs))
    return fetch(x.space.link, what, layout, moves, x.local, tuple(pads), fill), out


def window(axis: Axis, start: int, stop: int) -> tuple[Interval, Interval]:
    """The range of inputs that outputs ``[start, stop)`` read, and the elements of padding before and after it."""
    if start == stop:
        return (0, 0), (0, 0)
    first, last = start * axis.stride - axis.before, (stop - 1) * axis.stride - axis.before + axis.reach
    begin = min(max(first, 0), axis.size)
    end = max(min(last, axis.size), begin)
    return (begin, end), (max(min(0, last) - first, 0), max(last - max(first, axis.size), 0))
