"""Depthwise convolution of signals in tiles (overlap-save): ``lanes`` channels at once, in cache from end to end.

Two tiles of one signal are one complex signal: with the spectrum of one real filter both come out apart. A first pass
leaves blocks, each of which is transformed, multiplied and transformed back while it is in the first cache (Bailey,
"FFTs in external or hierarchical memory", J. Supercomputing 4, 1990).
"""

from __future__ import annotations

import functools
from collections.abc import Callable

from tilewise.kernels.cpu import vectors
from tilewise.kernels.cpu.butterflies import one_pass, transform
from tilewise.kernels.cpu.moves import clear, clear_part, move
from tilewise.kernels.cpu.sizes import KEPT
from tilewise.kernels.cpu.vectors import NUMBER, compiled

__all__ = ["filters", "gradient", "image"]


@functools.cache
def _pair_in(lanes: int) -> Callable[..., None]:
    """Windows of a signal as real and imaginary parts, zero where there is no signal, after the first pass.

    ``(calls, dtype, source, step, channel, valid, size, first, shift, window, both, here, circle, factors)``: the first
    window begins at element ``first``, the second ``shift`` later where there are ``both``; ``window`` elements count.
    """
    part, vector = NUMBER * lanes, 2 * NUMBER * lanes
    moved, zeros, forward = move(lanes, False), clear_part(lanes), one_pass(lanes, -1)

    @compiled(lanes)
    def run(calls, dtype, source, step, channel, valid, size, first, shift, window, both, here, circle, factors):
        n, block, apart = circle
        radix = n // block
        for i in range(2):
            begin = first + i * shift
            low = min(max(-begin, 0), window)
            high = max(min(size - begin, window), low) if i == 0 or both else low
            low_place = low // block * apart + low % block
            high_place = high // block * apart + high % block
            zeros(here + i * part, low_place)
            moved(
                calls[1],
                dtype,
                source + (begin + low) * step,
                step,
                channel,
                valid,
                high - low,
                here + i * part,
                low,
                1,
                circle,
            )
            zeros(here + i * part + high_place * vector, radix * apart - high_place)
        forward(calls[0], radix, here, block, apart * vector, factors)

    return run


@functools.cache
def filters(lanes: int) -> Callable[..., None]:
    """``(w, target, v, block)``: the scaled spectra of one block's filters to ``target``. ``v`` is :func:`image`'s."""
    vector = 2 * NUMBER * lanes
    moved, zeros, scale = move(lanes, False), clear(lanes), vectors.scale(lanes)
    first_forward, forward = one_pass(lanes, -1), transform(lanes, -1)

    @compiled(lanes)
    def run(w, target, v, block):
        calls, first = (v[36], v[37]), block * lanes
        n, size, apart, radices, f1, f2, factor = v[8], v[9], v[10], v[11], v[12], v[13], v[14]
        channel, step, taps, place = v[22], v[23], v[24], v[25]
        circle, radix, stride, valid = (n, size, apart), n // size, apart * vector, min(lanes, v[1] - first)
        zeros(target, radix * apart)
        moved(calls[1], v[5], w + first * channel, step, channel, valid, taps, target, place, 1, circle)
        first_forward(calls[0], radix, target, size, stride, f1)
        for b in range(radix):
            forward(calls[0], target + b * stride, size, radices, f2)
        for i in range(radix * apart):
            scale(target + i * vector, factor)

    return run


@functools.cache
def image(lanes: int) -> Callable[..., None]:
    """``(x, w, y, scratch, v, unit)``: one unit's results of FPROP or, with x and y exchanged, DGRAD.

    ``v`` is what :class:`tilewise.kernels.cpu.sizes.Signals` writes. Units are blocks of ``lanes`` channels times
    shares of all pairs of tiles. ``w`` are filters or what is kept of them. ``scratch``: a spectrum and, where none is
    kept, the filters'.
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
        f1, f2, tiles, tile, taps, kept = v[12], v[13], v[15], v[16], v[24], v[KEPT]
        x_image, x_channel, x_step, x_size, x_first = v[17], v[18], v[19], v[20], v[21]
        y_image, y_channel, y_step, y_size = v[26], v[27], v[28], v[29]
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
            begin = number * tile
            source = x + image * x_image + first * x_channel
            pair_in(calls, dtype, source, x_step, x_channel, valid, x_size, x_first + begin, tile, tile + taps - 1,
                    number + 1 < tiles, signal, circle, f1)  # fmt: skip
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
                start = begin + i * tile
                target = y + image * y_image + first * y_channel + start * y_step
                out(
                    calls[1],
                    result,
                    target,
                    y_step,
                    y_channel,
                    valid,
                    min(tile, y_size - start),
                    signal + i * part,
                    0,
                    1,
                    circle,
                )

    return run


@functools.cache
def gradient(lanes: int) -> Callable[..., None]:
    """``(x, y, w, scratch, v, unit)``: the filter's gradient of ``lanes`` channels.

    As :func:`image`. Sums of both tiles' products are real parts; imaginary ones are of no use. ``scratch``: three
    spectra.
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
        x_image, x_channel, x_step, x_size, x_first = v[17], v[18], v[19], v[20], v[21]
        w_channel, w_step, taps, w_first = v[22], v[23], v[24], v[25]
        y_image, y_channel, y_step, y_size = v[26], v[27], v[28], v[29]
        circle, radix, stride = (n, block, apart), n // block, apart * vector
        first, pairs = unit * lanes, (tiles + 1) // 2
        valid = min(lanes, channels - first)
        xs, ys, total = scratch, scratch + radix * stride, scratch + 2 * radix * stride
        zeros(total, radix * apart)
        for item in range(batch * pairs):
            image, number = item // pairs, item % pairs * 2
            begin, both = number * tile, number + 1 < tiles
            x_start, y_start = x + image * x_image + first * x_channel, y + image * y_image + first * y_channel
            pair_in(calls, dtype, x_start, x_step, x_channel, valid, x_size, x_first + begin, tile, tile + taps - 1,
                    both, xs, circle, f1)  # fmt: skip
            pair_in(calls, dtype, y_start, y_step, y_channel, valid, y_size, begin, tile, tile, both, ys, circle, f1)
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
        out(calls[1], result, w + first * w_channel, w_step, w_channel, valid, taps, total, w_first, 1, circle)

    return run
