"""Implicit matrix products in Triton's interpreter, in small tiles: the GPU tests see only those it offers."""

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
from tilewise.solvers.products import _implicit as _implicit_gemm
from tilewise.solvers.products.implicit_gemm import TILES, ImplicitGemm

SOLVER = ImplicitGemm()
MOST_SHARED = 227 * 1024


@st.composite
def configs(draw: st.DrawFn, p: ConvProblem) -> Config:
    exact = ["fp16x3"] if p.pass_ is Pass.WGRAD else ["fp16x3", "tf32x3"]
    products = ["native"] if p.dtype != "fp32" else ["fp16"] if p.precision == "tf32" else exact
    channels = draw(st.sampled_from((16, 32) if p.pass_ is Pass.WGRAD else (16, 32, 48)))
    found = Config(
        product=draw(st.sampled_from(products)),
        tile=(channels, draw(st.sampled_from((16, 64))), draw(st.sampled_from((16, 32)))),
        warps=4,
        stages=2,
        images=draw(st.integers(1, p.batch)),
    )
    return Config(**found, splits=draw(st.integers(1, 3))) if p.pass_ is Pass.WGRAD else found


@pytest.mark.sampled(2)
@interpreted
@pytest.mark.parametrize("pass_", list(Pass))
@pytest.mark.parametrize(("dtype", "precision"), [("fp32", "ieee"), ("fp32", "tf32"), ("fp16", "ieee")])
@settings(max_examples=some(3), suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow])
@given(data=st.data())
def test_any_tile_and_block(pass_: Pass, dtype: str, precision: str, data: st.DataObject) -> None:
    # Not bf16: the interpreter multiplies its bit patterns.
    found: tuple[ConvProblem, Memory] = data.draw(
        with_memory(problems(pass_, dtype=dtype, precision=precision, longest=9)), "problem"
    )
    p, forms = found
    accumulate = data.draw(st.booleans(), "accumulate")
    p = replace(p, accumulate=accumulate, bias=pass_ is not Pass.WGRAD and data.draw(st.booleans(), "bias"))
    assume(not SOLVER.unsupported(p))
    check(SOLVER, p, data.draw(configs(p), "config"), forms, accumulate)


