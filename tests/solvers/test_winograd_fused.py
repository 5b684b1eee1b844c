"""Winograd convolution in one kernel, its very C++ on the CPU in small blocks; GPU tests run those that are offered."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.kernels.emulator import emulated
from tests.solvers.emulated_steps import EmulatedSteps
from tests.solvers.test_solvers import Memory, biases, check, plus_bias
from tests.strategies import with_memory

from tilewise.machine.device import device_name
from tilewise.plan import Config
from tilewise.problems.conv.axis import Axis
from tilewise.problems.conv.problem import ConvProblem, Pass
from tilewise.problems.operands import make_operands, make_result
from tilewise.solvers.base import SolverUnavailable
from tilewise.solvers.winograd import winograd_fused
from tilewise.solvers.winograd._fused import Layout
from tilewise.solvers.winograd.winograd_fused import WinogradFused

SLOW = [HealthCheck.filter_too_much, HealthCheck.too_slow, HealthCheck.data_too_large]
PASSES = (Pass.FPROP, Pass.DGRAD)
PLAIN: Memory = (("contiguous", 0),) * 3


class Emulated(EmulatedSteps, WinogradFused):
    """The solver with its kernels run by the emulator."""


SOLVER = Emulated()


@st.composite
def axes(draw: st.DrawFn, taps: int, longest: int = 12) -> Axis:
    """Signed padding that differs by side, up to more than the kernel."""
    size = draw(st.integers(1, longest))
    before = draw(st.integers(-min(2, size - 1), taps + 2))
    after = draw(st.integers(-min(2, size - 1 + min(before, 0)), taps + 2))
    return Axis(size + max(0, taps - size - before - after), taps, 1, 1, before, after)


@st.composite
def layers(draw: st.DrawFn, pass_: Pass, dims: int) -> ConvProblem:
    """Few images and channels, at times more than are read at a time; either axis may be the one that is cut."""
    along = draw(st.integers(2, 5))
    found = [draw(axes(along))]
    if dims == 2:
        found.insert(0, draw(axes(draw(st.integers(1, 5)), 8)))
        if draw(st.booleans()):
            across = draw(axes(draw(st.sampled_from((1, 6))), 9))
            found = [found[1], across]
    groups, few, many = draw(st.sampled_from((1, 1, 1, 2, 3))), draw(st.integers(1, 5)), draw(st.integers(1, 19))
    into, outof = (many, few) if pass_ is Pass.FPROP else (few, many)
    return ConvProblem(pass_, draw(st.integers(1, 4)), groups * into, groups * outof, tuple(found), groups)


@pytest.mark.slow
@pytest.mark.sampled(2)
@emulated
@pytest.mark.parametrize("dims", [1, 2])
@pytest.mark.parametrize("pass_", PASSES)
@settings(max_examples=4, suppress_health_check=SLOW, deadline=None)
@given(data=st.data())
def test_any_layer_and_memory(pass_: Pass, dims: int, data: st.DataObject) -> None:
    found: tuple[ConvProblem, Memory] = data.draw(with_memory(layers(pass_, dims), lambda p: not SOLVER.unsupported(p)))
    p, forms = found
    p = replace(p, constant_weight=data.draw(st.booleans()), accumulate=data.draw(st.booleans()))
    p = replace(p, bias=data.draw(st.booleans(), "bias"))
    c = Config(places=data.draw(st.sampled_from((8, 16, 24)), "places"))
    check(Emulated(data.draw(st.booleans(), "backwards")), p, c, forms, p.accumulate)


@emulated
@pytest.mark.parametrize("pass_", PASSES)
def test_channels_in_parts(pass_: Pass) -> None:
    """The same filters' memory again for each part, whose last one is smaller."""
    channels = (3, 130) if pass_ is Pass.FPROP else (130, 3)
    p = ConvProblem(pass_, 2, *channels, (Axis(2, 2, 1, 1, 1, 0), Axis(4, 2, 1, 1, 1, 0)))
    p = replace(p, bias=pass_ is Pass.FPROP)
    workspaces = []
    for parts in (1, 2, 3):
        c = Config(places=8, parts=parts)
        check(SOLVER, p, c, PLAIN, False)
        workspaces.append(SOLVER.workspace(p, c))
    assert workspaces[0] > workspaces[1] > workspaces[2]


@emulated
@pytest.mark.parametrize("pass_", PASSES)
def test_what_is_offered_computes(pass_: Pass) -> None:
    p = ConvProblem(pass_, 3, 17, 18, (Axis(5, 3, 1, 1, 1, 1), Axis(9, 3, 1, 1, 1, 1)))
    c, *_ = SOLVER.configs(p)
    check(SOLVER, p, c, (("channels_last", 0),) * 3, False)


