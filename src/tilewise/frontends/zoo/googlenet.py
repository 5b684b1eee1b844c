"""GoogLeNet (Szegedy et al. 2015, "Going Deeper with Convolutions")."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tilewise.frontends.zoo._init import he_convolutions

__all__ = ["GoogLeNet", "build_googlenet"]

INCEPTIONS = {
    "3a": (64, 96, 128, 16, 32, 32),
    "3b": (128, 128, 192, 32, 96, 64),
    "4a": (192, 96, 208, 16, 48, 64),
    "4b": (160, 112, 224, 24, 64, 64),
    "4c": (128, 128, 256, 24, 64, 64),
    "4d": (112, 144, 288, 32, 64, 64),
    "4e": (256, 160, 320, 32, 128, 128),
    "5a": (256, 160, 320, 32, 128, 128),
    "5b": (384, 192, 384, 48, 128, 128),
}
"""Table 1: channels of 1x1, 3x3 reduce, 3x3, 5x5 reduce, 5x5 and pool projection."""


def conv_relu(channels: int, out_channels: int, kernel: int, stride: int = 1) -> nn.Sequential:
    """A convolution padded by half its kernel, with bias, then ReLU."""
    return nn.Sequential(
        nn.Conv2d(channels, out_channels, kernel, stride=stride, padding=kernel // 2), nn.ReLU(inplace=True)
    )


class Inception(nn.Module):
    """Four branches side by side (Figure 2b): (N, C, H, W) to (N, ``out_channels``, H, W)."""

    def __init__(self, channels: int, widths: tuple[int, int, int, int, int, int]) -> None:
        super().__init__()
        one, reduce3, three, reduce5, five, project = widths
        self.branch1 = conv_relu(channels, one, 1)
        self.branch3 = nn.Sequential(conv_relu(channels, reduce3, 1), conv_relu(reduce3, three, 3))
        self.branch5 = nn.Sequential(conv_relu(channels, reduce5, 1), conv_relu(reduce5, five, 5))
        self.branch_pool = nn.Sequential(nn.MaxPool2d(3, stride=1, padding=1), conv_relu(channels, project, 1))
        self.out_channels = one + three + five + project

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat((self.branch1(x), self.branch3(x), self.branch5(x), self.branch_pool(x)), 1)


class GoogLeNet(nn.Module):
    """GoogLeNet, version 1, main classifier only: images (N, 3, 224, 224) to scores (N, ``num_classes``).

    As published: 5x5 convolutions in the third branch (torchvision's network has 3x3 there) and biases instead of batch
    normalisation. As in the usual benchmark of this network there is no local response normalisation.
    """

    input_shape = (3, 224, 224)

    def __init__(self, num_classes: int = 1000) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            conv_relu(3, 64, 7, stride=2),
            nn.MaxPool2d(3, stride=2, ceil_mode=True),
            conv_relu(64, 64, 1),
            conv_relu(64, 192, 3),
            nn.MaxPool2d(3, stride=2, ceil_mode=True),
        )
        channels = 192
        self.inceptions = nn.Sequential()
        for name, widths in INCEPTIONS.items():
            if name in ("4a", "5a"):
                self.inceptions.add_module(f"pool{name}", nn.MaxPool2d(3, stride=2, ceil_mode=True))
            block = Inception(channels, widths)
            self.inceptions.add_module(f"inception{name}", block)
            channels = block.out_channels
        self.mean = nn.AdaptiveAvgPool2d(1)
        self.dropout = nn.Dropout(0.4)
        self.fc = nn.Linear(channels, num_classes)
        he_convolutions(self)

    def forward(self, x: Tensor) -> Tensor:
        """Scores (N, ``num_classes``) of images (N, 3, 224, 224)."""
        x = self.mean(self.inceptions(self.stem(x))).flatten(1)
        scores: Tensor = self.fc(self.dropout(x))
        return scores


def build_googlenet() -> GoogLeNet:
    """GoogLeNet without its auxiliary classifiers, (N, 3, 224, 224) to (N, 1000).

    >>> with torch.device("meta"):  # shapes without memory
    ...     network = build_googlenet()
    >>> network.input_shape
    (3, 224, 224)
    """
    return GoogLeNet()
