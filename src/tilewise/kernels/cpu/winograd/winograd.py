"""Winograd convolution of signals, planes and volumes, in blocks of tiles that stay in a core's cache.

Tiles of n inputs along an axis, n = m + r - 1, give m outputs (Lavin and Gray 2016, section 4.2). A unit is a block of
tiles and a share of the output channels. Its inputs are transformed ``lanes`` channels at once. Then, for ``vectors``
vectors of outputs at a time, each frequency is multiplied by its filters and the sums are transformed back. Height and
width are transformed together. In a tile with depth each slice is transformed so, and the depth afterwards. A signal is
a plane of one row. The numbers ``v`` describe a problem; :mod:`tilewise.kernels.cpu.winograd.tiling` names their
indices. Among them are the addresses of transforms and products.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

from tilewise.kernels.cpu import vectors
from tilewise.kernels.cpu.channels_last.finishing import behind
from tilewise.kernels.cpu.rows import added
from tilewise.kernels.cpu.units import over_units
from tilewise.kernels.cpu.vectors import NUMBER, compiled, pointer_call
from tilewise.kernels.cpu.winograd import tiling as of
from tilewise.kernels.cpu.winograd.strips import strip_in, strip_out

__all__ = ["winograd"]


@functools.cache
def _clear(lanes: int) -> Callable[..., None]:
    """Makes ``(address, count)``, which sets ``count`` vectors to zero."""
    zero, size = vectors.zero(lanes), NUMBER * lanes

    @compiled(lanes)
    def run(address, count):
        for i in range(count):
            zero(address + i * size)

    return run


@functools.cache
def _deep(lanes: int) -> Callable[..., None]:
    """Makes ``(function, source, slice, next, target, to_slice, to_next, count)``, which transforms along the depth.

    It transforms ``count`` columns that are ``next`` bytes apart in the source and ``to_next`` in the target.
    """
    call = pointer_call()

    @compiled(lanes)
    def run(function, source, slice, next, target, to_slice, to_next, count):
        call(function, source, slice, 0, next, target, to_slice, 0, to_next, count)

    return run


@functools.cache
def _tiles_in(lanes: int) -> Callable[..., None]:
    """Makes ``(source, image, apart, window, rows, columns, valid, transforms, strip, target, v, to_frequency,
    to_tile)``.

    It transforms a block's tiles of ``valid`` channels from ``source`` on. ``image`` has the depth, height and width of
    the image, and how far before it tiles begin along each. ``apart`` has the bytes between images, channels, slices,
    rows and columns, and ``window`` the sizes of a tile in the image. ``rows`` are the first tile row, counted through
    all slices of all images, and the one after the last; ``columns`` are the same for columns. ``transforms`` are the
    addresses of the functions for planes and for the depth. ``strip`` is scratch for rows of the image.
    """
    vector = NUMBER * lanes
    clear, put, call, deeply = _clear(lanes), strip_in(lanes), pointer_call(), _deep(lanes)

    @compiled(lanes)
    def run(source, image, apart, window, rows, columns, valid, transforms, strip, target, v, to_frequency, to_tile):
        depth, height, width, ahead, lead, before = image
        to_image, to_channel, to_slice, to_row, to_column = apart
        slices, high, wide = window
        m, step, across, in_slice = v[of.M_HEIGHT], v[of.M_WIDTH] * vector, v[of.N_WIDTH], v[of.SLICE_ROWS]
        plane = v[of.N_HEIGHT] * across
        tiles = columns[1] - columns[0]
        first = columns[0] * v[of.M_WIDTH] - before
        count = (tiles - 1) * v[of.M_WIDTH] + wide
        left = min(count, max(0, -first))
        right = max(left, min(count, width - first))
        pitch = (count + lanes) * vector
        flat, deep = transforms
        between, to_next = strip + v[of.BETWEEN] - v[of.STRIP], slices * plane * vector
        for z in range(slices):
            top, place = strip, target
            if deep:
                place = between + z * plane * vector
            for i in range(rows[0], rows[1]):
                down, known = i % in_slice, 0
                if down == 0 or i == rows[0]:
                    top = strip
                else:
                    top, known = top + m * pitch, high - m
                inside = i // in_slice % v[of.SLICES] * v[of.M_DEPTH] - ahead + z
                begin = source + i // (in_slice * v[of.SLICES]) * to_image + inside * to_slice
                for j in range(known, high):
                    y, line = down * m - lead + j, top + j * pitch
                    if y < 0 or y >= height or inside < 0 or inside >= depth:
                        clear(line, count)
                    else:
                        clear(line, left)
                        put(begin + y * to_row + (first + left) * to_column, to_column, to_channel, valid,
                            right - left, line + left * vector)  # fmt: skip
                        clear(line + right * vector, count - right)
                if deep:
                    call(flat, top, pitch, vector, step, place, across * vector, vector, to_next, tiles)
                    place += tiles * to_next
                else:
                    call(flat, top, pitch, vector, step, place, across * to_frequency, to_frequency, to_tile, tiles)
                    place += tiles * to_tile
        if deep:
            for i in range((rows[1] - rows[0]) * tiles):
                deeply(deep, between + i * to_next, plane * vector, vector, target + i * to_tile, plane * to_frequency,
                       to_frequency, plane)  # fmt: skip

    return run


@functools.cache
def _tiles_out(lanes: int, finishes: bool) -> Callable[..., None]:
    """Makes ``(y, v, rows, columns, valid, strip, source, bias, distance)``, which stores sums transformed back.

    Arguments are as in :func:`_tiles_in`. ``bias`` is the address of a vector to add, or 0. One that ``finishes`` adds
    it in registers, then a residual, which lies :func:`behind` the results, and applies the activation.
    """
    vector = NUMBER * lanes
    put, call, deeply, plus = strip_out(lanes), pointer_call(), _deep(lanes), added(lanes)

    @compiled(lanes, *["finishing"] * finishes)
    def run(y, v, rows, columns, valid, strip, source, bias, distance):
        m, row, column, to_tile, frequency = v[of.M_HEIGHT], v[of.Y_ROW], v[of.Y_COLUMN], v[of.SUM_TILE], v[of.LINE]
        tiles, across, slices, deep = columns[1] - columns[0], v[of.N_WIDTH], v[of.M_DEPTH], v[of.DEEP_BACKWARD]
        plane = v[of.N_HEIGHT] * across
        first = columns[0] * v[of.M_WIDTH]
        step = v[of.M_WIDTH] * vector
        count, pitch = min(tiles * v[of.M_WIDTH], v[of.Y_WIDTH] - first), tiles * step + lanes * vector
        between, area = strip + v[of.BETWEEN] - v[of.STRIP], plane * vector
        for i in range(rows[0], rows[1]):
            inside, top = i // v[of.SLICE_ROWS] % v[of.SLICES] * slices, i % v[of.SLICE_ROWS] * m
            image = y + i // (v[of.SLICE_ROWS] * v[of.SLICES]) * v[of.Y_IMAGE]
            if deep:
                for k in range(tiles):
                    deeply(deep, source + k * to_tile, plane * frequency, frequency, between + k * slices * area, area,
                           vector, plane)  # fmt: skip
            for z in range(min(slices, v[of.Y_DEPTH] - inside)):
                if deep:
                    call(v[of.BACKWARD], between + z * area, across * vector, vector, slices * area, strip, pitch,
                         vector, step, tiles)  # fmt: skip
                else:
                    call(v[of.BACKWARD], source, across * frequency, frequency, to_tile, strip, pitch, vector, step,
                         tiles)  # fmt: skip
                place = image + (inside + z) * v[of.Y_SLICE] + top * row + first * column
                for j in range(min(m, v[of.Y_HEIGHT] - top)):
                    if finishes:
                        call(v[of.FINISH], place + j * row, column, v[of.Y_CHANNEL], valid, count, strip + j * pitch,
                             bias, v[of.RESIDUAL], *distance)  # fmt: skip
                        continue
                    if bias:
                        for k in range(count):
                            plus(strip + j * pitch + k * vector, bias)
                    put(place + j * row, column, v[of.Y_CHANNEL], valid, count, strip + j * pitch, ())
            source += tiles * to_tile

    return run


@functools.cache
def _taps_in(lanes: int) -> Callable[..., None]:
    """Makes ``(source, v, channel, valid, strip)``, which copies the taps of filters to vectors.

    It copies those of ``valid`` channels, which are ``channel`` bytes apart.
    """
    vector, put = NUMBER * lanes, strip_in(lanes)

    @compiled(lanes)
    def run(source, v, channel, valid, strip):
        high, wide, slice, row, column = v[of.R_HEIGHT], v[of.R_WIDTH], v[of.W_SLICE], v[of.W_ROW], v[of.W_COLUMN]
        if row == wide * column and slice == high * row:
            put(source, column, channel, valid, v[of.R_DEPTH] * high * wide, strip)
        else:
            for i in range(v[of.R_DEPTH] * high):
                place = source + i // high * slice + i % high * row
                put(place, column, channel, valid, wide, strip + i * wide * vector)

    return run


@functools.cache
def _taps_out(lanes: int) -> Callable[..., None]:
    """Makes ``(target, v, channel, valid, strip)``, the inverse of :func:`_taps_in`."""
    vector, put = NUMBER * lanes, strip_out(lanes)

    @compiled(lanes)
    def run(target, v, channel, valid, strip):
        high, wide, slice, row, column = v[of.R_HEIGHT], v[of.R_WIDTH], v[of.W_SLICE], v[of.W_ROW], v[of.W_COLUMN]
        if row == wide * column and slice == high * row:
            put(target, column, channel, valid, v[of.R_DEPTH] * high * wide, strip, ())
        else:
            for i in range(v[of.R_DEPTH] * high):
                place = target + i // high * slice + i % high * row
                put(place, column, channel, valid, wide, strip + i * wide * vector, ())

    return run


@functools.cache
def _filters(lanes: int) -> Callable[..., None]:
    """Makes ``(w, u, v, strip, unit)``, which transforms the filters of ``vectors`` vectors of a group's outputs.

    The results are in the order of frequency, input and output.
    """
    vector = NUMBER * lanes
    take, call, deeply = _taps_in(lanes), pointer_call(), _deep(lanes)

    @compiled(lanes)
    def run(w, u, v, strip, unit):
        depth, line, panel, slices, deep = v[of.INPUTS], v[of.LINE], v[of.PANEL], v[of.R_DEPTH], v[of.DEEP_FILTER]
        group, chunk, across = unit // v[of.CHUNKS], unit % v[of.CHUNKS], v[of.N_WIDTH]
        wide, taps, plane = v[of.R_WIDTH], v[of.R_HEIGHT] * v[of.R_WIDTH], v[of.N_HEIGHT] * across
        # A flipped filter is read from its last tap on.
        start, along = (strip + (slices * taps - 1) * vector, -vector) if v[of.TURNED] else (strip, vector)
        between, area = strip + v[of.BETWEEN] - v[of.STRIP], plane * vector
        target = u + unit * v[of.N_DEPTH] * plane * panel
        for j in range(v[of.VECTORS]):
            first = (chunk * v[of.VECTORS] + j) * lanes
            valid = min(lanes, v[of.OUTPUTS] - first)
            source = w + group * v[of.W_GROUP] + first * v[of.W_OUTPUT]
            for c in range(depth):
                take(source + c * v[of.W_INPUT], v, v[of.W_OUTPUT], valid, strip)
                place = target + c * line + j * vector
                if deep:
                    for z in range(slices):
                        call(v[of.FILTER], start + z * taps * along, wide * along, along, 0, between + z * area,
                             across * vector, vector, 0, 1)  # fmt: skip
                    deeply(deep, between, area, vector, place, plane * panel, panel, plane)
                else:
                    call(v[of.FILTER], start, wide * along, along, 0, place, across * panel, panel, 0, 1)

    return run


@functools.cache
def _gradients_out(lanes: int) -> Callable[..., None]:
    """Makes ``(w, v, valid, strip, source)``, which computes the filter's gradient of ``valid`` inputs from sums."""
    vector = NUMBER * lanes
    put, call, deeply = _taps_out(lanes), pointer_call(), _deep(lanes)

    @compiled(lanes)
    def run(w, v, valid, strip, source):
        frequency, across, slices, deep = v[of.SUM_FREQUENCY], v[of.N_WIDTH], v[of.R_DEPTH], v[of.DEEP_BACKWARD]
        wide, taps, plane = v[of.R_WIDTH] * vector, v[of.R_HEIGHT] * v[of.R_WIDTH] * vector, v[of.N_HEIGHT] * across
        between, area = strip + v[of.BETWEEN] - v[of.STRIP], plane * vector
        if deep:
            deeply(deep, source, plane * frequency, frequency, between, area, vector, plane)
            for z in range(slices):
                call(v[of.BACKWARD], between + z * area, across * vector, vector, 0, strip + z * taps, wide, vector, 0,
                     1)  # fmt: skip
        else:
            call(v[of.BACKWARD], source, across * frequency, frequency, 0, strip, wide, vector, 0, 1)
        put(w, v, v[of.W_INPUT], valid, strip)

    return run


