"""Products over channels_last tensors in Triton's interpreter, in small tiles: the GPU tests see those it offers."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from tests.interpreter import interpreted
from tests.solvers.test_solvers import Memory, check
from tests.strategies import axes, with_memory

from tilewise.machine.device import device_name
from tilewise.plan import Config
from tilewise.problems.conv.axis import Axis
from tilewise.problems.conv.problem import ConvProblem, Pass
from tilewise.problems.operands import make_operands, make_result
from tilewise.solvers.base import SolverUnavailable
from tilewise.solvers.products._taps import _divider, pixels_of
from tilewise.solvers.products.channels_last_gemm import GRADIENT, PRODUCT, ChannelsLastGemm

SOLVER = ChannelsLastGemm()
MOST_SHARED = 227 * 1024
LAST = ("channels_last",) * 3
DENSE = (("channels_last", 0),) * 3


@st.composite
def layers(draw: st.DrawFn, pass_: Pass) -> ConvProblem:
    """Channels that do and do not divide steps and accesses, on axes of any stride, dilation and padding."""
    found = tuple(draw(axes(longest=9)) for _ in range(draw(st.sampled_from((1, 2, 2, 3)))))
    assume(math.prod(axis.size for axis in found) <= 300 and math.prod(axis.kernel for axis in found) <= 27)
    groups = draw(st.sampled_from((1, 1, 2)))
    channels = st.sampled_from((2, 3, 8, 16, 24, 33))
    return ConvProblem(
        pass_, draw(st.integers(1, 3)), groups * draw(channels), groups * draw(channels), found, groups, dtype="fp16",
        accumulate=draw(st.booleans()), bias=pass_ is not Pass.WGRAD and draw(st.booleans()),
    )  # fmt: skip


@st.composite
def configs(draw: st.DrawFn, p: ConvProblem) -> Config:
    edges = st.sampled_from((16, 32, 64))
    found = Config(tile=(draw(edges), draw(edges), draw(edges)), warps=4, stages=2)
    return Config(**found, splits=draw(st.integers(1, min(4, pixels_of(p))))) if p.pass_ is Pass.WGRAD else found


@pytest.mark.sampled(3)
@interpreted
@pytest.mark.parametrize("pass_", list(Pass))
@settings(max_examples=12, suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow])
@given(data=st.data())
def test_any_tile(pass_: Pass, data: st.DataObject) -> None:
    # Not bf16: the interpreter multiplies its bit patterns.
    found: tuple[ConvProblem, Memory] = data.draw(
        with_memory(layers(pass_), lambda p: not SOLVER.unsupported(p)), "problem"
    )
    p, forms = found
    if data.draw(st.booleans(), "fp32 result"):
        p = replace(p, out_dtype="fp32")
    check(SOLVER, p, data.draw(configs(p), "config"), forms, p.accumulate)


@interpreted
@pytest.mark.parametrize(
    "axis",
    [Axis(7, 3, 2, 1, 1, 1), Axis(8, 1, 2), Axis(7, 2, 3), Axis(9, 3, 2, 2, 2, 1), Axis(9, 3, 3, 2, 0, 1)],
    ids=str,
)
def test_every_pixel_of_an_image_is_written_once(axis: Axis) -> None:
    """Phases with and without taps, of odd sizes; the result starts as NaN, and nothing is added to it."""
    p = ConvProblem(Pass.DGRAD, 2, 16, 24, (axis, axis), dtype="fp16", layouts=LAST, bias=True)
    check(SOLVER, p, Config(tile=(16, 16, 16), warps=4, stages=2), DENSE, False)


@given(divisor=st.integers(1, 2**20), number=st.integers(0, 2**30 - 1))
def test_division_by_multiplying(divisor: int, number: int) -> None:
    magic, shift = _divider(divisor)
    assert 0 < magic < 2**31
    assert (4 * number * magic >> 32) >> shift == number // divisor


def layer(pass_: Pass, into: int, outof: int, size: int, kernel: int, stride: int, pad: int) -> ConvProblem:
    axis = Axis(size, kernel, stride, 1, pad, pad)
    return ConvProblem(pass_, 128, into, outof, (axis, axis), dtype="bf16", layouts=LAST, device="cuda:any")


SHAPES = {
    "64-3x3": (64, 64, 56, 3, 1, 1), "256-3x3": (256, 256, 14, 3, 1, 1), "128-3x3s2": (128, 128, 56, 3, 2, 1),
    "512-1x1s2": (256, 512, 56, 1, 2, 0), "192-2x2s2": (96, 192, 56, 2, 2, 0), "24-1x1": (24, 144, 56, 1, 1, 0),
}  # fmt: skip


@pytest.mark.parametrize("pass_", list(Pass))
@pytest.mark.parametrize("shape", SHAPES)
def test_offers(shape: str, pass_: Pass) -> None:
    p = layer(pass_, *SHAPES[shape])
    if SOLVER.why_not(p):
        pytest.skip(SOLVER.why_not(p)[0])
    found = list(SOLVER.configs(p))
    assert 3 <= len(found) <= 8
    for c in found:
        assert Config.from_key(c.key) == c
        assert 0.02 < SOLVER.cost(p, c).efficiency <= 1
        assert (SOLVER.workspace(p, c) > 0) == (c.get("splits", 1) != 1)


def test_limits_are_said() -> None:
    p = layer(Pass.FPROP, *SHAPES["64-3x3"])
    reasons = {
        "groups": replace(p, groups=64), "channels of x": replace(p, layouts=("contiguous", *LAST[1:])),
        "channels of w": replace(p, layouts=(LAST[0], "contiguous", LAST[2])), "elements": replace(p, batch=2**14),
    }  # fmt: skip
    for word, wrong in reasons.items():
        assert any(word in reason for reason in SOLVER.unsupported(wrong)), word


@pytest.mark.parametrize(
    "c",
    [
        Config(tile=(128, 128, 48), warps=4, stages=3),
        Config(tile=(128, 128), warps=4, stages=3),
        Config(tile=(128, 128, 64), warps=3, stages=3),
        Config(tile=(128, 128, 64), warps=4),
        Config(tile=(128, 128, 64), warps=4, stages=3, splits=2),
    ],
    ids=str,
)
def test_a_bad_config_is_unavailable(c: Config) -> None:
    p = replace(layer(Pass.FPROP, *SHAPES["64-3x3"]), device="cpu")
    a, b, out = (torch.empty(p.shape(role), dtype=torch.bfloat16, device="meta") for role in ("x", "w", "y"))
    with pytest.raises(SolverUnavailable, match="no config"):
        SOLVER.bind(p, c, a, b, out)


def test_tiles_fit_shared_memory() -> None:
    for tile, _ in (*PRODUCT, *GRADIENT):
        assert (tile.pixels + tile.channels) * tile.depth * 2 * tile.stages <= MOST_SHARED


@pytest.mark.gpu
@pytest.mark.parametrize("pass_", list(Pass))
@pytest.mark.parametrize("shape", SHAPES)
def test_offers_on_a_gpu(shape: str, pass_: Pass) -> None:
    whole = replace(layer(pass_, *SHAPES[shape]), device=device_name("cuda"))
    p = replace(whole, batch=3, bias=pass_ is not Pass.WGRAD)
    a, b = make_operands(p)
    bias = [torch.randn(p.shape(p.result)[1], dtype=torch.bfloat16, device="cuda")] if p.bias else []
    want = p.reference(a, b)
    for vector in bias:
        want = want + vector.to(want).view(-1, 1, 1)
    for c in itertools.islice(SOLVER.configs(whole), 3):  # each is compiled, which takes a second
        out = make_result(p)
        space = torch.full((SOLVER.workspace(p, c),), 0xFF, dtype=torch.uint8, device="cuda")
        run = SOLVER.bind(p, c, a, b, out)
        run(a, b, out, space, *bias)
        assert ((out.double() - want).norm() / want.norm()).item() < 2.0**-8, c
        again = make_result(p)
        run(a, b, again, space.fill_(0xFF), *bias)
        assert torch.equal(out, again), c
