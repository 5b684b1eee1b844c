"""Norms, interpolations, paddings and shuffles drawn for tests."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
from tests.distributed.models import Case, placed
from torch import nn
from torch.nn import functional as F


class Call(nn.Module):
    """A function of torch with arguments of its own, and parameters by name."""

    def __init__(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> None:
        super().__init__()
        self.function, self.args = function, args
        self.plain = {k: v for k, v in kwargs.items() if not isinstance(v, nn.Parameter)}
        self.weights = nn.ParameterDict({k: v for k, v in kwargs.items() if isinstance(v, nn.Parameter)})

    def forward(self, x: torch.Tensor) -> Any:
        return self.function(x, *self.args, **self.plain, **self.weights)

    def extra_repr(self) -> str:
        return f"{self.function.__name__} {self.args} {self.plain}"


class ChannelsLast(nn.Module):
    """A layer over channels that come last."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: torch.Tensor) -> Any:
        return self.layer(x.movedim(1, -1)).movedim(-1, 1)


def sizes_of(draw: random.Random, dims: int, least: int = 1) -> tuple[int, ...]:
    return tuple(draw.randint(least, {1: 30, 2: 12, 3: 6}[dims]) for _ in range(dims))


def _norm(draw: random.Random, dims: int, channels: int, sizes: tuple[int, ...]) -> nn.Module:
    affine, track = draw.random() < 0.7, draw.random() < 0.7
    kind = draw.choice(("batch", "batch", "batch", "group", "group", "instance", "instance", "layer", "rms", "rest"))
    if kind == "batch":
        momentum = draw.choice((0.1, 0.3, None))
        return getattr(nn, f"BatchNorm{dims}d")(
            channels, affine=affine, momentum=momentum, track_running_stats=track, eps=draw.choice((1e-5, 0.1))
        )
    if kind == "group":
        return nn.GroupNorm(draw.choice((1, 2, channels)), channels, affine=affine)
    if kind == "instance":
        return getattr(nn, f"InstanceNorm{dims}d")(channels, affine=affine, track_running_stats=track)
    over = (channels, *sizes)[draw.randint(0, dims) :]
    if kind == "layer":
        last = draw.random() < 0.4
        layer = nn.LayerNorm(channels if last else over, elementwise_affine=affine, bias=draw.random() < 0.5)
        return ChannelsLast(layer) if last else layer
    if kind == "rms":
        last = draw.random() < 0.4
        norm = nn.RMSNorm(channels if last else over, elementwise_affine=affine, eps=draw.choice((None, 1e-3)))
        return ChannelsLast(norm) if last else norm
    return draw.choice((nn.LocalResponseNorm(3), Call(F.normalize, dim=1)))


def norm(draw: random.Random, ranks: int) -> Case:
    """Any norm, far from zero or not, with or without weights and running statistics."""
    while True:
        dims = draw.choice((1, 2, 2, 3))
        channels, sizes = draw.choice((4, 6)), sizes_of(draw, dims)
        layer = _norm(draw, dims, channels, sizes).double()
        for p in layer.parameters():
            nn.init.uniform_(p, -1, 2)
        try:
            layer(torch.zeros(2, channels, *sizes, dtype=torch.float64))
        except ValueError:
            continue
        return placed(draw, ranks, layer, channels, sizes)


def interpolation(draw: random.Random, ranks: int) -> Case:
    """To any size or by any factor, all modes."""
    while True:
        case = _interpolation(draw, ranks)
        out = case.layer(torch.zeros(case.shape, dtype=torch.float64))
        # Of torch 2.13 on CPUs: antialiased images of width 1 have the first row in all rows, and those that keep their
        # size are copied, where backward is of a filter.
        if case.layer.plain.get("antialias") and (out.shape[-1] == 1 or out.shape == case.shape):
            continue
        # Where the nearest are nearly twice as many, torch's backward is not of its forward, but in two dimensions.
        doubled = any(m == 2 * n for n, m in zip(case.shape[2:], out.shape[2:], strict=True))
        if not (doubled and out.dim() != 4 and case.layer.plain["mode"] == "nearest"):
            return case


