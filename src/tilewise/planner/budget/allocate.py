"""One workspace budget for many kernels: which point of each kernel's front to take (Oyama et al. 2018, III-C).

A kernel is one pass of one layer. Under ``paper_wd`` each of its occurrences holds a segment of its own, and all
segments together keep the budget. Under ``arena`` a workspace lives as long as its call: kernels that run one after the
other share one arena, and only those that may run at once add up.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tilewise.plan import format_bytes, parse_bytes
from tilewise.planner.budget.bound import Points, Relaxed
from tilewise.planner.budget.exact import TooMany, cheapest
from tilewise.planner.budget.program import Branches, Limits, load_solver, sums_of, try_milp
from tilewise.planner.fronts import front
from tilewise.planner.options import NoPlanError

__all__ = ["POLICIES", "TIME_LIMIT_S", "Allocation", "Group", "Kernel", "Program", "allocate"]

POLICIES = ("arena", "paper_wd")
TIME_LIMIT_S = 10.0
MOST_LOOKED_AT = 1_000_000
"""Most partial choices of the exact method, some 50 ns each; HiGHS takes 20 to 180 ms for large programs."""

Group = Sequence[Sequence[int]]
"""Branches that may run at once. Each is the indices of the kernels that it runs one after the other."""


@dataclass(frozen=True, slots=True)
class Kernel:
    """One layer-pass: its points (time in ms, workspace in bytes) and how often it occurs in a step."""

    name: str
    points: tuple[tuple[float, int], ...]
    count: int = 1


@dataclass(frozen=True, slots=True)
class Program:
    """The 0-1 program that was solved: its size, the time and method, and whether the result is proven optimal."""

    variables: int
    rows: int
    solve_ms: float
    optimal: bool
    method: str


@dataclass(frozen=True, slots=True)
class Allocation:
    """What each kernel gets: ``choices[i]`` is the index of its point, ``limits[i]`` the bytes that it may use.

    ``limits`` are a kernel's own segment under ``paper_wd``; under ``arena`` the segment of the branch it is in, and
    the whole budget where nothing runs beside it. ``time_ms`` sums over occurrences, ``used`` is what the points chosen
    take of the ``total``, ``least`` the smallest total that has a solution.
    """

    policy: str
    total: int
    used: int
    least: int
    time_ms: float
    choices: tuple[int, ...]
    limits: tuple[int, ...]
    program: Program


def allocate(
    kernels: Sequence[Kernel],
    total: int | str,
    policy: str = "arena",
    groups: Iterable[Group] = (),
    time_limit_s: float = TIME_LIMIT_S,
    most_looked_at: int = MOST_LOOKED_AT,
) -> Allocation:
    """The fastest choice of a point for each kernel that keeps ``total`` bytes; it is proven to be so.

    ``groups`` say what may run at once, for ``arena``; kernels in none run alone. An exact method of our own comes
    first, and gives up where it would look at more than ``most_looked_at`` partial choices. Then HiGHS gets
    ``time_limit_s``; where it has no proof by then (or the limit is 0), our own goes on without a limit.

    Raises ``ValueError`` naming the argument at fault, and :class:`NoPlanError` with the least total that works.
    """
    total = parse_bytes(total, "total")
    listed = [group for group in map(_branches, groups) if len(group) > 1]
    _check(kernels, policy, listed, time_limit_s)
    smallest = [min(workspace for _, workspace in kernel.points) for kernel in kernels]
    limits = Limits(policy == "paper_wd", tuple(kernel.count for kernel in kernels), tuple(listed))
    least = limits.used(smallest)
    if least > total:
        raise NoPlanError(
            f"no workspaces keep {format_bytes(total)} ({total} bytes) in all under {policy}: the least total that "
            f"works is {least} bytes ({format_bytes(least)})"
        )
    start = time.perf_counter()
    most = limits.most(smallest, total)
    kept_points = [_desirable(kernel, limit) for kernel, limit in zip(kernels, most, strict=True)]
    kept_points = _worth(kernels, kept_points, limits, total)
    weighed = _weighed(kernels, kept_points)
    chosen, program = _solved(weighed, limits, total, time_limit_s, most_looked_at, start)
    workspaces = [kernel_points[i][1] for kernel_points, i in zip(weighed, chosen, strict=True)]
    return Allocation(
        policy,
        total,
        limits.used(workspaces),
        least,
        math.fsum(kernel_points[i][0] for kernel_points, i in zip(weighed, chosen, strict=True)),
        tuple(kernel_points[i] for kernel_points, i in zip(kept_points, chosen, strict=True)),
        tuple(limits.segments(workspaces, total)),
        program,
    )


def _solved(
    points: Sequence[Points], limits: Limits, total: int, time_limit_s: float, most_looked_at: int, start: float
) -> tuple[list[int], Program]:
    """The index of each kernel's point, and the program, whose time counts from ``start``."""
    solved = try_milp(points, limits, total, 0.0)
    method, chosen = "exact", None
    try:
        chosen = cheapest(points, limits, total, most_looked_at)
    except TooMany:
        if time_limit_s:
            begun = time.perf_counter()
            load_solver()
            start += time.perf_counter() - begun
            chosen, method = try_milp(points, limits, total, time_limit_s).choices, "milp"
    if chosen is None:
        chosen, method = cheapest(points, limits, total), "exact"
    took_ms = (time.perf_counter() - start) * 1e3
    return chosen, Program(solved.variables, solved.rows, took_ms, True, method)


