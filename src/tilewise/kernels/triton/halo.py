"""What halos add to a rank's part of a convolution, two boxes in one launch: small products, straight to their places.

A box's convolution reads few rows and adds to few results. Launched one by one, its packing, product and addition take
longer to start than to run; here the product reads its operands where they lie and adds where the results lie.

Position ``o`` along an axis reads position ``(o * up + base + tap * step) / down`` of the source where that is whole
and inside of it: ``up`` is the stride and ``step`` the dilation of a convolution; for its transpose ``down`` is the
stride and ``step`` minus the dilation. Without ``VOLUME`` there are two axes at most. Numbers that end in 0 and 1 are
of the first and second box.
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
def _position(row, t_d, t_h, t_w, VOLUME: tl.constexpr):
    """Image and position of a row; ``d`` is 0 where there are but two axes."""
    w, rest = row % t_w, row // t_w
    h, rest = rest % t_h, rest // t_h
    if VOLUME:
        return rest // t_d, rest % t_d, h, w
    return rest, tl.zeros_like(rest), h, w


@triton.jit
def _place(
    image, d, h, w, tap_d, tap_h, tap_w, up_d, up_h, up_w, step_d, step_h, step_w, down_d, down_h, down_w,
    b_d, b_h, b_w, s_d, s_h, s_w, stride_n, stride_d, stride_h, stride_w, VOLUME: tl.constexpr,
):  # fmt: skip
    """Where a tap reads in the source, and whether there."""
    p_h, met = _reads(h, tap_h, up_h, b_h, step_h, down_h, s_h)
    p_w, in_w = _reads(w, tap_w, up_w, b_w, step_w, down_w, s_w)
    met &= in_w
    place = image.to(tl.int64) * stride_n + p_h.to(tl.int64) * stride_h + p_w.to(tl.int64) * stride_w
    if VOLUME:
        p_d, in_d = _reads(d, tap_d, up_d, b_d, step_d, down_d, s_d)
        met &= in_d
        place += p_d.to(tl.int64) * stride_d
    return place, met


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
    ACCUMULATE: tl.constexpr, PRECISION: tl.constexpr, VOLUME: tl.constexpr,
    SOURCE_ROWS: tl.constexpr, W_INPUTS: tl.constexpr, OUT_ROWS: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_O: tl.constexpr, BLOCK_I: tl.constexpr,
):  # fmt: skip
    """Results of two boxes, or with ``ACCUMULATE`` added to what is there.

    ``w_o`` and ``w_i`` are the filter's strides along the channels of results and source. ``tiles0`` tiles of rows are
    the first box's. ``SOURCE_ROWS`` and ``OUT_ROWS``: rows are nearer to each other in memory than channels;
    ``W_INPUTS``: the source's channels are than the results'. Grid (tiles of rows, tiles of channels).
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
    image, d, h, x = _position(row, t_d, t_h, t_w, VOLUME)
    o = tl.program_id(1) * BLOCK_O + tl.arange(0, BLOCK_O)
    acc = tl.zeros([BLOCK_R, BLOCK_O], tl.float32)
    for tap in range(k_d * k_h * k_w):
        tap_w, line = tap % k_w, tap // k_w
        tap_h, tap_d = line % k_h, line // k_h
        place, met = _place(
            image, d, h, x, tap_d, tap_h, tap_w, up_d, up_h, up_w, step_d, step_h, step_w, down_d, down_h, down_w,
            b_d, b_h, b_w, s_d, s_h, s_w, source_n, source_d, source_h, source_w, VOLUME,
        )  # fmt: skip
        met &= there
        taps = w + tap_d * w_d + tap_h * w_h + tap_w * w_w
        for first in range(0, inputs, BLOCK_I):
            i = first + tl.arange(0, BLOCK_I)
            some = i < inputs
            a = _tile(source, place, i.to(tl.int64) * source_c, met, some, SOURCE_ROWS)
            b = _tile(taps, i * w_i, o * w_o, some, o < outputs, W_INPUTS)
            acc = tl.dot(a, b, acc, input_precision=PRECISION)
    target = image.to(tl.int64) * out_n + h.to(tl.int64) * out_h + x.to(tl.int64) * out_w
    if VOLUME:
        target += d.to(tl.int64) * out_d
    columns = o.to(tl.int64) * out_c
    if OUT_ROWS:
        pointers = out + columns[:, None] + target[None, :]
        mask = (o < outputs)[:, None] & there[None, :]
        acc = tl.trans(acc)
    else:
        pointers = out + target[:, None] + columns[None, :]
        mask = there[:, None] & (o < outputs)[None, :]
    if ACCUMULATE:
        acc += tl.load(pointers, mask=mask, other=0.0).to(tl.float32)
    tl.store(pointers, acc.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _tile(memory, first, second, first_there, second_there, FIRST_NEAR: tl.constexpr):
    """Elements at ``first`` [a] and ``second`` [b], as [a, b]; neighbouring threads read along what is nearer."""
    if FIRST_NEAR:
        pointers = memory + second[:, None] + first[None, :]
        return tl.trans(tl.load(pointers, mask=second_there[:, None] & first_there[None, :], other=0.0))
    pointers = memory + first[:, None] + second[None, :]
    return tl.load(pointers, mask=first_there[:, None] & second_there[None, :], other=0.0)


@triton.jit(do_not_specialize=["taps0", "inputs", "outputs", "share", "splits", *BOX, *STRIDES, *MOVES])
def weight_shares(
    x0, x1, y0, y1, shares,
    taps0, inputs, outputs, share,
    up_d, up_h, up_w, step_d, step_h, step_w, down_d, down_h, down_w,
    rows0, t_d0, t_h0, t_w0, s_d0, s_h0, s_w0, k_d0, k_h0, k_w0, b_d0, b_h0, b_w0,
    source_n0, source_c0, source_d0, source_h0, source_w0, out_n0, out_c0, out_d0, out_h0, out_w0,
    rows1, t_d1, t_h1, t_w1, s_d1, s_h1, s_w1, k_d1, k_h1, k_w1, b_d1, b_h1, b_w1,
    source_n1, source_c1, source_d1, source_h1, source_w1, out_n1, out_c1, out_d1, out_h1, out_w1,
    PRECISION: tl.constexpr, VOLUME: tl.constexpr, X_ROWS: tl.constexpr, Y_ROWS: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_O: tl.constexpr, BLOCK_I: tl.constexpr,
):  # fmt: skip
    """The filter's gradient by ``share`` rows of one tap of one box, into ``shares`` [splits, taps, outputs, inputs].

    ``x`` is the source and ``y`` the results' gradient, whose strides are those of ``out``. The first ``taps0`` taps
    are the first box's. ``X_ROWS`` and ``Y_ROWS``: rows are nearer in memory than channels. Grid (tiles, splits, taps).
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
        image, d, h, w = _position(row, t_d, t_h, t_w, VOLUME)
        source, met = _place(
            image, d, h, w, tap_d, tap_h, tap_w, up_d, up_h, up_w, step_d, step_h, step_w, down_d, down_h, down_w,
            b_d, b_h, b_w, s_d, s_h, s_w, source_n, source_d, source_h, source_w, VOLUME,
        )  # fmt: skip
        met &= there
        target = image.to(tl.int64) * out_n + h.to(tl.int64) * out_h + w.to(tl.int64) * out_w
        if VOLUME:
            target += d.to(tl.int64) * out_d
        a = _tile(y, o.to(tl.int64) * out_c, target, o < outputs, met, not Y_ROWS)
        b = _tile(x, source, i.to(tl.int64) * source_c, met, i < inputs, X_ROWS)
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
    BLOCK: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    """Add :func:`weight_shares` to a filter's gradient with ``k_d`` by ``k_h`` by ``k_w`` taps, in one order.

    ``AT_ONCE`` shares are on their way at a time, as each is a wait for memory. A box's taps begin at ``f`` along
    each axis and are ``n``. Grid (blocks of the filter's elements,).
    """
    e = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    i, rest = e % inputs, e // inputs
    o, rest = rest % outputs, rest // outputs
    w, rest = rest % k_w, rest // k_w
    h, d = rest % k_h, rest // k_h
    there = e < inputs * outputs * k_d * k_h * k_w
    pointers = out + o.to(tl.int64) * w_o + i.to(tl.int64) * w_i + d * w_d + h * w_h + w * w_w
    met0 = (d >= f_d0) & (d < f_d0 + n_d0) & (h >= f_h0) & (h < f_h0 + n_h0) & (w >= f_w0) & (w < f_w0 + n_w0)
    met1 = (d >= f_d1) & (d < f_d1 + n_d1) & (h >= f_h1) & (h < f_h1 + n_h1) & (w >= f_w1) & (w < f_w1 + n_w1)
    tap0 = ((d - f_d0) * n_h0 + h - f_h0) * n_w0 + w - f_w0
    tap1 = taps0 + ((d - f_d1) * n_h1 + h - f_h1) * n_w1 + w - f_w1
    place0, place1 = (tap0 * outputs + o) * inputs + i, (tap1 * outputs + o) * inputs + i
    acc = tl.zeros([AT_ONCE, BLOCK], tl.float32)
    for first in range(0, splits, AT_ONCE):
        split = first + tl.arange(0, AT_ONCE)
        source = shares + (split * taps * outputs * inputs)[:, None]
        some = (split < splits)[:, None]
        acc += tl.load(source + place0[None, :], mask=some & (there & met0)[None, :], other=0.0)
        acc += tl.load(source + place1[None, :], mask=some & (there & met1)[None, :], other=0.0)
    total = tl.load(pointers, mask=there, other=0.0).to(tl.float32) + tl.sum(acc, 0)
    tl.store(pointers, total.to(out.dtype.element_ty), mask=there)
