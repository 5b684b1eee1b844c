"""A depthwise convolution with the pointwise ones around it, by strips of rows that stay in a core's cache.

A unit of work is a range of rows of one image's results. It goes through them by strips of a few rows. For each strip
the pointwise convolution before (the expansion of Sandler et al. 2018, section 3.3) writes the rows that the strip's
windows meet and that are not there yet, into a ring of rows in scratch. The depthwise convolution reads them from
there and writes the strip, which the pointwise convolution behind (the projection) reads. So what lies between the
convolutions is never a whole tensor. Neighbouring units compute the rows that both of them read twice.

All three run by the tiles of :mod:`~tilewise.kernels.cpu.channels_last.indirect` and
:mod:`~tilewise.kernels.cpu.channels_last.depthwise`, whose tables are written for each strip.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

from tilewise.kernels.cpu.channels_last.indirect import panels
from tilewise.kernels.cpu.channels_last.loops import PLACE, put
from tilewise.kernels.cpu.channels_last.told import INDIRECT as OF
from tilewise.kernels.cpu.channels_last.told import NUMBERS
from tilewise.kernels.cpu.channels_last.told import SEPARABLE as WHOLE
from tilewise.kernels.cpu.units import over_units
from tilewise.kernels.cpu.vectors import compiled

__all__ = ["separable"]

PIECES, STRIP, EXPANDS, PROJECTS, REACH = (WHOLE[n] for n in ("pieces", "strip", "expands", "projects", "reach"))
KEPT_ROWS, LINE, PIXEL, RING = (WHOLE[name] for name in ("kept_rows", "line", "pixel", "ring"))
MIDDLE, MIDDLE_LINE, MIDDLE_PIXEL = (WHOLE[name] for name in ("middle", "middle_line", "middle_pixel"))
FILTERS, STAGES = (WHOLE[name] for name in ("filters", "stages"))
CHANNELS, PANELS, ROWS, TABLE, DUMMY = (OF[name] for name in ("channels", "panels", "rows", "table", "dummy"))
SIZES, OUTS, KERNEL, STRIDE = (OF[name] for name in ("sizes", "outs", "kernel", "stride"))
DILATION, BEFORE, X, Y = (OF[name] for name in ("dilation", "before", "x", "y"))
ADDED, RESIDUAL, ZEROS = (OF[name] for name in ("added", "residual", "zeros"))


@functools.cache
def _pixels() -> Callable[..., int]:
    """Makes ``(v, scratch, rows, width, source, to, first, ring, other)``: the tables of a pointwise stage.

    The tiles cover ``rows`` rows of ``width`` pixels. ``source``, ``to`` and ``other`` are each an address and the
    bytes from row to row and from pixel to pixel: of what is read, of results, and of what is added. Row i of the
    results has the place ``(first + i) % ring``. Returns the number of tiles.
    """
    write = put()

    @compiled()
    def run(v, scratch, rows, width, source, to, first, ring, other):
        each, count = v[ROWS], rows * width
        tiles = (count + each - 1) // each
        outs = scratch + v[TABLE]
        others = outs + tiles * each * PLACE
        place = 0
        for i in range(rows):
            read, written = source[0] + i * source[1], to[0] + (first + i) % ring * to[1]
            for k in range(width):
                write(scratch + place, read + k * source[2])
                write(outs + place, written + k * to[2])
                place += PLACE
        if v[RESIDUAL]:
            place = others
            for i in range(rows):
                for k in range(width):
                    write(place, other[0] + i * other[1] + k * other[2])
                    place += PLACE
        for i in range(count, tiles * each):
            write(scratch + i * PLACE, v[ZEROS])
            write(outs + i * PLACE, scratch + v[DUMMY])
            write(others + i * PLACE, scratch + v[DUMMY])
        return tiles

    return run


@functools.cache
def _windows() -> Callable[..., int]:
    """Makes ``(v, scratch, first, rows, columns, source, to, ring, other)``: the tables of the depthwise stage.

    The tiles cover ``rows`` rows of results from row ``first`` on, and each meets ``columns`` pixels of a row. Row i of
    what is read has the place ``i % ring``. ``source``, ``to`` and ``other`` are as :func:`_pixels` has them. Returns
    the number of tiles.
    """
    write = put()

    @compiled()
    def run(v, scratch, first, rows, columns, source, to, ring, other):
        each, lines = v[ROWS], v[KERNEL + 1]
        across = (v[OUTS + 2] + each - 1) // each
        entry, outs = scratch, scratch + v[TABLE]
        others = outs + rows * across * each * PLACE
        for i in range(rows):
            for tile in range(across):
                w = tile * each
                for k in range(w, w + each):
                    there = k < v[OUTS + 2]
                    write(outs, to[0] + i * to[1] + k * to[2] if there else scratch + v[DUMMY])
                    write(others, other[0] + i * other[1] + k * other[2] if there else scratch + v[DUMMY])
                    outs += PLACE
                    others += PLACE
                begin = w * v[STRIDE + 2] - v[BEFORE + 2]
                for j in range(lines):
                    row = (first + i) * v[STRIDE + 1] - v[BEFORE + 1] + j * v[DILATION + 1]
                    inside = 0 <= row < v[SIZES + 1]
                    line = source[0] + row % ring * source[1]
                    for k in range(begin, begin + columns):
                        write(entry, line + k * source[2] if inside and 0 <= k < v[SIZES + 2] else v[ZEROS])
                        entry += PLACE
        return rows * across

    return run


@functools.cache
def _unit(lanes: int) -> Callable[..., None]:
    """Makes ``(x, w, y, v, scratch, unit)``, which computes one unit of work."""
    pixels, windows, compute = _pixels(), _windows(), panels(lanes)

    @compiled(lanes)
    def run(x, w, y, v, scratch, unit):
        before, middle, behind = v[STAGES:], v[STAGES + NUMBERS :], v[STAGES + 2 * NUMBERS :]
        n, piece = unit // v[PIECES], unit % v[PIECES]
        height, width, stride = middle[OUTS + 1], middle[OUTS + 2], middle[STRIDE + 1]
        h, end = piece * height // v[PIECES], (piece + 1) * height // v[PIECES]
        columns = (middle[ROWS] - 1) * middle[STRIDE + 2] + (middle[KERNEL + 2] - 1) * middle[DILATION + 2] + 1
        image = x + n * middle[X]
        source = (scratch + v[RING] if v[EXPANDS] else image, v[LINE], v[PIXEL])
        there = 0
        while h < end:
            count = min(v[STRIP], end - h)
            if v[EXPANDS]:
                first = max(there, h * stride - middle[BEFORE + 1])
                there = max(first, min(middle[SIZES + 1], (h + count - 1) * stride - middle[BEFORE + 1] + v[REACH]))
                rows = there - first
                read = (image + first * middle[X + 2], middle[X + 2], middle[X + 3])
                tiles = pixels(before, scratch, rows, middle[SIZES + 2], read, source, first, v[KEPT_ROWS], read)
                compute(before, w + v[FILTERS], scratch, 0, 0, before[PANELS], 1, before[CHANNELS], tiles, before[ROWS])
            to = (y + n * behind[Y] + h * behind[Y + 2], behind[Y + 2], behind[Y + 3])
            added = (behind if v[PROJECTS] else middle)[RESIDUAL] + n * behind[ADDED] + h * behind[ADDED + 2]
            other = (added, behind[ADDED + 2], behind[ADDED + 3])
            between = (scratch + v[MIDDLE], v[MIDDLE_LINE], v[MIDDLE_PIXEL]) if v[PROJECTS] else to
            tiles = windows(middle, scratch, h, count, columns, source, between, v[KEPT_ROWS], other)
            lines = middle[KERNEL + 1]
            compute(middle, w + v[FILTERS + 1], scratch, 0, 0, middle[PANELS], lines, 0, tiles, lines * columns)
            if v[PROJECTS]:
                tiles = pixels(behind, scratch, count, width, between, to, 0, count, other)
                compute(
                    behind, w + v[FILTERS + 2], scratch, 0, 0, behind[PANELS], 1, behind[CHANNELS], tiles, behind[ROWS]
                )
            h += count

    return run


def separable(lanes: int) -> Callable[..., None]:
    """Makes ``(data)``, which computes all units that no other thread takes.

    ``data`` begins as in :func:`tilewise.kernels.cpu.fused_fourier.kernel.convolve`, with the addresses of the image,
    all filters and the result. Then follow the numbers of :data:`~tilewise.kernels.cpu.channels_last.told.SEPARABLE`.
    """
    return over_units(_unit(lanes), "separable", lanes)
