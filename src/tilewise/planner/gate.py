"""The gate for plans from outside this process: what does not pass is never bound, compiled or allocated for.

A plan may come from wisdom, a schedule or another rank. Here solvers are asked whether they would have made it. That
takes milliseconds and runs nothing, so a plan that somebody wrote by hand costs no more than a sound one. What passes
and was not checked by a process of this user is then run once within its limit and against float64
(:meth:`~tilewise.planner.Planner.confirm`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

import torch

from tilewise import execute, solvers
from tilewise.machine.places import HERE
from tilewise.machine.threads import with_threads
from tilewise.plan import Config, Plan
from tilewise.planner.options import EXCLUDED, Options
from tilewise.problems.base import Problem
from tilewise.solvers import Solver, SolverUnavailable, Split
from tilewise.solvers.common.shares import NAMES, Shares

__all__ = ["MOST_NESTED", "as_here", "is_offered", "why_unfit"]

MOST_NESTED = 2
"""Most splits on the way from the root to a leaf."""
MOST_KINDS = 100
"""Most different parts that solvers are asked about: far more than a search composes."""
MOST_CALLS = 1 << 14
"""Most leaves that one run may call: with more, a check would take longer than to plan anew."""
MOST_TEXT = 1000
"""Most characters of a text in a leaf's config."""
MOST_LABEL = 1 << 16
"""Most characters of a label."""
MOST_NUMBERS = 16
"""Most integers in a tuple of a leaf's config."""
LEAST_RANGE = 2**16
"""Integers in a config may be this large, whatever the size of the problem."""


def why_unfit(plan: Plan, problem: Problem, options: Options) -> str:
    """Why ``plan`` may not even be tried on ``problem``, empty when it may: solvers are asked, nothing is run."""
    return _Asking(options).why_unfit(plan, problem)


def _calls(plan: Plan) -> int:
    """The number of leaves that one run of ``plan`` calls."""
    if plan.leaf:
        return 1
    return sum(count * _calls(child) for child, count in zip(plan.children, plan.counts, strict=False))


