"""Networks of torchvision and timm as they are, planned while enabled, on a GPU."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import tilewise
from tilewise.machine.torch_state import fp32_precision

pytestmark = pytest.mark.gpu


def by_torchvision(name: str) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        module: Any = pytest.importorskip("torchvision")
        built: nn.Module = getattr(module.models, name)(weights=None)
        return built

    return build


def by_timm(name: str) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        built: nn.Module = pytest.importorskip("timm").create_model(name, pretrained=False)
        return built

    return build


@pytest.mark.parametrize(
    "build", [by_torchvision("resnet18"), by_torchvision("resnet50"), by_timm("resnet18"), by_timm("convnext_atto")]
)
@fp32_precision("cuda", "conv", "ieee")
def test_gradients_as_torch(build: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    plain = build().cuda().eval()  # without dropout and random depth; gradients all the same
    model = copy.deepcopy(plain)
    exact = copy.deepcopy(plain).double()
    images = torch.randn(4, 3, 96, 96, device="cuda")
    with tilewise.enabled(wait=True, rigor="estimate") as session:
        for _ in range(3):
            model.zero_grad()
            model(images).square().mean().backward()
    plain(images).square().mean().backward()
    exact(images.double()).square().mean().backward()
    assert session.report().layers
    for mine, its, true in zip(model.parameters(), plain.parameters(), exact.parameters(), strict=True):
        assert mine.grad is not None
        assert its.grad is not None
        assert true.grad is not None
        scale = float(true.grad.norm()) + 1e-12
        error = float((mine.grad.double() - true.grad).norm()) / scale
        assert error <= max(1e-3, 10 * float((its.grad.double() - true.grad).norm()) / scale)


def test_a_captured_step_has_what_was_planned_before() -> None:
    model = nn.Sequential(nn.Conv2d(4, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1)).cuda()
    images = torch.randn(8, 4, 16, 16, device="cuda")
    with tilewise.enabled(wait=True, rigor="estimate") as session, torch.no_grad():
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                want = model(images)
        torch.cuda.current_stream().wait_stream(side)
        known = len(session.report().layers)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            got = model(images)
            model(images[:2])  # unknown: captured as torch computes it, and not recorded
        graph.replay()
        torch.cuda.synchronize()
    assert len(session.report().layers) == known
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
