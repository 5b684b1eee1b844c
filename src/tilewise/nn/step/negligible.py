"""Passes that take too little of a step to be worth planning: they are left to torch before anything is searched."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeVar

from tilewise.machine.torch_state import undisturbed
from tilewise.nn.layers.plan_table import PlanTable, planning
from tilewise.nn.progress import Late, showing
from tilewise.planner import Planner
from tilewise.problems.base import Problem

__all__ = ["least_of", "leave_negligible"]

P = TypeVar("P")
SEVERAL = 30
"""From so many problems without plans on, those that take least are left out."""
SHARE = 0.01
"""The share of all passes' time by torch that may be left out."""


def leave_negligible(table: PlanTable, problems: Sequence[Problem], deterministic: bool) -> None:
    """Leave those of a step's ``problems`` to torch that together take no more than :data:`SHARE` of all their time.

    Planning takes as long for them as for others, and a step cannot show what they gain. torch's choice is timed on
    each problem first, which planning does in any case. Nothing is left out where fewer than :data:`SEVERAL` problems
    are without a plan, as far as is known, or the planner plans in a way of its own.
    """
    planner = table.planner
    if type(planner).plan is not Planner.plan:
        return
    distinct = list(dict.fromkeys(problems))
    options = {problem: table.constraints(problem, deterministic) for problem in distinct}
    unknown = [p for p in table.missing(distinct, deterministic) if planner.remembered(p, options[p]) is None]
    if len(unknown) < SEVERAL:
        return
    shown = Late("problems by torch", "timing", "timed") if isinstance(planner.progress, Late) else None
    with planning(), undisturbed(), showing(shown):
        for done, problem in enumerate(unknown):
            if shown is not None:
                shown(done, len(unknown), problem.key)
            planner.measure_torch(problem, options[problem])
    uses = {problem: table.uses.get(problem, 1) for problem in distinct}
    took = {problem: uses[problem] * ms for problem, ms in planner.torch_ms(distinct).items()}
    for problem in least_of({p: took[p] for p in unknown if p in took}, SHARE * sum(took.values())):
        share = f"{took[problem] / sum(took.values()):.2%}"
        table.refuse(problem, deterministic, f"not planned: it takes {share} of all passes' time by torch")


def least_of(took: Mapping[P, float], most: float) -> list[P]:
    """Those that take the least, as many as take no more than ``most`` together."""
    found, total = [], 0.0
    for name in sorted(took, key=lambda name: took[name]):
        total += took[name]
        if total > most:
            break
        found.append(name)
    return found
