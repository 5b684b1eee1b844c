"""Few candidates are compiled for a GPU: the best of each family first, others where that has shown it is worth it."""

from __future__ import annotations

import contextlib
import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.planner.test_compiling_ahead import BEST_MS, PROBLEM, solver, trial, waiting

from tilewise import execute
from tilewise.kernels.building.kept import refuse
from tilewise.plan import Config, Measurement, Plan
from tilewise.planner.experience import KEPT, LEAST, MOST, Experience
from tilewise.planner.search.offers import Offer
from tilewise.planner.search.pruning import BEHIND, COMPILED, NEXT, PRUNE, Pruning
from tilewise.planner.search.trial import Trial
from tilewise.problems.conv.axis import Axis
from tilewise.problems.conv.problem import ConvProblem, Pass


def pruning(*listed: Offer, narrows: bool = True, patient: bool = False, device: str = PROBLEM.device) -> Pruning:
    found = Pruning(PROBLEM.on(device), {}, patient, narrows=narrows)
    found.compare(listed)
    return found


def reason(found: Pruning, offer: Offer, best_ms: float = BEST_MS) -> str:
    return found.reason(offer, lambda workspace: best_ms)


def test_what_must_be_compiled_needs_a_better_estimate() -> None:
    ready, own = waiting((solver("ready", compiles=False), COMPILED * 1.01), (solver("own"), COMPILED * 1.01))
    found = pruning(ready, own)
    assert reason(found, ready) == ""
    assert "the best so far takes 1.000" in reason(found, own)
    assert reason(pruning(own, narrows=False), own) == ""
    assert reason(pruning(own, device="cpu"), own) == ""
    assert "the best so far" in reason(pruning(own, narrows=False), own._replace(estimate_ms=PRUNE * 1.01))


def test_estimates_of_what_is_compiled_are_compared() -> None:
    best, near, far = waiting((solver("a"), 1.0), (solver("b"), BEHIND * 0.99), (solver("c"), BEHIND * 1.01))
    found = pruning(best, near, far)
    assert reason(found, near, math.inf) == ""
    assert "the best that is compiled 1.000" in reason(found, far, math.inf)
    assert reason(pruning(best, far, patient=True), far, math.inf) == ""


@pytest.mark.parametrize(("took_ms", "why"), [(NEXT * 0.99, ""), (NEXT * 1.01, "the best of own so far takes")])
def test_a_second_of_a_family_needs_a_good_first(took_ms: float, why: str) -> None:
    own = solver("own")
    first, second = waiting((own, 1.0), (own, 1.0))
    found = pruning(first, second)
    assert reason(found, first) == ""
    assert "inf ms" in reason(found, second), "nothing is known of the first yet"
    found.note(first, took_ms)
    assert reason(found, second).startswith(f"not measured: {why}" if why else "")
    assert bool(reason(found, second)) is bool(why)


def test_a_second_of_a_family_replaces_a_first_that_failed() -> None:
    own = solver("own")
    first, second, third = waiting(*[(own, 1.0)] * 3)
    found = pruning(first, second, third)
    assert reason(found, first) == ""
    found.note(first, None)
    assert reason(found, second) == ""
    assert reason(found, third) != ""


def test_further_configs_are_measured_while_it_pays() -> None:
    """Until as many in a row as the solver says have brought no gain; a gain too small to be seen is none."""
    vendor = solver("vendor", compiles=False, most=2)
    vendor.while_it_pays = True
    listed = waiting(*[(vendor, 1.0)] * 9)
    found = pruning(*listed)
    for offer, took_ms in zip(listed[:7], (5.0, 6.0, 4.0, 4.5, 3.0, 2.98, 7.0), strict=True):
        assert reason(found, offer) == ""
        found.note(offer, took_ms)
    assert "2 of vendor" in reason(found, listed[7])
    vendor.while_it_pays = False
    found = pruning(*listed)
    for offer in listed[:2]:
        assert reason(found, offer) == ""
        found.note(offer, 1.0 / (offer.rank + 1))
    assert "2 of vendor" in reason(found, listed[2])


def test_a_front_wants_slower_ones_with_less_workspace() -> None:
    own = solver("own")
    first, second = waiting((own, 1.0), (own, 9.0))
    second = second._replace(needed=5)
    found = Pruning(PROBLEM, {}, False, for_front=True)
    found.compare([first._replace(needed=10), second])
    assert reason(found, first._replace(needed=10)) == ""
    assert reason(found, second, math.inf) == ""


def test_first_what_needs_no_kernel_then_the_best_of_each_family(monkeypatch: pytest.MonkeyPatch) -> None:
    own, other, ready = solver("own"), solver("other"), solver("ready", compiles=False)
    listed = waiting((own, 0.1), (own, 0.2), (other, 0.3), (other, 0.4), (ready, 0.5))
    found = trial()
    monkeypatch.setattr(found.offers, "ranked", lambda: listed)
    assert [(o.solver.name, o.rank) for o in found._begin()] == [
        ("ready", 4), ("own", 0), ("other", 2), ("own", 1), ("other", 3),
    ]  # fmt: skip
    found.pruning.narrows = False
    assert found._begin() == listed


def test_only_what_is_compiled_is_measured_and_others_are_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    own, other = solver("own"), solver("other")
    listed = waiting((own, 1.0), (own, 1.1), (other, 1.2))
    kept = {("own", 0)}

    def bind(plan: Plan, *rest: Any) -> Any:
        if (plan.solver, plan.config["n"]) not in kept:
            refuse("it")
        return SimpleNamespace(workspace=0)

    def measured(plan: Plan, best_ms: float, bind: Any) -> Measurement:
        bind(plan)
        return Measurement(plan.solver, 1, plan.config, 1.05, 0)

    def begun() -> Trial:
        found = trial()
        monkeypatch.setattr(found.offers, "ranked", lambda: listed)
        object.__setattr__(found.benchmark, "measure", measured)  # which is frozen
        return found

    monkeypatch.setattr(execute, "bind", bind)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    first = begun()
    wanted = first.run_ready()
    assert [(o.solver.name, o.rank) for o in wanted] == [("other", 2), ("own", 1)]
    assert [m.config["n"] for m in first.found if not m.reason] == [0]


def problem(size: int, pass_: Pass = Pass.FPROP) -> ConvProblem:
    return ConvProblem(pass_, 2, 3, 4, (Axis(size, 3),) * 2, device="cuda:some GPU")


def test_estimates_are_corrected_by_what_alike_problems_took() -> None:
    found, own, config = Experience(), solver("own"), Config()
    assert found.factor(problem(8), own, config) == 1.0
    for size, ratio in ((9, 3.0), (10, 1.5), (11, 2.0)):
        found.note(problem(size), own, config, ratio)
    assert found.factor(problem(8), own, config) == 2.0
    assert found.factor(problem(9), own, config) == 1.75, "its own time does not count"
    assert found.factor(problem(8, Pass.DGRAD), own, config) == 1.0
    assert found.factor(problem(8), solver("other"), config) == 1.0
    assert found.factor(problem(300), own, config) == 1.0, "another size"


def test_corrections_are_bounded() -> None:
    found, own, config = Experience(), solver("own"), Config()
    for ratio, bound in ((1e9, MOST), (1e-9, LEAST)):
        for size in range(9, 9 + KEPT):
            found.note(problem(size), own, config, ratio)
        assert found.factor(problem(8), own, config) == bound
    (noted,) = found._ratios.values()
    assert len(noted) == KEPT
