"""Fronts of time against workspace, and how the fronts of parts compose.

In sequence time adds and workspace is the maximum. So the fastest division within a workspace of ``w`` is a shortest
path over sizes whose parts each keep ``w`` (Oyama et al. 2018, III-B), and the whole front (III-C1) is that path for
every ``w`` at which some part changes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

__all__ = ["MOST_POINTS", "Division", "divide", "front", "thin"]

MOST_POINTS = 16
"""Points of a front that go up the tree (the bound on the search)."""


@dataclass(frozen=True, slots=True)
class Division:
    """Sizes, largest first, that sum to the whole, and for each the index of the point of its size's front."""

    time_ms: float
    workspace: int
    sizes: tuple[int, ...]
    points: tuple[int, ...]


def front(points: Iterable[tuple[float, int]]) -> list[int]:
    """Indices of the desirable points, fastest first: no other is as fast in as little workspace."""
    listed = list(points)
    kept: list[int] = []
    for index in sorted(range(len(listed)), key=lambda i: (listed[i][0], listed[i][1])):
        if not kept or listed[index][1] < listed[kept[-1]][1]:
            kept.append(index)
    return kept


def thin(indices: Sequence[int], most: int = MOST_POINTS) -> list[int]:
    """At most ``most`` of a front's points, ends kept, evenly in between."""
    if len(indices) <= most:
        return list(indices)
    return [indices[round(i * (len(indices) - 1) / (most - 1))] for i in range(most)]


def divide(whole: int, fronts: Mapping[int, Sequence[tuple[float, int]]], limit: int | None = None) -> list[Division]:
    """The front of divisions of ``whole`` into sizes with the given fronts of (ms, bytes), fastest first.

    Every part keeps ``limit`` bytes. Empty when no division exists.
    """
    thresholds = sorted({ws for points in fronts.values() for _, ws in points if limit is None or ws <= limit})
    found = [division for ws in thin(thresholds, 4 * MOST_POINTS) if (division := _fastest(whole, fronts, ws))]
    kept = front((d.time_ms, d.workspace) for d in found)
    return [found[i] for i in thin(kept)]


def _fastest(whole: int, fronts: Mapping[int, Sequence[tuple[float, int]]], limit: int) -> Division | None:
    sizes, times, points = [], [], []
    for size, candidates in sorted(fronts.items()):
        fitting = [(ms, ws, i) for i, (ms, ws) in enumerate(candidates) if ws <= limit]
        if size <= whole and fitting:
            ms, _, index = min(fitting)
            sizes.append(size)
            times.append(ms)
            points.append(index)
    if not sizes:
        return None
    step, cost = np.array(sizes), np.array(times)
    best = np.full(whole + 1, np.inf)
    best[0] = 0.0
    choice = np.zeros(whole + 1, dtype=np.int64)
    for n in range(1, whole + 1):
        usable = int(np.searchsorted(step, n, side="right"))
        if usable:
            totals = best[n - step[:usable]] + cost[:usable]
            # The largest of equal ones: fewer parts.
            choice[n] = usable - 1 - int(np.argmin(totals[::-1]))
            best[n] = totals[choice[n]]
    if not np.isfinite(best[whole]):
        return None
    path, rest = [], whole
    while rest:
        path.append(int(choice[rest]))
        rest -= sizes[path[-1]]
    path.sort(key=lambda i: -sizes[i])
    workspace = max(fronts[sizes[i]][points[i]][1] for i in path)
    return Division(float(best[whole]), workspace, tuple(sizes[i] for i in path), tuple(points[i] for i in path))
