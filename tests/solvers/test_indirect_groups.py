"""Indirect convolution of several groups side by side: widths of groups, lanes, and groups that are left over."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tests.solvers.cpu_runs import check_followed, run_poisoned

from tilewise.plan import Config
from tilewise.problems.conv.axis import Axis
from tilewise.problems.conv.problem import ConvProblem, Pass
from tilewise.problems.operands import make_operands, make_result
from tilewise.solvers.base import SolverUnavailable
from tilewise.solvers.common.channels_last import SHAPES
from tilewise.solvers.common.cpu_run import WIDEST
from tilewise.solvers.common.tiles import integer
from tilewise.solvers.products._interleaved import ROWS
from tilewise.solvers.products.indirect import Indirect

pytest.importorskip("numba")
SOLVER = Indirect()
LANES = WIDEST.get(torch.backends.cpu.get_cpu_capability(), 4)
BOUND = 1e-6
LAST = ("channels_last", "contiguous", "channels_last")
SLOW = pytest.mark.slow
QUICK = 1, 2, 3, 4, 5, 8, 11, 16, 17, 24, 29, 32, 33
"""Widths of groups that are tried every time."""
PADDED = Axis(6, 3, 1, 1, 1, 1), Axis(7, 3, 1, 1, 1, 1)


def layer(batch: int, into: int, outof: int, groups: int, *axes: Axis) -> ConvProblem:
    """``into`` and ``outof`` are the channels of one group."""
    sizes = batch, into * groups, outof * groups
    return ConvProblem(Pass.FPROP, *sizes, axes or PADDED, groups, constant_weight=True, layouts=LAST)


def config(p: ConvProblem, lanes: int, count: int, rows: int = 3, lines: int = 2) -> Config:
    """``count`` groups side by side."""
    vectors = -(-count * (p.out_channels // p.groups) // lanes)
    height = p.axes[-2].out if p.dims > 1 else 1
    parts = p.batch * -(-height // lines)
    return Config(lanes=lanes, vectors=vectors, rows=rows, parts=parts, panel_parts=1, threads=2, lines=lines,
                  interleaved=count)  # fmt: skip


def error(p: ConvProblem, c: Config) -> float:
    """The relative error beside float64, of a result in memory full of NaN."""
    a, b = make_operands(p, 3)
    want = p.reference(a, b)
    got = run_poisoned(SOLVER, p, c, a, b, make_result(p))
    return float((got.double() - want).norm() / want.norm())


def most_groups(lanes: int, outputs: int) -> int:
    """The largest number of groups whose outputs fit in a tile, up to the lanes of a vector; at least one."""
    most = max(SHAPES[lanes]) * lanes
    return max(count for count in (1, 2, 4, 8, 16) if count == 1 or (count <= lanes and count * outputs <= most))


@pytest.mark.parametrize("width", [pytest.param(i, marks=() if i in QUICK else SLOW) for i in range(1, 34)])
def test_groups_of_any_width(width: int) -> None:
    """As many groups as fit, of as many inputs and of other numbers of outputs, and one group left over."""
    outputs = width * 7 % 32 + 1
    count = most_groups(LANES, outputs)
    if count == 1:
        pytest.skip("the outputs of two groups do not fit in a tile")
    p = layer(1, width, outputs, count + 1)
    assert error(p, config(p, LANES, count)) <= BOUND


@pytest.mark.parametrize("lanes", [4, 8, 16])
@pytest.mark.parametrize("count", [2, 4, 8, 16])
def test_any_number_of_lanes(lanes: int, count: int) -> None:
    """Vectors of all machines, which LLVM divides where they are wider than those of this one."""
    if count > lanes:
        pytest.skip("more groups than lanes")
    for outputs in {1, 2, max(SHAPES[lanes]) * lanes // count}:
        p = layer(2, 3, outputs, 2 * count - 1)
        assert error(p, config(p, lanes, count)) <= BOUND, outputs


LAYERS = (
    layer(2, 4, 6, 5, Axis(9, 3, 2, 1, 1, 1), Axis(11, 3, 2, 1, 1, 1)),
    layer(1, 5, 4, 4, Axis(13, 3, 1, 3, 2, 4), Axis(8, 4, 3, 1, 2, 1)),
    layer(1, 6, 5, 6, Axis(9, 2, 1, 1, -1, -2), Axis(10, 5, 1, 1, -2, 3)),
    layer(3, 7, 3, 7, Axis(5, 1), Axis(4, 1)),
    layer(2, 3, 8, 3, Axis(23, 5, 2, 1, 4, 0)),
    layer(1, 2, 2, 9, Axis(3, 3, 1, 1, 3, 3), Axis(2, 3, 1, 1, 2, 2)),
)
"""Strides, dilation along the height, cropping, padding of one side, one tap, one axis, results that read padding."""


@pytest.mark.parametrize("lanes", [4, 8, 16])
@pytest.mark.parametrize("p", LAYERS, ids=lambda p: p.key)
def test_any_axes(p: ConvProblem, lanes: int) -> None:
    """On vectors of all machines, with 5 rows or as many as fit, where tiles have fewer."""
    height = p.axes[-2].out if p.dims > 1 else 1
    count = min(4, most_groups(lanes, p.out_channels // p.groups))
    rows = min(5, ROWS[lanes][integer(config(p, lanes, count), "vectors")])
    for lines in sorted({1, -(-height // 2), height}):
        assert error(p, config(p, lanes, count, rows, lines)) <= BOUND, lines


@pytest.mark.parametrize("p", LAYERS[:3], ids=lambda p: p.key)
def test_filters_that_are_not_kept(p: ConvProblem) -> None:
    assert error(replace(p, constant_weight=False), config(p, LANES, 2)) <= BOUND


def test_offered_configs_are_right() -> None:
    """Also with pixels that are further apart than their channels."""
    p = layer(1, 24, 24, 5)
    assert any("interleaved" in c for c in SOLVER.configs(p)) == (LANES == 16)
    p = replace(layer(1, 4, 4, 9), constant_weight=False)
    a, b = make_operands(p, 3)
    wide = torch.full((1, p.in_channels + 7, *a.shape[2:]), float("nan"), dtype=torch.float32, device="cpu")
    view = wide.to(memory_format=torch.channels_last)[:, 3 : 3 + p.in_channels]
    view.copy_(a)
    offered = [c for c in SOLVER.configs(p) if "interleaved" in c]
    assert offered
    for c in offered:
        got = run_poisoned(SOLVER, p, c, view, b, make_result(p))
        assert float((got.double() - p.reference(a, b)).norm() / p.reference(a, b).norm()) <= BOUND, c


@pytest.mark.parametrize("activation", ["none", "silu"])
@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("residual", [False, True], ids=["", "residual"])
def test_what_follows_is_done_as_it_writes(activation: str, bias: bool, residual: bool) -> None:
    """In the order of results, also for the last group, which has no neighbour."""
    p = replace(layer(2, 5, 6, 5), bias=bias, residual=residual, activation=activation)
    c = config(p, LANES, 2)
    assert SOLVER.does_activate(p, c)
    check_followed(SOLVER, p, c, BOUND)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"interleaved": 3}, "at least 2 groups that divide"),
        ({"interleaved": 32}, "at least 2 groups that divide"),
        ({"interleaved": 4, "vectors": 3}, "would do"),
        ({"rows": 99}, "rows=99"),
        ({"lines": 0}, "lines=0"),
        ({"parts": 99}, "parts=99"),
        ({"panel_parts": 2}, "panel_parts=2"),
    ],
    ids=str,
)
def test_a_config_from_elsewhere_is_checked(change: dict[str, int], reason: str) -> None:
    p = layer(1, 4, 4, 4)
    refused(p, Config(**{**config(p, LANES, 2), **change}), reason)


def test_limits_are_stated() -> None:
    alone = layer(1, 4, 4, 1)
    refused(alone, config(alone, LANES, 2), "fewer than twice the 1 groups would do")
    spread = layer(1, 4, 4, 4, Axis(9, 3), Axis(9, 3, 1, 2))
    refused(spread, config(spread, LANES, 2), "without dilation along the width would do")
    deep = layer(1, 4, 4, 4, Axis(3, 1), Axis(3, 1), Axis(3, 1))
    refused(deep, config(deep, LANES, 2), "1-D or 2-D")
    many = layer(1, 300, 4, 4)
    refused(many, config(many, LANES, 2), "input channels side by side would do")


def refused(p: ConvProblem, c: Config, reason: str) -> None:
    a, b = make_operands(p)
    with pytest.raises(SolverUnavailable, match="is no config of") as raised:
        SOLVER.bind(p, c, a, b, make_result(p))
    assert reason in str(raised.value)
