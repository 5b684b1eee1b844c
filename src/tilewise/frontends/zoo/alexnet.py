"""One-column AlexNet (Krizhevsky 2014, "One weird trick for parallelizing convolutional neural networks")."""

from __future__ import annotations

from torch import Tensor, nn

from tilewise.frontends.zoo._init import he_convolutions

__all__ = ["AlexNet", "build_alexnet"]


class AlexNet(nn.Module):
    """One-column AlexNet: images (N, 3, 224, 224) to scores (N, ``num_classes``).

    The five convolutions have the sizes mu-cuDNN benchmarked (64, 192, 384, 384, 256 outputs). The model files that
    came with the paper, and torchvision, have 256 outputs in the fourth; the mu-cuDNN sizes have 384, and are followed
    here. As in the usual benchmark of this network there is no local response normalisation.
    """

    input_shape = (3, 224, 224)

    def __init__(self, num_classes: int = 1000) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 64, 11, stride=4, padding=2)
        self.conv2 = nn.Conv2d(64, 192, 5, padding=2)
        self.conv3 = nn.Conv2d(192, 384, 3, padding=1)
        self.conv4 = nn.Conv2d(384, 384, 3, padding=1)
        self.conv5 = nn.Conv2d(384, 256, 3, padding=1)
        self.relu = nn.ReLU(inplace=True)
        self.pool = nn.MaxPool2d(3, stride=2)
        self.classifier = nn.Sequential(
            nn.Dropout(),
            nn.Linear(256 * 6 * 6, 4096),
            nn.ReLU(inplace=True),
            nn.Dropout(),
            nn.Linear(4096, 4096),
            nn.ReLU(inplace=True),
            nn.Linear(4096, num_classes),
        )
        he_convolutions(self)

    def forward(self, x: Tensor) -> Tensor:
        """Scores (N, ``num_classes``) of images (N, 3, 224, 224)."""
        x = self.pool(self.relu(self.conv1(x)))
        x = self.pool(self.relu(self.conv2(x)))
        x = self.relu(self.conv3(x))
        x = self.relu(self.conv4(x))
        x = self.pool(self.relu(self.conv5(x)))
        scores: Tensor = self.classifier(x.flatten(1))
        return scores


def build_alexnet() -> AlexNet:
    """One-column AlexNet, (N, 3, 224, 224) to (N, 1000).

    >>> with torch.device("meta"):  # shapes without memory
    ...     network = build_alexnet()
    >>> network.input_shape
    (3, 224, 224)
    """
    return AlexNet()
