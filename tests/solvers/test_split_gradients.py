"""Gradients of filters by tile registers against float64, over random layers, and what is not finite or far from 1."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.tile_registers import LIMITS, axes, channels, layouts, scratch, with_tile_registers

from tilewise import execute
from tilewise.plan import Config, Plan
from tilewise.problems.conv.axis import Axis
from tilewise.problems.conv.problem import ConvProblem, Pass
from tilewise.problems.operands import make_operands, make_result
from tilewise.solvers.base import SolverUnavailable
from tilewise.solvers.products._split_gradients import division
from tilewise.solvers.products.split_gradients import SplitGradients

pytest.importorskip("numba")
SOLVER = SplitGradients()
LAYER = ConvProblem(Pass.WGRAD, 3, 40, 50, (Axis(9, 3, 1, 1, 1, 1), Axis(7, 3, 1, 1, 1, 1)))
POINTS = replace(LAYER, axes=(Axis(9, 1), Axis(7, 1)))
STRIDED = replace(LAYER, axes=(Axis(9, 3, 2, 1, 1, 1), Axis(8, 3, 3, 1, 1, 1)))
FEW = replace(LAYER, in_channels=3, axes=(Axis(19, 7, 2, 1, 3, 3),) * 2)


def config(p: ConvProblem, parts: int, **changes: int) -> Config:
    """The config that should be fastest with so many parts, with some numbers changed."""
    found = next(c for c in SOLVER.configs(p) if c["parts"] == parts)
    return Config(**{**found, **changes})


def computed(p: ConvProblem, c: Config, x: torch.Tensor, y: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """The result of a config whose scratch is full of NaN, as is what lies around it, which must stay so."""
    with scratch(SOLVER.workspace(p, c)) as space:
        return SOLVER.bind(p, c, x, y, out)(x, y, out, space)


def check(p: ConvProblem, c: Config) -> None:
    """Compare a config with float64."""
    x, y = make_operands(p)
    out = make_result(p)
    want = p.reference(x, y)
    if p.accumulate:
        out.copy_(torch.arange(out.numel(), dtype=torch.float32, device="cpu").view(out.shape) % 7 - 3)
        want = want + out.double()
    else:
        out.fill_(torch.nan)
    got = computed(p, c, x, y, out)
    parts = c["parts"]
    assert isinstance(parts, int)
    # Of few results all may be small beside what they are the sums of.
    sizes = p.reference(x.abs(), y.abs()).norm() + want.norm()
    assert float((got.double() - want).norm()) <= LIMITS[parts] * float(sizes), (p.key, c)


@st.composite
def layers(draw: st.DrawFn) -> ConvProblem:
    """Layers of any stride, dilation and padding, which may crop, with any number of channels."""
    return ConvProblem(
        Pass.WGRAD, draw(st.integers(1, 4)), draw(channels), draw(channels), draw(axes()), layouts=draw(layouts),
        accumulate=draw(st.booleans()),
    )  # fmt: skip


@with_tile_registers
@settings(max_examples=60, deadline=None)
@given(layers(), st.data())
def test_any_layer(p: ConvProblem, data: st.DataObject) -> None:
    for c in SOLVER.configs(p):
        check(p, c)
    first = next(iter(SOLVER.configs(p)))
    changes = {"line_taps": data.draw(st.sampled_from((1, p.axes[-1].kernel))), "images": 1, "shares": 1}
    grid = division(p, Config(**{**first, **changes, "lines": 1, "columns": 1, "channel_parts": 1})).grid
    whole = data.draw(st.booleans())
    changes |= {
        "lines": grid.height.count if whole else data.draw(st.integers(1, grid.height.count)),
        "columns": grid.width.count if whole else data.draw(st.integers(1, grid.width.count)),
        "images": data.draw(st.integers(1, grid.images)) if whole else 1, "threads": data.draw(st.integers(1, 3)),
        "channel_parts": 1,
    }  # fmt: skip
    divided = division(p, Config(**{**first, **changes}))
    changes |= {
        "channel_parts": data.draw(st.integers(1, divided.panels)),
        "shares": data.draw(st.integers(1, min(4, divided.strips))),
    }  # fmt: skip
    check(p, Config(**{**first, **changes}))


@with_tile_registers
@pytest.mark.parametrize("parts", [2, 3])
@pytest.mark.parametrize(
    "p", [LAYER, POINTS, STRIDED, FEW], ids=["3x3", "1x1", "strided", "few channels"]
)  # fmt: skip
def test_nan_stays_in_its_channel(p: ConvProblem, parts: int) -> None:
    x, y = make_operands(p)
    clean = computed(p, config(p, parts), x, y, make_result(p))
    for pattern in (0x7FC00000, 0x7F800001, 0x7FFFFFFF, -1):  # what a NaN may hold
        bits = y.view(torch.int32)
        kept = int(bits[1, 39, 1, 1])
        bits[1, 39, 1, 1] = pattern
        got = computed(p, config(p, parts), x, y, make_result(p))
        assert bool(got[39].isnan().any()), hex(pattern)
        got[39] = clean[39]
        assert torch.equal(got, clean)
        bits[1, 39, 1, 1] = kept
    x.view(torch.int32)[1, 2, 3, 3] = -1
    got = computed(p, config(p, parts), x, y, make_result(p))
    assert bool(got[:, 2].isnan().any(-1).any(-1).all())
    got[:, 2] = clean[:, 2]
    assert torch.equal(got, clean)


@with_tile_registers
@pytest.mark.parametrize("parts", [2, 3])
def test_what_is_infinite_is_not_finite_in_the_result(parts: int) -> None:
    x, y = make_operands(POINTS)
    x[0, 5, 2, 2] = torch.inf
    got = computed(POINTS, config(POINTS, parts), x, y, make_result(POINTS))
    assert not bool(got[:, 5].isfinite().any())
    assert int((~got.isfinite()).sum()) == POINTS.out_channels


@with_tile_registers
@pytest.mark.parametrize("parts", [2, 3])
@pytest.mark.parametrize("scale", [2.0**-100, 1e-20, 1e20, 2.0**100])
def test_numbers_far_from_one(scale: float, parts: int) -> None:
    x, y = make_operands(LAYER)
    x *= scale
    want = LAYER.reference(x, y)
    got = computed(LAYER, config(LAYER, parts), x, y, make_result(LAYER))
    assert float((got.double() - want).norm()) <= LIMITS[parts] * float(want.norm())


@with_tile_registers
def test_the_error_does_not_grow_with_the_number_of_pixels() -> None:
    """Where all numbers are positive, sums grow with every pixel, and each sum is rounded."""
    p = ConvProblem(Pass.WGRAD, 4, 3, 5, (Axis(40000, 3, 1, 1, 1, 1),))
    x, y = (each.abs() for each in make_operands(p))
    got = computed(p, config(p, 3), x, y, make_result(p))
    want = p.reference(x, y)
    assert float((got.double() - want).norm()) <= 2e-6 * float(want.norm())


@with_tile_registers
@pytest.mark.parametrize("shares", [1, 3])
def test_the_same_bits_at_every_call(shares: int) -> None:
    x, y = make_operands(LAYER)
    c = config(LAYER, 2, images=1, lines=4, shares=shares, threads=2)
    first = computed(LAYER, c, x, y, make_result(LAYER))
    for _ in range(5):
        assert torch.equal(computed(LAYER, c, x, y, make_result(LAYER)), first)


@with_tile_registers
def test_what_is_there_is_added_by_a_plan() -> None:
    p = replace(LAYER, accumulate=True)
    x, y = make_operands(p)
    out = torch.ones(p.shape("w"), dtype=torch.float32, device="cpu")
    bound = execute.bind(Plan(p.key, SOLVER.name, SOLVER.version, config(p, 3)), p, x, y, out)
    for times in (1, 2):
        bound(x, y, out=out)
        want = times * p.reference(x, y) + 1
        assert float((out.double() - want).norm()) <= LIMITS[3] * float(want.norm())


REFUSED: dict[str, dict[str, object]] = {
    "one group": {"groups": 2},
    "contiguous or channels_last": {"layouts": ("view", "contiguous", "contiguous")},
    "does wgrad, not fprop": {"pass_": Pass.FPROP},
}


@pytest.mark.parametrize("reason", REFUSED)
def test_what_it_is_not_for(reason: str) -> None:
    p = replace(LAYER, **REFUSED[reason])  # type: ignore[arg-type]
    found = SOLVER.undeclared(p) + SOLVER.unsupported(p)
    assert any(reason in said for said in found), found


def wrong_configs() -> Iterator[Config]:
    base = {
        "parts": 2, "line_taps": 1, "images": 1, "lines": 9, "columns": 7, "channel_parts": 1, "shares": 1,
        "threads": 1,
    }  # fmt: skip
    most = {
        "parts": 3, "line_taps": 3, "images": 3, "lines": 9, "columns": 7, "channel_parts": 2, "shares": 3,
        "threads": -1,
    }  # fmt: skip
    for name, value in ((name, value + 1) for name, value in most.items()):
        yield Config(**{**base, name: value})
    yield Config(**{**base, "images": 2, "lines": 4})
    yield Config(**{name: value for name, value in base.items() if name != "lines"})


@pytest.mark.parametrize("c", list(wrong_configs()), ids=str)
def test_a_bad_config_is_unavailable(c: Config) -> None:
    x, y, out = (torch.empty(LAYER.shape(role), dtype=torch.float32, device="meta") for role in "xyw")
    with pytest.raises(SolverUnavailable, match="no config"):
        SOLVER.bind(LAYER, c, x, y, out)


LONG = ConvProblem(Pass.WGRAD, 2, 64, 64, (Axis(50000, 9, 1, 1, 4, 4),))


@pytest.mark.parametrize(
    "p", [LAYER, POINTS, STRIDED, FEW, LONG, replace(POINTS, in_channels=2048, out_channels=512)], ids=str
)  # fmt: skip
def test_offers(p: ConvProblem) -> None:
    found = list(SOLVER.configs(p))
    assert {c["parts"] for c in found} == {2, 3}
    for c in found:
        assert Config.from_key(c.key) == c
        divided = division(p, c)
        places = divided.places()
        assert places["size"] >= places["sums"] + divided.sums_bytes
        assert divided.flops >= p.flops * 0.75  # products with padding are left out
        assert 0 < SOLVER.cost(p, c).flops < divided.flops
        assert SOLVER.exactness(c) == c["parts"]
        assert math.isfinite(divided.time(2))


def test_few_channels_count_once_for_each_tap_of_a_line() -> None:
    assert {c["line_taps"] for c in SOLVER.configs(FEW)} == {7}
    assert {c["line_taps"] for c in SOLVER.configs(LAYER)} == {1}
