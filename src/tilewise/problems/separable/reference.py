"""Separable convolutions in float64, by torch's convolutions one after the other."""

from __future__ import annotations

import torch
from torch import Tensor

from tilewise.machine.turns import pause
from tilewise.problems.activations import activated
from tilewise.problems.separable.key import Separable
from tilewise.problems.separable.stages import Stage, parted

__all__ = ["reference", "reference_and_scale"]


def reference(p: Separable, x: Tensor, w: Tensor) -> Tensor:
    """The result of ``p`` in float64, without residual and the last function."""
    return reference_and_scale(p, x, w)[0]


@torch.no_grad()
def reference_and_scale(p: Separable, x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    """The result in float64, without residual and the last function, and the magnitude of what it is summed of.

    A stage's magnitude is its convolution of magnitudes: of filters, bias, and of what the stage before was summed of,
    to which the magnitude of that stage's function is added.
    """
    value = x.to(torch.float64)
    scale = value.abs()
    stages = parted(p, w.to(torch.float64))
    for stage, function in zip(stages, (*p.functions[:-1], "none"), strict=True):
        pause()
        total = _convolved(stage, value, stage.weight, stage.bias)
        pause()
        scale = _convolved(stage, scale, stage.weight.abs(), stage.bias.abs())
        value = activated(total, function)
        scale = scale if function == "none" else scale + value.abs()
    return value, scale


def _convolved(stage: Stage, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """The convolution of one stage with this weight and bias."""
    grow = [side for axis in reversed(stage.axes) for side in (axis.before, axis.after)]
    padded = torch.nn.functional.pad(x, grow) if any(grow) else x
    options = [axis.stride for axis in stage.axes], [0, 0], [axis.dilation for axis in stage.axes]
    return torch.convolution(padded, weight, bias, *options, False, [0, 0], stage.groups)
