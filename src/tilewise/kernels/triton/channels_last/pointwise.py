"""Convolutions of one tap whose channels lie innermost: a product of pixels and filters, finished as it is written.

Rows of the product are pixels, columns are output channels. Sums stay in registers until bias, residual and activation
are done with, so that the result goes through memory once.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tilewise.kernels.triton.gemm.activations import activated

__all__ = ["pointwise"]


@triton.jit(do_not_specialize=["pixels", "out_d", "out_h", "out_w"])
def pointwise(
    x, filters, out, bias, residual, pixels, inputs, outputs, out_d, out_h, out_w, x_n, x_d, x_h, x_w,
    STRIDED: tl.constexpr, WHOLE: tl.constexpr, BIAS: tl.constexpr, RESIDUAL: tl.constexpr,
    ACTIVATION: tl.constexpr, FIRST: tl.constexpr, SECOND: tl.constexpr,
    BLOCK_P: tl.constexpr, BLOCK_O: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """``out`` [pixels, outputs]: products of the pixels of ``x`` with ``filters`` [outputs, inputs], finished.

    ``x_*`` are the elements from one result's pixel to the next one's along each axis; unless ``STRIDED``, all pixels
    are ``x_w`` apart. ``bias`` has a number for each output, ``residual`` lies as ``out`` does. ``WHOLE`` says that
    ``BLOCK_K`` divides ``inputs``. Grid: tiles of ``BLOCK_P`` pixels by ``BLOCK_O`` outputs, the latter fastest.
    """
    tiles = tl.cdiv(outputs, BLOCK_O)
    o = tl.program_id(0) % tiles * BLOCK_O + tl.arange(0, BLOCK_O)
    p = tl.program_id(0) // tiles * BLOCK_P + tl.arange(0, BLOCK_P)
    # What lies beyond the ends reads the last pixel or filter again, and is not written.
    pixel, output = tl.minimum(p, pixels - 1), tl.minimum(o, outputs - 1)
    if STRIDED:
        w, rest = pixel % out_w, pixel // out_w
        h, rest = rest % out_h, rest // out_h
        place = (rest // out_d).to(tl.int64) * x_n + (rest % out_d * x_d + h * x_h + w * x_w)
    else:
        place = pixel.to(tl.int64) * x_w
    k = tl.arange(0, BLOCK_K)
    rows = x + place[:, None] + k[None, :]
    columns = filters + output[None, :] * inputs + k[:, None]
    total = tl.zeros([BLOCK_P, BLOCK_O], tl.float32)
    for first in range(0, inputs, BLOCK_K):
        if WHOLE:
            a, b = tl.load(rows), tl.load(columns)
        else:
            some = first + k < inputs
            a = tl.load(rows, mask=some[None, :], other=0.0)
            b = tl.load(columns, mask=some[:, None], other=0.0)
        total = tl.dot(a, b, total)
        rows += BLOCK_K
        columns += BLOCK_K
    if BIAS:
        total += tl.load(bias + output).to(tl.float32)[None, :]
    mask = (p < pixels)[:, None] & (o < outputs)[None, :]
    at = p.to(tl.int64)[:, None] * outputs + o[None, :]
    if RESIDUAL:
        total += tl.load(residual + at, mask=mask, other=0.0).to(tl.float32)
    total = activated(total, ACTIVATION, FIRST, SECOND, out.dtype.element_ty.primitive_bitwidth)
    tl.store(out + at, total.to(out.dtype.element_ty), mask=mask)
