"""Winograd convolution on matrix units in Triton's interpreter, in small tiles: the GPU tests see those it offers."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from tests.interpreter import interpreted
from tests.sampling import some
from tests.solvers.test_solvers import Memory, biases, check, plus_bias
from tests.strategies import problems, with_memory

from tilewise.machine.device import device_name
from tilewise.plan import Config
from tilewise.problems.conv.axis import Axis
from tilewise.problems.conv.problem import ConvProblem, Pass
from tilewise.problems.operands import make_operands, make_result
from tilewise.solvers.base import SolverUnavailable
from tilewise.solvers.winograd import _gemm as _winograd_gemm
from tilewise.solvers.winograd.winograd_gemm import MOST_POINTS, WinogradGemm

SOLVER = WinogradGemm()


def config(p: ConvProblem, tile: tuple[int, int, int] = (16, 16, 16), **values: int) -> Config:
    """Of small tiles; parts of the channels or splits of the sum, whichever the pass has."""
    kept = {k: v for k, v in values.items() if k != ("parts" if p.pass_ is Pass.WGRAD else "splits")}
    return Config(tile=tile, warps=4, stages=2, **kept)


@st.composite
def configs(draw: st.DrawFn, p: ConvProblem) -> Config:
    taps = p.axes[_winograd_gemm.saving_axis(p) or 0].kernel
    return config(
        p,
        (draw(st.sampled_from((16, 32))), draw(st.sampled_from((16, 64))), draw(st.sampled_from((16, 32)))),
        outputs=draw(st.sampled_from([m for m in (2, 4) if m + taps - 1 <= MOST_POINTS])),
        images=draw(st.integers(1, p.batch)),
        parts=draw(st.integers(1, 2)),
        splits=draw(st.integers(1, 3)),
    )


@pytest.mark.sampled(2)
@interpreted
@pytest.mark.parametrize("dims", [1, 2, 3])
@pytest.mark.parametrize("pass_", list(Pass))
@settings(max_examples=some(3), suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow])
@given(data=st.data())
def test_any_tile_and_block(pass_: Pass, dims: int, data: st.DataObject) -> None:
    found: tuple[ConvProblem, Memory] = data.draw(
        with_memory(problems(pass_, dims, longest=9 if dims < 3 else 6)), "problem"
    )
    p, forms = found
    accumulate = data.draw(st.booleans(), "accumulate")
    p = replace(p, accumulate=accumulate, bias=pass_ is not Pass.WGRAD and data.draw(st.booleans(), "bias"))
    assume(not SOLVER.unsupported(p))
    check(SOLVER, p, data.draw(configs(p), "config"), forms, accumulate)


@pytest.mark.slow
@pytest.mark.sampled(1)
@interpreted
@pytest.mark.parametrize("pass_", list(Pass))
def test_sums_that_go_into_results_at_every_step(pass_: Pass, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_winograd_gemm, "DEEP", 16)
    p = ConvProblem(pass_, 2, 18, 20, (Axis(6, 3, 1, 1, 1, 1), Axis(9, 5, 1, 1, 2, 2)))
    check(SOLVER, p, config(p, outputs=4, images=1, parts=2, splits=2), (("contiguous", 0),) * 3, False)


@pytest.mark.sampled(1)
@interpreted
@pytest.mark.parametrize("pass_", list(Pass))
def test_interrupted_sums(pass_: Pass, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_winograd_gemm, "LONGEST", 32)
    p = ConvProblem(pass_, 2, 18, 20, (Axis(6, 3, 1, 1, 1, 1), Axis(7, 3, 1, 1, 1, 1)))
    check(SOLVER, p, config(p, outputs=2, images=2, splits=2), (("channels_last", 0),) * 3, False)


@interpreted
def test_a_square_s_width_is_the_axis_unless_it_has_a_stride() -> None:
    whole, strided = Axis(9, 3, 1, 1, 1, 1), Axis(9, 3, 2, 1, 1, 1)
    p = ConvProblem(Pass.FPROP, 2, 5, 7, (whole, whole))
    assert [_winograd_gemm.saving_axis(replace(p, axes=axes)) for axes in ((whole, whole), (whole, strided))] == [1, 0]
    assert any("saves products" in reason for reason in SOLVER.unsupported(replace(p, axes=(strided, strided))))
    p = replace(p, axes=(whole, strided))
    check(SOLVER, p, config(p, outputs=4, images=1), (("contiguous", 0),) * 3, False)


def conv2(pass_: Pass, batch: int = 256) -> ConvProblem:
    """AlexNet's second layer."""
    axis = Axis(27, 5, 1, 1, 2, 2)
    return ConvProblem(pass_, batch, 64, 192, (axis, axis), device="cuda:any")


