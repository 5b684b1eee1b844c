"""Which positions of its input a layer reads along one axis, and which of these a rank must receive from others.

Ranks hold consecutive ranges of every activation, of sizes as equal as possible. The positions that a rank reads beyond
its own range are the halo. Their place in the rank's buffer is the ghost zone (Jin et al. 2018, section 1).
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from tilewise.problems.conv.axis import Axis

__all__ = ["Ghost", "Reader", "Resized", "Sliding", "ghosts", "obstacle", "received", "shares"]


def shares(size: int, parts: int) -> tuple[tuple[int, int], ...]:
    """The range ``[start, stop)`` of each of ``parts`` ranks along ``size`` positions.

    Where ``parts`` does not divide ``size``, the first ranges are longer by one.
    """
    least, longer = divmod(size, parts)
    starts = [rank * least + min(rank, longer) for rank in range(parts + 1)]
    return tuple(itertools.pairwise(starts))


@dataclass(frozen=True, slots=True)
class Sliding:
    """The window of a convolution or pooling that slides along ``axis``.

    With ``transposed`` the layer is a transposed convolution: its input is what ``axis`` calls the output.
    """

    axis: Axis
    transposed: bool = False

    @property
    def size(self) -> int:
        """The number of positions of the layer's input."""
        return self.axis.out if self.transposed else self.axis.size

    @property
    def out(self) -> int:
        """The number of positions of the layer's output."""
        return self.axis.size if self.transposed else self.axis.out

    def reads(self, start: int, stop: int) -> tuple[int, int] | None:
        """The range of the input that outputs ``[start, stop)`` read; ``None`` where they read padding alone."""
        read = self.axis.writing(start, stop) if self.transposed else self.axis.reading(start, stop)
        return None if read is None else read[:2]

    def local(self, start: int, stop: int) -> Axis | None:
        """The axis of the convolution by which a rank computes outputs ``[start, stop)``; ``None`` where it has none.

        Padding at the image's border is part of the ghost zone. So ranks with equally many outputs have equal axes.
        """
        axis = self.axis
        if self.transposed:
            written = axis.writing(start, stop)
            return None if written is None else written[2]
        return Axis((stop - start - 1) * axis.stride + axis.reach, axis.kernel, axis.stride, axis.dilation)


@dataclass(frozen=True, slots=True)
class Resized:
    """Interpolation from ``size`` to ``out`` positions, each of which reads ``taps`` positions of the input.

    There is 1 tap for nearest, 2 for linear and 4 for cubic interpolation. Coordinates are torch's with
    ``align_corners=False``.
    """

    size: int
    out: int
    taps: int

    def reads(self, start: int, stop: int) -> tuple[int, int] | None:
        """The range of the input that outputs ``[start, stop)`` read."""
        if self.taps == 1:
            return start * self.size // self.out, (stop - 1) * self.size // self.out + 1
        first = ((2 * start + 1) * self.size - self.out) // (2 * self.out) - (self.taps // 2 - 1)
        last = ((2 * stop - 1) * self.size - self.out) // (2 * self.out) + self.taps // 2
        return max(first, 0), min(last + 1, self.size)

    def local(self, start: int, stop: int) -> Axis | None:
        """Always ``None``, as interpolation is no convolution."""
        return None


Reader = Sliding | Resized


@dataclass(frozen=True, slots=True)
class Ghost:
    """One rank's part along one axis, in positions.

    The rank holds ``own`` positions of the input and computes ``outs`` positions of the output. These read ``read``
    positions of the input, of which the rank holds ``kept``. ``buffer`` is the length of its input with ghost zones.
    ``interior`` is the number of outputs that read nothing but the rank's own range. ``reach`` is how far beyond that
    range the rank reads, and ``apart`` whether it reads beyond the ranges of its neighbours as well. ``axis`` is the
    axis of the rank's own convolution, if there is one.
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
    """What each of ``parts`` ranks holds, reads and receives for ``reader``."""
    inputs, outputs = shares(reader.size, parts), shares(reader.out, parts)
    return tuple(_ghost(reader, rank, inputs, outputs) for rank in range(parts))


def _ghost(reader: Reader, rank: int, inputs: Sequence[tuple[int, int]], outputs: Sequence[tuple[int, int]]) -> Ghost:
    """The part of one rank, where ``inputs`` and ``outputs`` are the ranges of all ranks."""
    (start, stop), (out_start, out_stop) = inputs[rank], outputs[rank]
    own, outs = stop - start, out_stop - out_start
    read = reader.reads(out_start, out_stop) if outs > 0 else None
    if read is None:
        return Ghost(own, outs, 0, 0, own, outs, 0, False, None)
    low, high = read
    if len(inputs) == 1:
        axis = reader.axis if isinstance(reader, Sliding) else None
        return Ghost(own, outs, high - low, high - low, own, outs, 0, False, axis)
    axis = reader.local(out_start, out_stop)
    span = axis.size if axis is not None and isinstance(reader, Sliding) and not reader.transposed else high - low
    left, right = inputs[max(rank - 1, 0)][0], inputs[min(rank + 1, len(inputs) - 1)][1]
    return Ghost(
        own=own,
        outs=outs,
        read=high - low,
        kept=max(min(stop, high) - max(start, low), 0),
        buffer=max(span, own),
        interior=_interior(reader, inputs[rank], outputs[rank]),
        reach=max(start - low, high - stop, 0),
        apart=low < left or high > right,
        axis=axis,
    )


def _interior(reader: Reader, inputs: tuple[int, int], outputs: tuple[int, int]) -> int:
    """How many of the range ``outputs`` read nothing outside the range ``inputs``: all but some at either end."""

    def is_inside(position: int) -> bool:
        read = reader.reads(position, position + 1)
        return read is None or (inputs[0] <= read[0] and read[1] <= inputs[1])

    start, stop = outputs
    first = next((position for position in range(start, stop) if is_inside(position)), stop)
    last = next((position for position in reversed(range(first, stop)) if is_inside(position)), first - 1)
    return last + 1 - first


def received(axes: Sequence[Sequence[Ghost]]) -> int:
    """The most positions that any rank receives, corners included; ``axes`` has the ranks' parts along each axis."""
    kinds = [dict.fromkeys((ghost.read, ghost.kept) for ghost in axis) for axis in axes]
    return max(
        math.prod(read for read, _ in rank) - math.prod(kept for _, kept in rank) for rank in itertools.product(*kinds)
    )


def obstacle(reader: Reader, parts: int, name: str) -> str:
    """Why an axis called ``name`` cannot be split in ``parts`` where ``reader`` reads it; empty where it can."""
    least = min(reader.size, reader.out)
    if least < parts:
        return f"{name} has {least} positions for {parts} ranks"
    ranks = ghosts(reader, parts)
    if any(ghost.apart for ghost in ranks):
        widest = max(ranks, key=lambda ghost: ghost.reach)
        return f"along {name} a halo of {widest.reach} is wider than the neighbour's shard of {widest.own}"
    return ""
