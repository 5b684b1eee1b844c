"""Which problem is planned next in the background, while kernels of others are compiled."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest

from tilewise.nn.background.ahead import Ahead, Entry
from tilewise.planner import Options, Planner
from tilewise.planner.order import ROUNDS
from tilewise.planner.planner import Lacking, best_if_compiled
from tilewise.problems.conv.axis import Axis
from tilewise.problems.conv.problem import ConvProblem, Pass
from tilewise.wisdom import Wisdom


def entry(batch: int, device: str = "cuda:some GPU") -> Entry:
    return ConvProblem(Pass.FPROP, batch, 3, 4, (Axis(8, 3),) * 2, device=device), False


class Kernels:
    """Kernels of which some are there, and work for workers or none."""

    def __init__(self) -> None:
        self.ready: set[str] = set()
        self.has_enough = False
        self.count_done = 0
        self.jobs: list[str] = []

    def add_jobs(self, name: str, jobs: list[str]) -> bool:
        new = [job for job in jobs if job not in self.jobs]
        self.jobs += new
        return bool(new)

    def is_ready(self, name: str) -> bool:
        return name in self.ready


def ahead(*begun: Entry) -> tuple[Ahead, Kernels]:
    found, kernels = Ahead(), Kernels()
    unsound: Any = kernels
    found._kernels = unsound
    found._begun = dict.fromkeys(begun, 1)
    return found, kernels


def anything(_: Entry) -> bool:
    return True


def test_until_a_first_problem_is_planned_no_other_is_begun() -> None:
    entries = [entry(n) for n in range(1, 4)]
    found, kernels = ahead()
    assert found.pick(entries, anything) == entries[0]
    found._begun[entries[0]] = 1
    assert found.pick(entries, anything) is None
    kernels.ready = {f"{entries[0][0].key} False"}
    assert found.pick(entries, anything) == entries[0]
    found.forget(entries[0])
    found._begun[entries[1]] = 1
    assert found.pick(entries[1:], anything) == entries[2]


def test_what_is_compiled_comes_first_then_what_is_not_begun() -> None:
    entries = [entry(n) for n in range(1, 5)]
    found, kernels = ahead(*entries[:3])
    found.forget(entry(9))  # one is planned
    assert found.pick(entries, anything) == entries[3]
    kernels.ready = {f"{entries[1][0].key} False"}
    assert found.pick(entries, anything) == entries[1]
    kernels.has_enough = True
    assert found.pick(entries, anything) == entries[1]
    assert found.pick(entries, lambda each: each != entries[1]) is None
    assert found.is_waiting


def test_only_what_fits_is_picked() -> None:
    entries = [entry(n) for n in range(1, 4)]
    found, _ = ahead()
    assert found.pick(entries, lambda each: each == entries[2]) == entries[2]
    found.close()
    assert found.pick(entries, lambda each: each == entries[1]) == entries[1]
    assert found.pick(entries, lambda each: False) is None


def test_what_is_decided_is_waited_for_no_more() -> None:
    entries = [entry(n) for n in range(1, 3)]
    found, _ = ahead(*entries)
    for each in entries:
        assert found.is_waiting
        found.forget(each)
    assert not found.is_waiting


def test_on_a_cpu_a_problem_is_planned_at_once() -> None:
    found, planner = Ahead(), Planner(Wisdom(None))
    assert found.planned(entry(1, "cpu"), planner, Options(), lambda: "a plan") == "a plan"
    assert not found.is_waiting
    found.wait()  # for nothing


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
def test_a_problem_waits_for_what_it_lacks_a_few_times_at_most() -> None:
    found, kernels = ahead()
    planner, problem = Planner(Wisdom(None)), entry(1)
    lacks: list[str] = []

    def plan() -> str:
        """Lack one kernel after the other, unless the search is to compile by itself."""
        if planner.best is best_if_compiled:
            lacks.append(f"kernel {len(lacks)}")
            raise Lacking(lacks[-1:])
        return "a plan"

    for count in range(1, ROUNDS + 1):
        assert found.planned(problem, planner, Options(), plan) is None
        assert found.is_waiting
        assert len(kernels.jobs) == count
    assert found.planned(problem, planner, Options(), plan) == "a plan"
    assert not found.is_waiting
    assert len(lacks) == ROUNDS


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
def test_what_workers_cannot_do_is_not_waited_for() -> None:
    found, kernels = ahead()
    planner = Planner(Wisdom(None))
    kernels.jobs = ["impossible"]

    def plan() -> str:
        if planner.best is best_if_compiled:
            raise Lacking(["impossible"])
        return "a plan"

    assert found.planned(entry(1), planner, Options(), plan) == "a plan"
    assert found.planned(entry(2), planner, Options(rigor="estimate"), plan) == "a plan"
