"""The inputs and weights of which each output of an interpolation along one axis is made.

Indices count in the whole image. Rounding follows PyTorch's ``aten/src/ATen/native/UpSample.h``, of version 2.13.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

__all__ = ["Resampling", "Taps", "resampled_cuts", "taps"]

LINEAR = ("linear", "bilinear", "trilinear")


@dataclass(frozen=True, slots=True)
class Resampling:
    """Interpolation along one axis, from ``size`` elements to ``out``.

    ``scale`` is the factor that the caller gave, where coordinates follow that and not the sizes. ``mode``,
    ``align_corners`` and ``antialias`` are those of ``torch.nn.functional.interpolate``. ``dims`` is the number of
    spatial dimensions of the image, and ``device`` the type of its device.
    """

    size: int
    out: int
    mode: str
    scale: float | None = None
    align_corners: bool = False
    antialias: bool = False
    dims: int = 2
    device: str = "cpu"

    @property
    def step(self) -> float:
        """The distance between neighbouring outputs, in inputs."""
        if self.align_corners:
            return (self.size - 1) / (self.out - 1) if self.out > 1 else 0.0
        return 1 / self.scale if self.scale else self.size / self.out

    @property
    def factor(self) -> int:
        """The number of outputs over each input, where it is the same for all inputs; 0 otherwise."""
        factor = self.out // self.size if self.out % self.size == 0 else 0
        plain = not self.align_corners and not self.antialias and self.mode != "area"
        return factor if plain and (self.scale is None or self.scale == factor) else 0

    @property
    def reach(self) -> int:
        """How many neighbours each way of the input under it an output reads, where :attr:`factor` is not 0."""
        return 0 if self.factor == 1 or self.mode.startswith("nearest") else 2 if self.mode == "bicubic" else 1


@dataclass(frozen=True, slots=True)
class Taps:
    """The inputs of which each output is made: ``index`` (outputs, taps), and ``weight`` of the same shape in float64.

    ``weight`` is ``None`` where each output is a copy of one input.
    """

    index: torch.Tensor
    weight: torch.Tensor | None


def resampled_cuts(cuts: tuple[int, ...], out: int) -> tuple[int, ...]:
    """The cut points of ``out`` outputs; each output belongs to the rank that holds the input at its centre."""
    size = cuts[-1]
    return (0, *(min((2 * cut * out + size - 1) // (2 * size), out) for cut in cuts[1:-1]), out)


@functools.lru_cache(maxsize=256)
def taps(axis: Resampling) -> Taps:
    """The inputs and weights of all outputs along ``axis``."""
    if axis.mode.startswith("nearest"):
        # Torch rounds positions in float32, and rounds differently for images of two dimensions than for others.
        other_sizes = (1,) * (axis.dims - 1)
        ramp = torch.arange(axis.size, dtype=torch.float64, device=axis.device).view(1, 1, -1, *other_sizes)
        if axis.scale is None:
            nearest = F.interpolate(ramp, (axis.out, *other_sizes), mode=axis.mode)
        else:
            nearest = F.interpolate(ramp, scale_factor=(axis.scale, *map(float, other_sizes)), mode=axis.mode)
        return Taps(nearest.view(-1, 1).long().cpu(), None)
    out = torch.arange(axis.out, dtype=torch.float64, device="cpu")
    if axis.antialias:
        return _filtered(axis, out)
    if axis.mode == "area":
        return _bins(axis)
    if axis.size == axis.out and axis.mode in LINEAR and axis.device == "cpu":
        return Taps(out.long().view(-1, 1), None)
    position = axis.step * out if axis.align_corners else axis.step * (out + 0.5) - 0.5
    if axis.mode in LINEAR:
        position = position.clamp_min(0)
        first = position.floor().clamp_max(axis.size - 1)
        fraction = (position - first).clamp(0, 1)
        index = torch.stack([first, first + 1], 1)
        weight = torch.stack([1 - fraction, fraction], 1)
    else:
        first = position.floor()
        index = torch.stack([first + i for i in (-1, 0, 1, 2)], 1)
        weight = _cubic((position[:, None] - index).abs(), -0.75)
    return Taps(index.long().clamp_(0, axis.size - 1), weight)


def _cubic(x: torch.Tensor, a: float) -> torch.Tensor:
    """Keys' cubic convolution kernel with parameter ``a`` at distances ``x``."""
    near = ((a + 2) * x - (a + 3)) * x * x + 1
    far = ((x - 5) * x + 8) * x * a - 4 * a
    return torch.where(x < 1, near, torch.where(x < 2, far, 0.0))


def _linear(x: torch.Tensor) -> torch.Tensor:
    """The kernel of linear interpolation at distances ``x``."""
    return (1 - x).clamp_min(0)


def _lanczos(x: torch.Tensor) -> torch.Tensor:
    """The Lanczos kernel of three lobes at distances ``x``."""
    return torch.where(x < 3, torch.sinc(x) * torch.sinc(x / 3), 0.0)


FILTERS: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], int]] = {
    "bilinear": (_linear, 1),
    "bicubic": (lambda x: _cubic(x, -0.5), 2),
    "lanczos": (_lanczos, 3),
}
"""The kernels of antialiased interpolation, each with half its width."""


def _filtered(axis: Resampling, out: torch.Tensor) -> Taps:
    """The taps of antialiased interpolation: a kernel scaled to the step between outputs, with weights of sum 1."""
    function, half = FILTERS[axis.mode]
    widen = max(axis.step, 1.0)
    centre = axis.step * (out + 0.5)
    first = (centre - half * widen + 0.5).trunc().clamp_min(0)
    last = (centre + half * widen + 0.5).trunc().clamp_max(axis.size)
    index = first[:, None] + torch.arange(int((last - first).max()), dtype=torch.float64, device="cpu")
    weight = function((index - centre[:, None] + 0.5).abs() / widen)
    weight = torch.where(index < last[:, None], weight, 0.0)
    return Taps(torch.minimum(index, last[:, None] - 1).long(), weight / weight.sum(1, keepdim=True))


def _bins(axis: Resampling) -> Taps:
    """The taps of mode "area": an output is the mean of the inputs under it, as in adaptive pooling."""
    bounds = [(i * axis.size // axis.out, -(-(i + 1) * axis.size // axis.out)) for i in range(axis.out)]
    longest = max(stop - start for start, stop in bounds)
    start, stop = (
        torch.tensor(side, dtype=torch.int64, device="cpu").view(-1, 1) for side in zip(*bounds, strict=True)
    )
    index = start + torch.arange(longest, dtype=torch.int64, device="cpu")
    weight = (index < stop).double() / (stop - start)
    return Taps(torch.minimum(index, stop - 1), None if longest == 1 else weight)
