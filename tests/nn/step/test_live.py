"""Steps of a program that goes on are compared: what wins is kept, whatever else the program does between them."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Hashable, Mapping
from typing import Any

import pytest
import torch

from tilewise.nn.background import service as service_module
from tilewise.nn.background.service import Service
from tilewise.nn.step.course import MOST_STEPS
from tilewise.nn.step.live import WITHOUT, LiveGoal
from tilewise.nn.step.pairs import LEAST_PAIRS
from tilewise.nn.step.result import StepReport

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _own_service(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service_module, "_service", Service())


class Program:
    """A program whose steps take what ``true`` says of its passes, give or take one percent, by a clock of its own."""

    def __init__(self, promised: Mapping[Any, float], true: Mapping[Any, float], torch_ms: float = 10.0) -> None:
        self.now = 0.0
        self.promised = {(key, False): gain for key, gain in promised.items()}
        self.true = {(key, False): gain for key, gain in true.items()}
        self.torch_ms = torch_ms
        self.withheld: frozenset[Any] = frozenset()
        self.by_torch = False
        self.pending = 0
        self.ways: list[bool] = []
        self.told: list[StepReport] = []
        self._noise = random.Random(3)
        self.live = LiveGoal(
            self, lambda: self.pending, decided=self.told.append, clock=lambda: self.now
        )  # fmt: skip

    def gains(self) -> Mapping[Any, float]:
        return {key: gain for key, gain in self.promised.items() if key not in self.withheld}

    def withhold(self, keys: Collection[Any], note: str) -> None:
        assert not self.by_torch
        self.withheld = frozenset(keys)

    def switches(self) -> tuple[Callable[[], None], Callable[[], None]]:
        return (lambda: setattr(self, "by_torch", True)), (lambda: setattr(self, "by_torch", False))

    def step(self, what: Hashable = "train", gradients: bool = True, ms: float | None = None) -> None:
        self.live.boundary(CPU)
        self.live.called(what, with_gradients=gradients)
        self.ways.append(self.by_torch)
        took = self.torch_ms if ms is None else ms
        if not self.by_torch and ms is None:
            took -= sum(gain for key, gain in self.true.items() if key not in self.withheld)
        self.now += took / 1e3 * self._noise.gauss(1.0, 0.01)

    def run(self, most: int = 1000) -> int:
        """Steps until it is decided."""
        for count in range(most):
            if self.live.over:
                return count
            self.step()
        raise AssertionError("nothing was decided")


def test_what_gains_is_kept() -> None:
    program = Program({1: 3.0, 2: 1.0}, {1: 3.0, 2: 1.0})
    assert program.live.report.pending
    assert program.run() < 200
    (told,) = program.told
    assert told.kept
    assert told == program.live.report
    assert told.least is not None
    assert told.least > 1.0
    assert told.pairs == LEAST_PAIRS
    assert told.predicted_ms == pytest.approx(4.0)
    assert not program.by_torch
    assert program.withheld == frozenset()
    assert 0 < sum(program.ways) < len(program.ways) * 0.6


def test_torch_stays_where_plans_are_slow() -> None:
    program = Program(dict.fromkeys(range(4), 1.0), dict.fromkeys(range(4), -2.0))
    assert program.run() < MOST_STEPS
    assert not program.live.report.kept
    assert program.withheld == set(program.promised)
    assert not program.by_torch
    assert program.live.report.taken_back == 4


def test_equal_steps_are_torchs() -> None:
    """Where the interval holds 1, plans are not surely faster."""
    program = Program({1: 0.5}, {1: 0.0})
    program.run()
    assert not program.live.report.kept
    assert program.withheld == {(1, False)}


def test_passes_that_promise_least_are_taken_back_where_the_step_gains_by_that() -> None:
    gains = {**dict.fromkeys(range(6), 0.5), 6: 3.0, 7: 3.0}
    true = {**dict.fromkeys(range(6), -1.0), 6: 3.0, 7: 3.0}
    program = Program(gains, true, 12.0)
    program.run()
    assert program.live.report.kept
    assert {(6, False), (7, False)}.isdisjoint(program.withheld)
    assert 3 <= len(program.withheld) == program.live.report.taken_back


@pytest.mark.parametrize("plans", [2.0, -2.0])
def test_evaluations_are_not_compared_and_run_by_plans(plans: float) -> None:
    """They take ten times as long, and would turn the result round if they counted on one side."""
    program = Program({1: 2.0}, {1: plans})
    while not program.live.over:
        for _ in range(17):
            program.step()
        before = len(program.ways)
        for _ in range(30):
            program.step("evaluation", gradients=False, ms=100.0)
        assert not any(program.ways[before + 6 :])
    assert program.live.report.kept == (plans > 0)
    assert program.live.report.torch_ms == pytest.approx(10.0, rel=0.05)


def test_alternating_kinds_are_compared_with_their_like() -> None:
    """A generator's and a discriminator's step: the longer one decides, though the other is between."""
    program = Program({1: 2.0}, {1: 2.0})
    for _ in range(500):
        program.step()
        program.step("other", ms=3.0)
    assert program.live.over
    assert program.live.report.kept
    assert program.live.report.torch_ms == pytest.approx(10.0, rel=0.05)


def test_alternating_kinds_leave_time_to_take_passes_back() -> None:
    gains = {**dict.fromkeys(range(6), 0.5), 6: 3.0, 7: 3.0}
    program = Program(gains, {**dict.fromkeys(range(6), -1.0), 6: 3.0, 7: 3.0}, 12.0)
    for _ in range(1000):
        program.step()
        program.step("other", ms=3.0)
    assert program.live.report.kept
    assert 3 <= len(program.withheld) == program.live.report.taken_back


def test_steps_of_ever_changing_kinds_are_left_as_they_are() -> None:
    program = Program({1: 2.0}, {1: 2.0})
    for index in range(MOST_STEPS + 10):
        program.step(index)
    assert program.live.over
    assert program.told == []
    assert "too irregular (0 of 20 pairs after 401 steps)" in str(program.live.report)
    assert program.withheld == frozenset()


def test_nothing_is_compared_while_something_is_pending_and_blocks_begin_anew() -> None:
    program = Program({1: 2.0}, {1: 2.0})
    program.pending = 3
    for _ in range(20):
        program.step()
    assert not any(program.ways)
    assert str(program.live.report) == "step: still to be compared, once all is planned"
    program.pending = 0
    while not program.by_torch:
        program.step()
    assert "still to be compared: 0 of 20 pairs" in str(program.live.report)
    program.pending = 1
    program.step()
    assert not program.by_torch
    program.pending = 0
    program.run()
    assert program.live.report.kept


def test_a_step_with_a_turn_or_a_failure_in_it_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every third step takes ten times as long, with a turn of planning in it; every fourth fails half way."""
    program = Program({1: 2.0}, {1: 2.0})
    for index in range(400):
        program.step()
        if index % 3 == 0:
            service_module.service().turns += 1
            program.now += 0.1
        elif index % 4 == 0:
            program.live.disturb()
    assert program.live.report.kept
    assert program.live.report.torch_ms == pytest.approx(10.0, rel=0.05)
    assert program.live.report.planned_ms == pytest.approx(8.0, rel=0.05)