@pytest.mark.sampled(1)
@interpreted
@pytest.mark.parametrize("product", ["fp16x3", "tf32x3"])
@pytest.mark.parametrize("pass_", list(Pass))
def test_interrupted_sums(pass_: Pass, product: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if product == "tf32x3" and pass_ is Pass.WGRAD:
        product = "fp16x3"
    monkeypatch.setattr(_implicit_gemm, "LONGEST", 32)
    p = ConvProblem(pass_, 2, 18, 20, (Axis(6, 3, 1, 1, 1, 1), Axis(7, 3, 1, 1, 1, 1)))
    c = Config(product=product, tile=(16, 16, 16), warps=4, stages=2, images=2)
    if pass_ is Pass.WGRAD:
        c = Config(**c, splits=2)
    assert _implicit_gemm.sum_length(p) > 48
    check(SOLVER, p, c, (("contiguous", 0),) * 3, False)


@pytest.mark.parametrize("pass_", [Pass.FPROP, Pass.DGRAD])
def test_sums_of_few_channels_over_many_taps_are_interrupted(pass_: Pass) -> None:
    """Matrix units round once for the two channels of a tap as they do for sixteen: 343 times here."""
    p = ConvProblem(pass_, 3, 2, 2, (Axis(7, 7, 1, 1, 3, 3),) * 3)
    tile = _implicit_gemm.Tile(64, 64, 32, 4, 4)
    assert _implicit_gemm.Layout(p, _implicit_gemm.PRODUCTS["fp16x3"], tile, 3).promotes
    flat = replace(p, axes=p.axes[:2])
    assert not _implicit_gemm.Layout(flat, _implicit_gemm.PRODUCTS["fp16x3"], tile, 3).promotes


def conv2(pass_: Pass, batch: int = 256) -> ConvProblem:
    """AlexNet's second layer."""
    axis = Axis(27, 5, 1, 1, 2, 2)
    return ConvProblem(pass_, batch, 64, 192, (axis, axis), device="cuda:any")


@pytest.mark.parametrize("pass_", list(Pass))
def test_offers_keep_the_ceiling(pass_: Pass) -> None:
    p = conv2(pass_)
    if SOLVER.why_not(p):
        pytest.skip(SOLVER.why_not(p)[0])
    for ceiling in (2**26, 2**23, 2**40):
        offers = list(SOLVER.offers(p, ceiling))
        assert len({c for c, _ in offers}) == len(offers) >= 4
        for c, workspace in offers:
            assert workspace == SOLVER.workspace(p, c)
            assert workspace <= ceiling
            assert Config.from_key(c.key) == c
            cost = SOLVER.cost(p, c)
            assert cost.efficiency > 0
    part = replace(p, batch=64)
    known = [c for c, _ in SOLVER.offers(p, 2**26)]
    assert all(c in known for c, _ in SOLVER.offers(part, None, known))


def test_too_little_memory_is_said_not_hidden() -> None:
    p = conv2(Pass.FPROP)
    if SOLVER.why_not(p):
        pytest.skip(SOLVER.why_not(p)[0])
    assert all(workspace > 2**16 for _, workspace in SOLVER.offers(p, 2**16))


def test_many_groups_are_refused_with_the_number() -> None:
    p = replace(conv2(Pass.FPROP), groups=32)
    assert any("not 32" in reason for reason in SOLVER.unsupported(p))


def test_tiles_fit_shared_memory() -> None:
    for product, tiles in TILES.items():
        width = 8 if product == "fp16x3" else 4 if product == "tf32x3" else 2
        planes = 4 if product == "fp16x3" else width
        for tile, _ in tiles:
            assert (tile.channels + tile.columns) * tile.depth * planes * tile.stages <= MOST_SHARED


@pytest.mark.gpu
@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
@pytest.mark.parametrize("pass_", list(Pass))
def test_alexnet_conv2(pass_: Pass, layout: str) -> None:
    p = replace(conv2(pass_, 8), layouts=(layout,) * 3, device=device_name("cuda"), bias=pass_ is Pass.FPROP)
    a, b = make_operands(p, wide=True)
    want = plus_bias(p, p.reference(a, b))
    for c, workspace in SOLVER.offers(p, 2**26):
        out = make_result(p)
        space = torch.full((workspace,), 0xFF, dtype=torch.uint8, device="cuda")
        SOLVER.bind(p, c, a, b, out)(a, b, out, space, *biases(p))
        error = ((out.double() - want).norm() / want.norm()).item()
        assert error < SOLVER.error_bound["ieee"], c


@pytest.mark.gpu
def test_elements_far_below_the_largest_keep_their_digits() -> None:
    p = replace(conv2(Pass.FPROP, 2), device=device_name("cuda"))
    a, b = make_operands(p)
    a[:, :, :, 14:] *= 1e-6  # results right of the middle see nothing of the large half
    want = p.reference(a, b)[..., 17:]
    for c, workspace in SOLVER.offers(p, 2**26):
        out = make_result(p)
        SOLVER.bind(p, c, a, b, out)(a, b, out, torch.empty(workspace, dtype=torch.uint8, device="cuda"))
        assert ((out[..., 17:].double() - want).norm() / want.norm()).item() < 1e-5, c


@pytest.mark.gpu
def test_an_infinity_stays_where_it_is() -> None:
    p = replace(conv2(Pass.FPROP, 2), device=device_name("cuda"))
    a, b = make_operands(p)
    a[0, 3, 5, 5] = math.inf
    met = torch.zeros(p.shape("y"), dtype=torch.bool, device="cuda")
    met[0, :, 3:8, 3:8] = True
    c, workspace = next(iter(SOLVER.offers(p, 2**26)))
    out = make_result(p)
    SOLVER.bind(p, c, a, b, out)(a, b, out, torch.empty(workspace, dtype=torch.uint8, device="cuda"))
    assert bool(out[~met].isfinite().all())
    assert not bool(out[met].isfinite().any())
