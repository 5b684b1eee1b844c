"""Converts fp16 to fp32 and back in LLVM's vectors, also for processors that have no instruction for it.

For such processors LLVM would call functions of a compiler's runtime library. That is not loaded, so that the process
would end. Here integer instructions do the conversion instead. Both ways give the same results whether denormal numbers
are flushed to zero or not.
"""

from __future__ import annotations

import functools

from llvmlite import binding, ir
from numba.core import config

__all__ = ["narrowed", "widened"]

HALF, FLOAT, SHORT, WHOLE = ir.HalfType(), ir.FloatType(), ir.IntType(16), ir.IntType(32)
APART = 13
"""How many bits longer the significand of fp32 is."""
BIAS = (127 - 15) << 23
"""The difference between the exponents of fp32 and fp16, at the place of fp32's exponent."""
INFINITY, LEAST_NORMAL, HALF_INFINITY = 0x7F800000, 0x38800000, 0x7C00
"""The bits of fp32's infinity, of fp16's least normal number as fp32, and of fp16's infinity."""
TOO_LARGE = 0x47800000
"""The bits of 65536 as fp32. Numbers just below it round up to infinity, as the carry goes into the exponent."""


@functools.cache
def has_instructions() -> bool:
    """Whether the processor that Numba compiles for has instructions to convert fp16."""
    if binding.get_default_triple().startswith(("aarch64", "arm64")):
        return True
    features = getattr(config, "CPU_FEATURES", None)
    enabled = binding.get_host_cpu_features().flatten() if features is None else features
    return "+f16c" in enabled.split(",")


def widened(builder: ir.IRBuilder, bits: ir.Value, lanes: int) -> ir.Value:
    """The fp32 values of ``lanes`` fp16 numbers, given as integers of 16 bits."""
    b, floats = builder, ir.VectorType(FLOAT, lanes)
    if has_instructions():
        return b.fpext(b.bitcast(bits, ir.VectorType(HALF, lanes)), floats)
    wholes = ir.VectorType(WHOLE, lanes)
    splat = functools.partial(_every, kind=wholes)
    bits = b.zext(bits, wholes)
    size = b.and_(bits, splat(0x7FFF))
    shifted = b.shl(size, splat(APART))
    normal = b.add(shifted, splat(BIAS))
    infinite = b.or_(shifted, splat(INFINITY))
    denormal = b.bitcast(b.fmul(b.uitofp(size, floats), _every(2.0**-24, floats)), wholes)
    result = b.select(b.icmp_unsigned("<", size, splat(0x400)), denormal, normal)
    result = b.select(b.icmp_unsigned(">=", size, splat(HALF_INFINITY)), infinite, result)
    return b.bitcast(b.or_(result, b.shl(b.and_(bits, splat(0x8000)), splat(16))), floats)


def narrowed(builder: ir.IRBuilder, value: ir.Value, lanes: int) -> ir.Value:
    """``lanes`` fp32 numbers as fp16, given as integers of 16 bits: rounded to nearest, ties to even; NaN stays NaN."""
    b, shorts = builder, ir.VectorType(SHORT, lanes)
    if has_instructions():
        return b.bitcast(b.fptrunc(value, ir.VectorType(HALF, lanes)), shorts)
    wholes, floats = ir.VectorType(WHOLE, lanes), ir.VectorType(FLOAT, lanes)
    splat = functools.partial(_every, kind=wholes)
    bits = b.bitcast(value, wholes)
    size = b.and_(bits, splat(0x7FFFFFFF))
    odd = b.and_(b.lshr(size, splat(APART)), splat(1))
    up = b.add(odd, splat(2 ** (APART - 1) - 1))
    normal = b.lshr(b.add(b.sub(size, splat(BIAS)), up), splat(APART))
    # Adding 0.5 rounds to denormal fp16: the last bit of an fp32 number near 0.5 has the value of their last bit.
    denormal = b.bitcast(b.fadd(b.bitcast(size, floats), _every(0.5, floats)), wholes)
    denormal = b.sub(denormal, splat(0x3F000000))
    quiet_nan = b.or_(b.and_(b.lshr(size, splat(APART)), splat(0x3FF)), splat(HALF_INFINITY | 0x200))
    result = b.select(b.icmp_unsigned("<", size, splat(LEAST_NORMAL)), denormal, normal)
    result = b.select(b.icmp_unsigned(">=", size, splat(TOO_LARGE)), splat(HALF_INFINITY), result)
    result = b.select(b.icmp_unsigned(">", size, splat(INFINITY)), quiet_nan, result)
    sign = b.and_(b.lshr(bits, splat(16)), splat(0x8000))
    return b.trunc(b.or_(result, sign), shorts)


def _every(value: float, kind: ir.VectorType) -> ir.Value:
    """A vector with ``value`` in all lanes."""
    return ir.Constant(kind, [value] * kind.count)
