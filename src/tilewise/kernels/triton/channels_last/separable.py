"""A depthwise convolution and the pointwise one behind it, where what lies between them stays in registers.

Channels lie innermost. A program computes a tile of pixels of the result. For one block of the channels between after
the other it sums the depthwise convolution's taps, finishes these sums, and multiplies them with the block's filters of
the pointwise convolution (Howard et al. 2017, section 3.1, has the two one after the other).

A lane is ``EDGE`` neighbouring pixels of one row. Each line of a lane's window is read once for all of them.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tilewise.kernels.triton.gemm.activations import activated

# Tuples of tensors grow by addition: Triton has no starred expressions.
# ruff: noqa: RUF005
# mypy: disable-error-code="assignment"

__all__ = ["separable"]


@triton.jit
def _zero(ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """A matrix of zeros."""
    return tl.zeros([ROWS, COLUMNS], tl.float32)


@triton.jit
def _from(start, COUNT: tl.constexpr):
    """``COUNT`` numbers from ``start`` on."""
    return start + tl.arange(0, COUNT)


@triton.jit
def _joined(parts, COUNT: tl.constexpr):
    """``COUNT`` matrices joined as the last dimension of one tensor; ``COUNT`` is a power of two."""
    if COUNT == 1:
        return tl.expand_dims(parts[0], 2)
    elif COUNT == 2:
        return tl.join(parts[0], parts[1])
    else:
        x = tl.join(_joined(parts[0::2], COUNT // 2), _joined(parts[1::2], COUNT // 2))
        return tl.reshape(x, [x.shape[0], x.shape[1], COUNT])


@triton.jit
def _rows(parts, COUNT: tl.constexpr):
    """``COUNT`` matrices as one, in which row n of each follows row n of the one before it."""
    if COUNT == 1:
        return parts[0]
    else:
        x = tl.permute(_joined(parts, COUNT), (0, 2, 1))
        return tl.reshape(x, [x.shape[0] * COUNT, x.shape[2]])


@triton.jit
def _place(tile, lane, LANES: tl.constexpr, DOWN: tl.constexpr, ACROSS: tl.constexpr):
    """Image, row and number along a row of the lanes of a tile."""
    w = tile % ACROSS * LANES[2] + lane % LANES[2]
    h = tile // ACROSS % DOWN * LANES[1] + lane // LANES[2] % LANES[1]
    return tile // (ACROSS * DOWN) * LANES[0] + lane // (LANES[1] * LANES[2]), h, w


@triton.jit
def _taps(filters, channels, KERNEL_W: tl.constexpr):
    """One row of the block's filters, a tensor for each tap; taps are ``channels`` numbers apart."""
    found = ()
    for k in tl.static_range(KERNEL_W):
        found = found + (tl.load(filters + k * channels)[None, :],)
    return found


@triton.jit
def _line_added(sums, places, taps, some, row_inside, column, width,
                STEP: tl.constexpr, STRIDE: tl.constexpr, DILATION: tl.constexpr, CHECKS: tl.constexpr,
                ROWS_CHECKED: tl.constexpr, WHOLE: tl.constexpr):  # fmt: skip
    """The sums of each pixel of the lanes, with one line of the windows times one row of ``taps`` added.

    ``places`` points to the lines' first pixels, which are at ``column`` of the image; the next pixels are ``STEP``
    elements further. ``CHECKS[q]`` says whether place ``q`` of a line may lie beside the image, and is empty for one
    that is never read. ``row_inside`` and ``some`` say which rows and channels exist, unless all do.
    """
    EDGE: tl.constexpr = len(sums)
    KERNEL_W: tl.constexpr = len(taps)
    for q in tl.static_range(len(CHECKS)):
        if CHECKS[q] != "":
            if CHECKS[q] == "inside":
                if ROWS_CHECKED:
                    mask = row_inside
                    if not WHOLE:
                        mask = mask & some
                    value = tl.load(places + q * STEP, mask=mask, other=0.0)
                elif WHOLE:
                    value = tl.load(places + q * STEP)
                else:
                    value = tl.load(places + q * STEP, mask=some, other=0.0)
            else:
                mask = (column + q >= 0) & (column + q < width)
                if ROWS_CHECKED:
                    mask = mask & row_inside
                if not WHOLE:
                    mask = mask & some
                value = tl.load(places + q * STEP, mask=mask, other=0.0)
            wide = value.to(tl.float32)
            found = ()
            for e in tl.static_range(EDGE):
                total = sums[e]
                for k in tl.static_range(KERNEL_W):
                    if e * STRIDE + k * DILATION == q:
                        total = total + wide * taps[k]
                found = found + (total,)
            sums = found
    return sums


