"""How an image's tiles go in blocks, and where in a thread's scratch what lies. Knows nothing of Numba."""

from __future__ import annotations

import math
from dataclasses import dataclass

from tilewise.kernels.cpu.sizes import PAGE

__all__ = ["ROWS", "GradientTiling", "Tiling", "rows_of"]

# What the worker calls v: sizes of the problem, of blocks and of tiles; the image, what it is convolved to and the
# filter, with bytes between neighbours; addresses of functions; places in scratch and bytes between neighbours there.
(
    KIND, INPUTS, OUTPUTS, TILE_ROWS, SLICE_ROWS, SLICES, ACROSS, ROWS_, COLUMNS, SEGMENTS, BLOCKS, SHARES, SHARE,
    CHUNKS, PARTS, VECTORS, M_DEPTH, M_HEIGHT, M_WIDTH, R_DEPTH, R_HEIGHT, R_WIDTH, N_DEPTH, N_HEIGHT, N_WIDTH,
    X_DEPTH, X_HEIGHT, X_WIDTH, LEAD_DEPTH, LEAD_HEIGHT, LEAD_WIDTH, X_IMAGE, X_CHANNEL, X_SLICE, X_ROW, X_COLUMN,
    Y_DEPTH, Y_HEIGHT, Y_WIDTH, Y_IMAGE, Y_CHANNEL, Y_SLICE, Y_ROW, Y_COLUMN,
    W_GROUP, W_OUTPUT, W_INPUT, W_SLICE, W_ROW, W_COLUMN, TURNED,
    FORWARD, FILTER, BACKWARD, DEEP_FORWARD, DEEP_FILTER, DEEP_BACKWARD, PRODUCTS, W_PART, BLOCK_ROWS, DISTANCES,
    LINE, PANEL, TILE, FREQUENCY, OTHER_TILE, OTHER_FREQUENCY, SUM_TILE, SUM_FREQUENCY, OTHERS, SUMS, STRIP, BETWEEN,
    BIAS, BIAS_VECTOR, NUMBERS,
) = range(76)  # fmt: skip

Sizes = tuple[int, int, int]
"""Along depth, height and width; 1 where there is no such axis."""
NUMBER = 4
"""Bytes of an fp32 number."""
ROWS = {1: (12, 8, 4), 2: (12, 10, 8, 6, 4), 3: (8, 6, 4), 4: (6, 5, 4, 3)}
"""Rows that blocks of so many vectors may have: the most leave one or two of 32 registers."""


