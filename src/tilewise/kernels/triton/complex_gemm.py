"""One complex matrix product per frequency and group, on the matrix units (Vasilache et al. 2014, section 3.3).

Operands are interleaved complex64, contiguous along one of their two dimensions; they are split into real and imaginary
parts, and into halves where fp32 accuracy is asked for, after they have been read. Products:

``fp16x3``
    fp32 as three fp16 products, hi*lo + lo*hi + hi*hi (Ootomo and Yokota 2022, section 3), after scaling by a power of
    two that brings the largest finite magnitude of all frequencies to [2^13, 2^14). What is lost is at most 2^-22 of a
    value, or 2^-38 of that largest one where that is more.
``tf32x3``, ``tf32``
    Triton's own, without scaling.
``fp16``, ``bf16``
    Operands rounded; fp16 ones are scaled as above.

A complex product takes three real ones, or four where sums of parts shall not be formed (``FORM``). Matrix units round
their sums towards zero: after ``PROMOTE`` steps a sum is added to another outside of them.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["complex_gemm", "largest"]


@triton.jit
def _power(exponent):
    """2^exponent as fp32, made from its bits."""
    return ((exponent + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _lift(peak, SCALED: tl.constexpr):
    """The exponent of the power of two by which operands are scaled."""
    exponent = 0
    if SCALED:
        exponent = tl.minimum(140 - (tl.load(peak) >> 23), 126)
    return exponent


@triton.jit
def _parts(
    base, outer, outers, stride, start, inners, exponent,
    SCALED: tl.constexpr, BLOCK: tl.constexpr, BLOCK_OUTER: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Real and imaginary parts (BLOCK_OUTER, BLOCK) of a tile that is contiguous along its second dimension."""
    inner = 2 * start + tl.arange(0, 2 * BLOCK)
    pointers = base + (outer * (2 * stride))[:, None] + inner[None, :]
    if EVEN:
        value = tl.load(pointers)
    else:
        value = tl.load(pointers, mask=(outer < outers)[:, None] & (inner < 2 * inners)[None, :], other=0.0)
    if SCALED:
        value *= _power(exponent)
    return tl.split(tl.reshape(value, (BLOCK_OUTER, BLOCK, 2)))


@triton.jit
def _times(acc, a, b, PRODUCT: tl.constexpr):
    """``acc`` plus the product of two fp32 tiles, as ``PRODUCT`` says."""
    if PRODUCT == "fp16x3":
        a_high = a.to(tl.float16)
        b_high = b.to(tl.float16)
        acc = tl.dot((a - a_high.to(tl.float32)).to(tl.float16), b_high, acc)
        acc = tl.dot(a_high, (b - b_high.to(tl.float32)).to(tl.float16), acc)
        acc = tl.dot(a_high, b_high, acc)
    elif PRODUCT == "fp16":
        acc = tl.dot(a.to(tl.float16), b.to(tl.float16), acc)
    elif PRODUCT == "bf16":
        acc = tl.dot(a.to(tl.bfloat16), b.to(tl.bfloat16), acc)
    else:
        acc = tl.dot(a, b, acc, input_precision=PRODUCT)
    return acc


