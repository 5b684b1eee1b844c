"""Convolution as one matrix product that reads tensors as they lie and splits their numbers as it multiplies.

Nothing is packed but the filter. A program gathers the numbers of its places and of some taps and channels, scales
them by a power of two, splits each into two fp16 parts and sums three products of these in fp32, hi*lo + lo*hi + hi*hi
(Ootomo and Yokota 2022, section 3). Where channels are few, that is all there is to do: a tap of three channels packed
for matrix units is zeros for the most part. Matrix units round their sums towards zero, an error that grows with their
length: after ``PROMOTE`` steps (0: never) a sum is added to another outside of them (section 4 there).

A place of the result is at ``j`` along each axis and reads, of tap ``t``, the source at ``start + j * step +
t * tap_step``, which is zero outside. Taps and channels are counted as one: channels fastest where ``LAST``, else last.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tilewise.kernels.triton.gemm.activations import activated
from tilewise.kernels.triton.implicit_gemm import unscaled

__all__ = ["add_shares", "direct_gemm", "direct_gradient", "split_filters"]


@triton.jit
def _digits(k, channels, TAPS_D: tl.constexpr, TAPS_H: tl.constexpr, TAPS_W: tl.constexpr, LAST: tl.constexpr):
    """The channel, and the tap along each axis, of number ``k``."""
    if TAPS_D * TAPS_H * TAPS_W == 1:
        return k, k * 0, k * 0, k * 0
    if LAST:
        c = k % channels
        tap = k // channels
    else:
        c = k // (TAPS_D * TAPS_H * TAPS_W)
        tap = k % (TAPS_D * TAPS_H * TAPS_W)
    line = tap // TAPS_W
    return c, line // TAPS_H, line % TAPS_H, tap % TAPS_W


@triton.jit
def _places(q, depth, height, width):
    """Image, plane, line and column of place ``q``, the last fastest."""
    w, rest = q % width, q // width
    h, rest = rest % height, rest // height
    return rest // depth, rest % depth, h, w


@triton.jit
def _address(image, d, h, w, s_n, s_d, s_h, s_w, WIDE: tl.constexpr, RUN: tl.constexpr):
    """Element offsets of places; each ``RUN`` of them are known to be contiguous."""
    if WIDE:
        place = image.to(tl.int64) * s_n + d.to(tl.int64) * s_d + h.to(tl.int64) * s_h + w.to(tl.int64) * s_w
    else:
        place = image * s_n + d * s_d + h * s_h + w * s_w
    if RUN > 1:
        place = tl.max_contiguous(tl.multiple_of(place, RUN), RUN)
    return place


@triton.jit
def _place_first(values, K_FIRST: tl.constexpr):
    """Values of places, shaped to broadcast over a tile of places and taps."""
    if K_FIRST:
        return values[None, :]
    else:
        return values[:, None]


@triton.jit
def _tap_first(values, K_FIRST: tl.constexpr):
    """Values of taps, shaped to broadcast over a tile of places and taps."""
    if K_FIRST:
        return values[:, None]
    else:
        return values[None, :]


@triton.jit
def _within(mask, start, tap, size, BOUND: tl.constexpr, K_FIRST: tl.constexpr):
    """``mask`` where place plus tap is inside an axis of ``size``."""
    if BOUND:
        at = _place_first(start, K_FIRST) + _tap_first(tap, K_FIRST)
        return mask & (at >= 0) & (at < size)
    else:
        return mask


@triton.jit
def _patches(
    pointers, offsets, some, d, h, w, t_d, t_h, t_w, size_d, size_h, size_w,
    BOUND_D: tl.constexpr, BOUND_H: tl.constexpr, BOUND_W: tl.constexpr, WHOLE: tl.constexpr, K_FIRST: tl.constexpr,
    RUN: tl.constexpr,
):  # fmt: skip
    """The elements that places read at taps ``offsets`` further on; zeros outside the image, and unless ``WHOLE`` where
    not ``some``.
    """
    if RUN > 1:
        offsets = tl.multiple_of(offsets, RUN)
    at = _place_first(pointers, K_FIRST) + _tap_first(offsets, K_FIRST)
    if WHOLE and not (BOUND_D or BOUND_H or BOUND_W):
        return tl.load(at)
    else:
        mask = _within(_tap_first(some, K_FIRST), d, t_d, size_d, BOUND_D, K_FIRST)
        mask = _within(mask, h, t_h, size_h, BOUND_H, K_FIRST)
        mask = _within(mask, w, t_w, size_w, BOUND_W, K_FIRST)
        return tl.load(at, mask=mask, other=0.0)


@triton.jit
def _scale(exponent):
    """The power of two that brings numbers with this largest exponent to [2^14, 2^15)."""
    return ((268 - exponent) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _largest(peaks, chunks, CHUNKS: tl.constexpr):
    """The largest of ``chunks`` exponents, or the least exponent that has a scale."""
    chunk = tl.arange(0, CHUNKS)
    return tl.max(tl.load(peaks + chunk, mask=chunk < chunks, other=15), axis=0)


@triton.jit
def _parts(scaled):
    """The fp16 part of ``scaled`` and the rest in fp16; the rest is 0 where fp16 cannot hold the number."""
    high = scaled.to(tl.float16)
    rest = tl.where(tl.abs(scaled) < 65504.0, scaled - high.to(tl.float32), 0.0)
    return high, rest.to(tl.float16)


@triton.jit
def _add_products(acc, a, b, a_low, b_low):
    """``acc`` plus the product of two numbers in two fp16 parts each, without the product of the low parts."""
    acc = tl.dot(a_low, b, acc)
    acc = tl.dot(a, b_low, acc)
    return tl.dot(a, b, acc)


@triton.jit(do_not_specialize=["channels", "products", "w_o", "w_c", "w_d", "w_h", "w_w"])
def split_filters(
    filters, parts, exponents, channels, products, row, w_o, w_c, w_d, w_h, w_w,
    TAPS_D: tl.constexpr, TAPS_H: tl.constexpr, TAPS_W: tl.constexpr, LAST: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Each filter's ``products`` numbers in rows of ``row``: all high parts, then all low ones; and its exponent.

    Zeros fill the rest of a row. Grid (filters,).
    """
    o = tl.program_id(0)
    top = tl.zeros([BLOCK], tl.int32)
    for first in range(0, products, BLOCK):
        k = first + tl.arange(0, BLOCK)
        c, d, h, w = _digits(k, channels, TAPS_D, TAPS_H, TAPS_W, LAST)
        value = tl.load(filters + o * w_o + c * w_c + d * w_d + h * w_h + w * w_w, mask=k < products, other=0.0)
        bits = value.to(tl.int32, bitcast=True) & 0x7FFFFFFF
        top = tl.maximum(top, tl.where(bits < 0x7F800000, bits, 0))
    exponent = tl.maximum(tl.max(top, axis=0) >> 23, 15)
    tl.store(exponents + o, exponent)
    scale = _scale(exponent)
    low = parts + tl.num_programs(0) * row
    for first in range(0, row, BLOCK):
        k = first + tl.arange(0, BLOCK)
        c, d, h, w = _digits(k, channels, TAPS_D, TAPS_H, TAPS_W, LAST)
        value = tl.load(filters + o * w_o + c * w_c + d * w_d + h * w_h + w * w_w, mask=k < products, other=0.0)
        high, rest = _parts(value * scale)
        tl.store(parts + o * row + k, high, mask=k < row)
        tl.store(low + o * row + k, rest, mask=k < row)


