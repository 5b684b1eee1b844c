"""Gradients of filters by tile registers: how their work is divided."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import torch

from tilewise.kernels.cpu.tile_registers.told import DEPTH, HALF, LANES, TILE, WIDE
from tilewise.plan import Config
from tilewise.problems.conv.axis import Axis
from tilewise.problems.conv.problem import ConvProblem
from tilewise.solvers.common.channels_last import even
from tilewise.solvers.common.cpu_run import PAGE, with_teams
from tilewise.solvers.common.tiles import integer
from tilewise.solvers.products._split import FAR_RATE, NEAR, NEAR_RATE, PRODUCTS, lies_in_planes

__all__ = ["Division", "Grid", "Side", "division", "forms"]

SUM_TILES = 4
"""Tiles of sums of a tap."""
LINE = 64
"""Bytes of a line of a cache."""
STRIP = 5 << 19
"""Bytes of a strip's parts that a unit has at the most where it can have fewer."""
LONGEST = 1 << 13
"""Most places of a strip: the sums of longer ones would lose digits."""
TAP = 1000
"""Cycles in which tile registers do not multiply while the sums of a tap are stored, or those to write them."""
MOST_IMAGES = 64
"""Most images of a strip."""
LEAST_COLUMNS = 256
"""Columns of a line that are not divided further."""


@dataclass(frozen=True)
class Side:
    """One axis of the grid on which both operands lie.

    Place q of ``ways[i]``, (offset, begin, end), is number ``q * stride + offset`` of the input, and read from
    ``begin`` to ``end``. Tap t multiplies number p of the output's gradient, of ``out``, with place ``p + taps[t][1]``
    of way ``taps[t][0]``. Where ``spread``, there is one tap, and each way is one of the filter's, whose places are
    the output's numbers.
    """

    ways: tuple[tuple[int, int, int], ...]
    taps: tuple[tuple[int, int], ...]
    stride: int
    out: int
    spread: bool = False

    @functools.cached_property
    def first(self) -> int:
        """The first number of the output's gradient that a tap multiplies."""
        return min((max(0, self.ways[way][1] - shift) for way, shift in self._read), default=0)

    @functools.cached_property
    def last(self) -> int:
        """The number behind the last one that a tap multiplies."""
        return max((min(self.out, self.ways[way][2] - shift) for way, shift in self._read), default=1)

    @property
    def _read(self) -> list[tuple[int, int]]:
        """The taps that multiply anything."""
        taps = [(way, 0) for way in range(len(self.ways))] if self.spread else list(self.taps)
        return [
            (way, shift) for way, shift in taps
            if max(0, self.ways[way][1] - shift) < min(self.out, self.ways[way][2] - shift)
        ]  # fmt: skip

    @property
    def count(self) -> int:
        """Numbers from the first to the last one."""
        return self.last - self.first

    @functools.cached_property
    def least(self) -> int:
        """The least distance of a tap."""
        return min(shift for _, shift in self.taps)

    @functools.cached_property
    def reach(self) -> int:
        """How much larger the largest one is."""
        return max(shift for _, shift in self.taps) - self.least

    def width(self, columns: int) -> int:
        """Places of a line with so many ``columns`` of the output's gradient, so that taps read no other line.

        What a tap reads behind a line lies in the next one, and must be nothing in both.
        """
        if columns < self.count:
            return columns + self.reach
        begin = min((begin for _, begin, end in self.ways if begin < end), default=0)
        end = max((end for _, begin, end in self.ways if begin < end), default=0)
        start = self.first + self.least
        most = columns + self.reach
        return max(columns, min(end - start, most), min(start + most - begin, most))


