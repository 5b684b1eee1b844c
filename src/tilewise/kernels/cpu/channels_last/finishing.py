"""What is done with sums as they are written: a residual is added, and an activation is applied.

The order is that of a layer: sums with their bias, plus the residual, then the activation.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from llvmlite import ir

from tilewise.kernels.cpu import masks
from tilewise.kernels.cpu.channels_last.loops import constant, either
from tilewise.kernels.cpu.recurrent.activations import exponential, relu, sigmoid, tanh
from tilewise.kernels.cpu.vectors import NUMBER, Code
from tilewise.problems.activations import activation_kind, activation_parameters

__all__ = ["activation_of", "stored"]


def _clamped(code: Code, x: ir.Value, low: float, high: float) -> ir.Value:
    """``x`` between ``low`` and ``high``; NaN stays."""
    b, least, most = code.builder, code.splat(low), code.splat(high)
    x = b.select(b.fcmp_ordered("<", x, least), least, x)
    return b.select(b.fcmp_ordered(">", x, most), most, x)


def _hardsigmoid(code: Code, x: ir.Value) -> ir.Value:
    """``x / 6 + 1 / 2`` between 0 and 1."""
    return _clamped(code, code.builder.call(code.fma, [x, code.splat(1 / 6), code.splat(0.5)]), 0.0, 1.0)


def _leaky(code: Code, x: ir.Value, slope: float) -> ir.Value:
    """``x``, with negative numbers scaled."""
    b = code.builder
    return b.select(b.fcmp_ordered("<", x, code.splat(0.0)), b.fmul(x, code.splat(slope)), x)


def _gelu(code: Code, x: ir.Value) -> ir.Value:
    """``x (1 + erf(x / sqrt(2))) / 2``, with erf to 1.5e-7 (Abramowitz and Stegun 1964, 7.1.26)."""
    b, one = code.builder, code.splat(1.0)
    z = b.fmul(x, code.splat(math.sqrt(0.5)))
    negative = b.fcmp_ordered("<", z, code.splat(0.0))
    size = b.select(negative, b.fneg(z), z)
    t = b.fdiv(one, b.call(code.fma, [size, code.splat(0.3275911), one]))
    total = code.splat(1.061405429)
    for coefficient in (-1.453152027, 1.421413741, -0.284496736, 0.254829592):
        total = b.call(code.fma, [total, t, code.splat(coefficient)])
    # What is left of 1 beyond ``size``, of which a negative number keeps that share and a positive one the rest.
    tail = b.fmul(b.fmul(total, t), b.fmul(code.splat(0.5), exponential(code, b.fneg(b.fmul(z, z)))))
    return b.fmul(x, b.select(negative, tail, b.fsub(one, tail)))


def _gelu_tanh(code: Code, x: ir.Value) -> ir.Value:
    """``x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))) / 2``, which is x times the sigmoid of twice that argument."""
    b, scale = code.builder, 2 * math.sqrt(2 / math.pi)
    inner = b.call(code.fma, [b.fmul(x, x), code.splat(0.044715 * scale), code.splat(scale)])
    return b.fmul(x, sigmoid(code, b.fmul(x, inner)))


FUNCTIONS: dict[str, Callable[..., ir.Value]] = {
    "none": lambda code, x: x,
    "relu": relu,
    "relu6": lambda code, x: _clamped(code, x, 0.0, 6.0),
    "hardsigmoid": _hardsigmoid,
    "hardswish": lambda code, x: code.builder.fmul(x, _hardsigmoid(code, x)),
    "sigmoid": sigmoid,
    "silu": lambda code, x: code.builder.fmul(x, sigmoid(code, x)),
    "tanh": tanh,
    "gelu": _gelu,
    "gelu_tanh": _gelu_tanh,
    "leaky_relu": _leaky,
    "clamp": _clamped,
}


def activation_of(name: str) -> Callable[[Code, ir.Value], ir.Value]:
    """The function that writes the instructions of the activation ``name``, with its parameters.

    Raises ``KeyError`` for one that is not known here.
    """
    function, parameters = FUNCTIONS[activation_kind(name)], activation_parameters(name)
    return lambda code, x: function(code, x, *parameters)


def stored(
    code: Code,
    activation: str,
    rows: Sequence[tuple[ir.Value, ir.Value, Sequence[Callable[[], ir.Value]]]],
    added: ir.Value,
    valid: ir.Value,
) -> None:
    """Write rows of neighbouring vectors.

    A row is its address, the address of what is added to it where ``added`` is not 0, and its vectors. Of every row
    only the first ``valid`` numbers are read and written. A vector is given as a function that writes its instructions,
    because they are written once for each branch.
    """
    b, function = code.builder, activation_of(activation)
    vectors, size = len(rows[0][2]), NUMBER * code.lanes

    def written(full: bool, adds: bool) -> None:
        parts = [masks.below(code, b.sub(valid, constant(j * code.lanes))) for j in range(vectors)] if not full else []
        for start, other, values in rows:
            for j, value in enumerate(values):
                place, total = code.at(start, j * size), value()
                if adds:
                    more = code.at(other, j * size)
                    total = b.fadd(total, code.load(more) if full else masks.load(code, more, parts[j]))
                total = function(code, total)
                if full:
                    code.store(total, place)
                else:
                    masks.store(code, total, place, parts[j])

    def complete(full: bool) -> None:
        either(code, b.icmp_signed("!=", added, constant(0)), lambda adds: written(full, adds))

    either(code, b.icmp_signed(">=", valid, constant(vectors * code.lanes)), complete)
