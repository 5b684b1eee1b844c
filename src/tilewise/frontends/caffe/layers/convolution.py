"""Convolution and what undoes it, over one to three axes, and the unfolding of images into columns."""

from __future__ import annotations

import math
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tilewise.frontends.caffe.layers.base import Layer, Shape, Tops
from tilewise.frontends.caffe.layers.registry import register
from tilewise.frontends.caffe.layers.windows import kernel_sizes, window_sizes

__all__ = ["Convolution", "Deconvolution", "Im2col"]

CONVOLUTIONS: tuple[Any, ...] = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
TRANSPOSED: tuple[Any, ...] = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


@register("Convolution")
@register("ConvolutionDepthwise")
@register("DepthwiseConvolution")
class Convolution(Layer):
    """Convolution of (N, C, *sizes) with filters (num_output, C / group, *kernel_size), on any number of bottoms.

    The blobs are the filters and, unless ``bias_term`` is false, a bias (num_output,). ``conv`` is torch's module, so
    that :func:`tilewise.optimize` plans it. Axes before ``axis``, the channels', are all batch.
    """

    bottoms: ClassVar = (1, None)
    tops: ClassVar = (1, None)
    kinds: ClassVar[tuple[Any, ...]] = CONVOLUTIONS

    def build(self, parameter: Any, shapes: list[Shape]) -> None:
        p = parameter.convolution_param
        self.channel_axis = self.axis(p.axis, shapes[0])
        axes = len(shapes[0]) - self.channel_axis - 1
        if not 1 <= axes <= 3:
            self.fail(f"a bottom of shape {shapes[0]} has {axes} axes behind axis {self.channel_axis}; 1 to 3 would do")
        self.kernel = kernel_sizes(p, axes, self.fail)
        self.stride = window_sizes(p, "stride", "stride", axes, 1, self.fail)
        self.pad = window_sizes(p, "pad", "pad", axes, 0, self.fail)
        self.dilation = window_sizes(p, "dilation", "dilation", axes, 1, self.fail)
        self.channels, self.num_output, self.group = shapes[0][self.channel_axis], int(p.num_output), int(p.group)
        for name, values in (("stride", self.stride), ("dilation", self.dilation)):
            if min(values) < 1:
                self.fail(f"{name} = {list(values)}; at least 1 would do")
        if self.num_output < 1:
            self.fail(f"num_output = {self.num_output}; at least 1 would do")
        if self.group < 1 or self.channels % self.group or self.num_output % self.group:
            self.fail(
                f"group = {self.group} does not divide both {self.channels} channels and num_output = {self.num_output}"
            )
        self.conv = self.kinds[axes - 1](
            self.channels, self.num_output, self.kernel, self.stride, self.pad, dilation=self.dilation,
            groups=self.group, bias=p.bias_term, device="meta", dtype=torch.float32,
        )  # fmt: skip
        self.add_blob("weight", self.conv.weight.shape, p.weight_filler, "conv")
        if p.bias_term:
            self.add_blob("bias", (self.num_output,), p.bias_filler, "conv")

    def output_sizes(self, sizes: Shape) -> Shape:
        """The sizes of a top's axes behind the channels, for those of its bottom."""
        spans = [d * (k - 1) + 1 for k, d in zip(self.kernel, self.dilation, strict=True)]
        return tuple((n + 2 * p - x) // s + 1 for n, p, x, s in zip(sizes, self.pad, spans, self.stride, strict=True))

    def output_shapes(self, shapes: list[Shape]) -> list[Shape]:
        if len(shapes) != self.top_count:
            self.fail(f"it has {len(shapes)} bottoms and {self.top_count} tops; as many of both would do")
        found = []
        for shape in shapes:
            self.need_axes(shape, self.channel_axis + 1 + len(self.kernel))
            if shape[self.channel_axis] != self.channels:
                self.fail(
                    f"a bottom of shape {shape} has {shape[self.channel_axis]} channels; {self.channels}, for which "
                    f"its filters of shape {tuple(self.blob(0).shape)} are made, would do"
                )
            sizes = self.output_sizes(shape[self.channel_axis + 1 :])
            if min(sizes) < 1:
                self.fail(f"kernel_size = {list(self.kernel)} is larger than a padded bottom of shape {shape}")
            found.append((*shape[: self.channel_axis], self.num_output, *sizes))
        return found

    def forward(self, *bottoms: Tensor) -> Tops:
        """One top (N, num_output, *sizes) for each bottom."""
        found = [self._one(x) for x in bottoms]
        return found[0] if len(found) == 1 else tuple(found)

    def _one(self, x: Tensor) -> Tensor:
        if self.channel_axis == 1:
            return self._run(x)
        batch = x.shape[: self.channel_axis]
        y = self._run(x.reshape(math.prod(batch), *x.shape[self.channel_axis :]))
        return y.reshape(*batch, *y.shape[1:])

    def _run(self, x: Tensor) -> Tensor:
        found: Tensor = self.conv(x)
        return found


@register("Deconvolution")
class Deconvolution(Convolution):
    """Transposed convolution of (N, C, *sizes) with filters (C, num_output / group, *kernel_size)."""

    kinds: ClassVar[tuple[Any, ...]] = TRANSPOSED

    def output_sizes(self, sizes: Shape) -> Shape:
        spans = [d * (k - 1) + 1 for k, d in zip(self.kernel, self.dilation, strict=True)]
        return tuple(s * (n - 1) + x - 2 * p for n, p, x, s in zip(sizes, self.pad, spans, self.stride, strict=True))


@register("Im2col")
class Im2col(Layer):
    """The windows of (N, C, H, W) as columns: (N, C * kernel_h * kernel_w, rows of windows, columns of windows)."""

    def build(self, parameter: Any, shapes: list[Shape]) -> None:
        p = parameter.convolution_param
        self.need_axes(shapes[0], 4)
        self.kernel = kernel_sizes(p, 2, self.fail)
        self.stride = window_sizes(p, "stride", "stride", 2, 1, self.fail)
        self.pad = window_sizes(p, "pad", "pad", 2, 0, self.fail)
        self.dilation = window_sizes(p, "dilation", "dilation", 2, 1, self.fail)
        if min(*self.stride, *self.dilation) < 1:
            self.fail(f"stride = {list(self.stride)}, dilation = {list(self.dilation)}; at least 1 would do")

    def output_shapes(self, shapes: list[Shape]) -> list[Shape]:
        n, channels, *sizes = shapes[0]
        found = []
        for axis, size in enumerate(sizes):
            span = self.dilation[axis] * (self.kernel[axis] - 1) + 1
            found.append((size + 2 * self.pad[axis] - span) // self.stride[axis] + 1)
        if min(found) < 1:
            self.fail(f"kernel_size = {list(self.kernel)} is larger than a padded bottom of shape {shapes[0]}")
        return [(n, channels * math.prod(self.kernel), *found)]

    def forward(self, x: Tensor) -> Tensor:
        """The columns of ``x``."""
        (shape,) = self.output_shapes([tuple(x.shape)])
        columns = F.unfold(x, self.kernel, self.dilation, self.pad, self.stride)
        return columns.reshape(shape)
