"""What halos add to a rank's part of a convolution, two boxes in one launch: small products, straight to their places.

A box's convolution reads few rows and adds to few results. Launched one by one, its packing, product and addition take
longer to start than to run; here the product reads its operands where they lie and adds where the results lie.

Position ``o`` along an axis reads position ``(o * up + base + tap * step) / down`` of the source where that is whole
and inside of it: ``up`` is the stride and ``step`` the dilation of a convolution; for its transpose ``down`` is the
stride and ``step`` minus the dilation. Numbers that end in 0 and 1 are of the first and second box.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["add_shares", "gather", "weight_shares"]

BOX = [
    f"{name}{box}"
    for box in (0, 1)
    for name in ("rows", "t_d", "t_h", "t_w", "s_d", "s_h", "s_w", "k_d", "k_h", "k_w", "b_d", "b_h", "b_w")
]
"""Rows (images times results), then along each axis: results, positions of the source, taps, and ``base``."""
STRIDES = [f"{name}_{axis}{box}" for box in (0, 1) for name in ("source", "out") for axis in "ncdhw"]
MOVES = [f"{name}_{axis}" for name in ("up", "step", "down") for axis in "dhw"]


@triton.jit
def _reads(o, tap, up, base, step, down, size):
    """The position that is read along an axis, and whether there is one."""
    place = o * up + base + tap * step
    found = place // down
    return found, (place >= 0) & (found * down == place) & (found < size)


@triton.jit
def _position(row, t_d, t_h, t_w):
    """Image and position of a row."""
    w, rest = row % t_w, row // t_w
    h, rest = rest % t_h, rest // t_h
    return rest // t_d, rest % t_d, h, w


@triton.jit(
    do_not_specialize=[
        "tiles0", "inputs", "outputs", "w_o", "w_i", "w_d", "w_h", "w_w", *BOX, *STRIDES, *MOVES,
    ]
)  # fmt: skip
def gather(
    source0, source1, w0, w1, out0, out1,
    tiles0, inputs, outputs, w_o, w_i, w_d, w_h, w_w,
    up_d, up_h, up_w, step_d, step_h, step_w, down_d, down_h, down_w,
    rows0, t_d0, t_h0, t_w0, s_d0, s_h0, s_w0, k_d0, k_h0, k_w0, b_d0, b_h0, b_w0,
    source_n0, source_c0, source_d0, source_h0, source_w0, out_n0, out_c0, out_d0, out_h0, out_w0,
    rows1, t_d1, t_h1, t_w1, s_d1, s_h1, s_w1, k_d1, k_h1, k_w1, b_d1, b_h1, b_w1,
    source_n1, source_c1, source_d1, source_h1, source_w1, out_n1, out_c1, out_d1, out_h1, out_w1,
    ACCUMULATE: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_O: tl.constexpr, BLOCK_I: tl.constexpr,
):  # fmt: skip
    """Results of two boxes, or with ``ACCUMULATE`` added to what is there.

    ``w_o`` and ``w_i`` are the filter's strides along the channels of results and source. ``tiles0`` tiles of rows are
    the first box's. Grid (tiles of rows, tiles of channels).
    """
    tile = tl.program_id(0)
    second = tile >= tiles0
    source, w, out = source0, w0, out0
    if second:
        source, w, out = source1, w1, out1
        tile -= tiles0
    t_d, t_h, t_w = tl.where(second, t_d1, t_d0), tl.where(second, t_h1, t_h0), tl.where(second, t_w1, t_w0)
    s_d, s_h, s_w = tl.where(second, s_d1, s_d0), tl.where(second, s_h1, s_h0), tl.where(second, s_w1, s_w0)
    k_d, k_h, k_w = tl.where(second, k_d1, k_d0), tl.where(second, k_h1, k_h0), tl.where(second, k_w1, k_w0)
    b_d, b_h, b_w = tl.where(second, b_d1, b_d0), tl.where(second, b_h1, b_h0), tl.where(second, b_w1, b_w0)
    source_n, source_c = tl.where(second, source_n1, source_n0), tl.where(second, source_c1, source_c0)
    source_d, source_h = tl.where(second, source_d1, source_d0), tl.where(second, source_h1, source_h0)
    source_w = tl.where(second, source_w1, source_w0)
    out_n, out_c = tl.where(second, out_n1, out_n0), tl.where(second, out_c1, out_c0)
    out_d, out_h = tl.where(second, out_d1, out_d0), tl.where(second, out_h1, out_h0)
    out_w = tl.where(second, out_w1, out_w0)
    row = tile * BLOCK_R + tl.arange(0, BLOCK_R)
    there = row < tl.where(second, rows1, rows0)
    image, d, h, x = _position(row, t_d, t_h, t_w)
    o = tl.program_id(1) * BLOCK_O + tl.arange(0, BLOCK_O)
    base = image.to(tl.int64) * source_n
    acc = tl.zeros([BLOCK_R, BLOCK_O], tl.float32)
    for tap in range(k_d * k_h * k_w):
        tap_w, line = tap % k_w, tap // k_w
        tap_h, tap_d = line % k_h, line // k_h
        p_d, in_d = _reads(d, tap_d, up_d, b_d, step_d, down_d, s_d)
        p_h, in_h = _reads(h, tap_h, up_h, b_h, step_h, down_h, s_h)
        p_w, in_w = _reads(x, tap_w, up_w, b_w, step_w, down_w, s_w)
        met = there & in_d & in_h & in_w
        place = base + p_d.to(tl.int64) * source_d + p_h.to(tl.int64) * source_h + p_w.to(tl.int64) * source_w
        taps = w + tap_d * w_d + tap_h * w_h + tap_w * w_w
        for first in range(0, inputs, BLOCK_I):
            i = first + tl.arange(0, BLOCK_I)
            some = i < inputs
            a = tl.load(
                source + place[:, None] + (i.to(tl.int64) * source_c)[None, :],
                mask=met[:, None] & some[None, :], other=0.0,
            )  # fmt: skip
            b = tl.load(
                taps + i[:, None] * w_i + o[None, :] * w_o, mask=some[:, None] & (o < outputs)[None, :], other=0.0
            )
            acc = tl.dot(a, b, acc, input_precision=PRECISION)
    target = image.to(tl.int64) * out_n + d.to(tl.int64) * out_d + h.to(tl.int64) * out_h + x.to(tl.int64) * out_w
    pointers = out + target[:, None] + (o.to(tl.int64) * out_c)[None, :]
    mask = there[:, None] & (o < outputs)[None, :]
    if ACCUMULATE:
        acc += tl.load(pointers, mask=mask, other=0.0).to(tl.float32)
    tl.store(pointers, acc.to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["taps0", "inputs", "outputs", "share", "splits", *BOX, *STRIDES, *MOVES])
def weight_shares(
    x0, x1, y0, y1, shares,
    taps0, inputs, outputs, share,
    up_d, up_h, up_w, step_d, step_h, step_w, down_d, down_h, down_w,
    rows0, t_d0, t_h0, t_w0, s_d0, s_h0, s_w0, k_d0, k_h0, k_w0, b_d0, b_h0, b_w0,
    source_n0, source_c0, source_d0, source_h0, source_w0, out_n0, out_c0, out_d0, out_h0, out_w0,
    rows1, t_d1, t_h1, t_w1, s_d1, s_h1, s_w1, k_d1, k_h1, k_w1, b_d1, b_h1, b_w1,
    source_n1, source_c1, source_d1, source_h1, source_w1, out_n1, out_c1, out_d1, out_h1, out_w1,
    PRECISION: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_O: tl.constexpr, BLOCK_I: tl.constexpr,
):  # fmt: skip
    """The filter's gradient by ``share`` rows of one tap of one box, into ``shares`` [splits, taps, outputs, inputs].

    ``x`` is the source and ``y`` the results' gradient, whose strides are those of ``out``. The first ``taps0`` taps
    are the first box's. Grid (tiles, splits, taps of both).
    """
    tap = tl.program_id(2)
    second = tap >= taps0
    x, y = x0, y0
    if second:
        x, y = x1, y1
    t_d, t_h, t_w = tl.where(second, t_d1, t_d0), tl.where(second, t_h1, t_h0), tl.where(second, t_w1, t_w0)
    s_d, s_h, s_w = tl.where(second, s_d1, s_d0), tl.where(second, s_h1, s_h0), tl.where(second, s_w1, s_w0)
    k_h, k_w = tl.where(second, k_h1, k_h0), tl.where(second, k_w1, k_w0)
    b_d, b_h, b_w = tl.where(second, b_d1, b_d0), tl.where(second, b_h1, b_h0), tl.where(second, b_w1, b_w0)
    source_n, source_c = tl.where(second, source_n1, source_n0), tl.where(second, source_c1, source_c0)
    source_d, source_h = tl.where(second, source_d1, source_d0), tl.where(second, source_h1, source_h0)
    source_w = tl.where(second, source_w1, source_w0)
    out_n, out_c = tl.where(second, out_n1, out_n0), tl.where(second, out_c1, out_c0)
    out_d, out_h = tl.where(second, out_d1, out_d0), tl.where(second, out_h1, out_h0)
    out_w = tl.where(second, out_w1, out_w0)
    number = tap - tl.where(second, taps0, 0)
    tap_w, line = number % k_w, number // k_w
    tap_h, tap_d = line % k_h, line // k_h
    tiles_o = tl.cdiv(outputs, BLOCK_O)
    o = (tl.program_id(0) % tiles_o) * BLOCK_O + tl.arange(0, BLOCK_O)
    i = (tl.program_id(0) // tiles_o) * BLOCK_I + tl.arange(0, BLOCK_I)
    start = tl.program_id(1) * share
    stop = tl.minimum(start + share, tl.where(second, rows1, rows0))
    acc = tl.zeros([BLOCK_O, BLOCK_I], tl.float32)
    for first in range(start, stop, BLOCK_R):
        row = first + tl.arange(0, BLOCK_R)
        there = row < stop
        image, d, h, w = _position(row, t_d, t_h, t_w)
        p_d, in_d = _reads(d, tap_d, up_d, b_d, step_d, down_d, s_d)
        p_h, in_h = _reads(h, tap_h, up_h, b_h, step_h, down_h, s_h)
        p_w, in_w = _reads(w, tap_w, up_w, b_w, step_w, down_w, s_w)
        met = there & in_d & in_h & in_w
        base = image.to(tl.int64)
        source = base * source_n + p_d.to(tl.int64) * source_d + p_h.to(tl.int64) * source_h
        source += p_w.to(tl.int64) * source_w
        target = base * out_n + d.to(tl.int64) * out_d + h.to(tl.int64) * out_h + w.to(tl.int64) * out_w
        a = tl.load(
            y + (o.to(tl.int64) * out_c)[:, None] + target[None, :], mask=(o < outputs)[:, None] & met[None, :],
            other=0.0,
        )  # fmt: skip
        b = tl.load(
            x + source[:, None] + (i.to(tl.int64) * source_c)[None, :], mask=met[:, None] & (i < inputs)[None, :],
            other=0.0,
        )  # fmt: skip
        acc = tl.dot(a, b, acc, input_precision=PRECISION)
    taps = tl.num_programs(2)
    place = ((tl.program_id(1) * taps + tap) * outputs + o)[:, None] * inputs + i[None, :]
    tl.store(shares + place, acc, mask=(o < outputs)[:, None] & (i < inputs)[None, :])


@triton.jit(
    do_not_specialize=[
        "splits", "taps0", "taps", "inputs", "outputs", "w_o", "w_i", "w_d", "w_h", "w_w", "k_d", "k_h", "k_w",
        *[f"{name}_{axis}{box}" for box in (0, 1) for name in ("f", "n") for axis in "dhw"],
    ]
)  # fmt: skip
def add_shares(
    shares, out,
    splits, taps0, taps, inputs, outputs, w_o, w_i, w_d, w_h, w_w, k_d, k_h, k_w,
    f_d0, f_h0, f_w0, n_d0, n_h0, n_w0, f_d1, f_h1, f_w1, n_d1, n_h1, n_w1,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Add :func:`weight_shares` to a filter's gradient with ``k_d`` by ``k_h`` by ``k_w`` taps, in order.

    A box's taps begin at ``f`` along each axis and are ``n``. Grid (blocks of the filter's elements,).
    """
    e = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    i, rest = e % inputs, e // inputs
    o, rest = rest % outputs, rest // outputs
    w, rest = rest % k_w, rest // k_w
    h, d = rest % k_h, rest // k_h
    there = e < inputs * outputs * k_d * k_h * k_w
    pointers = out + o.to(tl.int64) * w_o + i.to(tl.int64) * w_i + d * w_d + h * w_h + w * w_w
    acc = tl.load(pointers, mask=there, other=0.0).to(tl.float32)
    met0 = (d >= f_d0) & (d < f_d0 + n_d0) & (h >= f_h0) & (h < f_h0 + n_h0) & (w >= f_w0) & (w < f_w0 + n_w0)
    met1 = (d >= f_d1) & (d < f_d1 + n_d1) & (h >= f_h1) & (h < f_h1 + n_h1) & (w >= f_w1) & (w < f_w1 + n_w1)
    tap0 = ((d - f_d0) * n_h0 + h - f_h0) * n_w0 + w - f_w0
    tap1 = taps0 + ((d - f_d1) * n_h1 + h - f_h1) * n_w1 + w - f_w1
    place = o * inputs + i
    for split in range(splits):
        source = shares + split * taps * outputs * inputs
        acc += tl.load(source + tap0 * outputs * inputs + place, mask=there & met0, other=0.0)
        acc += tl.load(source + tap1 * outputs * inputs + place, mask=there & met1, other=0.0)
    tl.store(pointers, acc.to(out.dtype.element_ty), mask=there)
