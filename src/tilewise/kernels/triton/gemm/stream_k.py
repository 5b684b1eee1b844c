"""Matrix products whose work is divided evenly whatever the sizes: stream-K (Osama et al. 2023, sections 4 and 5.1).

The steps of all tiles of the result lie one after the other, tile by tile, and each program takes an equal stretch of
them. So a stretch may begin and end within a tile. Sums of a part of a tile's depth go to the workspace, two places a
program: for the tile in which its stretch begins, and for the one in which it ends. A second kernel adds them up in
order, so that the result has the same bits every time and no program ever waits for another.

Where every tile is divided into equally many parts (split-K, section 2.3 there), a program has one place.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tilewise.kernels.triton.gemm.activations import activated
from tilewise.kernels.triton.gemm.thin import operand_tile
from tilewise.kernels.triton.overlap import begin as starting

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
def _place(tile, tiles_m, tiles_n, BLOCK_M: tl.constexpr, WIDTH: tl.constexpr):
    """Where a tile of ``WIDTH`` columns lies: its matrix of the batch, its first row and its first column."""
    inside = tile % (tiles_m * tiles_n)
    return (tile // (tiles_m * tiles_n)).to(tl.int64), (inside // tiles_n) * BLOCK_M, (inside % tiles_n) * WIDTH


@triton.jit
def _sums(
    left, right, m, n, n_more, rows, columns, depth, first, last, left_stride, right_stride,
    LEFT_DEPTH_INNER: tl.constexpr, RIGHT_DEPTH_INNER: tl.constexpr, PRECISION: tl.constexpr,
    LEFT_EVEN: tl.constexpr, RIGHT_EVEN: tl.constexpr, PROMOTE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, MORE: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """The sums of one tile over the steps from ``first`` to ``last``: of columns ``n``, and of ``n_more`` if ``MORE``.

    Matrix units cut off the last bits of their sums, always downwards. After ``PROMOTE`` steps a sum is added to
    another outside of them; 0 for never.
    """
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    more = tl.zeros([BLOCK_M, MORE if MORE else 16], tl.float32)
    if PROMOTE:
        for begin in range(first, last, PROMOTE):
            part = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
            part_more = tl.zeros([BLOCK_M, MORE if MORE else 16], tl.float32)
            for step in range(begin, tl.minimum(begin + PROMOTE, last)):
                k = step * BLOCK_K + tl.arange(0, BLOCK_K)
                x = operand_tile(left, m, rows, k, depth, left_stride, LEFT_DEPTH_INNER, LEFT_EVEN)
                y = operand_tile(right, n, columns, k, depth, right_stride, RIGHT_DEPTH_INNER, RIGHT_EVEN)
                part = tl.dot(x, y.T, part, input_precision=PRECISION)
                if MORE:
                    y = operand_tile(right, n_more, columns, k, depth, right_stride, RIGHT_DEPTH_INNER, RIGHT_EVEN)
                    part_more = tl.dot(x, y.T, part_more, input_precision=PRECISION)
            acc += part
            if MORE:
                more += part_more
    else:
        for step in range(first, last):
            k = step * BLOCK_K + tl.arange(0, BLOCK_K)
            x = operand_tile(left, m, rows, k, depth, left_stride, LEFT_DEPTH_INNER, LEFT_EVEN)
            y = operand_tile(right, n, columns, k, depth, right_stride, RIGHT_DEPTH_INNER, RIGHT_EVEN)
            acc = tl.dot(x, y.T, acc, input_precision=PRECISION)
            if MORE:
                z = operand_tile(right, n_more, columns, k, depth, right_stride, RIGHT_DEPTH_INNER, RIGHT_EVEN)
                more = tl.dot(x, z.T, more, input_precision=PRECISION)
    return acc, more


@triton.jit
def _keep(
    sums, place, acc, more, m, n, n_more, rows, columns,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, MORE: tl.constexpr,
):  # fmt: skip
    """Write the sums of a part of a tile to the dense tile number ``place``."""
    start = sums + place * (BLOCK_M * (BLOCK_N + MORE))
    line = tl.arange(0, BLOCK_M)[:, None] * (BLOCK_N + MORE)
    within = (m < rows)[:, None]
    tl.store(start + line + tl.arange(0, BLOCK_N)[None, :], acc, mask=within & (n < columns)[None, :])
    if MORE:
        column = BLOCK_N + tl.arange(0, MORE)
        tl.store(start + line + column[None, :], more, mask=within & (n_more < columns)[None, :])


@triton.jit
def _write(
    total, out, bias, m, n, rows, columns, row_stride, column_stride,
    BIAS: tl.constexpr, BIAS_ALONG_ROWS: tl.constexpr, ACCUMULATE: tl.constexpr, ACTIVATION: tl.constexpr,
):  # fmt: skip
    """Write sums of a tile into the result, with the bias, what the result holds, and the activation."""
    mask = (m < rows)[:, None] & (n < columns)[None, :]
    if BIAS:
        if BIAS_ALONG_ROWS:
            total += tl.load(bias + m, mask=m < rows, other=0.0).to(tl.float32)[:, None]
        else:
            total += tl.load(bias + n, mask=n < columns, other=0.0).to(tl.float32)[None, :]
    pointers = out + (m.to(tl.int64) * row_stride)[:, None] + (n.to(tl.int64) * column_stride)[None, :]
    if ACCUMULATE:
        total += tl.load(pointers, mask=mask, other=0.0).to(tl.float32)
    total = activated(total, ACTIVATION, BITS=out.dtype.element_ty.primitive_bitwidth)
    tl.store(pointers, total.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _columns(first, columns, WIDTH: tl.constexpr, SPAN: tl.constexpr):
    """The columns of a tile of ``WIDTH`` from ``first`` on, in ``SPAN`` numbers; beyond all where there are none."""
    column = tl.arange(0, SPAN)
    return tl.where(column < WIDTH, first + column, columns)


@triton.jit(do_not_specialize=["tiles_m", "tiles_n", "steps", "quotient", "remainder", "splits"])
def stream_k_product(
    left, right, out, bias, sums, rows, columns, depth, tiles_m, tiles_n, steps, quotient, remainder, splits,
    left_stride, right_stride, left_batch, right_batch, out_batch, row_stride, column_stride,
    LEFT_DEPTH_INNER: tl.constexpr, RIGHT_DEPTH_INNER: tl.constexpr, BIAS: tl.constexpr,
    BIAS_ALONG_ROWS: tl.constexpr, ACCUMULATE: tl.constexpr, ACTIVATION: tl.constexpr, PRECISION: tl.constexpr,
    LEFT_EVEN: tl.constexpr, RIGHT_EVEN: tl.constexpr, PROMOTE: tl.constexpr, PARTS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, MORE: tl.constexpr, BLOCK_K: tl.constexpr,
    WAITS: tl.constexpr, LEADS: tl.constexpr,
):  # fmt: skip
    """``out (+)= left right (+ bias)`` after ``ACTIVATION`` for whole tiles, and sums of parts of the others.

    ``left`` is rows x depth, ``right`` depth x columns. ``*_DEPTH_INNER``: the operand is contiguous along depth, else
    along its other dimension; ``*_stride`` is the other stride, ``*_batch`` lies between matrices. ``row_stride`` and
    ``column_stride`` are the result's. A tile has ``BLOCK_N`` columns and ``MORE`` (powers of two or 0), and ``steps``
    steps of ``BLOCK_K``. ``*_EVEN``: all steps of the operand are whole. ``sums`` has two dense tiles of fp32 numbers
    for each program, of which only numbers of the result are used. Grid: programs.

    With ``PARTS`` every tile is divided among ``splits`` programs, which have one dense tile each. ``WAITS`` and
    ``LEADS`` are those of :func:`~tilewise.kernels.triton.overlap.begin`.
    """
    starting(WAITS, LEADS)
    program = tl.program_id(0)
    if PARTS:
        tile = program // splits
        part = program % splits
        z, m0, n0 = _place(tile, tiles_m, tiles_n, BLOCK_M, BLOCK_N + MORE)
        m = m0 + tl.arange(0, BLOCK_M)
        n = n0 + tl.arange(0, BLOCK_N)
        n_more = n0 + BLOCK_N + tl.arange(0, MORE if MORE else 16)
        acc, more = _sums(
            left + z * left_batch, right + z * right_batch, m, n, n_more, rows, columns, depth,
            part * steps // splits, (part + 1) * steps // splits, left_stride, right_stride, LEFT_DEPTH_INNER,
            RIGHT_DEPTH_INNER, PRECISION, LEFT_EVEN, RIGHT_EVEN, PROMOTE, BLOCK_M, BLOCK_N, MORE, BLOCK_K,
        )  # fmt: skip
        _keep(sums, program.to(tl.int64), acc, more, m, n, n_more, rows, columns, BLOCK_M, BLOCK_N, MORE)
    else:
        start = _start(program, quotient, remainder)
        end = _start(program + 1, quotient, remainder)
        began = start // steps
        for tile in range(began, (end - 1) // steps + 1):
            first = tl.maximum(start - tile * steps, 0)
            last = tl.minimum(end - tile * steps, steps)
            z, m0, n0 = _place(tile, tiles_m, tiles_n, BLOCK_M, BLOCK_N + MORE)
            m = m0 + tl.arange(0, BLOCK_M)
            n = n0 + tl.arange(0, BLOCK_N)
            n_more = n0 + BLOCK_N + tl.arange(0, MORE if MORE else 16)
            acc, more = _sums(
                left + z * left_batch, right + z * right_batch, m, n, n_more, rows, columns, depth, first, last,
                left_stride, right_stride, LEFT_DEPTH_INNER, RIGHT_DEPTH_INNER, PRECISION, LEFT_EVEN, RIGHT_EVEN,
                PROMOTE, BLOCK_M, BLOCK_N, MORE, BLOCK_K,
            )  # fmt: skip
            if last - first == steps:
                _write(
                    acc, out + z * out_batch, bias, m, n, rows, columns, row_stride, column_stride,
                    BIAS, BIAS_ALONG_ROWS, ACCUMULATE, ACTIVATION,
                )  # fmt: skip
                if MORE:
                    _write(
                        more, out + z * out_batch, bias, m, n_more, rows, columns, row_stride, column_stride,
                        BIAS, BIAS_ALONG_ROWS, ACCUMULATE, ACTIVATION,
                    )  # fmt: skip
            else:
                place = (2 * program + (tile > began)).to(tl.int64)
                _keep(sums, place, acc, more, m, n, n_more, rows, columns, BLOCK_M, BLOCK_N, MORE)


@triton.jit(do_not_specialize=["tiles_m", "tiles_n", "steps", "quotient", "remainder", "splits"])
def add_stretches(
    sums, out, bias, rows, columns, tiles_m, tiles_n, steps, quotient, remainder, splits, out_batch,
    row_stride, column_stride,
    BIAS: tl.constexpr, BIAS_ALONG_ROWS: tl.constexpr, ACCUMULATE: tl.constexpr, ACTIVATION: tl.constexpr,
    PARTS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, MORE: tl.constexpr, SPAN: tl.constexpr,
    LINES: tl.constexpr, WAITS: tl.constexpr,
):  # fmt: skip
    """Add up the sums of the tiles that several programs share, in order. Grid: tiles, ``LINES`` lines of each.

    The columns of a tile, ``BLOCK_N`` and ``MORE``, fit into ``SPAN``, a power of two.
    """
    starting(WAITS, False)
    tile, part = tl.program_id(0), tl.program_id(1)
    if PARTS:
        first = tile * splits
        last = first + splits - 1
    else:
        first = _program(tile * steps, quotient, remainder)
        last = _program(tile * steps + steps - 1, quotient, remainder)
    if first < last:
        z, m0, n0 = _place(tile, tiles_m, tiles_n, BLOCK_M, BLOCK_N + MORE)
        line = part * LINES + tl.arange(0, LINES)
        m = m0 + line
        n = _columns(n0, columns, BLOCK_N + MORE, SPAN)
        mask = (m < rows)[:, None] & (n < columns)[None, :]
        inside = line[:, None] * (BLOCK_N + MORE) + tl.arange(0, SPAN)[None, :]
        total = tl.zeros([LINES, SPAN], tl.float32)
        for i in tl.range(0, last - first + 1, loop_unroll_factor=4):
            program = first + i
            if PARTS:
                place = program.to(tl.int64)
            else:
                began = _start(program, quotient, remainder) // steps
                place = (2 * program + (tile > began)).to(tl.int64)
            where = sums + place * (BLOCK_M * (BLOCK_N + MORE))
            total += tl.load(where + inside, mask=mask, other=0.0)
        _write(
            total, out + z * out_batch, bias, m, n, rows, columns, row_stride, column_stride,
            BIAS, BIAS_ALONG_ROWS, ACCUMULATE, ACTIVATION,
        )  # fmt: skip
