"""One stage of RepLKNet (Ding et al. 2022, "Scaling Up Your Kernels to 31x31")."""

from __future__ import annotations

from torch import Tensor, nn

__all__ = ["RepLKNetStage", "build_replknet31_stage"]


def conv_bn(channels: int, out_channels: int, kernel: int = 1, groups: int = 1) -> nn.Sequential:
    """A convolution padded by half its kernel, without bias, then batch normalisation."""
    return nn.Sequential(
        nn.Conv2d(channels, out_channels, kernel, padding=kernel // 2, groups=groups, bias=False),
        nn.BatchNorm2d(out_channels),
    )


class LargeKernelBlock(nn.Module):
    """1x1, large depthwise in parallel with small depthwise, 1x1, and a shortcut: (N, C, H, W) to the same shape."""

    def __init__(self, channels: int, kernel: int, small_kernel: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(channels)
        self.expand = conv_bn(channels, channels)
        self.large = conv_bn(channels, channels, kernel, groups=channels)
        self.small = conv_bn(channels, channels, small_kernel, groups=channels)
        self.project = conv_bn(channels, channels)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        y = self.relu(self.expand(self.norm(x)))
        y = self.relu(self.large(y) + self.small(y))
        result: Tensor = x + self.project(y)
        return result


class ConvFFN(nn.Module):
    """Two 1x1 convolutions around a GELU, and a shortcut: (N, C, H, W) to the same shape."""

    def __init__(self, channels: int, expansion: int = 4) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(channels)
        self.expand = conv_bn(channels, channels * expansion)
        self.gelu = nn.GELU()
        self.project = conv_bn(channels * expansion, channels)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = x + self.project(self.gelu(self.expand(self.norm(x))))
        return result


class RepLKNetStage(nn.Module):
    """A stage of large-kernel blocks, each followed by a ConvFFN: (N, C, H, W) to the same shape.

    The defaults are the first stage of RepLKNet-31B (Section 4.1): 128 channels, 31x31 beside 5x5, two blocks. The
    paper's stochastic depth is left out, so that two runs compute the same.
    """

    input_shape = (128, 56, 56)

    def __init__(self, channels: int = 128, kernel: int = 31, small_kernel: int = 5, blocks: int = 2) -> None:
        super().__init__()
        modules: list[nn.Module] = []
        for _ in range(blocks):
            modules += [LargeKernelBlock(channels, kernel, small_kernel), ConvFFN(channels)]
        self.blocks = nn.Sequential(*modules)

    def forward(self, x: Tensor) -> Tensor:
        """Features (N, C, H, W) of features (N, C, H, W)."""
        features: Tensor = self.blocks(x)
        return features


def build_replknet31_stage() -> RepLKNetStage:
    """The first stage of RepLKNet-31B, (N, 128, 56, 56) to the same shape.

    >>> with torch.device("meta"):  # shapes without memory
    ...     network = build_replknet31_stage()
    >>> network.input_shape
    (128, 56, 56)
    """
    return RepLKNetStage()
