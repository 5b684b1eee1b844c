"""Separable convolutions by strips on a CPU: generated problems in any division of tiles, strips and pieces."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.separable import separables
from tests.solvers.cpu_runs import at_once
from torch import Tensor

from tilewise.execute import bind
from tilewise.plan import Config, Measurement
from tilewise.planner import Planner
from tilewise.planner.search.leaves import leaf_plan
from tilewise.problems.activations import activated
from tilewise.problems.conv.axis import Axis
from tilewise.problems.operands import make_operands, make_residual, make_result
from tilewise.problems.separable.problem import SeparableProblem
from tilewise.problems.separable.stages import parted
from tilewise.solvers import get
from tilewise.solvers.separable.separable_last import SeparableLast

pytest.importorskip("numba")
SOLVER = SeparableLast()
BOUND = 2e-6


def changed(c: Config, **changes: object) -> Config:
    return Config(**{**c, **changes})  # type: ignore[arg-type]


def operands(p: SeparableProblem, seed: int = 1) -> tuple[Tensor, Tensor]:
    """An image and filters that keep its size from stage to stage."""
    x, w = make_operands(p, seed)
    for stage in parted(p, w):
        stage.weight.mul_(stage.weight[0].numel() ** -0.5)
    return x, w


def run(p: SeparableProblem, c: Config, x: Tensor, w: Tensor, y: Tensor, residual: Tensor | None) -> Tensor:
    """One run with memory full of NaN."""
    kept, space = (
        torch.full((size // 4 + 1,), float("nan"), dtype=torch.float32, device="cpu").view(torch.uint8)
        for size in (SOLVER.constant(p, c), SOLVER.workspace(p, c))
    )
    bound = SOLVER.bind(p, c, x, w, y)
    SOLVER.prepare(p, c, w)(w, kept, None)
    return bound(x, kept, y, space, *(() if residual is None else (residual,)))


def wanted(p: SeparableProblem, x: Tensor, w: Tensor, residual: Tensor | None) -> Tensor:
    total = p.reference(x, w)
    return activated(total if residual is None else total + residual.double(), p.activation)


def check(p: SeparableProblem, c: Config, seed: int = 1) -> None:
    x, w = operands(p, seed)
    residual = make_residual(p, seed)
    want = wanted(p, x, w, residual)
    got = run(p, c, x, w, make_result(p), residual)
    assert torch.isfinite(got).all(), c
    assert float((got.double() - want).norm()) <= BOUND * max(float(want.norm()), 1e-3), c


@pytest.mark.slow
@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(p=separables(), data=st.data())
def test_any_problem_in_any_division(p: SeparableProblem, data: st.DataObject) -> None:
    """Strides, dilation, padding and cropping of each side, with each set of stages."""
    assert not SOLVER.why_not(p)
    for c in list(SOLVER.configs(p))[:2]:
        height = p.axes[0].out
        strip, pieces = (data.draw(st.integers(1, height), name) for name in ("strip", "pieces"))
        check(p, changed(c, strip=strip, pieces=pieces), data.draw(st.integers(1, 9), "seed"))


SQUARE = (Axis(14, 3, 1, 1, 1, 1),) * 2
PROBLEMS = (
    SeparableProblem(1, 8, 48, 8, SQUARE, inner=("relu6", "relu6"), residual=True),
    SeparableProblem(2, 3, 33, 19, (Axis(15, 5, 2, 1, 2, 2), Axis(17, 5, 2, 1, 2, 1)), inner=("silu", "hardswish")),
    SeparableProblem(1, 20, 20, 70, SQUARE, expands=False, inner=("relu",)),
    SeparableProblem(1, 24, 72, 72, SQUARE, projects=False, inner=("hardswish",), activation="silu", residual=True),
    SeparableProblem(1, 4, 9, 4, (Axis(9, 3, 4), Axis(30, 7, 1, 2, 6, 6)), inner=("none", "gelu")),
)
"""A residual; vectors, tiles and strips that are not full; each set of stages; strides that leave rows out."""


@pytest.mark.parametrize("p", PROBLEMS, ids=lambda p: p.key.split(" ")[3])
def test_every_config_of_a_problem(p: SeparableProblem) -> None:
    for c in SOLVER.configs(p):
        check(p, c)


@pytest.mark.slow
@pytest.mark.parametrize("lanes", [4, 8])
@pytest.mark.parametrize("p", PROBLEMS, ids=lambda p: p.key.split(" ")[3])
def test_vectors_of_other_machines(p: SeparableProblem, lanes: int) -> None:
    c = next(iter(SOLVER.configs(p)))
    small = {name: 1 for name in c if name.endswith(("_rows", "_vectors"))}
    check(p, changed(c, lanes=lanes, **small))


def test_nothing_outside_of_the_operands_is_read_or_written() -> None:
    """Image, filters and result end where NaN, or numbers that must stay, begin."""
    p = replace(PROBLEMS[1], residual=True)
    x, w = operands(p)
    residual = make_residual(p, 1)
    want = wanted(p, x, w, residual)

    def walled(t: Tensor, wall: float) -> tuple[Tensor, Tensor]:
        whole = torch.full((t.numel() + 128,), wall, dtype=torch.float32, device="cpu")
        inside = whole[64 : 64 + t.numel()].as_strided(t.shape, t.stride())
        inside.copy_(t)
        return inside, whole

    for c in SOLVER.configs(p):
        y, around = walled(make_result(p), 7.0)
        got = run(p, c, walled(x, float("nan"))[0], w, y, residual)
        assert float((got.double() - want).norm() / want.norm()) <= BOUND
        assert around[:64].eq(7.0).all()
        assert around[-64:].eq(7.0).all()


def test_a_number_that_is_none_stays_where_it_is_read() -> None:
    """NaN of one pixel reaches the results whose windows meet it, and no others."""
    p = PROBLEMS[0]
    p = replace(p, residual=False)
    x, w = operands(p)
    x[0, 2, 5, 6] = float("nan")
    for c in SOLVER.configs(p):
        got = run(p, c, x, w, make_result(p), None)
        met = torch.zeros(p.shape("y"), dtype=torch.bool, device="cpu")
        met[:, :, 4:7, 5:8] = True
        assert torch.equal(got.isnan(), met)


def test_several_callers_at_once() -> None:
    p = replace(PROBLEMS[1], residual=True)
    x, w = operands(p)
    residual = make_residual(p, 1)
    c = next(iter(SOLVER.configs(p)))
    want = run(p, c, x, w, make_result(p), residual)
    assert all(torch.equal(got, want) for got in at_once(lambda: run(p, c, x, w, make_result(p), residual), 4, 5))


def test_it_is_planned_checked_and_remembered(tmp_path: object) -> None:
    """Through the planner: torch's own convolutions are the baseline, and filters that change are seen."""
    from pathlib import Path

    from tilewise.wisdom import Wisdom

    p = PROBLEMS[0]
    planner = Planner(Wisdom(Path(str(tmp_path)) / "wisdom.sqlite3"))
    plan = planner.plan(p)
    assert plan.problem == p.key
    assert {one.solver for one in planner.alternatives(p)} >= {"aten_separable", "separable_last"}
    for name in ("aten_separable", "separable_last"):
        solver = get(name)
        config = next(iter(solver.configs(p)))
        x, w = operands(p)
        bound = bind(leaf_plan(p, Measurement(name, solver.version, config, 0.1, 0)), p, x, w)
        residual = make_residual(p, 1)
        for _ in range(2):
            got = bound(x, w, residual=residual)
            want = wanted(p, x, w, residual)
            assert float((got.double() - want).norm() / want.norm()) <= 2e-6, name
            w.mul_(0.5)


def test_limits_are_stated() -> None:
    long = replace(PROBLEMS[0], axes=(Axis(14, 3, 1, 1, 1, 1), Axis(40, 16)))
    assert SOLVER.why_not(long) == ["unrolls lines of the filter: of at most 15 taps, not 16"]
    assert SOLVER.why_not(replace(PROBLEMS[0], dtype="bf16")) == ["takes fp32, not bf16"]
    lopsided = replace(PROBLEMS[0], axes=(Axis(14, 3, 1, 1, 1, 0), Axis(14, 3, 1, 1, 1, 1)), residual=False)
    assert "the same before and after" in get("aten_separable").why_not(lopsided)[0]
    assert not SOLVER.why_not(lopsided)


@pytest.mark.parametrize(
    "change", [{"strip": 99}, {"pieces": 99}, {"filter_rows": 99}, {"expand_vectors": 5}, {"lanes": 3}, {"strip": "x"}]
)
def test_a_config_from_elsewhere_is_checked(change: dict[str, object]) -> None:
    p = PROBLEMS[0]
    x, w = operands(p)
    c = changed(next(iter(SOLVER.configs(p))), **change)
    with pytest.raises(Exception, match="is no config of"):
        SOLVER.bind(p, c, x, w, make_result(p))
