"""Depthwise convolution of images whose channels lie innermost: neighbouring pixels, line by line of the filter.

A tile has neighbouring pixels of one row of results, and a few vectors of channels. Of each line of the filter its
taps are read once, and each pixel of the image that the tile meets: it is multiplied by all taps that it has. So a
pixel is read once for all the sums that it belongs to, and sums stay in registers (Georganas et al. 2018, section II,
with vectors along channels of the image). Pixels are found by tables of addresses, as in
:mod:`~tilewise.kernels.cpu.channels_last.indirect`: those outside of the image are a row of zeros.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

from tilewise.kernels.cpu import masks
from tilewise.kernels.cpu.channels_last.indirect import panels
from tilewise.kernels.cpu.channels_last.loops import PLACE, advanced, constant, looped, number, put, variable
from tilewise.kernels.cpu.channels_last.tiles import written
from tilewise.kernels.cpu.channels_last.told import INDIRECT as OF
from tilewise.kernels.cpu.channels_last.told import word_of
from tilewise.kernels.cpu.units import over_units
from tilewise.kernels.cpu.vectors import NUMBER, Code, Values, compiled, intrinsic_of, named

__all__ = ["depthwise_last", "line_tile"]

PARTS, PANEL_PARTS, PANELS, TILES, ROWS = (OF[name] for name in ("parts", "panel_parts", "panels", "tiles", "rows"))
SIZES, OUTS, KERNEL, STRIDE = (OF[name] for name in ("sizes", "outs", "kernel", "stride"))
DILATION, BEFORE, X, Y = (OF[name] for name in ("dilation", "before", "x", "y"))
ADDED, RESIDUAL, ZEROS = (OF[name] for name in ("added", "residual", "zeros"))
TABLE, DUMMY = (OF[name] for name in ("table", "dummy"))


@functools.cache
def _line_tile(
    lanes: int, rows: int, vectors: int, line: tuple[int, int, int], activation: str, ragged: bool
) -> Callable[..., None]:
    """Makes the instructions of :func:`line_tile`."""
    size, (taps, stride, dilation) = NUMBER * lanes, line
    columns = (rows - 1) * stride + (taps - 1) * dilation + 1
    uses = [
        [(t, i) for t in range(taps) for i in range(rows) if i * stride + t * dilation == column]
        for column in range(columns)
    ]

    def emit(code: Code, arguments: Values) -> None:
        pixels, lines, _, filters, outs, others, shift, bias, valid = arguments
        b = code.builder
        first = [code.load(code.at(bias, j * size)) for j in range(vectors)]
        sums = [[variable(code, value) for value in first] for _ in range(rows)]
        table, weight = variable(code, pixels), variable(code, filters)
        # What lies behind the last channel may be no memory of the image.
        there = masks.below(code, b.sub(valid, constant((vectors - 1) * lanes))) if ragged else None
        with looped(code, lines):
            at = b.load(weight)
            factors = [[code.load(code.at(at, (t * vectors + j) * size)) for j in range(vectors)] for t in range(taps)]
            for column, used in enumerate(uses):
                if not used:
                    continue
                start = b.add(number(code, b.load(table), column), shift)
                for j in range(vectors):
                    place, last = code.at(start, j * size), j == vectors - 1
                    value = code.load(place) if there is None or not last else masks.load(code, place, there)
                    for t, i in used:
                        b.store(b.call(code.fma, [value, factors[t][j], b.load(sums[i][j])]), sums[i][j])
            advanced(code, table, columns * PLACE)
            advanced(code, weight, taps * vectors * size)
        written(code, activation, sums, (outs, others, shift, valid))

    return intrinsic_of(lanes, emit)


def line_tile(
    lanes: int, rows: int, vectors: int, line: tuple[int, int, int], activation: str, ragged: bool
) -> Callable[..., None]:
    """Makes ``(pixels, lines, _, filters, outs, others, shift, bias, valid)``, a tile of results.

    It computes ``vectors`` vectors of channels for ``rows`` neighbouring pixels. ``line`` is the number of taps of a
    line of the filter, their stride and their dilation. ``pixels`` is a table with the addresses of the pixels that the
    tile meets, for each of ``lines`` lines. ``filters`` has for each line and tap ``vectors`` vectors. What pixels have
    is read ``shift`` bytes after their addresses. The rest is as :func:`~tilewise.kernels.cpu.channels_last.tiles.tile`
    has it. With ``ragged`` less than all channels of the last vector may exist.
    """
    block = _line_tile(lanes, rows, vectors, line, activation, ragged)

    def run(pixels, lines, depth, filters, outs, others, shift, bias, valid):
        block(pixels, lines, depth, filters, outs, others, shift, bias, valid)

    return named(run, lanes, rows, vectors, *line, word_of(activation), int(ragged))


@functools.cache
def _lines() -> Callable[..., None]:
    """Makes ``(v, x, start, entry, columns)``, which writes the addresses of what a tile meets, line by line.

    ``start`` is where in the image the window of the tile's first pixel begins.
    """
    write = put()

    @compiled()
    def run(v, x, start, entry, columns):
        for i in range(v[KERNEL]):
            depth = start[0] + i * v[DILATION]
            for j in range(v[KERNEL + 1]):
                height = start[1] + j * v[DILATION + 1]
                inside = 0 <= depth < v[SIZES] and 0 <= height < v[SIZES + 1]
                line = x + depth * v[X + 1] + height * v[X + 2]
                for k in range(columns):
                    width = start[2] + k
                    there = line + width * v[X + 3]
                    write(entry, there if inside and 0 <= width < v[SIZES + 2] else v[ZEROS])
                    entry += PLACE

    return run


@functools.cache
def _tables() -> Callable[..., None]:
    """Makes ``(v, x, y, scratch, first, last, columns)``, which writes the tables of the tiles from first to last.

    The table of what tiles meet is followed by that of the places of results, and that of what is added.
    """
    lines, write = _lines(), put()

    @compiled()
    def run(v, x, y, scratch, first, last, columns):
        rows = v[ROWS]
        outs = scratch + v[TABLE]
        others = outs + (last - first) * rows * PLACE
        across = (v[OUTS + 2] + rows - 1) // rows
        entry = scratch
        for tile in range(first, last):
            w, rest = tile % across * rows, tile // across
            h, rest = rest % v[OUTS + 1], rest // v[OUTS + 1]
            d, n = rest % v[OUTS], rest // v[OUTS]
            to = y + n * v[Y] + d * v[Y + 1] + h * v[Y + 2]
            more = v[RESIDUAL] + n * v[ADDED] + d * v[ADDED + 1] + h * v[ADDED + 2]
            for i in range(w, w + rows):
                there = i < v[OUTS + 2]
                write(outs, to + i * v[Y + 3] if there else scratch + v[DUMMY])
                write(others, more + i * v[ADDED + 3] if there else scratch + v[DUMMY])
                outs += PLACE
                others += PLACE
            start = (
                d * v[STRIDE] - v[BEFORE],
                h * v[STRIDE + 1] - v[BEFORE + 1],
                w * v[STRIDE + 2] - v[BEFORE + 2],
            )
            lines(v, x + n * v[X], start, entry, columns)
            entry += v[KERNEL] * v[KERNEL + 1] * columns * PLACE

    return run


@functools.cache
def _unit(lanes: int) -> Callable[..., None]:
    """Makes ``(x, w, y, v, scratch, unit)``, which computes one unit of work."""
    tables, compute = _tables(), panels(lanes)

    @compiled(lanes)
    def run(x, w, y, v, scratch, unit):
        part, panel_part = unit % v[PARTS], unit // v[PARTS]
        first, last = panel_part * v[PANELS] // v[PANEL_PARTS], (panel_part + 1) * v[PANELS] // v[PANEL_PARTS]
        begin, end = part * v[TILES] // v[PARTS], (part + 1) * v[TILES] // v[PARTS]
        columns = (v[ROWS] - 1) * v[STRIDE + 2] + (v[KERNEL + 2] - 1) * v[DILATION + 2] + 1
        lines = v[KERNEL] * v[KERNEL + 1]
        tables(v, x, y, scratch, begin, end, columns)
        compute(v, w, scratch, 0, first, last, lines, 0, end - begin, lines * columns)

    return run


def depthwise_last(lanes: int) -> Callable[..., None]:
    """Makes ``(data)``, which computes all units that no other thread takes.

    ``data`` is as :func:`~tilewise.kernels.cpu.channels_last.indirect.indirect` has it, with one group of all channels.
    """
    return over_units(_unit(lanes), "depthwise_last", lanes)
