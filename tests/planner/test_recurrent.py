"""Recurrent layers through planning: found, checked, remembered, explained, and run by their plans."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tilewise import execute, solvers
from tilewise.plan import Plan
from tilewise.planner import NoPlanError, Options, Planner
from tilewise.problems.recurrent.checks import dense_operands
from tilewise.problems.recurrent.problem import RecurrentProblem
from tilewise.wisdom import Wisdom

LAYERS = (
    RecurrentProblem("lstm", 6, 3, 5, 9, layers=2, directions=2, task="training"),
    RecurrentProblem("gru", 4, 1, 7, 8, biases=False, dtype="bf16"),
    RecurrentProblem("rnn_relu", 1, 5, 3, 6, task="training"),
)


def planner(folder: Path) -> Planner:
    return Planner(Wisdom(folder / "wisdom.sqlite3"))


def check(plan: Plan, p: RecurrentProblem) -> None:
    """Compute by ``plan``, into new results and into given ones, and compare."""
    operands = dense_operands(p, 4)
    want = p.reference(*operands)
    tolerance = 1e-4 if p.dtype == "fp32" else 0.05
    results = tuple(torch.full(p.shape(role), torch.nan, dtype=p.torch_dtype(role), device="cpu") for role in p.results)
    computed = execute.bind(plan, p, *operands)(*operands)
    execute.bind(plan, p, *operands, *results)(*operands, None, *results)
    for got in (computed, results):
        for value, wanted in zip(got, want, strict=True):
            torch.testing.assert_close(value.double(), wanted, rtol=tolerance, atol=tolerance)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("p", LAYERS, ids=lambda p: f"{p.cell}-{p.task}-{p.dtype}")
def test_a_layer_is_planned_and_remembered(p: RecurrentProblem, tmp_path: Path) -> None:
    plan = planner(tmp_path).plan(p)
    assert plan.problem == p.key
    check(plan, p)
    assert planner(tmp_path).plan(p, Options(rigor="wisdom_only")) == plan
    assert Plan.from_json(plan.to_json()) == plan


@pytest.mark.parametrize("p", LAYERS, ids=lambda p: f"{p.cell}-{p.task}-{p.dtype}")
def test_steps_are_planned_where_they_are_alone(p: RecurrentProblem, tmp_path: Path) -> None:
    others = tuple(solver.name for solver in solvers.solving(p) if solver.name != "stepped")
    plan = planner(tmp_path).plan(p, Options(exclude=others))
    assert plan.solver == "stepped"
    assert plan.workspace > 0
    assert plan.error is not None
    check(plan, p)


def test_every_solver_is_explained(tmp_path: Path) -> None:
    log = planner(tmp_path).explain(LAYERS[0], Options(rigor="estimate"))
    assert {m.solver for m in log} == {solver.name for solver in solvers.solving(LAYERS[0])}
    assert all(m.reason or m.time_ms is not None or m.estimate_ms is not None for m in log), log


@pytest.mark.parametrize("place", [0, 2, 3, 8])
def test_a_wrong_result_of_any_kind_is_found(place: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    p = RecurrentProblem("lstm", 2, 2, 3, 4, task="training")
    stepped: Any = type(solvers.get("stepped"))
    right = stepped.bind

    def wrong(self: Any, *given: Any, **nothing: Any) -> Any:
        run = right(self, *given)

        def altered(*tensors: Any) -> Any:
            results = run(*tensors)
            results[place][..., -1] *= 1.01
            return results

        return altered

    monkeypatch.setattr(stepped, "bind", wrong)
    others = tuple(solver.name for solver in solvers.solving(p) if solver.name != "stepped")
    with pytest.raises(NoPlanError, match=r"stepped .*error .* over the limit"):
        planner(tmp_path).plan(p, Options(exclude=others))


@pytest.mark.slow
@pytest.mark.parametrize("packed", [0, 3600])
def test_a_long_sequence_is_planned_within_a_limit(packed: int, tmp_path: Path) -> None:
    p = RecurrentProblem("lstm", 300, 16, 8, 128, packed=packed, task="training")
    limit, solver = 14 << 20, solvers.get("resident_rnn")
    if solver.why_not(p):
        pytest.skip("no compiler for CPU kernels")
    assert all(solver.hidden_workspace(p, c) > limit for c in solver.configs(p))
    options = Options(workspace=limit, exclude=("stepped",))
    plan = planner(tmp_path).plan(p, options)
    assert plan.solver == "resident_rnn"
    assert isinstance(plan.config["block"], int)
    assert plan.workspace <= limit
    check(plan, p)
    assert planner(tmp_path).plan(p, replace(options, rigor="wisdom_only")) == plan
