"""Exact methods for a budget's program without a solver: tried before it, and where it has no proof at its time limit.

Sums are solved stage by stage over the front of (workspace, time) pairs, which bounds by Lagrange's multiplier keep
short. Groups that share kernels are searched best first.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from tilewise.planner.budget.bound import ROUNDING, Points, Relaxed
from tilewise.planner.budget.program import Branches, Limits
from tilewise.planner.fronts import front

__all__ = ["TooMany", "cheapest"]

Array = np.ndarray[Any, np.dtype[Any]]


class TooMany(Exception):
    """More choices would have to be looked at than are allowed."""


def cheapest(points: Sequence[Points], limits: Limits, total: int, most: float = math.inf) -> list[int]:
    """The index of each kernel's point in a fastest choice within ``total`` bytes.

    ``points`` are fronts, fastest first; their last points together keep the total. Raises :class:`TooMany` where more
    than ``most`` choices would be looked at.
    """
    if limits.summed:
        return cheapest_sum(limits.sized(points), total, most)
    chosen = [0] * len(points)
    for component in _components(limits.groups):
        for k, i in _cheapest_at_once(points, component, total, most).items():
            chosen[k] = i
    return chosen


def cheapest_sum(points: Sequence[Points], total: int, most: float = math.inf) -> list[int]:
    """One point of each front with the least time among those whose workspaces sum to at most ``total``.

    Each stage adds a kernel to the sums so far. A sum stays if none is as fast in as little, and if its time and what
    the rest takes at least, memory priced at Lagrange's multiplier, do not exceed a solution that is known. Raises
    :class:`TooMany` where all stages have more than ``most`` sums.
    """
    if not points:
        return []
    relaxed = Relaxed(points, total)
    price, best = relaxed.price, relaxed.time_ms(relaxed.good)
    rest_ms = _suffixes([kernel_points[i][0] for kernel_points, i in zip(points, relaxed.priced, strict=True)])
    rest_bytes = _suffixes([kernel_points[i][1] for kernel_points, i in zip(points, relaxed.priced, strict=True)])
    least_bytes = _suffixes([kernel_points[-1][1] for kernel_points in points])
    bytes_, ms = np.zeros(1, np.int64), np.zeros(1)
    stages: list[tuple[Array, Array]] = []
    for k, kernel_points in enumerate(points):
        added = np.array([workspace for _, workspace in kernel_points], np.int64)
        most -= bytes_.size * added.size
        if most < 0:
            raise TooMany
        all_bytes = (bytes_[:, None] + added).ravel()
        all_ms = (ms[:, None] + np.array([t for t, _ in kernel_points])).ravel()
        completed = all_ms[all_bytes + rest_bytes[k + 1] <= total]
        if completed.size:
            best = min(best, float(completed.min()) + rest_ms[k + 1])
        bound = all_ms + rest_ms[k + 1] + price * (all_bytes + float(rest_bytes[k + 1] - total))
        kept_sums = (all_bytes + least_bytes[k + 1] <= total) & (bound <= best * (1 + ROUNDING))
        kept_sums = _undominated(np.flatnonzero(kept_sums), all_bytes, all_ms)
        bytes_, ms = all_bytes[kept_sums], all_ms[kept_sums]
        stages.append((kept_sums // len(kernel_points), kept_sums % len(kernel_points)))
    state, chosen = int(np.argmin(ms)), []
    for before, taken in reversed(stages):
        chosen.append(int(taken[state]))
        state = int(before[state])
    return chosen[::-1]


def _undominated(among: Array, bytes_: Array, ms: Array) -> Array:
    """The indices in ``among`` that are faster than all others that take no more bytes."""
    ordered = among[np.lexsort((ms[among], bytes_[among]))]
    if ordered.size < 2:
        return ordered
    faster = np.ones(ordered.size, np.bool_)
    faster[1:] = ms[ordered][1:] < np.minimum.accumulate(ms[ordered])[:-1]
    undominated: Array = ordered[faster]
    return undominated


def _suffixes(values: Sequence[Any]) -> list[Any]:
    """Sums of the values from each place to the end, and a 0 behind them."""
    return list(itertools.accumulate(reversed(values), initial=0))[::-1]


def _components(groups: Sequence[Branches]) -> list[list[Branches]]:
    """Lists of groups that share kernels. Groups of different lists are independent."""
    components: list[tuple[set[int], list[Branches]]] = []
    for group in groups:
        kernels = {k for branch in group for k in branch}
        touching = [entry for entry in components if entry[0] & kernels]
        merged = set().union(kernels, *(groups_of for groups_of, _ in touching))
        components = [entry for entry in components if entry not in touching]
        components.append((merged, [*(each_group for _, groups_of in touching for each_group in groups_of), group]))
    return [groups_of for _, groups_of in components]


def _cheapest_at_once(points: Sequence[Points], groups: list[Branches], total: int, most: float) -> dict[int, int]:
    """The best choices, by kernel, for groups that share kernels."""
    kernels = list(dict.fromkeys(k for group in groups for branch in group for k in branch))
    if len(groups) == 1 and sum(map(len, groups[0])) == len(kernels):
        return _cheapest_branches(points, groups[0], total, most)
    return _best_first(points, groups, kernels, total, most)


def _cheapest_branches(points: Sequence[Points], group: Branches, total: int, most: float) -> dict[int, int]:
    """One group whose branches share no kernel: a sum over the branches' own fronts of (time, segment)."""
    fronts, choices = [], []
    for branch in group:
        least = max(points[k][-1][1] for k in branch)
        segments = sorted({workspace for k in branch for _, workspace in points[k] if workspace >= least})
        within = [{k: _fastest(points[k], segment) for k in branch} for segment in segments]
        listed = [
            (sum(points[k][i][0] for k, i in chosen.items()), size)
            for chosen, size in zip(within, segments, strict=True)
        ]
        front_indices = front(listed)
        fronts.append([listed[i] for i in front_indices])
        choices.append([within[i] for i in front_indices])
    taken = cheapest_sum(fronts, total, most)
    return {k: i for chosen, index in zip(choices, taken, strict=True) for k, i in chosen[index].items()}


