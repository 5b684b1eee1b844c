"""Convolutions by tile registers against float64, over random layers, and what is not finite or far from 1."""

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
from tilewise.problems.activations import CONV_ACTIVATIONS, activated
from tilewise.problems.conv.axis import Axis
from tilewise.problems.conv.problem import ConvProblem, Pass
from tilewise.problems.operands import make_bias, make_operands, make_residual, make_result
from tilewise.solvers.base import SolverUnavailable
from tilewise.solvers.products._split import RATE, divisions
from tilewise.solvers.products.split_products import SplitProducts

pytest.importorskip("numba")
SOLVER = SplitProducts()
LAST = ("channels_last",) * 3
LAYER = ConvProblem(
    Pass.FPROP, 2, 40, 50, (Axis(9, 3, 1, 1, 1, 1), Axis(7, 3, 1, 1, 1, 1)), layouts=LAST, constant_weight=True,
    checked_weight=False,
)  # fmt: skip
POINTS = replace(LAYER, axes=(Axis(9, 1), Axis(7, 1)))
PARAMETERS = {"leaky_relu": ":0.1", "clamp": ":-0.25:0.5"}
EVERY = [name + PARAMETERS.get(name, "") for name in CONV_ACTIVATIONS]


def config(p: ConvProblem, parts: int, **changes: int) -> Config:
    """The config that should be fastest with so many parts, with some numbers changed."""
    found = next(c for c in SOLVER.configs(p) if c["parts"] == parts)
    return Config(**{**found, **changes})


def computed(p: ConvProblem, c: Config, a: torch.Tensor, b: torch.Tensor, *added: torch.Tensor) -> torch.Tensor:
    """The result of a config in memory full of NaN, as is its scratch."""
    out = make_result(p).fill_(torch.nan)
    run = SOLVER.bind(p, c, a, b, out)
    with scratch(SOLVER.workspace(p, c)) as space:
        if p.constant_weight:
            kept = torch.full((SOLVER.constant(p, c),), 0xFF, dtype=torch.uint8, device="cpu")
            SOLVER.prepare(p, c, b)(b, kept, space)
            b = kept
        return run(a, b, out, space, *added)


def check(p: ConvProblem, c: Config) -> None:
    """Compare a config with float64."""
    a, b = make_operands(p)
    bias, residual = make_bias(p), make_residual(p)
    want = p.reference(a, b)
    if bias is not None:
        want = want + bias.double().view(-1, *[1] * p.dims)
    sums = want if residual is None else want + residual
    want = activated(sums, p.activation)
    got = computed(p, c, a, b, *[tensor for tensor in (bias, residual) if tensor is not None])
    parts = c["parts"]
    assert isinstance(parts, int)
    # Of few results all may be small beside what they are the sums of.
    sizes = p.reference(a.abs(), b.abs()).norm() + sums.norm()
    assert float((got.double() - want).norm()) <= LIMITS[parts] * float(sizes), (p.key, c)


@st.composite
def layers(draw: st.DrawFn) -> ConvProblem:
    """Layers of any stride, dilation and padding, which may crop, with any number of channels."""
    p = ConvProblem(
        draw(st.sampled_from((Pass.FPROP, Pass.DGRAD))), draw(st.integers(1, 3)), draw(channels), draw(channels),
        draw(axes()), layouts=draw(layouts), constant_weight=draw(st.booleans()), bias=draw(st.booleans()),
    )  # fmt: skip
    if p.pass_ is Pass.DGRAD:
        return p
    return replace(p, residual=draw(st.booleans()), activation=draw(st.sampled_from(("none", "relu"))))


@with_tile_registers
@settings(max_examples=40, deadline=None)
@given(layers(), st.data())
def test_any_layer(p: ConvProblem, data: st.DataObject) -> None:
    for c in SOLVER.configs(p):
        check(p, c)
    first = next(iter(SOLVER.configs(p)))
    divided = divisions(p, first)[0]
    height, width = divided.axes
    other = {
        "rows": data.draw(st.integers(1, 16)), "images": data.draw(st.integers(1, divided.all_images)),
        "lines": data.draw(st.integers(1, height.out)),
        "columns": data.draw(st.integers(1, width.out)),
        "panel_parts": data.draw(st.integers(1, divided.panels)), "threads": data.draw(st.integers(1, 3)),
    }  # fmt: skip
    check(p, Config(**{**first, **other}))


@with_tile_registers
@pytest.mark.parametrize("parts", [2, 3])
@pytest.mark.parametrize("activation", EVERY)
def test_every_activation(activation: str, parts: int) -> None:
    p = replace(POINTS, bias=True, residual=True, activation=activation)
    check(p, config(p, parts))


@with_tile_registers
@pytest.mark.parametrize("parts", [2, 3])
@pytest.mark.parametrize("p", [LAYER, POINTS], ids=["3x3", "1x1"])
def test_nan_stays_where_it_is_read(p: ConvProblem, parts: int) -> None:
    a, b = make_operands(p)
    clean = computed(p, config(p, parts), a, b)
    for pattern in (0x7FC00000, 0x7F800001, 0x7FFFFFFF, -1):  # what a NaN may hold
        a.view(torch.int32)[1, 39, 4, 3] = pattern
        got = computed(p, config(p, parts), a, b)
        around = slice(3, 6), slice(2, 5)
        if p is POINTS:
            around = slice(4, 5), slice(3, 4)
        assert bool(got[1, :, *around].isnan().all()), hex(pattern)
        got[1, :, *around] = clean[1, :, *around]
        assert torch.equal(got, clean)


