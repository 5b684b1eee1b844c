"""Gates of channels that scale the filter of the convolution behind them in place of its image."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from tests.nn.regions.kept import First, keep
from torch import Tensor, nn

import tilewise
from tilewise.nn.layers.plan_table import PlanTable
from tilewise.nn.layers.weights import Weights
from tilewise.nn.regions import region
from tilewise.nn.regions.layouts import Way
from tilewise.nn.regions.plans import RegionPlans
from tilewise.nn.regions.region import Planning, plan_region
from tilewise.nn.regions.rewrite import rewrite
from tilewise.nn.regions.together.gated import gated_of
from tilewise.nn.regions.trace import trace
from tilewise.nn.regions.units import units_of
from tilewise.nn.regions.ways import OnFilter, Planned, Times
from tilewise.plan import Error, Measurement, Plan
from tilewise.planner import Planner
from tilewise.planner.options import Options
from tilewise.planner.search.leaves import leaf_plan
from tilewise.problems.base import Problem
from tilewise.problems.conv.axis import Axis
from tilewise.problems.conv.problem import ConvProblem, Pass
from tilewise.solvers import get

pytest.importorskip("numba")


class Squeezed(nn.Module):
    """A depthwise convolution, a gate by the means of its channels, and a projection with a residual."""

    def __init__(self, channels: int = 11, outputs: int = 11, *, first: bool = False, **options: Any) -> None:
        super().__init__()
        self.filter = nn.Conv2d(channels, channels, 3, padding=1, groups=channels)
        self.gate = nn.Conv2d(channels, channels, 1)
        self.project = nn.Conv2d(channels, outputs, options.pop("kernel", 1), **options)
        self.norm, self.first = nn.BatchNorm2d(outputs), first

    def forward(self, x: Tensor) -> Tensor:
        y = self.filter(x)
        gate = torch.sigmoid(self.gate(y.mean((2, 3), keepdim=True)))
        y = self.norm(self.project(gate * y if self.first else y * gate))
        return nn.functional.relu(y + x) if y.shape == x.shape else y


class Twice(Squeezed):
    """What the gate gives is read twice."""

    def forward(self, x: Tensor) -> Tensor:
        y = x * torch.sigmoid(x.mean((2, 3), keepdim=True))
        return self.project(y) + y


class Plans:
    """Plans that say what convolutions take: 1 ms with constant filters, ``ms`` with such as change."""

    def __init__(self, ms: float = 0.5) -> None:
        self.ms = ms

    def of(self, problem: Problem, ms: float) -> Plan:
        solver = get("indirect")
        if solver.why_not(problem):
            solver = get("aten")
        config = next(iter(solver.configs(problem)))
        return leaf_plan(problem, Measurement(solver.name, solver.version, config, ms, 0, Error(1e-7, 1e-7)))

    def all(self, problems: Sequence[Problem]) -> Mapping[Problem, Sequence[Plan]]:
        return {p: [self.of(p, 1.0)] for p in problems if isinstance(p, ConvProblem)}

    def some(self, problems: Sequence[Problem]) -> Mapping[Problem, Sequence[Plan]]:
        return {}

    def error(self, problem: Problem, plan: Plan) -> float | None:
        return 1e-7

    def kinds(self, problem: Problem) -> Sequence[Plan]:
        return ()

    def running(self, problem: Problem, plans: Sequence[Plan]) -> Sequence[Plan]:
        return [self.of(problem, self.ms) for plan in plans if plan.solver == "indirect"]


def made(model: nn.Module) -> nn.Module:
    """``model`` for inference, with weights and statistics of its own."""
    generator = torch.Generator("cpu").manual_seed(3)
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.is_floating_point():
            tensor.data.uniform_(0.1, 0.9, generator=generator)
    return model.eval()


def images(batch: int = 1, channels: int = 11, size: int = 9) -> Tensor:
    generator = torch.Generator("cpu").manual_seed(0)
    return torch.randn(batch, channels, size, size, generator=generator, device="cpu")


def planned(model: nn.Module, x: Tensor, plans: Plans, monkeypatch: pytest.MonkeyPatch) -> Planning:
    """A region whose steps take what is written in their plans."""
    monkeypatch.setattr(region, "timed_in_place", lambda units, ways, *_: list(ways))
    monkeypatch.setattr(Times, "of", lambda self, key, run: 0.1)
    return plan_region(
        trace(model, (x,), {}), [x], plans, lambda program: 0.0, Times(torch.device("cpu")), Weights.FROZEN
    )


def near(found: Any, wanted: Tensor) -> bool:
    return bool((found.double() - wanted.double()).norm() <= 1e-6 * wanted.double().norm())


@pytest.mark.parametrize("first", [False, True], ids=["image first", "gate first"])
@pytest.mark.parametrize("outputs", [11, 40])
def test_the_gate_scales_the_filter(first: bool, outputs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bias, residual and activation stay; the program gives the same from C++ and from Python, for any image."""
    model = made(Squeezed(outputs=outputs, first=first))
    planning = planned(model, images(), Plans(), monkeypatch)
    assert "factors of the filter of project" in [line.runs for line in planning.lines]
    assert planning.program.native is not None, planning.program.why_not_native
    assert not planning.program.native.in_python
    for seed in range(3):
        x = images() * (seed + 1) - seed
        with torch.no_grad():
            wanted = copy.deepcopy(model).double()(x.double())
        assert near(planning.program(x), wanted)
        assert near(planning.program.in_python(x), wanted)


