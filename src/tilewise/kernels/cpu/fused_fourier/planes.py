"""Depthwise convolution of planes by Fourier transforms of ``lanes`` channels at once, which stay in a core's cache.

Two real rows are transformed as one complex row, and the result is separated into their half spectra. Then each column
is transformed, multiplied and transformed back while it is in the first cache. Rows of zeros are not transformed, and
rows that are not part of the result are not transformed back. Images and results begin at position 0 of the basis (the
sizes of the transform); the filter is shifted around the circle accordingly.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

from tilewise.kernels.cpu import vectors
from tilewise.kernels.cpu.fused_fourier.butterflies import transform
from tilewise.kernels.cpu.moves import clear, move
from tilewise.kernels.cpu.sizes import KEPT
from tilewise.kernels.cpu.vectors import NUMBER, compiled

__all__ = ["filters", "gradient", "image"]


@functools.cache
def _rows_in(lanes: int) -> Callable[..., None]:
    """Makes ``(calls, dtype, source, strides, valid, counts, firsts, steps, line, columns, basis, places)``.

    It transforms the rows of an operand, and writes twice their half spectra to ``columns``. ``strides`` are those of
    channel, row and column. ``firsts`` are the row and column of the basis where the operand begins, and ``steps`` the
    distances there from one row or column to the next. ``line`` is scratch for a row.
    """
    part, vector = NUMBER * lanes, 2 * NUMBER * lanes
    forward, separate, zeros, moved = transform(lanes, -1), vectors.separate(lanes), clear(lanes), move(lanes, False)

    @compiled(lanes)
    def run(calls, dtype, source, strides, valid, counts, firsts, steps, line, columns, basis, places):
        channel, row, column = strides
        height, width = counts
        n1, n2, stride, radices, factors = basis[0], basis[1], basis[2], basis[4], basis[6]
        for h in range(0, height, 2):
            both = h + 1 < height
            kept = width if both and firsts[1] == 0 and steps[1] == 1 else 0
            zeros(line + kept * vector, n2 - kept)
            for i in range(1 + both):
                start = source + (h + i) * row
                here, circle = line + i * part, (n2, n2, n2)
                moved(calls[1], dtype, start, column, channel, valid, width, here, firsts[1], steps[1], circle)
            forward(calls[0], line, n2, radices, factors)
            a = columns + (firsts[0] + h * steps[0]) % n1 * vector
            # Where the number of rows is odd, the spectrum of the missing row goes to the spare row.
            b = columns + ((firsts[0] + (h + 1) * steps[0]) % n1 if both else n1) * vector
            for k in range(n2 // 2 + 1):
                separate(line + places[k], line + places[n2 - k], a + k * stride, b + k * stride)

    return run


@functools.cache
def _rows_out(lanes: int) -> Callable[..., None]:
    """Makes the inverse of :func:`_rows_in`, from columns of half spectra to rows of a result."""
    part, vector = NUMBER * lanes, 2 * NUMBER * lanes
    backward, join, moved = transform(lanes, 1), vectors.join(lanes), move(lanes, True)

    @compiled(lanes)
    def run(calls, dtype, target, strides, valid, counts, firsts, steps, line, columns, basis, places):
        channel, row, column = strides
        height, width = counts
        n1, n2, stride, radices, factors = basis[0], basis[1], basis[2], basis[4], basis[6]
        for h in range(0, height, 2):
            both = h + 1 < height
            a = columns + (firsts[0] + h * steps[0]) % n1 * vector
            b = columns + (firsts[0] + (h + both) * steps[0]) % n1 * vector
            for k in range(n2 // 2 + 1):
                join(line + places[k], line + places[n2 - k], a + k * stride, b + k * stride)
            backward(calls[0], line, n2, radices, factors)
            for i in range(1 + both):
                start = target + (h + i) * row
                here, circle = line + i * part, (n2, n2, n2)
                moved(calls[1], dtype, start, column, channel, valid, width, here, firsts[1], steps[1], circle)

    return run


@functools.cache
def _between(lanes: int) -> Callable[..., None]:
    """Makes ``(column, count, step, n)``, which clears a column of ``n`` but for ``count`` values ``step`` apart.

    The first of these values is number 0.
    """
    zeros, vector = clear(lanes), 2 * NUMBER * lanes

    @compiled(lanes)
    def run(column, count, step, n):
        if step > 1:
            for i in range(count - 1):
                zeros(column + (i * step + 1) * vector, step - 1)
        last = (count - 1) * step + 1
        zeros(column + last * vector, n - last)

    return run


@functools.cache
def filters(lanes: int) -> Callable[..., None]:
    """Makes ``(w, target, line, places, v, block)``, which writes scaled spectra of a block's filters to ``target``.

    ``v`` and ``places`` are those of :func:`image`, ``line`` is scratch for a row.
    """
    vector = 2 * NUMBER * lanes
    rows_in, forward, zeros, scale = _rows_in(lanes), transform(lanes, -1), clear(lanes), vectors.scale(lanes)

    @compiled(lanes)
    def run(w, target, line, places, v, block):
        calls, first = (v[36], v[37]), block * lanes
        n1, n2, stride, r1, f1, factor = v[8], v[9], v[10], v[11], v[13], v[15]
        basis, half = (n1, n2, stride, r1, v[12], f1, v[14]), n2 // 2 + 1
        strides, counts, firsts, steps = (v[21], v[22], v[23]), (v[30], v[31]), (v[34], v[35]), (v[40], v[41])
        valid, source = min(lanes, v[1] - first), w + first * v[21]
        zeros(target, half * stride // vector)
        rows_in(calls, v[5], source, strides, valid, counts, firsts, steps, line, target, basis, places)
        for k in range(half):
            column = target + k * stride
            forward(calls[0], column, n1, r1, f1)
            for i in range(n1):
                scale(column + i * vector, factor)

    return run


@functools.cache
def image(lanes: int) -> Callable[..., None]:
    """Makes ``(x, w, y, scratch, places, v, unit)``: one unit's results of FPROP or, with x and y exchanged, DGRAD.

    ``v`` has the numbers of the problem, and ``places`` the offsets of a row's frequencies 0 to n2 in bytes. A unit is
    a block of ``lanes`` channels for a share of the batch. ``w`` is the address of the filters, or of their spectra
    where these are kept. ``scratch`` holds a spectrum, one row and, where none is kept, the filters' spectrum.
    """
    vector = 2 * NUMBER * lanes
    rows_in, rows_out, forward, backward = _rows_in(lanes), _rows_out(lanes), transform(lanes, -1), transform(lanes, 1)
    transformed, between = filters(lanes), _between(lanes)
    multiply, multiply_conjugate = vectors.multiply(lanes, False), vectors.multiply(lanes, True)

    @compiled(lanes)
    def run(x, w, y, scratch, places, v, unit):
        calls = (v[36], v[37])
        channels, batch, shares, conjugate, dtype, result = v[1], v[2], v[3], v[4], v[5], v[6]
        n1, n2, stride, r1, f1, kept = v[8], v[9], v[10], v[11], v[13], v[KEPT]
        basis = (n1, n2, stride, r1, v[12], f1, v[14])
        x_strides, x_counts, x_steps = (v[17], v[18], v[19]), (v[28], v[29]), (v[38], v[39])
        y_strides, y_counts, y_steps = (v[25], v[26], v[27]), (v[32], v[33]), (v[42], v[43])
        origin = (v[7], v[7])
        block, share, half = unit // shares, unit % shares, n2 // 2 + 1
        first = block * lanes
        valid = min(lanes, channels - first)
        spectra, line = scratch, scratch + half * stride
        multiplied = w + block * kept
        if kept == 0:
            multiplied = line + n2 * vector
            transformed(w, multiplied, line, places, v, block)
        for n in range(share * batch // shares, (share + 1) * batch // shares):
            source, target = x + n * v[16] + first * x_strides[0], y + n * v[24] + first * y_strides[0]
            rows_in(calls, dtype, source, x_strides, valid, x_counts, origin, x_steps, line, spectra, basis, places)
            for k in range(half):
                column, other = spectra + k * stride, multiplied + k * stride
                between(column, x_counts[0], x_steps[0], n1)
                forward(calls[0], column, n1, r1, f1)
                if conjugate:
                    for i in range(n1):
                        multiply_conjugate(column + i * vector, other + i * vector)
                else:
                    for i in range(n1):
                        multiply(column + i * vector, other + i * vector)
                backward(calls[0], column, n1, r1, f1)
            rows_out(calls, result, target, y_strides, valid, y_counts, origin, y_steps, line, spectra, basis, places)

    return run


@functools.cache
def gradient(lanes: int) -> Callable[..., None]:
    """Makes ``(x, y, w, scratch, places, v, unit)``, which computes the filter's gradient of ``lanes`` channels.

    Arguments are as in :func:`image`. Spectra are summed over the batch and transformed back once. ``scratch`` holds
    three spectra and one row.
    """
    vector = 2 * NUMBER * lanes
    rows_in, rows_out, forward, backward = _rows_in(lanes), _rows_out(lanes), transform(lanes, -1), transform(lanes, 1)
    zeros, between, scale = clear(lanes), _between(lanes), vectors.scale(lanes)
    accumulate = vectors.accumulate(lanes)

    @compiled(lanes)
    def run(x, y, w, scratch, places, v, unit):
        calls = (v[36], v[37])
        channels, batch, dtype, result = v[1], v[2], v[5], v[6]
        n1, n2, stride, r1, f1, factor = v[8], v[9], v[10], v[11], v[13], v[15]
        basis = (n1, n2, stride, r1, v[12], f1, v[14])
        x_strides, w_strides, y_strides = (v[17], v[18], v[19]), (v[21], v[22], v[23]), (v[25], v[26], v[27])
        x_counts, w_counts, y_counts, firsts = (v[28], v[29]), (v[30], v[31]), (v[32], v[33]), (v[34], v[35])
        x_steps, w_steps, y_steps = (v[38], v[39]), (v[40], v[41]), (v[42], v[43])
        origin = (v[7], v[7])
        first, half = unit * lanes, n2 // 2 + 1
        valid = min(lanes, channels - first)
        xs, ys, total = scratch, scratch + half * stride, scratch + 2 * half * stride
        line = scratch + 3 * half * stride
        zeros(total, half * stride // vector)
        for n in range(batch):
            x_start, y_start = x + n * v[16] + first * x_strides[0], y + n * v[24] + first * y_strides[0]
            rows_in(calls, dtype, x_start, x_strides, valid, x_counts, origin, x_steps, line, xs, basis, places)
            rows_in(calls, dtype, y_start, y_strides, valid, y_counts, origin, y_steps, line, ys, basis, places)
            for k in range(half):
                a, b = xs + k * stride, ys + k * stride
                between(a, x_counts[0], x_steps[0], n1)
                forward(calls[0], a, n1, r1, f1)
                between(b, y_counts[0], y_steps[0], n1)
                forward(calls[0], b, n1, r1, f1)
                for i in range(n1):
                    accumulate(total + k * stride + i * vector, a + i * vector, b + i * vector)
        for k in range(half):
            column = total + k * stride
            for i in range(n1):
                scale(column + i * vector, factor)
            backward(calls[0], column, n1, r1, f1)
        rows_out(
            calls, result, w + first * w_strides[0], w_strides, valid, w_counts, firsts, w_steps, line, total, basis,
            places,
        )  # fmt: skip

    return run
