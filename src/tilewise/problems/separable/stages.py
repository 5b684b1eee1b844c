"""The convolutions that a separable one consists of, and where each one's filters and bias lie in the one operand."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from tilewise.problems.conv.axis import Axis
from tilewise.problems.separable.key import Separable

__all__ = ["Stage", "channels_of", "parted", "weight_shapes"]


@dataclass(frozen=True, slots=True)
class Stage:
    """One of the convolutions: its axes, groups, filters (outputs, inputs of a group, height, width), and bias."""

    axes: tuple[Axis, Axis]
    groups: int
    weight: Tensor
    bias: Tensor


def channels_of(p: Separable) -> list[tuple[int, int]]:
    """Channels that each stage reads and gives, in order."""
    depthwise = [(p.channels, p.channels)]
    return [(p.in_channels, p.channels)] * p.expands + depthwise + [(p.channels, p.out_channels)] * p.projects


def weight_shapes(p: Separable) -> list[tuple[int, int, int, int]]:
    """The shape of each stage's filters, in order."""
    height, width = p.axes
    shapes = []
    for number, (inputs, outputs) in enumerate(channels_of(p)):
        depthwise = number == int(p.expands)
        shapes.append((outputs, 1, height.kernel, width.kernel) if depthwise else (outputs, inputs, 1, 1))
    return shapes


def parted(p: Separable, w: Tensor) -> Iterator[Stage]:
    """The stages with views of ``w``, which has each one's filters and then its bias."""
    place = 0
    height, width = p.axes
    for number, shape in enumerate(weight_shapes(p)):
        outputs, inputs, down, along = shape
        count = outputs * inputs * down * along
        weight, bias = w[place : place + count].view(shape), w[place + count : place + count + outputs]
        place += count + outputs
        if number == int(p.expands):
            yield Stage(p.axes, outputs, weight, bias)
        else:
            before = number < int(p.expands)
            sizes = (height.size, width.size) if before else (height.out, width.out)
            yield Stage((Axis(sizes[0], 1), Axis(sizes[1], 1)), 1, weight, bias)
