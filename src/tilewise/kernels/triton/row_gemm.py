"""Convolutions of few channels as one product whose sums run over whole rows of the filter.

Where channels are innermost, what one row of a filter meets of an image is one run of memory: ``kernel * channels``
elements for a kernel without dilation. So a sum runs over filter rows and, within each, over the elements of its run,
and the image is gathered as it lies. Runs are read ``RUN`` elements at a time, from places that are multiples of it:
a run then starts up to ``RUN - 1`` elements early and ends as much late, where the packed filter has zeros.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["pack_rows", "row_gradient", "row_product", "sum_partials"]


@triton.jit
def _window(k, length, per, taps_h, dil_d, dil_h, dil_w, x_d, x_h, x_e, x_c, RUN: tl.constexpr):
    """Of summed indices ``k``: planes, lines and steps along the line from a window's first, and elements from it.

    ``length`` is that of a row, a multiple of ``RUN``; a step has ``per`` of its elements.
    """
    length = length // RUN * RUN  # the same number, which the compiler now knows to be a multiple
    line = k // length
    j = k % length
    d = line // taps_h * dil_d
    h = line % taps_h * dil_h
    if RUN > 1:
        e = j
        place = tl.max_contiguous(tl.multiple_of(d * x_d + h * x_h + j, RUN), RUN)
    else:
        e = j // per * dil_w
        place = d * x_d + h * x_h + e * x_e + j % per * x_c
    return d, h, e, place


@triton.jit
def _gather(
    image, first, d0, h0, e0, d, h, e, place, depth, height, limit, RUN: tl.constexpr, ONE_LINE: tl.constexpr
):  # fmt: skip
    """Elements of a tile [pixels, sums], zeros beyond the image. With ``ONE_LINE`` all pixels have the same ``h0``."""
    inside = (d0 + d >= 0) & (d0 + d < depth)
    if ONE_LINE:
        inside = (inside & (h0 + h >= 0) & (h0 + h < height))[None, :]
    else:
        line = h0[:, None] + h[None, :]
        inside = inside[None, :] & (line >= 0) & (line < height)
    step = e0[:, None] + e[None, :]
    inside = inside & (step >= 0)
    inside = tl.max_constancy(inside & (step < limit), [1, RUN])
    return tl.load(image + (first[:, None] + place[None, :]), mask=inside, other=0.0)


@triton.jit
def _tile_of(t, tiles_w, tiles_h, out_d):
    """Image, plane, tile of lines and tile of columns of tile number ``t``."""
    w, t = t % tiles_w, t // tiles_w
    h, t = t % tiles_h, t // tiles_h
    return t // out_d, t % out_d, h, w


@triton.jit(
    do_not_specialize=[
        "total", "depth", "first_o", "channels", "lead", "length", "per", "taps_d", "taps_h", "elements",
        "w_o", "w_d", "w_h", "w_s", "w_c",
    ]
)  # fmt: skip
def pack_rows(
    weight, target, total, depth, channels, lead, length, per, taps_d, taps_h, elements, w_o, w_d, w_h, w_s, w_c,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """``target`` [filters, depth]: rows of ``length``, of which ``elements`` from ``lead`` on are the filter's.

    Zeros elsewhere, and for filters beyond ``channels``. A tap has ``per`` elements. Grid (blocks of ``total``,).
    """
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    o, k = i // depth, i % depth
    line, j = k // length, k % length - lead
    t, r = line // taps_h, line % taps_h
    known = (o < channels) & (t < taps_d) & (j >= 0) & (j < elements)
    j = tl.maximum(j, 0)
    source = weight + (o * w_o + t * w_d + r * w_h + j // per * w_s + j % per * w_c)
    tl.store(target + i, tl.load(source, mask=known, other=0.0), mask=i < total)


@triton.jit(
    do_not_specialize=[
        "channels", "sums", "tiles_w", "tiles_h", "out_d", "out_h", "out_w", "depth", "height", "limit",
        "start_d", "start_h", "start_e", "step_d", "step_h", "step_e", "length", "per", "taps_h",
        "dil_d", "dil_h", "dil_w", "x_n", "x_d", "x_h", "x_e", "x_c", "y_n", "y_c", "y_d", "y_h", "y_w",
    ]
)  # fmt: skip
def row_product(
    image, filters, out, bias,
    channels, sums, tiles_w, tiles_h, out_d, out_h, out_w, depth, height, limit,
    start_d, start_h, start_e, step_d, step_h, step_e, length, per, taps_h, dil_d, dil_h, dil_w,
    x_n, x_d, x_h, x_e, x_c, y_n, y_c, y_d, y_h, y_w,
    RUN: tl.constexpr, ALIGNED: tl.constexpr, BIAS: tl.constexpr, ACCUMULATE: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_W: tl.constexpr, BLOCK_O: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Forward pass from packed ``filters`` [channels, sums], both in whole tiles.

    A window starts at ``start_* + step_* * output``; ``e`` counts elements along a line if ``RUN`` is not 1, else
    columns. ``ALIGNED``: 0, or with channels of ``out`` innermost what divides ``channels`` and all other strides.
    Grid: tiles of ``BLOCK_H`` by ``BLOCK_W`` outputs of one plane, and of channels, the latter fastest.
    """
    if ALIGNED > 0:
        channels = channels // ALIGNED * ALIGNED
    tiles_o = tl.cdiv(channels, BLOCK_O)
    o = tl.program_id(0) % tiles_o * BLOCK_O + tl.arange(0, BLOCK_O)
    n, d, th, tw = _tile_of(tl.program_id(0) // tiles_o, tiles_w, tiles_h, out_d)
    i = tl.arange(0, BLOCK_H * BLOCK_W)
    oh = th * BLOCK_H + i // BLOCK_W
    ow = tw * BLOCK_W + i % BLOCK_W
    d0 = start_d + d * step_d
    h0 = start_h + oh * step_h
    line_0 = start_h + th * BLOCK_H * step_h
    e0 = start_e // RUN * RUN + ow * (step_e // RUN * RUN)
    image += n.to(tl.int64) * (x_n // RUN * RUN)
    x_h = x_h // RUN * RUN
    x_d = x_d // RUN * RUN
    if RUN > 1:
        first = tl.multiple_of(d0 * x_d + h0 * x_h + e0, RUN)
    else:
        first = d0 * x_d + h0 * x_h + e0 * x_e
    sums = sums // BLOCK_K * BLOCK_K
    rows = filters + o[None, :] * sums
    acc = tl.zeros([BLOCK_H * BLOCK_W, BLOCK_O], tl.float32)
    for k0 in range(0, sums, BLOCK_K):
        k = k0 + tl.arange(0, BLOCK_K)
        d_k, h_k, e_k, place = _window(k, length, per, taps_h, dil_d, dil_h, dil_w, x_d, x_h, x_e, x_c, RUN)
        x = _gather(image, first, d0, line_0 if BLOCK_H == 1 else h0, e0, d_k, h_k, e_k, place, depth, height, limit,
                    RUN, BLOCK_H == 1)  # fmt: skip
        acc = tl.dot(x, tl.load(rows + k[:, None]), acc, input_precision=PRECISION)
    if BIAS:
        acc += tl.load(bias + tl.minimum(o, channels - 1)).to(tl.float32)[None, :]
    target = d * y_d + oh * y_h + ow * y_w
    if ALIGNED > 0:
        target = target // ALIGNED * ALIGNED
        pointers = out + n.to(tl.int64) * (y_n // ALIGNED * ALIGNED) + (target[:, None] + o[None, :])
    else:
        pointers = out + n.to(tl.int64) * y_n + (target[:, None] + (o * y_c)[None, :])
    mask = ((oh < out_h) & (ow < out_w))[:, None] & (o < channels)[None, :]
    if ACCUMULATE:
        acc += tl.load(pointers, mask=mask, other=0.0).to(tl.float32)
    tl.store(pointers, acc.to(out.dtype.element_ty), mask=mask)


@triton.jit(
    do_not_specialize=[
        "tiles", "share", "channels", "sums", "tiles_w", "tiles_h", "out_d", "out_h", "out_w", "depth", "height",
        "limit", "start_d", "start_h", "start_e", "step_d", "step_h", "step_e", "length", "per", "taps_h",
        "dil_d", "dil_h", "dil_w", "x_n", "x_d", "x_h", "x_e", "x_c", "y_n", "y_c", "y_d", "y_h", "y_w",
    ]
)  # fmt: skip
def row_gradient(
    image, gradient, partials,
    tiles, share, channels, sums, tiles_w, tiles_h, out_d, out_h, out_w, depth, height, limit,
    start_d, start_h, start_e, step_d, step_h, step_e, length, per, taps_h, dil_d, dil_h, dil_w,
    x_n, x_d, x_h, x_e, x_c, y_n, y_c, y_d, y_h, y_w,
    RUN: tl.constexpr, ALIGNED: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_W: tl.constexpr, BLOCK_O: tl.constexpr, BLOCK_K: tl.constexpr, MORE_K: tl.constexpr,
):  # fmt: skip
    """``partials`` [shares, channels, sums] of the filter's gradient: each sums ``share`` of the ``tiles`` of outputs.

    Arguments are as of :func:`row_product`. A program has ``BLOCK_K + MORE_K`` sums of ``BLOCK_O`` channels. Grid
    (tiles of channels and sums, shares).
    """
    if ALIGNED > 0:
        channels = channels // ALIGNED * ALIGNED
    x_h = x_h // RUN * RUN
    x_d = x_d // RUN * RUN
    tiles_o = tl.cdiv(channels, BLOCK_O)
    o = tl.program_id(0) % tiles_o * BLOCK_O + tl.arange(0, BLOCK_O)
    first_k = tl.program_id(0) // tiles_o * (BLOCK_K + MORE_K)
    k = first_k + tl.arange(0, BLOCK_K)
    d_k, h_k, e_k, place = _window(k, length, per, taps_h, dil_d, dil_h, dil_w, x_d, x_h, x_e, x_c, RUN)
    acc = tl.zeros([BLOCK_O, BLOCK_K], tl.float32)
    if MORE_K > 0:
        more_k = first_k + BLOCK_K + tl.arange(0, MORE_K)
        d_m, h_m, e_m, more_place = _window(
            more_k, length, per, taps_h, dil_d, dil_h, dil_w, x_d, x_h, x_e, x_c, RUN
        )  # fmt: skip
        acc_more = tl.zeros([BLOCK_O, MORE_K], tl.float32)
    i = tl.arange(0, BLOCK_H * BLOCK_W)
    start = tl.program_id(1) * share
    for t in range(start, tl.minimum(start + share, tiles)):
        n, d, th, tw = _tile_of(t, tiles_w, tiles_h, out_d)
        oh = th * BLOCK_H + i // BLOCK_W
        ow = tw * BLOCK_W + i % BLOCK_W
        d0 = start_d + d * step_d
        h0 = start_h + oh * step_h
        line_0 = start_h + th * BLOCK_H * step_h
        e0 = start_e // RUN * RUN + ow * (step_e // RUN * RUN)
        here = image + n.to(tl.int64) * (x_n // RUN * RUN)
        if RUN > 1:
            first = tl.multiple_of(d0 * x_d + h0 * x_h + e0, RUN)
        else:
            first = d0 * x_d + h0 * x_h + e0 * x_e
        source = d * y_d + oh * y_h + ow * y_w
        mask = ((oh < out_h) & (ow < out_w))[:, None] & (o < channels)[None, :]
        if ALIGNED > 0:
            source = source // ALIGNED * ALIGNED
            pointers = gradient + n.to(tl.int64) * (y_n // ALIGNED * ALIGNED) + (source[:, None] + o[None, :])
        else:
            pointers = gradient + n.to(tl.int64) * y_n + (source[:, None] + (o * y_c)[None, :])
        g = tl.load(pointers, mask=mask, other=0.0).T
        x = _gather(here, first, d0, line_0 if BLOCK_H == 1 else h0, e0, d_k, h_k, e_k, place, depth, height, limit,
                    RUN, BLOCK_H == 1)  # fmt: skip
        acc = tl.dot(g, x, acc, input_precision=PRECISION)
        if MORE_K > 0:
            x = _gather(here, first, d0, line_0 if BLOCK_H == 1 else h0, e0, d_m, h_m, e_m, more_place, depth, height,
                        limit, RUN, BLOCK_H == 1)  # fmt: skip
            acc_more = tl.dot(g, x, acc_more, input_precision=PRECISION)
    target = partials + (tl.program_id(1).to(tl.int64) * channels + o)[:, None] * sums
    tl.store(target + k[None, :], acc, mask=(o < channels)[:, None] & (k < sums)[None, :])
    if MORE_K > 0:
        tl.store(target + more_k[None, :], acc_more, mask=(o < channels)[:, None] & (more_k < sums)[None, :])


@triton.jit(
    do_not_specialize=[
        "total", "splits", "channels", "sums", "lead", "length", "per", "columns", "taps_h", "elements",
        "w_o", "w_d", "w_h", "w_s", "w_c",
    ]
)  # fmt: skip
def sum_partials(
    partials, out, total, splits, channels, sums, lead, length, per, columns, taps_h, elements, w_o, w_d, w_h, w_s,
    w_c, ACCUMULATE: tl.constexpr, BLOCK: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    """``out`` from ``splits`` partial sums, always in the same order: ``AT_ONCE`` in a tree, such sums one by one.

    A filter has ``columns`` elements, ``elements`` to a row. Grid (blocks of ``total`` elements,).
    """
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    o, place = i // columns, i % columns
    line, j = place // elements, place % elements
    known = i < total
    source = partials + (o * sums + line * length + lead + j)
    acc = tl.zeros([BLOCK], tl.float32)
    for s0 in range(0, splits, AT_ONCE):
        s = s0 + tl.arange(0, AT_ONCE)
        part = tl.load(
            source[None, :] + (s.to(tl.int64) * channels * sums)[:, None],
            mask=(s < splits)[:, None] & known[None, :],
            other=0.0,
        )
        acc += tl.sum(part, axis=0)
    target = out + (o * w_o + line // taps_h * w_d + line % taps_h * w_h + j // per * w_s + j % per * w_c)
    if ACCUMULATE:
        acc += tl.load(target, mask=known, other=0.0).to(tl.float32)
    tl.store(target, acc.to(out.dtype.element_ty), mask=known)
