"""Describes how the tiles of an image form blocks, and the layout of a thread's scratch. It needs no Numba."""

from __future__ import annotations

import math
from dataclasses import dataclass

from tilewise.kernels.cpu.sizes import PAGE

__all__ = ["ROWS", "GradientTiling", "Tiling", "rows_of"]

# The indices of the numbers that the worker calls v: sizes of the problem, of blocks and of tiles; sizes and strides in
# bytes of the image (X), its result (Y) and the filter (W); addresses of functions; offsets and strides in scratch.
(
    KIND, INPUTS, OUTPUTS, TILE_ROWS, SLICE_ROWS, SLICES, ACROSS, ROWS_, COLUMNS, SEGMENTS, BLOCKS, SHARES, SHARE,
    CHUNKS, PARTS, VECTORS, M_DEPTH, M_HEIGHT, M_WIDTH, R_DEPTH, R_HEIGHT, R_WIDTH, N_DEPTH, N_HEIGHT, N_WIDTH,
    X_DEPTH, X_HEIGHT, X_WIDTH, LEAD_DEPTH, LEAD_HEIGHT, LEAD_WIDTH, X_IMAGE, X_CHANNEL, X_SLICE, X_ROW, X_COLUMN,
    Y_DEPTH, Y_HEIGHT, Y_WIDTH, Y_IMAGE, Y_CHANNEL, Y_SLICE, Y_ROW, Y_COLUMN,
    W_GROUP, W_OUTPUT, W_INPUT, W_SLICE, W_ROW, W_COLUMN, TURNED,
    FORWARD, FILTER, BACKWARD, DEEP_FORWARD, DEEP_FILTER, DEEP_BACKWARD, PRODUCTS, W_PART, BLOCK_ROWS, DISTANCES,
    LINE, PANEL, TILE, FREQUENCY, OTHER_TILE, OTHER_FREQUENCY, SUM_TILE, SUM_FREQUENCY, OTHERS, SUMS, STRIP, BETWEEN,
    BIAS, BIAS_VECTOR, RESIDUAL, FINISH, NUMBERS,
) = range(78)  # fmt: skip

Sizes = tuple[int, int, int]
"""The sizes along depth, height and width; 1 where there is no such axis."""
NUMBER = 4
"""Bytes of an fp32 number."""
ROWS = {1: (12, 8, 4), 2: (12, 10, 8, 6, 4), 3: (8, 6, 4), 4: (6, 5, 4, 3)}
"""The numbers of rows that a block may have, by its number of vectors: the largest leave one or two of 32 registers."""


