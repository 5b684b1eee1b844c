"""First layers' products in Triton's interpreter, in small tiles: the GPU tests see only those it offers."""

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
from tilewise.problems.base import dense_strides
from tilewise.problems.conv.axis import Axis
from tilewise.problems.conv.problem import ConvProblem, Pass
from tilewise.problems.operands import make_operands, make_result
from tilewise.solvers.base import SolverUnavailable
from tilewise.solvers.common.views import View
from tilewise.solvers.products._rows import Rows, tiles_of
from tilewise.solvers.products.row_gemm import RowGemm, _covering, _tile

SOLVER = RowGemm()
PASSES = (Pass.FPROP, Pass.WGRAD)
LAST = ("channels_last",) * 3


@st.composite
def first_layers(draw: st.DrawFn, pass_: Pass) -> ConvProblem:
    """Few channels on axes of any stride, dilation and padding, which may crop."""
    found = tuple(draw(axes(longest=11)) for _ in range(draw(st.sampled_from((1, 2, 2, 3)))))
    assume(math.prod(axis.size for axis in found) <= 500 and math.prod(axis.kernel for axis in found) <= 27)
    return ConvProblem(
        pass_, draw(st.integers(1, 3)), draw(st.sampled_from((1, 2, 3, 4, 8))), draw(st.sampled_from((1, 5, 8, 24))),
        found, dtype="fp16", accumulate=draw(st.booleans()), bias=pass_ is Pass.FPROP and draw(st.booleans()),
    )  # fmt: skip


@st.composite
def configs(draw: st.DrawFn, p: ConvProblem) -> Config:
    axis = p.axes[-1]
    sides = [side for side in (1, 2, 4) if side <= axis.out]
    side = 1 if axis.dilation > 1 and axis.kernel > 1 else draw(st.sampled_from(sides))
    lines = draw(st.sampled_from((1, 2, 4)))
    edges = st.sampled_from((16, 32, 64))
    found = Config(tile=(draw(edges), draw(edges), draw(edges)), side=side, lines=lines, warps=4, stages=2)
    if p.pass_ is Pass.FPROP:
        return found
    if draw(st.booleans()):
        found = Config(**found, more=draw(st.sampled_from((16, 32))))
    return Config(**found, splits=draw(st.integers(1, min(5, tiles_of(p, _tile(found))))))


@pytest.mark.sampled(2)
@interpreted
@pytest.mark.parametrize("pass_", PASSES)
@settings(max_examples=10, suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow])
@given(data=st.data())
def test_any_tile(pass_: Pass, data: st.DataObject) -> None:
    # Not bf16: the interpreter multiplies its bit patterns.
    found: tuple[ConvProblem, Memory] = data.draw(
        with_memory(first_layers(pass_), lambda p: not SOLVER.unsupported(p)), "problem"
    )
    p, forms = found
    if data.draw(st.booleans(), "fp32 result"):
        p = replace(p, out_dtype="fp32")
    check(SOLVER, p, data.draw(configs(p), "config"), forms, p.accumulate)


@pytest.mark.slow
@interpreted
@pytest.mark.parametrize("pass_", PASSES)
@pytest.mark.parametrize("side", [1, 2, 4])
def test_it_reads_wide(pass_: Pass, side: int) -> None:
    """The layer of ResNet on a small image, whose rows are read 2, 4 and 8 elements at a time."""
    p = ConvProblem(pass_, 2, 3, 16, (Axis(24, 7, 2, 1, 3, 3), Axis(32, 7, 2, 1, 3, 3)), dtype="fp16", layouts=LAST)
    x = torch.empty_strided(p.shape("x"), dense_strides(p.shape("x"), "channels_last"), device="meta")
    rows = Rows.of(p, View.of(x), side, 32)
    assert rows.run == 2 * side
    assert rows.length % rows.run == 0
    assert (-9 - rows.lead) % rows.run == 0  # where a window of the first output starts
    c = Config(tile=(32, 64, 32), side=side, lines=2, warps=4, stages=2)
    check(SOLVER, p, Config(**c, splits=3) if pass_ is Pass.WGRAD else c, (("channels_last", 0),) * 3, False)


@interpreted
def test_nothing_beyond_a_row_is_used() -> None:
    """Rows of a view with others between, which are NaN, as are those that would be read before the first."""
    p = ConvProblem(Pass.FPROP, 2, 4, 8, (Axis(6, 3, 1, 1, 1, 1), Axis(8, 3, 1, 1, 1, 1)), dtype="fp16",
                    layouts=("view", "contiguous", "channels_last"))  # fmt: skip
    base = torch.full((2, 12, 8, 4), math.nan, dtype=torch.float16, device="cpu")
    x = base[:, 1::2].permute(0, 3, 1, 2)
    x.copy_(torch.randn(x.shape, dtype=torch.float32, device="cpu"))
    w = torch.randn(p.shape("w"), dtype=torch.float32, device="cpu").half()
    want = p.reference(x, w)
    for side in (1, 2, 4):
        c = Config(tile=(16, 32, 32), side=side, lines=1, warps=4, stages=2)
        out = make_result(p)
        space = torch.full((SOLVER.workspace(p, c),), 0xFF, dtype=torch.uint8, device="cpu")
        SOLVER.bind(p, c, x, w, out)(x, w, out, space)
        assert (out.double() - want).norm() <= 2.0**-10 * want.norm()