def rows_of(vectors: int, count: int) -> int:
    """Rows of the blocks that ``count`` are taken in, the last of which may go beyond it."""
    even = -(-count // -(-count // ROWS[vectors][0]))
    return min(rows for rows in ROWS[vectors] if rows >= even)


@dataclass(frozen=True, slots=True)
class Tiling:
    """Images of ``image`` outputs in tiles of ``m``, from filters of ``r`` taps; of each of ``groups`` groups.

    A block has tiles of up to ``rows`` tile rows, counted through all slices of all of ``batch`` images, and
    ``columns`` columns; outputs go ``vectors`` vectors of ``lanes`` at a time, in so many ``shares``.
    """

    m: Sizes
    r: Sizes
    lanes: int
    vectors: int
    batch: int
    groups: int
    inputs: int
    outputs: int
    image: Sizes
    rows: int
    columns: int
    shares: int = 1
    parts: int = 1

    @property
    def n(self) -> Sizes:
        """Points of a tile along each axis."""
        depth, height, width = (m + r - 1 for m, r in zip(self.m, self.r, strict=True))
        return depth, height, width

    @property
    def points(self) -> int:
        """All of them: frequencies."""
        return math.prod(self.n)

    @property
    def along(self) -> Sizes:
        """Tiles of an image along each axis."""
        depth, height, width = (-(-size // m) for size, m in zip(self.image, self.m, strict=True))
        return depth, height, width

    @property
    def tiles(self) -> tuple[int, int]:
        """Tile rows of all images, and tiles to a row."""
        slices, rows, columns = self.along
        return self.batch * slices * rows, columns

    @property
    def segments(self) -> int:
        """Blocks beside each other."""
        return -(-self.tiles[1] // self.columns)

    @property
    def blocks(self) -> int:
        """Blocks of a group."""
        return -(-self.tiles[0] // self.rows) * self.segments

    @property
    def chunks(self) -> int:
        """How often so many vectors it takes for a group's outputs."""
        return -(-self.outputs // (self.vectors * self.lanes))

    @property
    def units(self) -> int:
        """What threads share out."""
        return self.groups * self.blocks * self.shares

    @property
    def vector(self) -> int:
        """Bytes of a vector."""
        return NUMBER * self.lanes

    @property
    def line(self) -> int:
        """Bytes of ``vectors`` vectors."""
        return self.vector * self.vectors

    @property
    def panel(self) -> int:
        """Bytes from transformed filters at one frequency to those at the next."""
        return self._odd(self.inputs * self.line)

    @property
    def filters(self) -> int:
        """Bytes of all transformed filters."""
        return self.groups * self.chunks * self.points * self.panel

    @property
    def block_rows(self) -> int:
        """Rows of a block of the products."""
        return rows_of(self.vectors, self.rows * self.columns)

    @property
    def _room(self) -> int:
        """Tiles of a block and those that products may go beyond it."""
        return -(-self.rows * self.columns // self.block_rows) * self.block_rows

    @property
    def tile(self) -> int:
        """Bytes from a tile's inputs to the next one's: of all frequencies, which a transform writes side by side."""
        return self._odd(self.points * self.frequency)

    @property
    def frequency(self) -> int:
        """Bytes from a tile's inputs at one frequency to those at the next."""
        return self._whole(NUMBER * self.inputs)

    @property
    def sum_tile(self) -> int:
        """The same of a tile's sums."""
        return self._odd(self.points * self.line)

    @property
    def sum_frequency(self) -> int:
        """And of those at a frequency."""
        return self.line

    @property
    def sums(self) -> int:
        """Where sums begin in a thread's scratch: behind transformed inputs."""
        return self._room * self.tile

    @property
    def strip(self) -> int:
        """Where an image's strip begins: behind sums."""
        return self.sums + self._room * self.sum_tile

    @property
    def between(self) -> int:
        """Where what is transformed along height and width alone begins, of tiles that have depth: behind the strip."""
        rows = min(self.rows, self.along[1]) * self.m[1] + self.r[1] - 1
        taps = math.prod(self.r) + self.lanes
        return self.strip + max(rows * (self.columns * self.m[2] + self.r[2] - 1 + self.lanes), taps) * self.vector

    @property
    def bias_vector(self) -> int:
        """Where a vector of biases lies: behind all else."""
        deep, height, width = self.n
        planes = max(self.rows * self.columns * deep, self.r[0]) if deep > 1 else 0
        return self.between + planes * height * width * self.vector

    @property
    def scratch(self) -> int:
        """Bytes of a thread's scratch."""
        return -(-(self.bias_vector + self.vector) // PAGE) * PAGE

    def _whole(self, size: int) -> int:
        return -(-size // self.vector) * self.vector

    def _odd(self, size: int) -> int:
        """An odd number of vectors, so that what lies so far apart shares out over the cache."""
        return (-(-size // self.vector) | 1) * self.vector

    def numbers(self) -> dict[int, int]:
        """What the worker takes of it, by index."""
        return {
            INPUTS: self.inputs, OUTPUTS: self.outputs, TILE_ROWS: self.tiles[0], SLICE_ROWS: self.along[1],
            SLICES: self.along[0], ACROSS: self.tiles[1], ROWS_: self.rows, COLUMNS: self.columns,
            SEGMENTS: self.segments, BLOCKS: self.blocks, SHARES: self.shares, CHUNKS: self.chunks, PARTS: self.parts,
            VECTORS: self.vectors, **dict(zip(range(M_DEPTH, X_DEPTH), (*self.m, *self.r, *self.n), strict=True)),
            BLOCK_ROWS: self.block_rows, LINE: self.line, PANEL: self.panel,
            TILE: self.tile, FREQUENCY: self.frequency, SUM_TILE: self.sum_tile, SUM_FREQUENCY: self.sum_frequency,
            SUMS: self.sums, STRIP: self.strip, BETWEEN: self.between, BIAS_VECTOR: self.bias_vector,
        }  # fmt: skip

    def distances(self) -> list[int]:
        """What products take as such."""
        return [self.tile, NUMBER, self.frequency, self.line, self.panel, self.sum_tile, self.sum_frequency]


@dataclass(frozen=True, slots=True)
class GradientTiling(Tiling):
    """Filters' gradients: ``vectors`` vectors of inputs and a share of the outputs at a time.

    From all blocks, or from those of one of ``parts`` that are added up in the end.
    """

    @property
    def chunks(self) -> int:
        """How often so many vectors it takes for a group's inputs."""
        return -(-self.inputs // (self.vectors * self.lanes))

    @property
    def units(self) -> int:
        return self.groups * self.chunks * self.shares * self.parts

    @property
    def share(self) -> int:
        """Outputs of a share."""
        return -(-self.outputs // self.shares)

    @property
    def block_rows(self) -> int:
        return rows_of(self.vectors, self.share)

    @property
    def tile(self) -> int:
        """Bytes from a tile's inputs at one frequency to the next one's, over which sums go."""
        return self.line

    @property
    def frequency(self) -> int:
        return self._odd(self.rows * self.columns * self.tile)

    @property
    def other_tile(self) -> int:
        """Bytes from a tile's outputs at one frequency to the next one's."""
        return self._whole(NUMBER * self.share)

    @property
    def other_frequency(self) -> int:
        """Bytes from a block's outputs at one frequency to those at the next."""
        return self._odd(self.rows * self.columns * self.other_tile)

    @property
    def sum_tile(self) -> int:
        """Bytes from an output's sums at one frequency to the next one's."""
        return self.line

    @property
    def sum_frequency(self) -> int:
        return self._odd(-(-self.share // self.block_rows) * self.block_rows * self.line)

    @property
    def others(self) -> int:
        """Where transformed outputs begin in a thread's scratch: behind inputs."""
        return self.points * self.frequency

    @property
    def sums(self) -> int:
        return self.others + self.points * self.other_frequency

    @property
    def strip(self) -> int:
        return self.sums + self.points * self.sum_frequency

    def numbers(self) -> dict[int, int]:
        mine = {
            SHARE: self.share, OTHERS: self.others, OTHER_TILE: self.other_tile, OTHER_FREQUENCY: self.other_frequency,
        }  # fmt: skip
        return {**Tiling.numbers(self), **mine}

    def distances(self) -> list[int]:
        return [
            NUMBER, self.other_tile, self.other_frequency, self.tile, self.frequency, self.line, self.sum_frequency,
        ]  # fmt: skip
