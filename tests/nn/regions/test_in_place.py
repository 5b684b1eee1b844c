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
from torch.nn import functional

from tilewise import solvers
from tilewise.nn.layers.weights import Weights
from tilewise.nn.programs.program import Program
from tilewise.nn.regions import in_place, region
from tilewise.nn.regions.exactness.local import local_errors
from tilewise.nn.regions.layouts import Way
from tilewise.nn.regions.region import Planning, plan_region
from tilewise.nn.regions.trace import trace
from tilewise.nn.regions.ways import Planned, Times
from tilewise.plan import Error, Measurement, Plan
from tilewise.planner import Planner
from tilewise.planner.search.leaves import leaf_plan
from tilewise.problems.base import Problem
from tilewise.problems.conv.problem import ConvProblem
from tilewise.solvers import get
from tilewise.wisdom import Wisdom

pytest.importorskip("numba")


def plan_by(problem: Problem, name: str, ms: float, error: float) -> Plan:
    solver = get(name)
    config = next(iter(solver.configs(problem)))
    return leaf_plan(problem, Measurement(name, solver.version, config, ms, 0, Error(error, error)))


class Plans:
    """Two plans of every convolution in channels_last, of which the first is said to be faster and less exact."""

    def __init__(self, *refused: str, exact_ms: float = math.inf, errs: bool = True, other: float = 1e-7) -> None:
        self.checked: list[str] = []
        self.asked: list[Problem] = []
        self.refused, self.exact_ms, self.errs, self.other = refused, exact_ms, errs, other

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

    def kinds(self, problem: Problem) -> Sequence[Plan]:
        self.asked.append(problem)
        exact = [plan_by(problem, "fused_lowering", self.exact_ms, 1e-9)] if math.isfinite(self.exact_ms) else []
        return [*exact, *self.all([problem]).get(problem, ())]


def errors_told(program: Program, tensors: object) -> dict[int, float]:
    """The errors that are written in the plans of steps."""
    plans = {number: step.plan.plan for number, step in enumerate(program.steps) if step.plan is not None}
    return {number: 0.0 if plan.error is None else plan.error.l2 for number, plan in plans.items()}


def times_told(program: Program, tensors: object) -> list[float]:
    """The times that are written in the plans of steps."""
    return [0.001 if step.plan is None else step.plan.plan.time_ms for step in program.steps]


def planned(plans: Plans, judge: Any, monkeypatch: pytest.MonkeyPatch, gains: Sequence[float] = (1.0,) * 9) -> Planning:
    """The network as a region. Steps take what is written in their plans, and products in order have these gains."""
    model, x = net(), images()

    def as_told(units: Any, ways: Sequence[tuple[Way, ...]], *_: Any) -> list[tuple[Way, ...]]:
        return list(ways)

    monkeypatch.setattr("tilewise.nn.regions.region.timed_in_place", as_told)
    given = lambda traced, nodes, tensors: dict(zip(nodes, gains, strict=False))  # noqa: E731
    monkeypatch.setattr("tilewise.nn.regions.region.gains_of", given)
    monkeypatch.setattr("tilewise.nn.regions.region.local_errors", errors_told)
    monkeypatch.setattr("tilewise.nn.regions.region.steps_in_place", times_told)
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


def test_plans_of_other_kinds_are_added(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the problems whose errors count: a plan that is as fast as the first and more exact takes its place."""
    plans, judged = Plans(exact_ms=0.0005, other=4e-4), []

    def judge(program: Any) -> float:
        judged.append(program)
        return 2.5 if len(judged) == 1 else 0.95

    assert solvers_of(planned(plans, judge, monkeypatch)) == {"fused_lowering"}
    assert len(plans.asked) == 3


def test_plans_that_are_far_too_slow_are_not_added(monkeypatch: pytest.MonkeyPatch) -> None:
    plans, judged = Plans(exact_ms=0.0041, other=9e-4), []

    def judge(program: Any) -> float:
        judged.append(program)
        return 4.0

    assert "fused_lowering" not in solvers_of(planned(plans, judge, monkeypatch))
    assert plans.asked


def test_the_least_error_times_time_is_taken_where_nothing_is_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    """The most exact choice takes twice as long as the first one and errs nearly as much."""
    judged = []

    def judge(program: Any) -> float:
        judged.append(program)
        return 1.05 if len(judged) == 1 else 1.04

    assert "onednn_fused" in solvers_of(planned(Plans(), judge, monkeypatch))
    assert len(judged) > 1


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


FUNCTIONS = {"none": lambda t: t, "relu": functional.relu, "hardswish": functional.hardswish}


def test_local_errors_are_those_of_each_step_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a step is given, errors of the steps before it included, its result is compared with float64's on it."""
    program, x = planned(Plans(), lambda program: 1.0, monkeypatch).program, images()
    seen: dict[int, float] = {}

    def compare(number: int, inputs: Sequence[torch.Tensor], result: torch.Tensor) -> None:
        plan = program.steps[number].plan
        if plan is None:
            return
        p, (first, w, *added) = plan.problem, [tensor.double() for tensor in inputs]
        bias = added.pop(0) if p.bias else None
        if isinstance(p, ConvProblem):
            axis = p.axes[0]
            first, added = first[:1], [tensor[:1] for tensor in added]
            want = functional.conv2d(first, w, bias, axis.stride, axis.before, axis.dilation, p.groups)
        else:
            want = functional.linear(first, w, bias)
        want = FUNCTIONS[p.activation](want + sum(added))
        seen[number] = float((result[: len(want)].double() - want).norm() / want.norm())

    program.show_steps([x], compare)
    found = local_errors(program, [x])
    assert found == pytest.approx(seen, rel=1e-6)
    assert len(found) == 3
    assert all(1e-9 < error < 2e-6 for error in found.values())


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


def test_a_program_timed_at_a_slow_moment_costs_no_way_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of large programs each is timed once: the best two ways of each part are timed again, and the least counts."""
    model, x = net(), images()
    seen: list[tuple[Way, ...]] = []
    original, step_ms, best_again = region.timed_in_place, Program.step_ms, in_place._best_again
    programs: list[Program] = []
    again: list[bool] = []

    def slow(program: Program, *given: Any) -> list[float]:
        """The first program is timed at a slow moment. From the third on, in the other layout, all take 20 ms more."""
        if program not in programs:
            programs.append(program)
        place = programs.index(program)
        return [ms + (50.0 if place == 0 else 20.0 * (place > 1 and not again)) for ms in step_ms(program, *given)]

    def noted(*given: Any) -> Any:
        again.append(True)
        return best_again(*given)

    def spied(*given: Any) -> Any:
        seen.extend(original(*given))
        return seen

    monkeypatch.setattr(Program, "step_ms", slow)
    monkeypatch.setattr(region, "timed_in_place", spied)
    monkeypatch.setattr(in_place, "_best_again", noted)
    monkeypatch.setattr(in_place, "HELD_BYTES", 0)
    monkeypatch.setattr(in_place, "NEAR", math.inf)
    plan_region(trace(model, (x,), {}), [x], Plans(), lambda program: 0.0, Times(torch.device("cpu")), Weights.FROZEN)
    layers = [ways for ways in seen if any(isinstance(way.what, Planned) for way in ways)]
    assert len(layers) >= 2
    for ways in layers:
        best = min(ways, key=lambda way: way.ms)
        alike = [way.ms for way in ways if (way.reads, way.gives) == (best.reads, best.gives)]
        assert max(alike) < 20.0, alike


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
