"""Winograd convolution with channels innermost: generated layers in any blocks and panels."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.solvers.cpu_runs import at_once, check_followed, run_poisoned
from tests.solvers.test_solvers import check

from tilewise.plan import Config
from tilewise.problems.conv.axis import Axis
from tilewise.problems.conv.problem import ConvProblem, Pass
from tilewise.problems.operands import make_operands, make_result
from tilewise.solvers.common.cpu_run import WIDEST
from tilewise.solvers.winograd._last import blocked
from tilewise.solvers.winograd.winograd_last import WinogradLast

pytest.importorskip("numba")
SOLVER = WinogradLast()
LANES = WIDEST.get(torch.backends.cpu.get_cpu_capability(), 4)
BOUND = 1e-5
LAST = ("channels_last", "contiguous", "channels_last")
FORMS = (("channels_last", 0), ("contiguous", 0), ("channels_last", 0))
NAMES = ("none", "relu", "hardswish", "clamp:-0.25:inf", "gelu")


def changed(c: Config, **changes: object) -> Config:
    return Config(**{**c, **changes})  # type: ignore[arg-type]


def layer(batch: int, into: int, outof: int, *axes: Axis, groups: int = 1, constant: bool = True) -> ConvProblem:
    return ConvProblem(Pass.FPROP, batch, into, outof, axes, groups, constant_weight=constant, layouts=LAST)


@pytest.mark.slow
@settings(max_examples=12, suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow])
@given(st.data())
def test_any_layer_in_any_blocks(data: st.DataObject) -> None:
    """Groups, padding that differs between sides and cropping, with filters that are kept or not."""
    taps = data.draw(st.sampled_from(((3, 3), (3, 1), (2, 5), (3,))), "taps")
    axes = []
    for r in taps:
        before, after = data.draw(st.integers(-1, 3)), data.draw(st.integers(-1, 3))
        axes.append(Axis(data.draw(st.integers(max(5, r - before - after), 12)), r, 1, 1, before, after))
    groups, into, outof = (data.draw(st.integers(1, most)) for most in (2, 20, 40))
    into = max(into, 2)
    p = layer(data.draw(st.integers(1, 3)), groups * into, groups * outof, *axes, groups=groups,
              constant=data.draw(st.booleans(), "constant"))  # fmt: skip
    p = replace(p, bias=data.draw(st.booleans(), "bias"))
    assert SOLVER.why_not(p) == []
    for c in itertools.islice(SOLVER.configs(p), 3):
        tiles = blocked(p, c).tiles
        c = changed(c, blocks=data.draw(st.integers(1, tiles), "blocks"))
        check(SOLVER, p, c, FORMS, accumulate=False)


LAYERS = (
    layer(1, 64, 80, Axis(9, 3, 1, 1, 1, 1), Axis(7, 3, 1, 1, 1, 1)),
    layer(2, 24, 130, Axis(14, 3, 1, 1, 1, 1), Axis(11, 3, 1, 1, 0, 2)),
    layer(1, 36, 48, Axis(8, 3, 1, 1, -1, 2), Axis(9, 3), groups=2),
    layer(1, 5, 7, Axis(30, 3, 1, 1, 1, 1)),
)
"""Panels that are not full, tiles that are not, padding of one side, cropping, groups, one axis."""


@pytest.mark.parametrize("p", LAYERS, ids=lambda p: f"{p.in_channels}to{p.out_channels}")
@pytest.mark.parametrize("wide", [False, True], ids=["normal", "wide"])
def test_errors_are_those_of_sums_in_fp32(p: ConvProblem, wide: bool) -> None:
    a, b = make_operands(p, 3, wide=wide)
    want = p.reference(a, b)
    for c in SOLVER.configs(p):
        got = run_poisoned(SOLVER, p, c, a, b, make_result(p))
        assert float((got.double() - want).norm() / want.norm()) <= BOUND, c


@pytest.mark.slow
@pytest.mark.parametrize("lanes", [4, 8])
@pytest.mark.parametrize("p", LAYERS, ids=lambda p: f"{p.in_channels}to{p.out_channels}")
def test_vectors_of_other_machines(p: ConvProblem, lanes: int) -> None:
    a, b = make_operands(p)
    want = p.reference(a, b)
    c = changed(next(iter(SOLVER.configs(p))), lanes=lanes, vectors=2, rows=5, panel_parts=1, blocks=2)
    got = run_poisoned(SOLVER, p, c, a, b, make_result(p))
    assert float((got.double() - want).norm() / want.norm()) <= BOUND


@pytest.mark.parametrize("activation", NAMES)
def test_what_follows_is_done_as_it_writes(activation: str) -> None:
    """A full panel and one that is not, with a bias, a residual and the activation."""
    p = replace(LAYERS[0], bias=True, residual=True, activation=activation)
    c = changed(next(iter(SOLVER.configs(p))), vectors=2, rows=6)
    assert SOLVER.does_activate(p, c)
    check_followed(SOLVER, p, c, BOUND)


def test_several_callers_at_once() -> None:
    p = replace(LAYERS[1], constant_weight=False)
    a, b = make_operands(p)
    for c in SOLVER.configs(p):
        run = SOLVER.bind(p, c, a, b, make_result(p))
        want = run_poisoned(SOLVER, p, c, a, b, make_result(p))

        def call(run: object = run, c: Config = c) -> torch.Tensor:
            space = torch.empty(SOLVER.workspace(p, c), dtype=torch.uint8)
            result: torch.Tensor = run(a, b, make_result(p), space)  # type: ignore[operator]
            return result

        assert all(torch.equal(got, want) for got in at_once(call, 4, 5))


def test_limits_are_stated() -> None:
    p = LAYERS[0]
    assert "takes x with channels innermost" in SOLVER.why_not(replace(p, layouts=("contiguous",) * 3))[0]
    assert "without stride" in SOLVER.why_not(layer(1, 8, 8, Axis(9, 3, 2), Axis(9, 3)))[0]
    assert "no multiplications to save" in SOLVER.why_not(layer(1, 8, 8, Axis(9, 1), Axis(9, 1)))[0]
    assert "not depthwise ones" in SOLVER.why_not(layer(1, 8, 8, Axis(9, 3), Axis(9, 3), groups=8))[0]


@pytest.mark.parametrize("change", [{"rows": 99}, {"blocks": 999}, {"panel_parts": 99}, {"tile": 5}, {"vectors": 5}])
def test_a_config_from_elsewhere_is_checked(change: dict[str, int]) -> None:
    p = LAYERS[0]
    a, b = make_operands(p)
    c = changed(next(iter(SOLVER.configs(p))), **change)
    with pytest.raises(Exception, match="is no config of"):
        SOLVER.bind(p, c, a, b, make_result(p))
