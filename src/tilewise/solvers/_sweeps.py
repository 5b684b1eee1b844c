"""Which inputs each result of an axis reads, tap by tap, and how much of a tensor must be packed for it."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from tilewise.axis import Axis

__all__ = ["Extent", "Packed", "Sweep", "backward", "extent", "forward"]


@dataclass(frozen=True, slots=True)
class Sweep:
    """Results of one axis that use the same taps of the filter.

    Result ``first + j * stride`` for ``j < count`` adds, for ``t < taps``, what tap ``first_tap + t * tap_stride`` of
    the filter makes of the source at ``start + j * step + t * tap_step``, which is zero outside the source.
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
        """First source place that is read, and one past the last."""
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
        met = [r for r in range(min(every, axis.kernel)) if (phase + axis.before - r * dilation) % stride == 0]
        tap = met[0] if met else 0
        sweeps.append(
            Sweep(
                count=count,
                start=(phase + axis.before - tap * dilation) // stride if met else 0,
                step=1,
                taps=-(-(axis.kernel - tap) // every) if met else 0,
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
    """What is packed of an axis: ``size`` places from ``first`` on, and a gap of zeros wide enough for either side."""

    first: int
    size: int
    before: int
    after: int

    @property
    def pitch(self) -> int:
        """Places from one line to the next: one gap serves the end of a line and the start of the next."""
        return self.size + max(self.before, self.after)


@functools.lru_cache(maxsize=4096)
def extent(size: int, sweeps: tuple[Sweep, ...]) -> Extent:
    """What must be packed of an axis of ``size`` places for ``sweeps``. Without any that reads, all of it."""
    reaches = [sweep.reach for sweep in sweeps if sweep.taps]
    low = min((reach[0] for reach in reaches), default=0)
    high = max((reach[1] for reach in reaches), default=size)
    first = min(max(low, 0), size - 1)
    stop = max(min(high, size), first + 1)
    return Extent(first, stop - first, max(0, first - low), max(0, high - stop))


@dataclass(frozen=True, slots=True)
class Packed:
    """A tensor's packed form: ``axes`` (depth, height, width) and a row of ``planes * channels`` for each place."""

    axes: tuple[Extent, Extent, Extent]
    channels: int
    planes: int

    @property
    def row(self) -> int:
        """Elements of one place."""
        return self.planes * self.channels

    @property
    def places(self) -> tuple[int, int, int]:
        """Places from one plane, line and column to the next."""
        _, h, w = self.axes
        return h.pitch * w.pitch, w.pitch, 1

    @property
    def image(self) -> int:
        """Places of one image."""
        d, h, w = self.axes
        return d.pitch * h.pitch * w.pitch

    @property
    def head(self) -> int:
        """Places of zeros before the first image."""
        d, h, w = self.axes
        return (d.before * h.pitch + h.before) * w.pitch + w.before

    def elements(self, images: int) -> int:
        """Elements of ``images`` images."""
        return (self.head + images * self.image) * self.row

    def offset(self, starts: Sequence[int]) -> int:
        """Elements from the buffer's first to place ``starts`` of the first image; may point into a gap."""
        inside = (start - axis.first for start, axis in zip(starts, self.axes, strict=True))
        return (self.head + sum(i * step for i, step in zip(inside, self.places, strict=True))) * self.row

    def strides(self, steps: Sequence[int]) -> tuple[int, ...]:
        """Elements between places ``steps`` apart along each axis."""
        return tuple(step * place * self.row for step, place in zip(steps, self.places, strict=True))
