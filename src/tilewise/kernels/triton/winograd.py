"""Convolution with fewer products along one axis (Winograd 1980; Lavin and Gray 2016, section 4) on matrix units.

Along the width, ``M`` results of r taps take n = M + r - 1 products in place of M r. What is packed is, for each tile
of ``M`` results, what its n inputs come to at n points, split into two fp16 planes as ``layout.py`` says: a row is
[points, planes, channels]. Filters are packed the same way, so that at each point the rest is a convolution along the
other axes, an implicit matrix product. Its sums go from point to point into the tile's ``M`` results while they are in
registers: no transformed result goes through memory, and the other axes' taps cost no more of it.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tilewise.kernels.triton.implicit_gemm import filter_rows, one_step, planes_of, steps_along, unscaled, write

__all__ = ["add_points", "tile_gemm", "transform"]


@triton.jit
def _transform(
    program, source, peaks, target, exponents, start, blocks, chunks, channels, depth, height, width, first, step,
    tiles, pitch_d, pitch_h, head, s_n, s_c, s_d, s_h, s_w, row_channels,
    MATRIX: tl.constexpr, INPUTS: tl.constexpr, SHIFT: tl.constexpr, CHUNKS: tl.constexpr, ALIGNED: tl.constexpr,
    BLOCK_C: tl.constexpr, POINTS: tl.constexpr, PER_IMAGE: tl.constexpr, BLOCK_P: tl.constexpr,
):  # fmt: skip
    """The part of :func:`transform` for one operand, by images * blocks programs; image ``start`` comes first."""
    image = program // blocks + start
    block = program % blocks
    p = block * BLOCK_P + tl.arange(0, BLOCK_P)
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    t, line = p % tiles, p // tiles
    h, d = line % pitch_h, line // pitch_h
    inside = (h < height) & (d < depth) & (image >= 0)
    place = d.to(tl.int64) * s_d + h.to(tl.int64) * s_h + image.to(tl.int64) * s_n
    if ALIGNED > 0:
        channels = channels // ALIGNED * ALIGNED  # the same number, which the compiler now knows to be a multiple
    chunk = tl.arange(0, CHUNKS)
    owner = tl.maximum(image, 0) if PER_IMAGE else 0
    largest = tl.max(tl.load(peaks + owner * chunks + chunk, mask=chunk < chunks, other=0), axis=0)
    exponent = tl.maximum(largest, 15)
    if (block == 0) & (tl.program_id(1) == 0) & (image >= 0):
        tl.store(exponents + owner, exponent + SHIFT)
    scale = ((268 - SHIFT - exponent) << 23).to(tl.float32, bitcast=True)
    values = ()
    for i in tl.static_range(INPUTS):
        w = first + t * step + i
        from_w = place + w.to(tl.int64) * s_w
        if ALIGNED > 0:
            pointers = source + (tl.multiple_of(from_w, ALIGNED)[:, None] + c[None, :])
        else:
            # Places first: knowing nothing of strides, Triton lets neighbouring threads read neighbouring places.
            pointers = source + (from_w[:, None] + (c.to(tl.int64) * s_c)[None, :])
        mask = (inside & (w >= 0) & (w < width))[:, None] & (c < channels)[None, :]
        values += (tl.load(pointers, mask=mask, other=0.0) * scale,)  # type: ignore[assignment]
    position = head + image.to(tl.int64) * (pitch_d * pitch_h * tiles) + p
    written = ((position >= 0) & (p < pitch_d * pitch_h * tiles))[:, None] & (c < row_channels)[None, :]
    rows = target + (position * (2 * POINTS * row_channels))[:, None] + c[None, :]
    for point in tl.static_range(POINTS):
        value = tl.zeros([BLOCK_P, BLOCK_C], tl.float32)
        for i in tl.static_range(INPUTS):
            if MATRIX[point * INPUTS + i] != 0.0:
                value += values[i] * MATRIX[point * INPUTS + i]
        hi = value.to(tl.float16)
        tl.store(rows, hi, mask=written)
        low = tl.where(tl.abs(value) < 65504.0, value - hi.to(tl.float32), 0.0)
        tl.store(rows + row_channels, low.to(tl.float16), mask=written)
        rows += 2 * row_channels


@triton.jit(
    do_not_specialize=[
        "programs",
        "a_start", "a_blocks", "a_chunks", "a_channels", "a_depth", "a_height", "a_width", "a_first", "a_step",
        "a_tiles", "a_pitch_d", "a_pitch_h", "a_head", "a_n", "a_c", "a_d", "a_h", "a_w",
        "b_start", "b_blocks", "b_chunks", "b_channels", "b_depth", "b_height", "b_width", "b_first", "b_step",
        "b_tiles", "b_pitch_d", "b_pitch_h", "b_head", "b_n", "b_c", "b_d", "b_h", "b_w",
    ]
)  # fmt: skip
def transform(
    a, a_peaks, a_target, a_exponents, b, b_peaks, b_target, b_exponents, programs,
    a_start, a_blocks, a_chunks, a_channels, a_depth, a_height, a_width, a_first, a_step, a_tiles, a_pitch_d, a_pitch_h,
    a_head, a_n, a_c, a_d, a_h, a_w, a_row_channels,
    b_start, b_blocks, b_chunks, b_channels, b_depth, b_height, b_width, b_first, b_step, b_tiles, b_pitch_d, b_pitch_h,
    b_head, b_n, b_c, b_d, b_h, b_w, b_row_channels,
    A_MATRIX: tl.constexpr, A_INPUTS: tl.constexpr, A_SHIFT: tl.constexpr, A_CHUNKS: tl.constexpr,
    A_ALIGNED: tl.constexpr, A_BLOCK_C: tl.constexpr,
    B_MATRIX: tl.constexpr, B_INPUTS: tl.constexpr, B_SHIFT: tl.constexpr, B_CHUNKS: tl.constexpr,
    B_ALIGNED: tl.constexpr, B_BLOCK_C: tl.constexpr,
    POINTS: tl.constexpr, PER_IMAGE: tl.constexpr, BLOCK_P: tl.constexpr,
):  # fmt: skip
    """Pack ``INPUTS`` neighbours along the width, of every tile, at ``POINTS`` points: ``MATRIX`` times them.

    Those of ``a`` by the first ``programs``, of ``b`` by those after them. Tile t begins at ``first + t * step``; what
    lies outside of ``width`` is zero. ``SHIFT`` is by how many powers of two the matrix may enlarge a value. ``peaks``
    holds ``chunks`` exponents for each image, or unless ``PER_IMAGE`` for all. Grid (images * blocks of both, channel
    blocks of the one that has more); image ``start`` comes first, -1 where ``head`` places of zeros lead. ``pitch_d``
    and ``pitch_h`` count planes and lines with their gaps. ``ALIGNED`` is 0, or where channels are innermost the
    elements of which ``channels`` and all other strides are multiples.
    """
    program = tl.program_id(0)
    if program < programs:
        _transform(program, a, a_peaks, a_target, a_exponents, a_start, a_blocks, a_chunks, a_channels, a_depth,
                   a_height, a_width, a_first, a_step, a_tiles, a_pitch_d, a_pitch_h, a_head, a_n, a_c, a_d, a_h, a_w,
                   a_row_channels, A_MATRIX, A_INPUTS, A_SHIFT, A_CHUNKS, A_ALIGNED, A_BLOCK_C,
                   POINTS, PER_IMAGE, BLOCK_P)  # fmt: skip
    else:
        _transform(program - programs, b, b_peaks, b_target, b_exponents, b_start, b_blocks, b_chunks, b_channels,
                   b_depth, b_height, b_width, b_first, b_step, b_tiles, b_pitch_d, b_pitch_h, b_head, b_n, b_c, b_d,
                   b_h, b_w, b_row_channels, B_MATRIX, B_INPUTS, B_SHIFT, B_CHUNKS, B_ALIGNED, B_BLOCK_C,
                   POINTS, PER_IMAGE, BLOCK_P)  # fmt: skip


@triton.jit
def _fold(part, point, acc_0, acc_1, acc_2, acc_3, VALUES: tl.constexpr, M: tl.constexpr):
    """Add the sums at one point to a tile's ``M`` results (2 or 4), times powers of the point; infinity adds only to
    the last.
    """
    value = 0.0
    for i in tl.static_range(len(VALUES)):
        value = tl.where(point == i, VALUES[i], value)
    endless = point == len(VALUES)
    acc_0 += tl.where(endless, 0.0, 1.0) * part
    if M > 2:
        acc_1 += value * part
        acc_2 += value * value * part
        acc_3 += tl.where(endless, 1.0, value * value * value) * part
    else:
        acc_1 += tl.where(endless, 1.0, value) * part
    return acc_0, acc_1, acc_2, acc_3


@triton.jit
def _places(q, places, tiles, height, depth, FLAT: tl.constexpr):
    """Tile, line, plane and image of places ``q``; those of the last place for all beyond it."""
    q = tl.minimum(q, places - 1)
    t, rest = q % tiles, q // tiles
    h, rest = rest % height, rest // height
    d, image = planes_of(rest, depth, FLAT)
    return t, h, d, image


@triton.jit
def _put(
    acc, first, EACH: tl.constexpr, begin, out, o, places, channels, depth, height, tiles, width,
    y_n, y_c, y_d, y_h, y_w, image_exponents, filter_exponents, bias,
    M: tl.constexpr, ACCUMULATE: tl.constexpr, BIAS: tl.constexpr, FLAT: tl.constexpr, WIDE: tl.constexpr,
    ALIGNED: tl.constexpr, BLOCK_P: tl.constexpr,
):  # fmt: skip
    """Results [channels ``o``, places * EACH] of places from ``begin`` on: of each ``EACH`` from its ``first`` on."""
    e = tl.arange(0, EACH * BLOCK_P)
    t, h, d, image = _places(begin + e // EACH, places, tiles, height, depth, FLAT)
    w = t * M + first + e % EACH
    if WIDE:
        place = image.to(tl.int64) * y_n + d.to(tl.int64) * y_d + h.to(tl.int64) * y_h + w.to(tl.int64) * y_w
    else:
        place = image * y_n + d * y_d + h * y_h + w * y_w
    valid = (begin + e // EACH < places) & (w < width)
    # A residual is left to a pass behind: read as this tile is written, it took an H200 up to 1.25 times as long.
    write(acc, out, o, channels, y_c, place, valid, image_exponents, filter_exponents, image, bias, out, True,
          ACCUMULATE, BIAS, False, "none", 0.0, 0.0, ALIGNED)  # fmt: skip


@triton.jit(
    do_not_specialize=[
        "places", "channels", "depth", "height", "tiles", "width", "steps", "taps_h", "y_n", "y_c", "y_d", "y_h", "y_w",
    ]
)  # fmt: skip
def tile_gemm(
    images, filters, image_exponents, filter_exponents, out, bias,
    places, channels, depth, height, tiles, width, x_n, x_d, x_h, x_t, steps, taps_h, xt_d, xt_h,
    f_row, ft_d, ft_h, row_channels, y_n, y_c, y_d, y_h, y_w,
    VALUES: tl.constexpr, M: tl.constexpr, ACCUMULATE: tl.constexpr, BIAS: tl.constexpr, FLAT: tl.constexpr,
    WIDE: tl.constexpr, ALIGNED: tl.constexpr, BLOCK_O: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_K: tl.constexpr,
    PROMOTE: tl.constexpr,
):  # fmt: skip
    """``channels`` results for each of ``places`` (images * depth * height * tiles, the last fastest), ``M`` a tile.

    ``VALUES`` are the finite points; one at infinity follows. ``x_*`` are elements between places in the packed images,
    ``xt_*`` and ``ft_*`` between taps in images and filters, ``f_row`` between filters. A point's ``steps`` along
    channels, then taps, are summed ``PROMOTE`` at a time; where that is 1, points follow one another in one loop, whose
    loads do not stop between them. A program computes ``BLOCK_O`` channels of ``BLOCK_P`` places, of which results
    right of ``width`` are not written. ``ALIGNED`` as in ``gather_gemm``. Grid: tiles, channels fastest.
    """
    if ALIGNED > 0:
        channels = channels // ALIGNED * ALIGNED
    tiles_o = tl.cdiv(channels, BLOCK_O)
    o = (tl.program_id(0) % tiles_o) * BLOCK_O + tl.arange(0, BLOCK_O)
    begin = (tl.program_id(0) // tiles_o) * BLOCK_P
    t, h, d, image = _places(begin + tl.arange(0, BLOCK_P), places, tiles, height, depth, FLAT)
    x_rows = images + (image * x_n + d * x_d + h * x_h + t * x_t)[:, None] + tl.arange(0, BLOCK_K)[None, :]
    f_rows = filter_rows(filters, o, channels, f_row, BLOCK_K)
    acc_0 = tl.zeros([BLOCK_O, BLOCK_P], tl.float32)
    acc_1 = tl.zeros([BLOCK_O, BLOCK_P], tl.float32)
    acc_2 = tl.zeros([BLOCK_O, BLOCK_P], tl.float32)
    acc_3 = tl.zeros([BLOCK_O, BLOCK_P], tl.float32)
    if PROMOTE > 1:
        for point in range(len(VALUES) + 1):
            c = 0
            t_w = 0
            t_h = 0
            x_tap = point * 2 * row_channels
            f_tap = point * 2 * row_channels
            for begun in range(0, steps, PROMOTE):
                part = tl.zeros([BLOCK_O, BLOCK_P], tl.float32)
                part, _, c, t_w, t_h, x_tap, f_tap = steps_along(
                    tl.minimum(PROMOTE, steps - begun), part, part, c, t_w, t_h, x_tap, f_tap, x_rows, f_rows, f_rows,
                    row_channels, taps_h, 1, xt_d, xt_h, 0, ft_d, ft_h, 0, 2, "ieee", 0, BLOCK_K,
                )  # fmt: skip
                acc_0, acc_1, acc_2, acc_3 = _fold(part, point, acc_0, acc_1, acc_2, acc_3, VALUES, M)
    else:
        point = 0
        k = 0
        c = 0
        t_w = 0
        t_h = 0
        x_tap = 0
        f_tap = 0
        for _ in range(steps * (len(VALUES) + 1)):
            part = tl.zeros([BLOCK_O, BLOCK_P], tl.float32)
            part, _, c, t_w, t_h, x_tap, f_tap = one_step(
                part, part, c, t_w, t_h, x_tap, f_tap, x_rows, f_rows, f_rows,
                row_channels, taps_h, 1, xt_d, xt_h, 0, ft_d, ft_h, 0, 2, "ieee", 0, BLOCK_K,
            )  # fmt: skip
            acc_0, acc_1, acc_2, acc_3 = _fold(part, point, acc_0, acc_1, acc_2, acc_3, VALUES, M)
            k += 1
            ended = k == steps
            k = tl.where(ended, 0, k)
            point += tl.where(ended, 1, 0)
            x_tap = tl.where(ended, point * 2 * row_channels, x_tap)
            f_tap = tl.where(ended, point * 2 * row_channels, f_tap)
    if ALIGNED > 0:
        # Channels are innermost: in one, as below, results would spill on their way to neighbouring threads.
        for j in tl.static_range(M):
            acc = acc_0 if j == 0 else acc_1 if j == 1 else acc_2 if j == 2 else acc_3
            _put(acc, j, 1, begin, out, o, places, channels, depth, height, tiles, width, y_n, y_c, y_d, y_h, y_w,
                 image_exponents, filter_exponents, bias, M, ACCUMULATE, BIAS, FLAT, WIDE, ALIGNED,
                 BLOCK_P)  # fmt: skip
    else:
        # A tile's results side by side, so that neighbouring threads write neighbours.
        if M == 4:
            acc = tl.join(tl.join(acc_0, acc_2), tl.join(acc_1, acc_3))
        else:
            acc = tl.join(acc_0, acc_1)
        _put(tl.reshape(acc, (BLOCK_O, M * BLOCK_P)), 0, M, begin, out, o, places, channels, depth, height, tiles,
             width, y_n, y_c, y_d, y_h, y_w, image_exponents, filter_exponents, bias, M, ACCUMULATE, BIAS, FLAT, WIDE,
             ALIGNED, BLOCK_P)  # fmt: skip


@triton.jit(
    do_not_specialize=["splits", "in_channels", "taps_h", "w_o", "w_c", "w_d", "w_h", "w_w"],
)
def add_points(
    partials, image_exponents, gradient_exponents, out,
    splits, columns, x_channels, in_channels, total, taps_h, w_o, w_c, w_d, w_h, w_w,
    MATRIX: tl.constexpr, POINTS: tl.constexpr, TAPS: tl.constexpr, ACCUMULATE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The filter's gradient from ``splits`` partial sums at each point, in order, of ``total`` elements each.

    ``partials`` are [points, splits, channels, columns], ``MATRIX`` [POINTS, TAPS] brings them to taps along the width.
    Grid (blocks,).
    """
    e = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    source = partials + e
    sums = ()
    for _ in tl.static_range(POINTS):
        acc = tl.zeros([BLOCK], tl.float32)
        for _ in range(splits):
            acc += tl.load(source, mask=e < total, other=0.0)
            source += total
        sums += (acc,)  # type: ignore[assignment]
    o, n = e // columns, e % columns
    line, c = n // x_channels, n % x_channels
    t_h, t_d = line % taps_h, line // taps_h
    exponent = tl.load(image_exponents) + tl.load(gradient_exponents) - 282
    place = o.to(tl.int64) * w_o + c.to(tl.int64) * w_c + t_d.to(tl.int64) * w_d + t_h.to(tl.int64) * w_h
    mask = (e < total) & (c < in_channels)
    for tap in tl.static_range(TAPS):
        value = tl.zeros([BLOCK], tl.float32)
        for point in tl.static_range(POINTS):
            if MATRIX[point * TAPS + tap] != 0.0:
                value += sums[point] * MATRIX[point * TAPS + tap]
        value = unscaled(value, exponent)
        pointers = out + place + tap * w_w.to(tl.int64)
        if ACCUMULATE:
            value += tl.load(pointers, mask=mask, other=0.0).to(tl.float32)
        tl.store(pointers, value.to(out.dtype.element_ty), mask=mask)
