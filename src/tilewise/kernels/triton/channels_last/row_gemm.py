"""Convolutions of few channels as one product whose sums run over whole rows of the filter.

Where channels are innermost, what one row of a filter meets of an image is one run of memory: ``kernel * channels``
elements for a kernel without dilation. So a sum runs over filter rows and, within each, over the elements of its run,
and the image is gathered as it lies. Runs are read ``RUN`` elements at a time, from places that are multiples of it:
a run then starts up to ``RUN - 1`` elements early and ends as much late, where the packed filter has zeros.

``SIDE`` outputs that lie side by side may be computed as one with so many times the channels: each has the filter
shifted by its windows' distance, in rows that are as much longer. That multiplies more zeros, but reads an image's
element once where windows overlap, and starts at multiples of more elements, so that fewer and wider reads do.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tilewise.kernels.triton.gemm.activations import activated

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
def _within(i, size):
    """Whether 0 <= i < size, as one comparison."""
    return i.to(tl.uint32) < size.to(tl.uint32)


@triton.jit
def _gather(
    image, first, d0, h0, e0, d, h, e, place, depth, height, limit, RUN: tl.constexpr, ONE_LINE: tl.constexpr
):  # fmt: skip
    """Elements of a tile [pixels, sums], zeros beyond the image. With ``ONE_LINE`` all pixels have the same ``h0``."""
    inside = _within(d0 + d, depth)
    if ONE_LINE:
        inside = (inside & _within(h0 + h, height))[None, :]
    else:
        inside = inside[None, :] & _within(h0[:, None] + h[None, :], height)
    inside = tl.max_constancy(inside & _within(e0[:, None] + e[None, :], limit), [1, RUN])
    return tl.load(image + (first[:, None] + place[None, :]), mask=inside, other=0.0)


@triton.jit
def _outputs(
    out, n, d, h, w, o, channels, out_h, out_w, y_n, y_c, y_d, y_h, y_w, SIDE: tl.constexpr, ALIGNED: tl.constexpr
):  # fmt: skip
    """Pointers to a tile [places, channels] of image ``n`` and plane ``d``, and which of them exist.

    Place ``w`` is ``SIDE`` columns, whose channels follow each other.
    """
    column = w * SIDE
    inside = (h < out_h)[:, None] & (o < SIDE * channels)[None, :]
    if SIDE > 1:
        which = o // channels
        channel = o % channels
        inside = inside & (column[:, None] + which[None, :] < out_w)
    else:
        which = o * 0
        channel = o
        inside = inside & (column < out_w)[:, None]
    place = d * y_d + h * y_h + column * y_w
    if ALIGNED > 0:
        inside = tl.max_constancy(inside, [1, ALIGNED])
        place = place // ALIGNED * ALIGNED
        along = tl.max_contiguous(tl.multiple_of(which * y_w + channel, ALIGNED), ALIGNED)
        pointers = out + n.to(tl.int64) * (y_n // ALIGNED * ALIGNED) + (place[:, None] + along[None, :])
    else:
        pointers = out + n.to(tl.int64) * y_n + (place[:, None] + (which * y_w + channel * y_c)[None, :])
    return pointers, inside


@triton.jit
def _tile_of(t, tiles_w, tiles_h, out_d):
    """Image, plane, tile of lines and tile of columns of tile number ``t``."""
    w, t = t % tiles_w, t // tiles_w
    h, t = t % tiles_h, t // tiles_h
    return t // out_d, t % out_d, h, w


@triton.jit(
    do_not_specialize=[
        "total", "depth", "channels", "side", "shift", "lead", "length", "per", "taps_d", "taps_h", "elements",
        "w_o", "w_d", "w_h", "w_s", "w_c",
    ]
)  # fmt: skip
def pack_rows(
    weight, target, total, depth, channels, side, shift, lead, length, per, taps_d, taps_h, elements,
    w_o, w_d, w_h, w_s, w_c, BLOCK: tl.constexpr,
):  # fmt: skip
    """``target`` [filters, depth]: rows of ``length``, of which ``elements`` from ``lead`` on are the filter's.

    There are ``side`` times ``channels`` filters, each next time ``shift`` elements later. All else is zero. A tap has
    ``per`` elements. Grid (blocks of ``total``,).
    """
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row, k = i // depth, i % depth
    o = row % channels
    line, j = k // length, k % length - lead - row // channels * shift
    t, r = line // taps_h, line % taps_h
    known = (row < side * channels) & (t < taps_d) & (j >= 0) & (j < elements)
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
    image, filters, out, bias, residual,
    channels, sums, tiles_w, tiles_h, out_d, out_h, out_w, depth, height, limit,
    start_d, start_h, start_e, step_d, step_h, step_e, length, per, taps_h, dil_d, dil_h, dil_w,
    x_n, x_d, x_h, x_e, x_c, y_n, y_c, y_d, y_h, y_w,
    WHOLE: tl.constexpr, SIDE: tl.constexpr, RUN: tl.constexpr, ALIGNED: tl.constexpr, BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr, ACTIVATION: tl.constexpr, FIRST: tl.constexpr, SECOND: tl.constexpr,
    ACCUMULATE: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_W: tl.constexpr, BLOCK_O: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Forward pass from packed ``filters`` [SIDE * channels, sums], both in whole tiles.

    ``BLOCK_K`` divides a row's ``length`` and is all of it where ``WHOLE``: a step reads of one row of each window. A
    window starts at ``start_* + step_* * output``; ``e`` counts elements along a line if ``RUN`` is not 1, else
    columns. ``ALIGNED``: 0, or with channels of ``out`` innermost what divides ``channels`` and all other strides.
    ``residual`` lies as ``out`` does. Grid: tiles of ``BLOCK_H`` by ``BLOCK_W`` times ``SIDE`` outputs of one plane,
    and of channels, the latter fastest.
    """
    if ALIGNED > 0:
        channels = channels // ALIGNED * ALIGNED  # the same number, which the compiler now knows to be a multiple
    tiles_o = tl.cdiv(SIDE * channels, BLOCK_O)
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
    k = tl.arange(0, BLOCK_K)
    j0 = 0
    h_k = 0
    d_k = 0
    for k0 in range(0, sums, BLOCK_K):
        j = k if WHOLE else j0 // RUN * RUN + k
        if BLOCK_H == 1:
            inside = _within(line_0 + h_k, height) & _within(d0 + d_k, depth)
        else:
            inside = (_within(h0 + h_k, height) & _within(d0 + d_k, depth))[:, None]
        if RUN > 1:
            inside = inside & _within(e0[:, None] + j[None, :], limit)
            place = first[:, None] + j[None, :]
        else:
            e = j // per * dil_w
            inside = inside & _within(e0[:, None] + e[None, :], limit)
            place = first[:, None] + (e * x_e + j % per * x_c)[None, :]
        inside = tl.max_constancy(inside, [1, RUN])
        x = tl.load(image + (d_k * x_d + h_k * x_h) + place, mask=inside, other=0.0)
        acc = tl.dot(x, tl.load(rows + (k0 + k)[:, None]), acc, input_precision=PRECISION)
        j0 += BLOCK_K
        end = j0 == length
        j0 = tl.where(end, 0, j0)
        h_k += tl.where(end, dil_h, 0)
        end = h_k == taps_h * dil_h
        h_k = tl.where(end, 0, h_k)
        d_k += tl.where(end, dil_d, 0)
    if BIAS:
        acc += tl.load(bias + o % channels).to(tl.float32)[None, :]
    pointers, mask = _outputs(out, n, d, oh, ow, o, channels, out_h, out_w, y_n, y_c, y_d, y_h, y_w, SIDE, ALIGNED)
    if ACCUMULATE:
        acc += tl.load(pointers, mask=mask, other=0.0).to(tl.float32)
    if RESIDUAL:
        like, _ = _outputs(residual, n, d, oh, ow, o, channels, out_h, out_w, y_n, y_c, y_d, y_h, y_w, SIDE, ALIGNED)
        acc += tl.load(like, mask=mask, other=0.0).to(tl.float32)
    acc = activated(acc, ACTIVATION, FIRST, SECOND, out.dtype.element_ty.primitive_bitwidth)
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
    SIDE: tl.constexpr, RUN: tl.constexpr, ALIGNED: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_W: tl.constexpr, BLOCK_O: tl.constexpr, BLOCK_K: tl.constexpr, MORE_K: tl.constexpr,
):  # fmt: skip
    """``partials`` [shares, SIDE * channels, sums] of the filter's gradient: each of ``share`` of the ``tiles``.

    Arguments are as of :func:`row_product`. A program has ``BLOCK_K + MORE_K`` sums of ``BLOCK_O`` channels. Grid
    (tiles of channels and sums, shares).
    """
    if ALIGNED > 0:
        channels = channels // ALIGNED * ALIGNED
    x_h = x_h // RUN * RUN
    x_d = x_d // RUN * RUN
    tiles_o = tl.cdiv(SIDE * channels, BLOCK_O)
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
        pointers, mask = _outputs(
            gradient, n, d, oh, ow, o, channels, out_h, out_w, y_n, y_c, y_d, y_h, y_w, SIDE, ALIGNED
        )
        g = tl.load(pointers, mask=mask, other=0.0).T
        x = _gather(here, first, d0, line_0 if BLOCK_H == 1 else h0, e0, d_k, h_k, e_k, place, depth, height, limit,
                    RUN, BLOCK_H == 1)  # fmt: skip
        acc = tl.dot(g, x, acc, input_precision=PRECISION)
        if MORE_K > 0:
            x = _gather(here, first, d0, line_0 if BLOCK_H == 1 else h0, e0, d_m, h_m, e_m, more_place, depth, height,
                        limit, RUN, BLOCK_H == 1)  # fmt: skip
            acc_more = tl.dot(g, x, acc_more, input_precision=PRECISION)
    sums = sums // RUN * RUN
    partials += tl.program_id(1).to(tl.int64) * (SIDE * channels) * sums
    rows = (o * sums)[:, None]
    known = (o < SIDE * channels)[:, None]
    tl.store(partials + (rows + k[None, :]), acc, mask=known & (k < sums)[None, :])
    if MORE_K > 0:
        tl.store(partials + (rows + more_k[None, :]), acc_more, mask=known & (more_k < sums)[None, :])


