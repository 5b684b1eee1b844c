"""Convolution as one matrix product whose operand is gathered while it runs (Chetlur et al. 2014, section 3).

Operands come packed (see ``layout.py``): a tap is then a constant offset from a pixel's own position, borders read
zeros, and every load is contiguous along channels. With two planes an fp32 product is three fp16 products summed in
fp32, hi*lo + lo*hi + hi*hi, whose error is that of fp32 arithmetic (Ootomo and Yokota 2022, section 3). Matrix units
round their sums towards zero, an error that grows with their length: after ``PROMOTE`` steps (0: never) a sum is added
to another outside of them (section 4 there).
"""

from __future__ import annotations

import triton
import triton.language as tl

from tilewise.kernels.triton.gemm.activations import activated

__all__ = [
    "add_partials", "filter_rows", "gather_gemm", "gradient_gemm", "one_step", "planes_of", "steps_along", "unscaled",
    "write",
]  # fmt: skip


@triton.jit
def planes_of(planes, depth, FLAT: tl.constexpr):
    """Depth and image of plane numbers. With ``FLAT`` images have one plane."""
    if FLAT:
        return planes * 0, planes
    return planes % depth, planes // depth


@triton.jit
def _power(exponent):
    """2^exponent as fp32, made from its bits."""
    return ((exponent + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def unscaled(acc, exponent):
    """``acc`` times 2^exponent, in two steps because the power alone may be out of range."""
    half = exponent >> 1
    return acc * _power(half) * _power(exponent - half)


@triton.jit
def _products(acc, a, b, a_low, b_low, PLANES: tl.constexpr, PRECISION: tl.constexpr):
    """``acc`` plus the products of one step, of one or two planes."""
    if PLANES == 2:
        acc = tl.dot(a_low, b, acc)
        acc = tl.dot(a, b_low, acc)
        acc = tl.dot(a, b, acc)
    else:
        acc = tl.dot(a, b, acc, input_precision=PRECISION)
    return acc


@triton.jit
def filter_rows(filters, o, channels, f_row, BLOCK_K: tl.constexpr):
    """Addresses of the first ``BLOCK_K`` elements of filters ``o``; beyond the last, of the first ones again.

    Not of the last one, at which the memory of one address would have to serve every program.
    """
    return filters + (o % channels)[:, None] * f_row + tl.arange(0, BLOCK_K)[None, :]


@triton.jit
def _sides(values):
    """The first and the second half of the last dimension."""
    if len(values.shape) == 2:
        pairs = tl.permute(tl.reshape(values, (values.shape[0], 2, values.shape[1] // 2)), (0, 2, 1))
    else:
        pairs = tl.permute(tl.reshape(values, (2, values.shape[0] // 2)), (1, 0))
    return tl.split(pairs)


@triton.jit
def _write(
    acc, out, o, channels, y_c, place, valid, image_exponents, filter_exponents, image, bias, residual,
    SCALED: tl.constexpr, ACCUMULATE: tl.constexpr, BIAS: tl.constexpr, RESIDUAL: tl.constexpr,
    ACTIVATION: tl.constexpr, FIRST: tl.constexpr, SECOND: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Write a tile of results."""
    # Pixels first: where nothing is known of strides, Triton lets neighbouring threads walk the first dimension.
    acc = acc.T
    mask = valid[:, None] & (o < channels)[None, :]
    if SCALED:
        e_image = tl.load(image_exponents + image)
        e_filter = tl.load(filter_exponents + tl.minimum(o, channels - 1))
        acc = unscaled(acc, e_image[:, None] + e_filter[None, :] - 282)
    if BIAS:
        acc += tl.load(bias + tl.minimum(o, channels - 1)).to(tl.float32)[None, :]
    if ALIGNED > 0:
        # By arithmetic: what is said of a parameter by ``multiple_of`` is lost with the function's call.
        place = place // ALIGNED * ALIGNED
        at = place[:, None] + o.to(place.dtype)[None, :]
    else:
        at = place[:, None] + (o.to(place.dtype) * y_c)[None, :]
    pointers = out + at
    if ACCUMULATE:
        acc += tl.load(pointers, mask=mask, other=0.0).to(tl.float32)
    if RESIDUAL:
        acc += tl.load(residual + at, mask=mask, other=0.0).to(tl.float32)
    acc = activated(acc, ACTIVATION, FIRST, SECOND, out.dtype.element_ty.primitive_bitwidth)
    tl.store(pointers, acc.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _write_parts(
    acc, out, o, channels, y_c, place, valid, image_exponents, filter_exponents, image, bias, residual,
    SCALED: tl.constexpr, ACCUMULATE: tl.constexpr, BIAS: tl.constexpr, RESIDUAL: tl.constexpr,
    ACTIVATION: tl.constexpr, FIRST: tl.constexpr, SECOND: tl.constexpr, ALIGNED: tl.constexpr, HALVED: tl.constexpr,
):  # fmt: skip
    """Write a tile whose places are ``HALVED`` so many times, part by part."""
    if HALVED == 0:
        _write(acc, out, o, channels, y_c, place, valid, image_exponents, filter_exponents, image, bias, residual,
               SCALED, ACCUMULATE, BIAS, RESIDUAL, ACTIVATION, FIRST, SECOND, ALIGNED)  # fmt: skip
        tl.debug_barrier()  # or the compiler would read for the next part before this one is written
    else:
        acc_0, acc_1 = _sides(acc)
        place_0, place_1 = _sides(place)
        valid_0, valid_1 = _sides(valid)
        image_0, image_1 = _sides(image)
        _write_parts(acc_0, out, o, channels, y_c, place_0, valid_0, image_exponents, filter_exponents, image_0, bias,
                     residual, SCALED, ACCUMULATE, BIAS, RESIDUAL, ACTIVATION, FIRST, SECOND, ALIGNED,
                     HALVED - 1)  # fmt: skip
        _write_parts(acc_1, out, o, channels, y_c, place_1, valid_1, image_exponents, filter_exponents, image_1, bias,
                     residual, SCALED, ACCUMULATE, BIAS, RESIDUAL, ACTIVATION, FIRST, SECOND, ALIGNED,
                     HALVED - 1)  # fmt: skip


@triton.jit
def write(
    acc, out, o, channels, y_c, place, valid, image_exponents, filter_exponents, image, bias, residual,
    SCALED: tl.constexpr, ACCUMULATE: tl.constexpr, BIAS: tl.constexpr, RESIDUAL: tl.constexpr,
    ACTIVATION: tl.constexpr, FIRST: tl.constexpr, SECOND: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Results ``acc`` [channels ``o``, places] where they belong, back at the operands' scale.

    ``BIAS`` adds to each channel its number of ``bias``, ``RESIDUAL`` to each result the number of ``residual``, which
    lies as ``out`` does. The activation follows.
    """
    # In quarters or eighths: what is added would be read all at once, and there are no registers to hold it.
    if RESIDUAL and out.dtype.element_ty.primitive_bitwidth == 32:
        _write_parts(acc, out, o, channels, y_c, place, valid, image_exponents, filter_exponents, image, bias, residual,
                     SCALED, ACCUMULATE, BIAS, RESIDUAL, ACTIVATION, FIRST, SECOND, ALIGNED, 3)  # fmt: skip
    elif ACCUMULATE or RESIDUAL or ACTIVATION == "gelu":
        _write_parts(acc, out, o, channels, y_c, place, valid, image_exponents, filter_exponents, image, bias, residual,
                     SCALED, ACCUMULATE, BIAS, RESIDUAL, ACTIVATION, FIRST, SECOND, ALIGNED, 2)  # fmt: skip
    else:
        _write(acc, out, o, channels, y_c, place, valid, image_exponents, filter_exponents, image, bias, residual,
               SCALED, ACCUMULATE, BIAS, RESIDUAL, ACTIVATION, FIRST, SECOND, ALIGNED)  # fmt: skip


@triton.jit
def one_step(
    acc, acc_more, c, t_w, t_h, x_tap, f_tap, x_rows, f_rows, f_more, row_channels,
    taps_h, taps_w, xt_d, xt_h, xt_w, ft_d, ft_h, ft_w,
    PLANES: tl.constexpr, PRECISION: tl.constexpr, MORE_O: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Add the products of ``BLOCK_K`` channels of one tap, and move on to the next channels or tap."""
    x = tl.load(x_rows + x_tap).T
    f = tl.load(f_rows + f_tap)
    x_low = x
    f_low = f
    if PLANES == 2:
        x_low = tl.load(x_rows + (x_tap + row_channels)).T
        f_low = tl.load(f_rows + (f_tap + row_channels))
    acc = _products(acc, f, x, f_low, x_low, PLANES, PRECISION)
    if MORE_O > 0:
        g = tl.load(f_more + f_tap)
        g_low = g
        if PLANES == 2:
            g_low = tl.load(f_more + (f_tap + row_channels))
        acc_more = _products(acc_more, g, x, g_low, x_low, PLANES, PRECISION)
    c += BLOCK_K
    end = c == row_channels
    c = tl.where(end, 0, c)
    x_tap += tl.where(end, xt_w - row_channels + BLOCK_K, BLOCK_K)
    f_tap += tl.where(end, ft_w - row_channels + BLOCK_K, BLOCK_K)
    t_w += tl.where(end, 1, 0)
    end = t_w == taps_w
    t_w = tl.where(end, 0, t_w)
    x_tap += tl.where(end, xt_h - taps_w * xt_w, 0)
    f_tap += tl.where(end, ft_h - taps_w * ft_w, 0)
    t_h += tl.where(end, 1, 0)
    end = t_h == taps_h
    t_h = tl.where(end, 0, t_h)
    x_tap += tl.where(end, xt_d - taps_h * xt_h, 0)
    f_tap += tl.where(end, ft_d - taps_h * ft_h, 0)
    return acc, acc_more, c, t_w, t_h, x_tap, f_tap


@triton.jit
def steps_along(
    count, acc, acc_more, c, t_w, t_h, x_tap, f_tap, x_rows, f_rows, f_more, row_channels,
    taps_h, taps_w, xt_d, xt_h, xt_w, ft_d, ft_h, ft_w,
    PLANES: tl.constexpr, PRECISION: tl.constexpr, MORE_O: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Add the products of ``count`` steps along channels, then taps, from where the last ones ended."""
    for _ in range(count):
        acc, acc_more, c, t_w, t_h, x_tap, f_tap = one_step(
            acc, acc_more, c, t_w, t_h, x_tap, f_tap, x_rows, f_rows, f_more, row_channels,
            taps_h, taps_w, xt_d, xt_h, xt_w, ft_d, ft_h, ft_w, PLANES, PRECISION, MORE_O, BLOCK_K,
        )  # fmt: skip
    return acc, acc_more, c, t_w, t_h, x_tap, f_tap


@triton.jit(
    do_not_specialize=[
        "pixels", "channels", "depth", "height", "width", "steps", "taps_h", "taps_w",
        "y_n", "y_c", "y_d", "y_h", "y_w",
    ]
)  # fmt: skip
def gather_gemm(
    images, filters, image_exponents, filter_exponents, out, bias, residual,
    pixels, channels, depth, height, width, x_n, x_d, x_h, x_w, steps, taps_h, taps_w, xt_d, xt_h, xt_w,
    f_row, ft_d, ft_h, ft_w, row_channels, y_n, y_c, y_d, y_h, y_w,
    PLANES: tl.constexpr, SCALED: tl.constexpr, PRECISION: tl.constexpr,
    ACCUMULATE: tl.constexpr, BIAS: tl.constexpr, RESIDUAL: tl.constexpr, ACTIVATION: tl.constexpr,
    FIRST: tl.constexpr, SECOND: tl.constexpr, FLAT: tl.constexpr, WIDE: tl.constexpr, ALIGNED: tl.constexpr,
    BLOCK_O: tl.constexpr, MORE_O: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_K: tl.constexpr, PROMOTE: tl.constexpr,
):  # fmt: skip
    """``channels`` results for each of ``pixels`` (images * depth * height * width, the last fastest).

    ``x_*`` are elements between pixels in the packed images, ``xt_*`` and ``ft_*`` between taps in images and filters,
    ``f_row`` between filters; ``row_channels`` is a multiple of ``BLOCK_K``. A program computes ``BLOCK_O + MORE_O``
    channels of ``BLOCK_P`` pixels. ``ALIGNED`` is 0, or where the result's channels are innermost the elements of which
    ``channels`` and all other strides are multiples. Grid: tiles, channels fastest, so that programs that run together
    share pixels.
    """
    if ALIGNED > 0:
        channels = channels // ALIGNED * ALIGNED  # the same number, which the compiler now knows to be a multiple
    tiles_o = tl.cdiv(channels, BLOCK_O + MORE_O)
    o = (tl.program_id(0) % tiles_o) * (BLOCK_O + MORE_O) + tl.arange(0, BLOCK_O)
    q = (tl.program_id(0) // tiles_o) * BLOCK_P + tl.arange(0, BLOCK_P)
    valid = q < pixels
    q = tl.minimum(q, pixels - 1)
    w, rest = q % width, q // width
    h, rest = rest % height, rest // height
    d, image = planes_of(rest, depth, FLAT)
    x_rows = images + (image * x_n + d * x_d + h * x_h + w * x_w)[:, None] + tl.arange(0, BLOCK_K)[None, :]
    f_rows = filter_rows(filters, o, channels, f_row, BLOCK_K)
    acc = tl.zeros([BLOCK_O, BLOCK_P], tl.float32)
    f_more = f_rows
    acc_more = acc
    if MORE_O > 0:
        o_more = (tl.program_id(0) % tiles_o) * (BLOCK_O + MORE_O) + BLOCK_O + tl.arange(0, MORE_O)
        f_more = filter_rows(filters, o_more, channels, f_row, BLOCK_K)
        acc_more = tl.zeros([MORE_O, BLOCK_P], tl.float32)
    c = 0
    t_w = 0
    t_h = 0
    x_tap = 0
    f_tap = 0
    if PROMOTE == 0:
        acc, acc_more, c, t_w, t_h, x_tap, f_tap = steps_along(
            steps, acc, acc_more, c, t_w, t_h, x_tap, f_tap, x_rows, f_rows, f_more, row_channels,
            taps_h, taps_w, xt_d, xt_h, xt_w, ft_d, ft_h, ft_w, PLANES, PRECISION, MORE_O, BLOCK_K,
        )  # fmt: skip
    else:
        for first in range(0, steps, PROMOTE):
            part = tl.zeros([BLOCK_O, BLOCK_P], tl.float32)
            part, _, c, t_w, t_h, x_tap, f_tap = steps_along(
                tl.minimum(PROMOTE, steps - first), part, part, c, t_w, t_h, x_tap, f_tap, x_rows, f_rows, f_more,
                row_channels, taps_h, taps_w, xt_d, xt_h, xt_w, ft_d, ft_h, ft_w, PLANES, PRECISION, 0, BLOCK_K,
            )  # fmt: skip
            acc += part
    if WIDE:
        place = image.to(tl.int64) * y_n + d.to(tl.int64) * y_d + h.to(tl.int64) * y_h + w.to(tl.int64) * y_w
    else:
        place = image * y_n + d * y_d + h * y_h + w * y_w
    write(acc, out, o, channels, y_c, place, valid, image_exponents, filter_exponents, image, bias, residual,
          SCALED, ACCUMULATE, BIAS, RESIDUAL, ACTIVATION, FIRST, SECOND, ALIGNED)  # fmt: skip
    if MORE_O > 0:
        write(acc_more, out, o_more, channels, y_c, place, valid, image_exponents, filter_exponents, image, bias,
              residual, SCALED, ACCUMULATE, BIAS, RESIDUAL, ACTIVATION, FIRST, SECOND, ALIGNED)  # fmt: skip


@triton.jit(
    do_not_specialize=["pixels", "share", "again", "channels", "depth", "height", "width", "taps_h", "taps_w"],
)
def gradient_gemm(
    images, gradients, partials,
    pixels, share, again, channels, columns, depth, height, width, x_n, x_d, x_h, x_w, taps_h, taps_w, xt_d, xt_h, xt_w,
    g_row, g_channels, x_channels, x_point, g_point,
    FLAT: tl.constexpr, PLANES: tl.constexpr, BLOCK_O: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, PROMOTE: tl.constexpr,
):  # fmt: skip
    """Sums over ``share`` pixels of gradient times image, into ``partials`` [splits, channels, columns] in fp32.

    A column is a tap and an image channel, ``columns = taps * x_channels``. ``again`` adds to what is there. Both
    operands are stored with channels innermost and meet transposed in shared memory. Grid (tiles, splits, points), of
    which each has partial sums of its own, from operands ``x_point`` and ``g_point`` elements further on.
    """
    images += tl.program_id(2) * x_point
    gradients += tl.program_id(2) * g_point
    tiles_o = tl.cdiv(channels, BLOCK_O)
    o = (tl.program_id(0) % tiles_o) * BLOCK_O + tl.arange(0, BLOCK_O)
    n = (tl.program_id(0) // tiles_o) * BLOCK_N + tl.arange(0, BLOCK_N)
    split = tl.program_id(1)
    shares = tl.program_id(2) * tl.num_programs(1) + split
    tap, c = n // x_channels, n % x_channels
    t_w, line = tap % taps_w, tap // taps_w
    t_h, t_d = line % taps_h, line // taps_h
    column = t_d * xt_d + t_h * xt_h + t_w * xt_w + c
    # Columns beyond the last read some other column, channels beyond the last the next row: neither is written.
    column = tl.max_contiguous(tl.multiple_of(tl.where(n < columns, column, c), 16), 16)
    target = partials + ((shares.to(tl.int64) * channels + o) * columns)[:, None] + n[None, :]
    mask = (o < channels)[:, None] & (n < columns)[None, :]
    acc = tl.zeros([BLOCK_O, BLOCK_N], tl.float32)
    start = split * share
    stop = tl.minimum(start + share, pixels)
    for first in range(start, stop, PROMOTE * BLOCK_K):
        part = tl.zeros([BLOCK_O, BLOCK_N], tl.float32)
        for k0 in range(first, tl.minimum(first + PROMOTE * BLOCK_K, stop), BLOCK_K):
            k = k0 + tl.arange(0, BLOCK_K)
            some = (k < stop)[:, None]
            g_rows = gradients + (k * g_row)[:, None] + o[None, :]
            k = tl.minimum(k, pixels - 1)
            w, rest = k % width, k // width
            h, rest = rest % height, rest // height
            d, image = planes_of(rest, depth, FLAT)
            x_rows = images + (image * x_n + d * x_d + h * x_h + w * x_w)[:, None] + column[None, :]
            g = tl.load(g_rows, mask=some, other=0.0).T
            x = tl.load(x_rows)
            g_low = g
            x_low = x
            if PLANES == 2:
                g_low = tl.load(g_rows + g_channels, mask=some, other=0.0).T
                x_low = tl.load(x_rows + x_channels)
            part = _products(part, g, x, g_low, x_low, PLANES, "ieee")
        acc += part
    acc += tl.load(target, mask=mask & (again != 0), other=0.0)
    tl.store(target, acc, mask=mask)


@triton.jit(
    do_not_specialize=["splits", "in_channels", "taps_h", "taps_w", "w_o", "w_c", "w_d", "w_h", "w_w"],
)
def add_partials(
    partials, image_exponents, gradient_exponents, out,
    splits, columns, x_channels, in_channels, total, taps_h, taps_w, w_o, w_c, w_d, w_h, w_w,
    SCALED: tl.constexpr, ACCUMULATE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The filter gradient from ``splits`` partial sums of ``total`` elements, added in order. Grid (blocks,)."""
    e = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    acc = tl.zeros([BLOCK], tl.float32)
    source = partials + e
    for _ in range(splits):
        acc += tl.load(source, mask=e < total, other=0.0)
        source += total
    o, n = e // columns, e % columns
    tap, c = n // x_channels, n % x_channels
    t_w, line = tap % taps_w, tap // taps_w
    t_h, t_d = line % taps_h, line // taps_h
    if SCALED:
        acc = unscaled(acc, tl.load(image_exponents) + tl.load(gradient_exponents) - 282)
    place = o.to(tl.int64) * w_o + c.to(tl.int64) * w_c + t_d.to(tl.int64) * w_d + t_h.to(tl.int64) * w_h
    pointers = out + place + t_w.to(tl.int64) * w_w
    mask = (e < total) & (c < in_channels)
    if ACCUMULATE:
        acc += tl.load(pointers, mask=mask, other=0.0).to(tl.float32)
    tl.store(pointers, acc.to(out.dtype.element_ty), mask=mask)