@triton.jit
def _step(
    first, second, third, a_real, a_imag, b_real, b_imag,
    CONJUGATE: tl.constexpr, PRODUCT: tl.constexpr, FORM: tl.constexpr,
):  # fmt: skip
    """Add the products of one step of depth to the sums.

    With FORM 3 these are the sums of real, of imaginary and of mixed products; with 4 the real and the imaginary part.
    """
    if FORM == 3:
        first = _times(first, a_real, b_real, PRODUCT)
        second = _times(second, a_imag, b_imag, PRODUCT)
        a_sum = a_real - a_imag if CONJUGATE == "a" else a_real + a_imag
        b_sum = b_real - b_imag if CONJUGATE == "b" else b_real + b_imag
        third = _times(third, a_sum, b_sum, PRODUCT)
    else:
        first = _times(first, a_real, b_real, PRODUCT)
        if CONJUGATE == "a":
            first = _times(first, a_imag, b_imag, PRODUCT)
            second = _times(second, a_real, b_imag, PRODUCT)
            second = _times(second, -a_imag, b_real, PRODUCT)
        elif CONJUGATE == "b":
            first = _times(first, a_imag, b_imag, PRODUCT)
            second = _times(second, -a_real, b_imag, PRODUCT)
            second = _times(second, a_imag, b_real, PRODUCT)
        else:
            first = _times(first, -a_imag, b_imag, PRODUCT)
            second = _times(second, a_real, b_imag, PRODUCT)
            second = _times(second, a_imag, b_real, PRODUCT)
    return first, second, third


