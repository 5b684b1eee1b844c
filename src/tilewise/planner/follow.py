"""Plans taken from a schedule: used as they are after a check, or given up with the reason they cannot be."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from tilewise import solvers
from tilewise.device import environment
from tilewise.plan import Plan
from tilewise.planner.gate import why_unfit
from tilewise.planner.options import Options
from tilewise.planner.planner import Planner
from tilewise.planner.results import PassResult
from tilewise.planner.schedule import Schedule
from tilewise.problem import ConvProblem

__all__ = ["ABSENT", "Followed", "entry_of", "follow"]

ABSENT = "not in the schedule"
WORD = re.compile(r"(\w+)=(.*?)(?= \w+=|$)")
"""A name and its value in an environment's key."""


@dataclass(frozen=True, slots=True)
class Followed:
    """What a schedule has for a problem: a checked ``plan``, or the ``note`` that says why it must be planned anew.

    ``limit`` is the workspace in bytes that it may take where the schedule divided a budget, ``framework_ms`` torch's
    time beside the plan.
    """

    plan: Plan | None
    note: str = ""
    limit: int | None = None
    framework_ms: float | None = None


def entry_of(schedule: Schedule, problem: ConvProblem) -> PassResult | None:
    """What ``schedule`` has for ``problem``, on whatever device it was planned."""
    return schedule.kernels.get(replace(problem, device=schedule.device))


def follow(schedule: Schedule, problem: ConvProblem, options: Options, planner: Planner) -> Followed:
    """The plan that ``schedule`` has for ``problem``, checked here under ``options``.

    Under a budget a kernel may take the workspace of its plan. Where the schedule is from another environment, or its
    plan names a solver of another version or one that there is not, nothing of it is run.
    """
    entry = entry_of(schedule, problem)
    if entry is None:
        return Followed(None, ABSENT)
    plan = entry.plan
    if plan is None:
        return Followed(None, "the schedule has no plan for it")
    limit = None if schedule.budget is None and schedule.step is None else plan.workspace
    if limit is not None:
        limit = limit if options.workspace is None else min(limit, options.workspace)
        options = replace(options, workspace=limit)
    here = environment(problem.device).key
    if here != schedule.environment:
        differs = _difference(schedule.environment, here)
        return Followed(None, f"the schedule is from another environment: {differs}", limit)
    reason = why_unfit(plan, problem, options)
    if reason:
        return Followed(None, reason, limit)
    if plan.solver == solvers.baseline().name and options.workspace is None and options.error_limit is None:
        return Followed(plan, "", limit, entry.framework_ms)  # torch itself, of which nothing more is asked
    checked, reason = planner.confirm(problem, plan, options)
    if reason:
        return Followed(None, f"its plan was refused: {plan.solver} {reason}", limit)
    return Followed(checked, "", limit, entry.framework_ms)


def _difference(there: str, here: str) -> str:
    """How two environments differ: ``torch=2.11.0 there, torch=2.13.0 here``."""
    theirs, ours = (dict(WORD.findall(key)) for key in (there, here))
    names = [name for name in {**theirs, **ours} if theirs.get(name) != ours.get(name)]
    words = [
        ", ".join(f"{name}={found[name]}" for name in names if name in found)[:300] or "nothing more"
        for found in (theirs, ours)
    ]
    return f"{words[0]} there, {words[1]} here"
