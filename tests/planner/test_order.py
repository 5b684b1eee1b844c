"""The order of planning: what is compiled comes first, and workers have enough to do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from tilewise.plan import Config, Plan
from tilewise.planner import order
from tilewise.planner.options import Options
from tilewise.problems.conv.axis import Axis
from tilewise.problems.conv.problem import ConvProblem, Pass

PROBLEMS = [ConvProblem(Pass.FPROP, batch, 3, 4, (Axis(8, 3),) * 2, device="cuda:some GPU") for batch in range(1, 6)]


class Kernels:
    """Kernels that are there ``after`` so many waits, and work for workers after so many problems."""

    def __init__(self, after: Sequence[int], enough: int) -> None:
        self.after = dict(zip((p.key for p in PROBLEMS), after, strict=True))
        self.enough, self.waits, self.added = enough, 0, list[str]()
        self.loads: list[int] = []

    @property
    def has_enough(self) -> bool:
        return sum(self.after[key] > self.waits for key in self.added) >= self.enough

    def add(self, name: str, loads: Sequence[Any]) -> None:
        self.added.append(name)
        self.loads.append(len(loads))

    def is_ready(self, name: str) -> bool:
        return self.after[name] <= self.waits

    def wait(self) -> None:
        self.waits += 1


def batches(kernels: Kernels, told: list[int]) -> list[int]:
    def begin(problem: Any) -> list[tuple[Any, Plan]]:
        """Wants something the first time, and nothing more when that is there."""
        told.append(problem.batch)
        return [(problem, Plan(problem.key, "own", 1, Config()))] * problem.batch * (told.count(problem.batch) == 1)

    unsound: Any = kernels
    return [p.batch for p in order.ready_first(PROBLEMS, begin, unsound)]


def test_what_is_ready_comes_first() -> None:
    kernels, told = Kernels([3, 1, 0, 2, 2], enough=99), list[int]()
    assert batches(kernels, told) == [3, 2, 4, 5, 1]
    assert sorted(told) == [1, 1, 2, 2, 3, 3, 4, 4, 5, 5]
    assert sorted(kernels.loads) == [1, 2, 3, 4, 5]


def test_kernels_are_asked_for_a_few_times_at_most() -> None:
    kernels, told = Kernels([0] * 5, enough=0), list[int]()

    def begin(problem: Any) -> list[tuple[Any, Plan]]:
        told.append(problem.batch)
        return [(problem, Plan(problem.key, "own", 1, Config()))]

    unsound: Any = kernels
    assert [p.batch for p in order.ready_first(PROBLEMS, begin, unsound)] == [1, 2, 3, 4, 5]
    assert told == [n for n in (1, 2, 3, 4, 5) for _ in range(order.ROUNDS)]


def test_no_more_problems_are_begun_than_workers_can_be_kept_busy_with() -> None:
    kernels, told = Kernels([0, 5, 5, 5, 5], enough=2), list[int]()
    assert batches(kernels, told)[0] == 1
    assert told[:5] == [1, 2, 3, 1, 4], "the first is looked at again once two others keep workers busy"


def test_a_problem_that_wants_nothing_is_planned_at_once() -> None:
    kernels = Kernels([9] * 5, enough=1)
    unsound: Any = kernels
    assert [p.batch for p in order.ready_first(PROBLEMS, lambda problem: [], unsound)] == [1, 2, 3, 4, 5]
    assert kernels.added == []


@pytest.mark.parametrize("options", [Options(rigor="estimate"), Options(rigor="wisdom_only"), Options(rigor="patient")])
def test_where_nothing_is_left_out_the_order_stays(options: Options) -> None:
    unused: Any = None
    assert list(order.in_order(PROBLEMS, options, unused, unused)) == PROBLEMS


def test_a_cpus_problems_stay_in_their_order() -> None:
    unused: Any = None
    problems = [p.on("cpu") for p in PROBLEMS]
    assert list(order.in_order(problems, Options(), unused, unused)) == problems


def test_known_plans_need_no_kernels() -> None:
    unused: Any = None
    assert list(order.in_order(PROBLEMS, Options(), lambda p: p.batch != 2, unused)) == [
        *PROBLEMS[:1], *PROBLEMS[2:], PROBLEMS[1],
    ]  # fmt: skip