def rows_of(vectors: int, count: int) -> int:
    """The number of rows of the blocks into which ``count`` rows are divided; the last block may be too large."""
    even = -(-count // -(-count // ROWS[vectors][0]))
    return min(rows for rows in ROWS[vectors] if rows >= even)


@dataclass(frozen=True, slots=True)
class Tiling:
    """A convolution with filters of ``r`` taps, whose results of the sizes ``image`` are computed in tiles of ``m``.

    There are ``groups`` groups of ``inputs`` and ``outputs`` channels. A block has up to ``rows`` rows of tiles,
    counted through all slices of all of ``batch`` images, and up to ``columns`` columns. Output channels are computed
    ``vectors`` vectors of ``lanes`` lanes at a time, and are divided into ``shares``.
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
        """The points of a transformed tile along each axis."""
        depth, height, width = (m + r - 1 for m, r in zip(self.m, self.r, strict=True))
        return depth, height, width

    @property
    def points(self) -> int:
        """The number of points of a transformed tile, called frequencies."""
        return math.prod(self.n)

    @property
    def along(self) -> Sizes:
        """The number of tiles of an image along each axis."""
        depth, height, width = (-(-size // m) for size, m in zip(self.image, self.m, strict=True))
        return depth, height, width

    @property
    def tiles(self) -> tuple[int, int]:
        """The number of tile rows of all images, and of tiles in a row."""
        slices, rows, columns = self.along
        return self.batch * slices * rows, columns

    @property
    def segments(self) -> int:
        """The number of blocks in a row of blocks."""
        return -(-self.tiles[1] // self.columns)

    @property
    def blocks(self) -> int:
        """The number of blocks of a group."""
        return -(-self.tiles[0] // self.rows) * self.segments

    @property
    def chunks(self) -> int:
        """The number of chunks of ``vectors`` vectors that a group's outputs are divided into."""
        return -(-self.outputs // (self.vectors * self.lanes))

    @property
    def units(self) -> int:
        """The number of units that threads divide among them."""
        return self.groups * self.blocks * self.shares

    @property
    def vector(self) -> int:
        """The bytes of a vector."""
        return NUMBER * self.lanes

    @property
    def line(self) -> int:
        """The bytes of ``vectors`` vectors."""
        return self.vector * self.vectors

    @property
    def panel(self) -> int:
        """The bytes from transformed filters at one frequency to those at the next."""
        return self._odd(self.inputs * self.line)

    @property
    def filters(self) -> int:
        """The bytes of all transformed filters."""
        return self.groups * self.chunks * self.points * self.panel

    @property
    def block_rows(self) -> int:
        """The rows of a block of the products."""
        return rows_of(self.vectors, self.rows * self.columns)

    @property
    def _room(self) -> int:
        """The tiles of a block, and those beyond it that products may write."""
        return -(-self.rows * self.columns // self.block_rows) * self.block_rows

    @property
    def tile(self) -> int:
        """The bytes from the transformed inputs of one tile, of all its frequencies, to those of the next."""
        return self._odd(self.points * self.frequency)

    @property
    def frequency(self) -> int:
        """The bytes from a tile's inputs at one frequency to those at the next."""
        return self._whole(NUMBER * self.inputs)

    @property
    def sum_tile(self) -> int:
        """The bytes from the sums of one tile to those of the next."""
        return self._odd(self.points * self.line)

    @property
    def sum_frequency(self) -> int:
        """The bytes from a tile's sums at one frequency to those at the next."""
        return self.line

    @property
    def sums(self) -> int:
        """The offset of sums in a thread's scratch: after transformed inputs."""
        return self._room * self.tile

    @property
    def strip(self) -> int:
        """The offset of an image's strip: after sums."""
        return self.sums + self._room * self.sum_tile

    @property
    def between(self) -> int:
        """The offset of slices that are transformed along height and width but not yet along depth: after the strip."""
        rows = min(self.rows, self.along[1]) * self.m[1] + self.r[1] - 1
        taps = math.prod(self.r) + self.lanes
        return self.strip + max(rows * (self.columns * self.m[2] + self.r[2] - 1 + self.lanes), taps) * self.vector

    @property
    def bias_vector(self) -> int:
        """The offset of a vector of biases: after everything else."""
        deep, height, width = self.n
        planes = max(self.rows * self.columns * deep, self.r[0]) if deep > 1 else 0
        return self.between + planes * height * width * self.vector

    @property
    def scratch(self) -> int:
        """The bytes of a thread's scratch."""
        return -(-(self.bias_vector + self.vector) // PAGE) * PAGE

    def _whole(self, size: int) -> int:
        """``size`` rounded up to whole vectors."""
        return -(-size // self.vector) * self.vector

    def _odd(self, size: int) -> int:
        """``size`` rounded up to an odd number of vectors, a distance that spreads data over all sets of the cache."""
        return (-(-size // self.vector) | 1) * self.vector

    def numbers(self) -> dict[int, int]:
        """The worker's numbers of this tiling, by index."""
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
        """The argument ``distances`` of the products."""
        return [self.tile, NUMBER, self.frequency, self.line, self.panel, self.sum_tile, self.sum_frequency]


@dataclass(frozen=True, slots=True)
class GradientTiling(Tiling):
    """Filters' gradients, for ``vectors`` vectors of inputs and a share of the outputs at a time.

    The blocks are divided into ``parts``, whose sums are added up in the end.
    """

    @property
    def chunks(self) -> int:
        """The number of chunks of ``vectors`` vectors that a group's inputs are divided into."""
        return -(-self.inputs // (self.vectors * self.lanes))

    @property
    def units(self) -> int:
        return self.groups * self.chunks * self.shares * self.parts

    @property
    def share(self) -> int:
        """The number of outputs of a share."""
        return -(-self.outputs // self.shares)

    @property
    def block_rows(self) -> int:
        return rows_of(self.vectors, self.share)

    @property
    def tile(self) -> int:
        """The bytes from a tile's inputs at one frequency to those of the next tile; sums run over tiles."""
        return self.line

    @property
    def frequency(self) -> int:
        return self._odd(self.rows * self.columns * self.tile)

    @property
    def other_tile(self) -> int:
        """The bytes from a tile's outputs at one frequency to those of the next tile."""
        return self._whole(NUMBER * self.share)

    @property
    def other_frequency(self) -> int:
        """The bytes from a block's outputs at one frequency to those at the next."""
        return self._odd(self.rows * self.columns * self.other_tile)

    @property
    def sum_tile(self) -> int:
        """The bytes from an output's sums at one frequency to those of the next output."""
        return self.line

    @property
    def sum_frequency(self) -> int:
        return self._odd(-(-self.share // self.block_rows) * self.block_rows * self.line)

    @property
    def others(self) -> int:
        """The offset of transformed outputs in a thread's scratch: after inputs."""
        return self.points * self.frequency

    @property
    def sums(self) -> int:
        return self.others + self.points * self.other_frequency

    @property
    def strip(self) -> int:
        return self.sums + self.points * self.sum_frequency

    def numbers(self) -> dict[int, int]:
        further = {
            SHARE: self.share, OTHERS: self.others, OTHER_TILE: self.other_tile, OTHER_FREQUENCY: self.other_frequency,
        }  # fmt: skip
        return {**Tiling.numbers(self), **further}

    def distances(self) -> list[int]:
        return [
            NUMBER, self.other_tile, self.other_frequency, self.tile, self.frequency, self.line, self.sum_frequency,
        ]  # fmt: skip
