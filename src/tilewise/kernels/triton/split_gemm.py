"""One complex matrix product per frequency and group of spectra that lie in fp16 parts, as matrix units take them.

Parts are planar, (frequency, part, row, channel): real and imaginary (``half``), or high and low of each (``split``).
fp32 is a product of three then, hi*lo + lo*hi + hi*hi (Ootomo and Yokota 2022, section 3). Nothing is converted on the
way: tiles are copied into shared memory ahead of the matrix units.

Spectra are scaled by a power of two that is known before there are any, from the largest finite magnitude of the real
data: a number of the spectrum of h x w of them is at most h w times that. Powers of two above both bring it below 2^15.
What a part cannot hold is at most 2^-25 then, the half of fp16's smallest number, which is 2^-40 of that bound; apart
from that ``half`` loses 2^-11 of a number and ``split`` 2^-22. The bound is loose: by the square root of h w and more
for noise, by h w for a plane with a single number in it. By more it is not: by Parseval's theorem the spectrum of the
plane with the largest magnitude is not smaller than that in the mean square. In the worst case, 128 x 128 numbers and
one of them large, that is 1 after scaling, and 2^-25 of it is lost. Planes 2^s times smaller than the one with the
largest magnitude lose 2^(s-25) of themselves; of noise in planes of 32 x 32, about 2^(s-32). Operands of nothing but
subnormal numbers are not scaled up to the bound, and lose less than such numbers lack themselves.

A tile holds real and imaginary parts in turns, eight rows of each, and so does one of the right operand in columns: one
real product of such tiles has the four of the complex one, next to each other in a thread's registers. They meet after
the last step, so that conjugating an operand negates nothing before. Matrix units round their sums towards zero: after
``PROMOTE`` steps a sum is added to another outside of them.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["split_gemm"]


@triton.jit
def _power(exponent):
    """2^exponent as fp32, made from its bits."""
    return ((exponent + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _exponent(peak, spread):
    """The exponent of a spectrum's scale, a power of two; ``scale_of`` in ``memory.cu`` computes the same."""
    return tl.maximum(tl.minimum(141 - (tl.load(peak) >> 23) - spread, 126), -126)


