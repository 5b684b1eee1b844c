"""What lies between a part's sums by channel and those of the whole image, in one launch, where a norm is over ranks.

Kernels of :mod:`tilewise.kernels.triton.norm_parts` sum up blocks of a part, and compute its elements. Between them a
dozen operators on a number a channel take longer to launch than to run. Here one kernel adds up the blocks' sums in
float64 and those of all ranks, and makes of them what the elements need. Where ranks do not see each other's memory
(``ranks`` 0) it runs twice: up to the part's sums (``FIRST``), which others add up, and from there on (``LAST``).

Every rank's buffer has a place for each rank's sums and for the count of them, twice, used in turn: a rank that writes
for the second time after these has the sums of all others for the first time after, which they wrote when they had read
these. So nobody waits for a place to be free, or finds another count in it than the one that is waited for. Block ``b``
of a launch counts its sums for itself, and is waited for by blocks ``b`` of the other ranks.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tilewise.kernels.triton.peer import met

__all__ = ["backward", "forward"]

TERMS = tl.constexpr(3)
"""Rows of sums at most."""
AT_ONCE = tl.constexpr(64)
"""Blocks' sums that are on their way at a time, as each is a wait for memory."""


@triton.jit
def _place(table, rank, turn, sender, ranks, CHANNELS: tl.constexpr):
    """The place in rank ``rank``'s buffer of the sums of ``sender``."""
    start = tl.load(table + rank).to(tl.pointer_type(tl.float64))
    return start + (turn * ranks + sender) * TERMS * CHANNELS


@triton.jit
def _flag(table, rank, turn, sender, ranks, block, CHANNELS: tl.constexpr, BLOCKS: tl.constexpr):
    """The place where rank ``rank`` reads how often block ``block`` of ``sender`` has written."""
    start = tl.load(table + rank).to(tl.pointer_type(tl.int32))
    # Sums of both turns come before, of two words each.
    return start + 2 * 2 * ranks * TERMS * CHANNELS + (turn * ranks + sender) * BLOCKS + block


@triton.jit
def _everyones(
    own0, own1, own2, c, there, table, counts, page, rounds, me, ranks,
    COUNTED: tl.constexpr, CHANNELS: tl.constexpr, BLOCKS: tl.constexpr, LOOK: tl.constexpr,
):  # fmt: skip
    """The sums of all ranks' rows, added in the order of ranks, and whether all have arrived."""
    block = tl.program_id(0)
    count = tl.load(counts + block)
    turn = count % 2
    for rank in range(ranks):
        if rank != me:
            box = _place(table, rank, turn, me, ranks, CHANNELS)
            tl.store(box + c, own0, mask=there)
            tl.store(box + CHANNELS + c, own1, mask=there)
            if COUNTED:
                tl.store(box + 2 * CHANNELS + c, own2, mask=there)
    tl.debug_barrier()
    for rank in range(ranks):
        if rank != me:
            flag = _flag(table, rank, turn, me, ranks, block, CHANNELS, BLOCKS)
            tl.atomic_xchg(flag, count + 1, sem="release", scope="sys")
    sum0, sum1, sum2 = tl.zeros_like(own0), tl.zeros_like(own0), tl.zeros_like(own0)
    here = count == count
    for rank in range(ranks):
        if rank == me:
            sum0 += own0
            sum1 += own1
            sum2 += own2
        else:
            flag = _flag(table, me, turn, rank, ranks, block, CHANNELS, BLOCKS)
            here &= met(flag, count + 1, page, rounds, rank, LOOK)
            box = _place(table, me, turn, rank, ranks, CHANNELS)
            # Written by another GPU: never from this one's L1.
            sum0 += tl.load(box + c, mask=there, other=0.0, cache_modifier=".cg")
            sum1 += tl.load(box + CHANNELS + c, mask=there, other=0.0, cache_modifier=".cg")
            if COUNTED:
                sum2 += tl.load(box + 2 * CHANNELS + c, mask=there, other=0.0, cache_modifier=".cg")
    if here:
        tl.store(counts + block, count + 1)
    return sum0, sum1, sum2, here


@triton.jit
def _together(parts, splits, c, there, channels, BLOCK: tl.constexpr):
    """Both rows of sums over all blocks, always in the same order."""
    sum0, sum1 = tl.zeros([BLOCK], tl.float64), tl.zeros([BLOCK], tl.float64)
    for first in range(0, splits, AT_ONCE):
        split = first + tl.arange(0, AT_ONCE)
        place = parts + split[:, None] * channels + c[None, :]
        some = (split < splits)[:, None] & there[None, :]
        sum0 += tl.sum(tl.load(place, mask=some, other=0.0), 0)
        sum1 += tl.sum(tl.load(place + splits * channels, mask=some, other=0.0), 0)
    return sum0, sum1


@triton.jit
def _moved(running, found, c, there, momentum):
    """Running statistics moved towards the new ones by ``momentum``."""
    before = tl.load(running + c, mask=there, other=0.0)
    moved = before * (1 - momentum) + found.to(tl.float32) * momentum
    tl.store(running + c, moved.to(running.dtype.element_ty), mask=there)