def test_a_slow_one_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """A gate over the image of 0.1 ms and 1 ms are faster than 2."""
    model, x = made(Squeezed()), images()
    planning = planned(model, x, Plans(2.0), monkeypatch)
    assert not any("factors of the filter" in line.runs for line in planning.lines)
    with torch.no_grad():
        assert near(planning.program(x), copy.deepcopy(model).double()(x.double()))


@pytest.mark.parametrize(
    ("model", "x"),
    [
        (Squeezed(), images(2)),
        (Squeezed(), images(size=4)),
        (Squeezed(kernel=3, padding=1), images()),
        (Squeezed(groups=11), images()),
        (Twice(), images()),
        (Squeezed().double(), images().double()),
        (nn.Sequential(nn.Conv2d(11, 11, 1), nn.Sigmoid()), images()),
    ],
    ids=["two images", "few pixels", "3x3", "groups", "read twice", "float64", "no gate"],
)
def test_what_stays_a_pass_over_the_image(model: nn.Module, x: Tensor) -> None:
    traced = trace(made(model), (x,), {})
    rewrite(traced.graph)
    assert gated_of(units_of(traced.graph, traced.names)) == []


def test_filters_are_scaled_where_they_are_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The gate's own step is the scaled filter, and both are timed in a program of their own."""
    x, seen = images(), []
    original = region.timed_in_place

    def spied(*given: Any) -> Any:
        seen.extend(original(*given))
        return list(seen)

    monkeypatch.setattr(region, "timed_in_place", spied)
    plan_region(
        trace(made(Squeezed()), (x,), {}), [x], Plans(), lambda program: 0.0, Times(torch.device("cpu")), Weights.FROZEN
    )
    on_filter = [way for ways in seen for way in ways if isinstance(way.what, OnFilter)]
    readers = [way for ways in seen for way in ways if _is_scaled(way)]
    assert len(on_filter) == len(readers) == 1
    assert readers[0].ms not in (0.5, 1.0)
    assert all(0 < way.ms < 1e3 for way in (*on_filter, *readers))


def _is_scaled(way: Way) -> bool:
    return isinstance(way.what, Planned) and way.what.scaled


