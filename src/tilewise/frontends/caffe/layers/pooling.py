"""Pooling over windows and what is built on it, with the sizes and divisors that Caffe has."""

from __future__ import annotations

import math
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tilewise.frontends.caffe.layers.base import Layer, Shape, Tops, choice
from tilewise.frontends.caffe.layers.registry import register
from tilewise.frontends.caffe.layers.windows import Fail, pair, pooled_size

__all__ = ["Pooling", "SpatialPyramid", "Upsample", "Windows"]


class Windows(NamedTuple):
    """Windows over the two last axes of (N, C, H, W)."""

    kernel: tuple[int, int]
    stride: tuple[int, int]
    pad: tuple[int, int]
    ceil: bool = True

    def check(self, fail: Fail) -> None:
        """Call ``fail`` where the fields do not fit together."""
        if min(self.kernel) < 1 or min(self.stride) < 1:
            fail(f"kernel_size = {list(self.kernel)}, stride = {list(self.stride)}; at least 1 would do")
        if any(p >= k for p, k in zip(self.pad, self.kernel, strict=True)):
            fail(f"pad = {list(self.pad)}; less than kernel_size = {list(self.kernel)} would do")

    def counts(self, sizes: Shape) -> tuple[int, int]:
        """How many windows there are along each axis of ``sizes``."""
        height, width = (
            pooled_size(size, kernel, stride, pad, any_pad=max(self.pad) > 0, ceil=self.ceil)
            for size, kernel, stride, pad in zip(sizes, self.kernel, self.stride, self.pad, strict=True)
        )
        return height, width

    def as_torchs(self, sizes: Shape) -> bool:
        """Whether torch's pooling has the same windows: it never begins one beyond the input, nor pads by more."""
        counts = (
            pooled_size(size, kernel, stride, pad, any_pad=True, ceil=self.ceil)
            for size, kernel, stride, pad in zip(sizes, self.kernel, self.stride, self.pad, strict=True)
        )
        few = all(2 * pad <= kernel for pad, kernel in zip(self.pad, self.kernel, strict=True))
        return few and tuple(counts) == self.counts(sizes)

    def padded(self, x: Tensor, value: float) -> Tensor:
        """``x`` with as much padding as the windows reach, and no more."""
        sides: list[int] = []
        for size, count, kernel, stride, pad in reversed(
            list(zip(x.shape[2:], self.counts(tuple(x.shape[2:])), self.kernel, self.stride, self.pad, strict=True))
        ):
            sides += [pad, (count - 1) * stride + kernel - pad - size]
        return F.pad(x, sides, value=value)

    def maxima(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The largest value of each window, and its place in the plane: row times width plus column."""
        if self.as_torchs(tuple(x.shape[2:])):
            return F.max_pool2d(x, self.kernel, self.stride, self.pad, ceil_mode=self.ceil, return_indices=True)
        padded = self.padded(x, torch.finfo(x.dtype).min)
        found, places = F.max_pool2d(padded, self.kernel, self.stride, return_indices=True)
        width = padded.shape[3]
        rows, columns = places // width - self.pad[0], places % width - self.pad[1]
        return found, rows * x.shape[3] + columns

    def maximum(self, x: Tensor) -> Tensor:
        """The largest value of each window."""
        if self.as_torchs(tuple(x.shape[2:])):
            return F.max_pool2d(x, self.kernel, self.stride, self.pad, ceil_mode=self.ceil)
        return F.max_pool2d(self.padded(x, torch.finfo(x.dtype).min), self.kernel, self.stride)

    def average(self, x: Tensor) -> Tensor:
        """The mean of each window. Its divisor counts the padding, but nothing beyond it."""
        sizes = tuple(x.shape[2:])
        if self.as_torchs(sizes):
            return F.avg_pool2d(x, self.kernel, self.stride, self.pad, self.ceil, count_include_pad=True)
        sums = F.avg_pool2d(self.padded(x, 0.0), self.kernel, self.stride, divisor_override=1)
        spans = []
        for size, count, kernel, stride, pad in zip(
            sizes, self.counts(sizes), self.kernel, self.stride, self.pad, strict=True
        ):
            starts = torch.arange(count, dtype=torch.int64, device=x.device) * stride - pad
            spans.append(((starts + kernel).clamp_max(size + pad) - starts).clamp_min(1))
        return sums / (spans[0][:, None] * spans[1]).to(x.dtype)

    def columns(self, x: Tensor) -> Tensor:
        """The values of each window along a last axis: (N, C, rows, columns, kernel), zeros beyond the input."""
        unfolded = (
            self.padded(x, 0.0).unfold(2, self.kernel[0], self.stride[0]).unfold(3, self.kernel[1], self.stride[1])
        )
        return unfolded.flatten(4)

    def drawn(self, x: Tensor) -> Tensor:
        """A value of each window, drawn with a probability in proportion to it. Values must not be negative."""
        windows = self.columns(x)
        sums = windows.detach().cumsum(-1)
        thresholds = torch.rand_like(sums[..., :1]) * sums[..., -1:]
        places = (sums < thresholds).sum(-1, keepdim=True).clamp_max(windows.shape[-1] - 1)
        return windows.gather(-1, places).squeeze(-1)

    def weighted(self, x: Tensor) -> Tensor:
        """The mean of each window's values, weighted by themselves: what :meth:`drawn` gives on average."""
        windows = self.columns(x)
        return windows.square().sum(-1) / windows.sum(-1).clamp_min(torch.finfo(torch.float32).tiny)


@register("Pooling")
class Pooling(Layer):
    """The largest value, the mean or a random value of each window of (N, C, H, W).

    A second top has the places of the largest values, as numbers in the plane. Stochastic pooling takes the mean
    weighted by the values in evaluation (Zeiler & Fergus 2013). Where torch's pooling has the same windows torch's
    module computes, so that :func:`tilewise.optimize` plans it.
    """

    tops: ClassVar = (1, 2)

    def build(self, parameter: Any, shapes: list[Shape]) -> None:
        p = parameter.pooling_param
        self.need_axes(shapes[0], 4)
        self.method = choice(p, "pool")
        self.everywhere = bool(p.global_pooling)
        ceil = choice(p, "round_mode") == "CEIL"
        stride, pad = pair(p, "stride", "stride", self.fail), pair(p, "pad", "pad", self.fail)
        if self.everywhere:
            if any(p.HasField(name) for name in ("kernel_size", "kernel_h", "kernel_w")):
                self.fail("global_pooling takes no kernel_size")
            if stride != (1, 1) or pad != (0, 0):
                self.fail(f"global_pooling takes stride = 1 and pad = 0, not {list(stride)} and {list(pad)}")
            kernel = (1, 1)
        else:
            kernel = pair(p, "kernel_size", "kernel", self.fail)
        self.windows = Windows(kernel, stride, pad, ceil)
        self.windows.check(self.fail)
        if self.method == "MAX":
            self.pool: nn.Module = nn.MaxPool2d(kernel, stride, pad, ceil_mode=ceil)
        else:
            self.pool = nn.AvgPool2d(kernel, stride, pad, ceil)
        if self.method == "STOCHASTIC" and pad != (0, 0):
            self.fail(f"pad = {list(pad)}: stochastic pooling takes none")
        if self.top_count == 2 and self.method != "MAX":
            self.fail(f"pool = {self.method} has one top; a second one has the places of pool = MAX")

    def _windows(self, sizes: Shape) -> Windows:
        return self.windows._replace(kernel=(sizes[0], sizes[1])) if self.everywhere else self.windows

    def output_shapes(self, shapes: list[Shape]) -> list[Shape]:
        self.need_axes(shapes[0], 4)
        counts = self._windows(shapes[0][2:]).counts(shapes[0][2:])
        if min(counts) < 1:
            self.fail(f"kernel_size = {list(self.windows.kernel)} is larger than a bottom of shape {shapes[0]}")
        return [(*shapes[0][:2], *counts)] * self.top_count

    def forward(self, x: Tensor) -> Tops:
        """The pooled tensor, and with a second top the places as numbers of ``x``'s type."""
        windows = self._windows(tuple(x.shape[2:]))
        same = not self.everywhere and self.top_count == 1 and windows.as_torchs(tuple(x.shape[2:]))
        if same and self.method != "STOCHASTIC":
            y: Tensor = self.pool(x)
            return y
        if self.method == "AVE":
            return windows.average(x)
        if self.method == "STOCHASTIC":
            return windows.drawn(x) if self.training else windows.weighted(x)
        if self.top_count == 1:
            return windows.maximum(x)
        found, places = windows.maxima(x)
        return found, places.to(x.dtype)


@register("SPP")
class SpatialPyramid(Layer):
    """Pooling over 1, 2 x 2, 4 x 4 ... windows that cover the image, one row for each image (He et al. 2014)."""

    def build(self, parameter: Any, shapes: list[Shape]) -> None:
        p = parameter.spp_param
        self.need_axes(shapes[0], 4)
        self.height, self.method = int(p.pyramid_height), choice(p, "pool")
        if not 1 <= self.height <= 16:
            self.fail(f"pyramid_height = {self.height}; 1 to 16 would do")
        if self.method == "STOCHASTIC":
            self.fail("pool = STOCHASTIC; MAX or AVE would do")

    def _levels(self, sizes: Shape) -> list[Windows]:
        levels = []
        for level in range(self.height):
            bins = 2**level
            kernel = tuple(math.ceil(size / bins) for size in sizes)
            pad = tuple((k * bins - size + 1) // 2 for k, size in zip(kernel, sizes, strict=True))
            levels.append(Windows((kernel[0], kernel[1]), (kernel[0], kernel[1]), (pad[0], pad[1])))
            levels[-1].check(self.fail)
        return levels

    def output_shapes(self, shapes: list[Shape]) -> list[Shape]:
        n, channels, *sizes = shapes[0]
        counts = [math.prod(windows.counts(tuple(sizes))) for windows in self._levels(tuple(sizes))]
        return [(n, channels * sum(counts))] if self.height > 1 else [(n, channels, 1, 1)]

    def forward(self, x: Tensor) -> Tensor:
        """The pooled values of all levels, (N, C times the number of windows)."""
        levels = self._levels(tuple(x.shape[2:]))
        found = [windows.maximum(x) if self.method == "MAX" else windows.average(x) for windows in levels]
        return torch.cat([level.flatten(1) for level in found], 1) if len(found) > 1 else found[0]


@register("Upsample")
class Upsample(Layer):
    """Values put back to the places where pooling found them, zeros elsewhere (SegNet).

    The second bottom has the places, as the second top of a ``Pooling`` layer.
    """

    bottoms: ClassVar = (2, 2)

    def build(self, parameter: Any, shapes: list[Shape]) -> None:
        p = parameter.upsample_param
        self.sizes = (int(p.upsample_h), int(p.upsample_w))
        self.scale = (int(p.scale_h or p.scale), int(p.scale_w or p.scale))
        self.pad_out = (bool(p.pad_out_h), bool(p.pad_out_w))
        if min(self.scale) < 1:
            self.fail(f"scale = {list(self.scale)}; at least 1 would do")

    def output_shapes(self, shapes: list[Shape]) -> list[Shape]:
        self.need_axes(shapes[0], 4)
        self.need_equal(shapes)
        sizes = [
            asked or size * scale - pad
            for size, asked, scale, pad in zip(shapes[0][2:], self.sizes, self.scale, self.pad_out, strict=True)
        ]
        if any(new < old for new, old in zip(sizes, shapes[0][2:], strict=True)):
            self.fail(f"the top's sizes {sizes} are smaller than the bottom's, {list(shapes[0][2:])}")
        return [(*shapes[0][:2], *sizes)]

    def forward(self, x: Tensor, places: Tensor) -> Tensor:
        """``x`` at ``places`` of planes of zeros."""
        (shape,) = self.output_shapes([tuple(x.shape), tuple(places.shape)])
        planes = x.new_zeros((*shape[:2], shape[2] * shape[3]))
        return planes.scatter(2, places.flatten(2).to(torch.int64), x.flatten(2)).reshape(shape)
