"""Copies that lay images or filters out for matrix units: channels innermost, zeros around, split into fp16 planes.

The packed form of a tensor (images, channels, depth, height, width) is rows of ``PLANES * padded channels`` elements,
one for each position. Positions of an image follow each other with gaps of zeros between lines and planes, so that an
address computed for a tap beyond the border meets zeros: one gap serves the end of a line and the start of the next.

An fp32 value splits into two fp16 values after scaling by a power of two that brings the largest of its image to
[2^14, 2^15): hi = fp16(s v) and lo = fp16(s v - hi). What is lost is at most 2^-23 |v|, or 2^-39 of the image's largest
value where that is more. A value that is not finite stays in hi, and lo is zero.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["pack", "peak"]


@triton.jit(do_not_specialize=["chunks", "depth", "height", "width", "s_c", "s_d", "s_h", "s_w"])
def peak(
    source, peaks, elements, chunks, depth, height, width, s_n, s_c, s_d, s_h, s_w, DENSE: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Biased fp32 exponent of the largest finite magnitude in each of ``chunks`` shares of every image.

    Grid (images * chunks,). ``DENSE``: an image's ``elements`` lie without gaps, in whatever order.
    """
    chunk, image = tl.program_id(0) % chunks, tl.program_id(0) // chunks
    base = source + image.to(tl.int64) * s_n
    top = tl.zeros([BLOCK], tl.int32)
    for start in range(chunk * BLOCK, elements, chunks * BLOCK):
        e = start + tl.arange(0, BLOCK)
        if DENSE:
            offset = e.to(tl.int64)
        else:
            w, rest = e % width, e // width
            h, rest = rest % height, rest // height
            d, c = rest % depth, rest // depth
            offset = c.to(tl.int64) * s_c + d.to(tl.int64) * s_d + h.to(tl.int64) * s_h + w.to(tl.int64) * s_w
        value = tl.load(base + offset, mask=e < elements, other=0.0).to(tl.float32)
        bits = value.to(tl.int32, bitcast=True) & 0x7FFFFFFF
        top = tl.maximum(top, tl.where(bits < 0x7F800000, bits, 0))
    tl.store(peaks + image * chunks + chunk, tl.max(top, axis=0) >> 23)


@triton.jit(
    do_not_specialize=[
        "first", "blocks", "chunks", "channels", "depth", "height", "width", "pitch_d", "pitch_h", "pitch_w", "head",
        "s_n", "s_c", "s_d", "s_h", "s_w",
    ]
)  # fmt: skip
def pack(
    source, peaks, target, exponents, first, blocks, chunks, channels, depth, height, width, pitch_d, pitch_h, pitch_w,
    head, s_n, s_c, s_d, s_h, s_w, row, row_channels,
    PLANES: tl.constexpr, SCALED: tl.constexpr, PER_IMAGE: tl.constexpr,
    CHUNKS: tl.constexpr, ALIGNED: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Write the packed form of images, and each image's exponent, or unless ``PER_IMAGE`` one for all of them.

    ``peaks`` holds ``chunks`` exponents for each image or for all. Grid (images * blocks, channel blocks); image
    ``first`` comes first, -1 where ``head`` positions of zeros lead. ``pitch_d``, ``pitch_h``, ``pitch_w`` count
    planes, lines and positions with their gaps. ``ALIGNED`` is 0, or where channels are innermost the elements of which
    ``channels`` and all other strides are multiples.
    """
    image = tl.program_id(0) // blocks + first
    block = tl.program_id(0) % blocks
    p = block * BLOCK_P + tl.arange(0, BLOCK_P)
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    w, line = p % pitch_w, p // pitch_w
    h, d = line % pitch_h, line // pitch_h
    inside = (w < width) & (h < height) & (d < depth) & (image >= 0)
    place = d.to(tl.int64) * s_d + h.to(tl.int64) * s_h + w.to(tl.int64) * s_w + image.to(tl.int64) * s_n
    if ALIGNED > 0:
        channels = channels // ALIGNED * ALIGNED  # the same number, which the compiler now knows to be a multiple
        pointers = source + (tl.multiple_of(place, ALIGNED)[:, None] + c[None, :])
    else:
        # Positions first: knowing nothing of strides, Triton lets neighbouring threads read neighbouring places.
        pointers = source + (place[:, None] + (c.to(tl.int64) * s_c)[None, :])
    value = tl.load(pointers, mask=inside[:, None] & (c < channels)[None, :], other=0.0)
    position = head + image.to(tl.int64) * (pitch_d * pitch_h * pitch_w) + p
    written = ((position >= 0) & (p < pitch_d * pitch_h * pitch_w))[:, None] & (c < row_channels)[None, :]
    place_out = target + (position * row)[:, None] + c[None, :]
    if SCALED:
        chunk = tl.arange(0, CHUNKS)
        owner = tl.maximum(image, 0) if PER_IMAGE else 0
        largest = tl.max(tl.load(peaks + owner * chunks + chunk, mask=chunk < chunks, other=0), axis=0)
        exponent = tl.maximum(largest, 15)
        if (block == 0) & (tl.program_id(1) == 0) & (image >= 0):
            tl.store(exponents + owner, exponent)
        scaled = value.to(tl.float32) * ((268 - exponent) << 23).to(tl.float32, bitcast=True)
        hi = scaled.to(tl.float16)
        tl.store(place_out, hi, mask=written)
        if PLANES == 2:
            rest = scaled - hi.to(tl.float32)
            rest = tl.where(tl.abs(scaled) < 65504.0, rest, 0.0)
            tl.store(place_out + row_channels, rest.to(tl.float16), mask=written)
    else:
        tl.store(place_out, value.to(target.dtype.element_ty), mask=written)
