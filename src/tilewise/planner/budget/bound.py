"""A lower bound on the best time under one sum of workspaces, and the points that it rules out.

If memory has a price in ms per byte, every kernel can choose for itself. The times and prices of these choices, less
the price of the whole budget, are no more than the best time (Lagrange's relaxation). Bisection finds the best price.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

__all__ = ["ROUNDING", "Points", "Relaxed"]

Array = np.ndarray[Any, np.dtype[Any]]
Points = Sequence[tuple[float, int]]
"""A kernel's front: pairs of ms for all its occurrences and bytes, fastest first."""

ROUNDING = 1e-12
"""The share of the time by which sums of the same numbers may differ. Nothing is ruled out by less."""
BISECTIONS = 60


@dataclass(frozen=True)
class Relaxed:
    """The choice of one of each kernel's ``points``, whose workspaces may sum to at most ``total`` bytes.

    The last points of all kernels together keep the total.
    """

    points: Sequence[Points]
    total: int

    @functools.cached_property
    def _table(self) -> tuple[Array, Array]:
        """Times and bytes, one row for each kernel, slowest first, so that of equal points the smaller is taken."""
        width = max(map(len, self.points))
        ms = np.full((len(self.points), width), np.inf)
        bytes_ = np.zeros((len(self.points), width), np.int64)
        for k, kernel_points in enumerate(self.points):
            ms[k, : len(kernel_points)] = [t for t, _ in reversed(kernel_points)]
            bytes_[k, : len(kernel_points)] = [size for _, size in reversed(kernel_points)]
        return ms, bytes_

    @functools.cached_property
    def price(self) -> float:
        """The price in ms per byte at which the kernels' own choices just keep the total."""
        ms, bytes_ = self._table
        rows = np.arange(len(ms))
        with np.errstate(invalid="ignore", divide="ignore"):
            slopes = (ms[:, :-1] - ms[:, 1:]) / (bytes_[:, 1:] - bytes_[:, :-1])
        low, high = 0.0, 2 * float(np.max(slopes[np.isfinite(slopes)], initial=0.0))
        for _ in range(BISECTIONS):
            price = (low + high) / 2
            wanted = int(bytes_[rows, np.argmin(ms + price * bytes_, axis=1)].sum())
            low, high = (low, price) if wanted <= self.total else (price, high)
        return high

    @functools.cached_property
    def priced(self) -> list[int]:
        """The index of each kernel's own choice at :attr:`price`. Together they keep the total."""
        ms, bytes_ = self._table
        chosen = np.argmin(ms + self.price * bytes_, axis=1)
        return [len(kernel_points) - 1 - int(i) for kernel_points, i in zip(self.points, chosen, strict=True)]

    @functools.cached_property
    def good(self) -> list[int]:
        """A good choice that keeps the total: :attr:`priced`, improved one by one with the bytes that are left."""
        ms, bytes_ = self._table
        rows = np.arange(len(ms))
        chosen = np.array(
            [len(kernel_points) - 1 - i for kernel_points, i in zip(self.points, self.priced, strict=True)]
        )
        left = self.total - int(bytes_[rows, chosen].sum())
        while True:  # ends: each turn gains time
            gain = ms[rows, chosen][:, None] - ms
            added_bytes = bytes_ - bytes_[rows, chosen][:, None]
            gain[added_bytes > left] = -np.inf
            k, j = np.unravel_index(int(np.argmax(gain)), gain.shape)
            if not gain[k, j] > 0:
                return [len(kernel_points) - 1 - int(i) for kernel_points, i in zip(self.points, chosen, strict=True)]
            left -= int(added_bytes[k, j])
            chosen[k] = j

    def time_ms(self, chosen: Sequence[int]) -> float:
        """Milliseconds of a choice of one point for each kernel."""
        return sum(kernel_points[i][0] for kernel_points, i in zip(self.points, chosen, strict=True))

    def worth(self) -> list[list[int]]:
        """For each kernel, indices of the points with which a choice could still be as fast as :attr:`good`."""
        ms, bytes_ = self._table
        costs = ms + self.price * bytes_
        least = costs.min(axis=1)
        bound = least.sum() - self.price * self.total + costs - least[:, None]
        may_win = bound <= self.time_ms(self.good) * (1 + ROUNDING)
        return [
            [i for i in range(len(kernel_points)) if may_win[k, len(kernel_points) - 1 - i]]
            for k, kernel_points in enumerate(self.points)
        ]
