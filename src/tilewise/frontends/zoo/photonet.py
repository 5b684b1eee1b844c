"""A small classifier of photographs for demonstrations: every kind of layer a planner likes, trained in seconds."""

from __future__ import annotations

from torch import Tensor, nn

__all__ = ["PhotoNet", "build_photonet"]


def conv_bn_relu(channels: int, out_channels: int, kernel: int, stride: int = 1, groups: int = 1) -> nn.Sequential:
    """A convolution without bias, batch normalisation, ReLU; padded by half its kernel unless kernel = stride."""
    padding = 0 if kernel == stride else kernel // 2
    return nn.Sequential(
        nn.Conv2d(channels, out_channels, kernel, stride=stride, padding=padding, groups=groups, bias=False),
        nn.BatchNorm2d(out_channels),
        nn.ReLU(inplace=True),
    )


class PhotoNet(nn.Module):
    """Crops (N, 3, 96, 96) to scores (N, ``num_classes``).

    ``stem`` is a 5x5 convolution at full size, ``patches`` one whose kernel equals its stride (4), ``wide`` a 31x31
    depthwise convolution at 24x24 with a shortcut, and ``body`` two 3x3 convolutions.
    """

    input_shape = (3, 96, 96)

    def __init__(self, num_classes: int = 2) -> None:
        super().__init__()
        self.stem = conv_bn_relu(3, 16, 5)
        self.patches = conv_bn_relu(16, 64, 4, stride=4)
        self.wide = conv_bn_relu(64, 64, 31, groups=64)
        self.body = nn.Sequential(conv_bn_relu(64, 96, 3), conv_bn_relu(96, 128, 3, stride=2))
        self.mean = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(128, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        """Scores (N, ``num_classes``) of crops (N, 3, 96, 96)."""
        x = self.patches(self.stem(x))
        x = x + self.wide(x)
        scores: Tensor = self.fc(self.mean(self.body(x)).flatten(1))
        return scores


def build_photonet() -> PhotoNet:
    """The demonstration classifier, (N, 3, 96, 96) to (N, 2).

    >>> with torch.device("meta"):  # shapes without memory
    ...     network = build_photonet()
    >>> network.input_shape
    (3, 96, 96)
    """
    return PhotoNet()
