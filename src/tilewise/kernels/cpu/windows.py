"""What a direct convolution's kernel is told, as data: numbers and their places. Knows nothing of Numba."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

__all__ = ["COUNT", "HEADER", "LINE", "MOST_COLUMNS", "MOST_ROWS", "REGISTERS", "WORDS", "Told"]

MOST_ROWS = 4
MOST_COLUMNS = 16
LINE = 3
"""Numbers that a line is described by: bytes from either operand's first vector to its own, and its steps."""
REGISTERS = {16: 28, 8: 12, 4: 12}
"""Sums that stay in registers, by lanes."""
HEADER = 11
"""Integers of a call before those of :class:`Told`: units, threads and addresses."""


@dataclass(frozen=True)
class Told:
    """The kernel's numbers. Triples are by axis: depth, rows, columns; strides and offsets are in bytes.

    The *source* is an image, of which a tile with its rim lies in scratch. In an image's pass the *other* is the result
    and ``taps`` are read; in a filter's gradient it is the output's gradient and ``taps`` are written.
    """

    kind: int
    """0 for an image, 1 for a filter's gradient, 2 for the sum of that of several shares."""
    groups: int
    batch: int
    shares: int
    dtypes: tuple[int, int, int]
    """Of source, other and taps."""
    add: int
    sources: int
    """Channels of a group in the source."""
    others: int
    sizes: tuple[int, int, int]
    """How far the source is read."""
    starts: tuple[int, int, int]
    """Where the first tile's source begins, perhaps before the tensor does."""
    advance: tuple[int, int, int]
    """From one tile's source to the next one's."""
    extents: tuple[int, int, int]
    """Of a tile's source."""
    counts: tuple[int, int, int]
    """Of the other."""
    tile: tuple[int, int, int]
    tiles: tuple[int, int, int]
    phases: tuple[int, int, int]
    """Results of an image go in so many interleaved sets along each axis."""
    shape: tuple[int, int, int, int]
    """Of a source in scratch, as :func:`tilewise.kernels.cpu.rows.region_in` has it."""
    source_bytes: int
    """From one channel's source in scratch to the next one's."""
    taps_bytes: int
    """Those of all taps of a group in scratch."""
    line_bytes: int
    source: tuple[int, int, int, int, int, int]
    """Strides: batch, group, channel of a group, depth, rows, columns."""
    other: tuple[int, int, int, int, int, int]
    taps: tuple[int, int, int, int, int, int]
    """Strides: group, other's channel, source's channel, depth, rows, columns; neighbours may be one axis."""
    taps_counts: tuple[int, int, int]
    kernel: tuple[int, int, int]
    down: tuple[int, int]
    """From one result or row of the output's gradient to the next: bytes in the source, along depth and rows."""
    between: tuple[int, int]
    """From one tap to the next along depth and rows."""
    steps: tuple[int, int]
    """Bytes from one step of a line to the next, in the source and in the factors."""
    columns: int
    """The most of a tile in registers."""
    rows: int
    sums: int
    """Of all."""
    band: int
    """Rows of the output's gradient in a table of lines."""

    calls: tuple[int, int]
    """Addresses of :func:`tilewise.kernels.cpu.rows.rows` and :func:`tilewise.kernels.cpu.sums.sums`, compiled."""

    def numbers(self) -> np.ndarray:
        """In order, int64."""
        found: list[int] = []
        for name in self.__dataclass_fields__:
            value = getattr(self, name)
            found.extend(value if isinstance(value, tuple) else (value,))
        return np.array(found, dtype=np.int64)


def _places() -> dict[str, int]:
    """Where each begins."""
    found, place = {}, 0
    for name, field in Told.__dataclass_fields__.items():
        found[name] = place
        place += max(1, str(field.type).count("int"))
    return found


WORDS = _places()
"""Index of each of :class:`Told` among its numbers."""
COUNT = sum(max(1, str(field.type).count("int")) for field in Told.__dataclass_fields__.values())
"""Numbers of :class:`Told`."""