@triton.jit(do_not_specialize=["splits", "elements", "count", "channels", "rounds", "me", "ranks", "eps", "momentum"])
def forward(
    parts, sums, rows, running_mean, running_var, table, counts, page,
    splits, elements, count, channels, rounds, me, ranks, eps, momentum,
    FIRST: tl.constexpr, LAST: tl.constexpr, COUNTED: tl.constexpr, TRACKED: tl.constexpr,
    CHANNELS: tl.constexpr, BLOCKS: tl.constexpr, BLOCK: tl.constexpr, LOOK: tl.constexpr,
):  # fmt: skip
    """Means and variances of a whole image from those of parts.

    ``parts`` [2, splits, channels] are sums of blocks, of a part that has ``elements`` a channel. ``sums`` [TERMS,
    channels] is float64: of elements, of their squares and, with ``COUNTED``, how many they are, which is ``count``
    without. ``rows`` [3, channels]: mean, variance, and one over the root of that and ``eps``. With ``TRACKED`` running
    statistics are moved. Grid (blocks of channels,).
    """
    c = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    there = c < channels
    if FIRST:
        sum0, sum1 = _together(parts, splits, c, there, channels, BLOCK)
        sum2 = tl.zeros_like(sum0) + elements
    else:
        sum0 = tl.load(sums + c, mask=there, other=0.0)
        sum1 = tl.load(sums + channels + c, mask=there, other=0.0)
        sum2 = tl.zeros_like(sum0)
        if COUNTED:
            sum2 = tl.load(sums + 2 * channels + c, mask=there, other=0.0)
    here = channels == channels
    if FIRST and LAST:
        sum0, sum1, sum2, here = _everyones(
            sum0, sum1, sum2, c, there, table, counts, page, rounds, me, ranks, COUNTED, CHANNELS, BLOCKS, LOOK
        )  # fmt: skip
    if LAST:
        if here:
            total = sum2 if COUNTED else tl.zeros_like(sum0) + count
            m = sum0 / total
            var = tl.maximum(sum1 / total - m * m, 0.0)
            tl.store(rows + c, m.to(tl.float32), mask=there)
            tl.store(rows + channels + c, var.to(tl.float32), mask=there)
            tl.store(rows + 2 * channels + c, (1 / tl.sqrt(var + eps)).to(tl.float32), mask=there)
            if COUNTED:
                tl.store(sums + 2 * channels + c, total, mask=there)
            if TRACKED:
                _moved(running_mean, m, c, there, momentum)
                _moved(running_var, var * (total / (total - 1)), c, there, momentum)
    else:
        tl.store(sums + c, sum0, mask=there)
        tl.store(sums + channels + c, sum1, mask=there)
        if COUNTED:
            tl.store(sums + 2 * channels + c, sum2, mask=there)


@triton.jit(do_not_specialize=["splits", "count", "channels", "rounds", "me", "ranks"])
def backward(
    parts, rows, sums, totals, shares, means, table, counts, page,
    splits, count, channels, rounds, me, ranks,
    FIRST: tl.constexpr, LAST: tl.constexpr, COUNTED: tl.constexpr,
    CHANNELS: tl.constexpr, BLOCKS: tl.constexpr, BLOCK: tl.constexpr, LOOK: tl.constexpr,
):  # fmt: skip
    """Means over a whole image of its gradient, and of that times the centred elements over the variance.

    ``parts`` [2, splits, channels] are sums of blocks, of the gradient and of that times the elements less their mean.
    ``shares`` [2, channels]: of the bias' and the weight's gradient. ``means`` [2, channels] is what is made of
    the ``sums`` of all, ``rows`` and ``totals`` (with ``COUNTED`` the counts, row 2 of forward's sums) are forward's.
    """
    c = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    there = c < channels
    rstd = tl.load(rows + 2 * channels + c, mask=there, other=0.0).to(tl.float64)
    if FIRST:
        sum0, sum1 = _together(parts, splits, c, there, channels, BLOCK)
        sum1 *= rstd
        tl.store(shares + c, sum0.to(tl.float32), mask=there)
        tl.store(shares + channels + c, sum1.to(tl.float32), mask=there)
    else:
        sum0 = tl.load(sums + c, mask=there, other=0.0)
        sum1 = tl.load(sums + channels + c, mask=there, other=0.0)
    here = channels == channels
    if FIRST and LAST:
        sum0, sum1, _, here = _everyones(
            sum0, sum1, sum0, c, there, table, counts, page, rounds, me, ranks, False, CHANNELS, BLOCKS, LOOK
        )  # fmt: skip
    if LAST:
        if here:
            total = tl.zeros_like(sum0) + count
            if COUNTED:
                total = tl.load(totals + 2 * channels + c, mask=there, other=1.0)
            tl.store(means + c, (sum0 / total).to(tl.float32), mask=there)
            tl.store(means + channels + c, (sum1 / total / rstd).to(tl.float32), mask=there)
    else:
        tl.store(sums + c, sum0, mask=there)
        tl.store(sums + channels + c, sum1, mask=there)