def conv2(pass_: Pass, batch: int = 256) -> ConvProblem:
    """AlexNet's second layer."""
    axis = Axis(27, 5, 1, 1, 2, 2)
    return ConvProblem(pass_, batch, 64, 192, (axis, axis))


@pytest.mark.parametrize("pass_", PASSES)
def test_offers_keep_the_ceiling(pass_: Pass) -> None:
    p = conv2(pass_)
    for ceiling in (None, 2**40, 1400 * 2**10, 2**20):
        offers = list(SOLVER.offers(p, ceiling))
        assert len({c for c, _ in offers}) == len(offers) == winograd_fused.MOST_OFFERED
        for c, workspace in offers:
            assert workspace == SOLVER.workspace(p, c)
            assert Config.from_key(c.key) == c
            assert SOLVER.cost(p, c).efficiency > 0
            if ceiling is None or ceiling > 2**30:
                assert "parts" not in c
            elif pass_ is Pass.FPROP:
                assert workspace <= ceiling
                assert c["parts"] == {1400 * 2**10: 2, 2**20: 3}[ceiling]
    known = [c for c, _ in SOLVER.offers(p, 2**20)]
    assert [c for c, _ in SOLVER.offers(replace(p, batch=64), None, known)] == known


def test_too_little_memory_is_said_not_hidden() -> None:
    assert all(workspace > 2**16 for _, workspace in SOLVER.offers(conv2(Pass.FPROP), 2**16))


def test_constant_filters_are_kept_whole() -> None:
    p = conv2(Pass.FPROP)
    kept = replace(p, constant_weight=True)
    for (c, workspace), (same, rest) in zip(SOLVER.offers(p, None), SOLVER.offers(kept, 2**16), strict=True):
        assert c == same
        assert SOLVER.constant(p, c) == 0
        assert SOLVER.constant(kept, c) >= 64 * 8 * 4 * 5 * 192
        assert rest + SOLVER.constant(kept, c) <= workspace + 256
    with pytest.raises(SolverUnavailable, match="constant filters are kept whole"):
        SOLVER.filters(kept, Config(places=64, parts=2), torch.empty(kept.shape("w")))


def test_a_block_s_images_share_what_pads_them() -> None:
    axis = Axis(27, 5, 1, 1, 2, 2)
    p = replace(conv2(Pass.FPROP), axes=(axis, axis))
    assert [Layout(replace(p, pass_=pass_), 64).pitch for pass_ in PASSES] == [29, 29]
    assert Layout(replace(p, axes=(Axis(27, 5), axis)), 64).pitch == 27
    assert Layout(replace(p, axes=(Axis(27, 5, 1, 1, 9, 0), axis)), 64).pitch == 36
    assert Layout(replace(p, axes=(Axis(27, 5, 1, 1, -2, -3), axis)), 64).pitch == 22


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"groups": 32}, "at most 8 groups, not 32"),
        ({"precision": "tf32"}, "not with precision tf32"),
        ({"axes": (Axis(27, 3), Axis(27, 7))}, ""),
        ({"axes": (Axis(27, 9), Axis(27, 3))}, "beside one of at most 7"),
        ({"axes": (Axis(27, 3, 2), Axis(27, 3))}, "without stride or dilation"),
        ({"axes": (Axis(27, 3), Axis(27, 3, 1, 2))}, "without stride or dilation"),
        ({"axes": (Axis(27, 1), Axis(27, 6))}, "an axis of 2 to 5 taps"),
        ({"batch": 1, "axes": (Axis(2**16, 3), Axis(2**16, 3))}, "elements in an image"),
        ({"axes": (Axis(2**12, 3), Axis(2**14, 3)), "in_channels": 16, "out_channels": 4}, "bytes apart"),
    ],
)  # fmt: skip
def test_what_it_cannot_do_is_said(change: dict[str, Any], reason: str) -> None:
    p = conv2(Pass.FPROP)
    assert not SOLVER.unsupported(p)
    found = SOLVER.unsupported(replace(p, **change))
    assert any(reason in each for each in found) if reason else not found


def test_passes_and_dims_are_declared() -> None:
    p = replace(conv2(Pass.FPROP), device="cuda:any")
    for change in ({"pass_": Pass.WGRAD}, {"axes": (Axis(9, 3),) * 3}, {"dtype": "bf16", "out_dtype": "bf16"}):
        assert any("not" in reason for reason in SOLVER.why_not(replace(p, **change)))


