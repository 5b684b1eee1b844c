"""Direct depthwise convolution: every thread keeps a small tile of sums and reads each line of its window once.

A lane is one spatial tile of one channel. Lanes follow one another along channels where ``LANES_C`` channels lie
together in memory, else along tiles, and are then all of one channel. All loops over a tile and its taps are unrolled,
so that sums, the current line and the taps that it meets are registers, and an address is a register and a constant.

An axis is said by tables, made where the launch is: ``TAPS[o * kernel + k]`` is the place in the tile's window that
place ``o`` of the tile reads with tap ``k``, or -1; ``CHECKS[q]`` says of place ``q`` of the window what has to be
asked before it is read, the sum of ``LOW`` and ``HIGH``, or ``UNUSED``.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tilewise.kernels.triton.gemm.activations import activated

# Tuples of tensors grow by addition: Triton has no starred expressions.
# ruff: noqa: RUF005
# mypy: disable-error-code="assignment"

__all__ = ["HIGH", "LOW", "UNUSED", "add_shares", "gather", "pack_filter", "weight_gradient"]

LOW, HIGH, UNUSED = 1, 2, 4
"""A place of a window may lie before the first element, beyond the last, or is never read."""

_LOW, _HIGH, _UNUSED = tl.constexpr(LOW), tl.constexpr(HIGH), tl.constexpr(UNUSED)


@triton.constexpr_function
def _tap(table, q, o, kernel):
    """The tap with which place ``o`` of a tile reads place ``q`` of its window, or -1."""
    places = [table[o * kernel + k] for k in range(kernel)]
    return places.index(q) if q in places else -1


@triton.jit
def _parts(x, VECTOR: tl.constexpr):
    """The ``VECTOR`` columns of ``x`` as separate tensors."""
    if VECTOR == 1:
        return (x,)
    elif VECTOR == 2:
        a, b = tl.split(x)
        return a, b
    elif VECTOR == 4:
        even, odd = tl.split(tl.reshape(x, [x.shape[0], 2, 2]))
        a, c = tl.split(even)
        b, d = tl.split(odd)
        return a, b, c, d
    else:
        even, odd = tl.split(tl.reshape(x, [x.shape[0], VECTOR // 2, 2]))
        evens = _parts(even, VECTOR // 2)
        odds = _parts(odd, VECTOR // 2)
        found = ()
        for n in tl.static_range(VECTOR // 2):
            found = found + (evens[n], odds[n])
        return found


@triton.jit
def _joined(parts, VECTOR: tl.constexpr):
    """Tensors joined as the columns of one; its last dimension counts them."""
    if VECTOR == 1:
        return parts[0]
    elif VECTOR == 2:
        return tl.join(parts[0], parts[1])
    else:
        x = tl.join(_joined(parts[0::2], VECTOR // 2), _joined(parts[1::2], VECTOR // 2))
        return tl.reshape(x, [x.shape[0], VECTOR])


@triton.jit
def _line(places, row, column, valid, STRIDES: tl.constexpr, R: tl.constexpr, SIZES: tl.constexpr,
          ALL: tl.constexpr, CHECK: tl.constexpr, CHECKS: tl.constexpr, VECTOR: tl.constexpr):  # fmt: skip
    """Line ``R`` of the lanes' windows in fp32, a tensor for each place; zeros outside of the image.

    ``places`` points to the windows' first elements, which are at ``row``, ``column`` of the image. Where not ``valid``
    there are zeros too, unless ``ALL`` are. ``VECTOR`` elements are read at once.
    """
    found = ()
    for q in tl.static_range(0, len(CHECKS), VECTOR):
        if _UNUSED & CHECKS[q]:
            for _ in tl.static_range(VECTOR):
                found = found + (0.0,)
        else:
            pointers = places + (R * STRIDES[3] + q * STRIDES[4])
            if VECTOR > 1:
                pointers = pointers[:, None] + tl.arange(0, VECTOR)[None, :]
            if ALL and (CHECK | CHECKS[q]) == 0:
                value = tl.load(pointers)
            else:
                mask = valid
                if _LOW & CHECK:
                    mask = mask & (row + R >= 0)
                if _HIGH & CHECK:
                    mask = mask & (row + R < SIZES[1])
                if _LOW & CHECKS[q]:
                    mask = mask & (column + q >= 0)
                if _HIGH & CHECKS[q]:
                    mask = mask & (column + q < SIZES[2])
                if VECTOR > 1:
                    mask = mask[:, None]
                value = tl.load(pointers, mask=mask, other=0.0)
            found = found + _parts(value.to(tl.float32), VECTOR)
    return found


@triton.jit
def _taps(filters, K: tl.constexpr, STRIDE_H: tl.constexpr, STRIDE_W: tl.constexpr, WIDTH: tl.constexpr):
    """Row ``K`` of the lanes' filters in fp32, a tensor for each tap."""
    found = ()
    for k in tl.static_range(WIDTH):
        found = found + (tl.load(filters + (K * STRIDE_H + k * STRIDE_W)).to(tl.float32),)
    return found


