"""Which elements along one axis an interpolated one is made of, and by which weights: indices count in the whole image.

Rounding follows PyTorch's ``aten/src/ATen/native/UpSample.h``, of version 2.13.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

__all__ = ["Resampling", "Taps", "resampled_cuts", "taps"]

BY_LINES = ("linear", "bilinear", "trilinear")


@dataclass(frozen=True, slots=True)
class Resampling:
    """One axis: ``size`` elements become ``out``.

    ``scale`` is the factor that the caller gave, where coordinates are to follow that and not the sizes. ``mode``,
    ``align_corners`` and ``antialias`` are those of ``torch.nn.functional.interpolate``. ``dims`` is how many
    dimensions the image has, ``device`` the type of device it is on.
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
        """Inputs from one output to the next."""
        if self.align_corners:
            return (self.size - 1) / (self.out - 1) if self.out > 1 else 0.0
        return 1 / self.scale if self.scale else self.size / self.out

    @property
    def factor(self) -> int:
        """How many outputs each input has, all alike and side by side; 0 where that is not so."""
        factor = self.out // self.size if self.out % self.size == 0 else 0
        plain = not self.align_corners and not self.antialias and self.mode != "area"
        return factor if plain and (self.scale is None or self.scale == factor) else 0

    @property
    def reach(self) -> int:
        """Inputs beside its own that an output is made of, each way, where each input has :attr:`factor` outputs."""
        return 0 if self.factor == 1 or self.mode.startswith("nearest") else 2 if self.mode == "bicubic" else 1


@dataclass(frozen=True, slots=True)
class Taps:
    """``index`` (outputs, taps) and ``weight``, of the same shape in float64; ``None`` where there is one tap of 1."""

    index: torch.Tensor
    weight: torch.Tensor | None


def resampled_cuts(cuts: tuple[int, ...], out: int) -> tuple[int, ...]:
    """Where ``out`` outputs are cut: each belongs to the rank that holds the input at its centre."""
    size = cuts[-1]
    return (0, *(min((2 * cut * out + size - 1) // (2 * size), out) for cut in cuts[1:-1]), out)


@functools.lru_cache(maxsize=256)
def taps(axis: Resampling) -> Taps:
    """What the outputs along ``axis`` are made of."""
    if axis.mode.startswith("nearest"):
        # Torch rounds positions in float32, and otherwise for images of two dimensions than for others.
        rest = (1,) * (axis.dims - 1)
        ramp = torch.arange(axis.size, dtype=torch.float64, device=axis.device).view(1, 1, -1, *rest)
        if axis.scale is None:
            found = F.interpolate(ramp, (axis.out, *rest), mode=axis.mode)
        else:
            found = F.interpolate(ramp, scale_factor=(axis.scale, *map(float, rest)), mode=axis.mode)
        return Taps(found.view(-1, 1).long().cpu(), None)
    out = torch.arange(axis.out, dtype=torch.float64, device="cpu")
    if axis.antialias:
        return _filtered(axis, out)
    if axis.mode == "area":
        return _bins(axis)
    if axis.size == axis.out and axis.mode in BY_LINES and axis.device == "cpu":
        return Taps(out.long().view(-1, 1), None)
    place = axis.step * out if axis.align_corners else axis.step * (out + 0.5) - 0.5
    if axis.mode in BY_LINES:
        place = place.clamp_min(0)
        first = place.floor().clamp_max(axis.size - 1)
        part = (place - first).clamp(0, 1)
        index = torch.stack([first, first + 1], 1)
        weight = torch.stack([1 - part, part], 1)
    else:
        first = place.floor()
        index = torch.stack([first + i for i in (-1, 0, 1, 2)], 1)
        weight = _cubic((place[:, None] - index).abs(), -0.75)
    return Taps(index.long().clamp_(0, axis.size - 1), weight)


def _cubic(x: torch.Tensor, a: float) -> torch.Tensor:
    """Keys' kernel at distances ``x``."""
    near = ((a + 2) * x - (a + 3)) * x * x + 1
    far = ((x - 5) * x + 8) * x * a - 4 * a
    return torch.where(x < 1, near, torch.where(x < 2, far, 0.0))


def _line(x: torch.Tensor) -> torch.Tensor:
    return (1 - x).clamp_min(0)


def _lanczos(x: torch.Tensor) -> torch.Tensor:
    return torch.where(x < 3, torch.sinc(x) * torch.sinc(x / 3), 0.0)


FILTERS: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], int]] = {
    "bilinear": (_line, 1),
    "bicubic": (lambda x: _cubic(x, -0.5), 2),
    "lanczos": (_lanczos, 3),
}


def _filtered(axis: Resampling, out: torch.Tensor) -> Taps:
    """A filter as wide as a step between outputs, whose weights add up to 1."""
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
    """Means of the inputs that lie under an output, as adaptive pooling has them."""
    bounds = [(i * axis.size // axis.out, -(-(i + 1) * axis.size // axis.out)) for i in range(axis.out)]
    longest = max(stop - start for start, stop in bounds)
    start, stop = (
        torch.tensor(side, dtype=torch.int64, device="cpu").view(-1, 1) for side in zip(*bounds, strict=True)
    )
    index = start + torch.arange(longest, dtype=torch.int64, device="cpu")
    weight = (index < stop).double() / (stop - start)
    return Taps(torch.minimum(index, stop - 1), None if longest == 1 else weight)
