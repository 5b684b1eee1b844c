"""Describes which axes are lowered or lifted, and the layout of a thread's scratch. It needs no Numba.

The unfused matrix of Hadjis et al. 2015, section 2.1, has a line for every channel and tap of the axes that are
lowered. In a strip a lifted axis needs lines too, but only one for each remainder by the stride.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from tilewise.kernels.cpu.sizes import PAGE
from tilewise.problems.conv.axis import Axis

__all__ = ["SHAPES", "Block", "Lowered", "Side", "Tap", "side"]

# The indices of the numbers that the kernel calls v: sizes of the problem, of blocks and of strips; strides in bytes of
# images (image, channel and three axes) and filters; addresses of tables and of products; offsets in scratch.
(
    KIND, BATCH, DEPTHS, HEIGHT, WIDTH, IMAGES, ROWS, COLUMNS, DOWN, ALONG, BLOCKS, CHANNELS, SOURCES, OUTPUTS, X, Y,
    SIZES, STEPS, VARIANTS, SPREADS, APART, STARTS, STORED_ROWS, STORED_COLUMNS, PLANE, LINE, CHANNEL_LINES, PHASES,
    PHASE_TABLE, ROW, TILE_ROWS, OUTPUT_BLOCKS, CHUNK, FILTERS, W_GROUP, W_OUTPUT, W_INPUT, PRODUCTS, MOST_DEPTH,
    SUMS, OTHERS, SUM_LINES, SUM_BYTES, SHARES, PARTIAL, CHUNKS,
    PIECES, CHUNK_FILTERS, TILE_BYTES, BIAS, RESIDUAL, FINISH,
) = itertools.chain(range(15), (19, 24, 27, 30, 33, 36), range(39, 70))  # fmt: skip
NUMBERS = 70
# The indices of a phase's numbers: the first position and the count along each axis; the length of its sums, the
# address of their lines, the offset of their filters, and the address and number of runs.
START, COUNT, DEPTH, TABLE, FILTER, RUNS, RUN_COUNT, PHASE_NUMBERS = 0, 3, 6, 7, 8, 9, 10, 11

NUMBER = 4
"""Bytes of an fp32 number."""
SHAPES = {
    16: ((3, 8), (2, 12), (4, 6), (4, 3), (1, 12)),
    8: ((2, 6), (3, 4), (1, 12), (4, 3)),
    4: ((2, 6), (3, 4), (1, 12), (4, 3)),
}
"""The numbers of vectors and rows of sums that stay in registers, by the number of lanes."""
FIRST_CACHE = 18432
"""The bytes of a core's first cache that the vectors of a product may take."""


class Tap(NamedTuple):
    """A tap of an axis: its number, the variant whose line it reads, and how many positions later it reads."""

    number: int
    variant: int
    shift: int


@dataclass(frozen=True)
class Phase:
    """The positions of a result that the same ``taps`` contribute to.

    They are ``count`` positions from ``start`` on, :attr:`Side.apart` from each other.
    """

    start: int
    count: int
    taps: tuple[Tap, ...]


@dataclass(frozen=True)
class Side:
    """An axis, along which positions are ``step`` apart in the source and ``apart`` in the result."""

    size: int
    step: int
    apart: int
    starts: tuple[int, ...]
    """For each variant the source position of the first line element, which may lie before the tensor."""
    phases: tuple[Phase, ...]

    @property
    def count(self) -> int:
        """The number of positions of the longest phase."""
        return max(phase.count for phase in self.phases)

    @property
    def spread(self) -> int:
        """How many positions later than its own a tap may read."""
        return max((tap.shift for phase in self.phases for tap in phase.taps), default=0)