def _worth(kernels: Sequence[Kernel], kept: list[list[int]], limits: Limits, total: int) -> list[list[int]]:
    """The points in ``kept`` that a solution may need: the fastest for what runs alone, else what a bound leaves."""
    if not kernels:
        return []
    if limits.summed:
        worth = Relaxed(limits.sized(_weighed(kernels, kept)), total).worth()
        return [
            [kept_of_kernel[i] for i in worth_of_kernel]
            for kept_of_kernel, worth_of_kernel in zip(kept, worth, strict=True)
        ]
    grouped = {k for group in limits.groups for branch in group for k in branch}
    return [kept_of_kernel if k in grouped else kept_of_kernel[:1] for k, kept_of_kernel in enumerate(kept)]


def _branches(group: Group) -> Branches:
    """The branches of a group that run something, with each kernel once in a branch."""
    return tuple(tuple(dict.fromkeys(branch)) for branch in group if branch)


def _weighed(kernels: Sequence[Kernel], kept: Sequence[Sequence[int]]) -> list[Points]:
    """The points kept of each kernel, with the time of all its occurrences."""
    return [
        [(kernel.points[i][0] * kernel.count, kernel.points[i][1]) for i in kept_of_kernel]
        for kernel, kept_of_kernel in zip(kernels, kept, strict=True)
    ]


def _desirable(kernel: Kernel, limit: int) -> list[int]:
    """Indices of the points within ``limit`` that no other beats, fastest first."""
    fitting = [i for i, (_, workspace) in enumerate(kernel.points) if workspace <= limit]
    return [fitting[i] for i in front(kernel.points[i] for i in fitting)]


def _check(kernels: Sequence[Kernel], policy: str, groups: Sequence[Branches], time_limit_s: float) -> None:
    """Raise ``ValueError`` naming the argument of :func:`allocate` that is at fault."""
    if policy not in POLICIES:
        raise ValueError(f"policy={policy!r}: one of {', '.join(POLICIES)} would do")
    if not time_limit_s >= 0:
        raise ValueError(f"time_limit_s={time_limit_s!r}: a number of seconds, 0 or more, would do")
    for kernel in kernels:
        if not kernel.points:
            raise ValueError(f"kernels: {kernel.name} has no points: leave it out, or give it one")
        if any(not (math.isfinite(ms) and ms >= 0 and workspace >= 0) for ms, workspace in kernel.points):
            raise ValueError(
                f"kernels: {kernel.name} has points {kernel.points}: times and bytes of 0 or more would do"
            )
        if kernel.count < 1:
            raise ValueError(f"kernels: {kernel.name} has count={kernel.count}: 1 or more would do")
    for group in groups:
        for k, times in sums_of(group).items():
            if not 0 <= k < len(kernels):
                raise ValueError(f"groups: {k} is no index of a kernel: 0 to {len(kernels) - 1} would do")
            if times > kernels[k].count:
                raise ValueError(
                    f"groups: {kernels[k].name} is in {times} branches at once and has count={kernels[k].count}: "
                    f"{times} or more would do"
                )
