"""What the cells of recurrent layers do with a step's sums, one vector of units at a time, and its derivative.

Formulas and the order of gates are those of ``torch.nn``: an LSTM (Hochreiter and Schmidhuber 1997) has gates i, f, g
and o, a GRU (Cho et al. 2014, with the reset gate behind the product) r, z and n.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

from llvmlite import ir

from tilewise.kernels.cpu import masks
from tilewise.kernels.cpu.recurrent.activations import relu, sigmoid, tanh
from tilewise.kernels.cpu.vectors import INT, NUMBER, Code, Values, intrinsic_of

__all__ = ["backward", "fetched", "forward", "settled"]


class _Lanes:
    """Reads and writes the valid lanes of vectors: the others are no units."""

    def __init__(self, code: Code, valid: ir.Value) -> None:
        self.code, self.b, self.mask = code, code.builder, masks.below(code, valid)

    def read(self, address: ir.Value, number: int = 0, apart: ir.Value | None = None) -> ir.Value:
        """The vector at ``address + number * apart``."""
        return masks.load(self.code, self.code.at(address, number, apart), self.mask)

    def write(self, value: ir.Value, address: ir.Value, number: int = 0, apart: ir.Value | None = None) -> None:
        """Store a vector there."""
        masks.store(self.code, value, self.code.at(address, number, apart), self.mask)

    def fma(self, a: ir.Value, b: ir.Value, c: ir.Value) -> ir.Value:
        """``a * b + c``."""
        return self.b.call(self.code.fma, [a, b, c])

    def less_square(self, value: ir.Value) -> ir.Value:
        """``1 - value^2``, the derivative of tanh where it is ``value``."""
        return self.fma(self.b.fneg(value), value, self.code.splat(1.0))

    def slope(self, value: ir.Value) -> ir.Value:
        """``value * (1 - value)``, the derivative of a sigmoid where it is ``value``."""
        return self.b.fmul(value, self.b.fsub(self.code.splat(1.0), value))


def _sums(code: Code, sums: ir.Value, x: ir.Value, gate: ir.Value, of: _Lanes, gates: int) -> list[ir.Value]:
    """The sums of all gates with their inputs."""
    size = NUMBER * code.lanes
    return [code.builder.fadd(of.read(x, i, gate), code.load(code.at(sums, i * size))) for i in range(gates)]


def _lstm(code: Code, arguments: Values) -> None:
    x, gate, sums, valid, state, to, y, _, keep = arguments
    of, b = _Lanes(code, valid), code.builder
    before = _sums(code, sums, x, gate, of, 4)
    i, f, o = (sigmoid(code, before[n]) for n in (0, 1, 3))
    g = tanh(code, before[2])
    c = of.fma(f, of.read(state), b.fmul(i, g))
    of.write(c, to)
    of.write(b.fmul(o, tanh(code, c)), y)
    with b.if_then(b.icmp_signed("!=", keep, ir.Constant(INT, 0))):
        for number, value in enumerate((i, f, g, o)):
            of.write(value, x, number, gate)


def _gru(code: Code, arguments: Values) -> None:
    x, gate, sums, valid, state, to, y, bias, keep = arguments
    of, b = _Lanes(code, valid), code.builder
    r, z = (sigmoid(code, value) for value in _sums(code, sums, x, gate, of, 2))
    inner = b.fadd(code.load(code.at(sums, 2 * NUMBER * code.lanes)), of.read(bias))
    n = tanh(code, of.fma(r, inner, of.read(x, 2, gate)))
    of.write(of.fma(z, b.fsub(of.read(state), n), n), y)
    with b.if_then(b.icmp_signed("!=", keep, ir.Constant(INT, 0))):
        of.write(inner, to)
        for number, value in enumerate((r, z, n)):
            of.write(value, x, number, gate)


def _plain(activation: Callable[[Code, ir.Value], ir.Value]) -> Callable[[Code, Values], None]:
    """A cell without gates."""

    def emit(code: Code, arguments: Values) -> None:
        x, gate, sums, valid, _, _, y, _, _ = arguments
        of = _Lanes(code, valid)
        of.write(activation(code, _sums(code, sums, x, gate, of, 1)[0]), y)

    return emit


FORWARD = {"rnn_tanh": _plain(tanh), "rnn_relu": _plain(relu), "gru": _gru, "lstm": _lstm}


@functools.cache
def forward(lanes: int, cell: str) -> Callable[..., None]:
    """Makes ``(x, gate, sums, valid, state, to, y, bias, keep)``, a step of ``valid`` units of one row.

    ``x`` are the inputs of the first gate, those of the next ones are ``gate`` bytes further on; ``sums`` are vectors
    that follow each other. The new h goes to ``y``. An LSTM reads c from ``state`` and writes it to ``to``. A GRU reads
    h from ``state`` and b_hn from ``bias``, and where it is to ``keep`` values it writes U_n h + b_hn to ``to``. Gates
    are kept in the place of their inputs.
    """
    return intrinsic_of(lanes, FORWARD[cell])


def _lstm_back(code: Code, arguments: Values) -> None:
    x, gate, valid, dx, dy, dh, dc, now, before, _ = arguments
    of, b = _Lanes(code, valid), code.builder
    i, f, g, o = (of.read(x, number, gate) for number in range(4))
    c = tanh(code, of.read(now))
    dh = b.fadd(of.read(dy), of.read(dh))
    of_c = of.fma(b.fmul(dh, o), of.less_square(c), of.read(dc))
    gradients = (
        b.fmul(b.fmul(of_c, g), of.slope(i)),
        b.fmul(b.fmul(of_c, of.read(before)), of.slope(f)),
        b.fmul(b.fmul(of_c, i), of.less_square(g)),
        b.fmul(b.fmul(dh, c), of.slope(o)),
    )
    of.write(b.fmul(of_c, f), dc)
    for number, value in enumerate(gradients):
        of.write(value, dx, number, gate)


def _gru_back(code: Code, arguments: Values) -> None:
    x, gate, valid, dx, dy, dh, _, now, before, dx_n = arguments
    of, b = _Lanes(code, valid), code.builder
    r, z, n = (of.read(x, number, gate) for number in range(3))
    gradient = b.fadd(of.read(dy), of.read(dh))
    of_z = b.fmul(b.fmul(gradient, b.fsub(of.read(before), n)), of.slope(z))
    of_n = b.fmul(b.fmul(gradient, b.fsub(code.splat(1.0), z)), of.less_square(n))
    of_r = b.fmul(b.fmul(of_n, of.read(now)), of.slope(r))
    for number, value in enumerate((of_r, of_z, of_n)):
        of.write(value, dx, number, gate)
    of.write(b.fmul(of_n, r), dx_n)
    of.write(b.fmul(gradient, z), dh)


def _tanh_back(code: Code, arguments: Values) -> None:
    _, _, valid, dx, dy, dh, _, now, _, _ = arguments
    of = _Lanes(code, valid)
    of.write(code.builder.fmul(code.builder.fadd(of.read(dy), of.read(dh)), of.less_square(of.read(now))), dx)


def _relu_back(code: Code, arguments: Values) -> None:
    _, _, valid, dx, dy, dh, _, now, _, _ = arguments
    of, b, zero = _Lanes(code, valid), code.builder, code.splat(0.0)
    gradient = b.fadd(of.read(dy), of.read(dh))
    of.write(b.select(b.fcmp_ordered("<=", of.read(now), zero), zero, gradient), dx)


BACKWARD = {"rnn_tanh": _tanh_back, "rnn_relu": _relu_back, "gru": _gru_back, "lstm": _lstm_back}


@functools.cache
def backward(lanes: int, cell: str) -> Callable[..., None]:
    """Makes ``(x, gate, valid, dx, dy, dh, dc, now, before, dx_n)``, the derivative of a step.

    ``x`` are the gates that were kept, ``dx`` becomes the gradients of their inputs. ``dy`` and ``dh`` are the
    gradients of h by its two uses. ``now`` is c of an LSTM, U_n h + b_hn of a GRU, else h; ``before`` is c of the step
    before for an LSTM, and h of it for a GRU. An LSTM reads the gradient of c from ``dc`` and leaves that of the one
    before there. A GRU writes the gradient of U_n h + b_hn to ``dx_n``, and to ``dh`` what does not come by a product.
    """
    return intrinsic_of(lanes, BACKWARD[cell])


@functools.cache
def settled(lanes: int, add: bool) -> Callable[..., None]:
    """Makes ``(sums, valid, target)``, which writes the valid lanes of a vector, or with ``add`` adds them."""

    def emit(code: Code, arguments: Values) -> None:
        sums, valid, target = arguments
        of, value = _Lanes(code, valid), code.load(sums)
        of.write(code.builder.fadd(value, of.read(target)) if add else value, target)

    return intrinsic_of(lanes, emit)


@functools.cache
def fetched(lanes: int, count: int) -> Callable[..., None]:
    """Makes ``(address, apart)``, which prefetches ``count`` lines that are ``apart`` bytes from each other.

    A step's vectors lie far apart, so that the processor does not see which ones come next.
    """

    def emit(code: Code, arguments: Values) -> None:
        address, apart = arguments
        for i in range(count):
            code.prefetch(code.at(address, i, apart))

    return intrinsic_of(lanes, emit)
