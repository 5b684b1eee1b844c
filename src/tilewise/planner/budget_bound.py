"""What the best choice under one sum of workspaces cannot beat, and what it therefore cannot contain.

With memory at a price of so many ms a byte every kernel chooses for itself; times and prices of these choices, less the
price of the whole budget, are no more than the best time (Lagrange's relaxation). The best price is found by bisection.
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
"""A kernel's front: (ms of all its occurrences, bytes), fastest first."""

ROUNDING = 1e-12
"""A share of the time by which sums of the same numbers may differ: nothing is cut off that close."""
BISECTIONS = 60


@dataclass(frozen=True)
class Relaxed:
    """``points`` whose workspaces are to sum to at most ``total`` bytes; the last of each together do."""

    points: Sequence[Points]
    total: int

    @functools.cached_property
    def _table(self) -> tuple[Array, Array]:
        """Times and bytes, a row a kernel; the slowest point first, so that of equal ones the smaller is taken."""
        width = max(map(len, self.points))
        ms = np.full((len(self.points), width), np.inf)
        bytes_ = np.zeros((len(self.points), width), np.int64)
        for k, own in enumerate(self.points):
            ms[k, : len(own)] = [t for t, _ in reversed(own)]
            bytes_[k, : len(own)] = [size for _, size in reversed(own)]
        return ms, bytes_

    @functools.cached_property
    def price(self) -> float:
        """ms a byte at which what everybody chooses just keeps the total."""
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
        """Everybody's choice at :attr:`price`; it keeps the total."""
        ms, bytes_ = self._table
        chosen = np.argmin(ms + self.price * bytes_, axis=1)
        return [len(own) - 1 - int(i) for own, i in zip(self.points, chosen, strict=True)]

    @functools.cached_property
    def good(self) -> list[int]:
        """A choice that keeps the total: :attr:`priced`, then whatever gains most in what is left, one by one."""
        ms, bytes_ = self._table
        rows = np.arange(len(ms))
        chosen = np.array([len(own) - 1 - i for own, i in zip(self.points, self.priced, strict=True)])
        left = self.total - int(bytes_[rows, chosen].sum())
        while True:  # ends: each turn gains time
            gain = ms[rows, chosen][:, None] - ms
            more = bytes_ - bytes_[rows, chosen][:, None]
            gain[more > left] = -np.inf
            k, j = np.unravel_index(int(np.argmax(gain)), gain.shape)
            if not gain[k, j] > 0:
                return [len(own) - 1 - int(i) for own, i in zip(self.points, chosen, strict=True)]
            left -= int(more[k, j])
            chosen[k] = j

    def time_ms(self, chosen: Sequence[int]) -> float:
        """The time of a choice."""
        return sum(own[i][0] for own, i in zip(self.points, chosen, strict=True))

    def worth(self) -> list[list[int]]:
        """Indices of the points with which a choice could still be as fast as :attr:`good`."""
        ms, bytes_ = self._table
        costs = ms + self.price * bytes_
        least = costs.min(axis=1)
        bound = least.sum() - self.price * self.total + costs - least[:, None]
        kept = bound <= self.time_ms(self.good) * (1 + ROUNDING)
        return [[i for i in range(len(own)) if kept[k, len(own) - 1 - i]] for k, own in enumerate(self.points)]