@with_tile_registers
@pytest.mark.parametrize("parts", [2, 3])
def test_what_is_infinite_is_not_finite_in_the_result(parts: int) -> None:
    a, b = make_operands(POINTS)
    a[0, 5, 2, 2] = torch.inf
    got = computed(POINTS, config(POINTS, parts), a, b)
    assert not bool(got[0, :, 2, 2].isfinite().any())
    assert int((~got.isfinite()).sum()) == POINTS.out_channels


@with_tile_registers
@pytest.mark.parametrize("parts", [2, 3])
@pytest.mark.parametrize("scale", [2.0**-100, 1e-20, 1e20, 2.0**100])
def test_numbers_far_from_one(scale: float, parts: int) -> None:
    a, b = make_operands(LAYER)
    a *= scale
    want = LAYER.reference(a, b)
    got = computed(LAYER, config(LAYER, parts), a, b)
    assert float((got.double() - want).norm()) <= LIMITS[parts] * float(want.norm())


@with_tile_registers
@pytest.mark.parametrize("parts", [2, 3])
def test_the_parts_of_a_filter_are_its_numbers(parts: int) -> None:
    p = replace(POINTS, in_channels=32, out_channels=32)
    numbers = torch.randn(1024, generator=torch.Generator("cpu").manual_seed(0), dtype=torch.float32, device="cpu")
    weight = (numbers * 2.0 ** torch.arange(-60, 60).repeat(9)[:1024]).view(32, 32, 1, 1)
    c = config(p, parts)
    kept = torch.full((SOLVER.constant(p, c),), 0xFF, dtype=torch.uint8, device="cpu")
    space = torch.empty(SOLVER.workspace(p, c), dtype=torch.uint8, device="cpu")
    SOLVER.prepare(p, c, weight)(weight, kept, space)
    tiles = kept.view(torch.bfloat16).view(parts, 2, 16, 16, 2).double().sum(0)  # vector, pair, output, channel of pair
    total = tiles.permute(0, 2, 1, 3).reshape(32, 32)
    errors = ((total - weight.view(32, 32)) / weight.view(32, 32)).abs()
    assert float(errors.max()) <= (2.0**-17 if parts == 2 else 0.0)


@with_tile_registers
def test_a_changed_filter_is_split_again() -> None:
    p = replace(LAYER, bias=True, activation="relu")
    a, b = make_operands(p)
    bias = make_bias(p)
    assert bias is not None
    plan = Plan(p.key, SOLVER.name, SOLVER.version, config(p, 3))
    bound = execute.bind(plan, p, a, b)
    for _ in range(2):
        want = activated(p.reference(a, b) + bias.double().view(-1, 1, 1), "relu")
        got = bound(a, b, bias)
        assert float((got.double() - want).norm()) <= LIMITS[3] * float(want.norm())
        b.mul_(-0.5)


REFUSED: dict[str, dict[str, object]] = {
    "one group": {"groups": 2},
    "contiguous or channels_last": {"layouts": ("view", "contiguous", "contiguous")},
    "does dgrad/fprop": {"pass_": Pass.WGRAD, "constant_weight": False},
}


@pytest.mark.parametrize("reason", REFUSED)
def test_what_it_is_not_for(reason: str) -> None:
    p = replace(LAYER, **REFUSED[reason])  # type: ignore[arg-type]
    found = SOLVER.undeclared(p) + SOLVER.unsupported(p)
    assert any(reason in said for said in found), found


def wrong_configs() -> Iterator[Config]:
    base = {"parts": 2, "rows": 7, "images": 1, "lines": 3, "columns": 7, "panel_parts": 1, "threads": 1}
    most = {"parts": 3, "rows": 16, "images": 2, "lines": 9, "columns": 7, "panel_parts": 2, "threads": -1}
    for name, value in ((name, value + 1) for name, value in most.items()):
        yield Config(**{**base, name: value})
    yield Config(**{name: value for name, value in base.items() if name != "rows"})


@pytest.mark.parametrize("c", list(wrong_configs()), ids=str)
def test_a_bad_config_is_unavailable(c: Config) -> None:
    a, b, out = (torch.empty(LAYER.shape(role), dtype=torch.float32, device="meta") for role in ("x", "w", "y"))
    with pytest.raises(SolverUnavailable, match="no config"):
        SOLVER.bind(LAYER, c, a, b, out)


@pytest.mark.parametrize("p", [LAYER, POINTS, replace(POINTS, in_channels=2048, out_channels=512)], ids=str)
def test_offers(p: ConvProblem) -> None:
    found = list(SOLVER.configs(p))
    assert {c["parts"] for c in found} == {2, 3}
    for c in found:
        assert Config.from_key(c.key) == c
        (divided,) = divisions(p, c)
        places = divided.places()
        assert places["size"] >= places["strip"] + divided.parts * divided.apart
        assert SOLVER.cost(p, c).flops >= p.flops * 0.99 / RATE[divided.parts]
        assert math.isfinite(divided.time(2))
