"""Layers that normalise, and those that scale and shift by a blob or a bottom."""

from __future__ import annotations

import math
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from tilewise.frontends.caffe.layers.base import Layer, Shape, choice
from tilewise.frontends.caffe.layers.pooling import Windows
from tilewise.frontends.caffe.layers.registry import register

__all__ = ["BN", "LRN", "MVN", "BatchNorm", "Bias", "Normalize", "Scale"]


def power_below(x: Tensor, beta: float) -> Tensor:
    """x ** -beta. The usual 0.75 goes by roots, several times faster than a power on a CPU."""
    if beta == 0.75:
        root = x.rsqrt()
        return root * root.sqrt()
    return x.pow(-beta)


@register("LRN")
class LRN(Layer):
    """Local response normalisation of (N, C, H, W) (Krizhevsky et al. 2012, section 3.3).

    Across channels each element is divided by (k + alpha / n * sum of n squares) ** beta. Within a channel the squares
    are those of a square of side n, zeros beyond the image, and k is 1. Across channels it is torch's module, so that
    :func:`tilewise.optimize` plans it.
    """

    def build(self, parameter: Any, shapes: list[Shape]) -> None:
        p = parameter.lrn_param
        self.size, self.alpha, self.beta, self.k = int(p.local_size), float(p.alpha), float(p.beta), float(p.k)
        self.across = choice(p, "norm_region") == "ACROSS_CHANNELS"
        self.need_axes(shapes[0], 4)
        if self.size % 2 == 0:
            self.fail(f"local_size = {self.size}; an odd number would do")
        if self.across:
            self.norm = nn.LocalResponseNorm(self.size, self.alpha, self.beta, self.k)

    def output_shapes(self, shapes: list[Shape]) -> list[Shape]:
        self.need_axes(shapes[0], 4)
        return shapes[:1]

    def forward(self, x: Tensor) -> Tensor:
        if self.across:
            y: Tensor = self.norm(x)
            return y
        side, pad = (self.size, self.size), (self.size // 2, self.size // 2)
        means = Windows(side, (1, 1), pad).average(x.square())
        return x * power_below(1 + self.alpha * means, self.beta)


@register("BatchNorm")
class BatchNorm(Layer):
    """(x - mean) / sqrt(var + eps), each channel for itself (Ioffe & Szegedy 2015), with nothing learned.

    The blobs are sums of means and of variances, and a third one that both are divided by; 0 there means that both are
    0. In training means and variances are those of the batch, and the blobs become ``moving_average_fraction`` times
    what they were, plus those of the batch.
    """

    mean: nn.Parameter
    variance: nn.Parameter
    factor: nn.Parameter

    def build(self, parameter: Any, shapes: list[Shape]) -> None:
        p = parameter.batch_norm_param
        self.channels = shapes[0][1] if len(shapes[0]) > 1 else 1
        self.fraction, self.eps = float(p.moving_average_fraction), float(p.eps)
        self.use_global = bool(p.use_global_stats) if p.HasField("use_global_stats") else None
        self.update = bool(p.update_global_stats) if p.HasField("update_global_stats") else True
        for name, shape in (("mean", (self.channels,)), ("variance", (self.channels,)), ("factor", (1,))):
            self.add_blob(name, shape, 0.0, fixed=True)

    def output_shapes(self, shapes: list[Shape]) -> list[Shape]:
        if (shapes[0][1] if len(shapes[0]) > 1 else 1) != self.channels:
            self.fail(f"a bottom has shape {shapes[0]}; {self.channels} channels would do")
        return shapes[:1]

    def forward(self, x: Tensor) -> Tensor:
        rows = x if x.dim() > 1 else x[:, None]
        if self.use_global if self.use_global is not None else not self.training:
            with torch.no_grad():
                factor = torch.where(self.factor == 0, torch.zeros_like(self.factor), 1 / self.factor)
                mean, variance = self.mean * factor, self.variance * factor
            y = torch.batch_norm(rows, None, None, mean, variance, False, 0.0, self.eps, False)
        else:
            mean, variance = (torch.zeros_like(self.mean) for _ in range(2))
            # With a momentum of 1 torch leaves the batch's mean and unbiased variance there.
            y = torch.batch_norm(rows, None, None, mean, variance, True, 1.0, self.eps, False)
            if self.update:
                self._remember(mean, variance, rows.numel() // self.channels)
        return y.reshape(x.shape)

    @torch.no_grad()
    def _remember(self, mean: Tensor, variance: Tensor, count: int) -> None:
        self.factor.mul_(self.fraction).add_(1)
        self.mean.mul_(self.fraction).add_(mean)
        self.variance.mul_(self.fraction).add_(variance if count > 1 else torch.zeros_like(variance))


@register("BN")
class BN(Layer):
    """Batch normalisation of forks, with a learned scale and shift in the same layer.

    PSPNet's and DeepLab's has four blobs (1, C, 1, 1): scale, shift, running mean and running variance, in training
    ``momentum`` times what they were plus the rest of the batch's. SegNet's has scale and shift only: it takes the
    batch's mean and variance in both phases, and with ``bn_mode: INFERENCE`` neither, since both are then merged into
    the blobs. Which one a network means its fields tell: ``scale_filler``, ``shift_filler`` and ``bn_mode`` are
    SegNet's.
    """

    weight: nn.Parameter
    bias: nn.Parameter
    mean: nn.Parameter
    variance: nn.Parameter

    def build(self, parameter: Any, shapes: list[Shape]) -> None:
        p = parameter.bn_param
        if len(shapes[0]) < 2:
            self.fail(f"a bottom has shape {shapes[0]}; two axes or more would do")
        self.segnet = any(p.HasField(name) for name in ("scale_filler", "shift_filler", "bn_mode"))
        self.merged = self.segnet and choice(p, "bn_mode") == "INFERENCE"
        self.momentum, self.frozen = float(p.momentum), bool(p.frozen)
        self.eps = 1e-9 if self.segnet else float(p.eps)
        shape = (1, shapes[0][1], 1, 1)
        names = ("scale_filler", "shift_filler") if self.segnet else ("slope_filler", "bias_filler")
        for name, filler, value in zip(("weight", "bias"), names, (1.0, 0.0), strict=True):
            self.add_blob(name, shape, getattr(p, filler) if p.HasField(filler) else value)
        if not self.segnet:
            self.add_blob("mean", shape, 0.0, fixed=True)
            self.add_blob("variance", shape, 1.0, fixed=True)

    def output_shapes(self, shapes: list[Shape]) -> list[Shape]:
        if len(shapes[0]) < 2 or shapes[0][1] != self.weight.shape[1]:
            self.fail(f"a bottom has shape {shapes[0]}; {self.weight.shape[1]} channels would do")
        return shapes[:1]

    def forward(self, x: Tensor) -> Tensor:
        weight, bias = self.weight.flatten(), self.bias.flatten()
        if self.merged:
            shape = (-1,) + (1,) * (x.dim() - 2)
            return x * weight.reshape(shape) + bias.reshape(shape)
        if not self.segnet and (self.frozen or not self.training):
            mean, variance = self.mean.detach().flatten(), self.variance.detach().flatten()
            return torch.batch_norm(x, weight, bias, mean, variance, False, 0.0, self.eps, False)
        mean, variance = (torch.zeros_like(weight, requires_grad=False) for _ in range(2))
        y = torch.batch_norm(x, weight, bias, mean, variance, True, 1.0, self.eps, False)
        if not self.segnet and self.training:
            with torch.no_grad():
                count = x.numel() // x.shape[1]
                biased = variance * ((count - 1) / count) if count > 1 else torch.zeros_like(variance)
                for running, batch in ((self.mean, mean), (self.variance, biased)):
                    running.mul_(self.momentum).add_(batch.reshape(running.shape), alpha=1 - self.momentum)
        return y


class Broadcast(Layer):
    """What scales and shifts have in common: a blob or a second bottom that is repeated along the other axes."""

    bottoms: ClassVar = (1, 2)

    def place(self, p: Any, shapes: list[Shape]) -> Shape:
        """Remember which axes the operand has, and return its shape."""
        if len(shapes) == 2:
            self.axes = len(shapes[1])
        else:
            if p.num_axes < -1:
                self.fail(f"num_axes = {p.num_axes}; -1 or more would do")
            first = self.axis(p.axis, shapes[0]) if p.num_axes else 0
            self.axes = len(shapes[0]) - first if p.num_axes == -1 else int(p.num_axes)
        # What has no axes is repeated along all of them, whatever axis says.
        self.first = self.axis(p.axis, shapes[0]) if self.axes else 0
        if self.first + self.axes > len(shapes[0]):
            self.fail(f"axis = {self.first} and {self.axes} axes reach beyond a bottom of shape {shapes[0]}")
        return shapes[0][self.first : self.first + self.axes]

    def output_shapes(self, shapes: list[Shape]) -> list[Shape]:
        wanted = shapes[1] if len(shapes) == 2 else tuple(self.blob(0).shape)
        if shapes[0][self.first : self.first + self.axes] != wanted:
            self.fail(f"a bottom of shape {shapes[0]} does not have the sizes {wanted} from axis {self.first} on")
        return shapes[:1]

    def spread(self, operand: Tensor, x: Tensor) -> Tensor:
        """``operand`` with axes of size 1 behind its own, so that it fits to ``x``."""
        return operand.reshape(*operand.shape, *(1,) * (x.dim() - self.first - self.axes))


@register("Scale")
class Scale(Broadcast):
    """x times a blob, or times the second bottom, whose axes are those of x from ``axis`` on; plus a bias."""

    weight: nn.Parameter
    bias: nn.Parameter

    def build(self, parameter: Any, shapes: list[Shape]) -> None:
        p = parameter.scale_param
        shape = self.place(p, shapes)
        self.learned, self.has_bias = len(shapes) == 1, bool(p.bias_term)
        if self.learned:
            self.add_blob("weight", shape, p.filler if p.HasField("filler") else 1.0)
        if self.has_bias:
            self.add_blob("bias", shape, p.bias_filler)

    def forward(self, x: Tensor, factor: Tensor | None = None) -> Tensor:
        y = x * self.spread(self.weight if factor is None else factor, x)
        return y + self.spread(self.bias, x) if self.has_bias else y


@register("Bias")
class Bias(Broadcast):
    """x plus a blob, or plus the second bottom, whose axes are those of x from ``axis`` on."""

    bias: nn.Parameter

    def build(self, parameter: Any, shapes: list[Shape]) -> None:
        shape = self.place(parameter.bias_param, shapes)
        if len(shapes) == 1:
            self.add_blob("bias", shape, parameter.bias_param.filler)

    def forward(self, x: Tensor, term: Tensor | None = None) -> Tensor:
        return x + self.spread(self.bias if term is None else term, x)


@register("MVN")
class MVN(Layer):
    """x minus its mean, divided by its standard deviation plus eps: of each channel of each image, or of each image."""

    def build(self, parameter: Any, shapes: list[Shape]) -> None:
        p = parameter.mvn_param
        if len(shapes[0]) < 2:
            self.fail(f"a bottom has shape {shapes[0]}; two axes or more would do")
        self.first = 1 if p.across_channels else 2
        self.divide, self.eps = bool(p.normalize_variance), float(p.eps)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(math.prod(x.shape[: self.first]), -1)
        rows = rows - rows.mean(1, keepdim=True)
        if self.divide:
            # The root of 0 has no gradient: of a constant row the quotient is 0 and so is its gradient.
            variance = rows.square().mean(1, keepdim=True)
            flat = variance == 0
            rows = rows / (torch.where(flat, torch.ones_like(variance), variance).sqrt() * ~flat + self.eps)
        return rows.reshape(x.shape)


@register("Normalize")
class Normalize(Layer):
    """x divided by its Euclidean length, times a learned scale (Liu et al. 2016, SSD).

    The length is that of all of an image, or with ``across_spatial: false`` that of the channels at each place.
    """

    weight: nn.Parameter

    def build(self, parameter: Any, shapes: list[Shape]) -> None:
        p = parameter.norm_param
        self.need_axes(shapes[0], 4)
        self.everywhere, self.eps = bool(p.across_spatial), float(p.eps)
        shape = () if p.channel_shared else (shapes[0][1],)
        self.add_blob("weight", shape, p.scale_filler if p.HasField("scale_filler") else 1.0)

    def output_shapes(self, shapes: list[Shape]) -> list[Shape]:
        self.need_axes(shapes[0], 4)
        if self.weight.dim() and shapes[0][1] != self.weight.shape[0]:
            self.fail(f"a bottom has shape {shapes[0]}; {self.weight.shape[0]} channels would do")
        return shapes[:1]

    def forward(self, x: Tensor) -> Tensor:
        axes = (1, 2, 3) if self.everywhere else (1,)
        y = x / (x.square().sum(axes, keepdim=True) + self.eps).sqrt()
        return y * self.weight.reshape(1, -1, 1, 1)
