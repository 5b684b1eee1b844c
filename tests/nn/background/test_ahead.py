"""Which problem is planned next in the background, while kernels of others are compiled."""

from __future__ import annotations

from typing import Any

from tilewise.nn.background.ahead import Ahead, Entry
from tilewise.planner import Options, Planner
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


def test_what_is_compiled_comes_first_then_what_is_not_begun() -> None:
    entries = [entry(n) for n in range(1, 5)]
    found, kernels = ahead(*entries[:3])
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
    assert found.begin(entry(1, "cpu"), planner, Options())
    assert not found.is_waiting
    found.wait()  # for nothing