def test_sums_are_covered_closely() -> None:
    for sums in range(1, 257):
        first, more = _covering(sums)
        assert {n & (n - 1) for n in (first, more)} == {0}
        assert sums <= first + more < max(16, 1.5 * sums) + 16
    assert _covering(154) == (128, 32)
    assert _covering(1000) == (128, 0)


def resnet(pass_: Pass, batch: int = 128) -> ConvProblem:
    axis = Axis(224, 7, 2, 1, 3, 3)
    return ConvProblem(pass_, batch, 3, 64, (axis, axis), dtype="bf16", layouts=LAST, device="cuda:any")


def convnext(pass_: Pass, batch: int = 128) -> ConvProblem:
    axis = Axis(224, 4, 4)
    return ConvProblem(pass_, batch, 3, 96, (axis, axis), dtype="bf16", layouts=LAST, device="cuda:any")


def efficientnet(pass_: Pass, batch: int = 128) -> ConvProblem:
    axis = Axis(224, 3, 2, 1, 1, 1)
    return ConvProblem(pass_, batch, 3, 32, (axis, axis), dtype="bf16", layouts=LAST, device="cuda:any")


@pytest.mark.parametrize("pass_", PASSES)
@pytest.mark.parametrize("problem", [resnet, convnext, efficientnet])
def test_offers(problem: type[resnet], pass_: Pass) -> None:
    p = problem(pass_)
    if SOLVER.why_not(p):
        pytest.skip(SOLVER.why_not(p)[0])
    found = list(SOLVER.configs(p))
    assert 4 <= len(found) <= 8
    for c in found:
        assert Config.from_key(c.key) == c
        assert 0 < SOLVER.cost(p, c).efficiency <= 1
        assert 0 < SOLVER.workspace(p, c) < 2**27


def test_limits_are_said() -> None:
    p = resnet(Pass.FPROP)
    reasons = {
        "one group": replace(p, groups=3, out_channels=66), "input channels": replace(p, in_channels=32),
        "side by side": replace(p, layouts=("contiguous",) * 3), "outputs": replace(p, batch=2**20),
        "elements": replace(p, batch=1, axes=(Axis(2**15, 7, 2), Axis(2**15, 7, 2))),
    }  # fmt: skip
    for word, wrong in reasons.items():
        assert any(word in reason for reason in SOLVER.unsupported(wrong)), word
    assert any("dgrad" in reason for reason in SOLVER.why_not(replace(p, pass_=Pass.DGRAD)))


@pytest.mark.parametrize(
    "c",
    [
        Config(tile=(64, 64, 48), side=1, lines=1, warps=4, stages=2),
        Config(tile=(64, 64), side=1, lines=1, warps=4, stages=2),
        Config(tile=(64, 64, 32), side=3, lines=1, warps=4, stages=2),
        Config(tile=(64, 64, 32), side=1, lines=3, warps=4, stages=2),
        Config(tile=(64, 64, 32), side=1, lines=1, warps=3, stages=2),
        Config(tile=(64, 64, 32), side=1, lines=1, warps=4),
        Config(tile=(64, 64, 32), side=1, lines=1, warps=4, stages=2, splits=2),
    ],
    ids=str,
)
def test_a_bad_config_is_unavailable(c: Config) -> None:
    p = replace(resnet(Pass.FPROP, 1), device="cpu")
    a, b, out = (torch.empty(p.shape(role), dtype=torch.bfloat16, device="meta") for role in ("x", "w", "y"))
    with pytest.raises(SolverUnavailable, match="no config"):
        SOLVER.bind(p, c, a, b, out)


@pytest.mark.gpu
@pytest.mark.parametrize("pass_", PASSES)
@pytest.mark.parametrize("problem", [resnet, convnext, efficientnet])
def test_every_offer_on_a_gpu(problem: type[resnet], pass_: Pass) -> None:
    whole = replace(problem(pass_), device=device_name("cuda"))
    p = replace(whole, batch=5, bias=pass_ is Pass.FPROP)
    a, b = make_operands(p)
    bias = [torch.randn(p.out_channels, dtype=torch.bfloat16, device="cuda")] if p.bias else []
    want = p.reference(a, b)
    for vector in bias:
        want = want + vector.to(want).view(-1, 1, 1)
    for c in itertools.islice(SOLVER.configs(whole), 8):  # a smaller batch would be offered other tiles
        if c.get("splits", 1) > tiles_of(p, _tile(c)):
            c = Config(**{**c, "splits": tiles_of(p, _tile(c))})
        out = make_result(p)
        space = torch.full((SOLVER.workspace(p, c),), 0xFF, dtype=torch.uint8, device="cuda")
        run = SOLVER.bind(p, c, a, b, out)
        run(a, b, out, space, *bias)
        assert ((out.double() - want).norm() / want.norm()).item() < 2.0**-8, c
        again = make_result(p)
        run(a, b, again, space.fill_(0xFF), *bias)
        assert torch.equal(out, again), c
