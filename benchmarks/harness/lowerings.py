"""The three lowerings of Caffe con Troll on one problem: their estimates, and their times side by side."""

from __future__ import annotations

import functools
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from harness.configs import LostConfig, Runnable, runnable
from harness.sides import Tensors, race
from tilewise import solvers
from tilewise.plan import Config
from tilewise.planner.search.estimate import Profile, estimate_ms
from tilewise.problems.conv.problem import ConvProblem
from tilewise.solvers import Cost

TYPES = ("lowering_type1", "lowering_type2", "lowering_type3")
CLOSE = 1.1
"""What takes so many times the least is as good."""


@dataclass(frozen=True)
class Lowered:
    """A type with its config of the least estimate; ``cost`` is what that estimate is of."""

    name: str
    config: Config
    cost: Cost
    estimated_ms: float
    ms: float = 0.0


def estimated(name: str, problem: ConvProblem, profile: Profile) -> Lowered:
    """A type's config with the least estimate, as ``rigor="estimate"`` chooses it."""
    solver = solvers.get(name)
    estimate = functools.partial(estimate_ms, problem, profile=profile)
    config = min(solver.configs(problem), key=lambda c: estimate(solver.cost(problem, c)))
    cost = solver.cost(problem, config)
    return Lowered(name, config, cost, estimate(cost))


def measured(problem: ConvProblem, profile: Profile, budget_ms: float, lost: list[str]) -> list[Lowered]:
    """Every type that runs, with its time. Reasons of those that do not are added to ``lost``."""
    tensors = Tensors(problem)
    ready: list[tuple[Lowered, Runnable]] = []
    for name in TYPES:
        if solvers.get(name).why_not(problem):
            continue
        found = estimated(name, problem, profile)
        try:
            ready.append((found, runnable(problem, solvers.get(name), found.config, tensors)))
        except LostConfig as error:
            lost.append(str(error))
    times = race(problem, [each.call for _, each in ready], budget_ms)
    return [
        Lowered(found.name, found.config, found.cost, found.estimated_ms, ms)
        for (found, _), ms in zip(ready, times, strict=True)
    ]


def rank_correlation(first: Sequence[float], second: Sequence[float]) -> float:
    """Spearman's, of as many numbers each; NaN where one has nothing to rank."""
    ranks = [_ranks(numbers) for numbers in (first, second)]
    if any(len(set(each)) < 2 for each in ranks):
        return float("nan")
    return statistics.correlation(*ranks)


def _ranks(numbers: Sequence[float]) -> list[float]:
    """Places in order; of equal numbers the mean place."""
    order = sorted(numbers)
    return [order.index(number) + (order.count(number) - 1) / 2 for number in numbers]
