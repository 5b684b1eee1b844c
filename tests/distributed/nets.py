"""Small networks of the forms that are in use, written as they are found for one device."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

Tensor = torch.Tensor


class UNet(nn.Module):
    """Sizes that do not divide are padded to those of the skip connection."""

    channels = 3

    def __init__(self) -> None:
        super().__init__()

        def double(a: int, b: int) -> nn.Module:
            return nn.Sequential(
                nn.Conv2d(a, b, 3, padding=1, bias=False), nn.BatchNorm2d(b), nn.ReLU(inplace=True),
                nn.Conv2d(b, b, 3, padding=1, bias=False), nn.BatchNorm2d(b), nn.ReLU(inplace=True),
            )  # fmt: skip

        self.inc, self.down1, self.down2 = double(3, 4), double(4, 8), double(8, 8)
        self.up1, self.conv1 = nn.ConvTranspose2d(8, 8, 2, stride=2), double(16, 4)
        self.up2, self.conv2 = nn.Upsample(scale_factor=2, mode="bilinear", align_corners=True), double(8, 4)
        self.out = nn.Conv2d(4, 2, 1)

    def joined(self, x: Tensor, skip: Tensor) -> Tensor:
        dy, dx = skip.size()[2] - x.size()[2], skip.size()[3] - x.size()[3]
        x = F.pad(x, [dx // 2, dx - dx // 2, dy // 2, dy - dy // 2])
        return torch.cat([skip, x], dim=1)

    def forward(self, x: Tensor) -> Tensor:
        a = self.inc(x)
        b = self.down1(F.max_pool2d(a, 2))
        c = self.down2(F.max_pool2d(b, 2))
        y = self.conv1(self.joined(self.up1(c), b))
        return self.out(self.conv2(self.joined(self.up2(y), a)))


class Bottleneck(nn.Module):
    def __init__(self, into: int, out: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(into, 4, 1, bias=False), nn.BatchNorm2d(4)
        self.conv2, self.bn2 = nn.Conv2d(4, 4, 3, stride, 1, bias=False), nn.BatchNorm2d(4)
        self.conv3, self.bn3 = nn.Conv2d(4, out, 1, bias=False), nn.BatchNorm2d(out)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = nn.Sequential(nn.Conv2d(into, out, 1, stride, bias=False), nn.BatchNorm2d(out))

    def forward(self, x: Tensor) -> Tensor:
        identity = self.downsample(x)
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.relu(self.bn2(self.conv2(out)))
        out = self.bn3(self.conv3(out))
        out += identity
        return self.relu(out)


class ResNet(nn.Module):
    channels = 3

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1, self.relu = nn.Conv2d(3, 8, 7, 2, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(kernel_size=3, stride=2, padding=1)
        self.layers = nn.Sequential(Bottleneck(8, 8, 1), Bottleneck(8, 12, 2))
        self.avgpool, self.fc = nn.AdaptiveAvgPool2d((1, 1)), nn.Linear(12, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        x = self.avgpool(self.layers(x))
        return self.fc(torch.flatten(x, 1))


class DeepLab(nn.Module):
    """Dilated convolutions beside a pooled image, and a result as large as the input."""

    channels = 3

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Conv2d(3, 6, 3, 2, 1), nn.BatchNorm2d(6), nn.ReLU())
        self.atrous = nn.ModuleList([nn.Conv2d(6, 4, 3, padding=d, dilation=d, bias=False) for d in (1, 3, 6)])
        self.norms = nn.ModuleList([nn.BatchNorm2d(4) for _ in range(3)])
        self.pooling = nn.Sequential(
            nn.AdaptiveAvgPool2d(1), nn.Conv2d(6, 4, 1, bias=False), nn.BatchNorm2d(4), nn.ReLU()
        )
        self.project = nn.Sequential(nn.Conv2d(16, 6, 1, bias=False), nn.BatchNorm2d(6), nn.ReLU(), nn.Dropout(0.0))
        self.head = nn.Conv2d(6, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        shape = x.shape[-2:]
        y = self.backbone(x)
        found = [F.relu(norm(conv(y))) for conv, norm in zip(self.atrous, self.norms, strict=True)]
        pooled = self.pooling(y)
        found.append(F.interpolate(pooled, size=y.shape[-2:], mode="bilinear", align_corners=False))
        y = self.head(self.project(torch.cat(found, dim=1)))
        return F.interpolate(y, size=shape, mode="bilinear", align_corners=False)


class LayerNorm2d(nn.LayerNorm):
    def forward(self, x: Tensor) -> Tensor:
        x = x.permute(0, 2, 3, 1)
        x = F.layer_norm(x, self.normalized_shape, self.weight, self.bias, self.eps)
        return x.permute(0, 3, 1, 2)


class ConvNeXtBlock(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.dwconv = nn.Conv2d(dim, dim, 7, padding=3, groups=dim)
        self.norm, self.act = nn.LayerNorm(dim, eps=1e-6), nn.GELU()
        self.pwconv1, self.pwconv2 = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)
        self.gamma = nn.Parameter(torch.rand(dim))
        self.grn = nn.Parameter(torch.rand(1, 1, 1, 4 * dim))

    def forward(self, x: Tensor) -> Tensor:
        y = self.dwconv(x).permute(0, 2, 3, 1)
        y = self.act(self.pwconv1(self.norm(y)))
        # Global response normalization, as in version 2.
        g = y.square().mean(dim=(1, 2), keepdim=True).sqrt()
        y = self.grn * (y * (g / (g.mean(dim=-1, keepdim=True) + 1e-6))) + y
        y = self.gamma * self.pwconv2(y)
        return x + y.permute(0, 3, 1, 2)


class ConvNeXt(nn.Module):
    channels = 3

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 4, 4, 4), LayerNorm2d(4, eps=1e-6))
        self.blocks = nn.Sequential(ConvNeXtBlock(4), LayerNorm2d(4), nn.Conv2d(4, 6, 2, 2), ConvNeXtBlock(6))
        self.norm, self.head = nn.LayerNorm(6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.blocks(self.stem(x)).mean([-2, -1])))


class VaeResnet(nn.Module):
    def __init__(self, into: int, out: int) -> None:
        super().__init__()
        self.norm1, self.conv1 = nn.GroupNorm(2, into, eps=1e-6), nn.Conv2d(into, out, 3, padding=1)
        self.norm2, self.conv2 = nn.GroupNorm(2, out, eps=1e-6), nn.Conv2d(out, out, 3, padding=1)
        self.shortcut = nn.Conv2d(into, out, 1) if into != out else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv1(F.silu(self.norm1(x)))
        y = self.conv2(F.silu(self.norm2(y)))
        return (self.shortcut(x) + y) / 1.25


class Attention(nn.Module):
    """Of every place to every other: whole on each rank, which takes its part of the result."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(2, channels)
        self.q, self.k, self.v = (nn.Linear(channels, channels) for _ in range(3))
        self.out = nn.Linear(channels, channels)

    def forward(self, x: Tensor) -> Tensor:
        batch, channels, height, width = x.shape
        y = self.norm(x).view(batch, channels, height * width).transpose(1, 2)
        y = self.out(F.scaled_dot_product_attention(self.q(y), self.k(y), self.v(y)))
        return x + y.transpose(1, 2).reshape(batch, channels, height, width)


