"""Depthwise and pointwise layers in one kernel on a GPU: against float64, and within a network."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tilewise
from tilewise import Planner, execute
from tilewise.machine.device import device_name
from tilewise.plan import Config, Measurement
from tilewise.planner.search.leaves import leaf_plan
from tilewise.problems.activations import CONV_ACTIVATIONS, activated
from tilewise.problems.conv.axis import Axis
from tilewise.problems.operands import make_operands, make_residual, make_result
from tilewise.problems.separable.problem import SeparableProblem
from tilewise.problems.separable.stages import parted
from tilewise.solvers import get

pytestmark = pytest.mark.gpu
LIMITS = {"fp16": 8e-4, "bf16": 6e-3}
PARAMETERS = {"leaky_relu": ":0.1", "clamp": ":-0.25:0.5"}


def block(
    channels: int, outputs: int, size: int, kernel: int, stride: int, dtype: str, **fields: Any
) -> SeparableProblem:
    """A block of a network, with few images."""
    axis = Axis(size, kernel, stride, 1, kernel // 2, kernel // 2)
    p = SeparableProblem(
        3, channels, channels, outputs, (axis, axis), expands=False, inner=("relu6",), dtype=dtype,
        device=device_name("cuda"),
    )  # fmt: skip
    return replace(p, **fields)


def check(p: SeparableProblem, c: Config) -> None:
    """Compare a config with float64, over a result full of NaN, in two runs that are to be the same."""
    x, w = make_operands(p, 1)
    for stage in parted(p, w):
        stage.weight.mul_(stage.weight[0].numel() ** -0.5)
    residual = make_residual(p, 1)
    want = p.reference(x, w)
    want = activated(want if residual is None else want + residual.double(), p.activation)
    solver = get("separable_tiles")
    kept = torch.full((solver.constant(p, c) // 4,), torch.nan, dtype=torch.float32, device="cuda").view(torch.uint8)
    out = make_result(p)
    solver.prepare(p, c, w)(w, kept, None)
    bound = solver.bind(p, c, x, w, out)
    found = []
    for _ in range(2):
        out.fill_(torch.nan)
        bound(x, kept, out, None, *(() if residual is None else (residual,)))
        found.append(out.clone())
    assert torch.equal(*found), c
    error = float((out.double() - want).norm() / want.norm())
    assert error < LIMITS[p.dtype], (p.key, c, error)


@pytest.mark.parametrize("dtype", LIMITS)
@pytest.mark.parametrize(
    ("sizes", "fields"),
    [
        ((144, 24, 56, 3, 1), {}),
        ((96, 24, 112, 3, 2), {"activation": "relu"}),
        ((240, 40, 28, 5, 1), {"residual": True, "activation": "hardswish"}),
        ((480, 112, 15, 5, 2), {"inner": ("silu",)}),
        ((512, 512, 14, 3, 1), {"residual": True}),
        ((960, 320, 7, 3, 1), {"batch": 1}),
        ((40, 72, 17, 7, 1), {"inner": ("gelu",), "residual": True, "activation": "leaky_relu:0.1"}),
        ((13, 5, 9, 3, 2), {"residual": True}),
    ],
    ids=lambda value: "x".join(map(str, value)) if isinstance(value, tuple) else "",
)
def test_what_is_offered_first(sizes: tuple[int, ...], fields: dict[str, Any], dtype: str) -> None:
    p = block(*sizes, dtype=dtype, **fields)
    solver = get("separable_tiles")
    for c in list(solver.configs(p))[: solver.most_compiled]:
        check(p, c)


@pytest.mark.parametrize("name", CONV_ACTIVATIONS)
def test_every_activation(name: str) -> None:
    function = name + PARAMETERS.get(name, "")
    p = block(32, 16, 9, 3, 1, "bf16", inner=(function,), activation=function, residual=True)
    check(p, Config(lanes=(1, 4, 4), edge=4, outputs=16, depth=32, warps=4))


def test_lopsided_padding_and_dilation() -> None:
    axes = (Axis(21, 5, 1, 2, 7, -2), Axis(19, 3, 3, 1, -1, 4))
    for dtype in LIMITS:
        check(block(48, 40, 9, 3, 1, dtype, axes=axes), Config(lanes=(2, 4, 4), edge=2, outputs=48, depth=16, warps=4))


def test_changed_filters_are_seen() -> None:
    p = block(64, 32, 14, 3, 1, "bf16")
    solver = get("separable_tiles")
    config = next(iter(solver.configs(p)))
    x, w = make_operands(p, 1)
    for stage in parted(p, w):
        stage.weight.mul_(stage.weight[0].numel() ** -0.5)
    bound = execute.bind(leaf_plan(p, Measurement(solver.name, solver.version, config, 0.1, 0)), p, x, w)
    for _ in range(2):
        got, want = bound(x, w), p.reference(x, w)
        assert float((got.double() - want).norm() / want.norm()) < LIMITS["bf16"]
        w.mul_(0.5)


class Block(nn.Module):
    """A block of MobileNetV2 with norms as if it had been trained."""

    def __init__(self, channels: int = 24, wide: int = 144) -> None:
        super().__init__()
        self.expand, self.first = nn.Conv2d(channels, wide, 1, bias=False), nn.BatchNorm2d(wide)
        self.filter, self.second = nn.Conv2d(wide, wide, 3, padding=1, groups=wide, bias=False), nn.BatchNorm2d(wide)
        self.project, self.third = nn.Conv2d(wide, channels, 1, bias=False), nn.BatchNorm2d(channels)

    def forward(self, x: Tensor) -> Tensor:
        y = nn.functional.relu6(self.first(self.expand(x)))
        return x + self.third(self.project(nn.functional.relu6(self.second(self.filter(y)))))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_network_with_a_block(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """The block is planned, whoever wins, and the network is as near to float64 as torch's, by steps or as a graph."""
    monkeypatch.setattr("tilewise.nn.regions.choose.LEAST_SPEEDUP", 0.0)
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Conv2d(3, 24, 3, padding=1), nn.ReLU(), Block()).eval()
    for buffer in plain.buffers():
        if buffer.is_floating_point():
            buffer.uniform_(0.5, 2.0)
    plain = plain.to("cuda", dtype, memory_format=torch.channels_last)
    x = torch.randn(8, 3, 56, 56, device="cuda").to(dtype, memory_format=torch.channels_last)
    planner, asked = Planner(), []
    original = planner.alternatives

    def spied(problem: Any, *rest: Any) -> Any:
        asked.append(problem)
        return original(problem, *rest)

    monkeypatch.setattr(planner, "alternatives", spied)
    model = tilewise.optimize(copy.deepcopy(plain), x, planner=planner, training=False, frozen=True)
    (region,) = tilewise.nn.report(model).regions
    assert region.kept, region.reason
    blocks = [problem for problem in asked if isinstance(problem, SeparableProblem)]
    assert {problem.channels for problem in blocks} == {144}
    tried = {plan.solver for problem in blocks for plan in original(problem)}
    assert "separable_tiles" in tried, tried
    with torch.no_grad():
        want = copy.deepcopy(plain).double()(x.double())
        got, own = model(x).double(), plain(x).double()
    assert float((got - want).norm()) <= 2 * float((own - want).norm())