def test_a_gpu_without_these_matrix_units_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    p = replace(conv2(Pass.FPROP), device="cuda:some")
    monkeypatch.setattr(winograd_fused, "unavailable", lambda: "")
    assert not SOLVER.unsupported(p)  # none of that name is here: plans may be made for others
    monkeypatch.setattr(winograd_fused, "torch_device", lambda name: torch.device("cuda", 0))
    for capability, reasons in (((9, 0), []), ((10, 0), ["needs compute capability 9.0, not 10.0"])):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, found=capability: found)
        assert SOLVER.unsupported(p) == reasons
    monkeypatch.setattr(winograd_fused, "unavailable", lambda: "no compiler")
    assert SOLVER.unsupported(p) == ["no compiler"]


@pytest.mark.parametrize(
    "values",
    [{}, {"places": "64"}, {"places": 60}, {"places": 88}, {"places": 64, "parts": 4}, {"places": 64, "parts": 0}],
)
def test_a_config_of_something_else_is_refused(values: dict[str, Any]) -> None:
    p, c = conv2(Pass.FPROP, 2), Config(**values)
    assert list(SOLVER.offers(p, None, [c])) == []
    a, b = make_operands(p)
    with pytest.raises(SolverUnavailable, match="is no config of"):
        SOLVER.steps(p, c, a, b, make_result(p))


def test_memory_too_far_apart_is_refused() -> None:
    p = replace(conv2(Pass.FPROP, 2), layouts=("view", "contiguous", "contiguous"))
    a = torch.empty(1, device="meta").as_strided(p.shape("x"), (2**29, 2**20, 2**12, 2))
    with pytest.raises(SolverUnavailable, match="too large to count in 32 bits"):
        SOLVER.steps(p, Config(places=64), a, torch.empty(p.shape("w"), device="meta"), make_result(p))


@pytest.mark.gpu
@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
@pytest.mark.parametrize(("size", "kernel", "channels"), [(27, 5, (64, 192)), (13, 3, (192, 384)), (56, 3, (64, 64))])
@pytest.mark.parametrize("pass_", PASSES)
def test_all_that_is_offered_of_networks(
    pass_: Pass, size: int, kernel: int, channels: tuple[int, int], layout: str
) -> None:
    axis = Axis(size, kernel, 1, 1, kernel // 2, kernel // 2)
    p = ConvProblem(pass_, 9, *channels, (axis, axis), layouts=(layout,) * 3, device=device_name("cuda"))
    p = replace(p, bias=pass_ is Pass.FPROP)
    if SOLVER.why_not(p):
        pytest.skip(SOLVER.why_not(p)[0])
    a, b = make_operands(p, wide=True)
    want = plus_bias(p, p.reference(a, b))
    for constant, ceiling in ((False, None), (False, 2**19), (True, None)):
        here = replace(p, constant_weight=constant)
        for c, workspace in WinogradFused().offers(here, ceiling):
            out = make_result(p).fill_(math.nan)
            space = torch.full((workspace,), 0xFF, dtype=torch.uint8, device="cuda")
            filters = torch.full((WinogradFused().constant(here, c),), 0xFF, dtype=torch.uint8, device="cuda")
            if constant:
                WinogradFused().prepare(here, c, b)(b, filters, space)
            WinogradFused().bind(here, c, a, b, out)(a, filters if constant else b, out, space, *biases(p))
            error = ((out.double() - want).norm() / want.norm()).item()
            assert error < WinogradFused().error_bound["ieee"], c


@pytest.mark.gpu
def test_an_infinity_stays_in_its_tiles() -> None:
    p = replace(conv2(Pass.FPROP, 2), device=device_name("cuda"))
    if SOLVER.why_not(p):
        pytest.skip(SOLVER.why_not(p)[0])
    a, b = make_operands(p)
    a[0, 3, 5, 5] = math.inf
    for c, workspace in WinogradFused().offers(p, None):
        near = torch.zeros(p.shape("y"), dtype=torch.bool, device="cuda")
        near[0, :, 3:8, :8] = True
        met = torch.zeros_like(near)
        met[0, :, 3:8, 3:8] = True
        out = make_result(p)
        WinogradFused().bind(p, c, a, b, out)(a, b, out, torch.empty(workspace, dtype=torch.uint8, device="cuda"))
        assert bool(out[~near].isfinite().all()), c
        assert not bool(out[met].isfinite().any()), c
