"""The 0-1 program of a budget (Oyama et al. 2018, Equations 1 to 4), built small and given to HiGHS."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import itertools
import math
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tilewise.planner.budget.bound import Points

__all__ = ["Branches", "Limits", "Solved", "load_solver", "stdout_kept", "sums_of", "try_milp"]

Branches = tuple[tuple[int, ...], ...]

SCALE = 1e2
"""Size of the scaled objective. HiGHS ignores gaps of 1e-6, and is less robust with larger objectives."""
PROVEN = 2e-8
"""The share of the time by which bound and solution may differ: HiGHS's gap, and rounding."""


@dataclass(frozen=True)
class Limits:
    """What must keep the total: the sum over all occurrences (``summed``), or each kernel and each group by itself.

    ``counts`` has how often each kernel occurs; ``groups`` are branches that run at once.
    """

    summed: bool
    counts: tuple[int, ...]
    groups: tuple[Branches, ...]

    def used(self, workspaces: Sequence[int]) -> int:
        """The total in bytes that these workspaces need, of which there is one for each kernel."""
        if self.summed:
            return sum(n * workspace for n, workspace in zip(self.counts, workspaces, strict=True))
        return max([0, *workspaces, *(sum(_segments(group, workspaces)) for group in self.groups)])

    def sized(self, points: Sequence[Points]) -> list[Points]:
        """Each kernel's points with the bytes of all its occurrences, for ``summed``."""
        return [
            [(ms, n * size) for ms, size in kernel_points] for kernel_points, n in zip(points, self.counts, strict=True)
        ]

    def most(self, smallest: Sequence[int], total: int) -> list[int]:
        """The largest workspace that each kernel can have while all others have their smallest."""
        if self.summed:
            rest = total - self.used(smallest)
            return [workspace + rest // n for workspace, n in zip(smallest, self.counts, strict=True)]
        most = [total] * len(smallest)
        for group in self.groups:
            segments = _segments(group, smallest)
            for k, times in sums_of(group).items():
                others = sum(segment for segment, branch in zip(segments, group, strict=True) if k not in branch)
                most[k] = min(most[k], (total - others) // times)
        return most

    def segments(self, workspaces: Sequence[int], total: int) -> list[int]:
        """The bytes that each kernel may use given these choices, so that the total is still kept."""
        if self.summed:
            return list(workspaces)
        allowed = [total] * len(workspaces)
        for group in self.groups:
            for branch, segment in zip(group, _segments(group, workspaces), strict=True):
                for k in branch:
                    allowed[k] = min(allowed[k], segment)
        return allowed


@dataclass(frozen=True)
class Solved:
    """The program's size, and the index of each kernel's point where HiGHS has proven the best."""

    variables: int
    rows: int
    choices: list[int] | None


def sums_of(branches: Iterable[Iterable[int]]) -> Counter[int]:
    """How many of the branches each kernel is in."""
    return Counter(k for branch in branches for k in branch)


def try_milp(points: Sequence[Points], limits: Limits, total: int, time_limit_s: float) -> Solved:
    """Build the program, and solve it unless ``time_limit_s`` is 0.

    What HiGHS calls a solution is checked in whole bytes and against its own bound: its tolerances let a budget of
    120 MiB be broken by a hundred bytes. Workspaces are shares of the total there, so that its
    tolerances are what they are meant to be.
    """
    program = _Rows(points, limits, total)
    choices = _solved(program, points, time_limit_s) if time_limit_s else None
    if (
        choices is not None
        and limits.used([kernel_points[i][1] for kernel_points, i in zip(points, choices, strict=True)]) > total
    ):
        choices = None
    return Solved(program.variables, len(program.bounds), choices)


class _Rows:
    """Rows of the program: a binary variable for each point, an equality for each kernel, and rows for limits.

    Of a group of branches there is either one row for each way of taking one kernel from each branch, or a continuous
    variable for each branch of several kernels with a row for each of them: whichever is smaller.
    """

    def __init__(self, points: Sequence[Points], limits: Limits, total: int) -> None:
        self.points = points
        self.starts = [0, *itertools.accumulate(map(len, points))]
        self.variables = self.starts[-1]
        self.entries: list[tuple[int, int, float]] = []
        self.bounds: list[tuple[float, float]] = []
        self.total = max(total, 1)
        for k in range(len(points)):
            self._add([(column, 1.0) for column in range(self.starts[k], self.starts[k + 1])], 1.0, 1.0)
        if limits.summed:
            self._add_sum(dict(enumerate(limits.counts)))
            return
        largest = [max((workspace for _, workspace in kernel_points), default=0) for kernel_points in points]
        for group in limits.groups:
            if sum(_segments(group, largest)) > total:
                self._add_group(group)

    def _add(self, entries: Iterable[tuple[int, float]], low: float, high: float) -> None:
        """Add a row: the weighted sum of its (column, value) entries lies between ``low`` and ``high``."""
        self.entries += [(len(self.bounds), column, value) for column, value in entries]
        self.bounds.append((low, high))

    def _sizes(self, k: int, times: int = 1) -> list[tuple[int, float]]:
        """The workspace of kernel ``k`` as a sum over its variables, in shares of the total."""
        kernel_columns = enumerate(self.points[k], self.starts[k])
        return [(column, times * workspace / self.total) for column, (_, workspace) in kernel_columns if workspace]

    def _add_sum(self, times: dict[int, int]) -> None:
        """Add a row: kernels, each counted so many ``times``, keep the total together."""
        self._add([entry for k, n in times.items() for entry in self._sizes(k, n)], -math.inf, 1.0)

    def _add_group(self, group: Branches) -> None:
        """Add rows: the branches of a group, which run at once, keep the total together."""
        longer = [branch for branch in group if len(branch) > 1]
        if math.prod(map(len, group)) <= 2 * len(longer) + sum(map(len, longer)):
            for combination in itertools.product(*group):
                self._add_sum(dict(Counter(combination)))
            return
        row = [entry for branch in group if len(branch) == 1 for entry in self._sizes(branch[0])]
        for branch in longer:
            segment = self.variables
            self.variables += 1
            row.append((segment, 1.0))
            for k in branch:
                self._add([*self._sizes(k), (segment, -1.0)], -math.inf, 0.0)
        self._add(_merged(row), -math.inf, 1.0)


def _merged(row: Iterable[tuple[int, float]]) -> list[tuple[int, float]]:
    """Entries with one value for each column: a kernel that is alone in two branches counts twice."""
    sums: dict[int, float] = {}
    for column, value in row:
        sums[column] = sums.get(column, 0.0) + value
    return list(sums.items())


def _solved(program: _Rows, points: Sequence[Points], time_limit_s: float) -> list[int] | None:
    """The index of each kernel's point by HiGHS; ``None`` where it has no proof within the time limit."""
    milp, constraints, bounds, matrix = load_solver()
    binary = program.starts[-1]
    times = np.array([ms for kernel_points in points for ms, _ in kernel_points])
    fastest = math.fsum(kernel_points[0][0] for kernel_points in points)
    scale = SCALE / fastest if fastest > 0 else 1.0
    rows, columns, values = zip(*program.entries, strict=True)
    lower, upper = zip(*program.bounds, strict=True)
    integral = np.arange(program.variables) < binary
    table = matrix((values, (rows, columns)), shape=(len(lower), program.variables))
    with stdout_kept():
        result = milp(
            np.concatenate([times * scale, np.zeros(program.variables - binary)]),
            integrality=integral.astype(np.int8),
            bounds=bounds(0.0, np.where(integral, 1.0, np.inf)),
            constraints=constraints(table, np.array(lower), np.array(upper)),
            options={"time_limit": time_limit_s, "mip_rel_gap": 0.0, "presolve": False},
        )
    if result.status != 0 or result.x is None:
        return None
    choices = [int(np.argmax(result.x[a:b])) for a, b in itertools.pairwise(program.starts)]
    total_ms = math.fsum(kernel_points[i][0] for kernel_points, i in zip(points, choices, strict=True))
    bound = result.mip_dual_bound
    proven = bound is not None and abs(total_ms * scale - bound) <= PROVEN * max(total_ms * scale, 1.0)
    return choices if proven else None


@contextlib.contextmanager
def stdout_kept() -> Iterator[None]:
    """Send what native code prints within to stderr: HiGHS 1.12 tells of trouble with numbers on stdout.

    A document on stdout stays whole. The whole process is sent there for these milliseconds: nothing is lost.
    """
    try:
        stdout_copy = os.dup(1)
    except OSError:  # there is none
        yield
        return
    libc = ctypes.CDLL(None) if os.name == "posix" else ctypes.cdll.msvcrt
    libc.fflush(None)
    try:
        with contextlib.suppress(OSError):  # no stderr
            os.dup2(2, 1)
        yield
    finally:
        libc.fflush(None)
        os.dup2(stdout_copy, 1)
        os.close(stdout_copy)


@functools.cache
def load_solver() -> tuple[Any, Any, Any, Any]:
    """The parts of SciPy that are used, imported when first needed: that takes a quarter of a second."""
    from scipy.optimize import Bounds, LinearConstraint, milp
    from scipy.sparse import csr_array

    return milp, LinearConstraint, Bounds, csr_array


def _segments(group: Branches, workspaces: Sequence[int]) -> list[int]:
    """The bytes that each branch holds: what its largest kernel needs."""
    return [max(workspaces[k] for k in branch) for branch in group]