def kept(monkeypatch: pytest.MonkeyPatch, **options: Any) -> tuple[nn.Module, nn.Module, Tensor]:
    """A network that runs with its gate on the filter, the same by torch, and an image."""
    model, x = made(Squeezed()), images()
    plain, original = copy.deepcopy(model), region.timed_in_place

    def gates_first(*given: Any) -> Any:
        return [
            tuple(replace(w, ms=1e-6) if isinstance(w.what, OnFilter) or _is_scaled(w) else w for w in each)
            for each in original(*given)
        ]

    monkeypatch.setattr(region, "timed_in_place", gates_first)
    monkeypatch.setattr(RegionPlans, "running", lambda self, problem, plans: [Plans().of(problem, 0.5)])
    keep(monkeypatch, model, x, **options)
    assert any("factors of the filter" in line.runs for line in tilewise.nn.report(model).regions[0].lines)
    return model, plain, x


@pytest.mark.parametrize("frozen", [False, True])
def test_filters_that_change_are_seen(frozen: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model, plain, x = kept(monkeypatch, frozen=frozen)
    for change in range(3):
        for each in (model, plain):
            with torch.no_grad():
                each.get_parameter(("gate.weight", "project.weight", "project.bias")[change]).mul_(0.5)
        with torch.no_grad():
            torch.testing.assert_close(model(x), plain(x), rtol=1e-4, atol=1e-5)
    for each in (model, plain):
        with torch.no_grad():
            each.get_buffer("norm.running_mean").add_(0.5)
    with torch.no_grad():
        torch.testing.assert_close(model(x), plain(x), rtol=1e-4, atol=1e-5)
    tilewise.restore(model)
    assert torch.equal(model(x), plain(x))


def test_broken_numbers_of_a_gate_reach_the_result(monkeypatch: pytest.MonkeyPatch) -> None:
    model, plain, x = kept(monkeypatch, frozen=True)
    x[0, 3] = torch.nan
    with torch.no_grad():
        assert torch.equal(model(x).isnan(), plain(x).isnan())
        assert model(x).isnan().any()


def test_an_exported_network_keeps_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    model, plain, x = kept(monkeypatch, frozen=True)
    path = tmp_path / "gated.tilewise"
    tilewise.export(tilewise.restore(model), x, path, planner=First())
    loaded = tilewise.load_exported(path)
    with safe_open(path, framework="pt") as file:
        (program,) = json.loads(file.metadata()["tilewise"])["programs"]
    problems = [step["plan"]["problem"] for step in program["program"]["steps"] if "plan" in step]
    assert sum("residual" in problem and "constant_weight" not in problem for problem in problems) == 1
    for scale in (1.0, -2.0):
        with torch.no_grad():
            torch.testing.assert_close(loaded(x * scale), plain(x * scale), rtol=1e-4, atol=1e-5)


def test_plans_for_a_filter_that_changes_run_what_others_run() -> None:
    """Of splits and of torch's own choice there are none, nor of what takes more memory than is allowed."""
    side = Axis(9, 1)
    layouts = ("channels_last", "contiguous", "channels_last")
    kept_filter = ConvProblem(Pass.FPROP, 2, 11, 40, (side, side), constant_weight=True, layouts=layouts)
    changing = replace(kept_filter, constant_weight=False)
    planner = Planner()
    options = Options(rigor="estimate")
    found = [plan for plan in planner.alternatives(kept_filter, options) if plan.leaf]
    given = [Plans().all([kept_filter])[kept_filter][0], *found, Plan(kept_filter.key, "aten", get("aten").version)]
    plans = RegionPlans(PlanTable(options, "plan", planner)).running(changing, given)
    assert plans
    assert {plan.problem for plan in plans} == {changing.key}
    assert {(plan.solver, plan.config) for plan in plans} <= {(plan.solver, plan.config) for plan in given}
    assert not any(get(plan.solver).baseline for plan in plans)
    assert all(plan.workspace == get(plan.solver).workspace(changing, plan.config) for plan in plans)
    least = RegionPlans(PlanTable(Options(rigor="estimate", workspace=0), "plan", planner)).running(changing, given)
    assert all(plan.workspace == 0 for plan in least)
    assert len(least) < len(plans)
