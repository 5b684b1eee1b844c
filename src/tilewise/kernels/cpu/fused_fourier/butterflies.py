"""Fourier transforms of ``lanes`` signals at once, as passes of codelets for every radix, compiled once for all sizes.

The forward transform decimates in frequency, the backward one in time. Both work in place. As only products lie between
them, frequencies need never be put in order (Gentleman and Sande, "Fast Fourier transforms: for fun and profit", AFIPS
1966).
"""

from __future__ import annotations

import functools
from collections.abc import Callable

from llvmlite import ir
from numba.core import cgutils

from tilewise.kernels.codelets import fft
from tilewise.kernels.cpu.sizes import DIGIT
from tilewise.kernels.cpu.vectors import INT, NUMBER, Code, Pair, Values, compiled, intrinsic_of, named, pointer_call

__all__ = ["one_pass", "passes", "transform"]


def _codelet(code: Code, radix: int, sign: int, places: Values, factors: ir.Value | None) -> None:
    """Write the transform of the ``radix`` complex vectors at ``places``, in place.

    In a forward transform (sign -1) results are multiplied by the ``factors``, in a backward one inputs by their
    conjugates.
    """
    forward = sign < 0

    def turned(value: Pair, q: int) -> Pair:
        if factors is None or q == 0:
            return value
        at = code.at(factors, 2 * NUMBER * (q - 1))
        return code.product(value, (code.broadcast(at), code.broadcast(code.at(at, NUMBER))), not forward)

    codelet = fft(radix, sign)
    known: dict[str, ir.Value] = {}
    for q, place in enumerate(places):
        pair = code.load_pair(place)
        known[f"x{q}"], known[f"y{q}"] = pair if forward else turned(pair, q)
    for step in codelet.steps:
        known[step.target] = code.plus(known[step.a], step.factor, known[step.b])
    for q, (re, im) in enumerate(codelet.outputs):
        pair = code.times(re.factor, known[re.variable]), code.times(im.factor, known[im.variable])
        code.store_pair(turned(pair, q) if forward else pair, places[q])


@functools.cache
def _apart(lanes: int, radix: int, sign: int) -> Callable[..., None]:
    """Makes ``(address, blocks, block, each, apart, factors)``, a pass whose values lie ``apart`` bytes apart.

    There are ``blocks`` blocks of ``each`` codelets, which begin ``block`` bytes after each other.
    """

    def emit(code: Code, arguments: Values) -> None:
        address, blocks, block, each, apart, factors = arguments
        offsets = [code.builder.mul(apart, ir.Constant(INT, q)) for q in range(radix)]
        with cgutils.for_range(code.builder, blocks) as outer:
            start = code.builder.add(address, code.builder.mul(block, outer.index))
            with cgutils.for_range(code.builder, each) as inner:
                here = code.at(start, 2 * NUMBER * lanes, inner.index)
                turns = code.at(factors, 2 * NUMBER * (radix - 1), inner.index)
                _codelet(code, radix, sign, [code.builder.add(here, offset) for offset in offsets], turns)

    return intrinsic_of(lanes, emit)


@functools.cache
def _together(lanes: int, radix: int, sign: int) -> Callable[..., None]:
    """Makes ``(address, blocks)``, a pass whose values are neighbours, which has no factors."""
    vector = 2 * NUMBER * lanes

    def emit(code: Code, arguments: Values) -> None:
        address, blocks = arguments
        with cgutils.for_range(code.builder, blocks) as outer:
            here = code.at(address, radix * vector, outer.index)
            _codelet(code, radix, sign, [code.at(here, q * vector) for q in range(radix)], None)

    return intrinsic_of(lanes, emit)


