"""Matrix products over tensors as they lie, in Triton's interpreter in small tiles; GPU tests run those offered."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from tests.interpreter import interpreted
from tests.solvers.test_solvers import Memory, biases, check, plus_bias
from tests.strategies import problems, with_memory

from tilewise.machine.device import device_name
from tilewise.plan import Config
from tilewise.problems.conv.axis import Axis
from tilewise.problems.conv.problem import ConvProblem, Pass
from tilewise.problems.operands import make_operands, make_result
from tilewise.solvers.base import SolverUnavailable
from tilewise.solvers.products import _direct as _direct_gemm
from tilewise.solvers.products.direct_gemm import DirectGemm

SOLVER = DirectGemm()
PLAIN: Memory = (("contiguous", 0),) * 3


@st.composite
def configs(draw: st.DrawFn, p: ConvProblem) -> Config:
    sizes = st.sampled_from((16, 32))
    found = Config(tile=(draw(sizes), draw(sizes), draw(sizes)), warps=4, stages=2)
    return Config(**found, splits=draw(st.integers(1, 3))) if p.pass_ is Pass.WGRAD else found


@pytest.mark.slow
@pytest.mark.sampled(3)
@interpreted
@pytest.mark.parametrize("pass_", list(Pass))
@settings(max_examples=4, suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow])
@given(data=st.data())
def test_any_layer_and_memory(pass_: Pass, data: st.DataObject) -> None:
    found: tuple[ConvProblem, Memory] = data.draw(with_memory(problems(pass_, longest=9)), "problem")
    p, forms = found
    p = replace(p, accumulate=data.draw(st.booleans(), "accumulate"))
    p = replace(p, bias=pass_ is not Pass.WGRAD and data.draw(st.booleans(), "bias"))
    if p.pass_ is Pass.WGRAD:
        axes = tuple(Axis(axis.size, 1, axis.stride) for axis in p.axes)
        p = replace(p, axes=axes)
    assume(not SOLVER.unsupported(p))
    check(SOLVER, p, data.draw(configs(p), "config"), forms, p.accumulate)


@interpreted
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("accumulate", [False, True])
def test_where_nothing_reaches_the_image(accumulate: bool, bias: bool) -> None:
    """All taps lie in the padding."""
    p = ConvProblem(Pass.DGRAD, 2, 4, 1, (Axis(1, 1, 3, 1, 1, 1),), accumulate=accumulate, bias=bias)
    check(SOLVER, p, Config(tile=(16, 32, 16), warps=4, stages=2), PLAIN, accumulate)


@pytest.mark.slow
@interpreted
@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
@pytest.mark.parametrize("width", [6, 7, 8])
@pytest.mark.parametrize("pass_", list(Pass))
def test_pointwise_kernels_read_runs_of_places(pass_: Pass, width: int, layout: str, accumulate: bool) -> None:
    """Tiles that hold the end of one image and the start of the next, and depth that ends within a step."""
    p = ConvProblem(pass_, 3, 18, 21, (Axis(2, 1), Axis(width, 1)), layouts=(layout,) * 3, accumulate=accumulate)  # type: ignore[arg-type]
    c = Config(tile=(32, 16, 16), warps=4, stages=2)
    if pass_ is Pass.WGRAD:
        c = Config(**c, splits=2)
    check(SOLVER, p, c, ((layout, 0),) * 3, accumulate)  # type: ignore[arg-type]
    even = width == 8 and layout == "contiguous"
    assert _direct_gemm._Gathered(p, *_told(p, layout)).access["RUN"] == (4 if even else 1)


def _told(p: ConvProblem, layout: str) -> Any:
    """One sweep, and views of the tensors that are gathered and written."""
    from tilewise.solvers.common.sweeps import backward, forward
    from tilewise.solvers.common.views import View

    axes = (Axis(1, 1), *p.axes)
    sweeps = [(backward if p.pass_ is Pass.DGRAD else forward)(axis)[0] for axis in axes]
    memory = torch.channels_last if layout == "channels_last" else torch.contiguous_format
    roles = (p.operands[0], p.result if p.pass_ is not Pass.WGRAD else p.operands[1])
    return sweeps, *(View.of(torch.empty(p.shape(r)).to(memory_format=memory)) for r in roles), roles


def test_runs_begin_where_memory_is_aligned() -> None:
    """Lines of 32 places that lie 33 apart, though channels and images are multiples of sixteen apart."""
    from tilewise.solvers.common.views import View

    p = ConvProblem(Pass.FPROP, 3, 18, 21, (Axis(2, 1), Axis(32, 1)))
    sweeps, dense, out, roles = _told(p, "contiguous")
    memory = torch.empty(3 * 18 * 16 * 33, device="meta")
    apart = View.of(memory.as_strided(p.shape("x"), (18 * 16 * 33, 16 * 33, 33, 1)))
    runs = [_direct_gemm._Gathered(p, sweeps, view, out, roles).access["RUN"] for view in (dense, apart)]
    assert runs == [4, 1]


@pytest.mark.parametrize("pass_", list(Pass))
def test_memory_too_far_apart_is_refused(pass_: Pass) -> None:
    p = pointwise(pass_, 2)
    c, *_ = SOLVER.configs(p)
    sizes = p.shape(p.operands[0])
    a = torch.empty(1, device="meta").as_strided(sizes, (2**35, 2**26, 2**14, 2))
    b, out = (torch.empty(p.shape(role), device="meta") for role in (p.operands[1], p.result))
    with pytest.raises(SolverUnavailable, match="too large to count in 32 bits"):
        SOLVER.bind(p, c, a, b, out)


@pytest.mark.sampled(1)
@interpreted
@pytest.mark.parametrize("pass_", list(Pass))
def test_interrupted_sums(pass_: Pass, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_direct_gemm, "LONGEST", 32)
    axis = Axis(6, 1) if pass_ is Pass.WGRAD else Axis(6, 3, 1, 1, 1, 1)
    p = ConvProblem(pass_, 2, 18, 20, (axis, axis))
    c = Config(tile=(16, 16, 16), warps=4, stages=2)
    check(SOLVER, p, Config(**c, splits=2) if pass_ is Pass.WGRAD else c, PLAIN, False)


@interpreted
def test_gradients_that_no_tap_meets_are_zero() -> None:
    p = ConvProblem(Pass.DGRAD, 2, 3, 4, (Axis(9, 2, 4, 1, 1, 0), Axis(7, 1, 3)))
    for accumulate in (False, True):
        check(
            SOLVER, replace(p, accumulate=accumulate), Config(tile=(16, 16, 16), warps=4, stages=2), PLAIN, accumulate
        )


def stem(pass_: Pass, batch: int = 256, **changes: Any) -> ConvProblem:
    """AlexNet's first layer."""
    axis = Axis(224, 11, 4, 1, 2, 2)
    return replace(ConvProblem(pass_, batch, 3, 64, (axis, axis), device="cuda:any"), **changes)


