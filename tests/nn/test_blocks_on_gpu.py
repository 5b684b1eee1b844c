"""Blocks of layers as a GPU has them, in a region that runs in Triton's interpreter."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest
import torch
from tests.interpreter import interpreted
from torch import Tensor, nn

from tilewise.nn.layers.weights import Weights
from tilewise.nn.regions.region import plan_region
from tilewise.nn.regions.trace import trace
from tilewise.nn.regions.ways import Times
from tilewise.plan import Error, Measurement, Plan
from tilewise.planner.search.leaves import leaf_plan
from tilewise.problems.base import Problem
from tilewise.problems.conv.problem import ConvProblem
from tilewise.solvers import get
from tilewise.solvers.separable.separable_tiles import SeparableTiles


class Inverted(nn.Module):
    """A block of MobileNetV2 around a residual; one convolution has a bias and no norm."""

    def __init__(self) -> None:
        super().__init__()
        self.expand, self.first = nn.Conv2d(8, 24, 1, bias=False), nn.BatchNorm2d(24)
        self.filter, self.second = nn.Conv2d(24, 24, 3, padding=1, groups=24, bias=False), nn.BatchNorm2d(24)
        self.project = nn.Conv2d(24, 8, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = nn.functional.relu6(self.first(self.expand(x)))
        return x + self.project(nn.functional.hardswish(self.second(self.filter(y))))


class Plans:
    """1 ms for each layer, 0.5 ms for a block."""

    def _plan(self, problem: Problem, name: str, ms: float) -> Plan:
        solver = get(name)
        config = next(iter(solver.configs(problem)))
        return leaf_plan(problem, Measurement(name, solver.version, config, ms, 0, Error(1e-4, 1e-4)))

    def all(self, problems: Sequence[Problem]) -> Mapping[Problem, Sequence[Plan]]:
        return {p: [self._plan(p, "aten", 1.0)] for p in problems if isinstance(p, ConvProblem)}

    def some(self, problems: Sequence[Problem]) -> Mapping[Problem, Sequence[Plan]]:
        return {p: [self._plan(p, "separable_tiles", 0.5)] for p in problems}

    def error(self, problem: Problem, plan: Plan) -> float | None:
        return 1e-4

    def kinds(self, problem: Problem) -> Sequence[Plan]:
        return ()


@interpreted
def test_the_last_two_of_three_layers_are_one_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their filters, with the norm folded and a bias that is none, are those of the layers."""
    monkeypatch.setattr(SeparableTiles, "devices", frozenset({"cpu"}))
    monkeypatch.setattr("tilewise.nn.regions.region.timed_in_place", lambda units, ways, *_: list(ways))
    torch.manual_seed(3)
    model = Inverted().eval()
    for buffer in model.buffers():
        if buffer.is_floating_point():
            buffer.uniform_(0.5, 2.0)
    x = torch.randn(2, 8, 6, 6, dtype=torch.float32, device="cpu").half()
    half = model.half()
    planning = plan_region(
        trace(half, (x,), {}), [x], Plans(), lambda program: 0.0, Times(torch.device("cpu")), Weights.FROZEN
    )
    found = [line.runs.split(":")[0] for line in planning.lines if "layout" not in line.name]
    assert found[-2:] == ["within project", "separable_tiles"], found
    with torch.no_grad():
        got, want = planning.program(x), model.double()(x.double())
    assert float((got.double() - want).norm() / want.norm()) < 1e-3
