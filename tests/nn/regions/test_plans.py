"""Plans of a region's products: one of each kind that was measured, each checked once."""

from __future__ import annotations

import pytest

from tilewise.nn.layers.plan_table import PlanTable
from tilewise.nn.regions.plans import RegionPlans
from tilewise.plan import Plan
from tilewise.planner import Options, Planner
from tilewise.planner.search import checker
from tilewise.problems.conv.axis import Axis
from tilewise.problems.conv.problem import ConvProblem, Pass

OPTIONS = Options(rigor="measure")


def problem() -> ConvProblem:
    axis = Axis(12, 3, before=1, after=1)
    return ConvProblem(Pass.FPROP, 1, 16, 16, (axis, axis))


@pytest.fixture
def checked(monkeypatch: pytest.MonkeyPatch) -> list[Plan]:
    """The plans that are checked."""
    plans, errors = list[Plan](), checker.Checker.errors

    def noted(self: checker.Checker, plan: Plan, p: ConvProblem) -> object:
        plans.append(plan)
        return errors(self, plan, p)

    monkeypatch.setattr(checker.Checker, "errors", noted)
    return plans


def test_the_fastest_of_each_kind_is_found_without_a_check(checked: list[Plan]) -> None:
    p, table = problem(), PlanTable(OPTIONS, "plan", Planner(wisdom=None))
    plans = RegionPlans(table)
    plans.all([p])
    checked.clear()
    found = plans.kinds(p)
    assert not checked
    measured = table.planner.alternatives(p, OPTIONS)
    assert set(found) <= set(measured)
    assert {plan.solver for plan in found} == {plan.solver for plan in measured}
    assert [plan.time_ms for plan in found] == sorted(plan.time_ms for plan in found)
    errors = [plans.error(p, plan) for plan in found]
    assert len({error for error in errors if error is not None}) > 1, "plans of one exactness show nothing"
    checked.clear()
    assert [plans.error(p, plan) for plan in found] == errors
    assert not checked, "what was checked is not checked again"
