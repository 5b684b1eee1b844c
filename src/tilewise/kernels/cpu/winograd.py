"""Winograd convolution of planes: blocks of tiles that never leave a core's cache.

Tiles of ``n x n`` inputs, n = m + r - 1, give ``m x m`` outputs (Lavin and Gray 2016, section 4.2). A unit is a block
of tiles and a share of the outputs' channels. Its inputs are transformed ``lanes`` channels at once; then, for
``vectors`` vectors of outputs at a time, each of n^2 frequencies is multiplied by its filters and the sums are
transformed back. Numbers that describe a problem, ``v`` here, are those of :mod:`tilewise.kernels.cpu.tiling`, which
also names them; transforms and products are functions at addresses that are among them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

from numba import carray  # type: ignore[attr-defined]

from tilewise.kernels.cpu import tiling as of
from tilewise.kernels.cpu import vectors
from tilewise.kernels.cpu.sizes import HEADER
from tilewise.kernels.cpu.strips import strip_in, strip_out
from tilewise.kernels.cpu.vectors import NUMBER, compiled, named, next_number, pointer_call

__all__ = ["winograd"]


@functools.cache
def _clear(lanes: int) -> Callable[..., None]:
    """``(address, count)``: zeros in ``count`` vectors."""
    zero, size = vectors.zero(lanes), NUMBER * lanes

    @compiled(lanes)
    def run(address, count):
        for i in range(count):
            zero(address + i * size)

    return run


@functools.cache
def _tiles_in(lanes: int) -> Callable[..., None]:
    """``(source, plane, apart, sizes, rows, columns, valid, strip, transform, target, points, to_frequency, to_tile)``.

    Transforms of a block's tiles, of ``valid`` channels from ``source`` on. ``plane`` is the image's height and width
    and how far before it tiles begin, ``apart`` bytes between images, channels, rows and columns; ``sizes`` are points
    of a tile along each axis, and from one tile to the next. ``rows`` are the first tile row, counted through all
    images, and the one behind the last, and how many an image has; ``columns`` the first tile's and the one behind the
    last. ``strip`` is scratch for the rows of the image that they read; ``points`` are the transform's along each axis.
    """
    vector = NUMBER * lanes
    clear, put, call = _clear(lanes), strip_in(lanes), pointer_call()

    @compiled(lanes)
    def run(source, plane, apart, sizes, rows, columns, valid, strip, transform, target, points, to_frequency, to_tile):
        height, width, lead, before = plane
        to_image, to_channel, to_row, to_column = apart
        n, m = sizes
        tiles = columns[1] - columns[0]
        first = columns[0] * m - before
        count = (tiles - 1) * m + n
        left = min(count, max(0, -first))
        right = max(left, min(count, width - first))
        pitch = (count + lanes) * vector
        top = strip
        for i in range(rows[0], rows[1]):
            down, known = i % rows[2], 0
            if down == 0 or i == rows[0]:
                top = strip
            else:
                top, known = top + m * pitch, n - m
            for j in range(known, n):
                y, line = down * m - lead + j, top + j * pitch
                if y < 0 or y >= height:
                    clear(line, count)
                else:
                    begin = source + i // rows[2] * to_image + y * to_row + (first + left) * to_column
                    clear(line, left)
                    put(begin, to_column, to_channel, valid, right - left, line + left * vector)
                    clear(line + right * vector, count - right)
            call(transform, top, pitch, vector, m * vector, target, points * to_frequency, to_frequency, to_tile, tiles)
            target += tiles * to_tile

    return run


@functools.cache
def _tiles_out(lanes: int) -> Callable[..., None]:
    """``(y, v, rows, columns, valid, strip, source)``: the way back from sums, as :func:`_tiles_in` has it."""
    vector = NUMBER * lanes
    put, call = strip_out(lanes), pointer_call()

    @compiled(lanes)
    def run(y, v, rows, columns, valid, strip, source):
        m, row, column, to_tile, frequency = v[of.M], v[of.Y_ROW], v[of.Y_COLUMN], v[of.SUM_TILE], v[of.SUM_FREQUENCY]
        tiles, n = columns[1] - columns[0], v[of.N]
        first = columns[0] * m
        count, pitch = min(tiles * m, v[of.Y_WIDTH] - first), (tiles * m + lanes) * vector
        for i in range(rows[0], rows[1]):
            image, top = i // rows[2], i % rows[2] * m
            call(v[of.BACKWARD], source, n * frequency, frequency, to_tile, strip, pitch, vector, m * vector, tiles)
            source += tiles * to_tile
            for j in range(min(m, v[of.Y_HEIGHT] - top)):
                place = y + image * v[of.Y_IMAGE] + (top + j) * row + first * column
                put(place, column, v[of.Y_CHANNEL], valid, count, strip + j * pitch)

    return run


@functools.cache
def _filters(lanes: int) -> Callable[..., None]:
    """``(w, u, v, strip, unit)``: the transformed filters of a group's ``vectors`` vectors of outputs.

    In order of frequency, input and output.
    """
    vector = NUMBER * lanes
    put, call = strip_in(lanes), pointer_call()

    @compiled(lanes)
    def run(w, u, v, strip, unit):
        depth, line, r, row, column = v[of.INPUTS], v[of.LINE], v[of.R], v[of.W_ROW], v[of.W_COLUMN]
        group, chunk, n = unit // v[of.CHUNKS], unit % v[of.CHUNKS], v[of.N]
        # A filter that is turned is read from its last tap on.
        start, along = (strip + (r * r - 1) * vector, -vector) if v[of.TURNED] else (strip, vector)
        whole = row == r * column
        target = u + unit * n * n * v[of.PANEL]
        for j in range(v[of.VECTORS]):
            first = (chunk * v[of.VECTORS] + j) * lanes
            valid = min(lanes, v[of.OUTPUTS] - first)
            source = w + group * v[of.W_GROUP] + first * v[of.W_OUTPUT]
            for c in range(depth):
                for i in range(1 if whole else r):
                    place = source + c * v[of.W_INPUT] + i * row
                    put(place, column, v[of.W_OUTPUT], valid, r * r if whole else r, strip + i * r * vector)
                place = target + c * line + j * vector
                call(v[of.FILTER], start, r * along, along, 0, place, n * v[of.PANEL], v[of.PANEL], 0, 1)

    return run


@functools.cache
def _block(lanes: int) -> Callable[..., None]:
    """``(x, u, y, v, scratch, rows, columns, share, group)``: a share of the outputs of a block."""
    vector = NUMBER * lanes
    gather, put, multiply = _tiles_in(lanes), _tiles_out(lanes), pointer_call()

    @compiled(lanes)
    def run(x, u, y, v, scratch, rows, columns, share, group):
        tiles = (rows[1] - rows[0]) * (columns[1] - columns[0])
        depth, outputs, n, chunks = v[of.INPUTS], v[of.OUTPUTS], v[of.N], v[of.CHUNKS]
        sums, strip, to_frequency, to_tile = scratch + v[of.SUMS], scratch + v[of.STRIP], v[of.FREQUENCY], v[of.TILE]
        plane = (v[of.X_HEIGHT], v[of.X_WIDTH], v[of.LEAD], v[of.BEFORE])
        apart = (v[of.X_IMAGE], v[of.X_CHANNEL], v[of.X_ROW], v[of.X_COLUMN])
        for c in range(0, depth, lanes):
            source, target = x + (group * depth + c) * v[of.X_CHANNEL], scratch + c * NUMBER
            gather(source, plane, apart, (n, v[of.M]), rows, columns, min(lanes, depth - c), strip, v[of.FORWARD],
                   target, n, to_frequency, to_tile)  # fmt: skip
        blocks = (tiles + v[of.BLOCK_ROWS] - 1) // v[of.BLOCK_ROWS]
        for chunk in range(share * chunks // v[of.SHARES], (share + 1) * chunks // v[of.SHARES]):
            filters = u + (group * chunks + chunk) * n * n * v[of.PANEL]
            multiply(v[of.PRODUCTS], scratch, filters, sums, depth, 0, blocks, n * n, v[of.DISTANCES])
            for j in range(v[of.VECTORS]):
                first = (chunk * v[of.VECTORS] + j) * lanes
                if first < outputs:
                    place = y + (group * outputs + first) * v[of.Y_CHANNEL]
                    put(place, v, rows, columns, min(lanes, outputs - first), strip, sums + j * vector)

    return run


@functools.cache
def _gradient(lanes: int) -> Callable[..., None]:
    """``(x, y, w, v, scratch, share, chunk, group)``: the gradients of some filters, from all tiles.

    Those of a share of the outputs and of ``vectors`` vectors of inputs: the sums over tiles of products of both
    images' transforms, transformed back at the end.
    """
    vector = NUMBER * lanes
    gather, put, call = _tiles_in(lanes), strip_out(lanes), pointer_call()

    @compiled(lanes)
    def run(x, y, w, v, scratch, share, chunk, group):
        m, n, r, line, sum_frequency = v[of.M], v[of.N], v[of.R], v[of.LINE], v[of.SUM_FREQUENCY]
        begin, end = share * v[of.SHARE], min(v[of.OUTPUTS], (share + 1) * v[of.SHARE])
        first = chunk * v[of.VECTORS] * lanes
        last = min(v[of.INPUTS], first + v[of.VECTORS] * lanes)
        others, sums, strip = scratch + v[of.OTHERS], scratch + v[of.SUMS], scratch + v[of.STRIP]
        plane = (v[of.X_HEIGHT], v[of.X_WIDTH], v[of.LEAD], v[of.BEFORE])
        apart = (v[of.X_IMAGE], v[of.X_CHANNEL], v[of.X_ROW], v[of.X_COLUMN])
        other = (v[of.Y_HEIGHT], v[of.Y_WIDTH], 0, 0)
        other_apart = (v[of.Y_IMAGE], v[of.Y_CHANNEL], v[of.Y_ROW], v[of.Y_COLUMN])
        blocks = (end - begin + v[of.BLOCK_ROWS] - 1) // v[of.BLOCK_ROWS]
        for block in range(v[of.BLOCKS]):
            down, along = block // v[of.SEGMENTS] * v[of.ROWS_], block % v[of.SEGMENTS] * v[of.COLUMNS]
            rows = (down, min(v[of.TILE_ROWS], down + v[of.ROWS_]), v[of.IMAGE_ROWS])
            columns = (along, min(v[of.ACROSS], along + v[of.COLUMNS]))
            for c in range(first, last, lanes):
                source, target = x + (group * v[of.INPUTS] + c) * v[of.X_CHANNEL], scratch + (c - first) * NUMBER
                gather(source, plane, apart, (n, m), rows, columns, min(lanes, last - c), strip, v[of.FORWARD],
                       target, n, v[of.FREQUENCY], v[of.TILE])  # fmt: skip
            for k in range(begin, end, lanes):
                source, target = y + (group * v[of.OUTPUTS] + k) * v[of.Y_CHANNEL], others + (k - begin) * NUMBER
                gather(source, other, other_apart, (m, m), rows, columns, min(lanes, end - k), strip, v[of.FILTER],
                       target, n, v[of.OTHER_FREQUENCY], v[of.OTHER_TILE])  # fmt: skip
            tiles = (rows[1] - rows[0]) * (columns[1] - columns[0])
            call(v[of.PRODUCTS], others, scratch, sums, tiles, block, blocks, n * n, v[of.DISTANCES])
        row, column = v[of.W_ROW], v[of.W_COLUMN]
        whole = row == r * column
        for k in range(begin, end):
            for c in range(first, last, lanes):
                source = sums + (k - begin) * line + (c - first) * NUMBER
                call(v[of.BACKWARD], source, n * sum_frequency, sum_frequency, 0, strip, r * vector, vector, 0, 1)
                target = w + (group * v[of.OUTPUTS] + k) * v[of.W_OUTPUT] + c * v[of.W_INPUT]
                for i in range(1 if whole else r):
                    put(target + i * row, column, v[of.W_INPUT], min(lanes, last - c), r * r if whole else r,
                        strip + i * r * vector)  # fmt: skip

    return run


def winograd(lanes: int) -> Callable[..., None]:
    """``(data)``: all units that no other thread takes, as :func:`tilewise.kernels.cpu.kernel.convolve` has it.

    ``v[KIND]`` is 0 for outputs, from transformed filters, 1 for these and 2 for filters' gradients.
    """
    block, filters, gradient, count = _block(lanes), _filters(lanes), _gradient(lanes), next_number()

    def run(address):
        data = carray(address, HEADER)
        v = carray(address, data[4])[HEADER:]
        thread = count(address, 0)
        scratch = data[6] + thread * data[5]
        if thread < data[1]:
            unit = count(address, 2)
            while unit < data[3]:
                share, rest = unit % v[of.SHARES], unit // v[of.SHARES]
                if v[of.KIND] == 0:
                    number, group = rest % v[of.BLOCKS], rest // v[of.BLOCKS]
                    down, along = number // v[of.SEGMENTS] * v[of.ROWS_], number % v[of.SEGMENTS] * v[of.COLUMNS]
                    rows = (down, min(v[of.TILE_ROWS], down + v[of.ROWS_]), v[of.IMAGE_ROWS])
                    columns = (along, min(v[of.ACROSS], along + v[of.COLUMNS]))
                    block(data[7], data[8], data[9], v, scratch, rows, columns, share, group)
                elif v[of.KIND] == 1:
                    filters(data[8], data[9], v, scratch + v[of.STRIP], unit)
                else:
                    chunk, group = rest % v[of.CHUNKS], rest // v[of.CHUNKS]
                    gradient(data[7], data[8], data[9], v, scratch, share, chunk, group)
                unit = count(address, 2)

    return named(run, lanes)
