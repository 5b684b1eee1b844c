"""Depthwise and pointwise layers in one kernel: in Triton's interpreter against float64, and what is offered."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.interpreter import interpreted
from torch import Tensor

from tilewise.plan import Config
from tilewise.problems.activations import CONV_ACTIVATIONS, activated
from tilewise.problems.conv.axis import Axis
from tilewise.problems.operands import make_operands, make_residual, make_result
from tilewise.problems.separable.problem import SeparableProblem
from tilewise.problems.separable.reference import reference_and_scale
from tilewise.problems.separable.stages import parted
from tilewise.solvers.base import SolverUnavailable
from tilewise.solvers.separable.separable_tiles import SeparableTiles

SOLVER = SeparableTiles()
LIMIT = 8e-4
"""Of fp16, in which also what lies between the layers is rounded. The interpreter knows no bf16."""
PARAMETERS = {"leaky_relu": ":0.1", "clamp": ":-0.25:0.5"}
EVERY = [name + PARAMETERS.get(name, "") for name in CONV_ACTIVATIONS]
SQUARE = (Axis(6, 3, 1, 1, 1, 1),) * 2
LAYER = SeparableProblem(2, 24, 24, 20, SQUARE, expands=False, inner=("relu6",), dtype="fp16")
SMALL = Config(lanes=(1, 4, 2), edge=4, outputs=32, depth=32, warps=4)
FEW = Config(lanes=(2, 8, 1), edge=1, outputs=16, depth=16, warps=4)


def operands(p: SeparableProblem, seed: int = 1) -> tuple[Tensor, Tensor]:
    """An image and filters that keep its size from stage to stage."""
    x, w = make_operands(p, seed)
    for stage in parted(p, w):
        stage.weight.mul_(stage.weight[0].numel() ** -0.5)
    return x, w


def run(p: SeparableProblem, c: Config, x: Tensor, w: Tensor, residual: Tensor | None) -> Tensor:
    """One run, with filters in memory that was full of NaN and into a result full of NaN."""
    kept = torch.full((SOLVER.constant(p, c) // 4,), torch.nan, dtype=torch.float32, device="cpu").view(torch.uint8)
    out = make_result(p).fill_(torch.nan)
    SOLVER.prepare(p, c, w)(w, kept, None)
    bound = SOLVER.bind(p, c, x, w, out)
    assert bound(x, kept, out, None, *(() if residual is None else (residual,))) is out
    return out


def check(p: SeparableProblem, c: Config, seed: int = 1) -> None:
    x, w = operands(p, seed)
    residual = make_residual(p, seed)
    want, terms = reference_and_scale(p, x, w)
    want = activated(want if residual is None else want + residual.double(), p.activation)
    got = run(p, c, x, w, residual)
    assert torch.isfinite(got).all(), c
    # Terms that cancel each other out leave their rounding, which counts in a result of few numbers.
    assert float((got.double() - want).norm()) <= LIMIT * max(float(want.norm()), 0.5 * float(terms.norm())), c


@st.composite
def axes(draw: st.DrawFn) -> Axis:
    """An axis of a few windows, with padding or cropping of each side."""
    kernel = draw(st.sampled_from((1, 2, 3, 3, 5, 7)))
    stride, dilation = draw(st.integers(1, 3)), draw(st.integers(1, 2))
    before, after = draw(st.integers(-2, kernel)), draw(st.integers(-2, kernel))
    least = max(1, (kernel - 1) * dilation + 1 - before - after, 1 - min(0, before) - min(0, after))
    return Axis(draw(st.integers(least, least + 6)), kernel, stride, dilation, before, after)


@st.composite
def problems(draw: st.DrawFn) -> SeparableProblem:
    """A small block of odd sizes."""
    channels, outputs = draw(st.sampled_from((1, 3, 16, 17, 40))), draw(st.sampled_from((1, 7, 16, 33)))
    return SeparableProblem(
        draw(st.integers(1, 3)), channels, channels, outputs, (draw(axes()), draw(axes())), expands=False,
        inner=(draw(st.sampled_from(EVERY)),), activation=draw(st.sampled_from(EVERY)), residual=draw(st.booleans()),
        dtype="fp16",
    )  # fmt: skip


@st.composite
def configs(draw: st.DrawFn) -> Config:
    """Any config of few pixels."""
    edge = draw(st.sampled_from((1, 2, 4, 8)))
    images, rows = draw(st.sampled_from((1, 2))), draw(st.sampled_from((1, 2, 4)))
    columns = max(1, 16 // (edge * images * rows)) * draw(st.sampled_from((1, 2)))
    return Config(
        lanes=(images, rows, columns), edge=edge, outputs=draw(st.sampled_from((16, 32, 48))),
        depth=draw(st.sampled_from((16, 32))), warps=4,
    )  # fmt: skip


@interpreted
@pytest.mark.slow
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(p=problems(), c=configs(), seed=st.integers(1, 9))
def test_any_problem_in_any_tile(p: SeparableProblem, c: Config, seed: int) -> None:
    check(p, c, seed)


@interpreted
@pytest.mark.parametrize(
    ("c", "changes"),
    [
        (SMALL, {}),
        (FEW, {"residual": True, "activation": "relu"}),
        (SMALL, {"axes": (Axis(7, 3, 2, 1, 1, 1), Axis(9, 3, 2, 1, 1, 1))}),
        (SMALL, {"axes": (Axis(7, 5, 2, 1, 2, 2), Axis(5, 5, 1, 1, 2, 2)), "out_channels": 40}),
        (FEW, {"axes": (Axis(4, 7, 1, 1, 3, 3), Axis(5, 3, 1, 2, -1, 3)), "in_channels": 33, "channels": 33}),
        (SMALL, {"in_channels": 1, "channels": 1, "out_channels": 1, "axes": (Axis(1, 1), Axis(1, 1)), "batch": 1}),
    ],
    ids=["plain", "residual", "stride 2", "kernel 5", "kernel 7, dilation", "one of all"],
)
def test_other_layers(c: Config, changes: dict[str, Any]) -> None:
    check(replace(LAYER, **changes), c)


@interpreted
@pytest.mark.parametrize("activation", EVERY)
def test_every_activation(activation: str) -> None:
    one = (Axis(3, 3, 1, 1, 1, 1),) * 2
    check(replace(LAYER, batch=1, axes=one, inner=(activation,), activation=activation, residual=True), FEW)


@interpreted
def test_nan_stays_where_it_is_read() -> None:
    """NaN of one pixel reaches the results whose windows meet it, and no others."""
    x, w = operands(LAYER)
    x[1, 23, 2, 3] = torch.nan
    got = run(LAYER, SMALL, x, w, None)
    met = torch.zeros_like(got, dtype=torch.bool)
    met[1, :, 1:4, 2:5] = True
    assert torch.equal(got.isnan(), met)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"expands": True, "inner": ("none",) * 2}, "no pointwise convolution in front"),
        ({"expands": True, "projects": False, "out_channels": 24}, "a pointwise convolution behind"),
        ({"axes": (Axis(20, 16), Axis(20, 3))}, "at most 15 taps along h, not 16"),
        ({"batch": 2**27}, "pixels"),
        ({"in_channels": 2**13, "channels": 2**13, "out_channels": 2**13}, "elements of filters"),
        ({"dtype": "fp32"}, "fp32"),
        ({"device": "cpu"}, "runs on cuda, not cpu"),
    ],
)
def test_what_it_is_not_for(changes: dict[str, Any], reason: str) -> None:
    p = replace(LAYER, **{"device": "cuda:some GPU", **changes})
    assert any(reason in said for said in SOLVER.why_not(p)), SOLVER.why_not(p)


@pytest.mark.parametrize(
    "change",
    [
        {"lanes": (1, 3, 4)},
        {"lanes": (1, 4)},
        {"lanes": (1, 1, 1), "edge": 8},
        {"edge": 3},
        {"outputs": 24},
        {"depth": 24},
        {"warps": 3},
        {"stages": 2},
    ],
    ids=str,
)
def test_a_bad_config_is_unavailable(change: dict[str, Any]) -> None:
    x, w, out = (torch.empty(LAYER.shape(role), dtype=torch.float16, device="meta") for role in ("x", "w", "y"))
    with pytest.raises(SolverUnavailable, match="no config"):
        SOLVER.bind(LAYER, Config(**{**SMALL, **change}), x, w, out)


def test_images_that_lie_otherwise_are_refused() -> None:
    x, w, out = (torch.empty(LAYER.shape(role), dtype=torch.float16, device="meta") for role in ("x", "w", "y"))
    with pytest.raises(SolverUnavailable, match="channels side by side"):
        SOLVER.bind(LAYER, SMALL, x, w, out)


def block(channels: int, outputs: int, size: int, kernel: int, stride: int, batch: int = 32) -> SeparableProblem:
    """A block of a network in bf16."""
    axis = Axis(size, kernel, stride, 1, kernel // 2, kernel // 2)
    return SeparableProblem(
        batch, channels, channels, outputs, (axis, axis), expands=False, inner=("relu6",), dtype="bf16",
        device="cuda:any",
    )  # fmt: skip


BLOCKS = {
    "MobileNetV2": block(144, 24, 56, 3, 1),
    "its strides": block(96, 24, 112, 3, 2),
    "EfficientNet": block(240, 40, 28, 5, 1),
    "MobileNetV1": block(512, 512, 14, 3, 1),
    "one image": block(960, 320, 7, 3, 1, batch=1),
    "odd": block(13, 5, 9, 7, 2),
}


@pytest.mark.parametrize("name", BLOCKS)
def test_offers(name: str) -> None:
    p = BLOCKS[name]
    assert not SOLVER.why_not(p)
    found = list(SOLVER.configs(p))
    assert len(found) >= 4
    for c in found:
        assert Config.from_key(c.key) == c
        assert 0 < SOLVER.cost(p, c).efficiency <= 1
        assert SOLVER.constant(p, c) >= p.nbytes("w")


def test_outputs_in_parts_cost_the_depthwise_layer_again() -> None:
    """Of tiles that differ in nothing else."""
    p = BLOCKS["MobileNetV1"]
    whole, half = (Config(lanes=(4, 4, 4), edge=1, outputs=n, depth=32, warps=8) for n in (512, 256))
    assert SOLVER.cost(p, whole).efficiency > SOLVER.cost(p, half).efficiency
