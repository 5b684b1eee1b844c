"""What halos add to a rank's part of a convolution, two boxes in one launch: small products, straight to their places.

A box's convolution reads few rows and adds to few results. Launched one by one, its packing, product and addition take
longer to start than to run; here the product reads its operands where they lie and adds where the results lie.

Position ``o`` along an axis reads position ``(o * up + base + tap * step) / down`` of the source where that is whole
and inside of it: ``up`` is the stride and ``step`` the dilation of a convolution; for its transpose ``down`` is the
stride and ``step`` minus the dilation. Without ``VOLUME`` there are two axes at most. Numbers that end in 0 and 1 are
of the first and second box.

A block has little to do, so what counts is how soon its loads are on their way: offsets have 32 bits unless ``WIDE``,
nothing is divided by ``down`` where it is 1 along all axes (``UNIT``), channels have no masks where blocks of them are
``FULL``, with ``LINES`` the rows of a block are in one line along the last axis, and ``NEAR`` channels of a tensor
follow each other in memory so that as many are moved as one word; 0: they do not.
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
def _position(first, t_d, t_h, t_w, BLOCK: tl.constexpr, LINES: tl.constexpr, VOLUME: tl.constexpr):
    """Image and position of ``BLOCK`` rows from ``first`` on; ``d`` is 0 where there are only two axes."""
    near = tl.arange(0, BLOCK)
    if LINES:  # one image and one line, so that these are computed once for all
        rest = first // t_w
        w = first - rest * t_w + near
    else:
        rest = (first + near) // t_w
        w = first + near - rest * t_w
    line = rest // t_h
    h = rest - line * t_h
    if VOLUME:
        image = line // t_d
        return image, line - image * t_d, h, w
    else:
        return line, line * 0, h, w


@triton.jit
def _reads(place, down, size, UNIT: tl.constexpr):
    """The position that is read along an axis, and whether there is one."""
    if UNIT:
        return place, (place >= 0) & (place < size)
    found = place // down
    return found, (place >= 0) & (found * down == place) & (found < size)


@triton.jit
def _wide(offset, WIDE: tl.constexpr):
    """``offset`` in 64 bits if ``WIDE``."""
    if WIDE:
        return offset.to(tl.int64)
    else:  # of another type: as a constant decides, only one of these is compiled
        return offset


@triton.jit
def _place(
    image, d, h, w, tap_d, tap_h, tap_w, step_d, step_h, step_w, down_d, down_h, down_w, s_d, s_h, s_w,
    stride_n, stride_d, stride_h, stride_w,
    NEAR: tl.constexpr, UNIT: tl.constexpr, VOLUME: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """The place that a tap reads in the source, and whether it exists; ``d``, ``h`` and ``w`` are that of the first
    tap.
    """
    p_h, met = _reads(h + tap_h * step_h, down_h, s_h, UNIT)
    p_w, in_w = _reads(w + tap_w * step_w, down_w, s_w, UNIT)
    met &= in_w
    p_d = d
    if VOLUME:
        p_d, in_d = _reads(d + tap_d * step_d, down_d, s_d, UNIT)
        met &= in_d
    return _offset(image, p_d, p_h, p_w, stride_n, stride_d, stride_h, stride_w, NEAR, VOLUME, WIDE), met


@triton.jit
def _offset(
    image, d, h, w, stride_n, stride_d, stride_h, stride_w, NEAR: tl.constexpr, VOLUME: tl.constexpr, WIDE: tl.constexpr
):
    """Element offsets of rows.

    The compiler is told here that they are multiples of ``NEAR``: it forgets that of what a function is given.
    """
    offset = _wide(image, WIDE) * stride_n + _wide(h, WIDE) * stride_h
    if VOLUME:
        offset += _wide(d, WIDE) * stride_d
    offset += _wide(w, WIDE) * stride_w
    if NEAR > 1:
        offset = tl.multiple_of(offset, NEAR)
    return offset


@triton.jit
def _channels(c, stride, NEAR: tl.constexpr, WIDE: tl.constexpr):
    """Element offsets of channels."""
    if NEAR:
        return c
    else:
        return _wide(c, WIDE) * stride


@triton.jit
def _tile(memory, rows, channels, met, some, ROWS: tl.constexpr, FULL: tl.constexpr):
    """Elements of rows [a] and channels [b] as [a, b].

    Neighbouring threads read along rows if ``ROWS``, else along channels.
    """
    if ROWS:
        pointers = memory + (channels[:, None] + rows[None, :])
        mask = tl.broadcast_to(met[None, :], pointers.shape) if FULL else met[None, :] & some[:, None]
        return tl.trans(tl.load(pointers, mask=mask, other=0.0))
    pointers = memory + (rows[:, None] + channels[None, :])
    mask = tl.broadcast_to(met[:, None], pointers.shape) if FULL else met[:, None] & some[None, :]
    return tl.load(pointers, mask=mask, other=0.0)


@triton.jit
def _filter(
    memory, i, o, w_i, w_o, some_i, some_o, W_INPUTS: tl.constexpr, NEAR: tl.constexpr, FULL: tl.constexpr
):  # fmt: skip
    """A filter's elements of inputs [a] and outputs [b] as [a, b]."""
    if W_INPUTS:
        far = o * w_o
        if NEAR > 1:
            far = tl.multiple_of(far, NEAR)
        pointers = memory + (far[:, None] + _channels(i, w_i, NEAR, False)[None, :])
        mask = some_o[:, None] & some_i[None, :]
    else:
        far = i * w_i
        if NEAR > 1:
            far = tl.multiple_of(far, NEAR)
        pointers = memory + (far[:, None] + _channels(o, w_o, NEAR, False)[None, :])
        mask = some_i[:, None] & some_o[None, :]
    found = tl.load(pointers) if FULL else tl.load(pointers, mask=mask, other=0.0)
    return tl.trans(found) if W_INPUTS else found


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
    ACCUMULATE: tl.constexpr, PRECISION: tl.constexpr, UNIT: tl.constexpr, VOLUME: tl.constexpr, WIDE: tl.constexpr,
    LINES: tl.constexpr, FULL: tl.constexpr, SOURCE_ROWS: tl.constexpr, SOURCE_NEAR: tl.constexpr,
    W_INPUTS: tl.constexpr, W_NEAR: tl.constexpr, OUT_ROWS: tl.constexpr, OUT_NEAR: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_O: tl.constexpr, BLOCK_I: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Results of two boxes, or with ``ACCUMULATE`` added to what is there.

    ``w_o`` and ``w_i`` are the filter's strides along the channels of results and source. ``tiles0`` tiles of rows are
    the first box's. ``SOURCE_ROWS`` and ``OUT_ROWS``: rows are nearer to each other in memory than channels;
    ``W_INPUTS``: the source's channels are than the results', and ``W_NEAR`` is of these. Grid (tiles of rows, tiles of
    channels).
    """
    tile = tl.program_id(0)
    second = tile >= tiles0
    # Chosen as values: behind a branch Triton no longer knows how pointers are aligned.
    source, w, out = tl.where(second, source1, source0), tl.where(second, w1, w0), tl.where(second, out1, out0)
    tile -= tl.where(second, tiles0, 0)
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
    image, d, h, x = _position(tile * BLOCK_R, t_d, t_h, t_w, BLOCK_R, LINES, VOLUME)
    o = tl.program_id(1) * BLOCK_O + tl.arange(0, BLOCK_O)
    target = _offset(image, d, h, x, out_n, out_d, out_h, out_w, OUT_NEAR, VOLUME, True)
    columns = _channels(o, out_c, OUT_NEAR, True)
    if OUT_ROWS:
        pointers = out + (columns[:, None] + target[None, :])
        mask = (o < outputs)[:, None] & there[None, :]
    else:
        pointers = out + (target[:, None] + columns[None, :])
        mask = there[:, None] & (o < outputs)[None, :]
    if ACCUMULATE:
        # On its way while the product is computed.
        present = tl.load(pointers, mask=mask, other=0.0).to(tl.float32)
    d, h, x = d * up_d + b_d, h * up_h + b_h, x * up_w + b_w
    i = tl.arange(0, BLOCK_I)
    acc = tl.zeros([BLOCK_R, BLOCK_O], tl.float32)
    tap_d, tap_h, tap_w, block = 0, 0, 0, 0
    for _ in tl.range(0, k_d * k_h * k_w * tl.cdiv(inputs, BLOCK_I), num_stages=STAGES):
        place, met = _place(
            image, d, h, x, tap_d, tap_h, tap_w, step_d, step_h, step_w, down_d, down_h, down_w, s_d, s_h, s_w,
            source_n, source_d, source_h, source_w, SOURCE_NEAR, UNIT, VOLUME, WIDE,
        )  # fmt: skip
        i = block * BLOCK_I + tl.arange(0, BLOCK_I)
        channels, some = _channels(i, source_c, SOURCE_NEAR, WIDE), i < inputs
        a = _tile(source, place, channels, met & there, some, SOURCE_ROWS, FULL)
        taps = tap_d * w_d + tap_h * w_h + tap_w * w_w
        if W_NEAR > 1:
            taps = tl.multiple_of(taps, W_NEAR)
        b = _filter(w + taps, i, o, w_i, w_o, some, o < outputs, W_INPUTS, W_NEAR, FULL)
        acc = tl.dot(a, b, acc, input_precision=PRECISION)
        block += 1
        over = block * BLOCK_I >= inputs
        block = tl.where(over, 0, block)
        tap_w += over.to(tl.int32)
        over = tap_w == k_w
        tap_w = tl.where(over, 0, tap_w)
        tap_h += over.to(tl.int32)
        over = tap_h == k_h
        tap_h = tl.where(over, 0, tap_h)
        tap_d += over.to(tl.int32)
    if OUT_ROWS:
        acc = tl.trans(acc)
    if ACCUMULATE:
        acc += present
    tl.store(pointers, acc.to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["taps0", "inputs", "outputs", "share", *BOX, *STRIDES, *MOVES])
def weight_shares(
    x0, x1, y0, y1, shares,
    taps0, inputs, outputs, share,
    up_d, up_h, up_w, step_d, step_h, step_w, down_d, down_h, down_w,
    rows0, t_d0, t_h0, t_w0, s_d0, s_h0, s_w0, k_d0, k_h0, k_w0, b_d0, b_h0, b_w0,
    source_n0, source_c0, source_d0, source_h0, source_w0, out_n0, out_c0, out_d0, out_h0, out_w0,
    rows1, t_d1, t_h1, t_w1, s_d1, s_h1, s_w1, k_d1, k_h1, k_w1, b_d1, b_h1, b_w1,
    source_n1, source_c1, source_d1, source_h1, source_w1, out_n1, out_c1, out_d1, out_h1, out_w1,
    PRECISION: tl.constexpr, UNIT: tl.constexpr, VOLUME: tl.constexpr, WIDE: tl.constexpr,
    LINES: tl.constexpr, FULL: tl.constexpr, X_ROWS: tl.constexpr, X_NEAR: tl.constexpr, Y_ROWS: tl.constexpr,
    Y_NEAR: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_O: tl.constexpr, BLOCK_I: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """The filter's gradient by ``share`` rows of one tap of one box, into ``shares`` [splits, taps, outputs, inputs].

    ``x`` is the source and ``y`` the results' gradient, whose strides are those of ``out``. The first ``taps0`` taps
    are the first box's. ``X_ROWS`` and ``Y_ROWS``: rows are nearer in memory than channels. Grid (tiles, splits, taps).
    """
    tap = tl.program_id(2)
    second = tap >= taps0
    x, y = tl.where(second, x1, x0), tl.where(second, y1, y0)
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
    columns, channels = _channels(o, out_c, Y_NEAR, WIDE), _channels(i, source_c, X_NEAR, WIDE)
    acc = tl.zeros([BLOCK_O, BLOCK_I], tl.float32)
    for first in tl.range(start, stop, BLOCK_R, num_stages=STAGES):
        row = first + tl.arange(0, BLOCK_R)
        image, d, h, w = _position(first, t_d, t_h, t_w, BLOCK_R, LINES, VOLUME)
        place, met = _place(
            image, d * up_d + b_d, h * up_h + b_h, w * up_w + b_w, tap_d, tap_h, tap_w, step_d, step_h, step_w,
            down_d, down_h, down_w, s_d, s_h, s_w, source_n, source_d, source_h, source_w, X_NEAR, UNIT, VOLUME, WIDE,
        )  # fmt: skip
        met &= row < stop
        target = _offset(image, d, h, w, out_n, out_d, out_h, out_w, Y_NEAR, VOLUME, WIDE)
        a = _tile(y, target, columns, met, o < outputs, Y_ROWS, FULL)
        b = _tile(x, place, channels, met, i < inputs, X_ROWS, FULL)
        acc = tl.dot(tl.trans(a), b, acc, input_precision=PRECISION)
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
    each axis and are ``n``. Grid (blocks of a tap's elements, taps of the filter).
    """
    tap = tl.program_id(1)
    w, line = tap % k_w, tap // k_w
    h, d = line % k_h, line // k_h
    met0 = (d >= f_d0) & (d < f_d0 + n_d0) & (h >= f_h0) & (h < f_h0 + n_h0) & (w >= f_w0) & (w < f_w0 + n_w0)
    met1 = (d >= f_d1) & (d < f_d1 + n_d1) & (h >= f_h1) & (h < f_h1 + n_h1) & (w >= f_w1) & (w < f_w1 + n_w1)
    if met0 | met1:
        e = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        o = e // inputs
        i = e - o * inputs
        size = outputs * inputs
        there = e < size
        pointers = out + o.to(tl.int64) * w_o + i.to(tl.int64) * w_i + d * w_d + h * w_h + w * w_w
        total = tl.load(pointers, mask=there, other=0.0).to(tl.float32)
        tap0 = ((d - f_d0) * n_h0 + h - f_h0) * n_w0 + w - f_w0
        tap1 = taps0 + ((d - f_d1) * n_h1 + h - f_h1) * n_w1 + w - f_w1
        if met0:
            total += _summed(shares + tap0 * size, e, there, splits, taps * size, BLOCK, AT_ONCE)
        if met1:
            total += _summed(shares + tap1 * size, e, there, splits, taps * size, BLOCK, AT_ONCE)
        tl.store(pointers, total.to(out.dtype.element_ty), mask=there)


@triton.jit
def _summed(shares, e, there, splits, stride, BLOCK: tl.constexpr, AT_ONCE: tl.constexpr):
    """The sum of elements ``e`` over all splits, always in the same order."""
    acc = tl.zeros([AT_ONCE, BLOCK], tl.float32)
    for first in range(0, splits, AT_ONCE):
        split = first + tl.arange(0, AT_ONCE)
        mask = (split < splits)[:, None] & there[None, :]
        acc += tl.load(shares + (split * stride)[:, None] + e[None, :], mask=mask, other=0.0)
    return tl.sum(acc, 0)
