"""Gradients of filters by products of tile registers whose depth is pixels.

A unit of work is a range of panels of 32 input channels, and a share of the images' strips. It writes the bf16 parts of
a strip of the output's gradient, then those of the input's panels, one by one, as tiles. For each 32 output channels
it computes the sums of all taps, which are tiles that begin with other rows: a row has two neighbouring pixels, and
there are tiles for either way to pair them. Sums of strips are added to each other, so that errors do not grow with the
number of pixels, and written after the last strip.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

from tilewise.kernels.cpu.channels_last.loops import PLACE
from tilewise.kernels.cpu.tile_registers.gradients import owned
from tilewise.kernels.cpu.tile_registers.products import SUMS as SUM_TILES
from tilewise.kernels.cpu.tile_registers.products import released, sized
from tilewise.kernels.cpu.tile_registers.told import (
    DEPTH,
    HALF,
    LANES,
    REGION,
    REGION_NUMBERS,
    TILE,
    VARIANT,
    VARIANT_NUMBERS,
    WIDE,
)
from tilewise.kernels.cpu.tile_registers.told import GRADIENT as OF
from tilewise.kernels.cpu.units import over_units
from tilewise.kernels.cpu.vectors import compiled, number_at, pointer_call

__all__ = ["split_gradients"]

LINE = 64
"""Bytes of a line of a cache."""

CHANNELS, SOURCES, OUTPUTS, PANELS = (OF[name] for name in ("channels", "sources", "outputs", "panels"))
OUTPUT_PANELS, CHANNEL_PARTS, SHARES = (OF[name] for name in ("output_panels", "channel_parts", "shares"))
STRIPS, ALL_IMAGES, IMAGES, LINES = (OF[name] for name in ("strips", "all_images", "images", "lines"))
COLUMNS, LINE_PARTS, COLUMN_PARTS = (OF[name] for name in ("columns", "line_parts", "column_parts"))
BEGIN, END, AHEAD, WIDTH = (OF[name] for name in ("begin", "end", "ahead", "width"))
IMAGE_LINES, REACH, TAPS, REGIONS = (OF[name] for name in ("image_lines", "reach", "taps", "regions"))
PARTS, X, Y, X_COUNT, Y_COUNT = (OF[name] for name in ("parts", "x", "y", "x_count", "y_count"))
X_ROW, Y_ROW, X_APART, Y_APART = (OF[name] for name in ("x_row", "y_row", "x_apart", "y_apart"))
TILE_STEP, TABLE, REGION_TABLE = (OF[name] for name in ("tile", "table", "region_table"))
VARIANTS, WRITTEN, PLACES = (OF[name] for name in ("variants", "written", "places"))
OUTPUT, SPAN, PARTIAL, ADDS = (OF[name] for name in ("output", "span", "partial", "adds"))
OUTPUTS_STRIP, LINES_STRIP, TILES = (OF[name] for name in ("outputs_strip", "lines_strip", "tiles"))
SPARE, SUMS = OF["spare"], OF["sums"]
SUM_STEP, X_LINES, Y_LINES, PAIRS = (OF[name] for name in ("sum_step", "x_lines", "y_lines", "pairs"))
OTHER_PAIRS, PRODUCTS = OF["other_pairs"], OF["products"]
ADDITIONS, WRITES = OF["additions"], OF["writes"]


@functools.cache
def _spread(lanes: int) -> Callable[..., None]:
    """Makes ``(v, kernel, strides, source, target, channels, line, rows, begin, end, column, first, last, ...)``.

    It writes ``rows`` lines of the grid from ``line`` and ``column`` on. Those from ``begin`` to ``end`` and their
    columns from ``first`` to ``last`` are read, all else is zeros. Then follow ``count``, ``pitch`` and ``apart`` of
    :func:`~tilewise.kernels.cpu.tile_registers.lines.lines`. ``strides`` is the place of lines', columns' and
    channels' strides.
    """
    call = pointer_call()

    @compiled(lanes)
    def run(
        v, kernel, strides, source, target, channels, line, rows, begin, end, column, first, last, count, pitch, apart
    ):
        before = min(max(0, begin - line), rows)
        inside = max(0, min(end - line, rows) - before)
        ahead, stop, width = max(0, first - column), min(v[WIDTH], last - column), v[WIDTH] * HALF
        call(kernel, 0, target, channels, before, count, 0, 0, 0, 0, 0, pitch, width, apart)
        target += before * width
        call(
            kernel, source + (line + before) * v[strides] + column * v[strides + 1], target, channels, inside, count,
            ahead, stop, v[strides + 2], v[strides], v[strides + 1], pitch, width, apart,
        )  # fmt: skip
        target += inside * width
        call(kernel, 0, target, channels, rows - before - inside, count, 0, 0, 0, 0, 0, pitch, width, apart)

    return run


@functools.cache
def _outputs(lanes: int) -> Callable[..., None]:
    """Makes ``(v, y, scratch, image, images, line, lines, column, columns, blocks)``.

    It splits a strip of the output's gradient.
    """
    spread = _spread(lanes)

    @compiled(lanes)
    def run(v, y, scratch, image, images, line, lines, column, columns, blocks):
        rows = (blocks * DEPTH + v[WIDTH] - 1) // v[WIDTH]
        for i in range(images):
            before = i * v[IMAGE_LINES]
            spread(
                v, v[Y_LINES], Y + 1, y + (image + i) * v[Y], scratch + v[OUTPUTS_STRIP] + before * v[WIDTH] * HALF,
                v[OUTPUTS], line, v[IMAGE_LINES] if i < images - 1 else rows - before, line, line + lines, column,
                column, column + columns, v[Y_COUNT], v[Y_ROW], v[Y_APART],
            )  # fmt: skip

    return run


@functools.cache
def _inputs(lanes: int) -> Callable[..., None]:
    """Makes ``(v, x, scratch, panel, image, images, line, column, blocks)``.

    It makes tiles of what a strip reads of a panel of the input's channels.
    """
    spread, call, number = _spread(lanes), pointer_call(), number_at()
    offset, first, last, kind, odd = (REGION[name] for name in ("offset", "begin", "end", "variant", "odd"))
    along, left, right = (VARIANT[name] for name in ("offset", "begin", "end"))

    @compiled(lanes)
    def run(v, x, scratch, panel, image, images, line, column, blocks):
        numbers, strip = blocks * DEPTH + v[REACH], scratch + v[LINES_STRIP]
        rows, tiles = (numbers + v[WIDTH] - 1) // v[WIDTH], (numbers + DEPTH - 1) // DEPTH
        for half in range(2):
            begin = panel * WIDE + half * LANES
            end = min(v[SOURCES], begin + LANES)
            # Without a channel the tile stays as it is: its sums are not written.
            for region in range(v[REGIONS] if begin < end else 0):
                of = v[REGION_TABLE] + region * REGION_NUMBERS * PLACE
                # For the other pairs of the same pixels nothing is read.
                for i in range(0 if number(of, odd) > 1 else images):
                    before = i * v[IMAGE_LINES]
                    here = v[IMAGE_LINES] if i < images - 1 else rows - before
                    source = begin
                    while source < end:
                        channel = source % v[CHANNELS]
                        count = min(v[CHANNELS] - channel, end - source)
                        variant = number(of, kind) + source // v[CHANNELS]
                        to = v[VARIANTS] + variant * VARIANT_NUMBERS * PLACE
                        spread(
                            v, v[X_LINES], X + 1,
                            x + (image + i) * v[X] + channel * v[X + 3] + number(of, offset) + number(to, along),
                            strip + (source - begin) * v[X_ROW] + before * v[WIDTH] * HALF, count, line + v[AHEAD],
                            here, number(of, first), number(of, last), column + v[AHEAD + 1], number(to, left),
                            number(to, right), v[X_COUNT], v[X_ROW], v[X_APART],
                        )  # fmt: skip
                        source += count
                for part in range(v[PARTS]):
                    tile = scratch + v[TILES] + ((region * v[PARTS] + part) * 2 + half) * v[TILE_STEP]
                    if number(of, odd) > 1:
                        call(v[OTHER_PAIRS], tile - 2 * v[PARTS] * v[TILE_STEP], tile, tiles)
                    else:
                        call(v[PAIRS], strip + part * v[X_APART] + number(of, odd) * HALF, tile, tiles, v[X_ROW])

    return run


@functools.cache
def _panel(lanes: int) -> Callable[..., None]:
    """Makes ``(v, out, scratch, panel, number, fresh, last, blocks)``, which adds a strip to the sums of a panel.

    It is the unit's panel with that ``number``. The first strip replaces the sums, the ``last`` one writes them.
    """
    call, fetch = pointer_call(), owned()

    @compiled(lanes)
    def run(v, out, scratch, panel, number, fresh, last, blocks):
        tiles = v[TAPS] * len(SUM_TILES)
        for k in range(v[OUTPUT_PANELS]):
            total = scratch + v[SUMS] + (number * v[OUTPUT_PANELS] + k) * v[SUM_STEP]
            sums = total if fresh else scratch + v[SPARE]
            outputs, place = scratch + v[OUTPUTS_STRIP] + k * WIDE * v[Y_ROW], out + k * WIDE * v[OUTPUT]
            rows, inputs = min(WIDE, v[OUTPUTS] - k * WIDE), min(WIDE, v[SOURCES] - panel * WIDE)
            lines, given = (inputs * v[SPAN] + LINE - 1) // LINE + 1 if last and v[SPAN] else 0, 0
            for tap in range(v[TAPS]):
                # What will be written comes from memory while tile registers multiply.
                until = (tap + 1) * rows // v[TAPS]
                fetch(place + panel * WIDE * v[SPAN] + given * v[OUTPUT], until - given, v[OUTPUT], lines)
                given = until
                call(
                    v[PRODUCTS], outputs, scratch + v[TILES], v[TABLE] + tap * PLACE, 1, blocks, v[Y_ROW], v[Y_APART],
                    v[TILE_STEP], sums + tap * len(SUM_TILES) * TILE,
                )  # fmt: skip
            if not fresh:
                call(v[ADDITIONS], sums, total, tiles)
            if last:
                call(
                    v[WRITES], total, place, rows, inputs, v[PLACES] + panel * WIDE * PLACE, v[WRITTEN], v[OUTPUT],
                    v[ADDS],
                )  # fmt: skip

    return run


@functools.cache
def _unit(lanes: int) -> Callable[..., None]:
    """Makes ``(x, y, out, v, scratch, unit)``, which computes one unit of work."""
    sizes, release, outputs, inputs, panels = sized(), released(), _outputs(lanes), _inputs(lanes), _panel(lanes)

    @compiled(lanes)
    def run(x, y, out, v, scratch, unit):
        part, share = unit % v[CHANNEL_PARTS], unit // v[CHANNEL_PARTS]
        begin, end = part * v[PANELS] // v[CHANNEL_PARTS], (part + 1) * v[PANELS] // v[CHANNEL_PARTS]
        first, last = share * v[STRIPS] // v[SHARES], (share + 1) * v[STRIPS] // v[SHARES]
        sizes(scratch, LANES)
        for strip in range(first, last):
            column = v[BEGIN + 1] + strip % v[COLUMN_PARTS] * v[COLUMNS]
            rest = strip // v[COLUMN_PARTS]
            line = v[BEGIN] + rest % v[LINE_PARTS] * v[LINES]
            image = rest // v[LINE_PARTS] * v[IMAGES]
            images = min(v[IMAGES], v[ALL_IMAGES] - image)
            lines, columns = min(v[LINES], v[END] - line), min(v[COLUMNS], v[END + 1] - column)
            blocks = (((images - 1) * v[IMAGE_LINES] + lines) * v[WIDTH] + DEPTH - 1) // DEPTH
            outputs(v, y, scratch, image, images, line, lines, column, columns, blocks)
            for panel in range(begin, end):
                inputs(v, x, scratch, panel, image, images, line, column, blocks)
                panels(
                    v, out + share * v[PARTIAL], scratch, panel, panel - begin, strip == first, strip == last - 1,
                    blocks,
                )  # fmt: skip
        release()

    return run


def split_gradients(lanes: int) -> Callable[..., None]:
    """Makes ``(data)``, which computes all units that no other thread takes.

    ``data`` begins as in :func:`tilewise.kernels.cpu.fused_fourier.kernel.convolve`, with the addresses of the input,
    of the output's gradient and of the result. Then follow the numbers of
    :data:`~tilewise.kernels.cpu.tile_registers.told.GRADIENT`.
    """
    return over_units(_unit(lanes), "split_gradients", lanes)
