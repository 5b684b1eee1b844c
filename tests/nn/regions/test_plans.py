"""Plans of a region's products: more exact ones are those of what was measured, each checked once."""

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


def test_a_more_exact_plan_is_the_fastest_within_the_error(checked: list[Plan]) -> None:
    p, table = problem(), PlanTable(OPTIONS, "plan", Planner(wisdom=None))
    plans = RegionPlans(table)
    plans.all([p])
    measured = table.planner.alternatives(p, OPTIONS)
    errors = [plans.error(p, plan) for plan in measured]
    assert all(error for plan, error in zip(measured, errors, strict=True) if plan.solver == "aten")
    assert len({error for error in errors if error is not None}) > 1, "plans of one exactness show nothing"
    checked.clear()
    for most in sorted(error for error in errors if error is not None):
        wanted = next(index for index, error in enumerate(errors) if error is not None and error <= most)
        assert plans.more_exact(p, most) == (measured[wanted], errors[wanted])
    assert plans.more_exact(p, min(error for error in errors if error is not None) / 2) is None
    assert not checked, "what was checked is not checked again"
