"""Sums over windows of channels, and what is computed from them, for one vector of pixels or channels."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from llvmlite import ir
from numba.core import cgutils

from tilewise.kernels.cpu import masks
from tilewise.kernels.cpu.lrn.powers import power
from tilewise.kernels.cpu.lrn.told import ALPHA, BETA, SLOPE, K
from tilewise.kernels.cpu.vectors import INT, NUMBER, Code, Values, intrinsic_of

__all__ = ["forward", "gradient", "terms"]


class _Lanes:
    """Reads and writes vectors, of which only the lanes from ``low`` on and below ``high`` are in memory.

    Without limits whole vectors are. Along channels a vector that lies j places further has its limits j lanes before.
    """

    def __init__(self, code: Code, limits: Values | None, along: bool) -> None:
        self._code, self._limits, self._along = code, limits, along

    def read(self, address: ir.Value, further: ir.Value | None = None) -> ir.Value:
        """The vector at ``address``, which is the place ``further`` places from that of the limits."""
        if self._limits is None:
            return self._code.load(address)
        return masks.load(self._code, address, self._mask(further))

    def write(self, value: ir.Value, address: ir.Value) -> None:
        """Store a vector, lanes within the limits alone."""
        if self._limits is None:
            self._code.store(value, address)
        else:
            low, high = self._limits
            low = ir.Constant(INT, 0) if self._along else low
            masks.store(self._code, value, address, masks.between(self._code, low, high))

    def _mask(self, further: ir.Value | None) -> ir.Value:
        assert self._limits is not None
        low, high = self._limits
        if self._along and further is not None:
            low, high = (self._code.builder.sub(limit, further) for limit in (low, high))
        return masks.between(self._code, low, high)


def _places(code: Code, first: ir.Value, last: ir.Value) -> AbstractContextManager[Any]:
    """A loop over whole numbers from ``first`` on and below ``last``."""
    loop: AbstractContextManager[Any] = cgutils.for_range_slice(code.builder, first, last, ir.Constant(INT, 1), INT)
    return loop


def _denominator(code: Code, x: ir.Value, step: ir.Value, window: Values, numbers: ir.Value, lanes: _Lanes) -> ir.Value:
    """k + alpha / size times the sum of squares over the window of the vector at ``x``."""
    b = code.builder
    total = cgutils.alloca_once(b, code.vector)
    b.store(code.splat(0.0), total)
    with _places(code, *window) as (place, _):
        value = lanes.read(b.add(x, b.mul(place, step)), place)
        b.store(b.call(code.fma, [value, value, b.load(total)]), total)
    alpha, k = (code.broadcast(code.at(numbers, NUMBER * i)) for i in (ALPHA, K))
    return b.call(code.fma, [b.load(total), alpha, k])


@functools.cache
def forward(lanes: int, quarters: int, along: bool, masked: bool) -> Callable[..., None]:
    """Makes ``(x, step, first, last, y, numbers, ahead, low, high)``: one vector of the result.

    The window's vectors are ``step`` bytes apart, from ``first`` on and below ``last`` steps away from ``x``. ``ahead``
    is the number of bytes from ``x`` and ``y`` to what is wanted soon. With ``masked`` only lanes from ``low`` on and
    below ``high`` are in memory. With ``along`` vectors lie along channels, else along pixels.
    """

    def emit(code: Code, arguments: Values) -> None:
        x, step, first, last, y, numbers, ahead, *limits = arguments
        b, kept = code.builder, _Lanes(code, limits if masked else None, along)
        code.prefetch(b.add(x, ahead))
        d = _denominator(code, x, step, (first, last), numbers, kept)
        by, _ = power(code, d, quarters, code.broadcast(code.at(numbers, NUMBER * BETA)))
        kept.write(b.fmul(kept.read(x), by), y)

    return intrinsic_of(lanes, emit)


@functools.cache
def terms(lanes: int, quarters: int, along: bool, masked: bool) -> Callable[..., None]:
    """Makes ``(x, step, first, last, dy, dx, term, numbers, ahead, low, high)``, the first half of a gradient.

    It stores ``dy d^-beta`` to ``dx`` and ``dy x d^(-beta - 1)`` to ``term``, where a whole vector fits along pixels.
    The other arguments are those of :func:`forward`.
    """

    def emit(code: Code, arguments: Values) -> None:
        x, step, first, last, dy, dx, term, numbers, ahead, *limits = arguments
        b, kept = code.builder, _Lanes(code, limits if masked else None, along)
        code.prefetch(b.add(x, ahead))
        code.prefetch(b.add(dy, ahead))
        d = _denominator(code, x, step, (first, last), numbers, kept)
        power_of_d, by = power(code, d, quarters, code.broadcast(code.at(numbers, NUMBER * BETA)))
        direct = b.fmul(kept.read(dy), power_of_d)
        kept.write(direct, dx)
        value = b.fmul(b.fmul(direct, kept.read(x)), by)
        (kept.write if along else code.store)(value, term)

    return intrinsic_of(lanes, emit)


@functools.cache
def gradient(lanes: int, along: bool, masked: bool) -> Callable[..., None]:
    """Makes ``(term, step, first, last, x, dx, numbers, low, high)``, the second half of a gradient.

    It adds to ``dx`` the sum of terms times ``-2 alpha beta / size x``. The terms' vectors are whole, ``step`` bytes
    apart, from ``first`` on and below ``last`` steps away from ``term``.
    """

    def emit(code: Code, arguments: Values) -> None:
        term, step, first, last, x, dx, numbers, *limits = arguments
        b, kept = code.builder, _Lanes(code, limits if masked else None, along)
        total = cgutils.alloca_once(b, code.vector)
        b.store(code.splat(0.0), total)
        with _places(code, first, last) as (place, _):
            value = code.load(b.add(term, b.mul(place, step)))
            b.store(b.fadd(b.load(total), value), total)
        slope = b.fmul(kept.read(x), code.broadcast(code.at(numbers, NUMBER * SLOPE)))
        kept.write(b.call(code.fma, [slope, b.load(total), kept.read(dx)]), dx)

    return intrinsic_of(lanes, emit)