class VaeDecoder(nn.Module):
    channels = 4

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(4, 8, 3, padding=1)
        self.mid, self.attention = VaeResnet(8, 8), Attention(8)
        self.up1, self.conv1 = VaeResnet(8, 8), nn.Conv2d(8, 8, 3, padding=1)
        self.up2, self.conv2 = VaeResnet(8, 4), nn.Conv2d(4, 4, 3, padding=1)
        self.norm, self.last = nn.GroupNorm(4, 4), nn.Conv2d(4, 3, 3, padding=1)

    def forward(self, z: Tensor) -> Tensor:
        y = self.attention(self.mid(self.first(z)))
        y = self.conv1(F.interpolate(self.up1(y), scale_factor=2.0, mode="nearest"))
        y = self.conv2(F.interpolate(self.up2(y), scale_factor=2.0, mode="nearest"))
        return self.last(F.silu(self.norm(y))).clamp(-1, 1) / 2 + 0.5


class UNet3d(nn.Module):
    channels = 1

    def __init__(self) -> None:
        super().__init__()

        def block(a: int, b: int, stride: int = 1) -> nn.Module:
            return nn.Sequential(
                nn.Conv3d(a, b, 3, stride, 1), nn.InstanceNorm3d(b, affine=True), nn.LeakyReLU(0.01, inplace=True)
            )

        self.inc, self.down = nn.Sequential(block(1, 3), block(3, 3)), nn.Sequential(block(3, 4, 2), block(4, 4))
        self.up = nn.Upsample(scale_factor=2, mode="trilinear")
        self.last = nn.Sequential(block(7, 3), nn.Conv3d(3, 2, 1))

    def forward(self, x: Tensor) -> Tensor:
        a = self.inc(x)
        b = self.up(self.down(a))
        return F.softmax(self.last(torch.cat((a, b), dim=1)), dim=1)


class SuperResolution(nn.Module):
    """Mirrored borders, dense connections, sub-pixel convolution, and the input made larger added on."""

    channels = 3

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 6, 5, padding=2, padding_mode="reflect")
        self.dense = nn.Conv2d(9, 6, 3, padding=1, padding_mode="replicate")
        self.attend = nn.Sequential(
            nn.AdaptiveAvgPool2d(1), nn.Conv2d(6, 3, 1), nn.ReLU(), nn.Conv2d(3, 6, 1), nn.Sigmoid()
        )
        self.up = nn.Sequential(nn.Conv2d(6, 12, 3, padding=1), nn.PixelShuffle(2), nn.PReLU())
        self.scale = nn.Parameter(torch.tensor(0.3))

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        y = self.dense(torch.cat((x, y), 1)).mul(0.2) + y
        y = y * self.attend(y)
        y = self.up(y) * self.scale
        return y + F.interpolate(x, scale_factor=2, mode="bicubic", align_corners=False)


NETS: tuple[tuple[type[nn.Module], tuple[int, ...]], ...] = (
    (UNet, (18, 21)), (ResNet, (33, 26)), (DeepLab, (15, 17)), (ConvNeXt, (24, 16)), (VaeDecoder, (5, 4)),
    (UNet3d, (6, 8, 4)), (SuperResolution, (7, 9)),
)  # fmt: skip
