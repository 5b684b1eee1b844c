"""Where the parts of a plan meet, which a check looks at beside the ends of a result."""

from __future__ import annotations

import itertools

from tilewise import solvers
from tilewise.plan import Plan
from tilewise.problems.base import Seams
from tilewise.solvers import Split

__all__ = ["seams_of"]


def seams_of(plan: Plan | None) -> Seams:
    """Where, along each axis that ``plan`` cuts, the first part of each different plan begins.

    ``None`` and plans of one kernel have no seams.
    """
    if plan is None or plan.leaf:
        return Seams()
    starts: dict[str, tuple[int, ...]] = {}
    _add_starts(plan, starts)
    return Seams(starts, parted=True)


def _add_starts(plan: Plan, starts: dict[str, tuple[int, ...]]) -> None:
    """Add the starts of the parts of ``plan``, and of parts within parts, to ``starts``."""
    if plan.leaf:
        return
    solver, sizes = solvers.get(plan.solver), plan.config.get("sizes")
    axis = solver.axis if isinstance(solver, Split) and isinstance(sizes, tuple) else ""
    if axis:
        assert isinstance(sizes, tuple)
        indexes = itertools.accumulate(plan.counts[:-1])
        here = tuple(sum(sizes[:index]) for index in indexes if 0 < index < len(sizes))
        starts[axis] = (*starts.get(axis, ()), *here)
    for child in plan.children:
        _add_starts(child, starts)