@triton.jit
def _added(sums, line, taps, TAPS: tl.constexpr):
    """A line of sums, with the products of one row of taps and one line of the window added."""
    kernel: tl.constexpr = len(taps)
    found = ()
    for o in tl.static_range(len(sums)):
        total = sums[o]
        for k in tl.static_range(kernel):
            if TAPS[o * kernel + k] >= 0:
                total = tl.fma(line[TAPS[o * kernel + k]], taps[k], total)
        found = found + (total,)
    return found


@triton.jit
def _correlated(sums, FIRST: tl.constexpr, KW: tl.constexpr, line, values, TAPS: tl.constexpr):
    """All sums of taps, with the products of a line of the window and a line of the output gradient added to ``KW`` of
    them.
    """
    found = sums[:FIRST]
    for k in tl.static_range(KW):
        total = sums[FIRST + k]
        for o in tl.static_range(len(values)):
            if TAPS[o * KW + k] >= 0:
                total = tl.fma(line[TAPS[o * KW + k]], values[o], total)
        found = found + (total,)
    return found + sums[FIRST + KW :]


@triton.jit
def _tile(t, TILES: tl.constexpr):
    """Image, plane and tile's row and column of tile ``t``; ``TILES`` counts planes and tiles of an axis."""
    rest = t.to(tl.uint32)
    w = (rest % TILES[2]).to(tl.int32)
    rest = rest // TILES[2]
    h = (rest % TILES[1]).to(tl.int32)
    rest = rest // TILES[1]
    if TILES[0] == 1:
        d = h * 0
    else:
        d = (rest % TILES[0]).to(tl.int32)
        rest = rest // TILES[0]
    return rest.to(tl.int32), d, h, w


@triton.jit
def _plane(d, k, size, PLANES: tl.constexpr):
    """The plane of the source that plane ``d`` of the result meets at tap ``k``, and whether there is one."""
    plane = d * PLANES[0] + PLANES[1] + k * PLANES[2]
    if PLANES[3] == 1:
        return plane, (plane >= 0) & (plane < size)
    else:
        valid = (plane >= 0) & (plane % PLANES[3] == 0)
        plane = plane // PLANES[3]
        return plane, valid & (plane < size)


@triton.jit
def _place(n, c, d, h, w, STRIDES: tl.constexpr, LANES_C: tl.constexpr, RUN: tl.constexpr):
    """Elements from the first of a tensor: multiples of ``RUN`` or, with lanes along channels, runs that start there.

    This is promised of the operation that adds up the place: a promise made of what a function returns is lost.
    """
    place = n.to(tl.int64) * STRIDES[0] + d.to(tl.int64) * STRIDES[2] + h.to(tl.int64) * STRIDES[3]
    place += w.to(tl.int64) * STRIDES[4] + c.to(tl.int64) * STRIDES[1]
    if RUN > 1:
        place = tl.multiple_of(place, RUN)
        if LANES_C > 1:
            place = tl.max_contiguous(place, RUN)
    return place


