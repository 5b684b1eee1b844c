"""DenseNet (Huang et al. 2017, "Densely Connected Convolutional Networks")."""

from __future__ import annotations

import torch
from torch import Tensor, nn

__all__ = ["DenseNet", "build_densenet40"]


class DenseLayer(nn.Module):
    """BN, ReLU and a 3x3 convolution whose result joins its input: (N, C, H, W) to (N, C + growth, H, W)."""

    def __init__(self, channels: int, growth: int) -> None:
        super().__init__()
        self.bn = nn.BatchNorm2d(channels)
        self.relu = nn.ReLU(inplace=True)
        self.conv = nn.Conv2d(channels, growth, 3, padding=1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat((x, self.conv(self.relu(self.bn(x)))), 1)


class DenseNet(nn.Module):
    """DenseNet for CIFAR without bottlenecks or compression: images (N, 3, 32, 32) to scores (N, ``num_classes``).

    Section 3: a 3x3 convolution of 16 channels, three dense blocks of (``depth`` - 4) / 3 layers with growth rate
    ``growth``, and between them a 1x1 convolution that keeps the channels, then a 2x2 mean.
    Raises ``ValueError`` where ``depth`` - 4 is not a multiple of 3.
    """

    input_shape = (3, 32, 32)

    def __init__(self, depth: int = 40, growth: int = 40, num_classes: int = 10) -> None:
        super().__init__()
        layers, rest = divmod(depth - 4, 3)
        if rest or layers < 1:
            raise ValueError(f"depth is {depth}: three equal blocks need 4 + 3n layers, n >= 1")
        channels = 16
        modules: list[nn.Module] = [nn.Conv2d(3, channels, 3, padding=1, bias=False)]
        for block in range(3):
            if block:
                modules += [
                    nn.BatchNorm2d(channels),
                    nn.ReLU(inplace=True),
                    nn.Conv2d(channels, channels, 1, bias=False),
                    nn.AvgPool2d(2),
                ]
            for _ in range(layers):
                modules.append(DenseLayer(channels, growth))
                channels += growth
        modules += [nn.BatchNorm2d(channels), nn.ReLU(inplace=True), nn.AdaptiveAvgPool2d(1)]
        self.features = nn.Sequential(*modules)
        self.fc = nn.Linear(channels, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        """Scores (N, ``num_classes``) of images (N, 3, 32, 32)."""
        scores: Tensor = self.fc(self.features(x).flatten(1))
        return scores


def build_densenet40() -> DenseNet:
    """DenseNet of 40 layers with growth rate 40, as mu-cuDNN benchmarked: (N, 3, 32, 32) to (N, 10).

    >>> with torch.device("meta"):  # shapes without memory
    ...     network = build_densenet40()
    >>> network.input_shape
    (3, 32, 32)
    """
    return DenseNet()