def side(axis: Axis, backward: bool, lowered: bool) -> Side:
    """The description of an axis that is lowered, or else lifted.

    With ``backward`` the source is the output's gradient, and the result has a phase for each remainder by the stride.
    """
    stride, kernel = axis.stride, range(axis.kernel)
    if not backward:
        offsets = [tap * axis.dilation for tap in kernel]
        first = [offset if lowered else offset % stride for offset in offsets]
        starts = sorted(set(first))
        taps = tuple(Tap(tap, starts.index(first[tap]), 0 if lowered else offsets[tap] // stride) for tap in kernel)
        before = tuple(start - axis.before for start in starts)
        return Side(axis.size, stride, 1, before, (Phase(0, axis.out, taps),))
    sources_of_phases = [
        [
            (tap, distance // stride)
            for tap in kernel
            if (distance := phase + axis.before - tap * axis.dilation) % stride == 0
        ]
        for phase in range(min(stride, axis.size))
    ]
    all_starts = sorted({source for sources in sources_of_phases for _, source in sources}) or [0]
    starts = all_starts if lowered else all_starts[:1]
    phases = []
    for phase, sources in enumerate(sources_of_phases):
        taps = tuple(
            Tap(tap, starts.index(source), 0) if lowered else Tap(tap, 0, source - starts[0]) for tap, source in sources
        )
        phases.append(Phase(phase, -(-(axis.size - phase) // stride), taps))
    return Side(axis.out, 1, stride, tuple(starts), tuple(phases))


class Block(NamedTuple):
    """The images, rows and columns of a block of positions."""

    images: int
    rows: int
    columns: int


@dataclass(frozen=True)
class Lowered:
    """A convolution of ``sources`` to ``outputs`` channels in each of ``groups`` groups, in blocks.

    ``chunk`` is the number of channels in a strip at a time. ``tile`` is one of :data:`SHAPES`. For a filter's gradient
    (``gradient``) the blocks are divided into ``shares``, which are summed separately.
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
        """The bytes of a row of sums."""
        return self.tile[0] * self.lanes * NUMBER

    @property
    def grid(self) -> tuple[int, int, int, int]:
        """The number of blocks along images, planes, rows and columns."""
        depth, height, width = (s.count for s in self.sides)
        return (
            -(-self.batch // self.block.images), depth, -(-height // self.block.rows), -(-width // self.block.columns)
        )  # fmt: skip

    @property
    def blocks(self) -> int:
        """The number of blocks of a group."""
        return math.prod(self.grid)

    @property
    def chunks(self) -> int:
        """The number of chunks of channels."""
        return -(-self.sources // self.chunk)

    @property
    def units(self) -> int:
        """The number of units that threads divide among them."""
        return self.groups * (self.chunks * self.shares if self.gradient else self.blocks)

    @property
    def stored(self) -> tuple[int, int]:
        """The rows and columns of a line."""
        return self.block.rows + self.sides[1].spread, self.block.columns + self.sides[2].spread

    @property
    def variants(self) -> int:
        """The number of lines of a channel."""
        return math.prod(len(s.starts) for s in self.sides)

    @property
    def line(self) -> int:
        """The bytes from line to line: no multiple of four cache lines, so that lines spread over the cache."""
        cache_lines = -(-self.block.images * math.prod(self.stored) * NUMBER // 64)
        return 64 * (cache_lines + (cache_lines % 4 == 0))

    @property
    def strip(self) -> int:
        """The bytes of a strip, with those beyond it that vectors may read."""
        return _whole(self.chunk * self.variants * self.line + self.vector)

    @cached_property
    def phases(self) -> list[tuple[Phase, Phase, Phase]]:
        """All combinations of the phases of the three axes."""
        depth, height, width = (s.phases for s in self.sides)
        return list(itertools.product(depth, height, width))

    @property
    def taps(self) -> int:
        """The number of taps of all phases."""
        return sum(math.prod(len(phase.taps) for phase in phases) for phases in self.phases)

    @property
    def output_blocks(self) -> int:
        """The number of blocks of outputs, each with as many outputs as a tile has rows."""
        return -(-self.outputs // self.tile[1])

    @property
    def filters(self) -> int:
        """The bytes of a group's filters in such blocks."""
        return _whole(self.sources * self.taps * self.output_blocks * self.tile[1] * NUMBER)

    def output_chunk(self, cache: int) -> int:
        """The number of blocks of outputs whose filters fit in ``cache`` bytes."""
        deepest = max(math.prod(len(phase.taps) for phase in phases) for phases in self.phases) * self.chunk
        most = max(1, cache // max(1, deepest * self.tile[1] * NUMBER))
        return -(-self.output_blocks // -(-self.output_blocks // most))

    @property
    def chunk_filters(self) -> int:
        """The bytes of the filters of a whole chunk of channels."""
        return self.chunk * self.taps * self.output_blocks * self.tile[1] * NUMBER

    def tiles(self, chunk: int) -> int:
        """The number of tiles of sums in scratch: one, or with several chunks of channels all of a block."""
        if self.chunks == 1:
            return 1
        (images, high, wide), (rows, columns) = self.block, self.stored
        places = ((images - 1) * rows + high - 1) * columns + wide
        return len(self.phases) * -(-self.output_blocks // chunk) * -(-places // (self.tile[0] * self.lanes))

    @property
    def most_depth(self) -> int:
        """The longest sums that stay in registers: their vectors fit the first cache, and shorter sums round less."""
        return max(16, FIRST_CACHE // self.vector)

    @property
    def sum_lines(self) -> int:
        """The bytes of a filter's gradient of a chunk, for as many outputs as a row of sums has."""
        rows = -(-self.chunk * self.taps // self.tile[1]) * self.tile[1]
        return rows * self.vector

    @property
    def sum_bytes(self) -> int:
        """The bytes of a filter's gradient of a chunk, for all outputs."""
        return -(-self.outputs * NUMBER // self.vector) * self.sum_lines

    @property
    def places(self) -> int:
        """The bytes of one row of sums at every position of a block."""
        return _whole(math.prod(self.block) * self.vector)

    def scratch(self, chunk: int) -> int:
        """The bytes of a thread's scratch, with ``chunk`` blocks of outputs at a time."""
        if self.gradient:
            return self.strip + self.places + (_whole(self.sum_bytes) if self.shares == 1 else 0)
        return self.strip + _whole(self.tiles(chunk) * chunk * self.tile[1] * self.vector)

    @property
    def partial(self) -> int:
        """The bytes of the sums of all shares."""
        return self.units * self.sum_bytes if self.shares > 1 else 0

    def terms(self, phase: Sequence[Phase], apart: Sequence[int], channels: int) -> tuple[np.ndarray, np.ndarray]:
        """For each term of a phase's sums the offset of its line in a strip, and of its number in the filter, in bytes.

        ``apart`` has the bytes between the filter's channels of the source, and between its taps along each axis. Terms
        are in the order of the filter.
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
        """Runs of neighbouring numbers: the offset of the first, how many there are, and the index of the first."""
        begins = np.flatnonzero(np.diff(places, prepend=places[:1] - 2 * NUMBER) != NUMBER)
        return np.stack([places[begins], np.diff(begins, append=len(places)), begins], axis=1).astype(np.int64)


def _sums(parts: Sequence[np.ndarray]) -> np.ndarray:
    """The sums of all combinations of one number of each part."""
    sums = parts[0]
    for part in parts[1:]:
        sums = (sums[:, None] + part[None, :]).ravel()
    return sums.astype(np.int64)


def _whole(size: int) -> int:
    """``size`` rounded up to whole pages."""
    return -(-size // PAGE) * PAGE
