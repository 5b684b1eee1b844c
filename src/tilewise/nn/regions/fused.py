"""What graphs of regions hold in place of torch's operators: fused layers, and what is computed from parameters alone.

Each is a function that computes what it stands for by torch's operators, so that a rewritten graph can be run and
compared. Products with folded norms take their weight from :func:`scaled` and their bias from :func:`shifted`, which
are computed in float64 and rounded once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from tilewise.nn.programs.slots import filled, places_in
from tilewise.problems.activations import activated

__all__ = [
    "CONSTANTS",
    "LAYERS",
    "Call",
    "convolution",
    "joined",
    "linear",
    "norm_scale",
    "norm_shift",
    "scaled",
    "scaled_inputs",
    "shifted",
    "shifted_inputs",
]


def convolution(
    x: Tensor,
    w: Tensor,
    b: Tensor | None,
    residual: Tensor | None,
    activation: str,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
) -> Tensor:
    """``activation(conv(x, w) + b + residual)``; ``residual`` has the shape of the result."""
    zeros = [0] * len(stride)
    y = torch.convolution(x, w, b, list(stride), list(padding), list(dilation), False, zeros, groups)
    return activated(y if residual is None else y + residual, activation)


def linear(x: Tensor, w: Tensor, b: Tensor | None, residual: Tensor | None, activation: str) -> Tensor:
    """``activation(x w^T + b + residual)`` for a matrix ``x`` of shape (rows, inputs), ``w`` (outputs, inputs)."""
    y = functional.linear(x, w, b)
    return activated(y if residual is None else y + residual, activation)


def joined(parts: Sequence[Tensor], scale: Tensor, shift: Tensor, activation: str) -> Tensor:
    """``activation(scale * x + shift)`` for each channel of ``x``, the images ``parts`` joined along channels."""
    x = parts[0] if len(parts) == 1 else torch.cat(list(parts), 1)
    factors, summands = scale.to(x.dtype).view(1, -1, 1, 1), shift.to(x.dtype).view(1, -1, 1, 1)
    return activated(torch.addcmul(summands, x, factors), activation)


LAYERS: dict[str, Callable[..., Tensor]] = {"convolution": convolution, "linear": linear, "joined": joined}
"""Fused layers by name."""


@dataclass(frozen=True)
class Call:
    """The call of a fused layer by torch's operators: ``call(*tensors)``, whose arguments have places of tensors."""

    function: str
    arguments: tuple[Any, ...]

    def places(self) -> set[int]:
        """The numbers of the tensors that it reads."""
        return places_in(self.arguments)

    def __call__(self, *tensors: Tensor) -> Tensor:
        """The layer's result."""
        return LAYERS[self.function](*filled(self.arguments, tensors))


def norm_scale(weight: Tensor | None, variance: Tensor, eps: float) -> Tensor:
    """By what a norm with fixed statistics multiplies each channel, in float64 (Ioffe and Szegedy 2015, alg. 2)."""
    scale = torch.rsqrt(variance.double() + eps)
    return scale if weight is None else scale * weight.double()


def norm_shift(scale: Tensor, bias: Tensor | None, mean: Tensor) -> Tensor:
    """What a norm with fixed statistics adds to each channel after it has multiplied it by ``scale``, in float64."""
    shift = -mean.double() * scale
    return shift if bias is None else shift + bias.double()


def scaled(w: Tensor, scale: Tensor) -> Tensor:
    """The weight whose product is ``scale`` times that of ``w``, channel by channel of the result, in float64."""
    factors = scale.double().reshape(-1)
    return w.double() * factors.view(-1, *[1] * (w.dim() - 1))


def shifted(b: Tensor | None, scale: Tensor | None, shift: Tensor | None) -> Tensor | None:
    """The bias after a factor and a summand for each channel, in float64; each may be missing."""
    result = None if b is None else b.double()
    if result is not None and scale is not None:
        result = result * scale.double().reshape(-1)
    if shift is None:
        return result
    added = shift.double().reshape(-1)
    return added if result is None else result + added


def scaled_inputs(w: Tensor, scale: Tensor, groups: int) -> Tensor:
    """The weight whose product with x is that of ``w`` with ``scale`` times x, channel by channel of x, in float64."""
    factors = scale.double().view(groups, 1, -1)
    by_group = w.double().view(groups, -1, *w.shape[1:])
    return (by_group * factors.view(groups, 1, -1, *[1] * (w.dim() - 2))).view(w.shape)


def shifted_inputs(w: Tensor, b: Tensor | None, shift: Tensor, groups: int) -> Tensor:
    """The bias of a product whose input had ``shift`` added to it, channel by channel of the input, in float64."""
    by_group = w.double().view(groups, -1, *w.shape[1:])
    moved = by_group * shift.double().view(groups, 1, -1, *[1] * (w.dim() - 2))
    added = moved.flatten(2).sum(2).view(-1)
    return added if b is None else added + b.double()


CONSTANTS = (norm_scale, norm_shift, scaled, shifted, scaled_inputs, shifted_inputs)
"""Functions of parameters alone, all in float64."""
