"""Matrix products with few rows or columns: tiles as wide as the short side, and sums in parts that fill the device.

A tile has all of the short side, so that the large operand is read once. Its length is divided among programs, and so
are the sums (split-K), as a short side alone has too few tiles for all multiprocessors. Parts of sums go to fp32
numbers, which a second kernel adds up in order: the result has the same bits every time.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tilewise.kernels.triton.gemm.activations import activated
from tilewise.kernels.triton.overlap import begin

__all__ = ["add_parts", "operand_tile", "thin_product"]


@triton.jit
def operand_tile(base, outer, outers, k, end, stride, DEPTH_INNER: tl.constexpr, EVEN: tl.constexpr):
    """Numbers of an operand: rows (or columns) ``outer`` by depth ``k``, (outer, k), zero where there are none.

    ``stride`` lies between rows where depth is contiguous, else between steps of depth.
    """
    if DEPTH_INNER:
        pointers = base + (outer.to(tl.int64) * stride)[:, None] + k[None, :]
    else:
        pointers = base + outer[:, None] + (k.to(tl.int64) * stride)[None, :]
    if EVEN:
        value = tl.load(pointers, mask=(outer < outers)[:, None], other=0.0)
    else:
        value = tl.load(pointers, mask=(outer < outers)[:, None] & (k < end)[None, :], other=0.0)
    return value


@triton.jit(do_not_specialize=["tiles_n", "steps"])
def thin_product(
    a, b, out, bias, rows, columns, depth, tiles_n, steps, a_stride, b_stride, out_stride, out_part,
    A_DEPTH_INNER: tl.constexpr, B_DEPTH_INNER: tl.constexpr, BIAS: tl.constexpr, ACCUMULATE: tl.constexpr,
    ACTIVATION: tl.constexpr, PRECISION: tl.constexpr, EVEN: tl.constexpr, LEADS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """``out (+)= a b (+ bias)`` after ``ACTIVATION``, or each program row's part of the sums.

    A part has ``steps`` steps of ``BLOCK_K`` terms. ``a`` is rows x depth, ``b`` depth x columns, ``out`` rows
    x columns with columns contiguous. ``*_DEPTH_INNER``: the operand is contiguous along depth, else along its other
    dimension; ``*_stride`` is the other stride. ``out_part`` is the distance between the results of parts. ``EVEN``:
    steps of depth end with the part. Grid: tiles, parts of sums.
    """
    begin(False, LEADS)
    tile, which = tl.program_id(0), tl.program_id(1)
    m = (tile // tiles_n) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = (tile % tiles_n) * BLOCK_N + tl.arange(0, BLOCK_N)
    start = which * steps * BLOCK_K  # whose factor tells the compiler how addresses are aligned
    end = tl.minimum(start + steps * BLOCK_K, depth)
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for k0 in range(start, end, BLOCK_K):
        k = k0 + tl.arange(0, BLOCK_K)
        left = operand_tile(a, m, rows, k, end, a_stride, A_DEPTH_INNER, EVEN)
        right = operand_tile(b, n, columns, k, end, b_stride, B_DEPTH_INNER, EVEN)
        acc = tl.dot(left, right.T, acc, input_precision=PRECISION)
    if BIAS:
        acc += tl.load(bias + n, mask=n < columns, other=0.0).to(tl.float32)[None, :]
    pointers = out + which.to(tl.int64) * out_part + (m.to(tl.int64) * out_stride)[:, None] + n[None, :]
    mask = (m < rows)[:, None] & (n < columns)[None, :]
    if ACCUMULATE:
        acc += tl.load(pointers, mask=mask, other=0.0).to(tl.float32)
    acc = activated(acc, ACTIVATION, BITS=out.dtype.element_ty.primitive_bitwidth)
    tl.store(pointers, acc.to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["parts"])
def add_parts(
    sums, out, bias, columns, count, parts, out_stride,
    BIAS: tl.constexpr, ACCUMULATE: tl.constexpr, ACTIVATION: tl.constexpr, BLOCK: tl.constexpr,
    WAITS: tl.constexpr,
):  # fmt: skip
    """``out (+)= the sum of ``parts`` dense matrices of ``count`` fp32 numbers (+ bias)``, in order. Grid: blocks."""
    begin(WAITS, False)
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = place < count
    row, column = place // columns, place % columns
    total = tl.zeros([BLOCK], tl.float32)
    for i in range(parts):
        total += tl.load(sums + i * count.to(tl.int64) + place, mask=mask, other=0.0)
    if BIAS:
        total += tl.load(bias + column, mask=mask, other=0.0).to(tl.float32)
    pointers = out + row.to(tl.int64) * out_stride + column
    if ACCUMULATE:
        total += tl.load(pointers, mask=mask, other=0.0).to(tl.float32)
    total = activated(total, ACTIVATION, BITS=out.dtype.element_ty.primitive_bitwidth)
    tl.store(pointers, total.to(out.dtype.element_ty), mask=mask)