def _interpolation(draw: random.Random, ranks: int) -> Case:
    dims = draw.choice((1, 2, 2, 2, 3))
    sizes = sizes_of(draw, dims)
    smooth = ("linear", "bilinear", "trilinear")[dims - 1]
    mode = draw.choice(
        ("nearest", "nearest", "nearest-exact", smooth, smooth, "area", *(["bicubic"] * 2 * (dims == 2)))
    )
    options: dict[str, Any] = {"mode": mode}
    if mode in (smooth, "bicubic"):
        options["align_corners"] = draw.choice((None, False, True))
        if dims == 2:
            options["antialias"] = draw.random() < 0.3
            if options["antialias"] and draw.random() < 0.2:
                options["mode"], options["align_corners"] = "lanczos", None
    form = draw.choice(("size", "integer", "integer", "factor", "recomputed"))
    if form == "size":
        return placed(draw, ranks, Call(F.interpolate, sizes_of(draw, dims), **options), 2, sizes)
    factors = tuple(draw.choice((1, 2, 2, 3)) if form == "integer" else draw.uniform(0.4, 2.6) for _ in sizes)
    factors = tuple(max(f, 1 / n + 1e-9) for f, n in zip(factors, sizes, strict=True))
    if form == "recomputed":
        options["recompute_scale_factor"] = True
    same = draw.random() < 0.3
    given = max(factors) if same else factors
    return placed(draw, ranks, Call(F.interpolate, None, given, **options), 2, sizes)


def padding(draw: random.Random, ranks: int) -> Case:
    """All modes, also negative amounts, and convolutions that pad by them."""
    while True:
        dims = draw.choice((1, 2, 2, 3))
        sizes = sizes_of(draw, dims, 2)
        mode = draw.choice(("constant", "constant", "reflect", "replicate", "circular"))
        least = 0 if draw.random() < 0.6 else -3
        if draw.random() < 0.3:
            kind = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[dims - 1]
            layer: nn.Module = kind(
                2,
                3,
                draw.choice((2, 3)),
                draw.choice((1, 2)),
                draw.choice((1, 2)),
                padding_mode=mode.replace("constant", "zeros"),
            )
        else:
            amounts = [draw.randint(least, 4) for _ in range(2 * dims)]
            if mode == "constant":
                amounts = [*amounts, *(draw.randint(-1, 1) for _ in range(2))][
                    : draw.choice((2, 2 * dims, 2 * dims + 2))
                ]
                layer = Call(F.pad, amounts, mode, draw.choice((None, 1.5)))
            else:
                pairs = zip(amounts[::2], amounts[1::2], reversed(sizes), strict=True)
                if mode == "circular" and any(max(a, b) > n + min(a, 0) + min(b, 0) for a, b, n in pairs):
                    continue  # torch then reads what it writes
                layer = Call(F.pad, amounts, mode)
        try:
            out = layer.double()(torch.zeros(2, 2, *sizes, dtype=torch.float64))
        except (RuntimeError, AssertionError):
            continue
        if out.numel():
            return placed(draw, ranks, layer, 2, sizes)


def shuffle(draw: random.Random, ranks: int) -> Case:
    """There and back, and between channels."""
    sizes = tuple(draw.randint(1, 6) for _ in range(2))
    r = draw.choice((1, 2, 3))
    kind = draw.choice(("shuffle", "unshuffle", "channels"))
    if kind == "shuffle":
        return placed(draw, ranks, nn.PixelShuffle(r), 2 * r * r, sizes)
    if kind == "unshuffle":
        return placed(draw, ranks, nn.PixelUnshuffle(r), 2, tuple(r * size for size in sizes))
    return placed(draw, ranks, nn.ChannelShuffle(r), 2 * r, sizes)


class Patches(nn.Module):
    """Patches of an image, changed each by itself, and added up again."""

    def __init__(self, channels: int, back: bool, kernel: tuple[int, int], **options: Any) -> None:
        super().__init__()
        self.back, self.kernel, self.options = back, kernel, options
        self.line = nn.Linear(channels * kernel[0] * kernel[1], channels * kernel[0] * kernel[1])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        patches = F.unfold(x, self.kernel, **self.options)
        patches = self.line(patches.transpose(1, 2)).tanh().transpose(1, 2)
        return F.fold(patches, x.shape[-2:], self.kernel, **self.options) if self.back else patches

    def extra_repr(self) -> str:
        return f"{self.kernel} {self.options} back={self.back}"


def patches(draw: random.Random, ranks: int) -> Case:
    """Of any kernel, stride, dilation and padding, of an image that is cut in rows."""
    while True:
        sizes, kernel = sizes_of(draw, 2), (draw.choice((1, 2, 3)), draw.choice((1, 2, 3)))
        options = {
            name: tuple(draw.choice(values) for _ in kernel)
            for name, values in (("stride", (1, 2, 3, 4)), ("dilation", (1, 1, 2)), ("padding", (0, 1, 2)))
        }
        layer = Patches(2, draw.random() < 0.6, kernel, **options).double()
        try:
            with torch.no_grad():
                layer(torch.zeros(2, 2, *sizes, dtype=torch.float64))
        except RuntimeError:
            continue
        return placed(draw, ranks, layer, 2, sizes, ((ranks,), ("h",)))
