"""Indirect convolution on a CPU: generated layers in any division of their pixels and panels."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.solvers.cpu_runs import at_once, check_followed, run_poisoned
from tests.solvers.test_solvers import check
from tests.strategies import problems

from tilewise.plan import Config
from tilewise.problems.conv.axis import Axis
from tilewise.problems.conv.problem import ConvProblem, Pass
from tilewise.problems.operands import make_operands, make_result
from tilewise.solvers.common.cpu_run import WIDEST
from tilewise.solvers.products._indirect import division
from tilewise.solvers.products.indirect import Indirect

pytest.importorskip("numba")
SOLVER = Indirect()
LANES = WIDEST.get(torch.backends.cpu.get_cpu_capability(), 4)
BOUND = 1e-6
LAST = ("channels_last", "contiguous", "channels_last")
FORMS = (("channels_last", 0), ("contiguous", 0), ("channels_last", 0))
NAMES = ("none", "relu", "hardswish", "clamp:-0.25:inf", "leaky_relu:0.1", "silu", "gelu", "gelu_tanh", "tanh")
"""Those that are not here are made of the same instructions."""


def changed(c: Config, **changes: object) -> Config:
    return Config(**{**c, **changes})  # type: ignore[arg-type]


def layer(batch: int, into: int, outof: int, *axes: Axis, groups: int = 1, constant: bool = True) -> ConvProblem:
    return ConvProblem(Pass.FPROP, batch, into, outof, axes, groups, constant_weight=constant, layouts=LAST)


@settings(max_examples=25, suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow])
@given(problems(Pass.FPROP), st.data())
def test_any_layer_in_any_division(p: ConvProblem, data: st.DataObject) -> None:
    """Groups, strides, dilation and cropping, in one to three dimensions, with filters that are kept or not."""
    constant, bias = (data.draw(st.booleans(), name) for name in ("constant", "bias"))
    p = replace(p, constant_weight=constant, bias=bias, layouts=LAST)
    if SOLVER.why_not(p):
        return
    for c in SOLVER.configs(p):
        if "lines" not in c:
            tiles = -(-p.batch * int(torch.Size(axis.out for axis in p.axes).numel()) // int(str(c["rows"])))
            c = changed(c, parts=data.draw(st.integers(1, tiles), "parts"))
        check(SOLVER, p, c, FORMS, accumulate=False)


LAYERS = (
    layer(1, 64, 80, Axis(9, 1), Axis(7, 1)),
    layer(2, 24, 130, Axis(14, 3, 2, 1, 1, 1), Axis(11, 3, 2, 1, 1, 1)),
    layer(2, 3, 40, Axis(37, 7, 2, 1, 3, 3), Axis(33, 7, 2, 1, 3, 2)),
    layer(1, 36, 48, Axis(8, 5, 1, 2, 4, 4), Axis(9, 3, 1, 1, -1, 2), groups=2),
    layer(1, 5, 7, Axis(30, 1), Axis(31, 9, 4, 1, -2, -3)),
    layer(1, 20, 35, Axis(5, 3, 1, 1, 1, 1), Axis(6, 2, 1, 1), Axis(7, 3, 1, 1, 1, 1)),
    layer(1, 1030, 210, Axis(3, 1), Axis(5, 1)),
    layer(1, 513, 150, Axis(4, 3, 2, 1, 1, 1), Axis(5, 3, 1, 1, 1, 1)),
    layer(1, 1538, 160, Axis(6, 1, 2), Axis(7, 1, 2), groups=2),
)
"""Tiles that are not full, panels that are not, copied rows, padding of one side, cropping, groups, three axes. The
last ones sum block by block, and tiles prefetch the next panel: channels are no multiple of a pass or a block."""


def test_which_layers_prefetch_and_sum_by_blocks() -> None:
    found = [division(p, next(iter(SOLVER.configs(p)))) for p in LAYERS]
    assert [divided.deep for divided in found] == [False] * 6 + [True] * 3
    assert [divided.ahead > 0 for divided in found[6:]] == [True] * 3
    assert not any(divided.ahead for divided in found[:6])


@pytest.mark.parametrize("channels", [512, 2048])
def test_sums_of_one_constant_keep_their_digits(channels: int) -> None:
    """Added one by one, 2048 equal products would be off by 2e-5."""
    p = layer(1, channels, 96, Axis(7, 1), Axis(7, 1))
    a, b = (torch.full_like(t, 0.7) for t in make_operands(p))
    want = p.reference(a, b)
    for c in SOLVER.configs(p):
        got = run_poisoned(SOLVER, p, c, a, b, make_result(p))
        assert float((got.double() - want).norm() / want.norm()) <= 3e-6, c


@pytest.mark.parametrize("p", LAYERS, ids=lambda p: f"{p.in_channels}to{p.out_channels}")
@pytest.mark.parametrize("wide", [False, True], ids=["normal", "wide"])
def test_errors_are_those_of_sums_in_fp32(p: ConvProblem, wide: bool) -> None:
    a, b = make_operands(p, 3, wide=wide)
    want = p.reference(a, b)
    for c in SOLVER.configs(p):
        got = run_poisoned(SOLVER, p, c, a, b, make_result(p))
        assert float((got.double() - want).norm() / want.norm()) <= BOUND, c


@pytest.mark.parametrize("p", LAYERS, ids=lambda p: f"{p.in_channels}to{p.out_channels}")
@pytest.mark.parametrize("lies", ["contiguous", "channels_last", "view"])
def test_filters_that_change_give_the_same_bits(p: ConvProblem, lies: str) -> None:
    """They are brought into panels by a kernel at each call, however they lie; constant ones are by torch, once."""
    a, b = make_operands(p, 3)
    if lies == "channels_last":
        b = b.transpose(0, 1).contiguous().transpose(0, 1)
    elif lies == "view":
        b = torch.cat([b, b + 1], dim=1)[:, : b.shape[1]]
    for c in SOLVER.configs(p):
        want = run_poisoned(SOLVER, p, c, a, b, make_result(p))
        got = run_poisoned(SOLVER, replace(p, constant_weight=False), c, a, b, make_result(p))
        assert torch.equal(got, want), c


@pytest.mark.parametrize("size", [16, 64])
def test_results_that_are_written_far_away(size: int) -> None:
    """Small and large ones: where those of large ones will be written is prefetched."""
    p = layer(1, 5, 96, Axis(size, 1), Axis(size, 1))
    a, b = make_operands(p, 3)
    want = p.reference(a, b)
    for c in SOLVER.configs(p):
        got = run_poisoned(SOLVER, p, c, a, b, make_result(p))
        assert float((got.double() - want).norm() / want.norm()) <= BOUND, c


def test_divisions_of_equal_times_are_told_apart() -> None:
    """Of images of three channels several divisions are estimated to take as long."""
    assert list(SOLVER.configs(layer(1, 3, 64, Axis(224, 7, 2, 1, 3, 3), Axis(224, 7, 2, 1, 3, 3))))


@pytest.mark.slow
@pytest.mark.parametrize("lanes", [4, 8, 16])
@pytest.mark.parametrize("p", LAYERS, ids=lambda p: f"{p.in_channels}to{p.out_channels}")
def test_vectors_of_other_machines(p: ConvProblem, lanes: int) -> None:
    a, b = make_operands(p)
    want = p.reference(a, b)
    alone = next(c for c in SOLVER.configs(p) if "interleaved" not in c)
    c = changed(alone, lanes=lanes, vectors=2, rows=5, panel_parts=1)
    if "lines" not in c:
        c = changed(c, parts=2)
    got = run_poisoned(SOLVER, p, c, a, b, make_result(p))
    assert float((got.double() - want).norm() / want.norm()) <= BOUND
    assert torch.equal(run_poisoned(SOLVER, replace(p, constant_weight=False), c, a, b, make_result(p)), got)


@pytest.mark.parametrize("activation", NAMES)
def test_what_follows_is_done_as_it_writes(activation: str) -> None:
    """A full panel and one that is not, with a bias, a residual and the activation."""
    p = replace(LAYERS[0], bias=True, residual=True, activation=activation)
    c = changed(next(iter(SOLVER.configs(p))), vectors=2, rows=6, parts=3)
    assert SOLVER.does_activate(p, c)
    check_followed(SOLVER, p, c, BOUND)


@pytest.mark.parametrize("lanes", sorted({4, LANES}))
@pytest.mark.parametrize("channels", [2, 3, 4, 11])
@pytest.mark.parametrize("sides", [(1, 1), (-1, -2), (0, 5)], ids=["padded", "cropped", "one side"])
def test_an_image_may_lie_channel_by_channel(channels: int, sides: tuple[int, int], lanes: int) -> None:
    """Rows of three channels are interleaved by vectors, others number by number; nothing beside them is read."""
    p = layer(2, channels, 21, Axis(12, 3, 2, 1, 1, 1), Axis(41, 3, 2, 1, *sides))
    p = replace(p, layouts=("contiguous", *LAST[1:]))
    assert not SOLVER.why_not(p)
    a, b = make_operands(p, 2)
    want = p.reference(a, b)
    walled = torch.full((a.numel() + 128,), float("nan"), dtype=torch.float32, device="cpu")
    image = walled[64 : 64 + a.numel()].view(a.shape)
    image.copy_(a)
    for c in SOLVER.configs(p):
        c = changed(c, lanes=lanes, vectors=2, rows=5, panel_parts=1)
        got = run_poisoned(SOLVER, p, c, image, b, make_result(p))
        assert float((got.double() - want).norm() / want.norm()) <= BOUND, c


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


def test_limits_of_images_by_channels() -> None:
    many = replace(LAYERS[1], layouts=("contiguous", *LAST[1:]))
    wide = replace(LAYERS[4], in_channels=17, layouts=("contiguous", *LAST[1:]))
    grouped = replace(LAYERS[3], layouts=("contiguous", *LAST[1:]))
    for p in (many, wide, grouped):
        assert SOLVER.why_not(p) == ["takes x with channels innermost, not contiguous: channels_last would do"]


def test_limits_are_stated() -> None:
    p = LAYERS[0]
    reasons = SOLVER.why_not(replace(p, layouts=("contiguous", "contiguous", "view")))
    assert [reason.split(",")[0] for reason in reasons] == [
        "takes x with channels innermost", "takes y with channels innermost",
    ]  # fmt: skip
    depthwise = layer(1, 8, 8, Axis(9, 3), groups=8)
    assert SOLVER.why_not(depthwise) == ["takes groups of several channels, not depthwise ones"]


@pytest.mark.parametrize("change", [{"rows": 99}, {"parts": 999}, {"panel_parts": 99}, {"lines": 2}, {"vectors": 5}])
def test_a_config_from_elsewhere_is_checked(change: dict[str, int]) -> None:
    p = LAYERS[0]
    a, b = make_operands(p)
    c = changed(next(iter(SOLVER.configs(p))), **change)
    with pytest.raises(Exception, match="is no config of"):
        SOLVER.bind(p, c, a, b, make_result(p))