@triton.jit
def _steps(
    acc, first, last, pointers, rows, low, scale, d, h, w, channels, products, size_d, size_h, size_w,
    x_c, xt_d, xt_h, xt_w, tap_d, tap_h, tap_w,
    TAPS_D: tl.constexpr, TAPS_H: tl.constexpr, TAPS_W: tl.constexpr, LAST: tl.constexpr,
    BOUND_D: tl.constexpr, BOUND_H: tl.constexpr, BOUND_W: tl.constexpr, WHOLE: tl.constexpr, K_FIRST: tl.constexpr,
    RUN: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """``acc`` plus the products of numbers ``first`` to ``last``."""
    for k0 in range(first, last, BLOCK_K):
        k = k0 + tl.arange(0, BLOCK_K)
        c, t_d, t_h, t_w = _digits(k, channels, TAPS_D, TAPS_H, TAPS_W, LAST)
        offsets = c * x_c + t_d * xt_d + t_h * xt_h + t_w * xt_w
        x = _patches(
            pointers, offsets, k < products, d, h, w, t_d * tap_d, t_h * tap_h, t_w * tap_w, size_d, size_h, size_w,
            BOUND_D, BOUND_H, BOUND_W, WHOLE, K_FIRST, RUN,
        )  # fmt: skip
        f = tl.load(rows + k0).T
        f_low = tl.load(rows + (k0 + low)).T
        if K_FIRST:
            x = x.T
        high, rest = _parts(x * scale[:, None])
        acc = _add_products(acc, high, f, rest, f_low)
    return acc


@triton.jit(
    do_not_specialize=[
        "places", "chunks", "outs", "channels", "products", "depth", "height", "width", "size_d", "size_h", "size_w",
        "start_d", "start_h", "start_w", "step_d", "step_h", "step_w", "tap_d", "tap_h", "tap_w",
        "x_d", "x_h", "xt_d", "xt_h", "xt_w", "y_d", "y_h",
    ]
)  # fmt: skip
def direct_gemm(
    images, filters, peaks, exponents, out, bias, residual,
    places, chunks, outs, channels, products, row, low, depth, height, width, size_d, size_h, size_w,
    start_d, start_h, start_w, step_d, step_h, step_w, tap_d, tap_h, tap_w,
    x_n, x_c, x_d, x_h, x_w, xt_d, xt_h, xt_w, y_n, y_c, y_d, y_h, y_w,
    TAPS_D: tl.constexpr, TAPS_H: tl.constexpr, TAPS_W: tl.constexpr, LAST: tl.constexpr,
    BOUND_D: tl.constexpr, BOUND_H: tl.constexpr, BOUND_W: tl.constexpr, WHOLE: tl.constexpr, K_FIRST: tl.constexpr,
    RUN: tl.constexpr, RUN_OUT: tl.constexpr, ACCUMULATE: tl.constexpr, BIAS: tl.constexpr, RESIDUAL: tl.constexpr,
    ACTIVATION: tl.constexpr, FIRST: tl.constexpr, SECOND: tl.constexpr, WIDE: tl.constexpr,
    PROMOTE: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_O: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """``outs`` results for each of ``places`` (images * depth * height * width, the last fastest).

    ``peaks`` holds ``chunks`` largest exponents of every image; ``BIAS`` adds to each result its channel's number of
    ``bias``, ``RESIDUAL`` that of ``residual``, which lies as ``out`` does; the activation follows. ``x_*`` and ``y_*``
    are strides, ``xt_*`` elements between taps; ``filters`` are rows of ``row`` high parts, and ``low`` elements
    further on the low ones.
    ``WHOLE``: ``products`` is a multiple of ``BLOCK_K``. ``RUN``, ``RUN_OUT``: so many places that follow each other do
    so in memory, aligned, where these are read and written. Grid: tiles, channels fastest, so that programs that run
    together share places.
    """
    tiles_o = tl.cdiv(outs, BLOCK_O)
    o = (tl.program_id(0) % tiles_o) * BLOCK_O + tl.arange(0, BLOCK_O)
    q = (tl.program_id(0) // tiles_o) * BLOCK_P + tl.arange(0, BLOCK_P)
    valid = q < places
    image, d, h, w = _places(q % places, depth, height, width)
    top = image * 0
    for chunk in range(chunks):
        top = tl.maximum(top, tl.load(peaks + image * chunks + chunk))
    exponent = tl.maximum(top, 15)
    y_place = _address(image, d, h, w, y_n, y_d, y_h, y_w, WIDE, RUN_OUT)
    d = start_d + d * step_d
    h = start_h + h * step_h
    w = start_w + w * step_w
    pointers = images + _address(image, d, h, w, x_n, x_d, x_h, x_w, WIDE, RUN)
    rows = filters + (o % outs)[:, None] * row + tl.arange(0, BLOCK_K)[None, :]
    acc = tl.zeros([BLOCK_P, BLOCK_O], tl.float32)
    if PROMOTE == 0:
        acc = _steps(
            acc, 0, products, pointers, rows, low, _scale(exponent), d, h, w, channels, products, size_d, size_h,
            size_w, x_c, xt_d, xt_h, xt_w, tap_d, tap_h, tap_w, TAPS_D, TAPS_H, TAPS_W, LAST, BOUND_D, BOUND_H, BOUND_W,
            WHOLE, K_FIRST, RUN, BLOCK_K,
        )  # fmt: skip
    else:
        for first in range(0, products, PROMOTE * BLOCK_K):
            part = tl.zeros([BLOCK_P, BLOCK_O], tl.float32)
            acc += _steps(
                part, first, tl.minimum(first + PROMOTE * BLOCK_K, products), pointers, rows, low, _scale(exponent),
                d, h, w, channels, products, size_d, size_h, size_w, x_c, xt_d, xt_h, xt_w, tap_d, tap_h, tap_w,
                TAPS_D, TAPS_H, TAPS_W, LAST, BOUND_D, BOUND_H, BOUND_W, WHOLE, K_FIRST, RUN, BLOCK_K,
            )  # fmt: skip
    acc = unscaled(acc, exponent[:, None] + tl.load(exponents + o % outs)[None, :] - 282)
    if BIAS:
        acc += tl.load(bias + o % outs)[None, :]
    at = y_place[:, None] + (o.to(y_place.dtype) * y_c)[None, :]
    target = out + at
    mask = valid[:, None] & (o < outs)[None, :]
    if ACCUMULATE:
        acc += tl.load(target, mask=mask, other=0.0)
    if RESIDUAL:
        acc += tl.load(residual + at, mask=mask, other=0.0)
    acc = activated(acc, ACTIVATION, FIRST, SECOND)
    tl.store(target, acc, mask=mask)


@triton.jit(
    do_not_specialize=[
        "places", "share", "chunks_x", "chunks_y", "outs", "channels", "depth", "height", "width",
        "step_d", "step_h", "step_w", "x_d", "x_h", "y_d", "y_h",
    ]
)  # fmt: skip
def direct_gradient(
    images, gradients, peaks_x, peaks_y, partials,
    places, share, chunks_x, chunks_y, outs, channels, depth, height, width, step_d, step_h, step_w,
    x_n, x_c, x_d, x_h, x_w, y_n, y_c, y_d, y_h, y_w,
    WHOLE: tl.constexpr, K_FIRST: tl.constexpr, RUN: tl.constexpr, RUN_OUT: tl.constexpr, CHUNKS: tl.constexpr,
    WIDE: tl.constexpr, PROMOTE: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_O: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Of kernels of one tap: sums over ``share`` places of image times gradient, into ``partials`` [shares, channels,
    outs], scaled.

    ``BLOCK_K`` channels of the image by ``BLOCK_O`` of the gradient, ``BLOCK_P`` places at a time. ``chunks_x`` and
    ``chunks_y`` exponents tell the largest of either tensor. ``WHOLE``: ``channels`` is a multiple of ``BLOCK_K``. Grid
    (tiles, shares); the rest is as in :func:`direct_gemm`.
    """
    tiles_o = tl.cdiv(outs, BLOCK_O)
    o = (tl.program_id(0) % tiles_o) * BLOCK_O + tl.arange(0, BLOCK_O)
    c = (tl.program_id(0) // tiles_o) * BLOCK_K + tl.arange(0, BLOCK_K)
    scale_x = _scale(_largest(peaks_x, chunks_x, CHUNKS))
    scale_y = _scale(_largest(peaks_y, chunks_y, CHUNKS))
    offsets = c * x_c
    start = tl.program_id(1) * share
    stop = tl.minimum(start + share, places)
    acc = tl.zeros([BLOCK_K, BLOCK_O], tl.float32)
    for first in range(start, stop, PROMOTE * BLOCK_P):
        part = tl.zeros([BLOCK_K, BLOCK_O], tl.float32)
        for q0 in range(first, tl.minimum(first + PROMOTE * BLOCK_P, stop), BLOCK_P):
            q = q0 + tl.arange(0, BLOCK_P)
            image, d, h, w = _places(q % places, depth, height, width)
            y_place = _address(image, d, h, w, y_n, y_d, y_h, y_w, WIDE, RUN_OUT)
            x_place = _address(image, d * step_d, h * step_h, w * step_w, x_n, x_d, x_h, x_w, WIDE, RUN)
            # What is read beyond the last place is another's: the gradient there is none.
            x = _patches(
                images + x_place, offsets, c < channels, d, h, w, c, c, c, 0, 0, 0, False, False, False, WHOLE, K_FIRST,
                RUN,
            )  # fmt: skip
            y_at = gradients + (y_place[:, None] + ((o % outs).to(y_place.dtype) * y_c)[None, :])
            y = tl.load(y_at, mask=(q < stop)[:, None] & (o < outs)[None, :], other=0.0)
            if not K_FIRST:
                x = x.T
            x_high, x_low = _parts(x * scale_x)
            y_high, y_low = _parts(y * scale_y)
            part = _add_products(part, x_high, y_high, x_low, y_low)
        acc += part
    target = partials + tl.program_id(1).to(tl.int64) * channels * outs + (c[:, None] * outs + o[None, :])
    tl.store(target, acc, mask=(c < channels)[:, None] & (o < outs)[None, :])


@triton.jit(do_not_specialize=["shares", "chunks_x", "chunks_y", "outs", "w_o", "w_c"])
def add_shares(
    partials, peaks_x, peaks_y, out, shares, chunks_x, chunks_y, outs, total, w_o, w_c,
    CHUNKS: tl.constexpr, ACCUMULATE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The filter's gradient from ``shares`` partial sums of ``total`` elements, added in order. Grid (blocks,)."""
    exponent = _largest(peaks_x, chunks_x, CHUNKS) + _largest(peaks_y, chunks_y, CHUNKS)
    e = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    acc = tl.zeros([BLOCK], tl.float32)
    source = partials + e
    for _ in range(shares):
        acc += tl.load(source, mask=e < total, other=0.0)
        source += total
    acc = unscaled(acc, exponent - 282)
    target = out + (e % outs) * w_o + e // outs * w_c
    if ACCUMULATE:
        acc += tl.load(target, mask=e < total, other=0.0)
    tl.store(target, acc, mask=e < total)