def _side(axis: Axis, spread: bool) -> Side:
    """The grid of an axis. With ``spread`` each tap has a way of its own, whose places are the output's numbers."""
    s, offsets = axis.stride, [t * axis.dilation - axis.before for t in range(axis.kernel)]
    if spread:
        ways = [(each, max(0, -(each // s)), min(axis.out, -((each - axis.size) // s))) for each in offsets]
        return Side(tuple(ways), ((0, 0),), s, axis.out, spread=True)
    ways, phases = [], sorted({offset % s for offset in offsets})
    for phase in phases:
        shifts = [offset // s for offset in offsets if offset % s == phase]
        ways.append((phase, max(0, min(shifts)), min(-((phase - axis.size) // s), axis.out + max(shifts))))
    taps = tuple((phases.index(offset % s), offset // s) for offset in offsets)
    return Side(tuple(ways), taps, s, axis.out)


@dataclass(frozen=True)
class Grid:
    """Both operands' grid: its axes, and what a tile has as channels: ``line_taps`` for each of the input's.

    ``flat`` says that all lines of an image are one.
    """

    images: int
    height: Side
    width: Side
    line_taps: int
    flat: bool

    @functools.cached_property
    def regions(self) -> list[tuple[int, int]]:
        """The ways of lines and columns that tiles are made of, one after the other.

        Those of columns are numbered; where taps of a line are channels, these begin with the first one.
        """
        columns = range(len(self.width.ways)) if self.line_taps == 1 else (0,)
        return list(itertools.product(range(len(self.height.ways)), columns))

    @functools.cached_property
    def taps(self) -> list[tuple[int, int, int, int, int]]:
        """Of each tap the region, the distance in lines and columns, and its place in the filter: those of a region
        together."""
        found = []
        for (i, (way, down)), (j, (column, along)) in itertools.product(
            enumerate(self.height.taps), enumerate(self.width.taps)
        ):
            found.append((self.regions.index((way, column)), down, along, i, j))
        return sorted(found)


@functools.lru_cache(maxsize=256)
def _grid(p: ConvProblem, line_taps: int) -> Grid:
    """The grid of a problem. All pixels of an image are one line where there is one tap and no stride."""
    plain = all(axis.kernel == 1 and axis.stride == 1 and not axis.before and not axis.after for axis in p.axes)
    if plain:
        pixels = Axis(math.prod(axis.size for axis in p.axes), 1)
        return Grid(p.batch, _side(Axis(1, 1), False), _side(pixels, False), 1, True)
    height = p.axes[0] if p.dims == 2 else Axis(1, 1)
    return Grid(p.batch, _side(height, False), _side(p.axes[-1], line_taps > 1), line_taps, p.dims == 1)


@dataclass(frozen=True)
class Division:
    """How the work is divided: strips of ``lines`` by ``columns`` places of each of ``images``.

    A unit has the input's panels of one of ``channel_parts``, and the strips of one of ``shares``, whose sums are added
    in the end.
    """

    p: ConvProblem
    parts: int
    line_taps: int
    images: int
    lines: int
    columns: int
    channel_parts: int
    shares: int

    @property
    def grid(self) -> Grid:
        """Both operands' grid."""
        return _grid(self.p, self.line_taps)

    @property
    def sources(self) -> int:
        """What tiles have as channels."""
        return self.p.in_channels * self.line_taps

    @property
    def panels(self) -> int:
        """Panels of these."""
        return -(-self.sources // WIDE)

    @property
    def output_panels(self) -> int:
        """Panels of output channels."""
        return -(-self.p.out_channels // WIDE)

    @property
    def line_parts(self) -> int:
        """Ranges of lines of an image."""
        return -(-self.grid.height.count // self.lines)

    @property
    def column_parts(self) -> int:
        """Ranges of columns of a line."""
        return -(-self.grid.width.count // self.columns)

    @property
    def strips(self) -> int:
        """Strips in all."""
        return -(-self.grid.images // self.images) * self.line_parts * self.column_parts

    @property
    def units(self) -> int:
        """Units of work."""
        return self.channel_parts * self.shares

    @property
    def width(self) -> int:
        """Places of a line of the grid."""
        return self.grid.width.width(self.columns)

    @property
    def image_lines(self) -> int:
        """Lines of an image where a strip has several; else 0."""
        return self.grid.height.width(self.lines) if self.images > 1 else 0

    @property
    def reach(self) -> int:
        """Places that taps read behind the last one."""
        return self.grid.height.reach * self.width + self.grid.width.reach

    @functools.cached_property
    def distances(self) -> list[int]:
        """How many places each tap begins behind the first one that is read."""
        height, width = self.grid.height, self.grid.width
        return [(down - height.least) * self.width + along - width.least for _, down, along, *_ in self.grid.taps]

    @functools.cached_property
    def regions(self) -> list[tuple[int, int]]:
        """The tiles that there are: which region of the grid, and with which of a pixel's two neighbours it is paired.

        A tile begins with a pair, so taps at odd distances have tiles of their own.
        """
        return sorted({(tap[0], distance % 2) for tap, distance in zip(self.grid.taps, self.distances, strict=True)})

    @property
    def blocks(self) -> int:
        """Blocks of :data:`DEPTH` places of a strip."""
        return -(-((self.images - 1) * self.image_lines + self.lines) * self.width // DEPTH)

    @property
    def x_apart(self) -> int:
        """Bytes of one part of a channel of the input."""
        return self._apart(self.blocks * DEPTH + self.reach)

    @property
    def y_apart(self) -> int:
        """Bytes of one part of a channel of the output's gradient."""
        return self._apart(self.blocks * DEPTH)

    def _apart(self, numbers: int) -> int:
        """Bytes of the lines with so many ``numbers``, the last of which goes on up to whole vectors.

        An odd number of lines of a cache, over which channels are spread evenly so.
        """
        size = (-(-numbers // self.width) * self.width + DEPTH + 1) * HALF
        return (-(-size // LINE) | 1) * LINE

    @property
    def tile_bytes(self) -> int:
        """Bytes of the tiles of 16 channels and one part, which follow each other."""
        return -(-(self.blocks * DEPTH + self.reach) // DEPTH) * TILE

    @property
    def region_bytes(self) -> int:
        """Bytes of the tiles of 32 channels and all parts."""
        return 2 * self.parts * self.tile_bytes

    @property
    def sums_bytes(self) -> int:
        """Bytes of the sums of two panels."""
        return len(self.grid.taps) * SUM_TILES * TILE

    @property
    def adds_strips(self) -> bool:
        """Whether a unit adds the sums of several strips."""
        return self.strips > self.shares

    @property
    def strip_bytes(self) -> int:
        """Bytes of a strip's parts."""
        return self.output_panels * WIDE * self.parts * self.y_apart + len(self.regions) * self.region_bytes

    @property
    def partial(self) -> int:
        """Bytes of all shares' sums; 0 where one unit has all strips."""
        return self.shares * self.p.nbytes("w") if self.shares > 1 else 0

    @property
    def flops(self) -> int:
        """Operations of all tiles, as if they were multiplied once in fp32."""
        depth = self.blocks * DEPTH * len(self.grid.taps)
        return 2 * depth * WIDE * self.panels * WIDE * self.output_panels * self.strips

    def places(self) -> dict[str, int]:
        """Where everything lies in a thread's scratch, behind the sizes of tile registers; and its ``size``."""
        found, place = {}, LINE
        pairs = -(-self.panels // self.channel_parts) * self.output_panels if self.adds_strips else 1
        # Channels that are neighbours are written by whole vectors, from any of the first ones on.
        rows = LANES if lies_in_planes(self.p, "x") else 2 * LANES
        for name, size in (
            ("outputs_strip", self.output_panels * WIDE * self.parts * self.y_apart),
            ("lines_strip", rows * self.parts * self.x_apart),
            ("tiles", len(self.regions) * self.region_bytes),
            ("spare", self.sums_bytes if self.adds_strips else 0), ("sums", pairs * self.sums_bytes),
        ):  # fmt: skip
            found[name] = place
            place += size
        return {**found, "size": -(-place // PAGE) * PAGE}

    def time(self, threads: int) -> float:
        """Estimated time, in cycles of the busiest thread."""
        turns = -(-self.units // threads)
        panels, strips = -(-self.panels // self.channel_parts), -(-self.strips // self.shares)
        taps, numbers = len(self.grid.taps), self.blocks * DEPTH
        kept = self.adds_strips * panels * self.output_panels * self.sums_bytes
        added = self.sums_bytes // (NEAR_RATE // 3 if kept < NEAR else FAR_RATE // 3) if kept else 0
        outputs = WIDE * self.parts * self.y_apart
        streamed = outputs // FAR_RATE if self.strip_bytes > NEAR else 0
        sums = taps * (self.blocks * 72 * PRODUCTS[self.parts] + TAP) + added + streamed
        gathers = self.grid.width.stride > 2 and lies_in_planes(self.p, "x")
        split_x = len(self.grid.regions) * (0.8 + 0.1 * self.parts + 1.5 * gathers)
        split_x += 0.12 * self.parts * len(self.regions)
        split_y = self.p.out_channels * numbers * (0.8 + 0.1 * self.parts)
        written = self.output_panels * taps * TAP
        each = split_x * WIDE * (numbers + self.reach) + self.output_panels * sums
        whole = strips * (split_y + panels * each + 1000) + panels * written
        return turns * whole + (self.partial / 16 + 20000 if self.partial else 0)


def division(p: ConvProblem, c: Config) -> Division:
    """The division of a config. Raises ``KeyError`` or ``ValueError`` for what is no config of ``p``."""
    names = "parts", "line_taps", "images", "lines", "columns", "channel_parts", "shares"
    divided = Division(p, *(integer(c, name) for name in names))
    integer(c, "threads")
    if divided.parts not in PRODUCTS or divided.line_taps not in (1, p.axes[-1].kernel):
        raise ValueError(
            f"parts={divided.parts}, line_taps={divided.line_taps}: 2 or 3 parts, and 1 or {p.axes[-1].kernel} taps "
            "would do"
        )
    grid = divided.grid
    for name, most in (
        ("images", grid.images), ("lines", grid.height.count), ("columns", grid.width.count),
        ("channel_parts", divided.panels), ("shares", divided.strips),
    ):  # fmt: skip
        if getattr(divided, name) > most:
            raise ValueError(f"{name}={getattr(divided, name)}: up to {most} would do")
    if divided.images > 1 and (divided.lines < grid.height.count or divided.columns < grid.width.count):
        raise ValueError(f"images={divided.images}: 1 would do where strips are parts of images")
    return divided


def forms(p: ConvProblem) -> Iterable[Config]:
    """For each number of parts the two divisions that should be fastest."""
    return _forms(p, torch.get_num_threads())


@functools.lru_cache(maxsize=256)
def _forms(p: ConvProblem, threads: int) -> list[Config]:
    """:func:`forms` for so many threads."""
    found = []
    for parts in PRODUCTS:
        ranked = sorted(_divisions(p, parts, threads), key=lambda divided: divided.time(threads))
        for divided in ranked[:2]:
            base = Config(
                parts=parts, line_taps=divided.line_taps, images=divided.images, lines=divided.lines,
                columns=divided.columns, channel_parts=divided.channel_parts, shares=divided.shares,
                threads=min(threads, divided.units),
            )  # fmt: skip
            found += [(divided.time(threads), c) for c in with_teams(base)[:1]]
    return [c for _, c in sorted(found, key=lambda entry: entry[0])]


def _divisions(p: ConvProblem, parts: int, threads: int) -> Iterator[Division]:
    """Divisions worth comparing: a few sizes of strips, and units for all threads."""
    kernel = p.axes[-1].kernel
    for line_taps in sorted({1, kernel}) if p.in_channels < WIDE else (1,):
        whole = Division(p, parts, line_taps, 1, 1, 1, 1, 1)
        for images, lines, columns in _strips(whole.grid):
            strip = replace(whole, images=images, lines=lines, columns=columns)
            smallest = images == lines == 1 and columns <= LEAST_COLUMNS
            if (strip.strip_bytes > STRIP or strip.blocks * DEPTH > LONGEST) and not smallest:
                continue
            # As many parts as have so many panels each: others have no fewer.
            for channel_parts in sorted({-(-whole.panels // panels) for panels in range(1, whole.panels + 1)}):
                if channel_parts > 2 * threads:
                    break
                shares = {1, *(-(-turns * threads // channel_parts) for turns in (1, 2))}
                for share in sorted(shares):
                    if share <= strip.strips:
                        yield replace(strip, channel_parts=channel_parts, shares=share)


def _strips(grid: Grid) -> Iterator[tuple[int, int, int]]:
    """Images, lines and columns of strips: those of parts of an image, and those of several small ones."""
    height, width = grid.height.count, grid.width.count
    for lines in sorted({even(height, n) for n in range(1, min(height, 64) + 1)}):
        yield 1, lines, width
    for columns in sorted({even(width, n) for n in (LEAST_COLUMNS, 512, 1024, 2048, 4096)} - {width}):
        yield 1, 1, columns
    for images in sorted({2, 3, 4, 6, 8, 12, 16, 24, 32, 48, MOST_IMAGES, even(grid.images, MOST_IMAGES)}):
        if 1 < images <= grid.images:
            yield images, height, width