def test_what_a_program_does_every_few_steps_meets_both_ways() -> None:
    """An optimizer's step after four backwards, as long as ten of them, decides nothing."""
    program = Program({1: 0.01}, {1: 0.0}, torch_ms=1.0)
    for index in range(3000):
        program.step()
        if index % 4 == 3:
            program.now += 0.01
        if program.live.over:
            break
    speedup = program.live.report.speedup
    assert speedup is not None
    assert 0.5 < speedup < 2.0


def test_inference_is_compared_where_there_is_no_training() -> None:
    program = Program({1: 2.0}, {1: 2.0})
    for _ in range(WITHOUT - 10):
        program.step("inference", gradients=False)
    assert not any(program.ways)
    for _ in range(300):
        program.step("inference", gradients=False)
    assert program.live.report.kept


def test_training_that_comes_later_is_what_counts() -> None:
    program = Program({1: 2.0}, {1: -2.0})
    for _ in range(WITHOUT + 30):
        program.step("evaluation", gradients=False, ms=1.0)
    assert any(program.ways)
    program.run()
    assert not program.live.report.kept
    assert program.live.report.torch_ms == pytest.approx(10.0, rel=0.05)


def test_new_plans_are_compared_by_steps_that_have_them() -> None:
    program = Program({1: 2.0}, {1: 2.0})
    program.run()
    program.promised[2, False] = 1.0
    program.true[2, False] = -4.0
    program.live.reopen()
    for _ in range(20):  # decided already
        program.step()
    assert not program.by_torch
    while not program.live.over:
        program.step("with the new shape")
    first, second = program.told
    assert first.kept
    assert not second.kept
    assert program.withheld == {(2, False)}
    assert program.live.report == first


def test_it_rests_and_stops_with_plans_in_place() -> None:
    program = Program({1: 2.0}, {1: 2.0})
    while not program.by_torch:
        program.step()
    program.live.rest()
    assert not program.by_torch
    program.run()
    other = Program({1: 2.0}, {1: 2.0})
    while not other.by_torch:
        other.step()
    other.live.stop("it was undone")
    assert not other.by_torch
    assert other.live.over
    assert other.live.report.reason == "it was undone"
    assert other.withheld == frozenset()


def test_new_plans_in_the_middle_of_a_graph_change_nothing_before_its_end() -> None:
    program = Program({1: 2.0, 2: 2.0}, {1: -9.0, 2: 2.0})
    while not program.withheld:
        program.step()
    withheld = program.withheld
    y = torch.ones(1, dtype=torch.float32, device=CPU, requires_grad=True) * 2
    service_module.service().graphs.add(y)
    before = program.by_torch
    program.live.reopen()
    program.live.rest()
    program.step()
    assert (program.by_torch, program.withheld) == (before, withheld)
    y.sum().backward()
    program.step()
    assert program.withheld == frozenset()


def test_a_switch_that_fails_ends_the_comparison_and_not_the_program() -> None:
    program = Program({1: 2.0}, {1: 2.0})
    while not program.by_torch:
        program.step()

    def failing(*_: object) -> None:
        raise ArithmeticError("no switch")

    program.live._now.blocks._switches = failing, failing  # type: ignore[union-attr]
    with pytest.warns(UserWarning, match="comparing raised ArithmeticError: no switch"):
        program.run()
    assert program.live.report.reason == "comparing raised ArithmeticError: no switch"


def test_one_program_at_a_time_is_compared_and_one_that_ended_is_not_waited_for() -> None:
    first, second = Program({1: 2.0}, {1: 2.0}), Program({1: 2.0}, {1: 2.0})
    while not first.by_torch:
        first.step()
    for _ in range(50):
        second.step()
    assert not any(second.ways)
    second.run()
    assert second.live.report.kept
    first.run()
    assert first.live.report.kept


@pytest.mark.parametrize(
    ("promised", "reason"),
    [({}, "no pass runs by plan"), ({1: float("nan")}, "there are plans that were not chosen by their times")],
)
def test_what_cannot_be_compared_says_why(promised: dict[int, float], reason: str) -> None:
    program = Program(promised, {})
    program.step()
    assert program.live.over
    assert program.live.report == StepReport(reason=reason)
    assert program.told == []
