"""Training on a GPU while layers are planned in the background."""

from __future__ import annotations

import copy
import time

import pytest
import torch
from torch import nn

import tilewise
from tilewise.nn import report
from tilewise.nn.background.service import service

pytestmark = pytest.mark.gpu
PATIENCE_S = 240


def network() -> nn.Module:
    layers = [nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 32, 5, padding=2, groups=32), nn.ReLU()]
    return nn.Sequential(*layers, nn.Conv2d(32, 16, 1)).to("cuda")


def loss_of(model: nn.Module, x: torch.Tensor) -> float:
    model.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
    return float(loss)


def test_layers_change_over_and_losses_are_torchs() -> None:
    x = torch.randn(8, 16, 56, 56, dtype=torch.float32, device="cuda")
    model = network()
    plain = copy.deepcopy(model)
    flags = torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic
    tilewise.optimize(model, x, wait=False, background_share=0.9)
    begin = time.monotonic()
    while report(model).pending and time.monotonic() - begin < PATIENCE_S:
        assert loss_of(model, x) == pytest.approx(loss_of(plain, x), rel=1e-4), str(report(model))
        assert (torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic) == flags
    assert report(model).pending == 0, f"{report(model)}\nturns took {service().allowance.spent_s:.1f} s"
    assert any(layer.replaced for layer in report(model).layers), str(report(model))
    assert loss_of(model, x) == pytest.approx(loss_of(plain, x), rel=1e-4), str(report(model))


def test_a_capture_in_the_middle_is_left_alone() -> None:
    x = torch.randn(4, 16, 28, 28, dtype=torch.float32, device="cuda")
    model = network()
    tilewise.optimize(model, x, wait=False, background_share=0.9)
    for _ in range(20):
        loss_of(model, x)
    with torch.no_grad():
        want = model(x)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side), tilewise.background.held_off():
            model(x)
        torch.cuda.current_stream().wait_stream(side)
        spent = service().allowance.spent_s
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = model(x)
        assert service().allowance.spent_s == spent
        graph.replay()
        torch.testing.assert_close(y, want, rtol=1e-3, atol=1e-3)
        for _ in range(20):
            model(x)  # planning goes on
        graph.replay()
        torch.testing.assert_close(y, want, rtol=1e-3, atol=1e-3)
    tilewise.restore(model)