@triton.jit
def _sums(
    a, b, start, stop, m, n, m0, n0, rows, columns, depth, a_stride, b_stride, a_exponent, b_exponent,
    A_DEPTH_INNER: tl.constexpr, B_DEPTH_INNER: tl.constexpr, CONJUGATE: tl.constexpr, PRODUCT: tl.constexpr,
    SCALED: tl.constexpr, FORM: tl.constexpr, EVEN_M: tl.constexpr, EVEN_N: tl.constexpr, EVEN_K: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """The sums of :func:`_step` over depth from ``start`` to ``stop``."""
    first = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    second = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    third = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for k0 in range(start, stop, BLOCK_K):
        k = k0 + tl.arange(0, BLOCK_K)
        if A_DEPTH_INNER:
            a_real, a_imag = _parts(a, m, rows, a_stride, k0, depth, a_exponent, SCALED, BLOCK_K, BLOCK_M,
                                    EVEN_M and EVEN_K)  # fmt: skip
        else:
            a_real, a_imag = _parts(a, k, depth, a_stride, m0, rows, a_exponent, SCALED, BLOCK_M, BLOCK_K,
                                    EVEN_M and EVEN_K)  # fmt: skip
            a_real, a_imag = a_real.T, a_imag.T
        if B_DEPTH_INNER:
            b_real, b_imag = _parts(b, n, columns, b_stride, k0, depth, b_exponent, SCALED, BLOCK_K, BLOCK_N,
                                    EVEN_N and EVEN_K)  # fmt: skip
            b_real, b_imag = b_real.T, b_imag.T
        else:
            b_real, b_imag = _parts(b, k, depth, b_stride, n0, columns, b_exponent, SCALED, BLOCK_N, BLOCK_K,
                                    EVEN_N and EVEN_K)  # fmt: skip
        first, second, third = _step(first, second, third, a_real, a_imag, b_real, b_imag, CONJUGATE, PRODUCT, FORM)
    return first, second, third


@triton.jit(do_not_specialize=["tiles_n", "tiles", "groups"])
def complex_gemm(
    a, b, out, a_peak, b_peak,
    rows, columns, depth, tiles_n, tiles, groups,
    a_frequency, a_group, a_stride, b_frequency, b_group, b_stride, out_frequency, out_group, out_stride,
    A_DEPTH_INNER: tl.constexpr, B_DEPTH_INNER: tl.constexpr, CONJUGATE: tl.constexpr, ACCUMULATE: tl.constexpr,
    PRODUCT: tl.constexpr, SCALED: tl.constexpr, FORM: tl.constexpr, PROMOTE: tl.constexpr,
    EVEN_M: tl.constexpr, EVEN_N: tl.constexpr, EVEN_K: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """``out (+)= a @ b`` for every frequency and group, ``CONJUGATE`` naming the operand that is conjugated, or none.

    ``a`` is rows x depth, ``b`` depth x columns, ``out`` rows x columns with columns contiguous. ``*_DEPTH_INNER``: the
    operand is contiguous along depth, else along its other dimension; ``*_stride`` is the other stride, ``*_frequency``
    and ``*_group`` those between matrices, all in complex numbers. ``*_peak``: the largest finite magnitude's bits.
    Grid: tiles of a matrix fastest, then groups, then frequencies.
    """
    tile, matrix = tl.program_id(0) % tiles, tl.program_id(0) // tiles
    frequency, group = (matrix // groups).to(tl.int64), (matrix % groups).to(tl.int64)
    a += 2 * (frequency * a_frequency + group * a_group)
    b += 2 * (frequency * b_frequency + group * b_group)
    out += 2 * (frequency * out_frequency + group * out_group)
    m0, n0 = (tile // tiles_n) * BLOCK_M, (tile % tiles_n) * BLOCK_N
    m, n = m0 + tl.arange(0, BLOCK_M), n0 + tl.arange(0, BLOCK_N)
    a_exponent = _lift(a_peak, SCALED)
    b_exponent = _lift(b_peak, SCALED)
    if PROMOTE == 0:
        first, second, third = _sums(
            a, b, 0, depth, m, n, m0, n0, rows, columns, depth, a_stride, b_stride, a_exponent, b_exponent,
            A_DEPTH_INNER, B_DEPTH_INNER, CONJUGATE, PRODUCT, SCALED, FORM, EVEN_M, EVEN_N, EVEN_K,
            BLOCK_M, BLOCK_N, BLOCK_K,
        )  # fmt: skip
    else:
        first = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        second = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        third = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for start in range(0, depth, PROMOTE * BLOCK_K):
            one, two, three = _sums(
                a, b, start, tl.minimum(start + PROMOTE * BLOCK_K, depth), m, n, m0, n0, rows, columns, depth,
                a_stride, b_stride, a_exponent, b_exponent,
                A_DEPTH_INNER, B_DEPTH_INNER, CONJUGATE, PRODUCT, SCALED, FORM, EVEN_M, EVEN_N, EVEN_K,
                BLOCK_M, BLOCK_N, BLOCK_K,
            )  # fmt: skip
            first += one
            second += two
            third += three
    if FORM == 3:
        if CONJUGATE == "none":
            real, imag = first - second, third - first - second
        else:
            real, imag = first + second, third - first + second
    else:
        real, imag = first, second
    if SCALED:
        exponent = -(a_exponent + b_exponent)
        half = exponent >> 1
        real = real * _power(half) * _power(exponent - half)
        imag = imag * _power(half) * _power(exponent - half)
    value = tl.reshape(tl.join(real, imag), (BLOCK_M, 2 * BLOCK_N))
    n2 = 2 * n0 + tl.arange(0, 2 * BLOCK_N)
    pointers = out + (m * (2 * out_stride))[:, None] + n2[None, :]
    if EVEN_M and EVEN_N:
        if ACCUMULATE:
            value += tl.load(pointers)
        tl.store(pointers, value)
    else:
        mask = (m < rows)[:, None] & (n2 < 2 * columns)[None, :]
        if ACCUMULATE:
            value += tl.load(pointers, mask=mask, other=0.0)
        tl.store(pointers, value, mask=mask)


@triton.jit(do_not_specialize=["a_count", "b_count"])
def largest(a_peaks, b_peaks, out, a_count, b_count, BLOCK: tl.constexpr):
    """Write the largest of ``a_count`` numbers of ``a_peaks`` to ``out[0]``, and of ``b_peaks`` to ``out[1]``.

    Grid (2,).
    """
    source, count = a_peaks, a_count
    if tl.program_id(0) == 1:
        source, count = b_peaks, b_count
    top = tl.zeros([BLOCK], tl.int32)
    for start in range(0, count, BLOCK):
        e = start + tl.arange(0, BLOCK)
        top = tl.maximum(top, tl.load(source + e, mask=e < count, other=0))
    tl.store(out + tl.program_id(0), tl.max(top, axis=0))
