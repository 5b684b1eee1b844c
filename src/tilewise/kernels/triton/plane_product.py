"""Products of spectra that lie plane by plane, for sums over few channels, into few or of few rows.

Where one of a product's three extents is small, its arithmetic is little beside its numbers, and matrix units would
have nothing to do. Spectra then need not lie frequency first: a thread takes the same frequency of some rows and
columns, so that memory is read and written along planes, as the transforms do best too. In fp32.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["plane_product"]


@triton.jit
def _numbers(base, plane, valid, first, numbers, BLOCK: tl.constexpr, EVEN: tl.constexpr):
    """Real and imaginary parts of ``BLOCK`` numbers from ``first`` on, of each plane."""
    inner = 2 * first + tl.arange(0, 2 * BLOCK)[None, None, :]
    pointers = base + 2 * plane * numbers + inner
    if EVEN:
        value = tl.load(pointers, mask=valid, other=0.0)
    else:
        value = tl.load(pointers, mask=valid & (inner < 2 * numbers), other=0.0)
    return tl.split(tl.reshape(value, (value.shape[0], value.shape[1], BLOCK, 2)))


@triton.jit
def _add(
    real, imag, a, b, m, n, k, rows, columns, first, numbers, a_row, a_depth, b_depth, b_column,
    CONJUGATE: tl.constexpr, BLOCK: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """The products at depth ``k``, added."""
    a_real, a_imag = _numbers(a, m * a_row + k * a_depth, m < rows, first, numbers, BLOCK, EVEN)
    b_real, b_imag = _numbers(b, k * b_depth + n * b_column, n < columns, first, numbers, BLOCK, EVEN)
    if CONJUGATE == "none":
        real += a_real * b_real - a_imag * b_imag
        imag += a_real * b_imag + a_imag * b_real
    elif CONJUGATE == "a":
        real += a_real * b_real + a_imag * b_imag
        imag += a_real * b_imag - a_imag * b_real
    else:
        real += a_real * b_real + a_imag * b_imag
        imag += a_imag * b_real - a_real * b_imag
    return real, imag


@triton.jit(do_not_specialize=["tiles_n", "tiles", "groups", "pieces"])
def plane_product(
    a, b, out, rows, columns, depth, numbers, tiles_n, tiles, groups, pieces,
    a_group, a_row, a_depth, b_group, b_depth, b_column, out_group, out_row, out_column,
    CONJUGATE: tl.constexpr, ACCUMULATE: tl.constexpr, DEPTH: tl.constexpr, UNROLL: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """``out[m, n, f] (+)= sum over k of a[m, k, f] b[k, n, f]``, ``CONJUGATE`` naming what is conjugated, or none.

    Planes are ``numbers`` complex64 each; strides count planes. ``DEPTH``: the depth where it is known when this is
    compiled, else 0. ``EVEN``: ``BLOCK`` divides ``numbers``. Grid: tiles of a group fastest, then groups, then pieces
    of planes.
    """
    tile, rest = tl.program_id(0) % tiles, tl.program_id(0) // tiles
    group, piece = (rest % groups).to(tl.int64), rest // groups
    first = piece * BLOCK
    m = (tile // tiles_n) * BLOCK_M + tl.arange(0, BLOCK_M).to(tl.int64)[:, None, None]
    n = (tile % tiles_n) * BLOCK_N + tl.arange(0, BLOCK_N).to(tl.int64)[None, :, None]
    a += 2 * group * a_group * numbers
    b += 2 * group * b_group * numbers
    real = tl.zeros([BLOCK_M, BLOCK_N, BLOCK], tl.float32)
    imag = tl.zeros([BLOCK_M, BLOCK_N, BLOCK], tl.float32)
    if DEPTH > 0:
        for k in tl.static_range(DEPTH):
            real, imag = _add(real, imag, a, b, m, n, k, rows, columns, first, numbers, a_row, a_depth, b_depth,
                              b_column, CONJUGATE, BLOCK, EVEN)  # fmt: skip
    else:
        for k in tl.range(0, depth, loop_unroll_factor=UNROLL):
            real, imag = _add(real, imag, a, b, m, n, k, rows, columns, first, numbers, a_row, a_depth, b_depth,
                              b_column, CONJUGATE, BLOCK, EVEN)  # fmt: skip
    value = tl.reshape(tl.join(real, imag), (BLOCK_M, BLOCK_N, 2 * BLOCK))
    inner = 2 * first + tl.arange(0, 2 * BLOCK)[None, None, :]
    pointers = out + 2 * (group * out_group + m * out_row + n * out_column) * numbers + inner
    mask = (m < rows) & (n < columns) & (inner < 2 * numbers)
    if ACCUMULATE:
        value += tl.load(pointers, mask=mask, other=0.0)
    tl.store(pointers, value, mask=mask)
