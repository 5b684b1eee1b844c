"""Plans taken from a schedule: used as they are after a check, or given up with the reason they cannot be."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

import torch

from tilewise import execute, solvers
from tilewise.device import environment
from tilewise.plan import Config, Plan
from tilewise.planner.options import EXCLUDED, Options
from tilewise.planner.planner import Planner
from tilewise.planner.results import PassResult
from tilewise.planner.schedule import Schedule
from tilewise.problem import ConvProblem
from tilewise.solvers import Solver, Split
from tilewise.threads import with_threads

__all__ = ["ABSENT", "Followed", "entry_of", "follow", "is_offered"]

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
    reason = _unfit(plan, problem, options)
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


def _unfit(plan: Plan, problem: ConvProblem, options: Options, level: int = -1, threads: int = 0) -> str:
    """Why ``plan`` may not even be tried on ``problem``, empty when it may: solvers are asked, nothing is run.

    ``level`` is that of the split above, ``threads`` what torch has for a part at once.
    """
    if plan.problem != problem.key:
        return f"its plan has a part for {plan.problem[:200]}, which is none of the problem's"
    try:
        solver = solvers.get(plan.solver)
    except KeyError:
        return f"its plan needs the solver {plan.solver[:80]!r}, which there is not here"
    if solver.version != plan.version:
        return f"its plan is by {plan.solver} version {plan.version}, here is version {solver.version}"
    if options.excludes(solver, plan.config):
        return f"its plan uses {plan.solver}, {EXCLUDED}"
    reasons = solver.why_not(problem)
    if reasons:
        return f"{plan.solver} cannot solve it: {'; '.join(reasons)}"
    try:
        if isinstance(solver, Split):
            return _unfit_parts(plan, problem, solver, options, level)
        if plan.children:
            return f"its plan has parts below {plan.solver}, which has none"
        if options.deterministic and not solver.is_deterministic(problem, plan.config):
            return f"{plan.solver} is not deterministic"
        return "" if is_offered(solver, problem, plan.config, threads) else _not_offered(plan)
    except Exception as error:  # whatever a solver makes of a config that somebody wrote: the plan is refused
        return f"{_not_offered(plan)} ({type(error).__name__}: {str(error)[:200]})"


def _not_offered(plan: Plan) -> str:
    return f"{plan.solver} does not offer {str(plan.config)[:200] or 'no config'} here"


def _unfit_parts(plan: Plan, problem: ConvProblem, solver: Split, options: Options, level: int) -> str:
    if solver.level <= level:
        return f"its plan cuts by {plan.solver} below a split of the same level"
    sizes, whole = plan.config.get("sizes"), problem.extent(solver.axis_of(problem))
    if not isinstance(sizes, tuple) or min(sizes, default=0) < 1 or sum(sizes) != whole:
        return f"its plan cuts by {plan.solver} into {str(sizes)[:200]}, which is not the whole"
    parts, plans = execute.parts_of(plan, problem, solver)
    if solver.at_once and not all(child.leaf for child in plans):
        return f"its plan cuts the parts of {plan.solver} again, which run at once"
    threads = _threads(len(parts)) if solver.at_once else 0
    asked = {(part.problem, child) for part, child in zip(parts, plans, strict=True) if part.problem is not None}
    found = (_unfit(child, part, options, solver.level, threads) for part, child in asked)
    return next((reason for reason in found if reason), "")


def _threads(parts: int) -> int:
    return max(1, torch.get_num_threads() // parts)


def is_offered(solver: Solver, problem: ConvProblem, config: Config, threads: int = 0) -> bool:
    """Whether the solver itself would try ``config``, perhaps under a limit that is just enough for it.

    ``threads`` are torch's for the part, 0 for as many as there are.
    """
    found: list[bool] = []

    def ask() -> None:
        found.append(any(c == config for c, _ in solver.offers(problem, None, [config])))
        if not found[-1]:
            ceiling = solver.workspace(problem, config) + solver.hidden_workspace(problem, config)
            found.append(any(c == config for c, _ in solver.offers(problem, ceiling)))

    if threads:
        with_threads(ask, threads)
    else:
        ask()
    return found[-1]
