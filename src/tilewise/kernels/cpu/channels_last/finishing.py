"""What is done with sums as they are written: a residual is added, and an activation is applied.

The order is that of a layer: sums with their bias, plus the residual, then the activation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from llvmlite import ir

from tilewise.kernels.cpu import masks
from tilewise.kernels.cpu.channels_last.loops import constant, either
from tilewise.kernels.cpu.recurrent.activations import relu, sigmoid, tanh
from tilewise.kernels.cpu.vectors import NUMBER, Code

__all__ = ["activation_of", "stored"]


def _clamped(code: Code, x: ir.Value, low: float, high: float) -> ir.Value:
    """``x`` between ``low`` and ``high``; NaN stays."""
    b, least, most = code.builder, code.splat(low), code.splat(high)
    x = b.select(b.fcmp_ordered("<", x, least), least, x)
    return b.select(b.fcmp_ordered(">", x, most), most, x)


def _hardsigmoid(code: Code, x: ir.Value) -> ir.Value:
    """``x / 6 + 1 / 2`` between 0 and 1."""
    return _clamped(code, code.builder.call(code.fma, [x, code.splat(1 / 6), code.splat(0.5)]), 0.0, 1.0)


FUNCTIONS: dict[str, Callable[[Code, ir.Value], ir.Value]] = {
    "none": lambda code, x: x,
    "relu": relu,
    "relu6": lambda code, x: _clamped(code, x, 0.0, 6.0),
    "hardsigmoid": _hardsigmoid,
    "hardswish": lambda code, x: code.builder.fmul(x, _hardsigmoid(code, x)),
    "sigmoid": sigmoid,
    "silu": lambda code, x: code.builder.fmul(x, sigmoid(code, x)),
    "tanh": tanh,
}


def activation_of(name: str) -> Callable[[Code, ir.Value], ir.Value]:
    """The function that writes the instructions of the activation ``name``. Raises ``KeyError`` for others."""
    return FUNCTIONS[name]


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
