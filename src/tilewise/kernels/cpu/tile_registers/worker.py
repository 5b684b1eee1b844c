"""Convolution by products of tile registers.

A unit of work is a range of lines and columns of results, and a range of panels of 32 output channels. It writes the
bf16 parts of all pixels that the range reads, padded. Then for each panel it takes two tiles of pixels at a time, whose
sums stay in tile registers over all taps and channels, and finishes them while they are in the nearest cache.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

from tilewise.kernels.cpu.channels_last.loops import PLACE, copied, put
from tilewise.kernels.cpu.tile_registers.products import released, sized
from tilewise.kernels.cpu.tile_registers.told import DEPTH, FILTER, HALF, LANES, TILE, WIDE
from tilewise.kernels.cpu.tile_registers.told import SPLIT as OF
from tilewise.kernels.cpu.units import over_units
from tilewise.kernels.cpu.vectors import NUMBER, compiled, pointer_call

__all__ = ["fill_filters", "split_products"]

CHANNELS, BLOCKS, OUTPUTS, PANELS = (OF[name] for name in ("channels", "blocks", "outputs", "panels"))
PANEL_PARTS, LINES, COLUMNS = (OF[name] for name in ("panel_parts", "lines", "columns"))
LINE_PARTS, COLUMN_PARTS, ROWS = (OF[name] for name in ("line_parts", "column_parts", "rows"))
SIZES, OUTS, TAPS, STRIDE = (OF[name] for name in ("sizes", "outs", "taps", "stride"))
DILATION, BEFORE, X, Y = (OF[name] for name in ("dilation", "before", "x", "y"))
RESIDUAL, BIAS, ZEROS, PANEL_BYTES = (OF[name] for name in ("residual", "bias", "zeros", "panel_bytes"))
APART, STRIP, TABLE, SUMS, BIASES = (OF[name] for name in ("apart", "strip", "table", "sums", "biases"))
SPLITS, PLANES, PRODUCTS, FINISHES = (OF[name] for name in ("splits", "planes", "products", "finishes"))
ALL_IMAGES, IMAGES = OF["all_images"], OF["images"]
X_CHANNEL, Y_CHANNEL, FIRST, DENSE = (OF[name] for name in ("x_channel", "y_channel", "first", "dense"))


@functools.cache
def _strip(lanes: int) -> Callable[..., None]:
    """Makes ``(v, x, strip, line, lines, column, width)``, which splits what a range of an image's results reads.

    It reads ``lines`` lines from ``line`` on and ``width`` columns from ``column`` on, of which some may lie outside of
    the image.
    """
    divide = pointer_call()

    @compiled(lanes)
    def run(v, x, strip, line, lines, column, width):
        pixel = v[BLOCKS] * DEPTH * HALF
        for i in range(lines):
            target = strip + i * width * pixel
            inside = 0 <= line + i < v[SIZES]
            ahead = min(max(0, -column), width) if inside else width
            there = max(0, min(v[SIZES + 1] - (column + ahead), width - ahead)) if inside else 0
            source = x + (line + i) * v[X + 1] + (column + ahead) * v[X + 2]
            # Zeros count as so many whole blocks.
            divide(v[SPLITS], 0, target, ahead * v[BLOCKS] * DEPTH, v[APART])
            begin = target + ahead * pixel
            if v[PLANES]:
                divide(v[PLANES], source, begin, there, v[CHANNELS], v[APART], v[X_CHANNEL], pixel)
            elif v[DENSE]:
                divide(v[SPLITS], source, begin, there * v[CHANNELS], v[APART])
            else:
                for k in range(there):
                    divide(v[SPLITS], source + k * v[X + 2], begin + k * pixel, v[CHANNELS], v[APART])
            behind = width - ahead - there
            divide(v[SPLITS], 0, begin + there * pixel, behind * v[BLOCKS] * DEPTH, v[APART])

    return run


@functools.cache
def _panel(lanes: int) -> Callable[..., None]:
    """Makes ``(v, w, y, other, scratch, panel, images, lines, columns, height, width)``, which computes a panel.

    That is of a range of ``lines`` by ``columns`` results of each of ``images``, which read ``height`` by ``width``
    pixels. ``y`` and ``other`` are where the range begins in the result and in what is added.
    """
    multiply, complete, copy = pointer_call(), pointer_call(), copied(lanes)

    @compiled(lanes)
    def run(v, w, y, other, scratch, panel, images, lines, columns, height, width):
        rows, pixel, taps = v[ROWS], v[BLOCKS] * DEPTH * HALF, v[TAPS] * v[TAPS + 1]
        across = (columns + rows - 1) // rows
        tiles, pitch = images * lines * across, v[STRIDE + 1] * pixel
        valid, shift = min(WIDE, v[OUTPUTS] - panel * WIDE), panel * WIDE * v[Y_CHANNEL]
        bias = v[ZEROS]
        if v[BIAS]:
            bias = scratch + v[BIASES]
            copy(0, bias, WIDE)
            copy(v[BIAS] + panel * WIDE * NUMBER, bias, valid)
        filters, strip, sums = w + panel * v[PANEL_BYTES], scratch + v[STRIP], scratch + v[SUMS]
        first = second = strip
        for tile in range(0, tiles, 2):
            for i in range(2):  # what the two tiles read; a last one without another is computed twice
                at = min(tile + i, tiles - 1)
                line = at // across
                row = line // lines * height + line % lines * v[STRIDE]
                first, second = second, strip + (row * width + at % across * rows * v[STRIDE + 1]) * pixel
            multiply(
                v[PRODUCTS], first, second, pitch, v[APART], scratch + v[TABLE], taps, v[BLOCKS], filters, bias, sums
            )
            for i in range(min(2, tiles - tile)):
                line, column = (tile + i) // across, (tile + i) % across * rows
                place = line // lines * v[Y] + line % lines * v[Y + 1] + column * v[Y + 2] + shift
                more = other + place if v[RESIDUAL] else 0
                complete(
                    v[FINISHES], sums + 2 * i * TILE, min(rows, columns - column), y + place, v[Y + 2], v[Y_CHANNEL],
                    more, valid,
                )  # fmt: skip

    return run


@functools.cache
def _unit(lanes: int) -> Callable[..., None]:
    """Makes ``(x, w, y, v, scratch, unit)``, which computes one unit of work."""
    sizes, strip, panels, write, release = sized(), _strip(lanes), _panel(lanes), put(), released()

    @compiled(lanes)
    def run(x, w, y, v, scratch, unit):
        panel_part, rest = unit % v[PANEL_PARTS], unit // v[PANEL_PARTS]
        column_part, rest = rest % v[COLUMN_PARTS], rest // v[COLUMN_PARTS]
        line_part, image = rest % v[LINE_PARTS], rest // v[LINE_PARTS] * v[IMAGES]
        images = min(v[IMAGES], v[ALL_IMAGES] - image)
        first_line, first_column = line_part * v[LINES], column_part * v[COLUMNS]
        lines, columns = min(v[LINES], v[OUTS] - first_line), min(v[COLUMNS], v[OUTS + 1] - first_column)
        width = (columns - 1) * v[STRIDE + 1] + (v[TAPS + 1] - 1) * v[DILATION + 1] + 1
        height = (lines - 1) * v[STRIDE] + (v[TAPS] - 1) * v[DILATION] + 1
        pixel = v[BLOCKS] * DEPTH * HALF
        if v[TAPS] * v[TAPS + 1]:
            for i in range(images):
                strip(
                    v, x + (image + i) * v[X], scratch + v[STRIP] + i * height * width * pixel,
                    first_line * v[STRIDE] - v[BEFORE], height, first_column * v[STRIDE + 1] - v[BEFORE + 1], width,
                )  # fmt: skip
        entry = scratch + v[TABLE]
        for i in range(v[TAPS]):
            for j in range(v[TAPS + 1]):
                write(entry, (i * v[DILATION] * width + j * v[DILATION + 1]) * pixel)
                entry += PLACE
        place = v[FIRST] + image * v[Y] + first_line * v[Y + 1] + first_column * v[Y + 2]
        other = v[RESIDUAL] + place if v[RESIDUAL] else 0
        sizes(scratch, v[ROWS])
        first, last = panel_part * v[PANELS] // v[PANEL_PARTS], (panel_part + 1) * v[PANELS] // v[PANEL_PARTS]
        for panel in range(first, last):
            panels(v, w, y + place, other, scratch, panel, images, lines, columns, height, width)
        release()

    return run


def split_products(lanes: int) -> Callable[..., None]:
    """Makes ``(data)``, which computes all units that no other thread takes.

    ``data`` begins as in :func:`tilewise.kernels.cpu.fused_fourier.kernel.convolve`, with the addresses of the image,
    the filters and the result. Then follow the numbers of :data:`~tilewise.kernels.cpu.tile_registers.told.SPLIT`.
    """
    return over_units(_unit(lanes), "split_products", lanes)


@functools.cache
def _fill() -> Callable[..., None]:
    """Makes ``(w, kept, _, v, scratch, panel)``, which puts the filters of a panel into tiles."""
    write, fill = put(), pointer_call()
    blocks_, parts_, bytes_, fills = (FILTER[name] for name in ("blocks", "parts", "panel_bytes", "fills"))
    channels_, outputs_, output, channel = (FILTER[name] for name in ("channels", "outputs", "output", "channel"))
    taps_, first, step, tap = (FILTER[name] for name in ("taps", "first", "step", "tap"))

    @compiled()
    def run(w, kept, _, v, scratch, panel):
        entry = scratch
        for i in range(v[taps_]):
            for j in range(v[taps_ + 1]):
                along = (v[first + 1] + j * v[step + 1]) * v[tap + 1]
                write(entry, (v[first] + i * v[step]) * v[tap] + along)
                entry += PLACE
        tiles = 2 * v[parts_] * TILE
        # Output channels may be so far apart that few of their lines fit in the nearest cache: one vector at a time.
        for half in range(2):
            begin = panel * WIDE + half * LANES
            for block in range(v[blocks_]):
                target = kept + panel * v[bytes_] + block * tiles + half * TILE
                for pair in range(LANES):
                    i = block * DEPTH + 2 * pair
                    fill(
                        v[fills], w + begin * v[output] + i * v[channel], scratch, v[taps_] * v[taps_ + 1],
                        target + pair * LANES * NUMBER, v[blocks_] * tiles, max(0, min(LANES, v[outputs_] - begin)),
                        max(0, min(2, v[channels_] - i)), v[output], v[channel],
                    )  # fmt: skip

    return run


def fill_filters(lanes: int) -> Callable[..., None]:
    """Makes ``(data)``, which puts filters into tiles, in the order in which :func:`split_products` loads them.

    That is: panel, tap, block of channels, part, vector of outputs, pair of channels, output, channel of the pair.
    ``data`` has the addresses of the filters and of the tiles, then the numbers of
    :data:`~tilewise.kernels.cpu.tile_registers.told.FILTER`.
    """
    return over_units(_fill(), "fill_filters", lanes)
