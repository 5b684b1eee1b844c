"""OverFeat, fast model (Sermanet et al. 2014, "OverFeat: Integrated Recognition, Localization and Detection")."""

from __future__ import annotations

from torch import Tensor, nn

from tilewise.frontends.zoo._init import he_convolutions

__all__ = ["OverFeatFast", "build_overfeat_fast"]


class OverFeatFast(nn.Module):
    """OverFeat's fast model (Table 1): images (N, 3, 231, 231) to scores (N, ``num_classes``)."""

    input_shape = (3, 231, 231)

    def __init__(self, num_classes: int = 1000) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 96, 11, stride=4)
        self.conv2 = nn.Conv2d(96, 256, 5)
        self.conv3 = nn.Conv2d(256, 512, 3, padding=1)
        self.conv4 = nn.Conv2d(512, 1024, 3, padding=1)
        self.conv5 = nn.Conv2d(1024, 1024, 3, padding=1)
        self.relu = nn.ReLU(inplace=True)
        self.pool = nn.MaxPool2d(2)
        self.classifier = nn.Sequential(
            nn.Dropout(),
            nn.Linear(1024 * 6 * 6, 3072),
            nn.ReLU(inplace=True),
            nn.Dropout(),
            nn.Linear(3072, 4096),
            nn.ReLU(inplace=True),
            nn.Linear(4096, num_classes),
        )
        he_convolutions(self)

    def forward(self, x: Tensor) -> Tensor:
        """Scores (N, ``num_classes``) of images (N, 3, 231, 231)."""
        x = self.pool(self.relu(self.conv1(x)))
        x = self.pool(self.relu(self.conv2(x)))
        x = self.relu(self.conv3(x))
        x = self.relu(self.conv4(x))
        x = self.pool(self.relu(self.conv5(x)))
        scores: Tensor = self.classifier(x.flatten(1))
        return scores


def build_overfeat_fast() -> OverFeatFast:
    """OverFeat's fast model, (N, 3, 231, 231) to (N, 1000).

    >>> with torch.device("meta"):  # shapes without memory
    ...     network = build_overfeat_fast()
    >>> network.input_shape
    (3, 231, 231)
    """
    return OverFeatFast()
