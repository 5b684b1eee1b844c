"""Convolution by matrix products with windows that are lowered a block at a time, in a core's own cache.

*Lowering* copies the windows of an image to the columns of a matrix; *lifting* adds up the products of taps afterwards.
The windows of a block lie in a strip, which has for every channel a line of each *variant* of the image. An axis that
is lowered has a variant for each tap. An axis that is lifted has one for each remainder by the stride, which several
taps share. Products are summed over taps and channels in registers
(:mod:`tilewise.kernels.cpu.lowering.correlations`), so that the sums are lifted already. The numbers ``v`` say which of
the types of Hadjis et al. 2015, section 2.1, is computed; :mod:`tilewise.kernels.cpu.lowering.lowered` names them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

from tilewise.kernels.cpu.channels_last.finishing import behind
from tilewise.kernels.cpu.lowering import lowered as of
from tilewise.kernels.cpu.lowering.pieces import ADDED, FILLED, IN, OUT, TURNED, ZERO
from tilewise.kernels.cpu.units import over_units
from tilewise.kernels.cpu.vectors import NUMBER, compiled, number_at, pointer_call

__all__ = ["fused_lowering"]

FEW = 4
"""The most channels for which lines are gathered one by one with channels last."""
PLACE = 8
"""Bytes of an entry of a table."""


@functools.cache
def _block_of() -> Callable[..., tuple[int, ...]]:
    """Makes ``(v, number)``, which returns what block ``number`` covers.

    That is the first image, plane, row and column, and the number of images, rows and columns.
    """

    @compiled()
    def run(v, number):
        along, down, depths = v[of.ALONG], v[of.DOWN], v[of.DEPTHS]
        column, row = number % along * v[of.COLUMNS], number // along % down * v[of.ROWS]
        depth, image = number // (along * down) % depths, number // (along * down * depths) * v[of.IMAGES]
        images, rows = min(v[of.IMAGES], v[of.BATCH] - image), min(v[of.ROWS], v[of.HEIGHT] - row)
        return image, depth, row, column, images, rows, min(v[of.COLUMNS], v[of.WIDTH] - column)

    return run


@functools.cache
def _strip_in() -> Callable[..., None]:
    """Makes ``(x, v, block, first, count, strip)``, which copies all lines of a block's windows to the strip.

    They are the lines of ``count`` channels from channel ``first`` on.
    """
    piece, pixels, number = pointer_call(), _pixels_in(), number_at()

    @compiled()
    def run(x, v, block, first, count, strip):
        image, depth, row, column, images, rows, columns = block
        starts, deep, high, wide = v[of.STARTS], v[of.VARIANTS], v[of.VARIANTS + 1], v[of.VARIANTS + 2]
        step_h, step_w = v[of.STEPS + 1], v[of.STEPS + 2]
        pitch, channel = v[of.STORED_COLUMNS] * NUMBER, v[of.X + 1]
        rows, columns = rows + v[of.SPREADS + 1], columns + v[of.SPREADS + 2]
        x += first * channel + image * v[of.X]
        # Where each channel is a plane, channels are copied one by one, as their rows follow each other in memory.
        together = count if channel == NUMBER else 1
        for c in range(0, count, together):
            for variant in range(deep * high * wide):
                d = depth * v[of.STEPS] + number(starts, variant // (high * wide))
                h = row * step_h + number(starts, deep + variant // wide % high)
                w = column * step_w + number(starts, deep + high + variant % wide)
                left = min(columns, max(0, (step_w - 1 - w) // step_w))
                right = max(left, min(columns, (v[of.SIZES + 2] - w + step_w - 1) // step_w))
                top = min(rows, max(0, (step_h - 1 - h) // step_h))
                bottom = max(top, min(rows, (v[of.SIZES + 1] - h + step_h - 1) // step_h))
                if d < 0 or d >= v[of.SIZES]:
                    top = bottom = 0
                there = x + c * channel + d * v[of.X + 2] + h * v[of.X + 3] + w * v[of.X + 4]
                for i in range(images):
                    target = strip + c * v[of.CHANNEL_LINES] + variant * v[of.LINE] + i * v[of.PLANE]
                    source = there + i * v[of.X]
                    for k in range(together):
                        line = target + k * v[of.CHANNEL_LINES]
                        if top > 0:
                            piece(v[of.PIECES], ZERO, 0, 0, 0, 1, top * v[of.STORED_COLUMNS], 0, 0, line, 0, 0)
                        if bottom < rows:
                            left_over = (rows - bottom) * v[of.STORED_COLUMNS]
                            piece(v[of.PIECES], ZERO, 0, 0, 0, 1, left_over, 0, 0, line + bottom * pitch, 0, 0)
                    if together > 1:
                        for r in range(top, bottom):
                            pixels(source + r * step_h * v[of.X + 3], v, together, columns, left, right,
                                   target + r * pitch)  # fmt: skip
                    else:
                        piece(
                            v[of.PIECES], IN, source + top * step_h * v[of.X + 3], step_h * v[of.X + 3],
                            step_w * v[of.X + 4], bottom - top, columns, left, right, target + top * pitch, pitch, 0,
                        )  # fmt: skip

    return run


@functools.cache
def _pixels_in() -> Callable[..., None]:
    """Makes ``(source, v, count, columns, left, right, target)``, which copies a row of each channel, channels last."""
    piece = pointer_call()

    @compiled()
    def run(source, v, count, columns, left, right, target):
        step, apart = v[of.STEPS + 2] * v[of.X + 4], v[of.CHANNEL_LINES]
        if count <= FEW:
            piece(v[of.PIECES], IN, source, NUMBER, step, count, columns, left, right, target, apart, 0)
            return
        if left > 0:
            piece(v[of.PIECES], ZERO, 0, 0, 0, count, left, 0, 0, target, apart, 0)
        if right < columns:
            piece(v[of.PIECES], ZERO, 0, 0, 0, count, columns - right, 0, 0, target + right * NUMBER, apart, 0)
        piece(v[of.PIECES], TURNED, source + left * step, step, 0, right - left, count, 0, 0,
              target + left * NUMBER, apart, 0)  # fmt: skip

    return run


@functools.cache
def _tile_out(finishes: bool) -> Callable[..., None]:
    """Makes ``(y, v, block, phase, rows, columns, begin, end, count, source, distance)``, which stores sums.

    They are those of ``count`` outputs, at positions ``begin`` to ``end`` of the strip's plane. The plane has further
    positions after each line and image, which are not part of the result and are skipped. One that ``finishes`` adds a
    residual, which lies :func:`behind` the results, and applies the activation.
    """
    piece, number = pointer_call(), number_at()

    @compiled(*["finishing"] * finishes)
    def run(y, v, block, phase, rows, columns, begin, end, count, source, distance):
        image, row, column = block[0], block[2], block[3]
        wide, high, apart = v[of.STORED_COLUMNS], v[of.STORED_ROWS], v[of.ROW] * NUMBER
        channel, step = v[of.Y + 1], v[of.Y + 4] * v[of.APART + 2]
        y += image * v[of.Y] + (number(phase, of.START) + block[1] * v[of.APART]) * v[of.Y + 2]
        y += (number(phase, of.START + 1) + row * v[of.APART + 1]) * v[of.Y + 3]
        y += number(phase, of.START + 2) * v[of.Y + 4] + column * step
        # Rows that follow each other in the strip and in the result are stored as one.
        together = wide == columns and v[of.Y + 3] * v[of.APART + 1] == columns * step
        place = begin
        while place < end:
            down = place // wide
            across, i, r = place - down * wide, down // high, down % high
            if r >= rows:
                place = (i + 1) * high * wide
            elif across >= columns:
                place = (down + 1) * wide
            else:
                n = min(end - place, (rows - r if together else 1) * columns - across)
                to = y + i * v[of.Y] + r * v[of.APART + 1] * v[of.Y + 3] + across * step
                here = source + (place - begin) * NUMBER
                if finishes:
                    turns = channel == NUMBER and step != NUMBER
                    piece(v[of.FINISH], TURNED if turns else OUT, here, apart, count, n, to, step if turns else channel,
                          step, v[of.RESIDUAL], *distance)  # fmt: skip
                elif channel == NUMBER and step != NUMBER:
                    piece(v[of.PIECES], TURNED, here, apart, 0, count, n, 0, 0, to, step, 0)
                else:
                    piece(v[of.PIECES], OUT, here, apart, 0, count, n, 0, 0, to, channel, step)
                place += n

    return run


@functools.cache
def _tile() -> Callable[..., None]:
    """Makes ``(v, filters, source, phase, sums, add, blocks, bias, count)``, which sums products for blocks of outputs.

    It computes the sums at a row of positions. With ``add`` they are added to those that are there. New sums begin with
    the biases of the ``count`` outputs, whose address is ``bias``, or 0 where there are none.
    """
    product, piece, number = pointer_call(), pointer_call(), number_at()

    @compiled()
    def run(v, filters, source, phase, sums, add, blocks, bias, count):
        depth, table, high = number(phase, of.DEPTH), number(phase, of.TABLE), v[of.TILE_ROWS] * NUMBER
        parts = (depth + v[of.MOST_DEPTH] - 1) // v[of.MOST_DEPTH]
        if bias and add == 0:
            piece(v[of.PIECES], FILLED, bias, NUMBER, 0, count, v[of.ROW], 0, 0, sums, v[of.ROW] * NUMBER, 0)
            add = 1
        if depth == 0 and add == 0:
            numbers = blocks * v[of.TILE_ROWS] * v[of.ROW]
            piece(v[of.PIECES], ZERO, 0, 0, 0, 1, numbers, 0, 0, sums, 0, 0)
        for part in range(parts):
            start = part * depth // parts
            length = (part + 1) * depth // parts - start
            product(
                v[of.PRODUCTS], filters + start * high, depth * high, source, table + start * PLACE, sums, length,
                add + part, blocks,
            )  # fmt: skip

    return run


@functools.cache
def _block(finishes: bool) -> Callable[..., None]:
    """Makes ``(x, u, y, v, scratch, unit)``, which computes a block of one group's outputs, of all phases."""
    strip_in, tile_out, block_of, multiply = _strip_in(), _tile_out(finishes), _block_of(), _tile()
    number, far = number_at(), behind(finishes)

    @compiled(*["finishing"] * finishes)
    def run(x, u, y, v, scratch, unit):
        distance = far(v[of.RESIDUAL], y)
        group, block = unit // v[of.BLOCKS], block_of(v, unit % v[of.BLOCKS])
        high, width, size = v[of.TILE_ROWS], v[of.ROW], v[of.TILE_BYTES]
        y += group * v[of.OUTPUTS] * v[of.Y + 1]
        for part in range(v[of.CHUNKS]):
            channels = min(v[of.CHANNELS], v[of.SOURCES] - part * v[of.CHANNELS])
            strip_in(x, v, block, group * v[of.SOURCES] + part * v[of.CHANNELS], channels, scratch)
            is_last, sums = part == v[of.CHUNKS] - 1, scratch + v[of.SUMS]
            filters = u + group * v[of.FILTERS] + part * v[of.CHUNK_FILTERS]
            for p in range(v[of.PHASES]):
                phase = v[of.PHASE_TABLE] + (is_last * v[of.PHASES] + p) * of.PHASE_NUMBERS * PLACE
                rows = min(block[5], number(phase, of.COUNT + 1) - block[2])
                columns = min(block[6], number(phase, of.COUNT + 2) - block[3])
                if rows < 1 or columns < 1 or block[1] >= number(phase, of.COUNT):
                    continue
                places = ((block[4] - 1) * v[of.STORED_ROWS] + rows - 1) * v[of.STORED_COLUMNS] + columns
                depth = number(phase, of.DEPTH)
                for first in range(0, v[of.OUTPUT_BLOCKS], v[of.CHUNK]):
                    blocks = min(v[of.CHUNK], v[of.OUTPUT_BLOCKS] - first)
                    factors = filters + number(phase, of.FILTER) + first * depth * high * NUMBER
                    count = min(blocks * high, v[of.OUTPUTS] - first * high)
                    bias = v[of.BIAS] + (group * v[of.OUTPUTS] + first * high) * NUMBER if v[of.BIAS] else 0
                    for begin in range(0, places, width):
                        multiply(v, factors, scratch + begin * NUMBER, phase, sums, part, blocks, bias, count)
                        if is_last:
                            target, end = y + first * high * v[of.Y + 1], min(places, begin + width)
                            tile_out(target, v, block, phase, rows, columns, begin, end, count, sums, distance)
                        if v[of.CHUNKS] > 1:
                            sums += size

    return run


