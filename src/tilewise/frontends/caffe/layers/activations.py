"""Layers that treat each element by itself, and dropout and softmax."""

from __future__ import annotations

import math
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tilewise.frontends.caffe.layers.base import Layer, Shape
from tilewise.frontends.caffe.layers.registry import register

__all__ = [
    "BNLL", "ELU", "AbsVal", "Clip", "Dropout", "Exp", "Log", "PReLU", "Power", "ReLU", "ReLU6", "Sigmoid", "Softmax",
    "Swish", "TanH", "Threshold",
]  # fmt: skip


@register("ReLU")
class ReLU(Layer):
    """max(x, 0) + negative_slope * min(x, 0) (Nair & Hinton 2010)."""

    def build(self, parameter: Any, shapes: list[Shape]) -> None:
        self.slope = float(parameter.relu_param.negative_slope)

    def forward(self, x: Tensor) -> Tensor:
        return F.leaky_relu(x, self.slope) if self.slope else F.relu(x)


@register("ReLU6")
class ReLU6(Layer):
    """min(max(x, 0), 6) + negative_slope * min(x, 0)."""

    def build(self, parameter: Any, shapes: list[Shape]) -> None:
        self.slope = float(parameter.relu6_param.negative_slope)

    def forward(self, x: Tensor) -> Tensor:
        found = F.relu6(x)
        return found + self.slope * x.clamp_max(0) if self.slope else found


@register("PReLU")
class PReLU(Layer):
    """max(x, 0) + a * min(x, 0), with one ``a`` for each channel or, ``channel_shared``, for all (He et al. 2015)."""

    weight: nn.Parameter

    def build(self, parameter: Any, shapes: list[Shape]) -> None:
        p = parameter.prelu_param
        if len(shapes[0]) < 2:
            self.fail(f"a bottom has shape {shapes[0]}; two axes or more would do")
        self.shared = bool(p.channel_shared)
        shape = () if self.shared else (shapes[0][1],)
        self.add_blob("weight", shape, p.filler if p.HasField("filler") else 0.25)

    def output_shapes(self, shapes: list[Shape]) -> list[Shape]:
        if not self.shared and (len(shapes[0]) < 2 or shapes[0][1] != self.weight.shape[0]):
            self.fail(f"a bottom has shape {shapes[0]}; {self.weight.shape[0]} channels would do")
        return shapes[:1]

    def forward(self, x: Tensor) -> Tensor:
        return F.prelu(x, self.weight.reshape(-1))


@register("ELU")
class ELU(Layer):
    """x where it is positive, alpha * (exp(x) - 1) elsewhere (Clevert et al. 2015)."""

    def build(self, parameter: Any, shapes: list[Shape]) -> None:
        self.alpha = float(parameter.elu_param.alpha)

    def forward(self, x: Tensor) -> Tensor:
        return F.elu(x, self.alpha)


@register("Sigmoid")
class Sigmoid(Layer):
    """1 / (1 + exp(-x))."""

    def forward(self, x: Tensor) -> Tensor:
        return x.sigmoid()


@register("TanH")
class TanH(Layer):
    """tanh(x)."""

    def forward(self, x: Tensor) -> Tensor:
        return x.tanh()


@register("Swish")
class Swish(Layer):
    """x / (1 + exp(-beta * x)) (Ramachandran et al. 2017)."""

    def build(self, parameter: Any, shapes: list[Shape]) -> None:
        self.beta = float(parameter.swish_param.beta)

    def forward(self, x: Tensor) -> Tensor:
        return x * (self.beta * x).sigmoid()


@register("AbsVal")
class AbsVal(Layer):
    """|x|."""

    def forward(self, x: Tensor) -> Tensor:
        return x.abs()


@register("BNLL")
class BNLL(Layer):
    """log(1 + exp(x)), the binomial normal log likelihood."""

    def forward(self, x: Tensor) -> Tensor:
        return F.softplus(x, threshold=50)


