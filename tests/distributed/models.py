"""Layers and models drawn for tests, the same on all ranks for a seed."""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F

Mesh = tuple[tuple[int, ...], tuple[str, ...]]
MESHES: dict[int, list[Mesh]] = {
    2: [((2,), ("h",)), ((2,), ("w",))],
    3: [((3,), ("h",)), ((3,), ("w",))],
    4: [((4,), ("h",)), ((2, 2), ("h", "w")), ((4, 1), ("w", "h"))],
    5: [((5,), ("w",)), ((5,), ("h",))],
}


@dataclass(frozen=True)
class Case:
    """A layer, its input's shape, and where the input is cut."""

    layer: nn.Module
    shape: tuple[int, ...]
    cuts: dict[str, tuple[int, ...]]
    mesh: tuple[tuple[int, ...], tuple[str, ...]]


def cuts_of(draw: random.Random, size: int, ranks: int) -> tuple[int, ...]:
    """Even, uneven, or with empty parts."""
    kind = draw.choice(("even", "any", "any", "empty"))
    if kind == "even":
        return (*(size * rank // ranks for rank in range(ranks)), size)
    if kind == "empty":
        return (0, *sorted(draw.choice((0, size // 2, size)) for _ in range(ranks - 1)), size)
    return (0, *sorted(draw.randint(0, size) for _ in range(ranks - 1)), size)


def mesh_of(draw: random.Random, ranks: int, dims: int) -> tuple[tuple[int, ...], tuple[str, ...]]:
    found = [m for m in MESHES[ranks] if dims > 1 or m[1] == ("w",)]
    if dims == 3 and ranks == 4:
        found = [*found, ((2, 2), ("d", "w"))]
    return draw.choice(found) if found else ((ranks,), ("w",))


def placed(
    draw: random.Random, ranks: int, layer: nn.Module, channels: int, sizes: tuple[int, ...], mesh: Mesh | None = None
) -> Case:
    mesh = mesh or mesh_of(draw, ranks, len(sizes))
    shape = (2, channels, *sizes)
    cuts = {name: cuts_of(draw, shape[{"d": -3, "h": -2, "w": -1}[name]], n) for n, name in zip(*mesh, strict=True)}
    return Case(layer.double(), shape, cuts, mesh)


def convolution(draw: random.Random, ranks: int, transposed: bool) -> Case:
    """Any kernel, stride, dilation, padding and groups."""
    while True:
        dims = draw.choice((1, 2, 2, 2, 3))
        longest = {1: 30, 2: 14, 3: 6}[dims]
        groups = draw.choice((1, 1, 2, 3))
        into, out = groups * draw.randint(1, 2), groups * draw.randint(1, 2)
        kernel = tuple(draw.choice((1, 2, 3, 3, 4, 5, 7)) for _ in range(dims))
        stride = tuple(draw.choice((1, 1, 2, 3)) for _ in range(dims))
        dilation = tuple(draw.choice((1, 1, 2)) for _ in range(dims))
        sizes = tuple(draw.randint(1, longest) for _ in range(dims))
        padding = tuple(draw.choice((0, 1, k // 2, k)) for k in kernel)
        options = {"stride": stride, "dilation": dilation, "groups": groups, "bias": draw.random() < 0.5}
        if transposed:
            extra = tuple(draw.randint(0, max(s, d) - 1) for s, d in zip(stride, dilation, strict=True))
            kind = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)[dims - 1]
            layer = kind(into, out, kernel, padding=padding, output_padding=extra, **options)
        else:
            same = draw.random() < 0.2
            if same:
                options["stride"] = 1
            kind = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[dims - 1]
            layer = kind(into, out, kernel, padding="same" if same else padding, **options)
        try:
            with torch.no_grad():
                layer.double()(torch.zeros(2, into, *sizes, dtype=torch.float64))
        except RuntimeError:
            continue
        return placed(draw, ranks, layer, into, sizes)


class Net(nn.Module):
    """Skip connections, strides there and back, a concatenation, and a weight used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(2, 4, 3, padding=1)
        self.down = nn.Conv2d(4, 6, 4, stride=2, padding=1)
        self.middle = nn.Conv2d(6, 6, 3, padding=2, dilation=2)
        self.up = nn.ConvTranspose2d(6, 4, 2, stride=2)
        self.last = nn.Conv2d(8, 3, 1)
        self.scale = nn.Parameter(torch.rand(1, 6, 1, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a = F.relu(self.first(x), inplace=True)
        b = self.down(a)
        b = b + self.middle(torch.sigmoid(b)) * self.scale
        b = self.middle(b)
        c = self.up(b)
        return self.last(torch.cat([a, c], 1))


class Tailed(nn.Module):
    """A convolution whose weight is also used behind the gather, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 2, 3, padding=1, bias=False)
        self.head = nn.Linear(2 * 8 * 6, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.conv(x).tanh()
        if hasattr(y, "spatial"):
            y = y.gather()
        y = self.conv(y)
        return self.head(y.flatten(1))


def pooling(draw: random.Random, ranks: int) -> Case:
    """Windows with any padding, stride, dilation and rounding; averages and maxima over bins."""
    while True:
        dims = draw.choice((1, 2, 2, 3))
        sizes = tuple(draw.randint(1, {1: 30, 2: 14, 3: 6}[dims]) for _ in range(dims))
        kernel = tuple(draw.choice((1, 2, 3, 3, 5)) for _ in range(dims))
        stride = draw.choice((None, tuple(draw.choice((1, 2, 3)) for _ in range(dims))))
        padding = tuple(draw.randint(0, k // 2) for k in kernel)
        ceil = draw.random() < 0.5
        kind = draw.choice(("max", "max", "average", "average", "lp", "adaptive_average", "adaptive_max"))
        bins = tuple(draw.choice((1, 1, 2, None)) for _ in range(dims))
        if kind == "max":
            dilation = draw.choice((1, 1, 2))
            layer = getattr(nn, f"MaxPool{dims}d")(kernel, stride, padding, dilation, ceil_mode=ceil)
        elif kind == "average":
            include = draw.random() < 0.5
            if dims == 1:
                layer = nn.AvgPool1d(kernel, stride, padding, ceil, include)
            else:
                divisor = draw.choice((None, None, 3))
                layer = getattr(nn, f"AvgPool{dims}d")(kernel, stride, padding, ceil, include, divisor)
        elif kind == "lp":
            layer = getattr(nn, f"LPPool{dims}d")(2, kernel if dims > 1 else kernel[0], ceil_mode=ceil)
        else:
            name = "Avg" if kind == "adaptive_average" else "Max"
            layer = getattr(nn, f"Adaptive{name}Pool{dims}d")(bins if dims > 1 else bins[0] or 1)
        try:
            layer(torch.zeros(2, 3, *sizes, dtype=torch.float64))
        except RuntimeError:
            continue
        return placed(draw, ranks, layer, 3, sizes)
