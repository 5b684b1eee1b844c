"""Plans are kept where a model's whole step is faster with them, and taken back where it is not."""

from __future__ import annotations

import itertools
import logging
import math
import random
from collections.abc import Callable, Collection, Mapping
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.nn.test_step import lowered
from torch import nn

import tilewise
from tilewise import solvers
from tilewise.nn import report
from tilewise.nn.layers.kinds import is_planned
from tilewise.nn.step.goal import StepGoal
from tilewise.nn.step.pairs import CLEAR_PAIRS, LEAST_PAIRS, Side, interval, time_pairs
from tilewise.nn.step.step import Step
from tilewise.plan import Plan
from tilewise.planner import Options, Planner
from tilewise.problems.conv.problem import ConvProblem, Pass

CPU = torch.device("cpu")


@given(st.lists(st.floats(0.1, 10.0), min_size=6, max_size=60))
def test_the_interval_is_made_of_values_around_the_median(values: list[float]) -> None:
    least, median, most = interval(values)
    assert {least, most} <= set(values)
    assert least <= median <= most
    ordered = sorted(values)
    below = ordered.index(least)
    # By counting all outcomes of as many coins: fewer than that many on one side in at most 2.5 of 100.
    outside = sum(math.comb(len(values), k) for k in range(below + 1)) / 2 ** len(values)
    assert outside <= 0.025 or ordered[: below + 1].count(least) > 1


def test_the_interval_holds_the_true_median_as_often_as_it_says() -> None:
    draw = random.Random(1)
    held = 0
    for _ in range(2000):
        least, _, most = interval([draw.expovariate(1.0) for _ in range(LEAST_PAIRS)])
        held += least <= math.log(2) <= most
    assert 0.94 <= held / 2000 <= 0.99


def test_few_values_have_no_interval() -> None:
    assert interval([1.0, 2.0, 3.0]) == (-math.inf, 2.0, math.inf)


def test_both_ways_run_equally_often_and_in_changing_order() -> None:
    used: list[str] = []
    ran: list[str] = []
    sides = [Side(lambda n=name: used.append(n), lambda: ran.append(used[-1])) for name in "ab"]  # type: ignore[misc]
    noted: list[tuple[int, int]] = []
    pairs = time_pairs(*sides, CPU, 6, lambda done, total: noted.append((done, total)))
    assert noted == [(n, 6) for n in range(1, 7)]
    assert used[4:] == list("abbaabbaabba")
    assert ran.count("a") == ran.count("b")
    assert len(pairs.first_ms) == len(pairs.second_ms) == 6
    assert pairs.host_ms is pairs.device_ms is None


@pytest.mark.parametrize(
    ("ratios", "seconds", "pairs"),
    [
        ((1.5, 1.2), 1.0, CLEAR_PAIRS),
        ((0.7, 0.8), 1.0, CLEAR_PAIRS),  # a loss may be as clear
        ((1.5, 1.02), 1.0, LEAST_PAIRS),  # not in every pair
        ((1.5, 1.2), 0.01, LEAST_PAIRS),  # short steps cost nothing
    ],
)
def test_long_steps_that_are_clear_end_early(
    ratios: tuple[float, float], seconds: float, pairs: int, clock: Clock
) -> None:
    turns = itertools.count()

    def plain() -> None:
        clock.now += seconds

    def other() -> None:
        clock.now += seconds / ratios[next(turns) % 2]

    taken = time_pairs(Side(lambda: None, plain), Side(lambda: None, other), CPU)
    assert len(taken.first_ms) == pairs
    assert taken.speedup[0] == pytest.approx(min(ratios)) or pairs == LEAST_PAIRS


