"""Factors, summands and residuals behind views of a product, as in blocks of ConvNeXt: folded, and still right."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn

from tilewise.nn.regions import fused
from tilewise.nn.regions.rewrite import rewrite
from tilewise.nn.regions.trace import trace

aten = torch.ops.aten


class Block(nn.Module):
    """A depthwise convolution and two linear layers over channels, whose result is scaled and added to the input."""

    def __init__(self, channels: int, shape: tuple[int, ...], *, first: bool = True, twice: bool = False) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, padding=1, groups=channels)
        self.norm = nn.LayerNorm(channels)
        self.wide, self.narrow = nn.Linear(channels, 2 * channels), nn.Linear(2 * channels, channels)
        self.scale = nn.Parameter(torch.randn(shape))
        self.first, self.twice = first, twice

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(self.conv(x).permute(0, 2, 3, 1))
        y = self.narrow(nn.functional.gelu(self.wide(y))).permute(0, 3, 1, 2)
        z = self.scale * y
        if self.twice:
            return x + z * y
        return z + x if self.first else x + z


def rewritten(model: nn.Module, x: torch.Tensor) -> Counter[Any]:
    """What is called after a rewrite, which gives what was traced (in float64, as folded weights are)."""
    model, x = model.double().eval(), x.double()
    traced = trace(model, (x,), {})
    with torch.no_grad():
        (want,) = traced.module(x)
        rewrite(traced.graph)
        traced.graph.lint()
        called = Counter(node.target for node in traced.graph.nodes if node.op == "call_function")
        for node in traced.graph.nodes:
            if node.target is aten.view.default:  # a region brings tensors into a format that has the view
                node.target = aten.reshape.default
        traced.module.recompile()
        (got,) = traced.module(x)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    return called


@pytest.fixture(params=[True, False])
def adds(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether linear layers add residuals behind views."""
    monkeypatch.setattr("tilewise.nn.regions.rewrite.LINEAR_RESIDUALS", {"cpu"} if request.param else set())
    return bool(request.param)


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("shape", [(6, 1, 1), (1, 6, 1, 1), (1, 1, 1)])
def test_a_block_has_no_pass_of_its_own(shape: tuple[int, ...], first: bool, last: bool, adds: bool) -> None:
    x = torch.randn(2, 6, 5, 4)
    x = x.contiguous(memory_format=torch.channels_last) if last else x
    calls = rewritten(nn.Sequential(Block(6, shape, first=first), Block(6, shape)), x)
    one_number = shape == (1, 1, 1)
    assert calls[aten.mul.Tensor] == (2 if one_number else 0)
    assert calls[aten.add.Tensor] == (0 if adds and not one_number else 2)
    assert calls[fused.linear] == 4


def test_a_factor_along_pixels_stays() -> None:
    calls = rewritten(Block(4, (4, 4)), torch.randn(2, 4, 4, 4))  # as many pixels as channels
    assert calls[aten.mul.Tensor] == 1


def test_a_view_that_others_read_is_left() -> None:
    calls = rewritten(Block(6, (6, 1, 1), twice=True), torch.randn(2, 6, 5, 4))
    assert calls[aten.mul.Tensor] == 2


def test_a_sum_through_a_flattened_image() -> None:
    class Flat(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 4, 1)

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return self.conv(x).flatten(2).transpose(1, 2) + y

    model, x, y = Flat().double().eval(), torch.randn(2, 3, 5, 4).double(), torch.randn(2, 20, 4).double()
    traced = trace(model, (x, y), {})
    with torch.no_grad():
        rewrite(traced.graph)
        traced.module.recompile()
        (got,) = traced.module(x, y)
        torch.testing.assert_close(got, model(x, y))
    assert aten.add.Tensor not in {node.target for node in traced.graph.nodes}


def test_a_sum_whose_other_side_has_no_such_view_stays() -> None:
    class Turned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 6)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            rows = self.linear(x)  # (images, places, channels), of a matrix of all places
            return rows.permute(1, 0, 2) + torch.cos(rows.sum() + torch.zeros(5, 3, 6, dtype=x.dtype, device=x.device))

    calls = rewritten(Turned(), torch.randn(3, 5, 4))
    assert calls[aten.add.Tensor] == 2
