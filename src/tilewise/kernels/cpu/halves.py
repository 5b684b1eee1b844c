"""fp16 as fp32 and back in LLVM's vectors, also for processors that have no instruction for it.

There LLVM calls functions of a compiler's runtime library, which nobody has loaded, and ends the process where it does
not find them. So integers are worked on instead. Neither way looks at whether denormals are flushed.
"""

from __future__ import annotations

import functools

from llvmlite import binding, ir
from numba.core import config

__all__ = ["narrowed", "widened"]

HALF, FLOAT, SHORT, WHOLE = ir.HalfType(), ir.FloatType(), ir.IntType(16), ir.IntType(32)
APART = 13
"""Bits of a significand that fp32 has more."""
BIAS = (127 - 15) << 23
"""From an fp16 exponent to an fp32 one, where fp32 has it."""
INFINITY, LEAST_NORMAL, HALF_INFINITY = 0x7F800000, 0x38800000, 0x7C00
"""fp32's infinity, fp16's least normal number as fp32, and fp16's infinity."""
TOO_LARGE = 0x47800000
"""65536 as fp32: from the middle below it on, rounding carries into the exponent by itself."""


@functools.cache
def has_instructions() -> bool:
    """Whether kernels are compiled for a processor that converts fp16, as Numba's settings have it."""
    if binding.get_default_triple().startswith(("aarch64", "arm64")):
        return True
    features = getattr(config, "CPU_FEATURES", None)
    found = binding.get_host_cpu_features().flatten() if features is None else features
    return "+f16c" in found.split(",")


def widened(builder: ir.IRBuilder, bits: ir.Value, lanes: int) -> ir.Value:
    """Integers of 16 bits that stand for fp16, as fp32."""
    b, floats = builder, ir.VectorType(FLOAT, lanes)
    if has_instructions():
        return b.fpext(b.bitcast(bits, ir.VectorType(HALF, lanes)), floats)
    wholes = ir.VectorType(WHOLE, lanes)
    every = functools.partial(_every, kind=wholes)
    bits = b.zext(bits, wholes)
    size = b.and_(bits, every(0x7FFF))
    shifted = b.shl(size, every(APART))
    normal = b.add(shifted, every(BIAS))
    endless = b.or_(shifted, every(INFINITY))
    small = b.bitcast(b.fmul(b.uitofp(size, floats), _every(2.0**-24, floats)), wholes)
    found = b.select(b.icmp_unsigned("<", size, every(0x400)), small, normal)
    found = b.select(b.icmp_unsigned(">=", size, every(HALF_INFINITY)), endless, found)
    return b.bitcast(b.or_(found, b.shl(b.and_(bits, every(0x8000)), every(16))), floats)


def narrowed(builder: ir.IRBuilder, value: ir.Value, lanes: int) -> ir.Value:
    """The integers of 16 bits that stand for fp32 as fp16, to nearest and ties to even; NaN stays NaN."""
    b, shorts = builder, ir.VectorType(SHORT, lanes)
    if has_instructions():
        return b.bitcast(b.fptrunc(value, ir.VectorType(HALF, lanes)), shorts)
    wholes, floats = ir.VectorType(WHOLE, lanes), ir.VectorType(FLOAT, lanes)
    every = functools.partial(_every, kind=wholes)
    bits = b.bitcast(value, wholes)
    size = b.and_(bits, every(0x7FFFFFFF))
    odd = b.and_(b.lshr(size, every(APART)), every(1))
    up = b.add(odd, every(2 ** (APART - 1) - 1))
    normal = b.lshr(b.add(b.sub(size, every(BIAS)), up), every(APART))
    # Beside 0.5 the last bit of fp32 is worth what fp16's is worth below its least normal number.
    small = b.bitcast(b.fadd(b.bitcast(size, floats), _every(0.5, floats)), wholes)
    small = b.sub(small, every(0x3F000000))
    quiet = b.or_(b.and_(b.lshr(size, every(APART)), every(0x3FF)), every(HALF_INFINITY | 0x200))
    found = b.select(b.icmp_unsigned("<", size, every(LEAST_NORMAL)), small, normal)
    found = b.select(b.icmp_unsigned(">=", size, every(TOO_LARGE)), every(HALF_INFINITY), found)
    found = b.select(b.icmp_unsigned(">", size, every(INFINITY)), quiet, found)
    sign = b.and_(b.lshr(bits, every(16)), every(0x8000))
    return b.trunc(b.or_(found, sign), shorts)


def _every(value: float, kind: ir.VectorType) -> ir.Value:
    return ir.Constant(kind, [value] * kind.count)
