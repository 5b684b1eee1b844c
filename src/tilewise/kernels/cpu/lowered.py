"""What is lowered and what is lifted, and where in a thread's scratch it lies. Knows nothing of Numba.

The unfused matrix of Hadjis et al. 2015, section 2.1, has a line for every channel and tap of the axes that are
lowered. In a strip an axis that is lifted costs lines too, but only as many as the stride leaves remainders.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from tilewise.axis import Axis
from tilewise.kernels.cpu.sizes import PAGE

__all__ = ["SHAPES", "Block", "Lowered", "Side", "Tap", "side"]

# What the kernel calls v: sizes of the problem, of blocks and of strips; strides in bytes, of images (image, channel
# and three axes) and filters; addresses of tables and of products; places in scratch.
(
    KIND, BATCH, DEPTHS, HEIGHT, WIDTH, IMAGES, ROWS, COLUMNS, DOWN, ALONG, BLOCKS, CHANNELS, SOURCES, OUTPUTS, X, Y,
    SIZES, STEPS, VARIANTS, SPREADS, APART, STARTS, STORED_ROWS, STORED_COLUMNS, PLANE, LINE, CHANNEL_LINES, PHASES,
    PHASE_TABLE, ROW, TILE_ROWS, OUTPUT_BLOCKS, CHUNK, FILTERS, W_GROUP, W_OUTPUT, W_INPUT, PRODUCTS, MOST_DEPTH,
    SUMS, OTHERS, SUM_LINES, SUM_BYTES, SHARES, PARTIAL, CHUNKS,
    PIECES, CHUNK_FILTERS, TILE_BYTES, BIAS,
) = itertools.chain(range(15), (19, 24, 27, 30, 33, 36), range(39, 68))  # fmt: skip
NUMBERS = 68
# And of a phase: the first place and how many, by axis; terms of its sums, where their lines and filters are, and runs.
START, COUNT, DEPTH, TABLE, FILTER, RUNS, RUN_COUNT, PHASE_NUMBERS = 0, 3, 6, 7, 8, 9, 10, 11

NUMBER = 4
"""Bytes of an fp32 number."""
SHAPES = {
    16: ((3, 8), (2, 12), (4, 6), (4, 3), (1, 12)),
    8: ((2, 6), (3, 4), (1, 12), (4, 3)),
    4: ((2, 6), (3, 4), (1, 12), (4, 3)),
}
"""Vectors and rows of sums that stay in registers, by lanes."""
FIRST_CACHE = 18432
"""Bytes of a core's first cache that a product's vectors may take."""


class Tap(NamedTuple):
    """One of an axis: its number, whose variant's line it reads, and how many places on."""

    number: int
    variant: int
    shift: int


@dataclass(frozen=True)
class Phase:
    """Every ``apart``-th place of a result from ``start`` on, ``count`` of them: those that the same taps reach."""

    start: int
    count: int
    taps: tuple[Tap, ...]


@dataclass(frozen=True)
class Side:
    """An axis. From place to place the source moves on by ``step``, and the result by ``apart``."""

    size: int
    step: int
    apart: int
    starts: tuple[int, ...]
    """Of variants: the source of the first place, which may be before the tensor."""
    phases: tuple[Phase, ...]

    @property
    def count(self) -> int:
        """Places of the longest phase."""
        return max(phase.count for phase in self.phases)

    @property
    def spread(self) -> int:
        """How far beyond a place taps reach."""
        return max((tap.shift for phase in self.phases for tap in phase.taps), default=0)


