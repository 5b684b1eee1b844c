"""Messages between GPUs that reach each other's memory, by way of a mailbox at the receiver's, in one launch.

A message is its elements in one order, cut into chunks of so many bytes. Block ``b`` of the sender's writes chunks
``b``, ``b + CHANNELS``, ... to their places in the mailbox, block ``b`` of the receiver's reads them. The two are a
channel: they share no chunk and no counter with other blocks, so that nothing waits for all blocks of a launch. Each
side counts its messages and releases its count where the other side looks for it: the receiver reads what the sender
has written, which writes anew only where everything was read. Counts lie in memory, so a CUDA graph that was captured
once may be replayed.

A launch writes up to two messages and reads up to two, for which its last blocks wait. Its first ones write: they wait
for none of the others', only for what earlier launches read, so that ranks which wait for each other's are always sent
it, however few blocks have a place on a GPU.

What waits gives up after ``rounds`` times ``LOOK`` looks, or where ``page[0]`` is no longer 0; then it moves and counts
nothing and writes 1 plus the number of the rank that it waited for to ``page[1]``, in memory of the host.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["message", "met"]

SCALARS = [f"{name}{n}" for n in range(4) for name in ("rank", "words", *(f"size_{d}" for d in range(1, 5)))]
"""Of each message: the rank at its other end, its words, and the sizes of the inner of five dimensions."""
STRIDES = [f"stride_{d}{n}" for n in range(4) for d in range(5)]


@triton.jit
def met(flag, wanted, page, rounds, rank, LOOK: tl.constexpr):
    """Wait until ``flag`` becomes ``wanted``; returns whether it did.

    What others wrote before it is then visible to this block.
    """
    # Plain looks, each warp for itself: what an atomic finds, Triton brings to a block's warps through shared memory
    # with one barrier a turn, so that in a loop a warp may read the next turn's value and leave without the others.
    seen = tl.load(flag, volatile=True)
    turn = 0
    while (seen != wanted) & (turn < rounds):
        look = 0
        while (seen != wanted) & (look < LOOK):
            seen = tl.load(flag, volatile=True)
            look += 1
        # The page is a microsecond away for each warp in turn: it is read where nothing came, and seldom.
        stopped = tl.load(page, mask=seen != wanted, other=0, volatile=True)
        turn = tl.where(stopped == 0, turn + 1, rounds)
    # The look that counts is one for all warps.
    seen = tl.atomic_add(flag, 0, sem="acquire", scope="sys")
    if seen != wanted:
        tl.store(page + 1, rank + 1)
    return seen == wanted


@triton.jit
def _place(e, size_1, size_2, size_3, size_4, stride_0, stride_1, stride_2, stride_3, stride_4, DIMS: tl.constexpr):
    """Where element ``e`` is in strided memory, of whose five dimensions the innermost ``DIMS`` are there.

    With 0 it is one run.
    """
    if DIMS == 0:
        return e.to(tl.int64)
    rest = e
    found = tl.zeros_like(e).to(tl.int64)
    if DIMS > 1:
        found, rest = _inner(found, rest, size_4, stride_4)
    if DIMS > 2:
        found, rest = _inner(found, rest, size_3, stride_3)
    if DIMS > 3:
        found, rest = _inner(found, rest, size_2, stride_2)
    if DIMS > 4:
        found, rest = _inner(found, rest, size_1, stride_1)
    outer = (stride_4, stride_3, stride_2, stride_1, stride_0)
    return found + rest.to(tl.int64) * outer[DIMS - 1]


@triton.jit
def _inner(found, e, size, stride):
    """``found`` moved along one dimension, and the index that is left for the outer ones."""
    rest = e // size
    return found + (e - rest * size).to(tl.int64) * stride, rest


@triton.jit
def _moved(
    channel, memory, box, awaited, released, counts, page, rounds,
    rank, words, size_1, size_2, size_3, size_4, stride_0, stride_1, stride_2, stride_3, stride_4,
    TAKE: tl.constexpr, WORDS: tl.constexpr, CHANNELS: tl.constexpr, DIMS: tl.constexpr, LOOK: tl.constexpr,
):  # fmt: skip
    """Write a channel's chunks of a message into a mailbox, or with ``TAKE`` read them from there."""
    count = tl.load(counts + channel)
    if met(awaited + channel, count + 1 if TAKE else count, page, rounds, rank, LOOK):
        for chunk in range(channel, tl.cdiv(words, WORDS), CHANNELS):
            e = chunk * WORDS + tl.arange(0, WORDS)
            there = e < words
            place = memory + _place(
                e, size_1, size_2, size_3, size_4, stride_0, stride_1, stride_2, stride_3, stride_4, DIMS
            )  # fmt: skip
            if TAKE:
                # Written by another GPU: never from this one's L1.
                tl.store(place, tl.load(box + e, mask=there, cache_modifier=".cg"), mask=there)
            else:
                tl.store(box + e, tl.load(place, mask=there), mask=there)
        tl.debug_barrier()
        tl.store(counts + channel, count + 1)
        tl.atomic_xchg(released + channel, count + 1, sem="release", scope="sys")


