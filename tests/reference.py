"""Convolution as its definition reads: one product per kernel tap, in float64. Slow, and right.

It shares no code with torch's convolutions nor with any solver: every tap reads a slice that is clipped by hand, so
that signed padding, stride, dilation and groups need no padded copy that could be wrong in the same way.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch

from tilewise.problems.conv.axis import Axis
from tilewise.problems.conv.problem import ConvProblem, Pass

__all__ = ["convolve"]


def convolve(p: ConvProblem, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """The result of ``p`` in float64, without bias or accumulation, dense and on the operands' device.

    ``a`` and ``b`` are in the order of ``p.operands``, of any strides and real dtype.

    Raises ``ValueError`` when a shape is not the problem's.
    """
    for role, tensor in zip(p.operands, (a, b), strict=True):
        if tuple(tensor.shape) != p.shape(role):
            raise ValueError(f"{role} has shape {tuple(tensor.shape)}; {p.key} takes {p.shape(role)}")
    tensors = {role: tensor.double() for role, tensor in zip(p.operands, (a, b), strict=True)}
    tensors[p.result] = a.new_zeros(p.shape(p.result), dtype=torch.float64)
    x, y = (torch.unflatten(tensors[role], 1, (p.groups, -1)) for role in "xy")
    w = torch.unflatten(tensors["w"], 0, (p.groups, -1))
    for tap in itertools.product(*(range(axis.kernel) for axis in p.axes)):
        inputs, outputs = _meeting(p.axes, tap)
        x_tap, y_tap, w_tap = _sliced(x, inputs), _sliced(y, outputs), w
        for r in tap:
            w_tap = w_tap.select(3, r)
        if p.pass_ is Pass.FPROP:
            y_tap += torch.einsum("ngc...,goc->ngo...", x_tap, w_tap)
        elif p.pass_ is Pass.DGRAD:
            x_tap += torch.einsum("ngo...,goc->ngc...", y_tap, w_tap)
        else:
            w_tap += torch.einsum("ngc...,ngo...->goc", x_tap, y_tap)
    return tensors[p.result]


def _meeting(axes: tuple[Axis, ...], tap: tuple[int, ...]) -> tuple[list[slice], list[slice]]:
    """Slices of inputs and of outputs that meet at ``tap``, axis by axis, outputs that read padding left out."""
    met = list(_clipped(axes, tap))
    return [inputs for inputs, _ in met], [outputs for _, outputs in met]


def _sliced(tensor: torch.Tensor, slices: list[slice]) -> torch.Tensor:
    """A view of (image, group, channel, space), sliced along space."""
    whole = slice(None)
    return tensor[(whole, whole, whole, *slices)]


def _clipped(axes: tuple[Axis, ...], tap: tuple[int, ...]) -> Iterator[tuple[slice, slice]]:
    for axis, r in zip(axes, tap, strict=True):
        shift = r * axis.dilation - axis.before
        met = [j for j in range(axis.out) if 0 <= j * axis.stride + shift < axis.size]
        if not met:
            yield slice(0, 0), slice(0, 0)
            continue
        first, last = met[0], met[-1]
        yield (
            slice(first * axis.stride + shift, last * axis.stride + shift + 1, axis.stride),
            slice(first, last + 1),
        )
