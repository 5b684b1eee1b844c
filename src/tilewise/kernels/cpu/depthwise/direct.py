"""Direct convolutions whose groups have few channels: every pass, any size, stride and dilation.

The lanes of a vector are groups. A tile of the source with its halo is copied to scratch that stays in a core's cache.
So the sums (:mod:`tilewise.kernels.cpu.depthwise.sums`) need not know of borders and strides. Results are written row
by row. ``v`` has the numbers of :class:`tilewise.kernels.cpu.depthwise.windows.Told`, at the indices in
:data:`~tilewise.kernels.cpu.depthwise.windows.WORDS`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

from numba import carray  # type: ignore[attr-defined]

from tilewise.kernels.cpu import rows
from tilewise.kernels.cpu.depthwise.sums import sums_call
from tilewise.kernels.cpu.depthwise.windows import COUNT, HEADER, WORDS
from tilewise.kernels.cpu.vectors import NUMBER, compiled, named, next_number, pointer_call

__all__ = ["convolve_directly"]

GROUPS, BATCH, SHARES, DTYPES, ADD = (WORDS[name] for name in ("groups", "batch", "shares", "dtypes", "add"))
SOURCES, OTHERS, SIZES, STARTS = (WORDS[name] for name in ("sources", "others", "sizes", "starts"))
ADVANCE, EXTENTS, COUNTS, TILE = (WORDS[name] for name in ("advance", "extents", "counts", "tile"))
TILES, PHASES, SHAPE, SOURCE_BYTES = (WORDS[name] for name in ("tiles", "phases", "shape", "source_bytes"))
TAPS_BYTES, LINE_BYTES, SOURCE, OTHER = (WORDS[name] for name in ("taps_bytes", "line_bytes", "source", "other"))
TAPS, TAPS_COUNTS, KERNEL, DOWN = (WORDS[name] for name in ("taps", "taps_counts", "kernel", "down"))
BETWEEN, STEPS, COLUMNS, ROWS = (WORDS[name] for name in ("between", "steps", "columns", "rows"))
SUMS, BAND, CALLS = WORDS["sums"], WORDS["band"], WORDS["calls"]


@functools.cache
def _tile_of(lanes: int) -> Callable[..., tuple[int, int, int]]:
    """Makes ``(v, number)``, which returns the index of tile ``number`` along each axis."""

    @compiled(lanes)
    def run(v, number):
        inner = v[TILES + 1] * v[TILES + 2]
        return number // inner, number // v[TILES + 2] % v[TILES + 1], number % v[TILES + 2]

    return run


@functools.cache
def _source_in(lanes: int) -> Callable[..., None]:
    """Makes ``(x, v, first, valid, n, tile, target, line)``, which copies a tile of image ``n`` to scratch.

    It copies all channels of ``valid`` groups from group ``first`` on.
    """
    region = rows.region_in(lanes)

    @compiled(lanes)
    def run(x, v, first, valid, n, tile, target, line):
        strides, sizes = (v[SOURCE + 3], v[SOURCE + 4], v[SOURCE + 5]), (v[SIZES], v[SIZES + 1], v[SIZES + 2])
        extents, shape = (
            (v[EXTENTS], v[EXTENTS + 1], v[EXTENTS + 2]),
            (v[SHAPE], v[SHAPE + 1], v[SHAPE + 2], v[SHAPE + 3]),
        )
        starts = (
            v[STARTS] + tile[0] * v[ADVANCE],
            v[STARTS + 1] + tile[1] * v[ADVANCE + 1],
            v[STARTS + 2] + tile[2] * v[ADVANCE + 2],
        )
        for i in range(v[SOURCES]):
            there = x + n * v[SOURCE] + first * v[SOURCE + 1] + i * v[SOURCE + 2]
            here = target + i * v[SOURCE_BYTES]
            region(v[CALLS], v[DTYPES], there, strides, v[SOURCE + 1], valid, sizes, starts, extents, shape, here, line)

    return run


@functools.cache
def _taps(lanes: int, back: bool) -> Callable[..., None]:
    """Makes ``(w, v, first, valid, here)``, which copies all taps of a block of groups to vectors, or back."""
    to, way, vector = pointer_call(), rows.BACK if back else 0, NUMBER * lanes

    @compiled(lanes, back)
    def run(w, v, first, valid, here):
        dtype, channel, column, count = v[DTYPES + 2], v[TAPS], v[TAPS + 5], v[TAPS_COUNTS + 2]
        line = here + v[TAPS_BYTES] if v[ADD] else 0
        for o in range(v[OTHERS]):
            for i in range(v[SOURCES]):
                for d in range(v[TAPS_COUNTS]):
                    for h in range(v[TAPS_COUNTS + 1]):
                        there = w + first * channel + o * v[TAPS + 1] + i * v[TAPS + 2]
                        there += d * v[TAPS + 3] + h * v[TAPS + 4]
                        to(v[CALLS], dtype + way, there, column, channel, valid, count, here, line)
                        here += count * vector

    return run


@functools.cache
def _rows_of_sums(lanes: int) -> Callable[..., None]:
    """Makes ``(v, tables, phase, number, width, source, factors, target)``, which computes ``number`` rows of results.

    The results go to scratch. ``phase`` is the index of the phase of depth and rows, and ``tables`` has the address and
    the number of lines of each phase's table.
    """
    total, vector = sums_call(), NUMBER * lanes

    @compiled(lanes)
    def run(v, tables, phase, number, width, source, factors, target):
        step = v[PHASES + 2]
        for p in range(step):
            count = (width - p + step - 1) // step
            table, lines = tables[2 * (phase * step + p)], tables[2 * (phase * step + p) + 1]
            done = 0
            while done < count:
                some = (count - done + v[COLUMNS] - 1) // v[COLUMNS]
                columns = (count - done + some - 1) // some
                out = target + (p + done * step) * vector
                total(v[CALLS + 1], (
                    number, columns, out, v[LINE_BYTES], step * vector, source + done * vector, v[DOWN + 1],
                    v[STEPS], factors, v[STEPS + 1], table, lines, 0,
                ))  # fmt: skip
                done += columns

    return run


@functools.cache
def _image(lanes: int) -> Callable[..., None]:
    """Makes ``(x, w, y, scratch, v, tables, unit)``, which computes a tile of one image's results, of ``lanes`` groups.

    ``scratch`` holds taps, a line, rows of results and sources, in this order.
    """
    source_in, taps_in, tile_of = _source_in(lanes), _taps(lanes, False), _tile_of(lanes)
    rows_of_sums, out, vector = _rows_of_sums(lanes), pointer_call(), NUMBER * lanes
    awaited = rows.row_awaited(lanes)

    @compiled(lanes)
    def run(x, w, y, scratch, v, tables, unit):
        number = v[TILES] * v[TILES + 1] * v[TILES + 2]
        # Neighbouring blocks of groups follow each other, as they share pages and cache lines with channels last.
        blocks = (v[GROUPS] + lanes - 1) // lanes
        tile, n, first = tile_of(v, unit // blocks % number), unit // blocks // number, unit % blocks * lanes
        valid = min(lanes, v[GROUPS] - first)
        size = 4 if v[DTYPES + 1] == 0 else 2
        line = scratch + v[TAPS_BYTES]
        target = line + v[LINE_BYTES]
        source = target + v[ROWS] * v[LINE_BYTES]
        taps_in(w, v, first, valid, scratch)
        source_in(x, v, first, valid, n, tile, source, line)
        d0, h0, w0 = tile[0] * v[TILE], tile[1] * v[TILE + 1], tile[2] * v[TILE + 2]
        depth, height = min(v[TILE], v[COUNTS] - d0), min(v[TILE + 1], v[COUNTS + 1] - h0)
        width = min(v[TILE + 2], v[COUNTS + 2] - w0)
        pair = v[KERNEL] * v[KERNEL + 1] * v[KERNEL + 2] * vector
        width_of_phase = (width + v[PHASES + 2] - 1) // v[PHASES + 2]
        pieces = (width_of_phase + v[COLUMNS] - 1) // v[COLUMNS]
        columns = (width_of_phase + pieces - 1) // pieces
        most = min(v[ROWS], v[SUMS] // columns)
        there = y + n * v[OTHER] + first * v[OTHER + 1] + w0 * v[OTHER + 5]
        for o in range(v[OTHERS]):
            factors = scratch + o * v[SOURCES] * pair
            for d in range(depth):
                for p in range(v[PHASES + 1]):
                    count = (height - p + v[PHASES + 1] - 1) // v[PHASES + 1]
                    phase = d % v[PHASES] * v[PHASES + 1] + p
                    done = 0
                    while done < count:
                        some = min(most, count - done)
                        place = source + d // v[PHASES] * v[DOWN] + done * v[DOWN + 1]
                        for r in range(some):
                            h = h0 + p + (done + r) * v[PHASES + 1]
                            to = there + o * v[OTHER + 2] + (d0 + d) * v[OTHER + 3] + h * v[OTHER + 4]
                            awaited(size, to, v[OTHER + 5], v[OTHER + 1], valid, width)
                        rows_of_sums(v, tables, phase, some, width, place, factors, target)
                        for r in range(some):
                            h = h0 + p + (done + r) * v[PHASES + 1]
                            to = there + o * v[OTHER + 2] + (d0 + d) * v[OTHER + 3] + h * v[OTHER + 4]
                            out(
                                v[CALLS], v[DTYPES + 1] + rows.BACK, to, v[OTHER + 5], v[OTHER + 1], valid, width,
                                target + r * v[LINE_BYTES], line if v[ADD] else 0,
                            )  # fmt: skip
                        done += some

    return run


@functools.cache
def _tap_sums(lanes: int) -> Callable[..., None]:
    """Makes ``(v, table, lines, source, factors, target)``, which adds products of some rows to a filter's gradient.

    It adds them to all taps of one pair of channels.
    """
    total, vector = sums_call(), NUMBER * lanes

    @compiled(lanes)
    def run(v, table, lines, source, factors, target):
        kernel = (v[KERNEL], v[KERNEL + 1], v[KERNEL + 2])
        pieces = (kernel[2] + v[COLUMNS] - 1) // v[COLUMNS]
        columns = (kernel[2] + pieces - 1) // pieces
        most = min(v[ROWS], v[SUMS] // columns)
        pieces = (kernel[1] + most - 1) // most
        most = (kernel[1] + pieces - 1) // pieces
        for d in range(kernel[0]):
            for h in range(0, kernel[1], most):
                for k in range(0, kernel[2], columns):
                    place = source + d * v[BETWEEN] + h * v[BETWEEN + 1] + k * vector
                    total(v[CALLS + 1], (
                        min(most, kernel[1] - h), min(columns, kernel[2] - k),
                        target + ((d * kernel[1] + h) * kernel[2] + k) * vector, kernel[2] * vector, vector,
                        place, v[BETWEEN + 1], v[STEPS], factors, v[STEPS + 1], table, lines, 1,
                    ))  # fmt: skip

    return run


@functools.cache
def _gradient(lanes: int) -> Callable[..., None]:
    """Makes ``(x, y, w, partial, scratch, v, tables, unit)``, which sums a filter's gradient over a share of the tiles.

    The gradient of ``lanes`` groups goes to ``partial``, where each unit has its place, or to the filter where there is
    one share. ``scratch`` holds taps, a line, a tile of the output's gradient and sources, in this order.
    """
    source_in, taps_out, tile_of = _source_in(lanes), _taps(lanes, True), _tile_of(lanes)
    region, zero, tap_sums, vector = rows.region_in(lanes), rows.zeros(lanes), _tap_sums(lanes), NUMBER * lanes

    @compiled(lanes)
    def run(x, y, w, partial, scratch, v, tables, unit):
        number = v[TILES] * v[TILES + 1] * v[TILES + 2]
        share, first = unit % v[SHARES], unit // v[SHARES] * lanes
        valid = min(lanes, v[GROUPS] - first)
        total = scratch if v[SHARES] == 1 else partial + unit * v[TAPS_BYTES]
        line = scratch + v[TAPS_BYTES]
        factors = line + v[LINE_BYTES]
        extents = (v[TILE], v[TILE + 1], v[TILE + 2])
        row, plane = v[TILE + 2] * vector, v[TILE + 1] * v[TILE + 2] * vector
        source = factors + v[TILE] * plane + lanes * vector
        strides = (v[OTHER + 3], v[OTHER + 4], v[OTHER + 5])
        counts = (v[COUNTS], v[COUNTS + 1], v[COUNTS + 2])
        pair = v[KERNEL] * v[KERNEL + 1] * v[KERNEL + 2] * vector
        zero(total, v[TAPS_BYTES] // vector)
        items = v[BATCH] * number
        for item in range(share * items // v[SHARES], (share + 1) * items // v[SHARES]):
            tile, n = tile_of(v, item % number), item // number
            source_in(x, v, first, valid, n, tile, source, line)
            starts = (tile[0] * v[TILE], tile[1] * v[TILE + 1], tile[2] * v[TILE + 2])
            depth, height = min(v[TILE], counts[0] - starts[0]), min(v[TILE + 1], counts[1] - starts[1])
            table = 2 * (tile[2] == v[TILES + 2] - 1)
            for o in range(v[OTHERS]):
                there = y + n * v[OTHER] + first * v[OTHER + 1] + o * v[OTHER + 2]
                region(
                    v[CALLS], v[DTYPES + 1], there, strides, v[OTHER + 1], valid, counts, starts, extents,
                    (1, row, row, plane), factors, line,
                )  # fmt: skip
                for d in range(depth):
                    for h in range(0, height, v[BAND]):
                        lines = min(v[BAND], height - h) * (tables[table + 1] // v[BAND])
                        for i in range(v[SOURCES]):
                            tap_sums(
                                v, tables[table], lines, source + i * v[SOURCE_BYTES] + d * v[DOWN] + h * v[DOWN + 1],
                                factors + d * plane + h * row, total + (o * v[SOURCES] + i) * pair,
                            )  # fmt: skip
        if v[SHARES] == 1:
            taps_out(w, v, first, valid, scratch)

    return run


@functools.cache
def _shares_out(lanes: int) -> Callable[..., None]:
    """Makes ``(w, partial, scratch, v, unit)``, which sums all shares of a block of groups into the filter."""
    taps_out, zero, added, vector = _taps(lanes, True), rows.zeros(lanes), rows.added(lanes), NUMBER * lanes

    @compiled(lanes)
    def run(w, partial, scratch, v, unit):
        first = unit * lanes
        zero(scratch, v[TAPS_BYTES] // vector)
        for share in range(v[SHARES]):
            there = partial + (unit * v[SHARES] + share) * v[TAPS_BYTES]
            for place in range(0, v[TAPS_BYTES], vector):
                added(scratch + place, there + place)
        taps_out(w, v, first, min(lanes, v[GROUPS] - first), scratch)

    return run


def convolve_directly(lanes: int) -> Callable[..., None]:
    """Makes ``(data)``, which computes all units that no other thread takes, of the convolution ``data`` describes.

    ``data`` is the address of int64: the next thread's number, the number of threads, the next unit, the number of
    units, the size of ``data``, the size of a thread's scratch, and the addresses of all scratch, of source, other and
    taps and of the shares' sums. ``v`` begins at index :data:`~tilewise.kernels.cpu.depthwise.windows.HEADER`, and
    after it come the address and the number of lines of each table.
    """
    image, gradient, shares_out, count = _image(lanes), _gradient(lanes), _shares_out(lanes), next_number()

    def run(address):
        data = carray(address, HEADER)
        whole = carray(address, data[4])
        v, tables = whole[HEADER : HEADER + COUNT], whole[HEADER + COUNT :]
        thread = count(address, 0)
        scratch = data[6] + thread * data[5]
        if thread < data[1]:
            unit = count(address, 2)
            while unit < data[3]:
                if v[0] == 0:
                    image(data[7], data[9], data[8], scratch, v, tables, unit)
                elif v[0] == 1:
                    gradient(data[7], data[8], data[9], data[10], scratch, v, tables, unit)
                else:
                    shares_out(data[9], data[10], scratch, v, unit)
                unit = count(address, 2)

    return named(run, lanes)