@pytest.mark.parametrize("pass_", list(Pass))
def test_offers_keep_the_ceiling(pass_: Pass) -> None:
    p = conv2(pass_)
    if SOLVER.why_not(p):
        pytest.skip(SOLVER.why_not(p)[0])
    for ceiling in (2**26, 2**24, 2**40):
        offers = list(SOLVER.offers(p, ceiling))
        assert len({c for c, _ in offers}) == len(offers) >= 3
        for c, workspace in offers:
            assert workspace == SOLVER.workspace(p, c)
            assert workspace <= ceiling
            assert Config.from_key(c.key) == c
            assert SOLVER.cost(p, c).efficiency > 0
    part = replace(p, batch=64)
    known = [c for c, _ in SOLVER.offers(p, 2**26)]
    assert all(c in known for c, _ in SOLVER.offers(part, None, known))


def test_too_little_memory_is_said_not_hidden() -> None:
    p = conv2(Pass.FPROP)
    if SOLVER.why_not(p):
        pytest.skip(SOLVER.why_not(p)[0])
    assert all(workspace > 2**16 for _, workspace in SOLVER.offers(p, 2**16))


def test_many_groups_and_tf32_are_refused_with_the_reason() -> None:
    p = conv2(Pass.FPROP)
    assert any("not 32" in reason for reason in SOLVER.unsupported(replace(p, groups=32)))
    assert any("tf32" in reason for reason in SOLVER.unsupported(replace(p, precision="tf32")))


@pytest.mark.parametrize(
    "values", [{"outputs": 3}, {"outputs": 4, "splits": 2}, {"outputs": 4, "tile": (48, 16, 16)}, {"outputs": "4"}, {}]
)
def test_a_config_of_something_else_is_refused(values: dict[str, object]) -> None:
    p = conv2(Pass.FPROP, 2)
    c = Config(**{"tile": (16, 16, 16), "warps": 4, "stages": 2, **values})  # type: ignore[arg-type]
    assert list(SOLVER.offers(p, None, [c])) == []
    empty = torch.empty(0)
    with pytest.raises(SolverUnavailable, match="is no config of"):
        SOLVER.bind(p, c, empty, empty, empty)


@pytest.mark.gpu
@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
@pytest.mark.parametrize("kernel", [3, 5])
@pytest.mark.parametrize("pass_", list(Pass))
def test_all_that_is_offered_of_alexnet(pass_: Pass, kernel: int, layout: str) -> None:
    axis = Axis(27, kernel, 1, 1, kernel // 2, kernel // 2)
    p = replace(conv2(pass_, 8), axes=(axis, axis), layouts=(layout,) * 3, device=device_name("cuda"))
    p = replace(p, bias=pass_ is Pass.FPROP)
    a, b = make_operands(p, wide=True)
    want = plus_bias(p, p.reference(a, b))
    for ceiling in (None, 2**22):
        for c, workspace in SOLVER.offers(p, ceiling):
            out = make_result(p)
            space = torch.full((workspace,), 0xFF, dtype=torch.uint8, device="cuda")
            SOLVER.bind(p, c, a, b, out)(a, b, out, space, *biases(p))
            error = ((out.double() - want).norm() / want.norm()).item()
            assert error < SOLVER.error_bound["ieee"], c


@pytest.mark.gpu
def test_an_infinity_stays_in_its_tiles() -> None:
    p = replace(conv2(Pass.FPROP, 2), device=device_name("cuda"))
    a, b = make_operands(p)
    a[0, 3, 5, 5] = math.inf
    for c, workspace in SOLVER.offers(p, 2**26):
        near = torch.zeros(p.shape("y"), dtype=torch.bool, device="cuda")
        near[0, :, 3:8, : 4 * math.ceil(8 / 4)] = True
        met = torch.zeros_like(near)
        met[0, :, 3:8, 3:8] = True
        out = make_result(p)
        SOLVER.bind(p, c, a, b, out)(a, b, out, torch.empty(workspace, dtype=torch.uint8, device="cuda"))
        assert bool(out[~near].isfinite().all()), c
        assert not bool(out[met].isfinite().any()), c
