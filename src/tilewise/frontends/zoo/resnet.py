"""ResNet (He et al. 2016, "Deep Residual Learning for Image Recognition")."""

from __future__ import annotations

from torch import Tensor, nn

__all__ = ["ResNet", "build_resnet18", "build_resnet50"]


class Basic(nn.Module):
    """Two 3x3 convolutions and a shortcut (Figure 5, left): (N, C, H, W) to (N, width, H/stride, W/stride)."""

    expansion = 1

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, width, 3, stride=stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.shortcut = shortcut(channels, width, stride)

    def forward(self, x: Tensor) -> Tensor:
        y = self.relu(self.bn1(self.conv1(x)))
        y = self.bn2(self.conv2(y))
        result: Tensor = self.relu(y + self.shortcut(x))
        return result


class Bottleneck(nn.Module):
    """1x1, 3x3, 1x1 convolutions and a shortcut (Figure 5, right): (N, C, H, W) to (N, 4 width, H/stride, W/stride).

    The stride is in the first 1x1 convolution, as in the paper; torchvision puts it in the 3x3.
    """

    expansion = 4

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, width, 1, stride=stride, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, width * 4, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(width * 4)
        self.relu = nn.ReLU(inplace=True)
        self.shortcut = shortcut(channels, width * 4, stride)

    def forward(self, x: Tensor) -> Tensor:
        y = self.relu(self.bn1(self.conv1(x)))
        y = self.relu(self.bn2(self.conv2(y)))
        y = self.bn3(self.conv3(y))
        result: Tensor = self.relu(y + self.shortcut(x))
        return result


def shortcut(channels: int, out_channels: int, stride: int) -> nn.Module:
    """The identity, or a 1x1 convolution where the shape changes (the paper's option B)."""
    if channels == out_channels and stride == 1:
        return nn.Identity()
    return nn.Sequential(
        nn.Conv2d(channels, out_channels, 1, stride=stride, bias=False),
        nn.BatchNorm2d(out_channels),
    )


class ResNet(nn.Module):
    """Four stages of ``block`` (Table 1): images (N, 3, 224, 224) to scores (N, ``num_classes``)."""

    input_shape = (3, 224, 224)

    def __init__(
        self, block: type[Basic | Bottleneck], depths: tuple[int, int, int, int], num_classes: int = 1000
    ) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 64, 7, stride=2, padding=3, bias=False)
        self.bn1 = nn.BatchNorm2d(64)
        self.relu = nn.ReLU(inplace=True)
        self.pool = nn.MaxPool2d(3, stride=2, padding=1)
        channels = 64
        stages: list[nn.Module] = []
        for depth, width, stride in zip(depths, (64, 128, 256, 512), (1, 2, 2, 2), strict=True):
            blocks: list[nn.Module] = []
            for i in range(depth):
                blocks.append(block(channels, width, stride if i == 0 else 1))
                channels = width * block.expansion
            stages.append(nn.Sequential(*blocks))
        self.stages = nn.Sequential(*stages)
        self.mean = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(channels, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        """Scores (N, ``num_classes``) of images (N, 3, 224, 224)."""
        x = self.pool(self.relu(self.bn1(self.conv1(x))))
        scores: Tensor = self.fc(self.mean(self.stages(x)).flatten(1))
        return scores


def build_resnet18() -> ResNet:
    """ResNet-18, (N, 3, 224, 224) to (N, 1000).

    >>> with torch.device("meta"):  # shapes without memory
    ...     network = build_resnet18()
    >>> network.input_shape
    (3, 224, 224)
    """
    return ResNet(Basic, (2, 2, 2, 2))


def build_resnet50() -> ResNet:
    """ResNet-50, (N, 3, 224, 224) to (N, 1000).

    >>> with torch.device("meta"):  # shapes without memory
    ...     network = build_resnet50()
    >>> network.input_shape
    (3, 224, 224)
    """
    return ResNet(Bottleneck, (3, 4, 6, 3))