@functools.cache
def _filters() -> Callable[..., None]:
    """Makes ``(w, u, v, unit)``, which copies the filters of a block of outputs for one phase, outputs innermost."""
    piece, number = pointer_call(), number_at()

    @compiled()
    def run(w, u, v, unit):
        block, rest = unit % v[of.OUTPUT_BLOCKS], unit // v[of.OUTPUT_BLOCKS]
        part, group = rest // v[of.PHASES] % v[of.CHUNKS], rest // v[of.PHASES] // v[of.CHUNKS]
        entry = (part == v[of.CHUNKS] - 1) * v[of.PHASES] + rest % v[of.PHASES]
        phase, high = v[of.PHASE_TABLE] + entry * of.PHASE_NUMBERS * PLACE, v[of.TILE_ROWS]
        depth = number(phase, of.DEPTH)
        target = u + group * v[of.FILTERS] + part * v[of.CHUNK_FILTERS] + number(phase, of.FILTER)
        target += block * depth * high * NUMBER
        valid = min(high, v[of.OUTPUTS] - block * high)
        if valid < high:
            piece(v[of.PIECES], ZERO, 0, 0, 0, 1, depth * high, 0, 0, target, 0, 0)
        source = w + group * v[of.W_GROUP] + block * high * v[of.W_OUTPUT] + part * v[of.CHANNELS] * v[of.W_INPUT]
        runs = number(phase, of.RUNS)
        for i in range(number(phase, of.RUN_COUNT)):
            run = runs + 3 * i * PLACE
            place = target + number(run, 2) * high * NUMBER
            piece(v[of.PIECES], TURNED, source + number(run, 0), v[of.W_OUTPUT], 0, valid, number(run, 1), 0, 0,
                  place, high * NUMBER, 0)  # fmt: skip

    return run


