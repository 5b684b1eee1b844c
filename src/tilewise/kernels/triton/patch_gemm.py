"""A matrix product that gathers both operands and scatters its result by closed formulas, with no copies between.

Where no input of a convolution is read twice, each of its passes is one product over output channels, tokens (windows)
and taps (input channels and places of a window), and the address of an element is a sum of two numbers: one of its row
and one of its column. Each of these is written in mixed radix: an index is taken apart into digits, ``DIGITS`` holds
the stride of the innermost, its size, the stride of the next and so on; the outermost has no size.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tilewise.kernels.triton.gemm.activations import activated

__all__ = ["add_partials", "gathered_gemm"]


@triton.jit
def _place(i, DIGITS: tl.constexpr, RUN: tl.constexpr, INNER: tl.constexpr, WIDE: tl.constexpr):
    """Elements from the first to number ``i``, which is not negative: unsigned divisions take half the time.

    ``RUN`` divides all of them or, with ``INNER``, the places that its multiples have, each followed by the next ones.
    This is promised of the operation that adds up the place: a promise made of what a function returns is lost with the
    call. Of one digit the compiler knows by itself.
    """
    if len(DIGITS) == 1:
        if DIGITS[0] == 1:
            return i
        else:
            return (i.to(tl.int64) if WIDE else i) * DIGITS[0]
    else:
        place = i * 0
        rest = i.to(tl.uint32)
        for n in tl.static_range(len(DIGITS) // 2):
            digit = (rest % DIGITS[2 * n + 1]).to(tl.int32)
            place += (digit.to(tl.int64) if WIDE else digit) * DIGITS[2 * n]
            rest = rest // DIGITS[2 * n + 1]
        digit = rest.to(tl.int32)
        place += (digit.to(tl.int64) if WIDE else digit) * DIGITS[len(DIGITS) - 1]
        if RUN > 1:
            place = tl.multiple_of(place, RUN)
            if INNER:
                place = tl.max_contiguous(place, RUN)
        return place


@triton.jit
def _wrapped(i, size, RUN: tl.constexpr, EVEN: tl.constexpr):
    """Numbers below ``size``, a multiple of ``RUN``: beyond the last come the first again, in whole runs."""
    if not EVEN:
        i = i % size
        if RUN > 1:
            i = tl.max_contiguous(tl.multiple_of(i, RUN), RUN)
    return i


@triton.jit
def _pointers(base, across, along, ACROSS: tl.constexpr, ALONG: tl.constexpr, INNER: tl.constexpr, RUN: tl.constexpr,
              WIDE: tl.constexpr):  # fmt: skip
    """Pointers to a tile, the innermost index first: where nothing is known of strides, Triton lets neighbouring
    threads walk the first dimension. ``INNER``: ``along`` is innermost, else ``across``."""
    across = _place(across, ACROSS, RUN, not INNER, WIDE)
    along = _place(along, ALONG, RUN, INNER, WIDE)
    if INNER:
        return base + (along[:, None] + across[None, :])
    else:
        return base + (across[:, None] + along[None, :])


@triton.jit
def _load(pointers, valid, INNER: tl.constexpr, EVEN: tl.constexpr):
    """A tile; zeros where depth, the first dimension if ``INNER``, is not ``valid``."""
    if EVEN:
        return tl.load(pointers)
    elif INNER:
        return tl.load(pointers, mask=valid[:, None], other=0.0)
    else:
        return tl.load(pointers, mask=valid[None, :], other=0.0)


@triton.jit(do_not_specialize=["rows", "columns", "depth", "share"])
def gathered_gemm(
    a, b, out, bias, residual, rows, columns, depth, share,
    A_ROWS: tl.constexpr, A_DEPTH: tl.constexpr, A_INNER: tl.constexpr, A_RUN: tl.constexpr, A_ADDS: tl.constexpr,
    B_COLUMNS: tl.constexpr, B_DEPTH: tl.constexpr, B_INNER: tl.constexpr, B_RUN: tl.constexpr, B_ADDS: tl.constexpr,
    OUT_ROWS: tl.constexpr, OUT_COLUMNS: tl.constexpr, OUT_INNER: tl.constexpr, OUT_RUN: tl.constexpr,
    EVEN_R: tl.constexpr, EVEN_C: tl.constexpr, EVEN_D: tl.constexpr,
    RUN_R: tl.constexpr, RUN_C: tl.constexpr, RUN_D: tl.constexpr,
    SPLIT: tl.constexpr, ACCUMULATE: tl.constexpr, BIAS: tl.constexpr, BIAS_ROWS: tl.constexpr, RESIDUAL: tl.constexpr,
    ACTIVATION: tl.constexpr, FIRST: tl.constexpr, SECOND: tl.constexpr,
    PRECISION: tl.constexpr, WIDE: tl.constexpr, GROUP: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """out[r, c] = sum over d of a[r, d] * b[d, c], in fp32.

    ``*_INNER``: depth (of ``out``: columns) is the index along which a tensor lies contiguous, in aligned runs of
    ``*_RUN``; it divides all places along the other. ``*_ADDS``: the place of depth d0 + j is that of d0 plus that of j
    for j below ``BLOCK_D`` and its multiples d0. ``EVEN_*``: tiles divide sizes. ``RUN_*`` divide sizes, powers
    of two. ``BIAS`` adds to each row its number of ``bias``, whose place ``BIAS_ROWS`` tells, ``RESIDUAL`` to each
    result that of ``residual``, which lies as ``out`` does; the activation follows.

    Grid (tiles, shares): a program sums ``share`` steps of ``BLOCK_D``, with ``SPLIT`` into its own [rows, columns] of
    ``out``. Tiles are walked ``GROUP`` rows of tiles at a time, rows fastest, so that programs that run together share
    their columns.
    """
    tiles_r = tl.cdiv(rows, BLOCK_R)
    tiles_c = tl.cdiv(columns, BLOCK_C)
    first = tl.program_id(0) // (GROUP * tiles_c) * GROUP
    within = tl.program_id(0) % (GROUP * tiles_c)
    high = tl.minimum(tiles_r - first, GROUP)
    r = (first + within % high) * BLOCK_R + tl.arange(0, BLOCK_R)
    c = (within // high) * BLOCK_C + tl.arange(0, BLOCK_C)
    r_read = _wrapped(r, rows, RUN_R, EVEN_R)
    c_read = _wrapped(c, columns, RUN_C, EVEN_C)
    j = tl.arange(0, BLOCK_D)
    a_tile = _pointers(a, r_read, j, A_ROWS, A_DEPTH, A_INNER, A_RUN, WIDE)
    b_tile = _pointers(b, c_read, j, B_COLUMNS, B_DEPTH, B_INNER, B_RUN, WIDE)
    depth = depth // RUN_D * RUN_D  # the same number, which the compiler now knows to be a multiple
    d = tl.program_id(1) * share * BLOCK_D
    acc = tl.zeros([BLOCK_R, BLOCK_C], tl.float32)
    for _ in range(d, tl.minimum(d + share * BLOCK_D, depth), BLOCK_D):
        valid = d + j < depth
        if A_ADDS:
            a_now = a_tile + _place(d, A_DEPTH, A_RUN, False, WIDE)
        else:
            a_now = _pointers(a, r_read, d + j, A_ROWS, A_DEPTH, A_INNER, A_RUN, WIDE)
        if B_ADDS:
            b_now = b_tile + _place(d, B_DEPTH, B_RUN, False, WIDE)
        else:
            b_now = _pointers(b, c_read, d + j, B_COLUMNS, B_DEPTH, B_INNER, B_RUN, WIDE)
        a_part = _load(a_now, valid, A_INNER, EVEN_D)
        b_part = _load(b_now, valid, B_INNER, EVEN_D)
        if A_INNER:
            a_part = a_part.T
        if not B_INNER:
            b_part = b_part.T
        acc = tl.dot(a_part, b_part, acc, input_precision=PRECISION)
        d += BLOCK_D
    if SPLIT:
        out += tl.multiple_of(tl.program_id(1).to(tl.int64) * rows * columns, OUT_RUN)
    target = _pointers(out, r_read, c_read, OUT_ROWS, OUT_COLUMNS, OUT_INNER, OUT_RUN, WIDE)
    if BIAS:
        acc += tl.load(bias + _place(r_read, BIAS_ROWS, 1, False, False)).to(tl.float32)[:, None]
    if OUT_INNER:
        acc = acc.T
    if RESIDUAL:  # beyond the last rows and columns it is that of the first ones, as the pointers are
        like = _pointers(residual, r_read, c_read, OUT_ROWS, OUT_COLUMNS, OUT_INNER, OUT_RUN, WIDE)
        acc += tl.load(like).to(tl.float32)
    acc = activated(acc, ACTIVATION, FIRST, SECOND, out.dtype.element_ty.primitive_bitwidth)
    if EVEN_R and EVEN_C:
        if ACCUMULATE:
            acc += tl.load(target).to(tl.float32)
        tl.store(target, acc.to(out.dtype.element_ty))
    else:
        if OUT_INNER:
            mask = (c < columns // RUN_C * RUN_C)[:, None] & (r < rows)[None, :]
        else:
            mask = (r < rows // RUN_R * RUN_R)[:, None] & (c < columns)[None, :]
        if ACCUMULATE:
            acc += tl.load(target, mask=mask, other=0.0).to(tl.float32)
        tl.store(target, acc.to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["splits", "columns"])
def add_partials(
    partials, out, splits, columns, total,
    OUT_ROWS: tl.constexpr, OUT_COLUMNS: tl.constexpr, DENSE: tl.constexpr, ACCUMULATE: tl.constexpr,
    WIDE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """``out`` from ``splits`` partial sums of ``total`` elements in rows of ``columns``, added in order.

    ``DENSE``: ``out`` lies as they do. Grid (blocks,).
    """
    e = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    acc = tl.zeros([BLOCK], tl.float32)
    source = partials + e
    for _ in range(splits):
        acc += tl.load(source, mask=e < total, other=0.0)
        source += total
    if DENSE:
        target = out + e
    else:
        target = out + _place(e // columns, OUT_ROWS, 1, False, WIDE) + _place(e % columns, OUT_COLUMNS, 1, True, WIDE)
    if ACCUMULATE:
        acc += tl.load(target, mask=e < total, other=0.0).to(tl.float32)
    tl.store(target, acc.to(out.dtype.element_ty), mask=e < total)
