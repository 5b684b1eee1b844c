"""Workers of recurrent cells that a user states: as :mod:`.steps`, with the cell's expressions compiled in.

Threads divide the units and keep their share of the weights, step after step. States of all steps lie dense,
(T, N, H) for each, h first. Addresses of them and of the parameters stand in tables:

- ``places``: the states of all steps, then the parameters, then (backward) the gradients of the states and those of
  the parameters;
- ``firsts``: the states before the first step; ``zeros``: for each state the address of zeros, for sequences that a
  reset makes begin anew.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field

from llvmlite import ir
from numba.core import cgutils

from tilewise.kernels.cpu import masks
from tilewise.kernels.cpu.recurrent.activations import relu, sigmoid, tanh
from tilewise.kernels.cpu.recurrent.cells import settled
from tilewise.kernels.cpu.recurrent.expressions import COMPARISONS, Cell, backward_of
from tilewise.kernels.cpu.recurrent.philox import uniform
from tilewise.kernels.cpu.recurrent.steps import back_through_steps, multiplied, through_steps
from tilewise.kernels.cpu.recurrent.told import WORDS
from tilewise.kernels.cpu.vectors import INT, NUMBER, Code, Values, compiled, intrinsic_of, number_at

__all__ = ["Numbers", "backward", "cleared", "forward", "is_reset", "product_back"]

ADDRESS = 8
"""Bytes of an address in a table."""


@dataclass
class Numbers:
    """The vectors of one row's units, some lanes of which are valid, and where nodes of a cell read them.

    ``place`` is what random numbers depend on: the first unit's offset in bytes, the row and the seed.
    """

    code: Code
    mask: ir.Value
    values: dict[int, ir.Value]
    place: tuple[ir.Value, ir.Value, ir.Value]
    randoms: dict[int, list[ir.Value]] = field(default_factory=dict)

    def at(self, table: ir.Value, place: int, offset: ir.Value) -> ir.Value:
        """The address in a table, plus an offset."""
        b = self.code.builder
        entry = b.inttoptr(self.code.at(table, place * ADDRESS), INT.as_pointer())
        return b.add(b.load(entry), offset)

    def random(self, number: int) -> ir.Value:
        """The vector of random numbers with a number."""
        group, place = divmod(number, 4)
        if group not in self.randoms:
            unit, row, seed = self.place
            first = self.code.builder.udiv(unit, ir.Constant(INT, NUMBER))
            self.randoms[group] = uniform(self.code, first, row, seed, group)
        return self.randoms[group][place]

    def read(self, address: ir.Value) -> ir.Value:
        """The vector at an address."""
        return masks.load(self.code, address, self.mask)

    def write(self, value: ir.Value, address: ir.Value) -> None:
        """Store the valid lanes of a vector."""
        masks.store(self.code, value, address, self.mask)

    def evaluate(
        self, cell: Cell, inputs: dict[str, Callable[[int], ir.Value]], wanted: set[int] | None = None
    ) -> None:
        """Emit the nodes of a cell in order: all, or those at the places ``wanted`` that have no value yet."""
        for place, (name, *operands) in enumerate(cell.nodes):
            if place in self.values or (wanted is not None and place not in wanted):
                continue
            if name in inputs:
                self.values[place] = inputs[name](int(operands[0]))
            elif name == "constant":
                self.values[place] = self.code.splat(float(operands[0]))
            else:
                self.values[place] = self._applied(name, operands)

    def _applied(self, name: str, operands: list[int | float]) -> ir.Value:
        """The value of one operation."""
        code, b = self.code, self.code.builder
        a = self.values[int(operands[0])]
        if name == "clamp":
            low, high = code.splat(float(operands[1])), code.splat(float(operands[2]))
            a = b.select(b.fcmp_ordered("<", a, low), low, a)
            return b.select(b.fcmp_ordered(">", a, high), high, a)
        if name in ("tanh", "sigmoid", "relu"):
            return {"tanh": tanh, "sigmoid": sigmoid, "relu": relu}[name](code, a)
        if name == "neg":
            return b.fneg(a)
        if name == "sqrt":
            kind = ir.FunctionType(code.vector, [code.vector])
            return b.call(cgutils.get_or_insert_function(b.module, kind, f"llvm.sqrt.v{code.lanes}f32"), [a])
        other = self.values[int(operands[1])]
        if name in COMPARISONS:
            holds = b.fcmp_ordered("<" if name == "less" else "<=", a, other)
            return b.select(holds, code.splat(1.0), code.splat(0.0))
        if name == "select":
            return b.select(b.fcmp_unordered("!=", a, code.splat(0.0)), other, self.values[int(operands[2])])
        if name == "where_positive":
            return b.select(b.fcmp_ordered(">", other, code.splat(0.0)), a, code.splat(0.0))
        if name == "where_within":
            within = b.and_(
                b.fcmp_ordered(">=", other, code.splat(float(operands[2]))),
                b.fcmp_ordered("<=", other, code.splat(float(operands[3]))),
            )
            return b.select(within, a, code.splat(0.0))
        operations = {"add": b.fadd, "sub": b.fsub, "mul": b.fmul, "div": b.fdiv}
        result: ir.Value = operations[name](a, other)
        return result


@functools.cache
def _cell(lanes: int, cell: Cell) -> Callable[..., None]:
    """Makes ``(x, gate, sums, from_h, valid, before, before_at, places, at, unit, row, seed)``: some units of a row.

    ``x`` and ``from_h`` are addresses of the first gate, those of the next ones are ``gate`` bytes further on. The
    sums, which are vectors that follow each other, are kept at ``from_h``. States are read from the table ``before`` at
    the offset ``before_at``, and written to ``places`` at ``at``; ``unit`` is the offset of parameters.
    """
    size = NUMBER * lanes

    def emit(code: Code, arguments: Values) -> None:
        x, gate, sums, from_h, valid, before, before_at, places, at, unit, row, seed = arguments
        of = Numbers(code, masks.below(code, valid), {}, (unit, row, seed))
        for i in range(cell.from_h):
            of.write(code.load(code.at(sums, i * size)), code.at(from_h, i, gate))
        of.evaluate(
            cell,
            {
                "x": lambda i: of.read(code.at(x, i, gate)),
                "h": lambda i: code.load(code.at(sums, i * size)),
                "state": lambda k: of.read(of.at(before, k, before_at)),
                "parameter": lambda j: of.read(of.at(places, cell.states + j, unit)),
                "random": of.random,
            },
        )
        for k, place in enumerate(cell.results):
            of.write(of.values[place], of.at(places, k, at))

    return intrinsic_of(lanes, emit)


@functools.cache
def _cell_back(lanes: int, cell: Cell) -> Callable[..., None]:
    """Makes ``(x, gate, from_h, valid, before, before_at, places, end, unit, dx, dh, dy, row, seed)``: a derivative.

    ``end`` is the offset of a sequence's gradients of states, which are read, and replaced by those before the step;
    that of h does not have what comes by the product yet. ``dx`` and ``dh`` are where the gradients of what the input
    and the state give the gates begin, ``dy`` that of h by its use. Gradients of parameters are added to.
    """
    whole, gradients = backward_of(cell)
    states, parameters = cell.states, cell.parameters

    def emit(code: Code, arguments: Values) -> None:
        x, gate, from_h, valid, before, before_at, places, end, unit, dx, dh, dy, row, seeded = arguments
        b = code.builder
        of = Numbers(code, masks.below(code, valid), {}, (unit, row, seeded))
        ends = [of.at(places, states + parameters + k, end) for k in range(states)]

        def seed(k: int) -> ir.Value:
            gradient = of.read(ends[k])
            return b.fadd(gradient, of.read(dy)) if k == 0 else gradient

        of.evaluate(
            whole,
            {
                "x": lambda i: of.read(code.at(x, i, gate)),
                "h": lambda i: of.read(code.at(from_h, i, gate)),
                "state": lambda k: of.read(of.at(before, k, before_at)),
                "parameter": lambda j: of.read(of.at(places, states + j, unit)),
                "random": of.random,
                "seed": seed,
            },
        )
        for name, address in (("x", dx), ("h", dh)):
            for i, place in enumerate(gradients[name]):
                of.write(of.values[place], code.at(address, i, gate))
        for k, place in enumerate(gradients["state"]):
            of.write(of.values[place], ends[k])
        for j, place in enumerate(gradients["parameter"]):
            to = of.at(places, 2 * states + parameters + j, unit)
            of.write(b.fadd(of.read(to), of.values[place]), to)

    return intrinsic_of(lanes, emit)


@functools.cache
def cleared(lanes: int, count: int) -> Callable[..., None]:
    """Makes ``(address, valid)``, which sets ``count`` vectors that follow each other to 0, of each the valid lanes."""

    def emit(code: Code, arguments: Values) -> None:
        address, valid = arguments
        mask = masks.below(code, valid)
        for i in range(count):
            masks.store(code, code.splat(0.0), code.at(address, i * NUMBER * lanes), mask)

    return intrinsic_of(lanes, emit)


@functools.cache
def is_reset() -> Callable[..., int]:
    """Makes ``(resets, row)``: whether the byte of a row is set; ``resets`` is 0 where there are none."""
    word = number_at()

    @compiled()
    def run(resets, row):
        if resets == 0:
            return 0
        return (word(resets, row // 8) >> (8 * (row % 8))) & 255

    return run


HIDDEN, PANEL_SIZE, BLOCKS, VECTORS = (WORDS[name] for name in ("hidden", "panel_size", "blocks", "vectors"))
X, H0, Y, PACKED_U, DX, DX_N, DY, DH, STATE = (
    WORDS[name] for name in ("x", "h0", "y", "packed", "dx", "dx_n", "dy", "dh", "state")
)
PLACES, FIRSTS, ZEROS, RESETS, SEED = (WORDS[name] for name in ("places", "firsts", "zeros", "resets", "seed"))


@functools.cache
def _step(lanes: int, cell: Cell) -> Callable[..., None]:
    """Makes ``(v, panel, sums, first, rows, before, begun)``, a step of a panel's units as that of :mod:`.steps`."""
    gates, inputs, vector = cell.from_h, cell.from_x, NUMBER * lanes
    multiply, of_cell, clear, begins = multiplied(lanes), _cell(lanes, cell), cleared(lanes, gates), is_reset()

    @compiled(lanes, cell.name)
    def run(v, panel, sums, first, rows, before, begun):
        hidden = v[HIDDEN]
        gate, line, packed = hidden * NUMBER, v[VECTORS] * vector, v[PACKED_U] + panel * v[PANEL_SIZE]
        multiply(v, v[Y] + before * gate, gate, begun, packed, hidden, sums, 0)
        multiply(v, v[H0] + begun * gate, gate, rows - begun, packed, hidden, sums + begun * line, 0)
        for block in range(v[BLOCKS]):
            unit = (panel * v[BLOCKS] + block) * lanes
            if unit < hidden:
                of_unit = unit * NUMBER
                for n in range(rows):
                    row = first + n
                    of_sums = sums + block * gates * vector + n * line
                    states = v[PLACES] if n < begun else v[FIRSTS]
                    states_at = (before + n if n < begun else n) * gate + of_unit
                    if begins(v[RESETS], row):
                        clear(of_sums, lanes)
                        states, states_at = v[ZEROS], of_unit
                    of_cell(
                        v[X] + row * inputs * gate + of_unit, gate, of_sums, v[STATE] + row * gates * gate + of_unit,
                        hidden - unit, states, states_at, v[PLACES], row * gate + of_unit, of_unit, row, v[SEED],
                    )  # fmt: skip

    return run


