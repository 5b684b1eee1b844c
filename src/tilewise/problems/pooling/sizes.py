"""Sizes of pooled results, and the windows that each result is made of, along one axis."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Window", "pooled", "windows"]


@dataclass(frozen=True, slots=True)
class Window:
    """The part of a window that lies inside the input, along one axis.

    Its elements ``first`` to ``first + count - 1`` are inside, of which the first one is input ``start``. ``padded``
    counts those that lie in the input or in its padding.
    """

    first: int
    count: int
    start: int
    padded: int


def pooled(extent: int, kernel: int, stride: int, padding: int, dilation: int, ceil: bool) -> int:
    """The results along one axis, as torch counts them.

    With ``ceil`` a window may reach beyond the padding, but must begin within the input or the padding before it.
    """
    over = extent + 2 * padding - dilation * (kernel - 1) - 1
    count = (over + (stride - 1 if ceil else 0)) // stride + 1
    return count - 1 if ceil and (count - 1) * stride >= extent + padding else count


def windows(extent: int, kernel: int, stride: int, padding: int, dilation: int, results: int) -> Sequence[Window]:
    """The windows of all ``results`` along one axis with ``extent`` inputs."""
    found = []
    for index in range(results):
        begin = index * stride - padding
        first = max(0, -(begin // dilation))
        last = min(kernel, (extent - 1 - begin) // dilation + 1)
        padded = min(begin + kernel, extent + padding) - begin
        found.append(Window(first, last - first, begin + first * dilation, padded))
    return found
