"""Pooling and its gradient, each in one pass over memory.

Tensors are dense. A program has a tile of lines by columns. Of contiguous tensors a line is one row of an image's
plane, and columns lie along its width. Of tensors in channels_last a line is one pixel, and columns are its channels.
What all kernels say of an axis of space lies in the arguments of the same name: depth, height and width, of which those
that a problem lacks have one place.

A result is computed from its whole window. Of a maximum the number of its element in the window is kept, a byte. The
gradient of an input is gathered from the results whose windows it is in, in their order: no two programs write one
number, and the result has the same bits every time. Sums are fp32.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["gathered", "pooled"]


@triton.jit
def _tile(
    columns_there, lines_there, blocks, depth, height, width,
    LAST: tl.constexpr, LONG: tl.constexpr, BLOCK_L: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Where the places of a tile are: the item, depth, row, column, the channel, and which of them there are.

    The item is the image, or of contiguous tensors the image's channel. ``LONG``: items are counted in 64 bits.
    """
    program = tl.program_id(0)
    line = (program // blocks) * BLOCK_L + tl.arange(0, BLOCK_L)
    column = (program % blocks) * BLOCK_C + tl.arange(0, BLOCK_C)
    there = (line < lines_there)[:, None] & (column < columns_there)[None, :]
    if LAST:
        w, line = (line % width)[:, None], line // width
        channel = column[None, :]
    else:
        w = column[None, :]
        channel = tl.zeros([1, BLOCK_C], tl.int32)
    h, line = line % height, line // height
    d, item = line % depth, line // depth
    if LONG:
        item = item.to(tl.int64)
    return item[:, None], d[:, None], h[:, None], w, channel, there


@triton.jit
def _place(item, d, h, w, depth, height, width, across):
    """The offset of a pixel in a dense tensor with ``across`` numbers a pixel."""
    return (((item * depth + d) * height + h) * width + w) * across


@triton.jit
def _factor(result, extent, STRIDE: tl.constexpr, PAD: tl.constexpr, KERNEL: tl.constexpr, PADDED: tl.constexpr):
    """The factor of a result's divisor from one axis: its window's elements, with those in the padding or without."""
    first = result * STRIDE - PAD
    if PADDED:
        count = tl.minimum(first + KERNEL, extent + PAD) - first
    else:
        count = tl.minimum(first + KERNEL, extent) - tl.maximum(first, 0)
    return count


@triton.jit
def _divisor(
    d, h, w, depth, height, width,
    SD: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr, PD: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr,
    KD: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr, PADDED: tl.constexpr, DIVISOR: tl.constexpr,
):  # fmt: skip
    """What the sum of a result's window is divided by: ``DIVISOR``, or where that is 0 its elements. fp32."""
    if DIVISOR:
        divisor = tl.full([1, 1], DIVISOR, tl.float32)
    else:
        divisor = _factor(d, depth, SD, PD, KD, PADDED) * _factor(h, height, SH, PH, KH, PADDED)
        divisor = divisor * _factor(w, width, SW, PW, KW, PADDED)
    return divisor.to(tl.float32)


@triton.jit
def _first(result, STRIDE: tl.constexpr, PAD: tl.constexpr, DILATION: tl.constexpr):
    """The first element of a result's window along an axis that is not in the padding before the input."""
    return (tl.maximum(PAD - result * STRIDE, 0) + DILATION - 1) // DILATION


@triton.jit
def pooled(
    x, y, kept, lines, columns, blocks, depth, height, width, results_d, results_h, results_w, across,
    SD: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr, PD: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr,
    DD: tl.constexpr, DH: tl.constexpr, DW: tl.constexpr, KD: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr,
    MAX: tl.constexpr, KEEP: tl.constexpr, PADDED: tl.constexpr, DIVISOR: tl.constexpr, UNROLL: tl.constexpr,
    LAST: tl.constexpr, LONG: tl.constexpr, BLOCK_L: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """The results ``y`` of ``x``. Grid: ``blocks`` of columns * blocks of lines of the results.

    ``S``, ``P``, ``D`` and ``K`` with the axis are its stride, padding, dilation and kernel. ``across`` is the number
    of channels of channels_last tensors, else 1. With ``KEEP`` the number of each maximum's element goes to ``kept``.
    """
    item, d, h, w, channel, there = _tile(
        columns, lines, blocks, results_d, results_h, results_w, LAST, LONG, BLOCK_L, BLOCK_C
    )
    total = tl.full([BLOCK_L, BLOCK_C], float("-inf") if MAX else 0.0, tl.float32)
    # Of equal maxima the first one counts, even if all are -inf, and of NaNs the last one, as in torch.
    first = (_first(d, SD, PD, DD) * KH + _first(h, SH, PH, DH)) * KW + _first(w, SW, PW, DW)
    number = tl.broadcast_to(first.to(tl.int32), (BLOCK_L, BLOCK_C))
    for e in tl.range(0, KD * KH * KW, loop_unroll_factor=UNROLL):
        at_d = d * SD - PD + e // (KH * KW) * DD
        at_h = h * SH - PH + e // KW % KH * DH
        at_w = w * SW - PW + e % KW * DW
        inside = there & (at_d >= 0) & (at_d < depth) & (at_h >= 0) & (at_h < height) & (at_w >= 0) & (at_w < width)
        pointers = x + _place(item, at_d, at_h, at_w, depth, height, width, across) + channel
        value = tl.load(pointers, mask=inside, other=float("-inf") if MAX else 0.0).to(tl.float32)
        if MAX:
            better = (value > total) | (value != value)
            total = tl.where(better, value, total)
            number = tl.where(better, e, number)
        else:
            total += value
    if not MAX:
        total /= _divisor(
            d, h, w, depth, height, width, SD, SH, SW, PD, PH, PW, KD, KH, KW, PADDED, DIVISOR
        )  # fmt: skip
    place = _place(item, d, h, w, results_d, results_h, results_w, across) + channel
    tl.store(y + place, total.to(y.dtype.element_ty), mask=there)
    if KEEP:
        tl.store(kept + place, number.to(tl.uint8), mask=there)


@triton.jit
def _taker(at, t, results, STRIDE: tl.constexpr, PAD: tl.constexpr, DILATION: tl.constexpr, KERNEL: tl.constexpr):
    """Result number ``t`` of those along an axis that may have the input ``at`` in their windows.

    With it come the input's number in that window, and whether it is in it.
    """
    REACH: tl.constexpr = (KERNEL - 1) * DILATION
    first = at + PAD - REACH
    # A division cuts towards zero, so a negative dividend needs none.
    result = tl.where(first > 0, (first + STRIDE - 1) // STRIDE, 0) + t
    apart = at + PAD - result * STRIDE
    inside = (apart >= 0) & (apart <= REACH) & (result < results)
    if DILATION > 1:
        inside = inside & (apart % DILATION == 0)
    return result, apart // DILATION, inside


@triton.jit
def gathered(
    dy, kept, dx, lines, columns, blocks, depth, height, width, results_d, results_h, results_w, across,
    SD: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr, PD: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr,
    DD: tl.constexpr, DH: tl.constexpr, DW: tl.constexpr, KD: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr,
    TD: tl.constexpr, TH: tl.constexpr, TW: tl.constexpr,
    MAX: tl.constexpr, PADDED: tl.constexpr, DIVISOR: tl.constexpr, UNROLL: tl.constexpr,
    LAST: tl.constexpr, LONG: tl.constexpr, BLOCK_L: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """The gradient ``dx`` of the input by that of the results. Grid: blocks of columns * blocks of lines of the input.

    ``T`` with the axis is the most results whose windows one input is in. Other arguments are those of :func:`pooled`.
    """
    item, d, h, w, channel, there = _tile(columns, lines, blocks, depth, height, width, LAST, LONG, BLOCK_L, BLOCK_C)
    total = tl.zeros([BLOCK_L, BLOCK_C], tl.float32)
    for t in tl.range(0, TD * TH * TW, loop_unroll_factor=UNROLL):
        at_d, of_d, in_d = _taker(d, t // (TH * TW), results_d, SD, PD, DD, KD)
        at_h, of_h, in_h = _taker(h, t // TW % TH, results_h, SH, PH, DH, KH)
        at_w, of_w, in_w = _taker(w, t % TW, results_w, SW, PW, DW, KW)
        inside = there & in_d & in_h & in_w
        place = _place(item, at_d, at_h, at_w, results_d, results_h, results_w, across) + channel
        share = tl.load(dy + place, mask=inside, other=0.0).to(tl.float32)
        if MAX:
            number = tl.load(kept + place, mask=inside, other=0).to(tl.int32)
            own = inside & (number == (of_d * KH + of_h) * KW + of_w)
            total += tl.where(own, share, 0.0)
        else:
            divisor = _divisor(
                at_d, at_h, at_w, depth, height, width, SD, SH, SW, PD, PH, PW, KD, KH, KW, PADDED, DIVISOR
            )  # fmt: skip
            total += tl.where(inside, share / divisor, 0.0)
    place = _place(item, d, h, w, depth, height, width, across) + channel
    tl.store(dx + place, total.to(dx.dtype.element_ty), mask=there)
