"""Depthwise convolution of signals in tiles (overlap-save) of ``lanes`` channels at once, which stay in a core's cache.

Positions count as in a dense convolution, with stride and dilation 1. Outputs of a strided convolution, taps with
dilation and, in DGRAD, the output's gradient are then several positions apart. A tile of results begins at a multiple
of this distance.

Two tiles of one signal are transformed as one complex signal. As the filter is real, the real and imaginary parts of
the result are those of the two tiles. After a first pass the signal consists of blocks, each of which is transformed,
multiplied and transformed back while it is in the first cache (Bailey, "FFTs in external or hierarchical memory", J.
Supercomputing 4, 1990).
"""

from __future__ import annotations

import functools
from collections.abc import Callable

from tilewise.kernels.cpu import vectors
from tilewise.kernels.cpu.fused_fourier.butterflies import one_pass, transform
from tilewise.kernels.cpu.moves import clear, clear_part, move
from tilewise.kernels.cpu.sizes import KEPT
from tilewise.kernels.cpu.vectors import NUMBER, compiled

__all__ = ["filters", "gradient", "image"]


@functools.cache
def _pair_in(lanes: int) -> Callable[..., None]:
    """Makes ``(calls, dtype, source, signal, valid, window, both, here, circle, factors)``.

    It copies two windows of a signal to the real and imaginary parts of vectors, with zeros outside of the signal, and
    runs the first pass on them. ``signal`` is ``(step, channel, size, every)``: the bytes between elements and between
    channels, the number of elements, and the positions from one element to the next. ``window`` is ``(first, shift,
    count)``: windows have ``count`` positions, the first begins at position ``first``, where element 0 has position 0,
    and the second ``shift`` later. With ``both`` off there is no second window.
    """
    part, vector = NUMBER * lanes, 2 * NUMBER * lanes
    moved, zeros, forward = move(lanes, False), clear_part(lanes), one_pass(lanes, -1)

    @compiled(lanes)
    def run(calls, dtype, source, signal, valid, window, both, here, circle, factors):
        n, block, apart = circle
        step, channel, size, every = signal
        first, shift, places = window
        radix = n // block
        for i in range(2):
            begin, target = first + i * shift, here + i * part
            left_out = max(-(-begin // every), 0)
            place = min(left_out * every - begin, places)
            count = max(min(size - left_out, -(-(places - place) // every)), 0) if i == 0 or both else 0
            # Where elements are neighbours, only the positions around them are cleared.
            end = place + count
            low, high = place // block * apart + place % block, end // block * apart + end % block
            if every > 1:
                low, high = 0, 0
            zeros(target, low)
            zeros(target + high * vector, radix * apart - high)
            there = source + left_out * step
            moved(calls[1], dtype, there, step, channel, valid, count, target, place, every, circle)
        forward(calls[0], radix, here, block, apart * vector, factors)

    return run


@functools.cache
def filters(lanes: int) -> Callable[..., None]:
    """Makes ``(w, target, v, block)``, which writes the scaled spectra of a block's filters to ``target``.

    ``v`` is that of :func:`image`.
    """
    vector = 2 * NUMBER * lanes
    moved, zeros, scale = move(lanes, False), clear(lanes), vectors.scale(lanes)
    first_forward, forward = one_pass(lanes, -1), transform(lanes, -1)

    @compiled(lanes)
    def run(w, target, v, block):
        calls, first = (v[36], v[37]), block * lanes
        n, size, apart, radices, f1, f2, factor = v[8], v[9], v[10], v[11], v[12], v[13], v[14]
        channel, step, taps, place, every = v[22], v[23], v[24], v[25], v[39]
        circle, radix, stride, valid = (n, size, apart), n // size, apart * vector, min(lanes, v[1] - first)
        zeros(target, radix * apart)
        moved(calls[1], v[5], w + first * channel, step, channel, valid, taps, target, place, every, circle)
        first_forward(calls[0], radix, target, size, stride, f1)
        for b in range(radix):
            forward(calls[0], target + b * stride, size, radices, f2)
        for i in range(radix * apart):
            scale(target + i * vector, factor)

    return run


@functools.cache
def image(lanes: int) -> Callable[..., None]:
    """Makes ``(x, w, y, scratch, v, unit)``, which computes results of FPROP or, with x and y exchanged, DGRAD.

    ``v`` has the numbers of the problem. A unit is a block of ``lanes`` channels for a share of all pairs of tiles.
    ``w`` is the address of the filters, or of their spectra where these are kept. ``scratch`` holds a spectrum and,
    where none is kept, the filters' spectrum.
    """
    part, vector = NUMBER * lanes, 2 * NUMBER * lanes
    pair_in, transformed, out = _pair_in(lanes), filters(lanes), move(lanes, True)
    multiply, multiply_conjugate = vectors.multiply(lanes, False), vectors.multiply(lanes, True)
    first_backward, forward, backward = one_pass(lanes, 1), transform(lanes, -1), transform(lanes, 1)

    @compiled(lanes)
    def run(x, w, y, scratch, v, unit):
        calls = (v[36], v[37])
        channels, batch, shares, conjugate, dtype, result = v[1], v[2], v[3], v[4], v[5], v[6]
        n, block, apart, radices = v[8], v[9], v[10], v[11]
        f1, f2, tiles, tile, kept = v[12], v[13], v[15], v[16], v[KEPT]
        x_image, x_channel, x_first, x_signal = v[17], v[18], v[21], (v[19], v[18], v[20], v[38])
        y_image, y_channel, y_step, y_size, y_every = v[26], v[27], v[28], v[29], v[40]
        shift, window = tile * y_every, (tile - 1) * y_every + (v[24] - 1) * v[39] + 1
        circle, radix, stride = (n, block, apart), n // block, apart * vector
        first, share = unit // shares * lanes, unit % shares
        valid, signal = min(lanes, channels - first), scratch
        multiplied = w + unit // shares * kept
        if kept == 0:
            multiplied = scratch + radix * stride
            transformed(w, multiplied, v, unit // shares)
        pairs = (tiles + 1) // 2
        for item in range(share * batch * pairs // shares, (share + 1) * batch * pairs // shares):
            image, number = item // pairs, item % pairs * 2
            source, windows = x + image * x_image + first * x_channel, (x_first + number * shift, shift, window)
            pair_in(calls, dtype, source, x_signal, valid, windows, number + 1 < tiles, signal, circle, f1)
            for b in range(radix):
                here, there = signal + b * stride, multiplied + b * stride
                forward(calls[0], here, block, radices, f2)
                if conjugate:
                    for i in range(block):
                        multiply_conjugate(here + i * vector, there + i * vector)
                else:
                    for i in range(block):
                        multiply(here + i * vector, there + i * vector)
                backward(calls[0], here, block, radices, f2)
            first_backward(calls[0], radix, signal, block, stride, f1)
            for i in range(2):
                start = (number + i) * tile
                target, count = y + image * y_image + first * y_channel + start * y_step, min(tile, y_size - start)
                here = signal + i * part
                out(calls[1], result, target, y_step, y_channel, valid, count, here, 0, y_every, circle)

    return run


@functools.cache
def gradient(lanes: int) -> Callable[..., None]:
    """Makes ``(x, y, w, scratch, v, unit)``, which computes the filter's gradient of ``lanes`` channels.

    Arguments are as in :func:`image`. The real parts are the sums of both tiles' products; the imaginary parts are not
    used. ``scratch`` holds three spectra.
    """
    vector = 2 * NUMBER * lanes
    pair_in, zeros, accumulate = _pair_in(lanes), clear(lanes), vectors.accumulate(lanes)
    out, scale, first_backward = move(lanes, True), vectors.scale(lanes), one_pass(lanes, 1)
    forward, backward = transform(lanes, -1), transform(lanes, 1)

    @compiled(lanes)
    def run(x, y, w, scratch, v, unit):
        calls = (v[36], v[37])
        channels, batch, dtype, result = v[1], v[2], v[5], v[6]
        n, block, apart, radices = v[8], v[9], v[10], v[11]
        f1, f2, factor, tiles, tile = v[12], v[13], v[14], v[15], v[16]
        x_image, x_channel, x_first, x_signal = v[17], v[18], v[21], (v[19], v[18], v[20], v[38])
        w_channel, w_step, taps, w_first, w_every = v[22], v[23], v[24], v[25], v[39]
        y_image, y_channel, y_signal = v[26], v[27], (v[28], v[27], v[29], v[40])
        shift, y_window = tile * v[40], (tile - 1) * v[40] + 1
        x_window = y_window + (taps - 1) * w_every
        circle, radix, stride = (n, block, apart), n // block, apart * vector
        first, pairs = unit * lanes, (tiles + 1) // 2
        valid = min(lanes, channels - first)
        xs, ys, total = scratch, scratch + radix * stride, scratch + 2 * radix * stride
        zeros(total, radix * apart)
        for item in range(batch * pairs):
            image, number = item // pairs, item % pairs * 2
            begin, both = number * shift, number + 1 < tiles
            x_start, y_start = x + image * x_image + first * x_channel, y + image * y_image + first * y_channel
            x_windows, y_windows = (x_first + begin, shift, x_window), (begin, shift, y_window)
            pair_in(calls, dtype, x_start, x_signal, valid, x_windows, both, xs, circle, f1)
            pair_in(calls, dtype, y_start, y_signal, valid, y_windows, both, ys, circle, f1)
            for b in range(radix):
                a, c = xs + b * stride, ys + b * stride
                forward(calls[0], a, block, radices, f2)
                forward(calls[0], c, block, radices, f2)
                for i in range(block):
                    accumulate(total + b * stride + i * vector, a + i * vector, c + i * vector)
        for b in range(radix):
            here = total + b * stride
            for i in range(block):
                scale(here + i * vector, factor)
            backward(calls[0], here, block, radices, f2)
        first_backward(calls[0], radix, total, block, stride, f1)
        out(calls[1], result, w + first * w_channel, w_step, w_channel, valid, taps, total, w_first, w_every, circle)

    return run
