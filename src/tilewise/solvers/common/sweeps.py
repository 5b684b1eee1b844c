"""Which inputs each result of an axis reads, tap by tap, and how much of a tensor must be packed for it."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from tilewise.problems.conv.axis import Axis

__all__ = ["Extent", "Packed", "Sweep", "backward", "extent", "forward"]


@dataclass(frozen=True, slots=True)
class Sweep:
    """The results along one axis that use the same taps of the filter.

    Result ``first + j * stride``, for ``j < count``, is the sum over ``t < taps`` of tap ``first_tap + t * tap_stride``
    times the source at ``start + j * step + t * tap_step``. The source is zero outside its bounds.
    """

    count: int
    start: int
    step: int
    taps: int
    tap_step: int
    first_tap: int = 0
    tap_stride: int = 1
    first: int = 0
    stride: int = 1

    @property
    def reach(self) -> tuple[int, int]:
        """The first place of the source that is read, and one past the last."""
        across = (self.taps - 1) * self.tap_step
        low = self.start + min(0, across)
        return low, self.start + (self.count - 1) * self.step + max(0, across) + 1


@functools.lru_cache(maxsize=4096)
def forward(axis: Axis) -> tuple[Sweep, ...]:
    """FPROP's one sweep: outputs from inputs. WGRAD reads the same inputs."""
    return (Sweep(axis.out, -axis.before, axis.stride, axis.kernel, axis.dilation),)


@functools.lru_cache(maxsize=4096)
def backward(axis: Axis) -> tuple[Sweep, ...]:
    """DGRAD's sweeps, one for each input modulo the stride: input gradients from output gradients.

    Inputs that no tap meets have a sweep without taps: their gradient is zero.
    """
    stride, dilation = axis.stride, axis.dilation
    every = stride // math.gcd(stride, dilation)
    sweeps = []
    for phase in range(min(stride, axis.size)):
        count = -(-(axis.size - phase) // stride)
        phase_taps = [r for r in range(min(every, axis.kernel)) if (phase + axis.before - r * dilation) % stride == 0]
        tap = phase_taps[0] if phase_taps else 0
        sweeps.append(
            Sweep(
                count=count,
                start=(phase + axis.before - tap * dilation) // stride if phase_taps else 0,
                step=1,
                taps=-(-(axis.kernel - tap) // every) if phase_taps else 0,
                tap_step=-(every * dilation) // stride,
                first_tap=tap,
                tap_stride=every,
                first=phase,
                stride=stride,
            )
        )
    return tuple(sweeps)


@dataclass(frozen=True, slots=True)
class Extent:
    """The part of an axis that is packed: ``size`` places from ``first`` on, and gaps of zeros before and after it."""

    first: int
    size: int
    before: int
    after: int

    @property
    def pitch(self) -> int:
        """Places from one line to the next. One gap serves as the end of a line and the start of the next."""
        return self.size + max(self.before, self.after)


@functools.lru_cache(maxsize=4096)
def extent(size: int, sweeps: tuple[Sweep, ...]) -> Extent:
    """The part of an axis of ``size`` places that ``sweeps`` read, with its gaps. All of it where none reads."""
    reaches = [sweep.reach for sweep in sweeps if sweep.taps]
    low = min((reach[0] for reach in reaches), default=0)
    high = max((reach[1] for reach in reaches), default=size)
    first = min(max(low, 0), size - 1)
    stop = max(min(high, size), first + 1)
    return Extent(first, stop - first, max(0, first - low), max(0, high - stop))


@dataclass(frozen=True, slots=True)
class Packed:
    """The packed form of a tensor: for each place along ``axes`` (depth, height, width) a row of numbers.

    A row holds ``planes * channels`` elements; the planes are the fp16 parts of a number.
    """

    axes: tuple[Extent, Extent, Extent]
    channels: int
    planes: int

    @property
    def row(self) -> int:
        """Elements of one place's row."""
        return self.planes * self.channels

    @property
    def places(self) -> tuple[int, int, int]:
        """Places from one plane, line and column to the next."""
        _, h, w = self.axes
        return h.pitch * w.pitch, w.pitch, 1

    @property
    def image(self) -> int:
        """Places of one image, gaps included."""
        d, h, w = self.axes
        return d.pitch * h.pitch * w.pitch

    @property
    def head(self) -> int:
        """Places of zeros before the first image."""
        d, h, w = self.axes
        return (d.before * h.pitch + h.before) * w.pitch + w.before

    def elements(self, images: int) -> int:
        """Elements of a buffer for ``images`` images."""
        return (self.head + images * self.image) * self.row

    def offset(self, starts: Sequence[int]) -> int:
        """Elements from the buffer's start to place ``starts`` of the first image, which may lie in a gap."""
        inside = (start - axis.first for start, axis in zip(starts, self.axes, strict=True))
        return (self.head + sum(i * step for i, step in zip(inside, self.places, strict=True))) * self.row

    def strides(self, steps: Sequence[int]) -> tuple[int, ...]:
        """Elements between places that lie ``steps`` apart along each axis."""
        return tuple(step * place * self.row for step, place in zip(steps, self.places, strict=True))
