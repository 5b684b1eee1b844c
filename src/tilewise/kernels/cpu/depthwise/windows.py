"""The numbers that describe a direct convolution to its kernel, and their indices. It needs no Numba."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

__all__ = ["COUNT", "HEADER", "LINE", "MOST_COLUMNS", "MOST_ROWS", "REGISTERS", "WORDS", "Told"]

MOST_ROWS = 4
MOST_COLUMNS = 16
LINE = 3
"""The integers that describe a line: its offsets in bytes in both operands, and the number of its steps."""
REGISTERS = {16: 28, 8: 12, 4: 12}
"""The most sums that stay in registers, by the number of lanes."""
HEADER = 11
"""The integers of a call before those of :class:`Told`: units, threads and addresses."""


@dataclass(frozen=True)
class Told:
    """The numbers of a kernel. Triples are by axis: depth, rows, columns. Strides and offsets are in bytes.

    The *source* is an image, of which a tile with its halo lies in scratch. In an image's pass the *other* tensor is
    the result, and ``taps`` are read. In a filter's gradient the other is the output's gradient, and ``taps`` are
    written.
    """

    kind: int
    """0 for an image, 1 for a filter's gradient, 2 for the sum of several shares of a filter's gradient."""
    groups: int
    batch: int
    shares: int
    dtypes: tuple[int, int, int]
    """The types of source, other and taps, as indices of :data:`tilewise.kernels.cpu.moves.DTYPES`."""
    add: int
    """1 where results are added to the numbers in memory, otherwise 0."""
    sources: int
    """The channels of a group in the source."""
    others: int
    """The channels of a group in the other."""
    sizes: tuple[int, int, int]
    """The positions before which the source is read."""
    starts: tuple[int, int, int]
    """The position at which the first tile's source begins, which may lie before the tensor."""
    advance: tuple[int, int, int]
    """The distance from one tile's source to the next one's, in positions."""
    extents: tuple[int, int, int]
    """The sizes of a tile's source."""
    counts: tuple[int, int, int]
    """The sizes of the other."""
    tile: tuple[int, int, int]
    """The sizes of a tile of the other."""
    tiles: tuple[int, int, int]
    """The number of tiles."""
    phases: tuple[int, int, int]
    """The number of interleaved sets along each axis in which results of an image are computed."""
    shape: tuple[int, int, int, int]
    """The shape of a source in scratch, as :func:`tilewise.kernels.cpu.rows.region_in` takes it."""
    source_bytes: int
    """The distance from one channel's source in scratch to the next one's."""
    taps_bytes: int
    """The bytes of all taps of a group in scratch."""
    line_bytes: int
    """The bytes of a line of scratch."""
    source: tuple[int, int, int, int, int, int]
    """The strides of batch, group, channel of a group, depth, rows and columns."""
    other: tuple[int, int, int, int, int, int]
    """The same strides of the other."""
    taps: tuple[int, int, int, int, int, int]
    """The strides of group, other's channel, source's channel, depth, rows and columns."""
    taps_counts: tuple[int, int, int]
    """The number of taps along the axes of these strides, where neighbouring axes may be merged into one."""
    kernel: tuple[int, int, int]
    down: tuple[int, int]
    """The bytes in the source from one result, or row of the output's gradient, to the next, along depth and rows."""
    between: tuple[int, int]
    """The bytes in the source from one tap to the next along depth and rows."""
    steps: tuple[int, int]
    """The bytes from one step of a line to the next, in the source and in the factors."""
    columns: int
    """The most columns of a tile in registers."""
    rows: int
    """The most rows of a tile in registers."""
    sums: int
    """The most sums of a tile in registers."""
    band: int
    """The rows of the output's gradient in a table of lines."""

    calls: tuple[int, int]
    """The addresses of the compiled functions of :func:`tilewise.kernels.cpu.rows.rows` and
    :func:`tilewise.kernels.cpu.depthwise.sums.sums`."""

    def numbers(self) -> np.ndarray:
        """All numbers in their order, int64."""
        numbers: list[int] = []
        for name in self.__dataclass_fields__:
            value = getattr(self, name)
            numbers.extend(value if isinstance(value, tuple) else (value,))
        return np.array(numbers, dtype=np.int64)


def _indices() -> dict[str, int]:
    """The index of the first number of each field."""
    indices, index = {}, 0
    for name, field in Told.__dataclass_fields__.items():
        indices[name] = index
        index += max(1, str(field.type).count("int"))
    return indices


WORDS = _indices()
"""The index of each field of :class:`Told` among its numbers."""
COUNT = sum(max(1, str(field.type).count("int")) for field in Told.__dataclass_fields__.values())
"""How many numbers :class:`Told` has."""