def forward(lanes: int, cell: Cell) -> Callable[..., None]:
    """Makes ``(data)``, the forward pass: see :func:`.steps.through_steps`.

    ``x`` are what the input gives the gates, ``state`` where what the state gives them is kept, (T, N, G * H) both.
    """
    return through_steps(_step(lanes, cell), lanes, cell.from_h, cell.name)


@functools.cache
def _gates_back(lanes: int, cell: Cell) -> Callable[..., None]:
    """Makes ``(v, panel, first, rows, before, begun)``: the gradients of a panel's units but for the product."""
    gates, inputs, states = cell.from_h, cell.from_x, cell.states
    of_cell, begins, clear, word = _cell_back(lanes, cell), is_reset(), cleared(lanes, 1), number_at()
    first_gradient = states + cell.parameters

    @compiled(lanes, cell.name)
    def run(v, panel, first, rows, before, begun):
        hidden = v[HIDDEN]
        gate = hidden * NUMBER
        for n in range(rows):
            row = first + n
            reset = begins(v[RESETS], row)
            for block in range(v[BLOCKS]):
                unit = (panel * v[BLOCKS] + block) * lanes
                if unit < hidden:
                    of_unit = unit * NUMBER
                    earlier = v[PLACES] if n < begun else v[FIRSTS]
                    earlier_at = (before + n if n < begun else n) * gate + of_unit
                    if reset:
                        earlier, earlier_at = v[ZEROS], of_unit
                    of_row = n * gate + of_unit
                    of_cell(
                        v[X] + row * inputs * gate + of_unit, gate, v[STATE] + row * gates * gate + of_unit,
                        hidden - unit, earlier, earlier_at, v[PLACES], of_row, of_unit,
                        v[DX] + row * inputs * gate + of_unit, v[DX_N] + row * gates * gate + of_unit,
                        v[DY] + row * gate + of_unit, row, v[SEED],
                    )  # fmt: skip
                    if reset:
                        for k in range(states):
                            clear(word(v[PLACES], first_gradient + k) + of_row, hidden - unit)

    return run


