"""Takes plans from a schedule: each is used as it is after a check, or refused with the reason."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from tilewise import solvers
from tilewise.machine.device import environment
from tilewise.plan import Plan
from tilewise.planner.gate import why_unfit
from tilewise.planner.measuring.times import NOISE
from tilewise.planner.options import Options
from tilewise.planner.planner import Planner
from tilewise.planner.remembered import written
from tilewise.planner.schedules.results import PassResult
from tilewise.planner.schedules.schedule import Schedule
from tilewise.problems.base import Problem

__all__ = ["ABSENT", "Followed", "entry_of", "follow"]

ABSENT = "not in the schedule"
WORD = re.compile(r"(\w+)=(.*?)(?= \w+=|$)")
"""Matches a name and its value in an environment's key."""


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


def entry_of(schedule: Schedule, problem: Problem) -> PassResult | None:
    """What ``schedule`` has for ``problem``, on whatever device it was planned."""
    return schedule.kernels.get(problem.on(schedule.device))


def follow(schedule: Schedule, problem: Problem, options: Options, planner: Planner) -> Followed:
    """The plan that ``schedule`` has for ``problem``, checked here under ``options``, or known to be from wisdom.

    Under a budget a kernel may take the workspace of its plan. On a CPU the measured peak varies by up to 128 KiB
    from run to run: so much more passes the check. Where the schedule is from another environment, or its plan
    names an unknown solver or another version of one, nothing of it is run.
    """
    entry = entry_of(schedule, problem)
    if entry is None:
        return Followed(None, ABSENT)
    plan = entry.plan
    if plan is None:
        return Followed(None, "the schedule has no plan for it")
    limit = None if schedule.budget is None and schedule.step_memory is None else plan.workspace
    if limit is not None:
        checked_limit = limit + (NOISE if problem.device_type == "cpu" else 0)
        limit, checked_limit = (
            n if options.workspace is None else min(n, options.workspace) for n in (limit, checked_limit)
        )
        options = replace(options, workspace=checked_limit)
    here = environment(problem.device).key
    if here != schedule.environment:
        differs = _difference(schedule.environment, here)
        return Followed(None, f"the schedule is from another environment: {differs}", limit)
    reason = why_unfit(plan, problem, options)
    if reason:
        return Followed(None, reason, limit)
    if plan.solver == solvers.baseline(problem).name and options.workspace is None and options.error_limit is None:
        return Followed(plan, "", limit, entry.framework_ms)  # torch itself, of which nothing more is asked
    known = planner.remembered(problem, options)
    if known is not None and written(known) == written(plan):
        return Followed(known, "", limit, entry.framework_ms)  # it was checked here under the same options
    checked, reason = planner.confirm(problem, plan, options)
    if reason:
        return Followed(None, f"its plan was refused: {plan.solver} {reason}", limit)
    return Followed(checked, "", limit, entry.framework_ms)


def _difference(there: str, here: str) -> str:
    """How two environments differ: ``torch=2.11.0 there, torch=2.13.0 here``."""
    theirs, ours = (dict(WORD.findall(key)) for key in (there, here))
    names = [name for name in {**theirs, **ours} if theirs.get(name) != ours.get(name)]
    words = [
        ", ".join(f"{name}={words_of[name]}" for name in names if name in words_of)[:300] or "nothing more"
        for words_of in (theirs, ours)
    ]
    return f"{words[0]} there, {words[1]} here"
