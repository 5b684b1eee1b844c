"""Vectorised tanh and sigmoid in fp32. Values of any size are right, and NaN stays NaN."""

from __future__ import annotations

from collections.abc import Sequence

from llvmlite import ir

from tilewise.kernels.cpu.vectors import Code

__all__ = ["exponential", "polynomial", "power_of_two", "relu", "sigmoid", "tanh"]

EXPONENTIAL = (0.4999999815, 0.1666654342, 0.04166720071, 0.008366547133, 0.001388251639)
"""((exp(x) - 1) / x - 1) / x as a polynomial of x: exp(x) - 1 is right to 2e-8 of its value for |x| <= log(2) / 2."""
POWERS = (1.000000072, 0.6931469671, 0.2402211972, 0.05550713274, 0.009675541333, 0.001327647181)
"""2 to the power of x as a polynomial of x: it is right to 8e-8 of its value for |x| <= 1 / 2."""
SHIFTER = 1.5 * 2**23
"""A number that leaves no digits behind the point of a small one that is added to it."""


def polynomial(code: Code, x: ir.Value, coefficients: Sequence[float]) -> ir.Value:
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


def _powers(code: Code, x: ir.Value, most: float) -> tuple[ir.Value, ir.Value]:
    """A power of two, and what makes it exp(x) when it is multiplied by 1 more. ``x`` beyond ``most`` is ``most``."""
    b = code.builder
    x = _between(code, x, most)
    shifted = b.call(code.fma, [x, code.splat(1.4426950408889634), code.splat(SHIFTER)])
    power = b.fsub(shifted, code.splat(SHIFTER))
    rest = b.call(code.fma, [power, code.splat(-0.6931471805599453), x])
    kind = ir.VectorType(ir.IntType(32), code.lanes)
    scale = b.bitcast(b.shl(b.add(b.bitcast(shifted, kind), code.whole(127)), code.whole(23)), code.vector)
    return scale, b.call(code.fma, [b.fmul(rest, rest), polynomial(code, rest, EXPONENTIAL), rest])


def power_of_two(code: Code, x: ir.Value) -> ir.Value:
    """2 to the power of each lane, between -125 and 126, to about 1e-7 of its value."""
    b, kind = code.builder, ir.VectorType(ir.IntType(32), code.lanes)
    shifted = b.fadd(x, code.splat(SHIFTER))
    value = polynomial(code, b.fsub(x, b.fsub(shifted, code.splat(SHIFTER))), POWERS)
    exponent = b.shl(b.bitcast(shifted, kind), code.whole(23))
    return b.bitcast(b.add(b.bitcast(value, kind), exponent), code.vector)


def exponential(code: Code, x: ir.Value) -> ir.Value:
    """exp(x) of each lane, to about 2e-7 of its value, or 1e-37; ``x`` above 87 counts as 87."""
    scale, more = _powers(code, x, 87.0)
    return code.builder.call(code.fma, [scale, more, scale])


def tanh(code: Code, x: ir.Value) -> ir.Value:
    """tanh of each lane, to about 2e-7 of its value: (exp(2x) - 1) / (exp(2x) + 1)."""
    b = code.builder
    scale, more = _powers(code, b.fadd(x, x), 40.0)
    less_one = b.call(code.fma, [scale, more, b.fsub(scale, code.splat(1.0))])
    return b.fdiv(less_one, b.fadd(less_one, code.splat(2.0)))


def sigmoid(code: Code, x: ir.Value) -> ir.Value:
    """1 / (1 + exp(-x)) of each lane, to about 2e-7 of its value, or 1e-37."""
    b, one = code.builder, code.splat(1.0)
    return b.fdiv(one, b.fadd(exponential(code, b.fneg(x)), one))


def relu(code: Code, x: ir.Value) -> ir.Value:
    """``x`` where it is not below 0, else 0."""
    zero = code.splat(0.0)
    return code.builder.select(code.builder.fcmp_ordered("<", x, zero), zero, x)