@functools.cache
def _inputs(lanes: int) -> Callable[..., None]:
    """Makes ``(x, v, rows, columns, valid, strip, target)``, which is :func:`_tiles_in` for the input."""
    gather = _tiles_in(lanes)

    @compiled(lanes)
    def run(x, v, rows, columns, valid, strip, target):
        image = (v[of.X_DEPTH], v[of.X_HEIGHT], v[of.X_WIDTH], v[of.LEAD_DEPTH], v[of.LEAD_HEIGHT], v[of.LEAD_WIDTH])
        apart = (v[of.X_IMAGE], v[of.X_CHANNEL], v[of.X_SLICE], v[of.X_ROW], v[of.X_COLUMN])
        window = (v[of.N_DEPTH], v[of.N_HEIGHT], v[of.N_WIDTH])
        gather(x, image, apart, window, rows, columns, valid, (v[of.FORWARD], v[of.DEEP_FORWARD]), strip, target, v,
               v[of.FREQUENCY], v[of.TILE])  # fmt: skip

    return run


@functools.cache
def _others(lanes: int) -> Callable[..., None]:
    """Makes ``(y, v, rows, columns, valid, strip, target)``, which is :func:`_tiles_in` for the output's gradient."""
    gather = _tiles_in(lanes)

    @compiled(lanes)
    def run(y, v, rows, columns, valid, strip, target):
        image = (v[of.Y_DEPTH], v[of.Y_HEIGHT], v[of.Y_WIDTH], 0, 0, 0)
        apart = (v[of.Y_IMAGE], v[of.Y_CHANNEL], v[of.Y_SLICE], v[of.Y_ROW], v[of.Y_COLUMN])
        window = (v[of.M_DEPTH], v[of.M_HEIGHT], v[of.M_WIDTH])
        gather(y, image, apart, window, rows, columns, valid, (v[of.FILTER], v[of.DEEP_FILTER]), strip, target, v,
               v[of.OTHER_FREQUENCY], v[of.OTHER_TILE])  # fmt: skip

    return run


