"""Copies that lay images or filters out for matrix units: channels innermost, zeros around, split into fp16 planes.

The packed form of a tensor (images, channels, depth, height, width) is rows of ``PLANES * padded channels`` elements,
one for each position. Positions of an image follow each other with gaps of zeros between lines and planes, so that an
address computed for a tap beyond the border meets zeros: one gap serves the end of a line and the start of the next.

An fp32 value splits into two fp16 values after scaling by a power of two that brings the largest of its image to
[2^14, 2^15): hi = fp16(s v) and lo = fp16(s v - hi). What is lost is at most 2^-23 |v|, or 2^-39 of the image's largest
value where that is more. A value that is not finite stays in hi, and lo is zero.

Both operands of a product are looked at in one launch, and packed in one: a filter is so small that a launch of its own
takes longer than what it does.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["pack", "peaks"]


@triton.jit
def _peak(
    program, source, found, elements, chunks, depth, height, width, s_n, s_c, s_d, s_h, s_w, DENSE: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """The part of :func:`peaks` for one operand, by images * chunks programs."""
    chunk, image = program % chunks, program // chunks
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
    tl.store(found + image * chunks + chunk, tl.max(top, axis=0) >> 23)


@triton.jit(
    do_not_specialize=[
        "programs", "a_chunks", "a_depth", "a_height", "a_width", "a_c", "a_d", "a_h", "a_w",
        "b_chunks", "b_depth", "b_height", "b_width", "b_c", "b_d", "b_h", "b_w",
    ]
)  # fmt: skip
def peaks(
    a, a_found, b, b_found, programs,
    a_elements, a_chunks, a_depth, a_height, a_width, a_n, a_c, a_d, a_h, a_w,
    b_elements, b_chunks, b_depth, b_height, b_width, b_n, b_c, b_d, b_h, b_w,
    A_DENSE: tl.constexpr, A_BLOCK: tl.constexpr, B_DENSE: tl.constexpr, B_BLOCK: tl.constexpr,
):  # fmt: skip
    """Biased fp32 exponent of the largest finite magnitude in each of ``chunks`` shares of every image.

    Of ``a`` by the first ``programs``, of ``b`` by those after them, if there are any. ``DENSE``: an image's
    ``elements`` lie without gaps, in whatever order. Grid (images * chunks of both,).
    """
    program = tl.program_id(0)
    if program < programs:
        _peak(program, a, a_found, a_elements, a_chunks, a_depth, a_height, a_width, a_n, a_c, a_d, a_h, a_w, A_DENSE,
             A_BLOCK)  # fmt: skip
    else:
        _peak(program - programs, b, b_found, b_elements, b_chunks, b_depth, b_height, b_width, b_n, b_c, b_d, b_h, b_w,
             B_DENSE, B_BLOCK)  # fmt: skip


@triton.jit
def _pack(
    program, source, peaks, target, exponents, first, blocks, chunks, channels, depth, height, width,
    pitch_d, pitch_h, pitch_w, head, s_n, s_c, s_d, s_h, s_w, row, row_channels,
    PLANES: tl.constexpr, SCALED: tl.constexpr, PER_IMAGE: tl.constexpr,
    CHUNKS: tl.constexpr, ALIGNED: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """The part of :func:`pack` for one operand, by images * blocks programs; image ``first`` comes first."""
    image = program // blocks + first
    block = program % blocks
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


@triton.jit(
    do_not_specialize=[
        "programs",
        "a_first", "a_blocks", "a_chunks", "a_channels", "a_depth", "a_height", "a_width", "a_pitch_d", "a_pitch_h",
        "a_pitch_w", "a_head", "a_n", "a_c", "a_d", "a_h", "a_w",
        "b_first", "b_blocks", "b_chunks", "b_channels", "b_depth", "b_height", "b_width", "b_pitch_d", "b_pitch_h",
        "b_pitch_w", "b_head", "b_n", "b_c", "b_d", "b_h", "b_w",
    ]
)  # fmt: skip
def pack(
    a, a_peaks, a_target, a_exponents, b, b_peaks, b_target, b_exponents, programs,
    a_first, a_blocks, a_chunks, a_channels, a_depth, a_height, a_width, a_pitch_d, a_pitch_h, a_pitch_w, a_head,
    a_n, a_c, a_d, a_h, a_w, a_row, a_row_channels,
    b_first, b_blocks, b_chunks, b_channels, b_depth, b_height, b_width, b_pitch_d, b_pitch_h, b_pitch_w, b_head,
    b_n, b_c, b_d, b_h, b_w, b_row, b_row_channels,
    A_CHUNKS: tl.constexpr, A_ALIGNED: tl.constexpr, A_BLOCK_C: tl.constexpr,
    B_CHUNKS: tl.constexpr, B_ALIGNED: tl.constexpr, B_BLOCK_C: tl.constexpr,
    PLANES: tl.constexpr, SCALED: tl.constexpr, PER_IMAGE: tl.constexpr, BLOCK_P: tl.constexpr,
):  # fmt: skip
    """Write the packed form of ``a`` by the first ``programs``, and of ``b`` by those after them.

    Each image's exponent is written too, or unless ``PER_IMAGE`` one for all of them. ``peaks`` holds ``chunks``
    exponents for each image or for all. Grid (images * blocks of both, channel blocks of the one that has more); image
    ``first`` comes first, -1 where ``head`` positions of zeros lead. ``pitch_d``, ``pitch_h``, ``pitch_w`` count
    planes, lines and positions with their gaps. ``ALIGNED`` is 0, or where channels are innermost the elements of which
    ``channels`` and all other strides are multiples.
    """
    program = tl.program_id(0)
    if program < programs:
        _pack(program, a, a_peaks, a_target, a_exponents, a_first, a_blocks, a_chunks, a_channels, a_depth, a_height,
              a_width, a_pitch_d, a_pitch_h, a_pitch_w, a_head, a_n, a_c, a_d, a_h, a_w, a_row, a_row_channels,
              PLANES, SCALED, PER_IMAGE, A_CHUNKS, A_ALIGNED, BLOCK_P, A_BLOCK_C)  # fmt: skip
    else:
        _pack(program - programs, b, b_peaks, b_target, b_exponents, b_first, b_blocks, b_chunks, b_channels, b_depth,
              b_height, b_width, b_pitch_d, b_pitch_h, b_pitch_w, b_head, b_n, b_c, b_d, b_h, b_w, b_row,
              b_row_channels, PLANES, SCALED, PER_IMAGE, B_CHUNKS, B_ALIGNED, BLOCK_P, B_BLOCK_C)  # fmt: skip
