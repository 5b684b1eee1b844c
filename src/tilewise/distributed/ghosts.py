"""Which positions of its input a layer reads along one axis, and what a rank of several must therefore receive.

Ranks hold consecutive ranges of every activation, as even as can be. What a rank reads beyond its own range is the
halo of its neighbours, and its place in the rank's buffer the ghost zone (Jin et al. 2018, section 1).
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from tilewise.axis import Axis

__all__ = ["Ghost", "Reader", "Resized", "Sliding", "ghosts", "obstacle", "received", "shares"]


def shares(size: int, parts: int) -> tuple[tuple[int, int], ...]:
    """Ranges ``[start, stop)`` of ``parts`` ranks along ``size`` positions; the first ones are longer by one."""
    least, longer = divmod(size, parts)
    starts = [rank * least + min(rank, longer) for rank in range(parts + 1)]
    return tuple(itertools.pairwise(starts))


@dataclass(frozen=True, slots=True)
class Sliding:
    """A window that slides along ``axis``: convolution or pooling. ``transposed``: from its outputs to its inputs."""

    axis: Axis
    transposed: bool = False

    @property
    def size(self) -> int:
        """Positions of the layer's input."""
        return self.axis.out if self.transposed else self.axis.size

    @property
    def out(self) -> int:
        """Positions of the layer's output."""
        return self.axis.size if self.transposed else self.axis.out

    def reads(self, start: int, stop: int) -> tuple[int, int] | None:
        """Range of the input that outputs ``[start, stop)`` read; ``None`` where they read padding alone."""
        found = self.axis.writing(start, stop) if self.transposed else self.axis.reading(start, stop)
        return None if found is None else found[:2]

    def local(self, start: int, stop: int) -> Axis | None:
        """The axis of a rank's own convolution, which gives outputs ``[start, stop)``.

        Padding at the image's border is part of the ghost zone, so all ranks with equally many outputs have one axis.
        """
        if self.transposed:
            found = self.axis.writing(start, stop)
            return None if found is None else found[2]
        a = self.axis
        return Axis((stop - start - 1) * a.stride + a.reach, a.kernel, a.stride, a.dilation)


@dataclass(frozen=True, slots=True)
class Resized:
    """Interpolation from ``size`` to ``out`` positions, each from ``taps`` of the input: 1 nearest, 2 linear, 4 cubic.

    Coordinates are torch's with ``align_corners=False``.
    """

    size: int
    out: int
    taps: int

    def reads(self, start: int, stop: int) -> tuple[int, int] | None:
        """Range of the input that outputs ``[start, stop)`` read."""
        if self.taps == 1:
            return start * self.size // self.out, (stop - 1) * self.size // self.out + 1
        first = ((2 * start + 1) * self.size - self.out) // (2 * self.out) - (self.taps // 2 - 1)
        last = ((2 * stop - 1) * self.size - self.out) // (2 * self.out) + self.taps // 2
        return max(first, 0), min(last + 1, self.size)

    def local(self, start: int, stop: int) -> Axis | None:
        """None: it is no convolution."""
        return None


Reader = Sliding | Resized


@dataclass(frozen=True, slots=True)
class Ghost:
    """One rank's part along one axis, in positions.

    ``own`` inputs and ``outs`` outputs are its range; ``read`` inputs are read for those, ``kept`` of them its own.
    ``buffer`` is the length of its input with ghost zones. ``interior`` outputs read its own range alone. ``reach`` is
    how far what it reads lies beyond its range, ``apart`` whether beyond its neighbours', too. ``axis`` is that of its
    own convolution.
    """

    own: int
    outs: int
    read: int
    kept: int
    buffer: int
    interior: int
    reach: int
    apart: bool
    axis: Axis | None


@functools.lru_cache(maxsize=4096)
def ghosts(reader: Reader, parts: int) -> tuple[Ghost, ...]:
    """What each of ``parts`` ranks has, reads and receives."""
    inputs, outputs = shares(reader.size, parts), shares(reader.out, parts)
    return tuple(_ghost(reader, rank, inputs, outputs) for rank in range(parts))


def _ghost(reader: Reader, rank: int, inputs: Sequence[tuple[int, int]], outputs: Sequence[tuple[int, int]]) -> Ghost:
    (a, b), (c, d) = inputs[rank], outputs[rank]
    found = reader.reads(c, d) if d > c else None
    if found is None:
        return Ghost(b - a, d - c, 0, 0, b - a, d - c, 0, False, None)
    low, high = found
    if len(inputs) == 1:
        axis = reader.axis if isinstance(reader, Sliding) else None
        return Ghost(b - a, d - c, high - low, high - low, b - a, d - c, 0, False, axis)
    axis = reader.local(c, d)
    span = axis.size if axis is not None and isinstance(reader, Sliding) and not reader.transposed else high - low
    reach = max(a - low, high - b, 0)
    left, right = inputs[max(rank - 1, 0)][0], inputs[min(rank + 1, len(inputs) - 1)][1]
    return Ghost(
        own=b - a,
        outs=d - c,
        read=high - low,
        kept=max(min(b, high) - max(a, low), 0),
        buffer=max(span, b - a),
        interior=_interior(reader, a, b, c, d),
        reach=reach,
        apart=low < left or high > right,
        axis=axis,
    )


def _interior(reader: Reader, a: int, b: int, c: int, d: int) -> int:
    """Outputs of ``[c, d)`` that read nothing outside ``[a, b)``: all but some at either end."""

    def inside(j: int) -> bool:
        found = reader.reads(j, j + 1)
        return found is None or (a <= found[0] and found[1] <= b)

    first = next((j for j in range(c, d) if inside(j)), d)
    last = next((j for j in reversed(range(first, d)) if inside(j)), first - 1)
    return last + 1 - first


def received(axes: Sequence[Sequence[Ghost]]) -> int:
    """The most positions that any rank receives, where ``axes`` has the parts of each axis: corners included."""
    kinds = [dict.fromkeys((g.read, g.kept) for g in axis) for axis in axes]
    return max(
        math.prod(read for read, _ in rank) - math.prod(kept for _, kept in rank) for rank in itertools.product(*kinds)
    )


def obstacle(reader: Reader, parts: int, name: str) -> str:
    """Why an axis called ``name`` cannot be split in ``parts`` where ``reader`` reads it; empty where it can."""
    least = min(reader.size, reader.out)
    if least < parts:
        return f"{name} has {least} positions for {parts} ranks"
    found = ghosts(reader, parts)
    if any(g.apart for g in found):
        widest = max(found, key=lambda g: g.reach)
        return f"along {name} a halo of {widest.reach} is wider than the neighbour's shard of {widest.own}"
    return ""
