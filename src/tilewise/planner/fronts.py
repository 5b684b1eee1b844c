"""Fronts of time against workspace, and how the fronts of parts compose.

In sequence time adds and workspace is the maximum. So the fastest division within a workspace of ``w`` is a shortest
path over sizes whose parts each keep ``w`` (Oyama et al. 2018, III-B), and the whole front (III-C1) is that path for
every ``w`` at which some part changes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

__all__ = ["MOST_POINTS", "Division", "divide", "front", "in_sequence", "thin"]

Array = np.ndarray[Any, np.dtype[Any]]

MOST_POINTS = 16
"""Most points of a front that go up the tree of plans, which bounds the search."""


@dataclass(frozen=True, slots=True)
class Division:
    """Sizes that sum to the whole, and for each one the index of a point in the front of that size.

    Sizes are in such an order that each part starts at a multiple of the largest power of two in its size: what is
    known of a part's alignment follows from its size alone.
    """

    time_ms: float
    workspace: int
    sizes: tuple[int, ...]
    points: tuple[int, ...]


def front(points: Iterable[tuple[float, int]]) -> list[int]:
    """Indices of the desirable points, fastest first: no other is as fast in as little workspace."""
    listed = list(points)
    front_indices: list[int] = []
    for index in sorted(range(len(listed)), key=lambda i: (listed[i][0], listed[i][1])):
        if not front_indices or listed[index][1] < listed[front_indices[-1]][1]:
            front_indices.append(index)
    return front_indices


def thin(indices: Sequence[int], most: int = MOST_POINTS) -> list[int]:
    """At most ``most`` of a front's points: both ends, and points evenly spread between them."""
    if len(indices) <= most:
        return list(indices)
    return [indices[round(i * (len(indices) - 1) / (most - 1))] for i in range(most)]


def divide(whole: int, fronts: Mapping[int, Sequence[tuple[float, int]]], limit: int | None = None) -> list[Division]:
    """The front of divisions of ``whole`` into sizes with the given fronts of (ms, bytes), fastest first.

    Every part keeps ``limit`` bytes. Empty when no division exists.
    """
    sizes = sorted(size for size, points in fronts.items() if size <= whole and points)
    thresholds = sorted({ws for size in sizes for _, ws in fronts[size] if limit is None or ws <= limit})
    if not thresholds:
        return []
    allowed = thin(thresholds, 4 * MOST_POINTS)
    fastest = [[_fastest(fronts[size], ws) for size in sizes] for ws in allowed]
    cost = np.array(
        [[fronts[s][i][0] if i >= 0 else np.inf for s, i in zip(sizes, row, strict=True)] for row in fastest]
    )
    best, choice = _shortest(whole, np.array(sizes), cost)
    divisions = []
    for row, points in enumerate(fastest):
        if np.isfinite(best[row, whole]):
            path = _path(whole, sizes, choice[row])
            workspace = max(fronts[sizes[i]][points[i]][1] for i in path)
            chosen = tuple(sizes[i] for i in path), tuple(points[i] for i in path)
            divisions.append(Division(float(best[row, whole]), workspace, *chosen))
    front_indices = front((d.time_ms, d.workspace) for d in divisions)
    return [divisions[i] for i in thin(front_indices)]


def in_sequence(
    counts: Sequence[int], fronts: Sequence[Sequence[tuple[float, int]]], limit: int | None = None
) -> list[tuple[int, ...]]:
    """The front of a sequence of parts of several kinds, ``counts[i]`` of kind ``i``, fastest first.

    Each entry has the index of a point in every kind's front. Every part keeps ``limit`` bytes. Empty where some kind
    has no point within the limit.
    """
    thresholds = sorted({ws for points in fronts for _, ws in points if limit is None or ws <= limit})
    rows = [tuple(_fastest(points, ws) for points in fronts) for ws in thresholds]
    distinct_rows = list(dict.fromkeys(row for row in rows if min(row) >= 0))

    def total(row: tuple[int, ...]) -> tuple[float, int]:
        points = [points[i] for points, i in zip(fronts, row, strict=True)]
        times = (count * ms for count, (ms, _) in zip(counts, points, strict=True))
        return sum(times), max(workspace for _, workspace in points)

    return [distinct_rows[i] for i in thin(front(map(total, distinct_rows)))]


def _fastest(points: Sequence[tuple[float, int]], limit: int) -> int:
    """Index of the fastest point within ``limit`` bytes, -1 for none."""
    fitting = [(ms, ws, i) for i, (ms, ws) in enumerate(points) if ws <= limit]
    return min(fitting)[2] if fitting else -1


def _shortest(whole: int, sizes: Array, cost: Array) -> tuple[Array, Array]:
    """Least cost of every length up to ``whole`` and the last size on the way, one row for each row of ``cost``."""
    best = np.full((len(cost), whole + 1), np.inf)
    best[:, 0] = 0.0
    choice = np.zeros(best.shape, dtype=np.int64)
    rows = np.arange(len(cost))
    for n in range(1, whole + 1):
        usable = int(np.searchsorted(sizes, n, side="right"))
        if usable:
            totals = best[:, n - sizes[:usable]] + cost[:, :usable]
            # The largest of equal ones: fewer parts.
            choice[:, n] = usable - 1 - np.argmin(totals[:, ::-1], axis=1)
            best[:, n] = totals[rows, choice[:, n]]
    return best, choice


def _path(whole: int, sizes: Sequence[int], choice: Array) -> list[int]:
    """Indices of the sizes that make up ``whole``, those with larger powers of two first, then the largest."""
    path, rest = [], whole
    while rest:
        path.append(int(choice[rest]))
        rest -= sizes[path[-1]]
    return sorted(path, key=lambda i: (-(sizes[i] & -sizes[i]), -sizes[i]))