class Clock:
    """A clock that stands still between steps, so that a busy machine changes nothing."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr("tilewise.nn.step.pairs.time", made)
    return made


class Passes:
    """Passes that run by torch or by plan: ``gains`` is promised of each, and ``true`` what a step really gains.

    A step takes what these say by the clock, give or take one percent.
    """

    def __init__(self, clock: Clock, gains: Mapping[int, float], true: Mapping[int, float], torch_ms: float) -> None:
        self._clock, self._draw = clock, random.Random(2)
        self.promised: dict[Any, float] = {(key, False): gain for key, gain in gains.items()}
        self._true = {(key, False): gain for key, gain in true.items()}
        self._torch_ms = torch_ms
        self.withheld: frozenset[Any] = frozenset()
        self.by_torch = False

    def gains(self) -> Mapping[Any, float]:
        return self.promised

    def withhold(self, keys: Collection[Any], note: str) -> None:
        self.withheld = frozenset(keys)

    def switches(self) -> tuple[Callable[[], None], Callable[[], None]]:
        return (lambda: setattr(self, "by_torch", True)), (lambda: setattr(self, "by_torch", False))

    def step(self, _: object = None) -> None:
        ms = self._torch_ms
        if not self.by_torch:
            ms -= sum(gain for key, gain in self._true.items() if key not in self.withheld)
        self._clock.now += ms / 1e3 * self._draw.gauss(1.0, 0.01)


def decided(passes: Passes) -> Any:
    step = Step(nn.Linear(1, 1), [torch.zeros(1)], passes.step, training=True)
    return StepGoal(step, passes).decide(own=True)


def test_what_gains_is_kept(clock: Clock) -> None:
    passes = Passes(clock, {1: 3.0, 2: 1.0}, {1: 3.0, 2: 1.0}, 8.0)
    result = decided(passes)
    assert result.kept
    assert result.pairs == LEAST_PAIRS
    assert result.least > 1.0
    assert result.predicted_ms == pytest.approx(4.0)
    assert passes.withheld == frozenset()
    assert not passes.by_torch


def test_what_does_not_reach_the_step_is_torchs(clock: Clock) -> None:
    """Each pass promises to gain, and the step loses with every one of them."""
    passes = Passes(clock, dict.fromkeys(range(4), 1.0), dict.fromkeys(range(4), -1.0), 6.0)
    result = decided(passes)
    assert not result.kept
    assert result.taken_back == 4
    assert passes.withheld == set(passes.promised)


def test_passes_that_promise_least_are_taken_back_where_the_step_gains_by_that(clock: Clock) -> None:
    """Six passes promise little and cost the step time, two promise much and keep it."""
    gains = {**dict.fromkeys(range(6), 0.5), 6: 3.0, 7: 3.0}
    true = {**dict.fromkeys(range(6), -1.0), 6: 3.0, 7: 3.0}
    passes = Passes(clock, gains, true, 9.0)
    result = decided(passes)
    assert result.kept
    assert {(6, False), (7, False)}.isdisjoint(passes.withheld)
    assert len(passes.withheld) >= 4
    assert result.taken_back == len(passes.withheld)


def test_a_step_of_the_programs_own_that_raises_leaves_torchs_passes(clock: Clock) -> None:
    passes = Passes(clock, {1: 1.0}, {1: 1.0}, 2.0)
    counted = itertools.count()

    def step(_: object) -> None:
        if next(counted) == 3:
            raise ArithmeticError("diverged")

    with pytest.raises(ArithmeticError, match="diverged"):
        StepGoal(Step(nn.Linear(1, 1), [torch.zeros(1)], step, training=True), passes).decide(own=True)
    assert passes.withheld == set(passes.promised)


def network() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Conv2d(3, 24, 5, padding=2), nn.BatchNorm2d(24), nn.ReLU(), nn.Dropout(0.5),
        nn.Conv2d(24, 24, 5, padding=2), nn.ReLU(), nn.Conv2d(24, 8, 3),
    )  # fmt: skip


class Promising(Planner):
    """Plans by ``lowering_type1``, each of which promises to take half of torch's time."""

    def plan(self, problem: ConvProblem, options: Options | None = None) -> Plan:  # type: ignore[override]
        if not isinstance(problem, ConvProblem):  # a linear layer's product
            return Plan(problem.key, solvers.baseline(problem).name, solvers.baseline(problem).version, time_ms=2.0)
        return lowered(problem, (problem.batch,))

    def plan_many(self, problems: Any, options: Options | None = None) -> Any:
        return {problem: self.plan(problem, options) for problem in problems}

    def torch_ms(self, problems: Any) -> dict[Any, float]:
        return dict.fromkeys(problems, 2.0)


def test_a_model_is_as_it_was_whatever_its_steps_did() -> None:
    model, x = network(), torch.randn(2, 3, 20, 20)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state, optimizer = torch.get_rng_state(), torch.optim.SGD(model.parameters(), 0.1)
    steps = itertools.count()

    def step(net: nn.Module) -> None:
        next(steps)
        optimizer.zero_grad()
        net(x).square().mean().backward()
        optimizer.step()

    tilewise.optimize(model, x, step=step, planner=Promising())
    result = report(model).step
    assert result is not None
    assert result.reason == ""
    assert next(steps) >= 2 * LEAST_PAIRS
    assert result.pairs >= LEAST_PAIRS
    assert torch.equal(torch.get_rng_state(), state)
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name
    planned = [is_planned(module) for module in model if isinstance(module, nn.Conv2d)]
    assert any(planned) == result.kept
    assert f"{result.speedup:.2f}x" in str(report(model))


