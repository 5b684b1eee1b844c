"""Convolutions in float64: by torch, and for long kernels by Fourier transforms, where products would take minutes."""

from __future__ import annotations

import torch

from tilewise.problems.conv.axis import Axis
from tilewise.problems.conv.fields import Convolution
from tilewise.problems.conv.passes import Pass

__all__ = ["convolve", "convolve_by_transform"]


def convolve(p: Convolution, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """The result of ``p`` in float64 by torch, without bias or accumulation.

    ``a`` and ``b`` are in the order of ``p.operands``.
    """
    a, b, dims = a.double(), b.double(), len(p.axes)
    grow = [side for axis in reversed(p.axes) for side in (axis.before, axis.after)]
    options = (
        [axis.stride for axis in p.axes],
        [0] * dims,
        [axis.dilation for axis in p.axes],
    )
    if p.pass_ is not Pass.DGRAD:
        a = torch.nn.functional.pad(a, grow)
    if p.pass_ is Pass.FPROP:
        return torch.convolution(a, b, None, *options, False, [0] * dims, p.groups)
    padded = [axis.size + axis.before + axis.after for axis in p.axes]
    mask = [p.pass_ is Pass.DGRAD, p.pass_ is Pass.WGRAD, False]
    if p.pass_ is Pass.DGRAD:
        dy, w, x = a, b, a.new_empty(1).expand(p.batch, p.in_channels, *padded)
    else:
        dy, w, x = b, b.new_empty(1).expand(p.shape("w")), a
    dx, dw, _ = torch.ops.aten.convolution_backward(dy, x, w, None, *options, False, [0] * dims, p.groups, mask)
    result: torch.Tensor = dw if p.pass_ is Pass.WGRAD else torch.nn.functional.pad(dx, [-n for n in grow])
    return result


def convolve_by_transform(p: Convolution, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """The result of ``p`` in float64, without bias or accumulation: within 1e-15 of the largest result, not of each.

    ``a`` and ``b`` are in the order of ``p.operands``, of any strides and real dtype; the result is dense, on their
    device.

    Along an axis, outputs lie at multiples of the stride, taps at multiples of the dilation, and inputs at the sums of
    the two, which are as many places as the transform has at least: nothing wraps around.
    """
    roles = dict(zip(p.operands, (a, b), strict=True))
    basis = [_fast((axis.out - 1) * axis.stride + axis.reach) for axis in p.axes]
    space = list(range(3, 3 + len(p.axes)))
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
    """Slices, axis by axis, of the elements of a tensor that have a place in the transform, and of their places."""
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