def pointwise(pass_: Pass, batch: int = 64, **changes: Any) -> ConvProblem:
    """A layer of ResNet-50."""
    return replace(ConvProblem(pass_, batch, 64, 256, (Axis(56, 1),) * 2, device="cuda:any"), **changes)


@pytest.mark.parametrize("p", [stem(Pass.FPROP), *(pointwise(pass_) for pass_ in Pass)])
def test_offers_keep_the_ceiling(p: ConvProblem) -> None:
    if SOLVER.why_not(p):
        pytest.skip(SOLVER.why_not(p)[0])
    for ceiling in (None, 2**30, 2**20, 300_000):
        offers = list(SOLVER.offers(p, ceiling))
        assert len({c for c, _ in offers}) == len(offers) >= 1
        for c, workspace in offers:
            assert workspace == SOLVER.workspace(p, c)
            assert ceiling is None or workspace <= ceiling
            assert Config.from_key(c.key) == c
            assert SOLVER.cost(p, c).efficiency > 0
    known = [c for c, _ in SOLVER.offers(p, 2**26)]
    assert [c for c, _ in SOLVER.offers(replace(p, batch=64), None, known)] == known


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"groups": 32, "in_channels": 32}, "at most 8 groups, not 32"),
        ({"precision": "tf32"}, "not with precision tf32"),
        ({"in_channels": 17}, "at most 16 channels in a group, not 17"),
        ({"pass_": Pass.DGRAD}, "at most 16 channels in a group, not 64"),
        ({"pass_": Pass.WGRAD}, "of one tap without padding"),
        ({"pass_": Pass.WGRAD, "axes": (Axis(9, 1, 1, 1, 1, 0),) * 2}, "of one tap without padding"),
        ({"axes": (Axis(2**16, 1), Axis(2**15, 1))}, "elements in an image or the filter"),
        ({"batch": 2**20, "in_channels": 1, "out_channels": 1, "axes": (Axis(64, 1), Axis(64, 1))}, "places"),
    ],
)  # fmt: skip
def test_what_it_cannot_do_is_said(change: dict[str, Any], reason: str) -> None:
    assert not [each for each in SOLVER.unsupported(stem(Pass.FPROP)) if "triton" not in each]
    assert any(reason in each for each in SOLVER.unsupported(replace(stem(Pass.FPROP), **change)))