@triton.jit(do_not_specialize=["rounds", "blocks0", "blocks1", "blocks2", *SCALARS, *STRIDES])
def message(
    memory0, memory1, memory2, memory3, box0, box1, box2, box3, awaited0, awaited1, awaited2, awaited3,
    released0, released1, released2, released3, counts0, counts1, counts2, counts3, page,
    rounds, blocks0, blocks1, blocks2,
    rank0, words0, size_10, size_20, size_30, size_40, rank1, words1, size_11, size_21, size_31, size_41,
    rank2, words2, size_12, size_22, size_32, size_42, rank3, words3, size_13, size_23, size_33, size_43,
    stride_00, stride_10, stride_20, stride_30, stride_40, stride_01, stride_11, stride_21, stride_31, stride_41,
    stride_02, stride_12, stride_22, stride_32, stride_42, stride_03, stride_13, stride_23, stride_33, stride_43,
    PUSH_WORDS: tl.constexpr, PUSH_DIMS: tl.constexpr, TAKE_WORDS: tl.constexpr, TAKE_DIMS: tl.constexpr,
    CHANNELS: tl.constexpr, LOOK: tl.constexpr,
):  # fmt: skip
    """Write messages 0 and 1 from strided memory into mailboxes, and read messages 2 and 3 from mailboxes into memory.

    The ``WORDS`` are those of a chunk. ``counts`` are this side's; ``awaited`` is where the other's come, ``released``
    where the other looks for this side's. Grid (channels of all messages,), of which ``blocks0`` are the first one's.
    """
    block = tl.program_id(0)
    if block < blocks0 + blocks1:
        second = block >= blocks0
        _moved(
            block - tl.where(second, blocks0, 0), tl.where(second, memory1, memory0), tl.where(second, box1, box0),
            tl.where(second, awaited1, awaited0), tl.where(second, released1, released0),
            tl.where(second, counts1, counts0), page, rounds,
            tl.where(second, rank1, rank0), tl.where(second, words1, words0), tl.where(second, size_11, size_10),
            tl.where(second, size_21, size_20), tl.where(second, size_31, size_30), tl.where(second, size_41, size_40),
            tl.where(second, stride_01, stride_00), tl.where(second, stride_11, stride_10),
            tl.where(second, stride_21, stride_20), tl.where(second, stride_31, stride_30),
            tl.where(second, stride_41, stride_40), False, PUSH_WORDS, CHANNELS, PUSH_DIMS, LOOK,
        )  # fmt: skip
    else:
        block -= blocks0 + blocks1
        second = block >= blocks2
        _moved(
            block - tl.where(second, blocks2, 0), tl.where(second, memory3, memory2), tl.where(second, box3, box2),
            tl.where(second, awaited3, awaited2), tl.where(second, released3, released2),
            tl.where(second, counts3, counts2), page, rounds,
            tl.where(second, rank3, rank2), tl.where(second, words3, words2), tl.where(second, size_13, size_12),
            tl.where(second, size_23, size_22), tl.where(second, size_33, size_32), tl.where(second, size_43, size_42),
            tl.where(second, stride_03, stride_02), tl.where(second, stride_13, stride_12),
            tl.where(second, stride_23, stride_22), tl.where(second, stride_33, stride_32),
            tl.where(second, stride_43, stride_42), True, TAKE_WORDS, CHANNELS, TAKE_DIMS, LOOK,
        )  # fmt: skip
