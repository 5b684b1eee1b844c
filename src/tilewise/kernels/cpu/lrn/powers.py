"""Negative powers of positive numbers in fp32, for whole vectors.

A power whose exponent is a multiple of 1/4 is made of square roots. For others ``d^-beta`` is ``2^(-beta log2 d)``, by
polynomials for the logarithm of the mantissa and for the power of what is behind the point.
"""

from __future__ import annotations

from collections.abc import Sequence

from llvmlite import ir
from numba.core import cgutils

from tilewise.kernels.cpu.vectors import Code

__all__ = ["GENERAL", "inverse", "power"]

GENERAL = -1
"""In place of a number of quarters: any exponent."""
TERMS = 9
"""The last power in the odd series 2 / ln(2) (s + s^3 / 3 + ...) of log2((1 + s) / (1 - s)), for |s| below 0.172."""
SHIFTER = 1.5 * 2**23
"""A number that leaves no digits behind the point of a small one that is added to it."""
LN2 = 0.6931471805599453
HALF_ROOT = 0x3F3504F3
"""The bits of sqrt(1/2): mantissas are taken from there to sqrt(2), so that their logarithms are small."""


def inverse(code: Code, d: ir.Value) -> ir.Value:
    """1 / d of each lane."""
    return code.builder.fdiv(code.splat(1.0), d)


def power(code: Code, d: ir.Value, quarters: int, beta: ir.Value) -> tuple[ir.Value, ir.Value]:
    """``d^-beta`` and ``1 / d`` of each lane, for ``d`` that is positive, infinite or NaN.

    ``beta`` is ``quarters / 4``, or with ``GENERAL`` the number in all lanes of the vector ``beta``.
    """
    by = inverse(code, d)
    if quarters == GENERAL:
        return _general(code, d, beta), by
    b, factors = code.builder, [by] * (quarters // 4)
    if quarters % 4:
        root = _root(code, by)
        factors += [root] if quarters % 4 >= 2 else []
        factors += [_root(code, root)] if quarters % 2 else []
    value = factors[0] if factors else code.splat(1.0)
    for factor in factors[1:]:
        value = b.fmul(value, factor)
    return value, by


def _root(code: Code, value: ir.Value) -> ir.Value:
    """The square root of each lane."""
    kind = ir.FunctionType(code.vector, [code.vector])
    function = cgutils.get_or_insert_function(code.builder.module, kind, f"llvm.sqrt.v{code.lanes}f32")
    return code.builder.call(function, [value])


def _general(code: Code, d: ir.Value, beta: ir.Value) -> ir.Value:
    """``d^-beta``. With d = 2^e m the whole part of -beta e is a power of two, and what is left an exponent near 0."""
    b, kind = code.builder, ir.VectorType(ir.IntType(32), code.lanes)
    bits = b.bitcast(d, kind)
    from_root = b.sub(bits, code.whole(HALF_ROOT))
    exponent = b.ashr(from_root, code.whole(23))
    m = b.bitcast(b.sub(bits, b.shl(exponent, code.whole(23))), code.vector)
    e = b.sitofp(exponent, code.vector)
    minus = b.fneg(beta)
    whole = b.fsub(b.fadd(b.fmul(minus, e), code.splat(SHIFTER)), code.splat(SHIFTER))
    part = b.call(code.fma, [minus, e, b.fneg(whole)])
    part = b.call(code.fma, [minus, _logarithm(code, m), part])
    value = b.fmul(_power_of_two(code, whole), _exponential(code, part))
    infinite = b.fcmp_ordered("==", d, code.splat(float("inf")))
    value = b.select(infinite, code.splat(0.0), value)
    return b.select(b.fcmp_unordered("uno", d, d), d, value)


def _logarithm(code: Code, m: ir.Value) -> ir.Value:
    """log2 of m, from sqrt(1/2) to sqrt(2): an odd series in (m - 1) / (m + 1)."""
    b, one = code.builder, code.splat(1.0)
    s = b.fdiv(b.fsub(m, one), b.fadd(m, one))
    series = [2.0 / LN2 / n for n in range(1, TERMS + 1, 2)]
    return b.fmul(s, _polynomial(code, b.fmul(s, s), series))


def _exponential(code: Code, part: ir.Value) -> ir.Value:
    """2^part of each lane, for parts whose magnitude is a few at the most."""
    b = code.builder
    whole = b.fsub(b.fadd(part, code.splat(SHIFTER)), code.splat(SHIFTER))
    x = b.fmul(b.fsub(part, whole), code.splat(LN2))
    series, factor = [1.0], 1.0
    for n in range(1, 8):
        factor /= n
        series.append(factor)
    return b.fmul(_power_of_two(code, whole), _polynomial(code, x, series))


def _power_of_two(code: Code, whole: ir.Value) -> ir.Value:
    """2^whole for whole numbers; below 2^-126 it is 0, and above 2^127 that."""
    b, kind = code.builder, ir.VectorType(ir.IntType(32), code.lanes)
    least, most = code.splat(-127.0), code.splat(127.0)
    whole = b.select(b.fcmp_ordered("<", whole, least), least, whole)
    whole = b.select(b.fcmp_ordered(">", whole, most), most, whole)
    shifted = b.bitcast(b.fadd(whole, code.splat(SHIFTER)), kind)
    return b.bitcast(b.shl(b.add(shifted, code.whole(127)), code.whole(23)), code.vector)


def _polynomial(code: Code, x: ir.Value, coefficients: Sequence[float]) -> ir.Value:
    """The polynomial of ``x`` with these coefficients, the lowest first, by Horner's rule."""
    value: ir.Value = code.splat(coefficients[-1])
    for coefficient in coefficients[-2::-1]:
        value = code.builder.call(code.fma, [value, x, code.splat(coefficient)])
    return value
