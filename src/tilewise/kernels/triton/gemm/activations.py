"""Activations of results within Triton kernels, in fp32."""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["activated"]


@triton.jit
def _sigmoid(x):
    """``1 / (1 + exp(-x))``."""
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def _cut(x, low, high):
    """``x`` between two bounds; NaN stays NaN."""
    x = tl.maximum(x, low, propagate_nan=tl.PropagateNan.ALL)
    return tl.minimum(x, high, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _gelu_of_16_bits(x):
    """GELU for results that are rounded to 16 bits: 11 instructions where the error function takes some 40.

    It is max(x, 0) less a = |x| times the normal distribution's tail beyond a. The tail is 2 to the power of a
    polynomial in a, whose coefficients were fitted to its logarithm. Its relative error is below 1e-5 up to a = 6.2,
    beyond which the product is less than 2e-9.
    """
    size = tl.minimum(tl.abs(x), 16.0)
    power = tl.fma(size, -1.83506841e-06, 6.1602681e-05)
    power = tl.fma(power, size, -0.000930553748)
    power = tl.fma(power, size, 0.00850798304)
    power = tl.fma(power, size, -0.0539602161)
    power = tl.fma(power, size, -0.458464285)
    power = tl.fma(power, size, -1.15125107)
    power = tl.fma(power, size, -0.999995293)
    return tl.fma(-size, tl.exp2(power), tl.maximum(x, 0.0, propagate_nan=tl.PropagateNan.ALL))


@triton.jit
def activated(
    x, ACTIVATION: tl.constexpr, FIRST: tl.constexpr = 0.0, SECOND: tl.constexpr = 0.0, BITS: tl.constexpr = 32
):  # fmt: skip
    """``x`` after the activation of a problem, by the first word of its name and its parameters. NaN stays NaN.

    It has the accuracy of fp32, or as much as a result of ``BITS`` bits needs.
    Both forms of GELU are those of Hendrycks and Gimpel 2016, section 2.
    """
    # Maxima and minima in place of comparisons: behind unrolled sums, as of depthwise convolutions, compilers make so
    # much of the latter that a kernel takes up to twice the registers.
    if ACTIVATION == "relu":
        x = tl.maximum(x, 0.0, propagate_nan=tl.PropagateNan.ALL)
    elif ACTIVATION == "relu6":
        x = _cut(x, 0.0, 6.0)
    elif ACTIVATION == "clamp":
        x = _cut(x, FIRST, SECOND)
    elif ACTIVATION == "leaky_relu":
        below = tl.minimum(x, 0.0, propagate_nan=tl.PropagateNan.ALL)
        x = tl.maximum(x, 0.0, propagate_nan=tl.PropagateNan.ALL) + FIRST * below
    elif ACTIVATION == "hardsigmoid":
        x = _cut(x + 3.0, 0.0, 6.0) / 6.0
    elif ACTIVATION == "hardswish":
        x = x * (_cut(x + 3.0, 0.0, 6.0) / 6.0)
    elif ACTIVATION == "gelu" and BITS == 16:
        x = _gelu_of_16_bits(x)
    elif ACTIVATION == "gelu":
        x = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    elif ACTIVATION == "gelu_tanh":  # half of 1 + tanh(u) is the sigmoid of 2 u
        x = x * _sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
    elif ACTIVATION == "silu":
        x = x * _sigmoid(x)
    elif ACTIVATION == "sigmoid":
        x = _sigmoid(x)
    elif ACTIVATION == "tanh":
        shrunk = tl.exp(-2.0 * tl.abs(x))
        size = (1.0 - shrunk) / (1.0 + shrunk)
        x = tl.where(x < 0, -size, size)
    return x