@pytest.mark.parametrize(
    "values",
    [{}, {"tile": (16, 16)}, {"tile": (16, 48, 16)}, {"tile": "16"}, {"tile": (16, 16, 16), "splits": 2}],
)
def test_a_config_of_something_else_is_refused(values: dict[str, Any]) -> None:
    p, c = stem(Pass.FPROP, 2), Config(warps=4, stages=2, **values)
    assert list(SOLVER.offers(p, None, [c])) == []
    empty = torch.empty(0)
    with pytest.raises(SolverUnavailable, match="is no config of"):
        SOLVER.bind(p, c, empty, empty, empty)


LAYERS = [
    (3, 64, Axis(224, 11, 4, 1, 2, 2)), (3, 64, Axis(112, 7, 2, 1, 3, 3)), (3, 64, Axis(64, 3, 1, 1, 1, 1)),
    (256, 128, Axis(14, 1)), (128, 264, Axis(7, 1)), (16, 128, Axis(28, 3, 2, 1, 1, 1)),
]  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
@pytest.mark.parametrize(("into", "outof", "axis"), LAYERS)
@pytest.mark.parametrize("pass_", list(Pass))
def test_all_that_is_offered_of_networks(pass_: Pass, into: int, outof: int, axis: Axis, layout: str) -> None:
    into, outof = (outof, into) if pass_ is Pass.DGRAD else (into, outof)
    axis = Axis(axis.size, 1, axis.stride) if pass_ is Pass.WGRAD else axis
    p = ConvProblem(pass_, 9, into, outof, (axis, axis), layouts=(layout,) * 3, device=device_name("cuda"))  # type: ignore[arg-type]
    p = replace(p, bias=pass_ is Pass.FPROP)
    a, b = make_operands(p, wide=True)
    want = plus_bias(p, p.reference(a, b))
    for c, workspace in SOLVER.offers(p, None):
        out = make_result(p).fill_(math.nan)
        space = torch.full((workspace,), 0xFF, dtype=torch.uint8, device="cuda")
        SOLVER.bind(p, c, a, b, out)(a, b, out, space, *biases(p))
        error = ((out.double() - want).norm() / want.norm()).item()
        assert error < SOLVER.error_bound["ieee"], c


@pytest.mark.gpu
def test_an_infinity_stays_where_it_is() -> None:
    p = stem(Pass.FPROP, 2, device=device_name("cuda"))
    a, b = make_operands(p)
    a[0, 1, 50, 60] = math.inf
    want = torch.nn.functional.conv2d(a, b, stride=4, padding=2)
    for c, workspace in SOLVER.offers(p, None):
        out = make_result(p)
        SOLVER.bind(p, c, a, b, out)(a, b, out, torch.empty(workspace, dtype=torch.uint8, device="cuda"))
        assert torch.equal(out.isfinite(), want.isfinite()), c
