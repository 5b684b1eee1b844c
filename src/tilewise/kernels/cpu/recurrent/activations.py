"""Vectorised tanh and sigmoid in fp32. Values of any size are right, and NaN stays NaN."""

from __future__ import annotations

from collections.abc import Sequence

from llvmlite import ir

from tilewise.kernels.cpu.vectors import Code

__all__ = ["relu", "sigmoid", "tanh"]

SMALL = 0.625
"""Below here tanh is a polynomial, as the quotient would lose digits to cancellation."""
ODD = (-3.33332819422e-1, 1.33314422036e-1, -5.37397155531e-2, 2.06390887954e-2, -5.70498872745e-3)
"""(tanh(x) / x - 1) / x^2 as a polynomial of x^2 (Moshier's Cephes library, ``tanhf``)."""
EXPONENTIAL = (1.0, 1.0, 0.5000000120, 0.1666666546, 0.04166579589, 0.008333451907, 0.001398199951, 0.00019875691500)
"""exp(x) for |x| <= log(2) / 2 (the same, ``expf``)."""
SHIFTER = 1.5 * 2**23
"""A number that leaves no digits behind the point of a small one that is added to it."""
LOG2_HIGH, LOG2_LOW = 0.693359375, -2.12194440e-4
"""log(2) in two parts, of which a few bits of an exponent times the first are exact."""


def _polynomial(code: Code, x: ir.Value, coefficients: Sequence[float]) -> ir.Value:
    """The polynomial of ``x`` with these coefficients, the lowest first, by Horner's rule."""
    value: ir.Value = code.splat(coefficients[-1])
    for coefficient in coefficients[-2::-1]:
        value = code.builder.call(code.fma, [value, x, code.splat(coefficient)])
    return value


def _between(code: Code, x: ir.Value, most: float) -> ir.Value:
    """``x``, no less than ``-most`` and no more than ``most``; NaN stays, as comparisons with it are false."""
    b, high, low = code.builder, code.splat(most), code.splat(-most)
    x = b.select(b.fcmp_ordered(">", x, high), high, x)
    return b.select(b.fcmp_ordered("<", x, low), low, x)


def _exponential(code: Code, x: ir.Value) -> ir.Value:
    """exp of each lane; beyond 87 it is that of 87, so that neither it nor its inverse overflows."""
    b = code.builder
    x = _between(code, x, 87.0)
    shifted = b.call(code.fma, [x, code.splat(1.4426950408889634), code.splat(SHIFTER)])
    power = b.fsub(shifted, code.splat(SHIFTER))
    rest = b.call(code.fma, [power, code.splat(-LOG2_HIGH), x])
    rest = b.call(code.fma, [power, code.splat(-LOG2_LOW), rest])
    kind = ir.VectorType(ir.IntType(32), code.lanes)
    exponent = b.shl(b.add(b.bitcast(shifted, kind), code.whole(127)), code.whole(23))
    return b.fmul(_polynomial(code, rest, EXPONENTIAL), b.bitcast(exponent, code.vector))


def tanh(code: Code, x: ir.Value) -> ir.Value:
    """tanh of each lane, to about 2e-7 of its value."""
    b, one = code.builder, code.splat(1.0)
    square = b.fmul(x, x)
    small = b.call(code.fma, [b.fmul(x, square), _polynomial(code, square, ODD), x])
    large = b.fsub(one, b.fdiv(code.splat(2.0), b.fadd(_exponential(code, b.fadd(x, x)), one)))
    inside = b.and_(b.fcmp_ordered("<", x, code.splat(SMALL)), b.fcmp_ordered(">", x, code.splat(-SMALL)))
    return b.select(inside, small, large)


def sigmoid(code: Code, x: ir.Value) -> ir.Value:
    """1 / (1 + exp(-x)) of each lane, to about 2e-7 of its value, or 1e-38."""
    b, one = code.builder, code.splat(1.0)
    return b.fdiv(one, b.fadd(one, _exponential(code, b.fneg(x))))


def relu(code: Code, x: ir.Value) -> ir.Value:
    """``x`` where it is not below 0, else 0."""
    zero = code.splat(0.0)
    return code.builder.select(code.builder.fcmp_ordered("<", x, zero), zero, x)