@triton.jit(
    do_not_specialize=[
        "total", "splits", "channels", "side", "shift", "sums", "lead", "length", "per", "columns", "taps_h",
        "elements", "w_o", "w_d", "w_h", "w_s", "w_c",
    ]
)  # fmt: skip
def sum_partials(
    partials, out, total, splits, channels, side, shift, sums, lead, length, per, columns, taps_h, elements,
    w_o, w_d, w_h, w_s, w_c, ACCUMULATE: tl.constexpr, BLOCK: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    """``out`` from ``splits`` partial sums, always in the same order: ``AT_ONCE`` in a tree, such sums one by one.

    Each is of ``side`` times ``channels`` filters, each next time ``shift`` sums further on. A filter has ``columns``
    elements, ``elements`` to a row. Grid (blocks of ``total`` elements,).
    """
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    o, place = i // columns, i % columns
    line, j = place // elements, place % elements
    known = i < total
    source = partials + (o * sums + line * length + lead + j)
    acc = tl.zeros([BLOCK], tl.float32)
    for s0 in range(0, splits * side, AT_ONCE):
        s = s0 + tl.arange(0, AT_ONCE)
        part = tl.load(
            source[None, :] + (s.to(tl.int64) * channels * sums + s % side * shift)[:, None],
            mask=(s < splits * side)[:, None] & known[None, :],
            other=0.0,
        )
        acc += tl.sum(part, axis=0)
    target = out + (o * w_o + line // taps_h * w_d + line % taps_h * w_h + j // per * w_s + j % per * w_c)
    if ACCUMULATE:
        acc += tl.load(target, mask=known, other=0.0).to(tl.float32)
    tl.store(target, acc.to(out.dtype.element_ty), mask=known)