@register("Power")
class Power(Layer):
    """(shift + scale * x) ** power."""

    def build(self, parameter: Any, shapes: list[Shape]) -> None:
        p = parameter.power_param
        self.power, self.scale, self.shift = float(p.power), float(p.scale), float(p.shift)

    def forward(self, x: Tensor) -> Tensor:
        if self.power * self.scale == 0:
            # A constant: no gradient comes from it, whatever x is.
            return x * 0 + (1.0 if self.power == 0 else self.shift**self.power)
        inner = x if self.scale == 1 else x * self.scale
        inner = inner + self.shift if self.shift else inner
        return inner if self.power == 1 else inner.pow(self.power)


@register("Exp")
class Exp(Layer):
    """base ** (shift + scale * x); a base of -1 is e."""

    def build(self, parameter: Any, shapes: list[Shape]) -> None:
        p = parameter.exp_param
        if p.base != -1 and not p.base > 0:
            self.fail(f"base = {p.base}; a positive number, or -1 for e, would do")
        base = 1.0 if p.base == -1 else math.log(p.base)
        self.scale, self.shift = float(p.scale) * base, float(p.shift) * base

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.scale + self.shift).exp()


@register("Log")
class Log(Layer):
    """The logarithm of shift + scale * x to ``base``; a base of -1 is e."""

    def build(self, parameter: Any, shapes: list[Shape]) -> None:
        p = parameter.log_param
        if p.base != -1 and (not p.base > 0 or p.base == 1):
            self.fail(f"base = {p.base}; a positive number other than 1, or -1 for e, would do")
        self.factor = 1.0 if p.base == -1 else 1 / math.log(p.base)
        self.scale, self.shift = float(p.scale), float(p.shift)

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.scale + self.shift).log() * self.factor


@register("Threshold")
class Threshold(Layer):
    """1 where x is above ``threshold``, 0 elsewhere. No gradient goes through it."""

    constant: ClassVar = True

    def build(self, parameter: Any, shapes: list[Shape]) -> None:
        self.threshold = float(parameter.threshold_param.threshold)

    def forward(self, x: Tensor) -> Tensor:
        return (x > self.threshold).to(x.dtype)


@register("Clip")
class Clip(Layer):
    """x, but at least ``min`` and at most ``max``."""

    def build(self, parameter: Any, shapes: list[Shape]) -> None:
        p = parameter.clip_param
        if not p.min <= p.max:
            self.fail(f"min = {p.min} is above max = {p.max}")
        self.least, self.most = float(p.min), float(p.max)

    def forward(self, x: Tensor) -> Tensor:
        return x.clamp(self.least, self.most)


@register("Dropout")
class Dropout(Layer):
    """In training a random share ``dropout_ratio`` of the elements is 0, the others are scaled up (Hinton et al. 2012).

    Forks' ``scale_train: false`` leaves them as they are and scales down in evaluation instead. Forks'
    ``sample_weights_test: true`` drops in evaluation as well.
    """

    def build(self, parameter: Any, shapes: list[Shape]) -> None:
        p = parameter.dropout_param
        self.ratio, self.scale_train, self.always = float(p.dropout_ratio), bool(p.scale_train), p.sample_weights_test
        if not 0 < self.ratio < 1:
            self.fail(f"dropout_ratio = {self.ratio}; a number between 0 and 1 would do")

    def forward(self, x: Tensor) -> Tensor:
        if self.training or self.always:
            return F.dropout(x, self.ratio) if self.scale_train else x * torch.rand_like(x).ge(self.ratio)
        return x if self.scale_train else x * (1 - self.ratio)


@register("Softmax")
class Softmax(Layer):
    """exp(x), divided by its sum along ``axis``."""

    def build(self, parameter: Any, shapes: list[Shape]) -> None:
        self.along = self.axis(parameter.softmax_param.axis, shapes[0])

    def forward(self, x: Tensor) -> Tensor:
        return x.softmax(self.along)