def test_a_step_that_is_slower_with_plans_runs_by_torch_alone(clock: Clock) -> None:
    """The plans promise to gain; by the clock a step takes five times as long with any of them."""
    model, x = network().eval(), torch.randn(2, 3, 20, 20)
    plain = model(x)

    def step(net: Any) -> None:
        net(x)
        clock.now += 0.025 if any(map(is_planned, net)) else 0.005

    tilewise.optimize(model, x, step=step, planner=Promising())
    result = report(model).step
    assert result is not None
    assert not result.kept
    assert not any(is_planned(module) for module in model)
    assert all(not p.replaced for _, _, p in report(model).passes())
    assert {p.note for _, _, p in report(model).passes() if p.plan is not None} == {
        "taken back: the step is not faster with it"
    }
    torch.testing.assert_close(model(x), plain)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"goal": "passes"}, "goal='passes'"),
        (
            {"workspace": 2**20},
            "torch's own step need not keep workspace=1048576; leave workspace out to have it compared",
        ),
        (
            {"workspace": 2**20, "deterministic": True},
            "torch's own step need not keep workspace=1048576; "
            "leave workspace and deterministic out to have it compared",
        ),
        ({"exclude": ("aten",)}, "exclude=('aten',) has torch's own choice"),
        ({"rigor": "estimate"}, "rigor='estimate' measures nothing"),
        ({"cuda_graphs": True}, "cuda_graphs=True: the step is replayed from a graph"),
    ],
)
def test_where_steps_are_not_compared_the_report_says_why(options: Any, reason: str) -> None:
    model = network()
    tilewise.optimize(model, torch.randn(2, 3, 20, 20), planner=Promising(), **options)
    result = report(model).step
    assert result is not None
    assert result.reason == reason
    assert result.torch_ms is None


def test_a_made_up_step_that_fails_is_no_error() -> None:
    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x * 1

        @staticmethod
        def backward(ctx: Any, dy: torch.Tensor) -> torch.Tensor:
            raise ArithmeticError("no gradient")

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 24, 5, padding=2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return Fails.apply(self.conv(x))  # type: ignore[no-any-return]

    model = Model()
    tilewise.optimize(model, torch.randn(2, 3, 20, 20), planner=Promising())
    result = report(model).step
    assert result is not None
    assert result.reason == "the step raised ArithmeticError: no gradient"


def test_two_names_of_one_argument_exclude_each_other() -> None:
    with pytest.raises(ValueError, match="memory_step: it is the older name of step"):
        tilewise.optimize(network(), torch.randn(2, 3, 20, 20), step=print, memory_step=print)
    with pytest.raises(ValueError, match=r"step=5: a function of \(model\)"):
        tilewise.optimize(network(), torch.randn(2, 3, 20, 20), step=5)  # type: ignore[arg-type]


def test_one_line_says_what_became_of_the_step(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "tilewise"):
        model = nn.Sequential(nn.Conv2d(2, 2, 3))
        tilewise.optimize(model, torch.randn(1, 2, 8, 8))
    (line,) = [record.getMessage() for record in caplog.records if record.name == "tilewise"]
    assert ("; step" in line) == (not report(model).step.reason)  # type: ignore[union-attr]


def test_gains_count_every_call_of_a_problem() -> None:
    """Two layers of one problem, one of them called twice."""
    shared = nn.Conv2d(4, 4, 3, padding=1)
    model = nn.Sequential(shared, shared, nn.Conv2d(4, 4, 3, padding=1))
    tilewise.optimize(model, torch.randn(2, 4, 16, 16), planner=Promising(), goal="passes", training=False)
    assert {p.problem.pass_ for _, _, p in report(model).passes()} == {Pass.FPROP}  # type: ignore[attr-defined]
    model = nn.Sequential(shared, shared, nn.Conv2d(4, 4, 3, padding=1))
    tilewise.optimize(model, torch.randn(2, 4, 16, 16), planner=Promising(), training=False)
    result = report(model).step
    assert result is not None
    assert result.predicted_ms == pytest.approx(3.0) or result.taken_back
