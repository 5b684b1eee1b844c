"""The leaves of plans, and the memory that they take or may take."""

from __future__ import annotations

from collections.abc import Iterator

from tilewise import execute, solvers
from tilewise.execute.kept_filter import kept_bytes
from tilewise.machine.places import HERE, place_on_this_machine
from tilewise.plan import Config, Measurement, Plan, format_bytes
from tilewise.planner.measuring.times import NOISE
from tilewise.problems.base import Problem
from tilewise.problems.kinds import from_key
from tilewise.solvers import Solver, Split
from tilewise.solvers.common.shares import Shares

__all__ = [
    "OverLimit",
    "baseline_over",
    "check_declared",
    "has_exact_memory",
    "hidden_bytes",
    "leaf_parts",
    "leaf_plan",
    "needed_beside",
]


def leaf_parts(plan: Plan) -> Iterator[tuple[Problem, Plan]]:
    """Every distinct leaf of a division with its problem."""
    for child in plan.children:
        if child.leaf:
            yield from_key(child.problem), child
        else:
            yield from leaf_parts(child)


def has_exact_memory(plan: Plan) -> bool:
    """Whether all that ``plan`` takes on a CPU is declared or comes from torch's allocator."""
    return all(_is_exact(solvers.get(leaf.solver), leaf.config) for leaf in plan.leaves())


def _is_exact(solver: Solver, config: Config) -> bool:
    """Whether all memory of a solver, and of the one it computes with, can be counted on a CPU."""
    inner_solver = solver.computes_with(config)
    return solver.exact_memory and (not inner_solver or solvers.get(inner_solver).exact_memory)


def needed_beside(solver: Solver, problem: Problem, config: Config, hidden: int) -> int:
    """Bytes that count beside a leaf's workspace: ``hidden`` in its libraries, or more where less would not show."""
    if problem.device_type != "cpu" or _is_exact(solver, config):
        return hidden
    return max(hidden, NOISE)


def baseline_over(problem: Problem, workspace: int, limit: int) -> str:
    """Why torch's own choice, which took ``workspace`` bytes, may not be used under ``limit``."""
    rough = needed_beside(solvers.baseline(problem), problem, Config(), 0)
    unseen = f", {format_bytes(rough)} of it for what may not show" if rough >= workspace - limit else ""
    return f"took {format_bytes(workspace)} of workspace when run{unseen}, the limit is {format_bytes(limit)}"


def hidden_bytes(plan: Plan, problem: Problem) -> int:
    """Bytes that the libraries of a plan's leaves take at the most; for parts that run at once, the sum.

    Of shares of several devices it is what they take of the problem's own.
    """
    solver = solvers.get(plan.solver)
    if not isinstance(solver, Split):
        return solver.hidden_workspace(problem, plan.config)
    if solver.across:
        return hidden_by_place(plan, problem, solver).get(HERE, 0)
    parts, plans = execute.parts_of(plan, problem, solver)
    of_parts = [hidden_bytes(child, p.problem) for p, child in zip(parts, plans, strict=True) if p.problem is not None]
    return sum(of_parts) if solver.at_once else max(of_parts, default=0)


def hidden_by_place(plan: Plan, problem: Problem, solver: Split) -> dict[str, int]:
    """For each place of a plan that shares a batch among devices, the bytes that libraries take there at the most."""
    shares = Shares.of(plan.config)
    parts, plans = execute.parts_of(plan, problem, solver)
    owners = [place for place, sizes in zip(shares.places, shares.parts, strict=True) for _ in sizes]
    most: dict[str, int] = {}
    for place, part, child in zip(owners, parts, plans, strict=True):
        if part.problem is not None:
            most[place] = max(most.get(place, 0), hidden_bytes(child, part.problem))
    return most


def leaf_plan(problem: Problem, m: Measurement) -> Plan:
    """The plan that a leaf's measurement stands for."""
    time_ms = float("nan") if m.time_ms is None else m.time_ms
    constant = kept_bytes(solvers.get(m.solver), problem, m.config)
    return Plan(
        problem.key, m.solver, m.version, m.config, time_ms=time_ms, workspace=m.workspace or 0, constant=constant,
        error=m.error, host_ms=m.host_ms, load=m.load,
    )  # fmt: skip


class OverLimit(Exception):
    """A bound candidate needs more workspace than the limit allows."""

    def __init__(self, workspace: int, limit: int) -> None:
        needs, allowed = format_bytes(workspace), format_bytes(limit)
        super().__init__(f"needs {needs} of workspace, temporaries included, the limit is {allowed}")
        self.workspace = workspace


def check_declared(plan: Plan, problem: Problem, bound: execute.Bound, limit: int | None) -> None:
    """Raise :class:`OverLimit` where a plan declares more than ``limit``, what its libraries take included.

    The limit holds on each device by itself, where parts are computed on others.
    """
    if limit is None:
        return
    taken = {**bound.workspaces, problem.device: bound.workspaces[problem.device] + hidden_bytes(plan, problem)}
    solver = solvers.get(plan.solver)
    if isinstance(solver, Split) and solver.across:
        for place, hidden in hidden_by_place(plan, problem, solver).items():
            if place != HERE:
                device = str(place_on_this_machine(place))
                taken[device] = taken.get(device, 0) + hidden
    declared = max(taken.values())
    if declared > limit:
        raise OverLimit(declared, limit)