@triton.jit
def _tile(
    base, first, inner, count, inners, stride, apart,
    DEPTH_INNER: tl.constexpr, BLOCK: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Two parts of rows (or columns) from ``first`` on, eight of one and eight of the other, and of ``inner``, depth.

    (rows, depth) where depth is contiguous, else (depth, rows); ``apart``: from part to part.
    """
    place = tl.arange(0, 2 * BLOCK)
    row = first + (place // 16) * 8 + place % 8
    offset = (place // 8 % 2) * apart
    if DEPTH_INNER:
        pointers = base + (row * stride + offset)[:, None] + inner[None, :]
        valid = (row < count)[:, None] & (inner < inners)[None, :]
    else:
        pointers = base + (inner * stride)[:, None] + (row + offset)[None, :]
        valid = (inner < inners)[:, None] & (row < count)[None, :]
    if EVEN:
        value = tl.load(pointers)
    else:
        value = tl.load(pointers, mask=valid, other=0.0)
    return value


@triton.jit
def _sums(
    a, b, start, stop, m0, n0, rows, columns, depth, a_part, a_stride, b_part, b_stride,
    A_DEPTH_INNER: tl.constexpr, B_DEPTH_INNER: tl.constexpr, SPLIT: tl.constexpr,
    EVEN_M: tl.constexpr, EVEN_N: tl.constexpr, EVEN_K: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """The products of parts over depth from ``start`` to ``stop``, parts in turns as in :func:`_tile`."""
    acc = tl.zeros([2 * BLOCK_M, 2 * BLOCK_N], tl.float32)
    EVEN_A: tl.constexpr = EVEN_M and EVEN_K
    EVEN_B: tl.constexpr = EVEN_N and EVEN_K
    a_apart, b_apart = a_part, b_part
    if SPLIT:
        a_apart, b_apart = 2 * a_part, 2 * b_part
    for k0 in range(start, stop, BLOCK_K):
        k = k0 + tl.arange(0, BLOCK_K)
        left = _tile(a, m0, k, rows, depth, a_stride, a_apart, A_DEPTH_INNER, BLOCK_M, EVEN_A)
        right = _tile(b, n0, k, columns, depth, b_stride, b_apart, B_DEPTH_INNER, BLOCK_N, EVEN_B)
        if not A_DEPTH_INNER:
            left = left.T
        if B_DEPTH_INNER:
            right = right.T
        if SPLIT:
            left_low = _tile(a + a_part, m0, k, rows, depth, a_stride, a_apart, A_DEPTH_INNER, BLOCK_M, EVEN_A)
            right_low = _tile(b + b_part, n0, k, columns, depth, b_stride, b_apart, B_DEPTH_INNER, BLOCK_N, EVEN_B)
            if not A_DEPTH_INNER:
                left_low = left_low.T
            if B_DEPTH_INNER:
                right_low = right_low.T
            acc = tl.dot(left_low, right, acc)
            acc = tl.dot(left, right_low, acc)
        acc = tl.dot(left, right, acc)
    return acc


@triton.jit
def _complex(acc, CONJUGATE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Real and imaginary part of what :func:`_sums` gives."""
    pieces = tl.reshape(acc, (BLOCK_M // 8, 2, 8, BLOCK_N // 8, 2, 8))
    pieces = tl.reshape(tl.permute(pieces, (0, 2, 3, 5, 1, 4)), (BLOCK_M, BLOCK_N, 2, 2))
    of_real, of_imag = tl.split(pieces)  # of b
    real_real, imag_real = tl.split(of_real)
    real_imag, imag_imag = tl.split(of_imag)
    if CONJUGATE == "none":
        real, imag = real_real - imag_imag, real_imag + imag_real
    elif CONJUGATE == "a":
        real, imag = real_real + imag_imag, real_imag - imag_real
    else:
        real, imag = real_real + imag_imag, imag_real - real_imag
    return real, imag


@triton.jit(do_not_specialize=["tiles_n", "tiles", "groups", "a_spread", "b_spread"])
def split_gemm(
    a, b, out, a_peak, b_peak,
    rows, columns, depth, tiles_n, tiles, groups, a_spread, b_spread,
    a_frequency, a_part, a_group, a_stride, b_frequency, b_part, b_group, b_stride,
    out_frequency, out_group, out_stride,
    A_DEPTH_INNER: tl.constexpr, B_DEPTH_INNER: tl.constexpr, CONJUGATE: tl.constexpr, ACCUMULATE: tl.constexpr,
    SPLIT: tl.constexpr, PROMOTE: tl.constexpr, UNIT: tl.constexpr,
    EVEN_M: tl.constexpr, EVEN_N: tl.constexpr, EVEN_K: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """``out (+)= a @ b`` for every frequency and group, ``CONJUGATE`` naming the operand that is conjugated, or none.

    ``a`` is rows x depth, ``b`` depth x columns, both in fp16 parts, ``SPLIT`` or not; ``out`` is rows x columns of
    interleaved complex64 with columns contiguous. ``*_DEPTH_INNER``: the operand is contiguous along depth, else along
    its other dimension; ``*_stride`` is the other stride, ``*_part``, ``*_group`` and ``*_frequency`` those between
    parts and between matrices, in fp16 numbers for operands and in complex ones for the result. ``*_peak``: bits of the
    largest finite magnitude of the real data, ``*_spread``: the logarithm of how many there are in a plane, rounded up.
    ``UNIT``: strides of operands and lengths of their contiguous dimensions are counted in so many numbers: with 8,
    tiles are copied 16 bytes at a time. All parts of a frequency lie within 2^31 numbers. Grid: tiles of a matrix
    fastest, then groups, then frequencies.
    """
    if A_DEPTH_INNER or B_DEPTH_INNER:
        depth = depth * UNIT
    if not A_DEPTH_INNER:
        rows = rows * UNIT
    if not B_DEPTH_INNER:
        columns = columns * UNIT
    a_part, a_stride, b_part, b_stride = a_part * UNIT, a_stride * UNIT, b_part * UNIT, b_stride * UNIT
    tile, matrix = tl.program_id(0) % tiles, tl.program_id(0) // tiles
    frequency, group = (matrix // groups).to(tl.int64), (matrix % groups).to(tl.int64)
    a += (frequency * a_frequency + group * a_group) * UNIT
    b += (frequency * b_frequency + group * b_group) * UNIT
    out += 2 * (frequency * out_frequency + group * out_group)
    m0, n0 = (tile // tiles_n) * BLOCK_M, (tile % tiles_n) * BLOCK_N
    if PROMOTE == 0:
        acc = _sums(
            a, b, 0, depth, m0, n0, rows, columns, depth, a_part, a_stride, b_part, b_stride,
            A_DEPTH_INNER, B_DEPTH_INNER, SPLIT, EVEN_M, EVEN_N, EVEN_K, BLOCK_M, BLOCK_N, BLOCK_K,
        )  # fmt: skip
    else:
        acc = tl.zeros([2 * BLOCK_M, 2 * BLOCK_N], tl.float32)
        for start in range(0, depth, PROMOTE * BLOCK_K):
            acc += _sums(
                a, b, start, tl.minimum(start + PROMOTE * BLOCK_K, depth), m0, n0, rows, columns, depth,
                a_part, a_stride, b_part, b_stride,
                A_DEPTH_INNER, B_DEPTH_INNER, SPLIT, EVEN_M, EVEN_N, EVEN_K, BLOCK_M, BLOCK_N, BLOCK_K,
            )  # fmt: skip
    real, imag = _complex(acc, CONJUGATE, BLOCK_M, BLOCK_N)
    exponent = -(_exponent(a_peak, a_spread) + _exponent(b_peak, b_spread))
    half = exponent >> 1  # in two steps because the power alone may be out of range
    value = tl.reshape(tl.join(real, imag), (BLOCK_M, 2 * BLOCK_N)) * _power(half) * _power(exponent - half)
    m, n = m0 + tl.arange(0, BLOCK_M), 2 * n0 + tl.arange(0, 2 * BLOCK_N)
    pointers = out + (m * (2 * out_stride))[:, None] + n[None, :]
    if EVEN_M and EVEN_N:
        if ACCUMULATE:
            value += tl.load(pointers)
        tl.store(pointers, value)
    else:
        mask = (m < rows)[:, None] & (n < 2 * columns)[None, :]
        if ACCUMULATE:
            value += tl.load(pointers, mask=mask, other=0.0)
        tl.store(pointers, value, mask=mask)