@triton.jit(do_not_specialize=["images"])
def separable(
    x, taps, shifts, filters, bias, out, residual, images,
    SOURCE: tl.constexpr, TARGET: tl.constexpr, SIZES: tl.constexpr, OUTS: tl.constexpr,
    CHANNELS: tl.constexpr, OUTPUTS: tl.constexpr, KERNEL: tl.constexpr, STRIDE: tl.constexpr, DILATION: tl.constexpr,
    BEFORE: tl.constexpr, COLUMNS: tl.constexpr, ROWS_CHECKED: tl.constexpr,
    INNER: tl.constexpr, INNER_PARAMETERS: tl.constexpr, RESIDUAL: tl.constexpr, ACTIVATION: tl.constexpr,
    PARAMETERS: tl.constexpr, LANES: tl.constexpr, EDGE: tl.constexpr, BLOCK_K: tl.constexpr, PIECES: tl.constexpr,
    PARTS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """``out`` [image, row, column, output] from images ``x`` [image, row, column, channel].

    ``SOURCE`` and ``TARGET`` are strides of image, row and column in elements, ``SIZES`` and ``OUTS`` rows and columns
    of images and results; ``KERNEL``, ``STRIDE``, ``DILATION`` and ``BEFORE`` (padding) are of rows and columns. With
    channels filled up with zeros to a multiple of ``BLOCK_K``, ``taps`` [tap, channel] and ``shifts`` [channel] are
    the depthwise filters and biases in fp32, and ``filters`` [channel, output] those of the pointwise convolution,
    whose outputs are filled up to ``PARTS * WIDTH``, as its ``bias`` in fp32 is. ``residual`` lies as ``out`` does.

    ``LANES`` (images, rows, columns) are those of a program, each of ``EDGE`` pixels; a program's outputs are
    ``WIDTH``, in ``PIECES``. ``COLUMNS`` are the checks of a window's line, and ``ROWS_CHECKED`` says whether rows may
    lie beside the image.

    Grid (parts of outputs, which go fastest, times tiles of columns, rows, images,).
    """
    COUNT: tl.constexpr = LANES[0] * LANES[1] * LANES[2]
    PADDED: tl.constexpr = (CHANNELS + BLOCK_K - 1) // BLOCK_K * BLOCK_K
    WHOLE: tl.constexpr = CHANNELS % BLOCK_K == 0
    KERNEL_H: tl.constexpr = KERNEL[0]
    ACROSS: tl.constexpr = (OUTS[1] + LANES[2] * EDGE - 1) // (LANES[2] * EDGE)
    DOWN: tl.constexpr = (OUTS[0] + LANES[1] - 1) // LANES[1]
    part = tl.program_id(0) % PARTS
    tile = tl.program_id(0) // PARTS
    n, h, w = _place(tile, tl.arange(0, COUNT), LANES, DOWN, ACROSS)
    row, column = h * STRIDE[0] - BEFORE[0], w * (EDGE * STRIDE[1]) - BEFORE[1]
    # Images that do not exist read the last one again, and are not written.
    image = tl.minimum(n, images - 1).to(tl.int64) * SOURCE[0]
    corner = image + (row * SOURCE[1] + column * SOURCE[2])
    k = tl.arange(0, BLOCK_K)
    totals = ()
    for piece in tl.static_range(len(PIECES)):
        totals = totals + (_zero(COUNT * EDGE, PIECES[piece]),)
    for first in range(0, CHANNELS, BLOCK_K):
        c = first + k
        some = (c < CHANNELS)[None, :]
        products = ()
        start = part * WIDTH
        for piece in tl.static_range(len(PIECES)):
            o = _from(start, PIECES[piece])
            products = products + (tl.load(filters + c[:, None] * (PARTS * WIDTH) + o[None, :]),)
            start += PIECES[piece]
        places = x + corner[:, None] + c[None, :]
        shift = tl.zeros([COUNT, BLOCK_K], tl.float32) + tl.load(shifts + c)[None, :]
        sums = ()
        for _ in tl.static_range(EDGE):
            sums = sums + (shift,)
        # A loop that stays one: between what it gives and the products lies a change of layout, which would else be
        # moved up to the reads, where several warps would compute the same.
        for r in range(KERNEL_H):
            line = row + r * DILATION[0]
            inside = ((line >= 0) & (line < SIZES[0]))[:, None]
            weights = _taps(taps + r * KERNEL[1] * PADDED + c, PADDED, KERNEL[1])
            sums = _line_added(
                sums, places + r * (DILATION[0] * SOURCE[1]), weights, some, inside, column[:, None], SIZES[1],
                SOURCE[2], STRIDE[1], DILATION[1], COLUMNS, ROWS_CHECKED, WHOLE,
            )  # fmt: skip
        middle = ()
        for e in tl.static_range(EDGE):
            value = activated(
                sums[e], INNER, INNER_PARAMETERS[0], INNER_PARAMETERS[1], x.dtype.element_ty.primitive_bitwidth
            )
            middle = middle + (value.to(x.dtype.element_ty),)
        pixels = _rows(middle, EDGE)
        found = ()
        for piece in tl.static_range(len(PIECES)):
            found = found + (tl.dot(pixels, products[piece], totals[piece]),)
        totals = found
    pixel = tl.arange(0, COUNT * EDGE)
    n, h, w = _place(tile, pixel // EDGE, LANES, DOWN, ACROSS)
    w = w * EDGE + pixel % EDGE
    place = n.to(tl.int64) * TARGET[0] + (h * TARGET[1] + w * TARGET[2])
    exists = (n < images) & (h < OUTS[0]) & (w < OUTS[1])
    start = part * WIDTH
    for piece in tl.static_range(len(PIECES)):
        o = _from(start, PIECES[piece])
        start += PIECES[piece]
        total = totals[piece] + tl.load(bias + o)[None, :]
        mask = exists[:, None] & (o < OUTPUTS)[None, :]
        at = place[:, None] + o[None, :]
        if RESIDUAL:
            total += tl.load(residual + at, mask=mask, other=0.0).to(tl.float32)
        total = activated(total, ACTIVATION, PARAMETERS[0], PARAMETERS[1], out.dtype.element_ty.primitive_bitwidth)
        tl.store(out + at, total.to(out.dtype.element_ty), mask=mask)
