"""Plans that are timed where they run, and plans that give way to more exact ones."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tests import toys
from tests.nn.regions.kept import images, net

from tilewise import solvers
from tilewise.nn.layers.weights import Weights
from tilewise.nn.regions import region
from tilewise.nn.regions.layouts import Way
from tilewise.nn.regions.region import Planning, plan_region
from tilewise.nn.regions.trace import trace
from tilewise.nn.regions.ways import Planned, Times
from tilewise.plan import Error, Measurement, Plan
from tilewise.planner import Planner
from tilewise.planner.search.leaves import leaf_plan
from tilewise.problems.base import Problem
from tilewise.solvers import get
from tilewise.wisdom import Wisdom

pytest.importorskip("numba")


def plan_by(problem: Problem, name: str, ms: float, error: float) -> Plan:
    solver = get(name)
    config = next(iter(solver.configs(problem)))
    return leaf_plan(problem, Measurement(name, solver.version, config, ms, 0, Error(error, error)))


class Plans:
    """Two plans of every convolution in channels_last, of which the first is said to be faster and less exact."""

    def __init__(self, *refused: str, has_exact: bool = False, errs: bool = True, other: float = 1e-7) -> None:
        self.checked: list[str] = []
        self.asked: list[float] = []
        self.refused, self.has_exact, self.errs, self.other = refused, has_exact, errs, other

    def all(self, problems: Sequence[Problem]) -> Mapping[Problem, Sequence[Plan]]:
        return {
            p: [
                plan_by(p, "onednn_fused", 0.001, 1e-3 * self.errs),
                plan_by(p, "indirect", 0.002, self.other * self.errs),
            ]
            for p in problems
            if p.kind == "conv" and not get("indirect").unsupported(p)
        }

    def some(self, problems: Sequence[Problem]) -> Mapping[Problem, Sequence[Plan]]:
        return self.all(problems)

    def error(self, problem: Problem, plan: Plan) -> float | None:
        self.checked.append(plan.solver)
        assert plan.error is not None
        return None if plan.solver in self.refused else plan.error.l2

    def more_exact(self, problem: Problem, most: float) -> tuple[Plan, float] | None:
        self.asked.append(most)
        return (plan_by(problem, "fused_lowering", 0.0005, 1e-9), 1e-9) if self.has_exact else None


def planned(plans: Plans, judge: Any, monkeypatch: pytest.MonkeyPatch, gains: Sequence[float] = (1.0,) * 9) -> Planning:
    """The network as a region. Steps take what is written in their plans, and products in order have these gains."""
    model, x = net(), images()

    def as_told(units: Any, ways: Sequence[tuple[Way, ...]], *_: Any) -> list[tuple[Way, ...]]:
        return list(ways)

    monkeypatch.setattr("tilewise.nn.regions.region.timed_in_place", as_told)
    given = lambda traced, nodes, tensors: dict(zip(nodes, gains, strict=False))  # noqa: E731
    monkeypatch.setattr("tilewise.nn.regions.region.gains_of", given)
    traced = trace(model, (x,), {})
    return plan_region(traced, [x], plans, judge, Times(torch.device("cpu")), Weights.FROZEN)


def solvers_of(planning: Planning) -> set[str]:
    return {line.plan.solver for line in planning.lines if line.plan is not None and line.plan.solver != "aten"}


def test_the_fastest_stays_where_the_whole_is_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "onednn_fused" in solvers_of(planned(Plans(), lambda program: 1.0, monkeypatch))


def test_the_least_exact_gives_way_where_the_whole_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    plans, judged = Plans(), []

    def judge(program: Any) -> float:
        judged.append(program)
        return 10.0 if len(judged) == 1 else 0.95

    assert solvers_of(planned(plans, judge, monkeypatch)) == {"indirect"}
    assert len(judged) == 2


def test_more_exact_plans_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the problems whose errors count, at an eighth and half of theirs, where no other plan is as exact."""
    plans, judged = Plans(has_exact=True, other=4e-4), []

    def judge(program: Any) -> float:
        judged.append(program)
        return 2.5 if len(judged) == 1 else 0.95

    assert solvers_of(planned(plans, judge, monkeypatch)) == {"fused_lowering"}
    assert set(plans.asked) == {1e-3 / 8}


def test_nothing_is_asked_for_where_a_plan_is_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    plans, judged = Plans(has_exact=True), []

    def judge(program: Any) -> float:
        judged.append(program)
        return 2.5 if len(judged) == 1 else 0.95

    assert solvers_of(planned(plans, judge, monkeypatch)) == {"indirect"}
    assert plans.asked == []