def passes(lanes: int) -> Callable[..., None]:
    """Makes ``(sign, radix, address, blocks, block, each, apart, factors)``, one pass of a transform.

    ``apart`` is 0 for values that are neighbours. The other arguments are as in :func:`_apart`.
    """
    f16, f12, f9, f8, f6, f4, f3, f2 = (_apart(lanes, radix, -1) for radix in (16, 12, 9, 8, 6, 4, 3, 2))
    b16, b12, b9, b8, b6, b4, b3, b2 = (_apart(lanes, radix, 1) for radix in (16, 12, 9, 8, 6, 4, 3, 2))
    s16, s12, s9, s8, s6, s4, s3, s2 = (_together(lanes, radix, -1) for radix in (16, 12, 9, 8, 6, 4, 3, 2))
    t16, t12, t9, t8, t6, t4, t3, t2 = (_together(lanes, radix, 1) for radix in (16, 12, 9, 8, 6, 4, 3, 2))

    def run(sign, radix, address, blocks, block, each, apart, factors):
        if sign < 0 and apart > 0:
            if radix == 16:
                f16(address, blocks, block, each, apart, factors)
            elif radix == 12:
                f12(address, blocks, block, each, apart, factors)
            elif radix == 9:
                f9(address, blocks, block, each, apart, factors)
            elif radix == 8:
                f8(address, blocks, block, each, apart, factors)
            elif radix == 6:
                f6(address, blocks, block, each, apart, factors)
            elif radix == 4:
                f4(address, blocks, block, each, apart, factors)
            elif radix == 3:
                f3(address, blocks, block, each, apart, factors)
            elif radix == 2:
                f2(address, blocks, block, each, apart, factors)
        elif apart > 0:
            if radix == 16:
                b16(address, blocks, block, each, apart, factors)
            elif radix == 12:
                b12(address, blocks, block, each, apart, factors)
            elif radix == 9:
                b9(address, blocks, block, each, apart, factors)
            elif radix == 8:
                b8(address, blocks, block, each, apart, factors)
            elif radix == 6:
                b6(address, blocks, block, each, apart, factors)
            elif radix == 4:
                b4(address, blocks, block, each, apart, factors)
            elif radix == 3:
                b3(address, blocks, block, each, apart, factors)
            elif radix == 2:
                b2(address, blocks, block, each, apart, factors)
        elif sign < 0:
            if radix == 16:
                s16(address, blocks)
            elif radix == 12:
                s12(address, blocks)
            elif radix == 9:
                s9(address, blocks)
            elif radix == 8:
                s8(address, blocks)
            elif radix == 6:
                s6(address, blocks)
            elif radix == 4:
                s4(address, blocks)
            elif radix == 3:
                s3(address, blocks)
            elif radix == 2:
                s2(address, blocks)
        else:
            if radix == 16:
                t16(address, blocks)
            elif radix == 12:
                t12(address, blocks)
            elif radix == 9:
                t9(address, blocks)
            elif radix == 8:
                t8(address, blocks)
            elif radix == 6:
                t6(address, blocks)
            elif radix == 4:
                t4(address, blocks)
            elif radix == 3:
                t3(address, blocks)
            elif radix == 2:
                t2(address, blocks)

    return named(run, lanes)


@functools.cache
def one_pass(lanes: int, sign: int) -> Callable[..., None]:
    """Makes ``(call, radix, address, each, apart, factors)``, the first of several passes alone, ``apart`` in bytes.

    ``call`` is the address of the compiled function of :func:`passes`.
    """
    to = pointer_call()

    @compiled(lanes, sign)
    def run(call, radix, address, each, apart, factors):
        to(call, sign, radix, address, 1, 0, each, apart, factors)

    return run


@functools.cache
def transform(lanes: int, sign: int) -> Callable[..., None]:
    """Makes ``(call, address, n, radices, factors)``, which transforms n complex vectors in place, without scaling.

    The forward transform gives frequencies in the order of ``sizes.order``, and the backward one takes them so.
    ``call`` is the address of the compiled function of :func:`passes`, ``radices`` are those of ``sizes.packed``, and
    ``factors`` is the address of ``sizes.twiddles``.
    """
    to, vector = pointer_call(), 2 * NUMBER * lanes

    @compiled(lanes, sign)
    def forward(call, address, n, radices, factors):
        length = n
        while length > 1:
            radix = radices % DIGIT
            radices //= DIGIT
            apart = length // radix
            step = apart * vector if apart > 1 else 0
            to(call, sign, radix, address, n // length, length * vector, apart, step, factors)
            factors += 2 * NUMBER * apart * (radix - 1)
            length = apart

    @compiled(lanes, sign)
    def backward(call, address, n, radices, factors):
        # The passes run in the reverse order of the forward transform. The first loop skips over their factors.
        apart, left, highest = n, radices, 1
        while left:
            apart //= left % DIGIT
            factors += 2 * NUMBER * apart * (left % DIGIT - 1)
            left //= DIGIT
            highest *= DIGIT
        while apart < n:
            highest //= DIGIT
            radix = radices // highest % DIGIT
            factors -= 2 * NUMBER * apart * (radix - 1)
            step = apart * vector if apart > 1 else 0
            to(call, sign, radix, address, n // (apart * radix), apart * radix * vector, apart, step, factors)
            apart *= radix

    return forward if sign < 0 else backward
