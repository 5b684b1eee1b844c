"""Local response normalization and its gradient, each in one pass over memory (Krizhevsky et al. 2012, section 3.3).

A program computes a tile of channels by pixels. The squares of a window are loaded anew for each channel: the tile is
small enough that all loads but the first of a number come from the multiprocessor's own cache. Sums are fp32.

The gradient of a channel has a term of each channel whose window it is in, and that term needs a window of its own. So
terms are computed once and passed among channels: among the rows of a tile, or among the registers of a thread that has
all channels of a piece. The channels at both ends serve the others alone.

Tensors are dense. A pixel is a place of an image; pixels of all images are counted through.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["gradient", "gradient_by_pixels", "normalized"]


@triton.jit
def _pixels(block, pixels, total, channels, stride_p, LONG: tl.constexpr, BLOCK_P: tl.constexpr):
    """Where the pixels of a block begin in memory, and which of them there are. ``LONG``: counted in 64 bits."""
    if LONG:
        block = block.to(tl.int64)
    q = block * BLOCK_P + tl.arange(0, BLOCK_P)
    return (q // pixels) * pixels * channels + (q % pixels) * stride_p, q < total


@triton.jit
def _pointers(tensor, place, c, stride_c, LONG: tl.constexpr):
    """Addresses of channels ``c`` by pixels."""
    if LONG:
        c = c.to(tl.int64)
    return tensor + (c * stride_c)[:, None] + place[None, :]


@triton.jit
def _loaded(tensor, place, there, c, channels, stride_c, LONG: tl.constexpr):
    """fp32 numbers of channels ``c``; zero where there are none."""
    mask = ((c >= 0) & (c < channels))[:, None] & there[None, :]
    return tl.load(_pointers(tensor, place, c, stride_c, LONG), mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _line(tensor, place, there, c, channels, stride_c, LONG: tl.constexpr):
    """fp32 numbers of one channel ``c``; zero where there is none."""
    offset = c
    if LONG:
        offset = c.to(tl.int64)
    mask = there & (c >= 0) & (c < channels)
    return tl.load(tensor + offset * stride_c + place, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _denominator(
    x, place, there, c, channels, stride_c, scale, k,
    BEFORE: tl.constexpr, AFTER: tl.constexpr, UNROLL: tl.constexpr, LONG: tl.constexpr,
):  # fmt: skip
    """``k`` and ``scale`` times the squares of the windows of channels ``c``."""
    squares = tl.zeros([c.shape[0], place.shape[0]], tl.float32)
    for j in tl.range(0, BEFORE + AFTER + 1, loop_unroll_factor=UNROLL):
        value = _loaded(x, place, there, c + (j - BEFORE), channels, stride_c, LONG)
        squares += value * value
    return k + scale * squares


@triton.jit
def _power(d, beta, QUARTERS: tl.constexpr):
    """``d^-beta`` and ``1 / d``; by square roots where ``beta`` is ``QUARTERS`` / 4, else by a logarithm."""
    if QUARTERS < 0:
        power = tl.exp2(-beta * tl.log2(d))
        inverse = 1.0 / d
    else:
        root = tl.rsqrt(d)
        power = tl.full(d.shape, 1.0, tl.float32)
        if QUARTERS % 4 >= 2:
            power = root
        if QUARTERS % 2 == 1:
            power *= tl.sqrt(root)
        inverse = root * root
        for _ in tl.static_range(QUARTERS // 4):
            power *= inverse
    return power, inverse


@triton.jit
def normalized(
    x, y, channels, pixels, total, blocks, stride_c, stride_p, scale, beta, k,
    QUARTERS: tl.constexpr, BEFORE: tl.constexpr, AFTER: tl.constexpr, UNROLL: tl.constexpr, LONG: tl.constexpr,
    BLOCK_C: tl.constexpr, BLOCK_P: tl.constexpr,
):  # fmt: skip
    """``y = x (k + scale * squares of the window)^-beta``. Grid: ``blocks`` of channels * blocks of pixels.

    ``scale`` is alpha divided by the window's size. ``BEFORE`` and ``AFTER`` channels lie before and behind each one in
    its window. ``stride_c`` and ``stride_p`` lie between channels and between pixels of an image.
    """
    program = tl.program_id(0)
    place, there = _pixels(program // blocks, pixels, total, channels, stride_p, LONG, BLOCK_P)
    c = (program % blocks) * BLOCK_C + tl.arange(0, BLOCK_C)
    d = _denominator(x, place, there, c, channels, stride_c, scale, k, BEFORE, AFTER, UNROLL, LONG)
    power, _ = _power(d, beta, QUARTERS)
    value = _loaded(x, place, there, c, channels, stride_c, LONG) * power
    pointers = _pointers(y, place, c, stride_c, LONG)
    tl.store(pointers, value.to(y.dtype.element_ty), mask=(c < channels)[:, None] & there[None, :])


@triton.jit
def gradient(
    x, dy, dx, channels, pixels, total, blocks, rows, lead, stride_c, stride_p, scale, beta, k,
    QUARTERS: tl.constexpr, BEFORE: tl.constexpr, AFTER: tl.constexpr, UNROLL: tl.constexpr, LONG: tl.constexpr,
    BLOCK_C: tl.constexpr, BLOCK_P: tl.constexpr,
):  # fmt: skip
    """The gradient ``dx`` of ``x`` by that of the result, ``dy``. Grid as for :func:`normalized`.

    With ``d`` the denominator it is ``dy d^-beta`` less ``2 scale beta x`` times the sum of ``dy x d^(-beta - 1)`` over
    the channels whose windows a channel is in. Rows of a tile pass these terms to each other. So a tile writes ``rows``
    channels, its rows from ``lead`` on: those before and behind them serve the others.
    """
    program = tl.program_id(0)
    place, there = _pixels(program // blocks, pixels, total, channels, stride_p, LONG, BLOCK_P)
    row = tl.arange(0, BLOCK_C)
    c = (program % blocks) * rows - lead + row
    d = _denominator(x, place, there, c, channels, stride_c, scale, k, BEFORE, AFTER, UNROLL, LONG)
    power, inverse = _power(d, beta, QUARTERS)
    value = _loaded(x, place, there, c, channels, stride_c, LONG)
    first = _loaded(dy, place, there, c, channels, stride_c, LONG) * power
    own = first * value * inverse
    terms = tl.zeros([BLOCK_C, BLOCK_P], tl.float32)
    for j in tl.range(0, BEFORE + AFTER + 1, loop_unroll_factor=UNROLL):
        source = row + (j - AFTER)
        inside = (source >= 0) & (source < BLOCK_C)
        index = tl.broadcast_to(tl.where(inside, source, 0)[:, None], (BLOCK_C, BLOCK_P))
        terms += tl.where(inside[:, None], tl.gather(own, index, 0), 0.0)
    result = first - 2.0 * scale * beta * value * terms
    written = (row >= lead) & (row < lead + rows) & (c < channels)
    tl.store(
        _pointers(dx, place, c, stride_c, LONG), result.to(dx.dtype.element_ty), mask=written[:, None] & there[None, :]
    )


@triton.jit
def gradient_by_pixels(
    x, dy, dx, channels, pixels, total, blocks, stride_c, stride_p, scale, beta, k,
    QUARTERS: tl.constexpr, BEFORE: tl.constexpr, AFTER: tl.constexpr, LONG: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_P: tl.constexpr,
):  # fmt: skip
    """What :func:`gradient` computes, for ``ROWS`` channels, where a thread has all of these of its pixels.

    So the numbers of windows are in a thread's own registers. Threads read neighbouring pixels, which suits contiguous
    tensors.
    """
    REACH: tl.constexpr = BEFORE + AFTER
    program = tl.program_id(0)
    place, there = _pixels(program // blocks, pixels, total, channels, stride_p, LONG, BLOCK_P)
    start = (program % blocks) * ROWS
    values, terms, firsts = (), (), ()  # tuples of Triton, which has no lists and no stars
    for i in tl.static_range(ROWS + 2 * REACH):
        values = values + (_line(x, place, there, start + (i - REACH), channels, stride_c, LONG),)  # type: ignore[assignment] # noqa: RUF005
    for i in tl.static_range(ROWS + REACH):  # of channel start - AFTER + i, whose window begins at values[i]
        squares = values[i] * values[i]  # type: ignore[var-annotated]
        for j in tl.static_range(1, REACH + 1):
            squares += values[i + j] * values[i + j]
        power, inverse = _power(k + scale * squares, beta, QUARTERS)
        first = _line(dy, place, there, start + (i - AFTER), channels, stride_c, LONG) * power
        terms = terms + (first * values[i + BEFORE] * inverse,)  # type: ignore[assignment] # noqa: RUF005
        firsts = firsts + (first,)  # type: ignore[assignment] # noqa: RUF005
    for i in tl.static_range(ROWS):  # of channel start + i, which is in the windows of terms[i] to terms[i + REACH]
        summed = terms[i]  # type: ignore[var-annotated]
        for j in tl.static_range(1, REACH + 1):
            summed += terms[i + j]
        result = firsts[i + AFTER] - 2.0 * scale * beta * values[i + REACH] * summed
        offset = start + i
        if LONG:
            offset = offset.to(tl.int64)
        tl.store(dx + offset * stride_c + place, result.to(dx.dtype.element_ty), mask=there & (start + i < channels))
