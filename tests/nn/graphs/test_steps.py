"""Whole steps of a model that is replayed: by plans or torch inside the graphs, and against the step as it came in.

The recorder is one of a CPU, and time is what a test says.
"""

from __future__ import annotations

import itertools
import sys
from typing import Any, ClassVar

import pytest
import torch
from tests.nn.graphs.tape import TapeRecorder
from tests.nn.step.test_trace import planned
from tests.nn.test_step_goal import Promising
from torch import nn

import tilewise
from tilewise.nn import graph_report, report
from tilewise.nn.graphs.graphed import captured
from tilewise.nn.graphs.model import ModelGraphs
from tilewise.nn.layers.kinds import is_planned
from tilewise.nn.step import pairs
from tilewise.nn.step.result import StepReport


def network() -> nn.Sequential:
    torch.manual_seed(2)
    return nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 4, 3))


def example() -> torch.Tensor:
    return torch.randn(2, 3, 12, 12, dtype=torch.float32, device="cpu")


class Steps:
    """Steps whose time a test sets by the way in which they run; ``ways`` counts them."""

    now: ClassVar[float] = 0.0

    def __init__(self, model: nn.Sequential, ms: dict[tuple[bool, bool], float]) -> None:
        self._model, self._ms, self._x = model, ms, example()
        self.ways: set[tuple[bool, bool]] = set()

    def __call__(self, _: object) -> None:
        before = graph_report(self._model).replayed
        self._model(self._x).square().mean().backward()
        way = graph_report(self._model).replayed > before, is_planned(self._model[0])
        self.ways.add(way)
        Steps.now += self._ms[way] / 1e3

    @classmethod
    def perf_counter(cls) -> float:
        return cls.now


@pytest.fixture(autouse=True)
def _own_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pairs, "time", Steps)


def kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let ``graphs="auto"`` keep captures on a CPU, whatever it measures."""

    def choose(model: nn.Module, examples: list[Any], *, training: bool) -> dict[str, Any]:
        with torch.set_grad_enabled(training):
            captured(model, examples, TapeRecorder).begin()
        return {"kept": True, "reason": ""}

    module = sys.modules["tilewise.nn.optimize"]
    monkeypatch.setattr(module, "choose_graphs", choose)


def optimized(ms: dict[tuple[bool, bool], float], monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Steps, StepReport]:
    """A model whose steps take ``ms`` by (replayed, planned); the steps, and the report."""
    kept(monkeypatch)
    model = network()
    steps = Steps(model, ms)
    tilewise.optimize(model, example(), step=steps, planner=Promising(), graphs="auto")
    made = report(model).step
    assert made is not None
    return model, steps, made


EAGER, EAGER_PLANS, GRAPH, GRAPH_PLANS = (False, False), (False, True), (True, False), (True, True)


def test_plans_that_win_inside_the_graphs_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    model, steps, made = optimized({EAGER: 9.0, GRAPH: 6.0, GRAPH_PLANS: 4.0}, monkeypatch)
    assert steps.ways == {EAGER, GRAPH, GRAPH_PLANS}
    assert (made.way, made.kept, made.taken_back) == ("graph", True, 0)
    assert made.torch_ms == pytest.approx(9.0)
    assert made.planned_ms == pytest.approx(4.0)
    assert str(made).startswith("step (graph): 9 -> 4 ms")
    assert is_planned(model[0])
    assert report(model).facts["graphs"]["kept"]
    assert graph_report(model).replayed == 0
    assert len(graph_report(model).captures) == 1  # those of torch's choice are let go
    model(example())
    assert graph_report(model).replayed == 1


def test_plans_that_lose_inside_the_graphs_are_taken_back_and_replays_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    model, _, made = optimized({EAGER: 9.0, GRAPH: 4.0, GRAPH_PLANS: 6.0}, monkeypatch)
    assert (made.way, made.kept) == ("graph", True)
    assert made.taken_back > 0
    assert made.planned_ms == pytest.approx(4.0)
    assert not is_planned(model[0])
    model(example())
    assert graph_report(model).replayed == 1


def test_a_model_that_is_not_faster_than_it_was_is_left_as_it_came_in(monkeypatch: pytest.MonkeyPatch) -> None:
    model, _, made = optimized({EAGER: 3.0, GRAPH: 6.0, GRAPH_PLANS: 4.0}, monkeypatch)
    assert (made.way, made.kept) == ("graph", False)
    assert not any(map(is_planned, model))
    assert all("forward" not in vars(module) for module in model.modules())
    assert report(model).facts["graphs"] == {"kept": False, "reason": "the step is not surely faster than it was"}
    assert "CUDA graphs: none (the step is not surely faster than it was)" in str(report(model))
    with pytest.raises(ValueError, match="graphed has not been called"):
        graph_report(model)


def test_a_step_that_raises_leaves_the_model_as_it_came_in(monkeypatch: pytest.MonkeyPatch) -> None:
    kept(monkeypatch)
    for at in (0, 60):
        model, x, count = network(), example(), itertools.count()

        def step(net: nn.Module, x: torch.Tensor = x, count: Any = count, at: int = at) -> None:
            if next(count) == at:
                raise ArithmeticError("diverged")
            net(x).square().mean().backward()
            Steps.now += 0.005

        with pytest.raises(ArithmeticError, match="diverged"):
            tilewise.optimize(model, x, step=step, planner=Promising(), graphs="auto")
        assert all("forward" not in vars(module) for module in model.modules())


def test_with_another_goal_graphs_and_plans_stay_as_each_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    kept(monkeypatch)
    model = network()
    tilewise.optimize(model, example(), planner=Promising(), graphs="auto", goal="passes")
    made = report(model).step
    assert made is not None
    assert made.reason == "goal='passes'"
    assert is_planned(model[0])
    model(example())
    assert graph_report(model).replayed == 1


def test_a_step_with_other_shapes_than_the_example_is_not_called_a_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    kept(monkeypatch)
    model, x = network(), torch.randn(1, 3, 9, 9, dtype=torch.float32, device="cpu")

    def step(net: nn.Module) -> None:
        net(x).square().mean().backward()
        Steps.now += 0.002 if is_planned(model[0]) else 0.005

    tilewise.optimize(model, example(), step=step, planner=Promising(), graphs="auto")
    made = report(model).step
    assert made is not None
    assert (made.way, made.kept) == ("eager", True)


def test_switching_back_meets_the_capture_that_there_was() -> None:
    model, x = network(), example()
    by_torch, by_plans = planned(model, x).switches()
    graphs: ModelGraphs = captured(model, [x], TapeRecorder)
    for _ in range(4):
        for switch in (by_torch, by_plans):
            switch()
            model(x).sum().backward()
    assert graphs._made == 2
    assert graphs.report().replayed == 8
