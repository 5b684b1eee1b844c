"""Networks whose images are split over ranks, and their inputs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from tilewise.frontends.zoo import build_resnet50

__all__ = ["NETWORKS", "Spatial", "UNet3d"]


class UNet3d(nn.Module):
    """A 3-D U-Net (Çiçek et al. 2016): three levels, two 3x3x3 convolutions each; (N, 1, D, H, W) to (N, 3, D, H, W).

    Sizes must be divisible by four.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = double(1, width)
        self.second, self.third = double(width, 2 * width), double(2 * width, 4 * width)
        self.pool = nn.MaxPool3d(2)
        self.up2, self.up1 = (nn.ConvTranspose3d(2 * n, n, 2, stride=2) for n in (2 * width, width))
        self.back2, self.back1 = double(4 * width, 2 * width), double(2 * width, width)
        self.head = nn.Conv3d(width, 3, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = self.first(x)
        second = self.second(self.pool(first))
        third = self.third(self.pool(second))
        y = self.back2(torch.cat([second, self.up2(third)], 1))
        y = self.back1(torch.cat([first, self.up1(y)], 1))
        result: torch.Tensor = self.head(y)
        return result


def double(channels: int, width: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv3d(channels, width, 3, padding=1), nn.BatchNorm3d(width), nn.ReLU(inplace=True),
        nn.Conv3d(width, width, 3, padding=1), nn.BatchNorm3d(width), nn.ReLU(inplace=True),
    )  # fmt: skip


def convolutions() -> nn.Sequential:
    """Six convolutions and nothing else: 3 channels to 8, strides too."""
    return nn.Sequential(
        nn.Conv2d(3, 16, 7, padding=3), nn.ReLU(), nn.Conv2d(16, 32, 3, stride=2, padding=1), nn.ReLU(),
        nn.Conv2d(32, 32, 3, padding=2, dilation=2), nn.ReLU(), nn.Conv2d(32, 32, 3, padding=1), nn.ReLU(),
        nn.Conv2d(32, 16, 1), nn.ReLU(), nn.ConvTranspose2d(16, 8, 4, stride=2, padding=1),
    )  # fmt: skip


@dataclass(frozen=True)
class Spatial:
    """How to build a network, its channels, and the axis of its images that is split."""

    build: Callable[[], nn.Module]
    channels: int
    space: int
    dim: str


NETWORKS = {
    "resnet50": Spatial(build_resnet50, 3, 2, "h"),
    "unet3d": Spatial(lambda: UNet3d(32), 1, 3, "d"),
    "convolutions": Spatial(convolutions, 3, 2, "h"),
}