@functools.cache
def product_back(lanes: int, cell: Cell) -> Callable[..., None]:
    """Makes ``(v, panel, sums, first, rows, before, begun)``: adds the product to the gradient of h before a step."""
    gates, vector = cell.from_h, NUMBER * lanes
    multiply, settle, begins = multiplied(lanes), settled(lanes, True), is_reset()

    @compiled(lanes, cell.name)
    def run(v, panel, sums, first, rows, before, begun):
        hidden = v[HIDDEN]
        gate, b = hidden * NUMBER, v[PACKED_U] + panel * v[PANEL_SIZE]
        row = gates * gate
        multiply(v, v[DX_N] + first * row, row, rows, b, gates * hidden, sums, 0)
        for n in range(rows):
            if not begins(v[RESETS], first + n):
                for block in range(v[BLOCKS]):
                    unit = (panel * v[BLOCKS] + block) * lanes
                    if unit < hidden:
                        to = v[DH] + n * gate + unit * NUMBER
                        settle(sums + (n * v[VECTORS] + block) * vector, hidden - unit, to)

    return run


def backward(lanes: int, cell: Cell) -> Callable[..., None]:
    """As :func:`forward`, backwards. ``dx`` and ``dx_n`` become the gradients of what input and state give the gates.

    ``dh`` begins as the gradient of the last h, ``dy`` is that of all states h.
    """
    return back_through_steps(_gates_back(lanes, cell), product_back(lanes, cell), lanes, cell.from_h, cell.name)
