"""One workspace budget for a network: plans of each kernel, the division of the budget, and each kernel's limit."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from tilewise.plan import Plan, parse_bytes
from tilewise.planner import NoPlanError, Options, Planner
from tilewise.planner.budget.allocate import Allocation, Group, Kernel, allocate
from tilewise.problems.base import Problem
from tilewise.settings import OPTIONS

__all__ = ["Budget", "Divided", "GroupsOf", "Names", "divide", "make_budget"]

WIDEN = 4
"""Where a kernel has no plan within the budget, limits rise by this factor to see what it needs at least."""
FIRST_WIDER, MOST = 2**16, 2**40


@dataclass(frozen=True, slots=True)
class Budget:
    """A budget of ``total`` bytes for all kernels of a step together.

    ``policy`` says how it is divided: ``arena`` or ``paper_wd``. ``each`` is a further limit in bytes for every single
    kernel.
    """

    total: int
    policy: str
    each: int | None = None

    @property
    def limit(self) -> int:
        """The most bytes that a single kernel may use."""
        return self.total if self.each is None else min(self.total, self.each)


Names = Mapping[Any, Sequence[str]]
"""The names of the layers that have each problem, one for every call, in the order in which they run."""
GroupsOf = Callable[[Sequence[Any]], Sequence[Group]]
"""Tells which kernels may run at once: for a list of problems, groups of branches of indices into the list."""


@dataclass(frozen=True, slots=True)
class Divided:
    """The result of dividing a budget.

    ``limits`` has the bytes that each problem may use. ``facts`` goes into the report, as plain JSON values.
    """

    limits: dict[Any, int]
    facts: dict[str, Any]


def make_budget(total_workspace: int | str | None, policy: str, each: int | None = None) -> Budget | None:
    """The budget that a user's arguments describe, ``None`` where ``total_workspace`` is ``None``.

    ``each`` is the limit of a single kernel in bytes. Raises ``ValueError`` naming the argument at fault.
    """
    OPTIONS["policy"].kind.check("policy", policy)
    if total_workspace is None:
        if policy != OPTIONS["policy"].default:
            raise ValueError(f"policy={policy!r}: it divides a total_workspace; give one, such as '120MiB'")
        return None
    return Budget(parse_bytes(total_workspace, "total_workspace"), policy, each)


def divide(
    planner: Planner, names: Names, options: Options, budget: Budget, groups_of: GroupsOf | None = None
) -> Divided:
    """Divide ``budget`` among the problems of ``names``, so that the whole step takes the least time.

    Each kernel's front is found first (its plans that are faster than all that need less workspace); one plan of each
    is chosen, and its workspace is the kernel's limit. The workspace limit of ``options`` is replaced by the budget's.
    ``groups_of`` is asked under ``arena`` which kernels may run at once; without it kernels run one after the other.
    With rigor ``wisdom_only`` a kernel of which wisdom knows nothing gets no limit.

    Raises ``NoPlanError`` with the least total that works.
    """
    options = replace(options, workspace=budget.limit)
    fronts = planner.fronts(names, options)
    divisible = [problem for problem in names if fronts[problem] or options.rigor != "wisdom_only"]
    kernels = [_kernel(planner, problem, fronts[problem], names[problem], options, budget) for problem in divisible]
    groups = () if groups_of is None else groups_of(divisible)
    try:
        allocation = allocate(kernels, budget.total, budget.policy, groups)
    except NoPlanError as error:
        raise NoPlanError(f"total_workspace={budget.total}: {error}") from error
    return Divided(
        {problem: min(limit, budget.limit) for problem, limit in zip(divisible, allocation.limits, strict=True)},
        {"budget": _facts(allocation, kernels, [names[problem] for problem in divisible], divisible)},
    )


def _kernel(
    planner: Planner,
    problem: Problem,
    front: Sequence[Plan],
    names: Sequence[str],
    options: Options,
    budget: Budget,
) -> Kernel:
    """A kernel with the time and workspace of each plan on its front.

    Where no plan fits the budget, limits are raised until one does, so that the error can say what is needed.
    """
    limit, most = budget.limit, MOST if budget.each is None else budget.each
    while not front and limit < most:
        limit = min(max(limit * WIDEN, FIRST_WIDER), most)
        front = planner.front(problem, replace(options, workspace=limit))
    front = front or [planner.plan(problem, options)]  # which says why there is none
    return Kernel(f"{names[0]} {problem.task}", tuple((plan.time_ms, plan.workspace) for plan in front), len(names))


def _facts(
    allocation: Allocation, kernels: Sequence[Kernel], names: Sequence[Sequence[str]], problems: Sequence[Problem]
) -> dict[str, Any]:
    """The report's facts on how the budget was divided, with one segment for every call of a kernel."""
    segments = []
    for kernel, choice, layers, problem in zip(kernels, allocation.choices, names, problems, strict=True):
        time_ms, workspace = kernel.points[choice]
        segments += [
            {"layer": name, "pass": problem.task, "workspace": workspace, "time_ms": time_ms} for name in layers
        ]
    return {
        "policy": allocation.policy,
        "total": allocation.total,
        "used": allocation.used,
        "least": allocation.least,
        "segments": segments,
        "program": asdict(allocation.program),
    }
