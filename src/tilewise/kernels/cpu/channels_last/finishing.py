"""What is done with sums as they are written: a residual is added, and an activation is applied.

The order is that of a layer: sums with their bias, plus the residual, then the activation.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from llvmlite import ir
from numba.core import cgutils

from tilewise.kernels.cpu import masks
from tilewise.kernels.cpu.channels_last.loops import constant, either
from tilewise.kernels.cpu.channels_last.told import word_of
from tilewise.kernels.cpu.recurrent.activations import polynomial, power_of_two, relu, sigmoid, tanh
from tilewise.kernels.cpu.vectors import NUMBER, Code, Values, compiled
from tilewise.problems.activations import activation_kind, activation_parameters

__all__ = ["Move", "activation_of", "activation_words", "behind", "moved", "stored"]

TAIL = (
    -0.9999998919, -1.151110974, -0.4591555499, -0.05267206112, 0.007338567315, -0.0003597261102, -9.079780916e-05,
    1.903692893e-05, -1.143440267e-06,
)  # fmt: skip
"""The logarithm to base 2 of the normal distribution's tail as a polynomial of where it begins, fitted up to 5.2."""
FARTHEST = 10.0
"""Up to here it falls, to 1e-23."""


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
    """``x (1 + erf(x / sqrt(2))) / 2`` to about 4e-7 of its value above -1, and to 1e-7 below.

    It is max(x, 0) less a = |x| times the normal distribution's tail beyond a. The tail is 2 to the power of a
    polynomial in a: that takes no division, and a third less time than the formulas of Abramowitz and Stegun do.
    """
    b, zero, most = code.builder, code.splat(0.0), code.splat(FARTHEST)
    kind = ir.FunctionType(code.vector, [code.vector])
    size = b.call(cgutils.get_or_insert_function(b.module, kind, f"llvm.fabs.v{code.lanes}f32"), [x])
    size = b.select(b.fcmp_ordered(">", size, most), most, size)
    tail = power_of_two(code, polynomial(code, size, TAIL))
    return b.call(code.fma, [b.fneg(size), tail, b.select(b.fcmp_ordered("<", x, zero), zero, x)])


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


class Move(NamedTuple):
    """A vector on its way to the address ``place``, and what reads and writes a vector that lies as it will."""

    value: ir.Value
    place: ir.Value
    read: Callable[[ir.Value], ir.Value]
    write: Callable[[ir.Value, ir.Value], None]

    @classmethod
    def side_by_side(cls, code: Code, value: ir.Value, place: ir.Value, mask: ir.Value) -> Move:
        """The move of the lanes of ``mask`` to neighbours."""
        read, write = (functools.partial(way, code, mask=mask) for way in (masks.load, masks.store))
        return cls(value, place, read, write)

    @classmethod
    def apart(cls, code: Code, value: ir.Value, place: ir.Value, step: ir.Value, mask: ir.Value) -> Move:
        """The move of the lanes of ``mask`` to numbers ``step`` bytes apart."""
        read, write = (functools.partial(way, code, apart=step, mask=mask) for way in (masks.gather, masks.scatter))
        return cls(value, place, read, write)


def activation_words(activation: str | None) -> list[str]:
    """What tells functions that finish results with an activation, and those that do not finish any, apart."""
    return [] if activation is None else [word_of(activation)]


@functools.cache
def behind(finishes: bool) -> Callable[..., tuple[int, ...]]:
    """Makes ``(residual, y)``, which returns by how many bytes a residual lies behind results, in a tuple.

    The tuple is empty unless a kernel ``finishes``: an argument that it does not have costs nothing.
    """
    if finishes:

        @compiled("finishing")
        def run(residual, y):
            return (residual - y,)
    else:

        @compiled()
        def run(residual, y):
            return ()

    return run


def moved(code: Code, activation: str | None, added: Values, moves: Sequence[Move]) -> None:
    """Write vectors, and finish them first unless ``activation`` is ``None``.

    ``added`` is then whether something is added, and by how many bytes that lies behind the places of the vectors.
    """
    if activation is None:
        for move in moves:
            move.write(move.value, move.place)
        return
    b, function, (adds, distance) = code.builder, activation_of(activation), added

    def written(adds_more: bool) -> None:
        for value, place, read, write in moves:
            total = b.fadd(value, read(b.add(place, distance))) if adds_more else value
            write(function(code, total), place)

    either(code, b.icmp_signed("!=", adds, constant(0)), written)