def _fastest(kernel_points: Points, segment: int) -> int:
    """The index of the fastest point within ``segment`` bytes."""
    return next(i for i, (_, workspace) in enumerate(kernel_points) if workspace <= segment)


def _best_first(
    points: Sequence[Points], groups: list[Branches], kernels: list[int], total: int, most: float
) -> dict[int, int]:
    """Search from the fastest point of every kernel: the first choice met that keeps the total is a fastest one.

    Where a group takes too much, in every solution at least one of its branches has a smaller segment: each is tried.
    Times only rise on the way, so what is met first is the fastest.
    """
    place = {k: n for n, k in enumerate(kernels)}

    def time_of(state: tuple[int, ...]) -> float:
        return sum(points[k][i][0] for k, i in zip(kernels, state, strict=True))

    first = (0,) * len(kernels)
    waiting, seen = [(time_of(first), first)], {first}
    while True:  # ends: the smallest workspaces keep the total, and every state is met once
        if len(seen) > most:
            raise TooMany
        _, state = heapq.heappop(waiting)
        sizes = {k: points[k][i][1] for k, i in zip(kernels, state, strict=True)}
        held = [[max(sizes[k] for k in branch) for branch in group] for group in groups]
        over, segments, group = max(
            ((sum(of_group), of_group, group) for of_group, group in zip(held, groups, strict=True)),
            key=lambda entry: entry[0],
        )
        if over <= total:
            return dict(zip(kernels, state, strict=True))
        for branch, segment in zip(group, segments, strict=True):
            smaller = list(state)
            for k in branch:
                while smaller[place[k]] < len(points[k]) and points[k][smaller[place[k]]][1] >= segment:
                    smaller[place[k]] += 1
            if all(i < len(points[k]) for k, i in zip(kernels, smaller, strict=True)):
                entry = tuple(smaller)
                if entry not in seen:
                    seen.add(entry)
                    heapq.heappush(waiting, (time_of(entry), entry))