def test_what_is_left_of_the_limit_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of three plans that err two may. The first step down leaves none, as their errors were said to be four times."""
    plans, allowed, seen = Plans(other=1e-4), 1.6e-3, []

    def judge(program: Any) -> float:
        plans_run = [step.plan.plan for step in program.steps if step.plan is not None]
        seen.append(total(plans_run))
        return 4.0 if seen[-1] > allowed else seen[-1] / allowed

    found = [line.plan for line in planned(plans, judge, monkeypatch).lines if line.plan is not None]
    assert total(found) == pytest.approx(math.sqrt(2e-6 + 1e-8))
    assert seen == pytest.approx([math.sqrt(n * 1e-6 + (3 - n) * 1e-8) for n in (3, 0, 1, 2)])


def test_errors_count_as_they_grow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the first layer's error grows tenfold until the results, it alone is computed by a more exact plan."""
    plans = Plans()

    def judge(program: Any) -> float:
        first, *others = [step.plan.plan for step in program.steps if step.plan is not None]
        return math.sqrt((10.0 * total([first])) ** 2 + total(others) ** 2) / 2e-3

    found = planned(plans, judge, monkeypatch, gains=(10.0,) + (1.0,) * 8)
    first, *others = [line.plan.solver for line in found.lines if line.plan is not None]
    assert first == "indirect"
    assert {"onednn_fused"} <= set(others) <= {"onednn_fused", "aten"}


def total(plans: Sequence[Plan]) -> float:
    return math.sqrt(sum(plan.error.l2**2 for plan in plans if plan.error is not None))


def test_it_ends_where_nothing_is_exact_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    judged = []

    def judge(program: Any) -> float:
        judged.append(program)
        return math.inf

    assert planned(Plans(), judge, monkeypatch).program(images()).isfinite().all()
    assert 1 < len(judged) <= 7


def test_it_ends_where_no_plan_errs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Then a step that is no plan does, or the reference overflows: more exact plans cannot help."""
    plans = Plans(errs=False)
    assert solvers_of(planned(plans, lambda program: math.inf, monkeypatch)) == {"onednn_fused"}
    assert not plans.asked


def test_a_plan_that_must_not_be_used_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    assert solvers_of(planned(Plans("onednn_fused"), lambda program: 0.0, monkeypatch)) == {"indirect"}


def test_ways_get_the_times_of_their_places(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every plan of a layer is timed within the whole program, in both layouts; none keeps what planning said."""
    model, x = net(), images()
    traced = trace(model, (x,), {})
    seen: list[tuple[Way, ...]] = []

    plans, original = Plans(), region.timed_in_place
    heard: list[tuple[Any, ...]] = []

    def spied(*given: Any) -> Any:
        found = original(*given[:4], lambda *told: heard.append(told))
        seen.extend(found)
        return found

    monkeypatch.setattr(region, "timed_in_place", spied)
    plan_region(traced, [x], plans, lambda program: 0.0, Times(torch.device("cpu")), Weights.FROZEN)
    assert heard[0][0] == 0
    assert {total for _, total, _ in heard} == {len(heard)}
    timed = [way for ways in seen for way in ways if isinstance(way.what, Planned)]
    assert len(timed) >= 4
    assert all(way.ms not in (0.001, 0.002) and 0 < way.ms < 1e3 for way in timed)


def test_steps_are_timed_from_python_too(monkeypatch: pytest.MonkeyPatch) -> None:
    planning = planned(Plans(), lambda program: 0.0, monkeypatch)
    program, x = planning.program, images()
    program.native = None
    taken = program.step_ms([x], 2)
    assert len(taken) == len(program.steps)
    assert all(0 < ms < 1e3 for ms in taken)


def test_alternatives_of_a_planner_are_what_it_measured(tmp_path: Path) -> None:
    planner, problem = Planner(Wisdom(tmp_path / "wisdom")), toys.small(batch=1, channels=8, size=9)
    assert planner.alternatives(problem) == []
    planner.explain(problem)
    found = planner.alternatives(problem)
    assert len(found) >= 2
    assert [p.time_ms for p in found] == sorted(p.time_ms for p in found)
    kinds = [(p.solver, solvers.get(p.solver).exactness(p.config)) for p in found]
    assert len(set(kinds)) == len(kinds)
    assert torch.isfinite(torch.tensor([p.time_ms for p in found], dtype=torch.float64, device="cpu")).all()
