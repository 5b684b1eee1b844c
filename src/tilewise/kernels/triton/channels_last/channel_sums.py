"""Sums over all pixels by channel, of tensors whose channels lie innermost: what a norm in training waits for.

A program takes a range of pixels and a block of channels. It adds up in fp32, each thread its own pixels, and all
threads' sums once at the end. Sums of programs are [splits, 2, channels]: their number is small, and what adds them up
goes on with what the norm does next.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["gradient_sums", "moments"]


@triton.jit
def _stored(parts, sum0, sum1, c, some, channels):
    at = parts + tl.program_id(0).to(tl.int64) * 2 * channels + c
    tl.store(at, tl.sum(sum0, 0), mask=some)
    tl.store(at + channels, tl.sum(sum1, 0), mask=some)


@triton.jit(do_not_specialize=["pixels", "each"])
def moments(
    x, parts, pixels, channels, each, STAGES: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Sums of elements of ``x`` [pixels, channels] less those of its first pixel, and of these squared.

    Less the first pixel, as otherwise the digits of a variance are lost where a mean is far from zero. ``each`` pixels
    go into one sum. Grid (splits, blocks of channels).
    """
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    some = c < channels
    shift = tl.load(x + c, mask=some, other=0.0).to(tl.float32)
    sum0, sum1 = tl.zeros([BLOCK_P, BLOCK_C], tl.float32), tl.zeros([BLOCK_P, BLOCK_C], tl.float32)
    first = tl.program_id(0) * each
    last = tl.minimum(first + each, pixels)
    for start in tl.range(first, last, BLOCK_P, num_stages=STAGES):
        p = start + tl.arange(0, BLOCK_P)
        there = (p < last)[:, None] & some[None, :]
        value = tl.load(x + p.to(tl.int64)[:, None] * channels + c[None, :], mask=there, other=0.0).to(tl.float32)
        value = tl.where(there, value - shift[None, :], 0.0)
        sum0 += value
        sum1 += value * value
    _stored(parts, sum0, sum1, c, some, channels)


@triton.jit(do_not_specialize=["pixels", "each"])
def gradient_sums(
    dy, x, mean, centre, scale, weight, bias, parts, pixels, channels, each,
    GATED: tl.constexpr, STAGES: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Sums of the gradient ``dy`` [pixels, channels], and of it times ``x`` less ``mean``.

    With ``GATED`` the gradient counts where ``(x - centre) * scale * weight + bias``, rounded as ``x`` is, is above
    zero or NaN: it comes from behind a ReLU. ``each`` pixels go into one sum. Grid (splits, blocks of channels).
    """
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    some = c < channels
    m = tl.load(mean + c, mask=some, other=0.0).to(tl.float32)
    if GATED:
        u = tl.load(centre + c, mask=some, other=0.0).to(tl.float32)
        r = tl.load(scale + c, mask=some, other=0.0).to(tl.float32)
        w = tl.load(weight + c, mask=some, other=0.0).to(tl.float32)
        b = tl.load(bias + c, mask=some, other=0.0).to(tl.float32)
    sum0, sum1 = tl.zeros([BLOCK_P, BLOCK_C], tl.float32), tl.zeros([BLOCK_P, BLOCK_C], tl.float32)
    first = tl.program_id(0) * each
    last = tl.minimum(first + each, pixels)
    for start in tl.range(first, last, BLOCK_P, num_stages=STAGES):
        p = start + tl.arange(0, BLOCK_P)
        there = (p < last)[:, None] & some[None, :]
        at = p.to(tl.int64)[:, None] * channels + c[None, :]
        upstream = tl.load(dy + at, mask=there, other=0.0).to(tl.float32)
        value = tl.load(x + at, mask=there, other=0.0).to(tl.float32)
        if GATED:
            result = (value - u[None, :]) * r[None, :] * w[None, :] + b[None, :]
            upstream = tl.where(result.to(x.dtype.element_ty).to(tl.float32) <= 0, 0.0, upstream)
        sum0 += upstream
        sum1 += tl.where(there, upstream * (value - m[None, :]), 0.0)
    _stored(parts, sum0, sum1, c, some, channels)