@dataclass
class _Asking:
    """One plan's walk through the gate, with the parts that solvers were already asked about."""

    options: Options
    asked: set[tuple[Problem, Plan, int]] = field(default_factory=set)

    def why_unfit(self, plan: Plan, problem: Problem, level: int = -1, threads: int = 0, depth: int = 0) -> str:
        """Why ``plan`` may not be tried on ``problem``; empty when it may.

        ``level`` is that of the split above, ``depth`` the number of splits above, and ``threads`` how many threads
        torch has for a part, 0 for all.
        """
        if plan.problem != problem.key:
            return f"its plan has a part for {_shown(plan.problem)}, which is none of the problem's"
        try:
            solver = solvers.get(plan.solver)
        except KeyError:
            return f"its plan needs the solver {plan.solver[:80]!r}, which there is not here"
        if solver.version != plan.version:
            return f"its plan is by {plan.solver} version {plan.version}, here is version {solver.version}"
        if self.options.excludes(solver, plan.config):
            return f"its plan uses {plan.solver}, {EXCLUDED}"
        reasons = solver.why_not(problem)
        if reasons:
            return f"{plan.solver} cannot solve it: {'; '.join(reasons)}"
        try:
            if isinstance(solver, Split):
                return self._parts(plan, problem, solver, level, depth)
            return self._leaf(plan, problem, solver, threads)
        except Exception as error:  # whatever a solver makes of a config that somebody wrote: the plan is refused
            return f"{_not_offered(plan)} ({type(error).__name__}: {str(error)[:200]})"

    def _leaf(self, plan: Plan, problem: Problem, solver: Solver, threads: int) -> str:
        """Why a leaf may not be tried; empty when it may."""
        if plan.children:
            return f"its plan has parts below {plan.solver}, which has none"
        if not is_offered(solver, problem, plan.config, threads):
            return _not_offered(plan)
        if self.options.deterministic and not solver.is_deterministic(problem, plan.config):
            return f"{plan.solver} is not deterministic"
        return ""

    def _parts(self, plan: Plan, problem: Problem, solver: Split, level: int, depth: int) -> str:
        """Why a split or its parts may not be tried; empty when they may."""
        if solver.level <= level:
            return f"its plan cuts by {plan.solver} below a split of the same level"
        if depth == MOST_NESTED or (solver.at_once and depth):
            return f"its plan cuts by {plan.solver} below {depth} other splits"
        sizes, whole = plan.config.get("sizes"), problem.extent(solver.axis_of(problem))
        if set(plan.config) != (set(NAMES) if solver.across else {"sizes"}):
            return _not_offered(plan)
        shown = str(sizes[:20] if isinstance(sizes, tuple) else sizes)[:200]
        if not isinstance(sizes, tuple) or min(sizes, default=0) < 1 or sum(sizes) != whole:
            return f"its plan cuts by {plan.solver} into {shown}, which is not the whole"
        if sum(plan.counts) != len(sizes):  # before they are spelled out
            return f"{_not_offered(plan)}: {len(sizes)} parts and plans for {str(sum(plan.counts))[:20]}"
        if _calls(plan) > MOST_CALLS:
            return f"its plan runs more than {MOST_CALLS} parts"
        parts, plans = execute.parts_of(plan, problem, solver)
        if solver.at_once and not all(child.leaf for child in plans):
            return f"its plan cuts the parts of {plan.solver} again, which run at once"
        if solver.at_once and any(part.problem is None for part in parts):
            return f"its plan has parts of {plan.solver} that meet no data"
        if solver.across:
            if reason := self._unasked(plan):
                return reason
            threads_of = self._threads_of_shares(plan, problem)
        else:
            each = max(1, torch.get_num_threads() // len(parts)) if solver.at_once else 0
            threads_of = [each] * len(parts)
        for part, child, threads in zip(parts, plans, threads_of, strict=True):
            if part.problem is None or (key := (part.problem, child, threads)) in self.asked:
                continue
            if len(self.asked) == MOST_KINDS:
                return f"its plan has more than {MOST_KINDS} different parts, as no search finds"
            self.asked.add(key)
            if reason := self.why_unfit(child, part.problem, solver.level, threads, depth + 1):
                return reason
        return ""

    def _unasked(self, plan: Plan) -> str:
        """Why a plan may not share a batch among its devices; empty when it may."""
        for place in Shares.of(plan.config).places:
            name = place.partition("=")[0]
            if place != HERE and name not in self.options.share_with:
                return f"its plan shares the batch with {_shown(name)}, which share_with does not name"
        return ""

    def _threads_of_shares(self, plan: Plan, problem: Problem) -> list[int]:
        """The threads of torch for each part that a CPU computes, 0 for those of GPUs."""
        shares = Shares.of(plan.config)
        threads = shares.threads(problem.device_type, torch.get_num_threads())
        on_cpu = [p == "cpu" or (p == HERE and problem.device_type == "cpu") for p in shares.places]
        of_places = zip(shares.parts, threads, on_cpu, strict=True)
        return [count if cpu else 0 for sizes, count, cpu in of_places for _ in sizes]


def as_here(plan: Plan, problem: Problem) -> Plan:
    """A plan that passed the gate, with constants and labels as solvers here give them, not as the plan claims."""
    solver = solvers.get(plan.solver)
    constant = 0
    if not isinstance(solver, Split) and problem.constant_operand:
        constant = solver.constant(problem, plan.config)
    children = plan.children
    if isinstance(solver, Split):
        parts, plans = execute.parts_of(plan, problem, solver)
        problem_of = {
            id(child): part.problem for part, child in zip(parts, plans, strict=True) if part.problem is not None
        }
        children = tuple(as_here(c, problem_of[id(c)]) if id(c) in problem_of else c for c in plan.children)
    label = plan.label if plan.label.isprintable() and len(plan.label) <= MOST_LABEL else ""
    return replace(plan, constant=constant, children=children, label=label)


def _not_offered(plan: Plan) -> str:
    """The reason of a plan whose solver does not offer its config."""
    return f"{plan.solver} does not offer {_shown(str(plan.config)) or 'no config'} here"


def _shown(text: str) -> str:
    """The beginning of a text from elsewhere, as messages show it, without what could move a terminal's cursor."""
    return "".join(c if c.isprintable() else "?" for c in text[:200])


def is_offered(solver: Solver, problem: Problem, config: Config, threads: int = 0) -> bool:
    """Whether the solver itself would try ``config``, perhaps under a limit that is just enough for it.

    Values and their types must be as it offers them: 1 is neither 1.0 nor true. ``threads`` are torch's for the part,
    0 for as many as there are.
    """
    answers: list[bool] = []

    def ask() -> None:
        answers.append(_asked(solver, problem, config))

    if threads:
        with_threads(ask, threads)
    else:
        ask()
    return answers[-1]


def _asked(solver: Solver, problem: Problem, config: Config) -> bool:
    """Whether ``solver`` offers ``config``, asked with torch's threads as they are."""
    key = config.key
    offered = [c for c, _ in solver.offers(problem, None)]
    if any(c.key == key for c in offered):
        return True
    # A solver computes with a config before it says no: only with one that is at least of the kind that it offers.
    if not _is_of_the_kind(config, offered, problem, solver.amounts):
        return False
    if any(c.key == key for c, _ in solver.offers(problem, None, [config])):
        return True
    if not _is_within(config, offered, solver.amounts):
        return False
    try:
        ceiling = solver.workspace(problem, config) + solver.hidden_workspace(problem, config)
    except SolverUnavailable:  # a library's own numbers, of which this version has none
        return False
    return any(c.key == key for c, _ in solver.offers(problem, ceiling))


def _is_of_the_kind(config: Config, offered: list[Config], problem: Problem, amounts: frozenset[str]) -> bool:
    """Whether names and types of values are those of the configs that are ``offered``, and no value is absurd.

    Some amounts are named under a limit alone.
    """
    kinds = {(name, type(value)) for c in offered for name, value in c.items()}
    kinds |= {(name, int) for name in amounts}
    largest = max(LEAST_RANGE, *(math.prod(problem.shape(role)) for role in problem.roles))
    for name, value in config.items():
        if (name, type(value)) not in kinds:
            return False
        numbers = value if isinstance(value, tuple) else (value,)
        if len(numbers) > MOST_NUMBERS or any(isinstance(n, (int, float)) and abs(n) > largest for n in numbers):
            return False
        if isinstance(value, str) and len(value) > MOST_TEXT:
            return False
    return True


def _is_within(config: Config, offered: list[Config], amounts: frozenset[str]) -> bool:
    """Whether no value, amounts aside, is above those in ``offered``: under a limit they only get smaller."""
    for name, value in config.items():
        if name in amounts:
            continue
        known = [c[name] for c in offered if name in c]
        if isinstance(value, (str, bool)):
            if value not in known:
                return False
        elif max(_numbers(value), default=0) > max((n for k in known for n in _numbers(k)), default=0):
            return False
    return True


def _numbers(value: object) -> tuple[int | float, ...]:
    """The numbers in a value of a config."""
    if isinstance(value, tuple):
        return value
    return (value,) if isinstance(value, (int, float)) else ()