@functools.cache
def _places_in() -> Callable[..., None]:
    """Makes ``(y, v, block, first, target)``, which copies ``vectors`` vectors of outputs for each position of a block.

    The vectors have the outputs from ``first`` on.
    """
    piece = pointer_call()

    @compiled()
    def run(y, v, block, first, target):
        image, depth, row, column, images, rows, columns = block
        channel, step, apart = v[of.Y + 1], v[of.Y + 4], v[of.ROW] * NUMBER
        y += image * v[of.Y] + depth * v[of.Y + 2] + row * v[of.Y + 3] + column * step
        count = min(v[of.ROW], v[of.OUTPUTS] - first)
        for i in range(images):
            for r in range(rows):
                there = y + i * v[of.Y] + r * v[of.Y + 3]
                if step == NUMBER:
                    piece(v[of.PIECES], TURNED, there, channel, 0, count, columns, 0, 0, target, apart, 0)
                else:
                    piece(v[of.PIECES], IN, there, step, channel, columns, count, 0, count, target, apart, 0)
                target += columns * apart

    return run


@functools.cache
def _gradient_out() -> Callable[..., None]:
    """Makes ``(w, v, chunk, group, sums)``, which stores the sums of a chunk of channels in the filter's gradient."""
    piece, number = pointer_call(), number_at()

    @compiled()
    def run(w, v, chunk, group, sums):
        phase = v[of.PHASE_TABLE] + (chunk == v[of.CHUNKS] - 1) * of.PHASE_NUMBERS * PLACE
        apart, runs = v[of.ROW] * NUMBER, number(phase, of.RUNS)
        w += group * v[of.W_GROUP] + chunk * v[of.CHANNELS] * v[of.W_INPUT]
        for first in range(0, v[of.OUTPUTS], v[of.ROW]):
            count = min(v[of.ROW], v[of.OUTPUTS] - first)
            for i in range(number(phase, of.RUN_COUNT)):
                run = runs + 3 * i * PLACE
                place = w + first * v[of.W_OUTPUT] + number(run, 0)
                piece(v[of.PIECES], TURNED, sums + number(run, 2) * apart, apart, 0, number(run, 1), count, 0, 0,
                      place, v[of.W_OUTPUT], 0)  # fmt: skip
            sums += v[of.SUM_LINES]

    return run


