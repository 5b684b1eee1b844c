"""Small models to capture, on any device, and the comparison of one with its twin."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

Run = Callable[[nn.Module, torch.Tensor], Any]


def network(device: str = "cpu", *, dropout: float = 0.0) -> nn.Module:
    """A convolutional network with norms, a residual sum, and a weight that is used twice."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        Residual(),
        nn.Dropout(dropout),
        nn.Flatten(),
        nn.Linear(8 * 36, 5),
    ).to(device=device, dtype=torch.float32)


class Residual(nn.Module):
    """A convolution beside the identity, and a parameter that is added whole: its gradient is another's memory."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(8, 8, 3, padding=1, bias=False)
        self.shift = nn.Parameter(torch.zeros(8, 6, 6, dtype=torch.float32, device="cpu"))
        self.twin = nn.Parameter(torch.zeros(8, 6, 6, dtype=torch.float32, device="cpu"))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.conv(self.conv(x)) + (self.shift + self.twin)


def images(device: str = "cpu", batch: int = 4) -> torch.Tensor:
    return torch.randn(batch, 3, 6, 6, dtype=torch.float32, device=device)


def step(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    """Forward and backward as a program does them; the outputs, and all that they leave in the model."""
    y = model(x)
    if y.requires_grad:
        y.float().square().sum().backward()
    return [y.detach(), *left_in(model)]


def left_in(model: nn.Module) -> list[torch.Tensor]:
    """Gradients and state of a model."""
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    return [*gradients, *model.state_dict().values()]


def assert_alike(got: list[torch.Tensor], want: list[torch.Tensor], tolerance: float = 1e-5) -> None:
    assert len(got) == len(want)
    for mine, its in zip(got, want, strict=True):
        torch.testing.assert_close(mine, its, rtol=tolerance, atol=tolerance)


def assert_same_steps(
    model: nn.Module, twin: nn.Module, inputs: list[torch.Tensor], run: Run = step, tolerance: float = 1e-5
) -> None:
    """Both models compute the same for each of the inputs, one after the other, drawing the same random numbers."""
    for number, x in enumerate(inputs):
        results = []
        for each in (model, twin):
            torch.manual_seed(number)
            results.append(run(each, x))
        assert_alike(*results, tolerance)


def bits(model: nn.Module) -> list[torch.Tensor]:
    """Copies of all that a run of the model may change in it."""
    return [t.detach().clone() for t in (*model.parameters(), *model.buffers())]


def twins(model: nn.Module) -> tuple[nn.Module, nn.Module]:
    return model, copy.deepcopy(model)
