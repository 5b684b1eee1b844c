"""Depthwise convolution with channels innermost on a CPU: generated layers in any division of tiles and panels."""

from __future__ import annotations

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
from tilewise.solvers.depthwise.depthwise_last import DepthwiseLast

pytest.importorskip("numba")
SOLVER = DepthwiseLast()
BOUND = 1e-6
LAST = ("channels_last", "contiguous", "channels_last")
FORMS = (("channels_last", 0), ("contiguous", 0), ("channels_last", 0))


def changed(c: Config, **changes: object) -> Config:
    return Config(**{**c, **changes})  # type: ignore[arg-type]


def layer(batch: int, channels: int, *axes: Axis, constant: bool = True) -> ConvProblem:
    return ConvProblem(
        Pass.FPROP, batch, channels, channels, axes, channels, constant_weight=constant, layouts=LAST
    )  # fmt: skip


@st.composite
def axes(draw: st.DrawFn) -> Axis:
    kernel, stride, dilation = (draw(st.integers(1, most)) for most in (5, 3, 3))
    before, after = draw(st.integers(-2, 4)), draw(st.integers(-2, 4))
    least = max(1, (kernel - 1) * dilation + 1 - before - after, 1 - min(0, before) - min(0, after))
    return Axis(draw(st.integers(least, least + 20)), kernel, stride, dilation, before, after)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow])
@given(
    dims=st.integers(1, 3), batch=st.integers(1, 3), channels=st.sampled_from([2, 5, 16, 33, 64, 71]),
    constant=st.booleans(), bias=st.booleans(), data=st.data(),
)  # fmt: skip
def test_any_layer_in_any_division(
    dims: int, batch: int, channels: int, constant: bool, bias: bool, data: st.DataObject
) -> None:
    """Strides, dilation, padding and cropping of each side, in one to three dimensions, filters kept or not."""
    drawn = [data.draw(axes(), "axis") for _ in range(dims)]
    p = replace(layer(batch, channels, *drawn, constant=constant), bias=bias)
    assert not SOLVER.why_not(p)
    for c in SOLVER.configs(p):
        height = [1, 1, *[axis.out for axis in p.axes]][-2]
        tiles = (
            batch * ([1, 1, *[axis.out for axis in p.axes]][-3]) * height * -(-p.axes[-1].out // int(str(c["rows"])))
        )
        c = changed(c, parts=data.draw(st.integers(1, tiles), "parts"))
        check(SOLVER, p, c, FORMS, accumulate=False)


LAYERS = (
    layer(1, 72, Axis(14, 3, 1, 1, 1, 1), Axis(14, 3, 1, 1, 1, 1)),
    layer(2, 33, Axis(15, 5, 2, 1, 2, 2), Axis(17, 5, 2, 1, 2, 1)),
    layer(1, 16, Axis(9, 7, 1, 1, 3, 3), Axis(30, 7, 1, 2, 6, 6)),
    layer(1, 5, Axis(30, 1), Axis(31, 9, 4, 1, -2, -3)),
    layer(1, 20, Axis(5, 3, 1, 1, 1, 1), Axis(6, 2, 1, 1), Axis(7, 3, 1, 1, 1, 1)),
    layer(1, 18, Axis(40, 15, 1, 1, 7, 7)),
)
"""Tiles that are not full, vectors that are not, padding of one side, cropping, dilation, long lines, three axes."""


@pytest.mark.parametrize("p", LAYERS, ids=lambda p: f"{p.in_channels}channels")
@pytest.mark.parametrize("wide", [False, True], ids=["normal", "wide"])
def test_errors_are_those_of_sums_in_fp32(p: ConvProblem, wide: bool) -> None:
    a, b = make_operands(p, 3, wide=wide)
    want = p.reference(a, b)
    for c in SOLVER.configs(p):
        got = run_poisoned(SOLVER, p, c, a, b, make_result(p))
        assert float((got.double() - want).norm() / want.norm()) <= BOUND, c


@pytest.mark.slow
@pytest.mark.parametrize("lanes", [4, 8])
@pytest.mark.parametrize("p", LAYERS, ids=lambda p: f"{p.in_channels}channels")
def test_vectors_of_other_machines(p: ConvProblem, lanes: int) -> None:
    a, b = make_operands(p)
    want = p.reference(a, b)
    c = changed(next(iter(SOLVER.configs(p))), lanes=lanes, vectors=1, rows=1, panel_parts=1, parts=1)
    got = run_poisoned(SOLVER, p, c, a, b, make_result(p))
    assert float((got.double() - want).norm() / want.norm()) <= BOUND


@pytest.mark.parametrize("activation", ["none", "relu", "hardswish", "clamp:-0.25:inf", "silu"])
def test_what_follows_is_done_as_it_writes(activation: str) -> None:
    """A full panel and one that is not, with a bias, a residual and the activation."""
    p = replace(LAYERS[1], bias=True, residual=True, activation=activation)
    c = changed(next(iter(SOLVER.configs(p))), vectors=1, rows=4, parts=3, panel_parts=1)
    assert SOLVER.does_activate(p, c)
    check_followed(SOLVER, p, c, BOUND)


def test_nothing_behind_the_last_channel_is_read() -> None:
    """The image ends where its memory does."""
    p = layer(1, 19, Axis(6, 3, 1, 1, 1, 1), Axis(5, 3, 1, 1, 1, 1))
    a, b = make_operands(p)
    want = p.reference(a, b)
    poisoned = torch.full((a.numel() + 64,), float("nan"), dtype=torch.float32, device="cpu")
    image = poisoned[: a.numel()].as_strided(a.shape, a.stride())
    image.copy_(a)
    for c in SOLVER.configs(p):
        got = run_poisoned(SOLVER, p, c, image, b, make_result(p))
        assert float((got.double() - want).norm() / want.norm()) <= BOUND


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
    several = ConvProblem(Pass.FPROP, 1, 8, 16, (Axis(9, 3),) * 2, 8, layouts=LAST)
    assert SOLVER.why_not(several) == ["takes depthwise layers with one filter to a channel"]
    long = layer(1, 8, Axis(40, 1), Axis(40, 16))
    assert SOLVER.why_not(long) == ["unrolls lines of the filter: of at most 15 taps, not 16"]


@pytest.mark.parametrize("change", [{"rows": 99}, {"parts": 999}, {"panel_parts": 99}, {"vectors": 5}])
def test_a_config_from_elsewhere_is_checked(change: dict[str, int]) -> None:
    p = LAYERS[0]
    a, b = make_operands(p)
    c = changed(next(iter(SOLVER.configs(p))), **change)
    with pytest.raises(Exception, match="is no config of"):
        SOLVER.bind(p, c, a, b, make_result(p))
