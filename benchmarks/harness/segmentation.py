"""Networks that give an image for an image, to be named ``harness.segmentation:unet`` where a network is asked for."""

from __future__ import annotations

import torch
from torch import Tensor, nn

__all__ = ["UNet", "deeplabv3_resnet50", "unet"]

WIDTHS = (64, 128, 256, 512, 1024)
"""Channels of the U-Net at each resolution, from the finest."""


def _two_convolutions(inputs: int, outputs: int) -> nn.Sequential:
    layers = list[nn.Module]()
    for channels in (inputs, outputs):
        layers += [nn.Conv2d(channels, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()]
    return nn.Sequential(*layers)


class UNet(nn.Module):
    """A U-Net with padded convolutions and batch norms: images (N, 3, H, W) to scores (N, ``classes``, H, W).

    H and W are multiples of 16.
    """

    def __init__(self, classes: int = 2) -> None:
        super().__init__()
        self.down = nn.ModuleList(_two_convolutions(a, b) for a, b in zip((3, *WIDTHS[:-1]), WIDTHS, strict=True))
        finer, coarser = WIDTHS[-2::-1], WIDTHS[:0:-1]
        self.up = nn.ModuleList(nn.ConvTranspose2d(a, b, 2, stride=2) for a, b in zip(coarser, finer, strict=True))
        self.join = nn.ModuleList(_two_convolutions(2 * width, width) for width in finer)
        self.pool = nn.MaxPool2d(2)
        self.scores = nn.Conv2d(WIDTHS[0], classes, 1)

    def forward(self, images: Tensor) -> Tensor:
        """The scores of every pixel."""
        kept, x = list[Tensor](), images
        for index, block in enumerate(self.down):
            x = block(self.pool(x) if index else x)
            kept.append(x)
        for up, join, skipped in zip(self.up, self.join, kept[-2::-1], strict=True):
            x = join(torch.cat((skipped, up(x)), dim=1))
        scores: Tensor = self.scores(x)
        return scores


def unet() -> tuple[nn.Module, tuple[int, int, int]]:
    """A U-Net for images of 256x256."""
    return UNet(), (3, 256, 256)


def deeplabv3_resnet50() -> tuple[nn.Module, tuple[int, int, int]]:
    """torchvision's DeepLabV3 on a ResNet-50, for images of 384x384."""
    from torchvision.models import segmentation

    return segmentation.deeplabv3_resnet50(weights=None, weights_backbone=None), (3, 384, 384)