def side(axis: Axis, backward: bool, lowered: bool) -> Side:
    """An axis that is lowered or lifted; ``backward`` gathers the output's gradient, phase by phase of the stride."""
    s, taps = axis.stride, range(axis.kernel)
    if not backward:
        found = [t * axis.dilation for t in taps]
        first = [n if lowered else n % s for n in found]
        starts = sorted(set(first))
        each = tuple(Tap(t, starts.index(first[t]), 0 if lowered else found[t] // s) for t in taps)
        before = tuple(start - axis.before for start in starts)
        return Side(axis.size, s, 1, before, (Phase(0, axis.out, each),))
    behind = [[(t, n // s) for t in taps if (n := f + axis.before - t * axis.dilation) % s == 0] for f in range(s)]
    behind = behind[: axis.size]
    every = sorted({start for phase in behind for _, start in phase}) or [0]
    starts = every if lowered else every[:1]
    phases = []
    for f, phase in enumerate(behind):
        each = tuple(Tap(t, starts.index(n), 0) if lowered else Tap(t, 0, n - starts[0]) for t, n in phase)
        phases.append(Phase(f, -(-(axis.size - f) // s), each))
    return Side(axis.out, 1, s, tuple(starts), tuple(phases))


class Block(NamedTuple):
    """Images, rows and columns of places."""

    images: int
    rows: int
    columns: int


@dataclass(frozen=True)
class Lowered:
    """A convolution of ``sources`` to ``outputs`` channels in each of ``groups``, in blocks.

    ``chunk`` is how many channels lie in a strip at a time; of a filter's gradient (``gradient``) ``shares`` of the
    blocks are summed apart. ``tile`` is one of :data:`SHAPES`.
    """

    sides: tuple[Side, Side, Side]
    batch: int
    groups: int
    sources: int
    outputs: int
    block: Block
    tile: tuple[int, int]
    lanes: int
    gradient: bool
    chunk: int
    shares: int = 1

    @property
    def vector(self) -> int:
        """Bytes of the vectors of a row of sums."""
        return self.tile[0] * self.lanes * NUMBER

    @property
    def grid(self) -> tuple[int, int, int, int]:
        """Blocks: of images, planes, rows and columns."""
        depth, height, width = (s.count for s in self.sides)
        return (
            -(-self.batch // self.block.images), depth, -(-height // self.block.rows), -(-width // self.block.columns)
        )  # fmt: skip

    @property
    def blocks(self) -> int:
        """Of a group."""
        return math.prod(self.grid)

    @property
    def chunks(self) -> int:
        """How often so many channels it takes."""
        return -(-self.sources // self.chunk)

    @property
    def units(self) -> int:
        """What threads share out."""
        return self.groups * (self.chunks * self.shares if self.gradient else self.blocks)

    @property
    def stored(self) -> tuple[int, int]:
        """Rows and columns of a line."""
        return self.block.rows + self.sides[1].spread, self.block.columns + self.sides[2].spread

    @property
    def variants(self) -> int:
        """Lines of a channel."""
        return math.prod(len(s.starts) for s in self.sides)

    @property
    def line(self) -> int:
        """Bytes from line to line: no multiple of four of a cache's, so that they share it out."""
        found = -(-self.block.images * math.prod(self.stored) * NUMBER // 64)
        return 64 * (found + (found % 4 == 0))

    @property
    def strip(self) -> int:
        """Bytes of a strip, and of what vectors may reach beyond it."""
        return _whole(self.chunk * self.variants * self.line + self.vector)

    @cached_property
    def phases(self) -> list[tuple[Phase, Phase, Phase]]:
        """Of all axes."""
        depth, height, width = (s.phases for s in self.sides)
        return list(itertools.product(depth, height, width))

    @property
    def taps(self) -> int:
        """Of all phases."""
        return sum(math.prod(len(phase.taps) for phase in each) for each in self.phases)

    @property
    def output_blocks(self) -> int:
        """Blocks of rows that outputs go in."""
        return -(-self.outputs // self.tile[1])

    @property
    def filters(self) -> int:
        """Bytes of a group's filters in such blocks."""
        return _whole(self.sources * self.taps * self.output_blocks * self.tile[1] * NUMBER)

    def output_chunk(self, cache: int) -> int:
        """Blocks of outputs whose filters stay in so many bytes of a cache."""
        deepest = max(math.prod(len(phase.taps) for phase in each) for each in self.phases) * self.chunk
        most = max(1, cache // max(1, deepest * self.tile[1] * NUMBER))
        return -(-self.output_blocks // -(-self.output_blocks // most))

    @property
    def chunk_filters(self) -> int:
        """Bytes of a whole chunk's."""
        return self.chunk * self.taps * self.output_blocks * self.tile[1] * NUMBER

    def tiles(self, chunk: int) -> int:
        """Tiles of sums in scratch: one, or where channels go in several chunks all of a block's."""
        if self.chunks == 1:
            return 1
        (images, high, wide), (rows, columns) = self.block, self.stored
        places = ((images - 1) * rows + high - 1) * columns + wide
        return len(self.phases) * -(-self.output_blocks // chunk) * -(-places // (self.tile[0] * self.lanes))

    @property
    def most_depth(self) -> int:
        """Longest sums that are kept in registers: their vectors fit the first cache, and sums of sums round less."""
        return max(16, FIRST_CACHE // self.vector)

    @property
    def sum_lines(self) -> int:
        """Bytes of a filter's gradient of a chunk, for as many outputs as a row of sums has."""
        rows = -(-self.chunk * self.taps // self.tile[1]) * self.tile[1]
        return rows * self.vector

    @property
    def sum_bytes(self) -> int:
        """The same for all outputs."""
        return -(-self.outputs * NUMBER // self.vector) * self.sum_lines

    @property
    def places(self) -> int:
        """Bytes of one row of sums at every place of a block."""
        return _whole(math.prod(self.block) * self.vector)

    def scratch(self, chunk: int) -> int:
        """Bytes of a thread's scratch, with ``chunk`` blocks of outputs at a time."""
        if self.gradient:
            return self.strip + self.places + (_whole(self.sum_bytes) if self.shares == 1 else 0)
        return self.strip + _whole(self.tiles(chunk) * chunk * self.tile[1] * self.vector)

    @property
    def partial(self) -> int:
        """Bytes of what shares come to."""
        return self.units * self.sum_bytes if self.shares > 1 else 0

    def terms(self, phase: Sequence[Phase], apart: Sequence[int], channels: int) -> tuple[np.ndarray, np.ndarray]:
        """Where each term of a phase's sums has its line in a strip and its number in the filter, in bytes.

        ``apart`` are bytes between the filter's channels of the source and its taps. In the order of the filter.
        """
        axes: list[np.ndarray] = []
        filters: list[np.ndarray] = []
        starts = [len(side.starts) for side in self.sides]
        strides = self.line * np.array([self.variants, starts[1] * starts[2], starts[2], 1], dtype=np.int64)
        shifts = NUMBER * np.array([0, 0, self.stored[1], 1], dtype=np.int64)
        axes.append(np.arange(channels, dtype=np.int64) * strides[0])
        filters.append(np.arange(channels, dtype=np.int64) * apart[0])
        for i, part in enumerate(phase):
            taps = np.array(part.taps, dtype=np.int64).reshape(-1, 3)
            axes.append(taps[:, 1] * strides[i + 1] + taps[:, 2] * shifts[i + 1])
            filters.append(taps[:, 0] * apart[i + 1])
        lines = _sums(axes)
        places = _sums(filters)
        order = np.argsort(places, kind="stable")
        return lines[order], places[order]

    def runs(self, places: np.ndarray) -> np.ndarray:
        """Neighbours of these: the first's place, how many, and its index."""
        begins = np.flatnonzero(np.diff(places, prepend=places[:1] - 2 * NUMBER) != NUMBER)
        return np.stack([places[begins], np.diff(begins, append=len(places)), begins], axis=1).astype(np.int64)


def _sums(parts: Sequence[np.ndarray]) -> np.ndarray:
    """One of each, in every combination."""
    found = parts[0]
    for part in parts[1:]:
        found = (found[:, None] + part[None, :]).ravel()
    return found.astype(np.int64)


def _whole(size: int) -> int:
    return -(-size // PAGE) * PAGE