@triton.jit
def _filter_place(c, tap, STRIDES: tl.constexpr, KERNEL: tl.constexpr):
    """Elements from the first of a filter to tap number ``tap`` of channel ``c``."""
    k = tap % (KERNEL[1] * KERNEL[2])
    return (
        c.to(tl.int64) * STRIDES[0] + (tap // (KERNEL[1] * KERNEL[2])).to(tl.int64) * STRIDES[1]
        + (k // KERNEL[2]).to(tl.int64) * STRIDES[2] + (k % KERNEL[2]).to(tl.int64) * STRIDES[3]
    )  # fmt: skip


@triton.jit
def _lane_channels(block, channels, LANES: tl.constexpr, LANES_C: tl.constexpr, RUN: tl.constexpr):
    """The lanes' channels, and whether they exist: beyond the last channel the first ones follow again."""
    if LANES_C == 1:
        return block, tl.full([LANES], True, tl.int1)
    else:
        c = block * LANES_C + tl.arange(0, LANES) % LANES_C
        own = c < channels // RUN * RUN  # the same number, which the compiler now knows to be a multiple
        c = c % channels
        if RUN > 1:
            c = tl.max_contiguous(tl.multiple_of(c, RUN), RUN)
        return c, own


@triton.jit
def _finished(value, added, places, mask, BIAS: tl.constexpr, RESIDUAL: tl.constexpr, ACTIVATION: tl.constexpr,
              PARAMETERS: tl.constexpr):  # fmt: skip
    """Sums in fp32 with the bias ``added`` and the residual at ``places``, after the activation."""
    if BIAS:
        value += added
    if RESIDUAL:
        value += tl.load(places, mask=mask, other=0.0).to(tl.float32)
    return activated(value, ACTIVATION, PARAMETERS[0], PARAMETERS[1], places.dtype.element_ty.primitive_bitwidth)


@triton.jit(do_not_specialize=["tiles", "channels"])
def gather(
    source, filters, out, bias, residual, tiles, channels,
    SOURCE: tl.constexpr, FILTERS: tl.constexpr, OUT: tl.constexpr, SIZES: tl.constexpr, OUTS: tl.constexpr,
    TILES: tl.constexpr, FIRST: tl.constexpr, STEP: tl.constexpr,
    ROWS: tl.constexpr, ROW_CHECKS: tl.constexpr, COLUMNS: tl.constexpr, COLUMN_CHECKS: tl.constexpr,
    PLANES: tl.constexpr, FLAT: tl.constexpr, KERNEL: tl.constexpr, SHARED: tl.constexpr, SUMMED: tl.constexpr,
    ACCUMULATE: tl.constexpr, BIAS: tl.constexpr, RESIDUAL: tl.constexpr, ACTIVATION: tl.constexpr,
    PARAMETERS: tl.constexpr, VECTOR: tl.constexpr, OUT_VECTOR: tl.constexpr,
    RUN: tl.constexpr, OUT_RUN: tl.constexpr, RUN_C: tl.constexpr,
    TILE_H: tl.constexpr, TILE_W: tl.constexpr, LANES: tl.constexpr, LANES_C: tl.constexpr,
):  # fmt: skip
    """``out`` [n, c, d, h, w] from windows of ``source``: a depthwise convolution or its input gradient.

    ``SOURCE`` and ``OUT`` are strides of image, channel, plane, row, column, ``FILTERS`` of channel, plane, row,
    column, in elements; ``SIZES`` and ``OUTS`` planes, rows, columns of source and result; ``TILES`` planes and tiles
    of the result. A tile's window starts at ``FIRST`` (row, column), and ``STEP`` further for each tile. ``PLANES`` =
    (a, b, c, r): plane d reads with tap k plane (a d + b + c k) / r of the source, where that is whole; ``FLAT``: all
    of them exist. ``SHARED`` channels of the result read one of the source, ``SUMMED`` of the source go to one of the
    result. ``RUN`` and ``OUT_RUN`` divide the places in memory of channels' runs or vectors, ``RUN_C`` the channels.
    ``BIAS``: the number of the channel in ``bias`` is added; ``RESIDUAL``: so is ``residual``, which lies as ``out``
    does. ``ACTIVATION`` with its two ``PARAMETERS`` comes last, and the result is rounded once.

    Grid (blocks of channels, which go fastest, times blocks of tiles,).
    """
    KH: tl.constexpr = KERNEL[1]
    blocks_c = tl.cdiv(channels, LANES_C)
    c, own = _lane_channels(tl.program_id(0) % blocks_c, channels, LANES, LANES_C, RUN_C)
    t = tl.program_id(0) // blocks_c * (LANES // LANES_C) + tl.arange(0, LANES) // LANES_C
    own = own & (t < tiles)
    n, d, h, w = _tile(tl.minimum(t, tiles - 1), TILES)
    row = h * STEP[0] + FIRST[0]
    column = w * STEP[1] + FIRST[1]
    sums = ()
    for _ in tl.static_range(TILE_H * TILE_W):
        sums = sums + (tl.zeros([LANES], tl.float32),)
    for e in range(SUMMED * KERNEL[0]):
        plane, valid = _plane(d, e % KERNEL[0], SIZES[0], PLANES)
        channel = c // SHARED * SUMMED + e // KERNEL[0]
        places = source + _place(n, channel, plane, row, column, SOURCE, LANES_C, RUN)
        channel = (c * SUMMED + e // KERNEL[0]).to(tl.int64)
        weights = filters + (channel * FILTERS[0] + e % KERNEL[0] * FILTERS[1])
        for r in tl.static_range(len(ROW_CHECKS)):
            if not (_UNUSED & ROW_CHECKS[r]):
                line = _line(places, row, column, valid, SOURCE, r, SIZES, FLAT, ROW_CHECKS[r], COLUMN_CHECKS, VECTOR)
                for o in tl.static_range(TILE_H):
                    if _tap(ROWS, r, o, KH) >= 0:
                        taps = _taps(weights, _tap(ROWS, r, o, KH), FILTERS[2], FILTERS[3], KERNEL[2])
                        added = _added(sums[o * TILE_W : (o + 1) * TILE_W], line, taps, COLUMNS)
                        sums = sums[: o * TILE_W] + added + sums[(o + 1) * TILE_W :]
    row = h * TILE_H
    column = w * TILE_W
    place = _place(n, c, d, row, column, OUT, LANES_C, OUT_RUN)
    if BIAS:  # after the sums, over which it would take a register
        added = tl.load(bias + c).to(tl.float32)
    else:
        added = 0.0
    for o in tl.static_range(TILE_H):
        for j in tl.static_range(0, TILE_W, OUT_VECTOR):
            written = own
            if OUTS[1] % TILE_H != 0:
                written = written & (row + o < OUTS[1])
            if OUTS[2] % TILE_W != 0:
                written = written & (column + j < OUTS[2])
            value = _joined(sums[o * TILE_W + j : o * TILE_W + j + OUT_VECTOR], OUT_VECTOR)
            target = out + place + (o * OUT[3] + j * OUT[4])
            like = residual + place + (o * OUT[3] + j * OUT[4])
            if OUT_VECTOR > 1:
                target = target[:, None] + tl.arange(0, OUT_VECTOR)[None, :]
                like = like[:, None] + tl.arange(0, OUT_VECTOR)[None, :]
                written = written[:, None]
            if ACCUMULATE:
                value += tl.load(target, mask=written, other=0.0).to(tl.float32)
            value = _finished(value, added, like, written, BIAS, RESIDUAL, ACTIVATION, PARAMETERS)
            tl.store(target, value.to(out.dtype.element_ty), mask=written)


@triton.jit(do_not_specialize=["tiles", "channels", "share"])
def weight_gradient(
    images, gradients, partials, tiles, channels, share,
    IMAGES: tl.constexpr, GRADIENTS: tl.constexpr, PARTIALS: tl.constexpr, SIZES: tl.constexpr, OUTS: tl.constexpr,
    TILES: tl.constexpr, FIRST: tl.constexpr, STEP: tl.constexpr,
    ROWS: tl.constexpr, ROW_CHECKS: tl.constexpr, COLUMNS: tl.constexpr, COLUMN_CHECKS: tl.constexpr,
    OUT_ROW_CHECKS: tl.constexpr, OUT_COLUMN_CHECKS: tl.constexpr,
    PLANES: tl.constexpr, FLAT: tl.constexpr, KERNEL: tl.constexpr, KERNEL_STEP: tl.constexpr, SHARED: tl.constexpr,
    VECTOR: tl.constexpr, OUT_VECTOR: tl.constexpr, RUN: tl.constexpr, OUT_RUN: tl.constexpr, RUN_C: tl.constexpr,
    TAPS_H: tl.constexpr, TILE_H: tl.constexpr, TILE_W: tl.constexpr, LANES: tl.constexpr, LANES_C: tl.constexpr,
    CHUNK: tl.constexpr,
):  # fmt: skip
    """Sums of every tap over ``share`` blocks of tiles, to a ``partials`` [tap or channel, the other] of their own.

    Tiles are of the output and its ``gradients``, windows of ``images``; their words are those of :func:`gather`.
    ``PARTIALS`` are strides of share, channel and tap. A program does ``TAPS_H`` rows of the kernel, whose windows lie
    ``KERNEL_STEP`` rows further for each row of the kernel. Lanes of one channel are added ``CHUNK`` taps at a time.

    Grid (blocks of channels, which go fastest, times planes of the kernel times parts of its rows, shares).
    """
    KH: tl.constexpr = KERNEL[1]
    KW: tl.constexpr = KERNEL[2]
    PARTS: tl.constexpr = (KH + TAPS_H - 1) // TAPS_H
    LANES_T: tl.constexpr = LANES // LANES_C
    blocks_c = tl.cdiv(channels, LANES_C)
    block = tl.program_id(0) % blocks_c
    k = tl.program_id(0) // blocks_c
    first_tap = k % PARTS * TAPS_H
    c, own_c = _lane_channels(block, channels, LANES, LANES_C, RUN_C)
    t = tl.program_id(1) * share * LANES_T + tl.arange(0, LANES) // LANES_C
    sums = ()
    for _ in tl.static_range(TAPS_H * KW):
        sums = sums + (tl.zeros([LANES], tl.float32),)
    for _ in range(share):
        n, d, h, w = _tile(tl.minimum(t, tiles - 1), TILES)
        plane, valid = _plane(d, k // PARTS, SIZES[0], PLANES)
        row = h * TILE_H
        column = w * TILE_W
        places = gradients + _place(n, c, d, row, column, GRADIENTS, LANES_C, OUT_RUN)
        own = own_c & (t < tiles)
        tile = ()
        for o in tl.static_range(TILE_H):
            tile = tile + _line(places, row, column, own, GRADIENTS, o, OUTS, False, OUT_ROW_CHECKS[o],
                                OUT_COLUMN_CHECKS, OUT_VECTOR)  # fmt: skip
        row = h * STEP[0] + FIRST[0] + first_tap * KERNEL_STEP
        column = w * STEP[1] + FIRST[1]
        places = images + _place(n, c // SHARED, plane, row, column, IMAGES, LANES_C, RUN)
        for r in tl.static_range(len(ROW_CHECKS)):
            if not (_UNUSED & ROW_CHECKS[r]):
                line = _line(places, row, column, valid, IMAGES, r, SIZES, FLAT, ROW_CHECKS[r], COLUMN_CHECKS, VECTOR)
                for o in tl.static_range(TILE_H):
                    if _tap(ROWS, r, o, TAPS_H) >= 0:
                        values = tile[o * TILE_W : (o + 1) * TILE_W]
                        sums = _correlated(sums, _tap(ROWS, r, o, TAPS_H) * KW, KW, line, values, COLUMNS)
        t += LANES_T
    partials += tl.program_id(1).to(tl.int64) * PARTIALS[0]
    for start in tl.static_range(0, TAPS_H * KW, CHUNK):
        chunk = sums[start : start + CHUNK]
        for _ in tl.static_range(CHUNK - len(chunk)):
            chunk = chunk + (tl.zeros([LANES], tl.float32),)
        e = start + tl.arange(0, CHUNK)
        tap = first_tap * KW + e
        written = (e < TAPS_H * KW) & (tap < KH * KW)
        target = partials + (k // PARTS * (KH * KW) + tap).to(tl.int64) * PARTIALS[2]
        total = tl.sum(tl.reshape(_joined(chunk, CHUNK), [LANES_T, LANES_C * CHUNK]), axis=0)
        if LANES_C == 1:
            tl.store(target + block.to(tl.int64) * PARTIALS[1], total, mask=written)
        else:
            own = block * LANES_C + tl.arange(0, LANES_C)
            target = target[None, :] + (own.to(tl.int64) * PARTIALS[1])[:, None]
            total = tl.reshape(total, [LANES_C, CHUNK])
            tl.store(target, total, mask=written[None, :] & (own < channels)[:, None])


@triton.jit(do_not_specialize=["channels", "total"])
def pack_filter(filters, packed, channels, total, FILTERS: tl.constexpr, KERNEL: tl.constexpr, BLOCK: tl.constexpr):
    """The filters in fp32 with channels innermost: ``packed`` [planes, rows, columns, channels]. Grid (blocks,)."""
    e = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    place = _filter_place(e % channels, e // channels, FILTERS, KERNEL)
    tl.store(packed + e, tl.load(filters + place, mask=e < total, other=0.0).to(tl.float32), mask=e < total)


@triton.jit(do_not_specialize=["shares", "channels", "total"])
def add_shares(
    partials, out, shares, channels, total, FILTERS: tl.constexpr, KERNEL: tl.constexpr, TAPS_FIRST: tl.constexpr,
    ACCUMULATE: tl.constexpr, BLOCK: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """Filters ``out``, of strides ``FILTERS`` as in :func:`gather`, from ``shares`` sums of ``total`` elements each.

    With ``TAPS_FIRST`` these are [tap, channel], else [channel, tap]; they are added in the same order each time.
    Grid (blocks,).
    """
    e = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    s = tl.arange(0, BLOCK_S)
    source = partials + (s.to(tl.int64) * total)[:, None] + e[None, :]
    sums = tl.zeros([BLOCK_S, BLOCK], tl.float32)
    for first in range(0, shares, BLOCK_S):
        sums += tl.load(source, mask=(first + s < shares)[:, None] & (e < total)[None, :], other=0.0)
        source += total.to(tl.int64) * BLOCK_S
    if TAPS_FIRST:
        c = e % channels
        tap = e // channels
    else:
        c = e // (KERNEL[0] * KERNEL[1] * KERNEL[2])
        tap = e % (KERNEL[0] * KERNEL[1] * KERNEL[2])
    target = out + _filter_place(c, tap, FILTERS, KERNEL)
    value = tl.sum(sums, axis=0)
    if ACCUMULATE:
        value += tl.load(target, mask=e < total, other=0.0).to(tl.float32)
    tl.store(target, value.to(out.dtype.element_ty), mask=e < total)
