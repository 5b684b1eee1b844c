"""A part's share of a norm by channel: sums for its statistics and gradients, and its elements, in any dense layout.

Torch's kernels for statistics that are summed over ranks give each channel to one block, which leaves most of a GPU
idle where images are few and large, as those are that are split. Here a block takes ``BLOCK_C`` channels by ``BLOCK_S``
positions at a time, and as many of those as make enough blocks for the GPU.

Element (n, c, s) is at ``n * stride_n + c * stride_c + s * stride_s``, with ``positions`` s in each image. Sums of
blocks are [2, splits, channels] in float64.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["elements", "gradient", "gradient_sums", "statistics"]

COUNTS = ["images", "each"]
"""What else is given is known by multiples of 16, so that threads read and write words of 16 bytes."""


@triton.jit
def _tile(block, positions, stride_n, stride_c, stride_s, channels, BLOCK_C: tl.constexpr, BLOCK_S: tl.constexpr):
    """Offsets of block ``block`` of the images' positions, which of its elements are there, and how many positions."""
    blocks = tl.cdiv(positions, BLOCK_S)
    image = block // blocks
    first = (block - image * blocks) * BLOCK_S
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    s = first + tl.arange(0, BLOCK_S)
    far = image.to(tl.int64) * stride_n + c.to(tl.int64) * stride_c
    there = (c < channels)[:, None] & (s < positions)[None, :]
    return far[:, None] + s.to(tl.int64)[None, :] * stride_s, there, tl.minimum(positions - first, BLOCK_S)


@triton.jit
def _stored(sums, sum0, sum1, channels, BLOCK_C: tl.constexpr):
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    place = sums + tl.program_id(0) * channels + c
    tl.store(place, sum0, mask=c < channels)
    tl.store(place + tl.num_programs(0) * channels, sum1, mask=c < channels)


@triton.jit(do_not_specialize=COUNTS)
def statistics(
    x, sums, images, each, channels, positions, stride_n, stride_c, stride_s,
    BLOCK_C: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """Sums of elements and of their squares, of ``each`` blocks of positions. Grid (splits, blocks of channels).

    Each block's mean and squared deviations are merged with those before (Chan, Golub and LeVeque 1983), so that no
    digits are lost where a mean is far from zero; float64 has enough for the sums that are made of them.
    """
    first = tl.program_id(0) * each
    last = tl.minimum(first + each, images * tl.cdiv(positions, BLOCK_S))
    count = 0
    mean, squares = tl.zeros([BLOCK_C], tl.float64), tl.zeros([BLOCK_C], tl.float64)
    for block in range(first, last):
        offsets, there, more = _tile(
            block, positions, stride_n, stride_c, stride_s, channels, BLOCK_C, BLOCK_S
        )  # fmt: skip
        values = tl.load(x + offsets, mask=there, other=0.0).to(tl.float32)
        own = tl.sum(values, 1) / more
        apart = values - own[:, None]
        # Masked once rounded: fused into a sum across threads each thread would round its own, and threads that
        # hold the same sum would differ in its last bit.
        squared = tl.where(there, apart * apart, 0.0)
        delta = own.to(tl.float64) - mean
        share = more.to(tl.float64) / (count + more).to(tl.float64)
        mean += delta * share
        squares += tl.sum(squared, 1).to(tl.float64) + delta * delta * share * count
        count += more
    _stored(sums, mean * count, squares + mean * mean * count, channels, BLOCK_C)


@triton.jit(do_not_specialize=COUNTS)
def gradient_sums(
    dy, x, rows, sums, images, each, channels, positions, stride_n, stride_c, stride_s,
    BLOCK_C: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """Sums of the gradient ``dy``, and of that times the elements less their mean, ``rows`` [0]; as statistics."""
    first = tl.program_id(0) * each
    last = tl.minimum(first + each, images * tl.cdiv(positions, BLOCK_S))
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    mean = tl.load(rows + c, mask=c < channels, other=0.0)
    plain, centred = tl.zeros([BLOCK_C, BLOCK_S], tl.float32), tl.zeros([BLOCK_C, BLOCK_S], tl.float32)
    for block in range(first, last):
        offsets, there, _ = _tile(
            block, positions, stride_n, stride_c, stride_s, channels, BLOCK_C, BLOCK_S
        )  # fmt: skip
        upstream = tl.load(dy + offsets, mask=there, other=0.0).to(tl.float32)
        values = tl.load(x + offsets, mask=there, other=0.0).to(tl.float32)
        plain += upstream
        centred += upstream * (values - mean[:, None])
    _stored(sums, tl.sum(plain, 1).to(tl.float64), tl.sum(centred, 1).to(tl.float64), channels, BLOCK_C)


@triton.jit
def elements(
    x, rows, w, b, y, channels, positions, stride_n, stride_c, stride_s,
    WEIGHT: tl.constexpr, BIAS: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """Elements less their mean, over their deviation, with weight and bias. Grid (blocks of positions, of channels)."""
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    some = c < channels
    mean = tl.load(rows + c, mask=some, other=0.0)
    scale = tl.load(rows + 2 * channels + c, mask=some, other=0.0)
    if WEIGHT:
        scale *= tl.load(w + c, mask=some, other=0.0).to(tl.float32)
    offsets, there, _ = _tile(
        tl.program_id(0), positions, stride_n, stride_c, stride_s, channels, BLOCK_C, BLOCK_S
    )  # fmt: skip
    values = (tl.load(x + offsets, mask=there, other=0.0).to(tl.float32) - mean[:, None]) * scale[:, None]
    if BIAS:
        values += tl.load(b + c, mask=some, other=0.0).to(tl.float32)[:, None]
    tl.store(y + offsets, values.to(y.dtype.element_ty), mask=there)


@triton.jit
def gradient(
    dy, x, rows, means, w, dx, channels, positions, stride_n, stride_c, stride_s,
    WEIGHT: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """The gradient of the elements, by the whole image's ``means`` of :func:`gradient_sums`. Grid as for elements."""
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    some = c < channels
    mean = tl.load(rows + c, mask=some, other=0.0)
    rstd = tl.load(rows + 2 * channels + c, mask=some, other=0.0)
    plain = tl.load(means + c, mask=some, other=0.0)
    slope = tl.load(means + channels + c, mask=some, other=0.0) * rstd * rstd
    scale = rstd
    if WEIGHT:
        scale *= tl.load(w + c, mask=some, other=0.0).to(tl.float32)
    offsets, there, _ = _tile(
        tl.program_id(0), positions, stride_n, stride_c, stride_s, channels, BLOCK_C, BLOCK_S
    )  # fmt: skip
    upstream = tl.load(dy + offsets, mask=there, other=0.0).to(tl.float32)
    centred = tl.load(x + offsets, mask=there, other=0.0).to(tl.float32) - mean[:, None]
    values = (upstream - plain[:, None] - centred * slope[:, None]) * scale[:, None]
    tl.store(dx + offsets, values.to(dx.dtype.element_ty), mask=there)
