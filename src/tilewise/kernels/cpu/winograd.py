"""Winograd convolution of planes: blocks of tiles that never leave a core's cache.

Tiles of ``n x n`` inputs, n = m + r - 1, give ``m x m`` outputs (Lavin and Gray 2016, section 4.2). A unit is a block
of tiles and a share of the outputs' channels. Its inputs are transformed ``lanes`` channels at once; then, for
``vectors`` vectors of outputs at a time, each of n^2 frequencies is multiplied by its filters and the sums are
transformed back.

Numbers that describe a problem are those of :class:`tilewise.kernels.cpu.tiling.Tiling`, called ``v`` here.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

from numba import carray  # type: ignore[attr-defined]

from tilewise.kernels.cpu import vectors
from tilewise.kernels.cpu.cook_toom import transforms, turned
from tilewise.kernels.cpu.sandwiches import sandwich
from tilewise.kernels.cpu.sizes import HEADER
from tilewise.kernels.cpu.strips import strip_in, strip_out
from tilewise.kernels.cpu.vectors import NUMBER, compiled, named, next_number, pointer_call

__all__ = ["convolve"]


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
def row_in(lanes: int) -> Callable[..., None]:
    """``(row, size, first, count, step, channel, valid, target)``: numbers from ``first`` on of a row of ``size``.

    What lies beyond either end is zero, as are channels from ``valid`` on. Up to ``lanes`` vectors more are written.
    """
    clear, strip, size_of = _clear(lanes), strip_in(lanes), NUMBER * lanes

    @compiled(lanes)
    def run(row, size, first, count, step, channel, valid, target):
        left = min(count, max(0, -first))
        right = max(left, min(count, size - first))
        clear(target, left)
        strip(row + (first + left) * step, step, channel, valid, right - left, target + left * size_of)
        clear(target + right * size_of, count - right)

    return run


@functools.cache
def tiles_in(lanes: int, m: int, r: int) -> Callable[..., None]:
    """``(x, v, rows, columns, valid, strip, target)``: transforms of a block's tiles, of ``valid`` channels from x on.

    ``rows`` are the first tile row of all images' and the one behind the last, ``columns`` the first tile's and the
    one behind the last. ``strip`` is scratch for the rows of the image that they read.
    """
    n, vector = m + r - 1, NUMBER * lanes
    forward, row, clear = sandwich(lanes, transforms(m, r).input), row_in(lanes), _clear(lanes)

    @compiled(lanes, m, r)
    def run(x, v, rows, columns, valid, strip, target):
        height, width, lead, pitch, tile_pitch, next_frequency = v[13], v[14], v[15], v[38], v[36], v[35]
        first = columns[0] * m - v[16]
        count = (columns[1] - columns[0]) * m + r - 1
        top = strip
        for i in range(rows[0], rows[1]):
            image, down = i // v[5], i % v[5]
            known = 0
            if down == 0 or i == rows[0]:
                top = strip
            else:
                top, known = top + m * pitch, r - 1
            for j in range(known, n):
                y = down * m - lead + j
                if y < 0 or y >= height:
                    clear(top + j * pitch, count)
                else:
                    source = x + image * v[19] + y * v[21]
                    row(source, width, first, count, v[22], v[20], valid, top + j * pitch)
            for j in range(columns[1] - columns[0]):
                forward(top + j * m * vector, pitch, vector, target, n * next_frequency, next_frequency)
                target += tile_pitch

    return run


@functools.cache
def _tiles_out(lanes: int, m: int, r: int) -> Callable[..., None]:
    """``(y, v, rows, columns, valid, strip, source)``: the way back from sums, as :func:`tiles_in` has it."""
    n, vector = m + r - 1, NUMBER * lanes
    backward, put = sandwich(lanes, turned(transforms(m, r).output)), strip_out(lanes)

    @compiled(lanes, m, r)
    def run(y, v, rows, columns, valid, strip, source):
        height, width, pitch, tile_pitch, next_frequency = v[17], v[18], v[38], v[12] * vector, v[37]
        first = columns[0] * m
        count = min((columns[1] - columns[0]) * m, width - first)
        for i in range(rows[0], rows[1]):
            image, top = i // v[5], i % v[5] * m
            for j in range(columns[1] - columns[0]):
                backward(source, n * next_frequency, next_frequency, strip + j * m * vector, pitch, vector)
                source += tile_pitch
            for j in range(min(m, height - top)):
                place = y + image * v[23] + (top + j) * v[25] + first * v[26]
                put(place, v[26], v[24], valid, count, strip + j * pitch)

    return run


@functools.cache
def _filters(lanes: int, m: int, r: int) -> Callable[..., None]:
    """``(w, u, v, strip, unit)``: the transformed filters of a group's ``vectors`` vectors of outputs.

    In order of frequency, input and output.
    """
    n, vector = m + r - 1, NUMBER * lanes
    forward, row = sandwich(lanes, transforms(m, r).filter), strip_in(lanes)

    @compiled(lanes, m, r)
    def run(w, u, v, strip, unit):
        group, chunk = unit // v[11], unit % v[11]
        depth, outputs, line = v[2], v[3], v[12] * vector
        # A filter that is turned is read from its last tap on.
        start, along = (strip + (r * r - 1) * vector, -vector) if v[41] else (strip, vector)
        target = u + unit * n * n * depth * line
        for c in range(depth):
            for j in range(v[12]):
                first = (chunk * v[12] + j) * lanes
                source = w + group * v[31] + first * v[27] + c * v[28]
                valid = min(lanes, outputs - first)
                if v[29] == r * v[30]:
                    row(source, v[30], v[27], valid, r * r, strip)
                else:
                    for i in range(r):
                        row(source + i * v[29], v[30], v[27], valid, r, strip + i * r * vector)
                place = target + c * line + j * vector
                forward(start, r * along, along, place, n * depth * line, depth * line)

    return run


@functools.cache
def _block(lanes: int, m: int, r: int) -> Callable[..., None]:
    """``(x, u, y, v, scratch, unit)``: the outputs of one unit."""
    n, vector = m + r - 1, NUMBER * lanes
    gather, put, multiply = tiles_in(lanes, m, r), _tiles_out(lanes, m, r), pointer_call()

    @compiled(lanes, m, r)
    def run(x, u, y, v, scratch, unit):
        share, block, group = unit % v[10], unit // v[10] % v[42], unit // (v[10] * v[42])
        down, along = block // v[9] * v[7], block % v[9] * v[8]
        rows, columns = (down, min(v[4], down + v[7])), (along, min(v[6], along + v[8]))
        tiles = (rows[1] - rows[0]) * (columns[1] - columns[0])
        depth, outputs, sums, strip = v[2], v[3], scratch + v[39], scratch + v[40]
        for c in range(0, depth, lanes):
            source = x + (group * depth + c) * v[20]
            gather(source, v, rows, columns, min(lanes, depth - c), strip, scratch + c * NUMBER)
        for chunk in range(share * v[11] // v[10], (share + 1) * v[11] // v[10]):
            filters = u + (group * v[11] + chunk) * n * n * depth * v[12] * vector
            blocks = (tiles + v[33] - 1) // v[33]
            multiply(v[32], scratch, filters, sums, depth, 0, blocks, n * n, v[34])
            for j in range(v[12]):
                first = (chunk * v[12] + j) * lanes
                if first < outputs:
                    place = y + (group * outputs + first) * v[24]
                    put(place, v, rows, columns, min(lanes, outputs - first), strip, sums + j * vector)

    return run


def convolve(lanes: int, m: int, r: int) -> Callable[..., None]:
    """``(data)``: all units that no other thread takes, as :func:`tilewise.kernels.cpu.kernel.convolve` has it.

    ``v[0]`` is 0 for outputs, from transformed filters, and 1 for these.
    """
    block, filters, count = _block(lanes, m, r), _filters(lanes, m, r), next_number()

    def run(address):
        data = carray(address, HEADER)
        v = carray(address, data[4])[HEADER:]
        thread = count(address, 0)
        scratch = data[6] + thread * data[5]
        if thread < data[1]:
            unit = count(address, 2)
            while unit < data[3]:
                if v[0] == 0:
                    block(data[7], data[8], data[9], v, scratch, unit)
                else:
                    filters(data[8], data[9], v, scratch + v[40], unit)
                unit = count(address, 2)

    return named(run, lanes, m, r)
