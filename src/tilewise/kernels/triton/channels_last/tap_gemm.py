"""Convolution as one matrix product over tensors as they lie, with channels innermost (Chetlur et al. 2014, section 3).

A sum runs over taps and, within each, over channels. Of a tap a tile of pixels needs one run of channels from each of
its pixels' neighbours, which is read where it lies; what is beyond the image is read as zero. Gradients of images with
strides fall into phases: pixels at the same place modulo the stride meet the same taps. All phases are one launch.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["tap_gradient", "tap_product"]


@triton.jit
def _sweep(phase, before, stride, dilation, kernel, every, BACK: tl.constexpr):
    """Where results along an axis read: first place, places to the next result, taps, places to the next tap.

    Then the first tap and taps to the next one. With ``BACK`` of the results at ``phase`` modulo the stride, which use
    one of ``every`` taps.
    """
    if BACK:
        tap = kernel
        for r in range(tl.minimum(every, kernel)):
            hits = (phase + before - r * dilation) % stride == 0
            tap = tl.where(hits & (tap == kernel), r, tap)
        taps = (kernel - tap + every - 1) // every
        return (phase + before - tap * dilation) // stride, 1, taps, -(every * dilation // stride), tap, every
    else:
        return -before, stride, kernel, dilation, 0, 1


@triton.jit
def _within(i, size):
    """Whether 0 <= i < size, as one comparison."""
    return i.to(tl.uint32) < size.to(tl.uint32)


@triton.jit
def _quotient(i, magic, shift):
    """``i`` by a divisor: numbers ``magic`` and ``shift`` are such that this is exact below 2^30."""
    return (tl.umulhi(i.to(tl.uint32) << 2, magic.to(tl.uint32)) >> shift.to(tl.uint32)).to(tl.int32)


@triton.jit(
    do_not_specialize=[
        "pixels", "channels", "summed", "steps_c", "depth", "height", "width", "out_d", "out_h", "out_w",
        "before_d", "before_h", "before_w", "stride_d", "stride_h", "stride_w", "dil_d", "dil_h", "dil_w",
        "taps_d", "taps_h", "taps_w", "every_d", "every_h", "every_w", "x_n", "x_c", "x_d", "x_h", "x_w",
        "f_n", "f_c", "f_d", "f_h", "f_w", "f_group", "y_n", "y_c", "y_d", "y_h", "y_w",
    ]
)  # fmt: skip
def tap_product(
    source, filters, out, bias,
    pixels, channels, summed, steps_c, depth, height, width, out_d, out_h, out_w,
    before_d, before_h, before_w, stride_d, stride_h, stride_w, dil_d, dil_h, dil_w,
    taps_d, taps_h, taps_w, every_d, every_h, every_w, x_n, x_c, x_d, x_h, x_w,
    f_n, f_c, f_d, f_h, f_w, f_group, y_n, y_c, y_d, y_h, y_w,
    BACK: tl.constexpr, X_RUN: tl.constexpr, F_RUN: tl.constexpr, F_INNER: tl.constexpr, Y_RUN: tl.constexpr,
    EVEN: tl.constexpr, BIAS: tl.constexpr, ACCUMULATE: tl.constexpr,
    BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """``channels`` results for each of at most ``pixels`` per phase, from ``summed`` channels in ``steps_c`` steps.

    Strides ``x_*`` are the gathered tensor's, ``f_n`` and ``f_c`` the filter's along results and sums. ``*_RUN``: where
    channels (of the filter with ``F_INNER`` those that are summed) are innermost what divides their number and all
    other strides, else 1. ``EVEN``: steps divide sums. Grid (tiles, groups): of tiles channels go fastest, then phases.
    """
    if X_RUN > 1:
        summed = summed // X_RUN * X_RUN  # the same number, which the compiler now knows to be a multiple
    if Y_RUN > 1:
        channels = channels // Y_RUN * Y_RUN
    tiles_n = tl.cdiv(channels, BLOCK_N)
    group = tl.program_id(1)
    n = tl.program_id(0) % tiles_n * BLOCK_N + tl.arange(0, BLOCK_N)
    rest = tl.program_id(0) // tiles_n
    phase_d = 0
    phase_h = 0
    phase_w = 0
    if BACK:
        phase_w, rest = rest % stride_w, rest // stride_w
        phase_h, rest = rest % stride_h, rest // stride_h
        phase_d, rest = rest % stride_d, rest // stride_d
    start_d, step_d, count_d, tap_d, first_d, next_d = _sweep(phase_d, before_d, stride_d, dil_d, taps_d, every_d, BACK)
    start_h, step_h, count_h, tap_h, first_h, next_h = _sweep(phase_h, before_h, stride_h, dil_h, taps_h, every_h, BACK)
    start_w, step_w, count_w, tap_w, first_w, next_w = _sweep(phase_w, before_w, stride_w, dil_w, taps_w, every_w, BACK)
    if BACK:
        pixels = pixels // (out_d * out_h * out_w)
        out_d = (out_d - phase_d + stride_d - 1) // stride_d
        out_h = (out_h - phase_h + stride_h - 1) // stride_h
        out_w = (out_w - phase_w + stride_w - 1) // stride_w
        pixels *= tl.maximum(out_d, 0) * tl.maximum(out_h, 0) * tl.maximum(out_w, 0)
        out_d = tl.maximum(out_d, 1)
        out_h = tl.maximum(out_h, 1)
        out_w = tl.maximum(out_w, 1)
    q = rest * BLOCK_P + tl.arange(0, BLOCK_P)
    valid = q < pixels
    w, q = q % out_w, q // out_w
    h, q = q % out_h, q // out_h
    d, image = q % out_d, q // out_d
    at_d = start_d + d * step_d
    at_h = start_h + h * step_h
    at_w = start_w + w * step_w
    k = tl.arange(0, BLOCK_K)
    place = image * x_n + at_d * x_d + at_h * x_h + at_w * x_w
    source += group * summed * x_c
    if X_RUN > 1:
        rows = source + (place // X_RUN * X_RUN)[:, None] + k[None, :]
    else:
        rows = source + place[:, None] + (k * x_c)[None, :]
    filters += (group * f_group + first_d * f_d + first_h * f_h + first_w * f_w) // F_RUN * F_RUN
    if F_RUN > 1:
        if F_INNER:
            taps = filters + (n * (f_n // F_RUN * F_RUN))[:, None] + k[None, :]
        else:
            taps = filters + (k * (f_c // F_RUN * F_RUN))[:, None] + n[None, :]
    elif F_INNER:
        taps = filters + (n * f_n)[:, None] + (k * f_c)[None, :]
    else:
        taps = filters + (k * f_c)[:, None] + (n * f_n)[None, :]
    acc = tl.zeros([BLOCK_P, BLOCK_N], tl.float32)
    c = 0
    t_w = 0
    t_h = 0
    t_d = 0
    for _ in range(count_d * count_h * count_w * steps_c):
        inside = valid & _within(at_d + t_d * tap_d, depth) & _within(at_h + t_h * tap_h, height)
        inside = (inside & _within(at_w + t_w * tap_w, width))[:, None]
        x_at = t_d * tap_d * x_d + t_h * tap_h * x_h + t_w * tap_w * x_w + c * x_c
        f_at = t_d * next_d * f_d + t_h * next_h * f_h + t_w * next_w * f_w + c * f_c
        x_at = x_at // X_RUN * X_RUN
        f_at = f_at // F_RUN * F_RUN
        known = tl.max_constancy(c + k < summed, [X_RUN])
        if EVEN:
            x = tl.load(rows + x_at, mask=inside, other=0.0)
        else:
            x = tl.load(rows + x_at, mask=inside & known[None, :], other=0.0)
        if F_INNER:
            if EVEN:
                f = tl.load(taps + f_at, mask=(n < channels)[:, None], other=0.0).T
            else:
                f = tl.load(taps + f_at, mask=(n < channels)[:, None] & known[None, :], other=0.0).T
        else:
            if EVEN:
                f = tl.load(taps + f_at, mask=(n < channels)[None, :], other=0.0)
            else:
                f = tl.load(taps + f_at, mask=(n < channels)[None, :] & known[:, None], other=0.0)
        acc = tl.dot(x, f, acc)
        c += BLOCK_K
        end = c >= summed
        c = tl.where(end, 0, c)
        t_w += tl.where(end, 1, 0)
        end = t_w == count_w
        t_w = tl.where(end, 0, t_w)
        t_h += tl.where(end, 1, 0)
        end = t_h == count_h
        t_h = tl.where(end, 0, t_h)
        t_d += tl.where(end, 1, 0)
    if BIAS:
        acc += tl.load(bias + group * channels + tl.minimum(n, channels - 1)).to(tl.float32)[None, :]
    if BACK:
        d = phase_d + d * stride_d
        h = phase_h + h * stride_h
        w = phase_w + w * stride_w
    place = image * y_n + d * y_d + h * y_h + w * y_w
    out += group * channels * y_c
    if Y_RUN > 1:
        target = out + (place // Y_RUN * Y_RUN)[:, None] + n[None, :]
    else:
        target = out + place[:, None] + (n * y_c)[None, :]
    mask = valid[:, None] & (n < channels)[None, :]
    if ACCUMULATE:
        acc += tl.load(target, mask=mask, other=0.0).to(tl.float32)
    tl.store(target, acc.to(out.dtype.element_ty), mask=mask)


@triton.jit(
    do_not_specialize=[
        "pixels", "share", "channels", "summed", "columns", "depth", "height", "width", "out_d", "out_h", "out_w",
        "magic_d", "magic_h", "magic_w", "shift_d", "shift_h", "shift_w",
        "before_d", "before_h", "before_w", "stride_d", "stride_h", "stride_w", "dil_d", "dil_h", "dil_w",
        "taps_h", "taps_w", "x_n", "x_c", "x_d", "x_h", "x_w", "y_n", "y_c", "y_d", "y_h", "y_w",
        "w_o", "w_c", "w_d", "w_h", "w_w",
    ]
)  # fmt: skip
def tap_gradient(
    image, gradient, out,
    pixels, share, channels, summed, columns, depth, height, width, out_d, out_h, out_w,
    magic_d, magic_h, magic_w, shift_d, shift_h, shift_w,
    before_d, before_h, before_w, stride_d, stride_h, stride_w, dil_d, dil_h, dil_w,
    taps_h, taps_w, x_n, x_c, x_d, x_h, x_w, y_n, y_c, y_d, y_h, y_w, w_o, w_c, w_d, w_h, w_w,
    X_RUN: tl.constexpr, Y_RUN: tl.constexpr, SPLIT: tl.constexpr, ACCUMULATE: tl.constexpr,
    BLOCK_O: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_P: tl.constexpr,
):  # fmt: skip
    """The filter's gradient, ``channels`` by ``columns`` (a tap and one of ``summed``), from ``share`` pixels.

    With ``SPLIT`` partial sums [shares, groups, channels, columns] are written, else the filter itself. Numbers
    ``magic_*`` and ``shift_*`` divide by ``out_*``. Grid (tiles, shares, groups).
    """
    if Y_RUN > 1:
        channels = channels // Y_RUN * Y_RUN
    if X_RUN > 1:
        summed = summed // X_RUN * X_RUN
    tiles_o = tl.cdiv(channels, BLOCK_O)
    o = tl.program_id(0) % tiles_o * BLOCK_O + tl.arange(0, BLOCK_O)
    n = tl.program_id(0) // tiles_o * BLOCK_N + tl.arange(0, BLOCK_N)
    group = tl.program_id(2)
    image += group * summed * x_c
    gradient += group * channels * y_c
    tap, c = n // summed, n % summed
    t_w, line = tap % taps_w, tap // taps_w
    t_h, t_d = line % taps_h, line // taps_h
    d_n = t_d * dil_d - before_d
    h_n = t_h * dil_h - before_h
    w_n = t_w * dil_w - before_w
    if X_RUN > 1:
        # Divisions that end in products keep what is known of the parts; the sum is promised as a whole.
        column = tl.max_contiguous(tl.multiple_of(d_n * x_d + h_n * x_h + w_n * x_w + c, X_RUN), X_RUN)
    else:
        column = d_n * x_d + h_n * x_h + w_n * x_w + c * x_c
    acc = tl.zeros([BLOCK_O, BLOCK_N], tl.float32)
    start = tl.program_id(1) * share
    stop = tl.minimum(start + share, pixels)
    for first in range(start, stop, BLOCK_P):
        q = first + tl.arange(0, BLOCK_P)
        some = q < stop
        rest = _quotient(q, magic_w, shift_w)
        w = q - rest * out_w
        plane = _quotient(rest, magic_h, shift_h)
        h = rest - plane * out_h
        i = _quotient(plane, magic_d, shift_d)
        d = plane - i * out_d
        y_place = i * y_n + d * y_d + h * y_h + w * y_w
        if Y_RUN > 1:
            rows = gradient + ((y_place // Y_RUN * Y_RUN)[:, None] + o[None, :])
        else:
            rows = gradient + (y_place[:, None] + (o * y_c)[None, :])
        g = tl.load(rows, mask=some[:, None] & (o < channels)[None, :], other=0.0).T
        d *= stride_d
        h *= stride_h
        w *= stride_w
        x_place = i * x_n + d * x_d + h * x_h + w * x_w
        x_place = x_place // X_RUN * X_RUN
        inside = some[:, None] & _within(d[:, None] + d_n[None, :], depth) & (n < columns)[None, :]
        inside = inside & _within(h[:, None] + h_n[None, :], height)
        inside = tl.max_constancy(inside & _within(w[:, None] + w_n[None, :], width), [1, X_RUN])
        x = tl.load(image + (x_place[:, None] + column[None, :]), mask=inside, other=0.0)
        acc = tl.dot(g, x, acc)
    mask = (o < channels)[:, None] & (n < columns)[None, :]
    if SPLIT:
        columns = columns // X_RUN * X_RUN
        out += (tl.program_id(1).to(tl.int64) * tl.num_programs(2) + group) * channels * columns
        tl.store(out + ((o * columns)[:, None] + n[None, :]), acc, mask=mask)
    else:
        target = t_d * w_d + t_h * w_h + t_w * w_w + c * w_c
        target = out + (((group * channels + o) * w_o)[:, None] + target[None, :])
        if ACCUMULATE:
            acc += tl.load(target, mask=mask, other=0.0).to(tl.float32)
        tl.store(target, acc.to(out.dtype.element_ty), mask=mask)
