"""What points that were not measured are expected to reach, by those that were.

How well a size suits the kernels depends mostly on that size alone: whether it fills whole tiles, or which solver takes
it. So the logarithm of the rate is taken to be a sum with a term for each axis, as in an analysis of variance. The
terms are fitted to what was measured, and between measured sizes of an axis they are interpolated.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence

from tilewise.advice.axes import Axis
from tilewise.advice.points import Point
from tilewise.advice.sweep import Sizes

__all__ = ["Outlook"]

SWEEPS = 8
"""Rounds of fitting one axis after the other; a few would do, as most points share their sizes with others."""
SHRINK = 0.25
"""Added to the number of points behind a term: what a single point says of a size is not taken in full."""
MOST_POINTS = 600
"""Most points that are looked at: of axes beyond that, only sizes with the best terms."""


class Outlook:
    """Expected rates at the sizes of ``axes``, by the rates of ``points`` that were measured."""

    def __init__(self, axes: Sequence[Axis], points: Sequence[Point]) -> None:
        self._axes = axes
        measured = [(point.sizes, math.log(point.rate)) for point in points if point.rate]
        self._mean = sum(value for _, value in measured) / max(1, len(measured))
        self._terms: list[dict[int, float]] = [{} for _ in axes]
        for _ in range(SWEEPS):
            for place in range(len(axes)):
                self._fit(place, measured)
        self._sorted = [sorted(terms) for terms in self._terms]

    def _fit(self, place: int, measured: Sequence[tuple[Sizes, float]]) -> None:
        """Fit the terms of one axis to what those of the others leave over."""
        left: dict[int, list[float]] = {}
        for sizes, value in measured:
            others = sum(
                terms.get(size, 0.0)
                for axis, (terms, size) in enumerate(zip(self._terms, sizes, strict=True))
                if axis != place
            )
            left.setdefault(sizes[place], []).append(value - self._mean - others)
        self._terms[place] = {size: sum(values) / (len(values) + SHRINK) for size, values in left.items()}

    def rate(self, sizes: Sizes) -> float:
        """TFLOP/s that the point at ``sizes`` is expected to reach."""
        return math.exp(self._mean + sum(self._term(place, size) for place, size in enumerate(sizes)))

    def _term(self, place: int, size: int) -> float:
        """The term of a size, between measured ones in proportion and beyond them that of the last."""
        terms, known = self._terms[place], self._sorted[place]
        if size in terms or not known:
            return terms.get(size, 0.0)
        after = bisect.bisect(known, size)
        if after in (0, len(known)):
            return terms[known[min(after, len(known) - 1)]]
        low, high = known[after - 1], known[after]
        share = (size - low) / (high - low)
        return (1 - share) * terms[low] + share * terms[high]

    def unmeasured(self, measured: Mapping[Sizes, Point]) -> Iterator[Sizes]:
        """Points of sizes that were each measured in another point."""
        most = max(2, math.floor(MOST_POINTS ** (1 / len(self._axes))))
        lists: list[list[int]] = []
        for axis, terms in zip(self._axes, self._terms, strict=True):
            # The ends always: the least work a sample, and the most samples.
            ends = [size for size in (axis.values[0], axis.values[-1]) if size in terms]
            by_term = sorted(terms, key=lambda size, terms=terms: -terms[size])  # type: ignore[misc]
            lists.append(list(dict.fromkeys([*ends, *by_term]))[:most])
        return (sizes for sizes in itertools.product(*lists) if sizes not in measured)