@functools.cache
def _gradient() -> Callable[..., None]:
    """Makes ``(x, y, w, partial, v, scratch, unit)``, which sums a filter's gradient over a share of the blocks.

    The gradient of a chunk of channels goes to ``partial``, where each unit has its place, or to the filter where there
    is one share.
    """
    strip_in, places_in, block_of = _strip_in(), _places_in(), _block_of()
    out, multiply, number = _gradient_out(), pointer_call(), number_at()

    @compiled()
    def run(x, y, w, partial, v, scratch, unit):
        share, rest = unit % v[of.SHARES], unit // v[of.SHARES]
        chunk, group = rest % v[of.CHUNKS], rest // v[of.CHUNKS]
        phase = v[of.PHASE_TABLE] + (chunk == v[of.CHUNKS] - 1) * of.PHASE_NUMBERS * PLACE
        channels = min(v[of.CHANNELS], v[of.SOURCES] - chunk * v[of.CHANNELS])
        table, others, width = number(phase, of.TABLE), scratch + v[of.OTHERS], v[of.ROW]
        sums = scratch + v[of.SUMS] if v[of.SHARES] == 1 else partial + unit * v[of.SUM_BYTES]
        row_blocks = (number(phase, of.DEPTH) + v[of.TILE_ROWS] - 1) // v[of.TILE_ROWS]
        y += group * v[of.OUTPUTS] * v[of.Y + 1]
        begin, end = share * v[of.BLOCKS] // v[of.SHARES], (share + 1) * v[of.BLOCKS] // v[of.SHARES]
        for item in range(begin, end):
            block = block_of(v, item)
            images, rows, columns = block[4], block[5], block[6]
            strip_in(x, v, block, group * v[of.SOURCES] + chunk * v[of.CHANNELS], channels, scratch)
            across = min(columns, v[of.MOST_DEPTH])
            down = max(1, v[of.MOST_DEPTH] // across) if across == columns else 1
            for first in range(0, v[of.OUTPUTS], width):
                places_in(y + first * v[of.Y + 1], v, block, first, others)
                target, add = sums + first // width * v[of.SUM_LINES], item - begin
                for i in range(images):
                    for r in range(0, rows, down):
                        for j in range(0, columns, across):
                            n, high = min(across, columns - j), min(down, rows - r)
                            source = scratch + i * v[of.PLANE] + (r * v[of.STORED_COLUMNS] + j) * NUMBER
                            place = others + ((i * rows + r) * columns + j) * width * NUMBER
                            multiply(
                                v[of.PRODUCTS], source, table, place, width * NUMBER, target, row_blocks, add, n, high,
                                (v[of.STORED_COLUMNS] - n) * NUMBER,
                            )  # fmt: skip
                            add = 1
        if v[of.SHARES] == 1:
            out(w, v, chunk, group, sums)

    return run


@functools.cache
def _shares_out() -> Callable[..., None]:
    """Makes ``(w, partial, v, unit)``, which sums all shares of a chunk into the filter's gradient."""
    out, piece = _gradient_out(), pointer_call()

    @compiled()
    def run(w, partial, v, unit):
        size, total = v[of.SUM_BYTES], partial + unit * v[of.SHARES] * v[of.SUM_BYTES]
        for share in range(1, v[of.SHARES]):
            piece(v[of.PIECES], ADDED, total + share * size, 0, 0, 1, size // NUMBER, 0, 0, total, 0, 0)
        out(w, v, unit % v[of.CHUNKS], unit // v[of.CHUNKS], total)

    return run


def fused_lowering(finishes: bool = False) -> Callable[..., None]:
    """Makes ``(data)``, which computes all units that no other thread takes.

    ``data`` begins as in :func:`tilewise.kernels.cpu.fused_fourier.kernel.convolve`. ``v[KIND]`` is 0 for outputs from
    filters in blocks, 1 for these filters, 2 for filters' gradients and 3 for the sum of their shares. One that
    ``finishes`` calls the function of :func:`~tilewise.kernels.cpu.lowering.pieces.finished_pieces` at ``v[FINISH]`` to
    write outputs.
    """
    block, filters, gradient, shares_out = _block(finishes), _filters(), _gradient(), _shares_out()
    parameters = ["finishing"] * finishes

    @compiled(*parameters)
    def unit_of(x, w, y, v, scratch, unit):
        if v[of.KIND] == 0:
            block(x, w, y, v, scratch, unit)
        elif v[of.KIND] == 1:
            filters(w, y, v, unit)
        elif v[of.KIND] == 2:
            gradient(x, w, y, v[of.PARTIAL], v, scratch, unit)
        else:
            shares_out(y, v[of.PARTIAL], v, unit)

    return over_units(unit_of, "fused_lowering", *parameters)