@functools.cache
def _block(lanes: int, finishes: bool) -> Callable[..., None]:
    """Makes ``(x, u, y, v, scratch, rows, columns, share, group)``, which computes a share of a block's outputs."""
    vector = NUMBER * lanes
    gather, put, multiply, take = _inputs(lanes), _tiles_out(lanes, finishes), pointer_call(), strip_in(lanes)
    far = behind(finishes)

    @compiled(lanes, *["finishing"] * finishes)
    def run(x, u, y, v, scratch, rows, columns, share, group):
        tiles = (rows[1] - rows[0]) * (columns[1] - columns[0])
        depth, outputs, chunks = v[of.INPUTS], v[of.OUTPUTS], v[of.CHUNKS]
        points = v[of.N_DEPTH] * v[of.N_HEIGHT] * v[of.N_WIDTH]
        sums, strip = scratch + v[of.SUMS], scratch + v[of.STRIP]
        bias, distance = scratch + v[of.BIAS_VECTOR] if finishes or v[of.BIAS] else 0, far(v[of.RESIDUAL], y)
        for c in range(0, depth, lanes):
            gather(x + (group * depth + c) * v[of.X_CHANNEL], v, rows, columns, min(lanes, depth - c), strip,
                   scratch + c * NUMBER)  # fmt: skip
        blocks = (tiles + v[of.BLOCK_ROWS] - 1) // v[of.BLOCK_ROWS]
        for chunk in range(share * chunks // v[of.SHARES], (share + 1) * chunks // v[of.SHARES]):
            filters = u + (group * chunks + chunk) * points * v[of.PANEL]
            multiply(v[of.PRODUCTS], scratch, filters, sums, depth, 0, blocks, points, v[of.DISTANCES])
            for j in range(v[of.VECTORS]):
                first = (chunk * v[of.VECTORS] + j) * lanes
                if first < outputs:
                    place, valid = y + (group * outputs + first) * v[of.Y_CHANNEL], min(lanes, outputs - first)
                    if bias:
                        # Where there is none its vector is zeros, as those from the number of valid ones on are.
                        known = 0 if finishes and not v[of.BIAS] else valid
                        take(v[of.BIAS] + (group * outputs + first) * NUMBER, 0, NUMBER, known, 1, bias)
                    put(place, v, rows, columns, valid, strip, sums + j * vector, bias, distance)

    return run


@functools.cache
def _gradient(lanes: int) -> Callable[..., None]:
    """Makes ``(x, y, w, v, scratch, share, chunk, group, part)``, which computes filters' gradients from some blocks.

    It computes those of a share of the outputs and of ``vectors`` vectors of inputs. The products of both images'
    transforms are summed over tiles, and transformed back at the end.
    """
    gather, gather_others, put, call = _inputs(lanes), _others(lanes), _gradients_out(lanes), pointer_call()
    bounds = _bounds(lanes)

    @compiled(lanes)
    def run(x, y, w, v, scratch, share, chunk, group, part):
        points = v[of.N_DEPTH] * v[of.N_HEIGHT] * v[of.N_WIDTH]
        begin, end = share * v[of.SHARE], min(v[of.OUTPUTS], (share + 1) * v[of.SHARE])
        first = chunk * v[of.VECTORS] * lanes
        last = min(v[of.INPUTS], first + v[of.VECTORS] * lanes)
        others, sums, strip = scratch + v[of.OTHERS], scratch + v[of.SUMS], scratch + v[of.STRIP]
        blocks = (end - begin + v[of.BLOCK_ROWS] - 1) // v[of.BLOCK_ROWS]
        start = part * v[of.BLOCKS] // v[of.PARTS]
        for block in range(start, (part + 1) * v[of.BLOCKS] // v[of.PARTS]):
            rows, columns = bounds(v, block)
            for c in range(first, last, lanes):
                gather(x + (group * v[of.INPUTS] + c) * v[of.X_CHANNEL], v, rows, columns, min(lanes, last - c), strip,
                       scratch + (c - first) * NUMBER)  # fmt: skip
            for k in range(begin, end, lanes):
                gather_others(y + (group * v[of.OUTPUTS] + k) * v[of.Y_CHANNEL], v, rows, columns, min(lanes, end - k),
                              strip, others + (k - begin) * NUMBER)  # fmt: skip
            tiles = (rows[1] - rows[0]) * (columns[1] - columns[0])
            call(v[of.PRODUCTS], others, scratch, sums, tiles, block - start, blocks, points, v[of.DISTANCES])
        target = w + part * v[of.W_PART] + group * v[of.OUTPUTS] * v[of.W_OUTPUT]
        for k in range(begin, end):
            for c in range(first, last, lanes):
                put(target + k * v[of.W_OUTPUT] + c * v[of.W_INPUT], v, min(lanes, last - c), strip,
                    sums + (k - begin) * v[of.LINE] + (c - first) * NUMBER)  # fmt: skip

    return run


@functools.cache
def _bounds(lanes: int) -> Callable[..., tuple[tuple[int, int], tuple[int, int]]]:
    """Makes ``(v, block)``, which returns the ranges of a block's tile rows and columns."""

    @compiled(lanes)
    def run(v, block):
        down, along = block // v[of.SEGMENTS] * v[of.ROWS_], block % v[of.SEGMENTS] * v[of.COLUMNS]
        rows = (down, min(v[of.TILE_ROWS], down + v[of.ROWS_]))
        return rows, (along, min(v[of.ACROSS], along + v[of.COLUMNS]))

    return run


def winograd(lanes: int, finishes: bool = False) -> Callable[..., None]:
    """Makes ``(data)``, which computes all units that no other thread takes.

    ``data`` begins as in :func:`tilewise.kernels.cpu.fused_fourier.kernel.convolve`. ``v[KIND]`` is 0 for outputs from
    transformed filters, 1 for these filters and 2 for filters' gradients. One that ``finishes`` calls the function of
    :func:`~tilewise.kernels.cpu.winograd.strips.finished_out` at ``v[FINISH]`` to write outputs.
    """
    block, filters, gradient, bounds = _block(lanes, finishes), _filters(lanes), _gradient(lanes), _bounds(lanes)
    parameters = lanes, *["finishing"] * finishes

    @compiled(*parameters)
    def unit_of(x, w, y, v, scratch, unit):
        share, rest = unit % v[of.SHARES], unit // v[of.SHARES]
        if v[of.KIND] == 0:
            rows, columns = bounds(v, rest % v[of.BLOCKS])
            block(x, w, y, v, scratch, rows, columns, share, rest // v[of.BLOCKS])
        elif v[of.KIND] == 1:
            filters(w, y, v, scratch + v[of.STRIP], unit)
        else:
            part, rest = rest % v[of.PARTS], rest // v[of.PARTS]
            chunk, group = rest % v[of.CHUNKS], rest // v[of.CHUNKS]
            gradient(x, w, y, v, scratch, share, chunk, group, part)

    return over_units(unit_of, "winograd", *parameters)
