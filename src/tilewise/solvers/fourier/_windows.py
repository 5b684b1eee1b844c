"""Tiles of a convolution along one axis, each small enough for a Fourier basis (Vasilache et al. 2014, section 6)."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass

from tilewise.problems.conv.axis import Axis
from tilewise.problems.conv.problem import Pass
from tilewise.solvers.common.bases import least, placement, result_placement

__all__ = ["Window", "covered", "most", "windows"]


@dataclass(frozen=True, slots=True)
class Window:
    """One tile along an axis.

    ``count`` elements of the image (in DGRAD of the gradient) from ``start`` on lie at ``lead`` in the basis. The
    result is ``result_count`` long, from ``result_start`` on, and lies at ``result_lead``. In WGRAD the result is the
    whole filter, and ``other_count`` elements of the gradient from ``other_start`` on lie at 0.
    """

    start: int
    count: int
    lead: int
    result_start: int
    result_count: int
    result_lead: int
    other_start: int = 0
    other_count: int = 0


@functools.lru_cache(maxsize=4096)
def windows(axis: Axis, pass_: Pass, size: int) -> tuple[tuple[Window, ...], int]:
    """Tiles of ``size`` outputs (in DGRAD inputs) and the least basis that holds them all.

    Tiles without any product are left out. Stride and dilation must be 1.
    """
    tiles, basis = [], 1
    for window, needed in _each(axis, pass_, size):
        tiles.append(window)
        basis = max(basis, needed)
    return tuple(tiles), basis


def _each(axis: Axis, pass_: Pass, size: int) -> Iterator[tuple[Window, int]]:
    """As :func:`windows`, with the basis that each tile needs."""
    extent = axis.size if pass_ is Pass.DGRAD else axis.out
    for start in range(0, extent, size):
        stop = min(start + size, extent)
        near = axis.writing(start, stop) if pass_ is Pass.DGRAD else axis.reading(start, stop)
        if near is None:
            continue
        first, _, part = near
        place = placement(part, "y" if pass_ is Pass.DGRAD else "x")
        result = result_placement(part, pass_)
        if not place.count or not result.count:
            continue
        data = (first + place.start, place.count, place.lead)
        if pass_ is Pass.WGRAD:
            window = Window(*data, 0, axis.kernel, 0, start, stop - start)
        else:
            window = Window(*data, start + result.start, result.count, result.lead)
        yield window, least(part, pass_)


def _fits(axis: Axis, pass_: Pass, size: int, basis: int) -> bool:
    """Whether ``basis`` holds every tile. It stops at the first that does not fit."""
    return all(needed <= basis for _, needed in _each(axis, pass_, size))


@functools.lru_cache(maxsize=4096)
def most(axis: Axis, pass_: Pass, basis: int) -> int:
    """The largest tile that ``basis`` holds, 0 where it holds none; the whole axis if that fits."""
    extent = axis.size if pass_ is Pass.DGRAD else axis.out
    if axis.kernel > basis:
        return 0
    if _fits(axis, pass_, extent, basis):
        return extent
    inside = basis - axis.kernel + 1
    size = min(inside + axis.kernel, extent - 1)
    while size and not _fits(axis, pass_, size, basis):
        size -= 1
    return size


def covered(tiles: tuple[Window, ...], extent: int) -> bool:
    """Whether the tiles' results cover all of ``extent``."""
    return sum(tile.result_count for tile in tiles) == extent
