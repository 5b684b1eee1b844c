"""Matrix products whose work is divided evenly whatever the sizes: stream-K (Osama et al. 2023, sections 4 and 5.1).

The steps of all tiles of the result lie one after the other, tile by tile, and each program takes an equal stretch of
them. So a stretch may begin and end within a tile. Sums of a part of a tile's depth go to the workspace, two places a
program: for the tile in which its stretch begins, and for the one in which it ends. A second kernel adds them up in
order, so that the result has the same bits every time and no program ever waits for another.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tilewise.kernels.triton.gemm.thin import operand_tile

__all__ = ["add_stretches", "stream_k_product"]


@triton.jit
def _start(program, quotient, remainder):
    """The first step of a program: the first ``remainder`` of them have one more than ``quotient``."""
    return program * quotient + tl.minimum(program, remainder)


@triton.jit
def _program(step, quotient, remainder):
    """The program that has a step."""
    longer = remainder * (quotient + 1)
    return tl.where(step < longer, step // (quotient + 1), remainder + (step - longer) // quotient)


@triton.jit
def _sums(
    left, right, m, n, rows, columns, depth, first, last, left_stride, right_stride,
    LEFT_DEPTH_INNER: tl.constexpr, RIGHT_DEPTH_INNER: tl.constexpr, PRECISION: tl.constexpr, EVEN: tl.constexpr,
    PROMOTE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """The sums of one tile over the steps from ``first`` to ``last``.

    Matrix units cut off the last bits of their sums, always downwards. After ``PROMOTE`` steps a sum is added to
    another outside of them; 0 for never.
    """
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    if PROMOTE:
        for begin in range(first, last, PROMOTE):
            part = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
            for step in range(begin, tl.minimum(begin + PROMOTE, last)):
                k = step * BLOCK_K + tl.arange(0, BLOCK_K)
                x = operand_tile(left, m, rows, k, depth, left_stride, LEFT_DEPTH_INNER, EVEN)
                y = operand_tile(right, n, columns, k, depth, right_stride, RIGHT_DEPTH_INNER, EVEN)
                part = tl.dot(x, y.T, part, input_precision=PRECISION)
            acc += part
    else:
        for step in range(first, last):
            k = step * BLOCK_K + tl.arange(0, BLOCK_K)
            x = operand_tile(left, m, rows, k, depth, left_stride, LEFT_DEPTH_INNER, EVEN)
            y = operand_tile(right, n, columns, k, depth, right_stride, RIGHT_DEPTH_INNER, EVEN)
            acc = tl.dot(x, y.T, acc, input_precision=PRECISION)
    return acc


@triton.jit
def _write(
    total, out, bias, m, n, rows, columns, row_stride, column_stride,
    BIAS: tl.constexpr, BIAS_ALONG_ROWS: tl.constexpr, ACCUMULATE: tl.constexpr,
):  # fmt: skip
    """Write sums of a tile into the result, with the bias and what the result holds."""
    mask = (m < rows)[:, None] & (n < columns)[None, :]
    if BIAS:
        if BIAS_ALONG_ROWS:
            total += tl.load(bias + m, mask=m < rows, other=0.0).to(tl.float32)[:, None]
        else:
            total += tl.load(bias + n, mask=n < columns, other=0.0).to(tl.float32)[None, :]
    pointers = out + (m.to(tl.int64) * row_stride)[:, None] + (n.to(tl.int64) * column_stride)[None, :]
    if ACCUMULATE:
        total += tl.load(pointers, mask=mask, other=0.0).to(tl.float32)
    tl.store(pointers, total.to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["tiles_n", "steps", "quotient", "remainder"])
def stream_k_product(
    left, right, out, bias, sums, rows, columns, depth, tiles_n, steps, quotient, remainder,
    left_stride, right_stride, row_stride, column_stride,
    LEFT_DEPTH_INNER: tl.constexpr, RIGHT_DEPTH_INNER: tl.constexpr, BIAS: tl.constexpr,
    BIAS_ALONG_ROWS: tl.constexpr, ACCUMULATE: tl.constexpr, PRECISION: tl.constexpr, EVEN: tl.constexpr,
    PROMOTE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """``out (+)= left right (+ bias)`` for whole tiles, and sums of parts of the others.

    ``left`` is rows x depth, ``right`` depth x columns. ``*_DEPTH_INNER``: the operand is contiguous along depth, else
    along its other dimension; ``*_stride`` is the other stride. ``row_stride`` and ``column_stride`` are the result's.
    A tile has ``steps`` steps of ``BLOCK_K``. ``EVEN``: depth is whole steps. ``sums`` has two dense tiles of fp32
    numbers for each program. Grid: programs.
    """
    program = tl.program_id(0)
    start = _start(program, quotient, remainder)
    end = _start(program + 1, quotient, remainder)
    began = start // steps
    for tile in range(began, (end - 1) // steps + 1):
        first = tl.maximum(start - tile * steps, 0)
        last = tl.minimum(end - tile * steps, steps)
        m = (tile // tiles_n) * BLOCK_M + tl.arange(0, BLOCK_M)
        n = (tile % tiles_n) * BLOCK_N + tl.arange(0, BLOCK_N)
        acc = _sums(
            left, right, m, n, rows, columns, depth, first, last, left_stride, right_stride,
            LEFT_DEPTH_INNER, RIGHT_DEPTH_INNER, PRECISION, EVEN, PROMOTE, BLOCK_M, BLOCK_N, BLOCK_K,
        )  # fmt: skip
        if last - first == steps:
            _write(acc, out, bias, m, n, rows, columns, row_stride, column_stride, BIAS, BIAS_ALONG_ROWS, ACCUMULATE)
        else:
            place = (2 * program + (tile > began)).to(tl.int64) * (BLOCK_M * BLOCK_N)
            inside = tl.arange(0, BLOCK_M)[:, None] * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
            tl.store(sums + place + inside, acc)


@triton.jit(do_not_specialize=["tiles_n", "steps", "quotient", "remainder"])
def add_stretches(
    sums, out, bias, rows, columns, tiles_n, steps, quotient, remainder, row_stride, column_stride,
    BIAS: tl.constexpr, BIAS_ALONG_ROWS: tl.constexpr, ACCUMULATE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, LINES: tl.constexpr,
):  # fmt: skip
    """Add up the sums of the tiles that several programs share, in order. Grid: tiles, ``LINES`` lines of each."""
    tile, part = tl.program_id(0), tl.program_id(1)
    first = _program(tile * steps, quotient, remainder)
    last = _program(tile * steps + steps - 1, quotient, remainder)
    if first < last:
        line = part * LINES + tl.arange(0, LINES)
        inside = line[:, None] * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
        total = tl.zeros([LINES, BLOCK_N], tl.float32)
        for program in range(first, last + 1):
            began = _start(program, quotient, remainder) // steps
            place = (2 * program + (tile > began)).to(tl.int64) * (BLOCK_M * BLOCK_N)
            total += tl.load(sums + place + inside)
        m = (tile // tiles_n) * BLOCK_M + line
        n = (tile % tiles_n) * BLOCK_N + tl.arange(0, BLOCK_N)
        _write(total, out, bias, m, n, rows, columns, row_stride, column_stride, BIAS, BIAS_ALONG_ROWS, ACCUMULATE)
