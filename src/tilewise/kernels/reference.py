"""Convolution as its definition reads: one product per kernel tap, in float64. Slow, and right.

:func:`convolve` shares no code with torch's convolutions nor with any solver: every tap reads a slice that is clipped
by hand, so that signed padding, stride, dilation and groups need no padded copy that could be wrong in the same way.
:func:`convolve_by_transform` is for long kernels, where a product per tap would take minutes.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch

from tilewise.axis import Axis
from tilewise.problem import ConvProblem, Pass

__all__ = ["convolve", "convolve_by_transform"]


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


def convolve_by_transform(p: ConvProblem, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """As :func:`convolve`, by Fourier transforms in float64: within 1e-15 of the largest result, not of each.

    Along an axis, outputs lie at multiples of the stride, taps at multiples of the dilation, and inputs at the sums of
    the two, which are as many places as the transform has at least: nothing wraps around.
    """
    roles = dict(zip(p.operands, (a, b), strict=True))
    basis = [_fast((axis.out - 1) * axis.stride + axis.reach) for axis in p.axes]
    space = list(range(3, 3 + p.dims))
    spectra = {}
    for role, tensor in roles.items():
        split = torch.unflatten(tensor, 0 if role == "w" else 1, (p.groups, -1)).double()
        placed = split.new_zeros((*split.shape[:3], *basis))
        inside, outside = _spread(p.axes, role, basis)
        _sliced(placed, outside).copy_(_sliced(split, inside))
        spectra[role] = torch.fft.rfftn(placed, dim=space)
    if p.pass_ is Pass.FPROP:
        product = torch.einsum("ngc...,goc...->ngo...", spectra["x"], spectra["w"].conj())
    elif p.pass_ is Pass.DGRAD:
        product = torch.einsum("ngo...,goc...->ngc...", spectra["y"], spectra["w"])
    else:
        product = torch.einsum("ngc...,ngo...->goc...", spectra["x"], spectra["y"].conj())
    places = torch.fft.irfftn(product, s=basis, dim=space)
    result = a.new_zeros(p.shape(p.result), dtype=torch.float64)
    inside, outside = _spread(p.axes, p.result, basis)
    view = torch.unflatten(result, 0 if p.result == "w" else 1, (p.groups, -1))
    _sliced(view, inside).copy_(_sliced(places, outside))
    return result


def _spread(axes: tuple[Axis, ...], role: str, basis: list[int]) -> tuple[list[slice], list[slice]]:
    """Elements of an operand that have a place in the basis, and their places, axis by axis."""
    inside, outside = [], []
    for axis, n in zip(axes, basis, strict=True):
        if role == "x":
            first = max(0, -axis.before)
            last = max(first, min(axis.size, n - axis.before))
            inside.append(slice(first, last))
            outside.append(slice(first + axis.before, last + axis.before))
        else:
            count, step = (axis.out, axis.stride) if role == "y" else (axis.kernel, axis.dilation)
            inside.append(slice(0, count))
            outside.append(slice(0, (count - 1) * step + 1, step))
    return inside, outside


def _fast(least: int) -> int:
    """The first number from ``least`` on without prime factors beyond 5: others transform slowly."""
    n = least
    while True:
        rest = n
        for factor in (2, 3, 5):
            while rest % factor == 0:
                rest //= factor
        if rest == 1:
            return n
        n += 1


def _sliced(tensor: torch.Tensor, slices: list[slice]) -> torch.Tensor:
    """A view of (image, group, channel, space), sliced along space."""
    whole = slice(None)
    return tensor[(whole, whole, whole, *slices)]


def _meeting(axes: tuple[Axis, ...], tap: tuple[int, ...]) -> tuple[list[slice], list[slice]]:
    """Slices of inputs and of outputs that meet at ``tap``, axis by axis, outputs that read padding left out."""
    met = list(_clipped(axes, tap))
    return [inputs for inputs, _ in met], [outputs for _, outputs in met]


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
