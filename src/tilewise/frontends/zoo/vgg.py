"""VGG (Simonyan and Zisserman 2015, "Very Deep Convolutional Networks for Large-Scale Image Recognition")."""

from __future__ import annotations

from torch import Tensor, nn

from tilewise.frontends.zoo._init import he_convolutions

__all__ = ["VGG", "build_vgg16"]


class VGG(nn.Module):
    """Stages of 3x3 convolutions, each ended by a 2x2 pool: images (N, 3, 224, 224) to scores (N, ``num_classes``).

    ``depths`` is the number of convolutions of the five stages, of 64, 128, 256, 512 and 512 channels: configuration
    D of Table 1 (VGG-16) is (2, 2, 3, 3, 3).
    """

    input_shape = (3, 224, 224)

    def __init__(self, depths: tuple[int, int, int, int, int] = (2, 2, 3, 3, 3), num_classes: int = 1000) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        channels = 3
        for depth, width in zip(depths, (64, 128, 256, 512, 512), strict=True):
            for _ in range(depth):
                layers += [nn.Conv2d(channels, width, 3, padding=1), nn.ReLU(inplace=True)]
                channels = width
            layers.append(nn.MaxPool2d(2))
        self.features = nn.Sequential(*layers)
        self.classifier = nn.Sequential(
            nn.Linear(512 * 7 * 7, 4096),
            nn.ReLU(inplace=True),
            nn.Dropout(),
            nn.Linear(4096, 4096),
            nn.ReLU(inplace=True),
            nn.Dropout(),
            nn.Linear(4096, num_classes),
        )
        he_convolutions(self)

    def forward(self, x: Tensor) -> Tensor:
        """Scores (N, ``num_classes``) of images (N, 3, 224, 224)."""
        scores: Tensor = self.classifier(self.features(x).flatten(1))
        return scores


def build_vgg16() -> VGG:
    """VGG-16 (configuration D), (N, 3, 224, 224) to (N, 1000).

    >>> with torch.device("meta"):  # shapes without memory
    ...     network = build_vgg16()
    >>> network.input_shape
    (3, 224, 224)
    """
    return VGG()
