"""Moves numbers from memory with any strides to complex vectors, and back."""

from __future__ import annotations

import functools
from collections.abc import Callable

from tilewise.kernels.cpu import vectors
from tilewise.kernels.cpu.vectors import NUMBER, compiled, named

__all__ = ["DTYPES", "clear", "clear_part", "move", "moves"]


DTYPES = ("fp32", "bf16", "fp16")
"""The types of operands; kernels are told the index of one."""
BACK = len(DTYPES)
"""The number that is added to the index of a type for a move from vectors to memory."""


@functools.cache
def clear(lanes: int) -> Callable[..., None]:
    """Makes ``(address, count)``, which sets ``count`` complex vectors to zero."""
    zero = vectors.zero(lanes)
    size = NUMBER * lanes

    @compiled(lanes)
    def run(address, count):
        for i in range(2 * count):
            zero(address + i * size)

    return run


@functools.cache
def clear_part(lanes: int) -> Callable[..., None]:
    """Makes ``(address, count)``, which sets the real or the imaginary parts of ``count`` complex vectors to zero.

    ``address`` is that of the first such part.
    """
    zero = vectors.zero(lanes)
    vector = 2 * NUMBER * lanes

    @compiled(lanes)
    def run(address, count):
        for i in range(count):
            zero(address + i * vector)

    return run


@functools.cache
def _mover(lanes: int, dtype: str, back: bool) -> Callable[..., None]:
    """Makes the function of :func:`moves` for one type and direction."""
    size = vectors.SIZES[dtype]
    square = (vectors.square_out if back else vectors.square_in)(lanes, dtype)
    whole, element = ((vectors.vector_out if back else vectors.vector_in)(n, dtype) for n in (lanes, 1))
    written = 0 if back else lanes

    @compiled(lanes, dtype, back)
    def run(there, step, channel, valid, count, here, pitch):
        if step == size and count >= lanes:
            for i in range(0, count, lanes):
                # The last square overlaps the one before where they do not fit evenly.
                at = min(i, count - lanes)
                square(there + at * size, channel, valid, here + at * pitch, pitch)
        elif channel == size and valid == lanes:
            for i in range(count):
                whole(there + i * step, here + i * pitch)
        else:
            for i in range(count):
                for lane in range(max(written, valid)):
                    element(there + i * step + min(lane, valid - 1) * channel, here + i * pitch + lane * NUMBER)

    return run


def moves(lanes: int) -> Callable[..., None]:
    """Makes ``(kind, there, step, channel, valid, count, here, pitch)``, which moves numbers to vectors, or back.

    ``kind`` is the index of the type in :data:`DTYPES`, plus :data:`BACK` for a move from vectors to memory. In memory,
    at ``there``, each lane has ``count`` numbers ``step`` bytes apart, and lanes are ``channel`` bytes apart. Lanes
    from ``valid`` on repeat the last valid one, and are not written back. ``here`` is the real or the imaginary part of
    the first complex vector, and the next ones are ``pitch`` bytes apart.
    """
    in32, in_b16, in16 = (_mover(lanes, dtype, False) for dtype in DTYPES)
    out32, out_b16, out16 = (_mover(lanes, dtype, True) for dtype in DTYPES)

    def run(kind, there, step, channel, valid, count, here, pitch):
        if kind == 0:
            in32(there, step, channel, valid, count, here, pitch)
        elif kind == 1:
            in_b16(there, step, channel, valid, count, here, pitch)
        elif kind == 2:
            in16(there, step, channel, valid, count, here, pitch)
        elif kind == BACK:
            out32(there, step, channel, valid, count, here, pitch)
        elif kind == BACK + 1:
            out_b16(there, step, channel, valid, count, here, pitch)
        elif kind == BACK + 2:
            out16(there, step, channel, valid, count, here, pitch)

    return named(run, lanes)


@functools.cache
def move(lanes: int, back: bool) -> Callable[..., None]:
    """Makes ``(call, dtype, there, step, channel, valid, count, here, first, every, circle)``: moves around a circle.

    The function moves numbers as :func:`moves` does, with each ``every``-th vector of a circle, from vector ``first``
    on. ``circle`` is ``(n, block, apart)``: ``n`` vectors in blocks of ``block``, which begin ``apart`` complex vectors
    after each other. ``here`` is the address of vector 0, and ``call`` that of the compiled function of :func:`moves`.
    """
    vector, to, kind = 2 * NUMBER * lanes, vectors.pointer_call(), BACK if back else 0

    @compiled(lanes, back)
    def run(call, dtype, there, step, channel, valid, count, here, first, every, circle):
        n, block, apart = circle
        done = 0
        while done < count:
            place = (first + done * every) % n
            number, inside = place // block, place % block
            some = min(count - done, (block - inside + every - 1) // every)
            target = here + (number * apart + inside) * vector
            to(call, dtype + kind, there + done * step, step, channel, valid, some, target, every * vector)
            done += some

    return run
