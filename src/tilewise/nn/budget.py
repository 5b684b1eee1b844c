"""One workspace budget for a network: its kernels' fronts, the division of the budget, and each kernel's limit."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from tilewise.plan import Plan, parse_bytes
from tilewise.planner import NoPlanError, Options, Planner
from tilewise.planner.budget import POLICIES, Allocation, Group, Kernel, allocate
from tilewise.problem import ConvProblem

__all__ = ["Budget", "Divided", "GroupsOf", "Names", "divide", "make_budget"]

WIDEN = 4
"""Where a kernel has no plan within the budget, limits rise by this factor to see what it needs at least."""
FIRST_WIDER, MOST = 2**16, 2**40


@dataclass(frozen=True, slots=True)
class Budget:
    """``total`` bytes for all kernels of a step together, divided by ``policy``: ``arena`` or ``paper_wd``.

    ``each`` is the limit of a single kernel beside it.
    """

    total: int
    policy: str
    each: int | None = None

    @property
    def limit(self) -> int:
        """What a single kernel may use at most."""
        return self.total if self.each is None else min(self.total, self.each)


Names = Mapping[ConvProblem, Sequence[str]]
"""The layers that pose each problem, one name an occurrence, in the order they run."""
GroupsOf = Callable[[Sequence[ConvProblem]], Sequence[Group]]
"""What may run at once, for the kernels of these problems: groups of branches of indices into them."""


@dataclass(frozen=True, slots=True)
class Divided:
    """A budget divided: the ``limits`` of single problems in bytes, and ``facts`` to be told, as plain JSON values."""

    limits: dict[ConvProblem, int]
    facts: dict[str, Any]


def make_budget(total_workspace: int | str | None, policy: str, each: int | None = None) -> Budget | None:
    """A budget from a user's arguments, ``each`` in bytes; ``None`` without a total.

    Raises ``ValueError`` naming the argument at fault.
    """
    if policy not in POLICIES:
        raise ValueError(f"policy={policy!r}: one of {', '.join(POLICIES)} would do")
    if total_workspace is None:
        if policy != POLICIES[0]:
            raise ValueError(f"policy={policy!r}: it divides a total_workspace; give one, such as '120MiB'")
        return None
    return Budget(parse_bytes(total_workspace, "total_workspace"), policy, each)


def divide(
    planner: Planner, names: Names, options: Options, budget: Budget, groups_of: GroupsOf | None = None
) -> Divided:
    """Find the kernels' fronts, choose among their points, and give each kernel its limit.

    The workspace of ``options`` is the budget's affair. ``groups_of`` is asked what may run at once under ``arena``:
    without it kernels run one after the other. Where wisdom is all that is asked and it knows nothing of a kernel, the
    kernel gets no limit here.

    Raises ``NoPlanError`` with the least total that works.
    """
    options = replace(options, workspace=budget.limit)
    fronts = planner.fronts(names, options)
    known = [problem for problem in names if fronts[problem] or options.rigor != "wisdom_only"]
    kernels = [_kernel(planner, problem, fronts[problem], names[problem], options, budget) for problem in known]
    groups = () if groups_of is None else groups_of(known)
    try:
        found = allocate(kernels, budget.total, budget.policy, groups)
    except NoPlanError as error:
        raise NoPlanError(f"total_workspace={budget.total}: {error}") from error
    return Divided(
        {problem: min(own, budget.limit) for problem, own in zip(known, found.limits, strict=True)},
        {"budget": _facts(found, kernels, [names[problem] for problem in known], known)},
    )


def _kernel(
    planner: Planner,
    problem: ConvProblem,
    front: Sequence[Plan],
    names: Sequence[str],
    options: Options,
    budget: Budget,
) -> Kernel:
    """A kernel with the points of its front; of one without, what it needs at least is found first."""
    limit, most = budget.limit, MOST if budget.each is None else budget.each
    while not front and limit < most:
        limit = min(max(limit * WIDEN, FIRST_WIDER), most)
        front = planner.front(problem, replace(options, workspace=limit))
    front = front or [planner.plan(problem, options)]  # which says why there is none
    return Kernel(
        f"{names[0]} {problem.pass_.value}", tuple((plan.time_ms, plan.workspace) for plan in front), len(names)
    )


def _facts(
    found: Allocation, kernels: Sequence[Kernel], names: Sequence[Sequence[str]], problems: Sequence[ConvProblem]
) -> dict[str, Any]:
    """How the budget was divided, a segment for every occurrence."""
    segments = []
    for kernel, choice, own, problem in zip(kernels, found.choices, names, problems, strict=True):
        time_ms, workspace = kernel.points[choice]
        segments += [
            {"layer": name, "pass": problem.pass_.value, "workspace": workspace, "time_ms": time_ms} for name in own
        ]
    return {
        "policy": found.policy,
        "total": found.total,
        "used": found.used,
        "least": found.least,
        "segments": segments,
        "program": asdict(found.program),
    }
