"""How a plane's tiles go in blocks, and where in a thread's scratch what lies. Knows nothing of Numba."""

from __future__ import annotations

import math
from dataclasses import dataclass

from tilewise.kernels.cpu.sizes import PAGE

__all__ = ["NUMBERS", "ROWS", "Tiling", "rows_of"]

NUMBER = 4
"""Bytes of an fp32 number."""
NUMBERS = 43
"""Integers that a worker takes beside addresses."""
ROWS = {1: (12, 8, 4), 2: (12, 10, 8, 6, 4), 3: (8, 6, 4), 4: (6, 5, 4, 3)}
"""Rows that blocks of so many vectors may have: the most leave one or two of 32 registers."""


def rows_of(vectors: int, count: int) -> int:
    """Rows of the blocks that ``count`` are taken in, the last of which may go beyond it."""
    even = -(-count // -(-count // ROWS[vectors][0]))
    return min(rows for rows in ROWS[vectors] if rows >= even)


@dataclass(frozen=True, slots=True)
class Tiling:
    """Planes of ``result`` outputs in tiles of ``m``, from filters of ``r`` taps; of each of ``groups`` groups.

    A block has tiles of up to ``rows`` tile rows, counted through all of ``batch`` images, and ``columns`` columns;
    outputs go ``vectors`` vectors of ``lanes`` at a time, in so many ``shares``.
    """

    m: int
    r: int
    lanes: int
    vectors: int
    batch: int
    groups: int
    inputs: int
    outputs: int
    result: tuple[int, int]
    rows: int
    columns: int
    shares: int = 1

    @property
    def n(self) -> int:
        """Points of a tile along each axis."""
        return self.m + self.r - 1

    @property
    def tiles(self) -> tuple[int, int]:
        """Tile rows of all images, and tiles to a row."""
        return self.batch * -(-self.result[0] // self.m), -(-self.result[1] // self.m)

    @property
    def blocks(self) -> int:
        """Blocks of a group."""
        return math.prod(-(-n // size) for n, size in zip(self.tiles, (self.rows, self.columns), strict=True))

    @property
    def chunks(self) -> int:
        """How often so many vectors it takes for a group's outputs."""
        return -(-self.outputs // (self.vectors * self.lanes))

    @property
    def line(self) -> int:
        """Bytes of ``vectors`` vectors."""
        return NUMBER * self.lanes * self.vectors

    @property
    def filters(self) -> int:
        """Bytes of all transformed filters."""
        return self.groups * self.chunks * self.n**2 * self.inputs * self.line

    @property
    def block_rows(self) -> int:
        """Rows of a block of the products."""
        return rows_of(self.vectors, self.rows * self.columns)

    @property
    def _room(self) -> int:
        """Tiles of a block and those that products may go beyond it."""
        return -(-self.rows * self.columns // self.block_rows) * self.block_rows

    @property
    def tile_pitch(self) -> int:
        """Bytes from a tile's inputs at one frequency to the next one's: of whole vectors."""
        return NUMBER * self.lanes * -(-self.inputs // self.lanes)

    @property
    def frequency_pitch(self) -> int:
        """Bytes from a block's inputs at one frequency to those at the next: odd, in lines of a cache."""
        return self._odd(self._room * self.tile_pitch)

    @property
    def sum_pitch(self) -> int:
        """The same of sums."""
        return self._odd(self._room * self.line)

    @property
    def strip_pitch(self) -> int:
        """Bytes of a row of an image's strip."""
        return NUMBER * self.lanes * (self.columns * self.m + self.r - 1 + self.lanes)

    @property
    def sums(self) -> int:
        """Where sums begin in a thread's scratch: behind transformed inputs."""
        return self.n**2 * self.frequency_pitch

    @property
    def strip(self) -> int:
        """Where an image's strip begins: behind sums."""
        return self.sums + self.n**2 * self.sum_pitch

    @property
    def scratch(self) -> int:
        """Bytes of a thread's scratch."""
        rows = min(self.rows, -(-self.result[0] // self.m)) * self.m + self.r - 1
        strip = max(rows * self.strip_pitch, NUMBER * self.lanes * (self.r**2 + self.lanes))
        return -(-(self.strip + strip) // PAGE) * PAGE

    def _odd(self, size: int) -> int:
        unit = NUMBER * self.lanes
        return ((-(-size // unit)) | 1) * unit

    def distances(self) -> list[int]:
        """What products take as such."""
        panel = self.inputs * self.line
        return [self.tile_pitch, NUMBER, self.frequency_pitch, self.line, panel, self.line, self.sum_pitch]
