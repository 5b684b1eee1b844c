"""Workers of recurrent cells with means over units, as of layer normalization (Ba et al. 2016): see :mod:`.custom`.

A mean needs all units of a sequence. So threads divide the units for the product, and the sequences for the cell: a
thread computes all means of a sequence, one level after the other, and then the cell of all its units. Between product
and cell all threads wait for each other once more than for other cells.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

from llvmlite import ir
from numba import carray  # type: ignore[attr-defined]

from tilewise.kernels.cpu import masks
from tilewise.kernels.cpu.recurrent.cells import settled
from tilewise.kernels.cpu.recurrent.custom import Numbers, cleared, is_reset, product_back
from tilewise.kernels.cpu.recurrent.expressions import Cell, backward_of
from tilewise.kernels.cpu.recurrent.steps import multiplied, packed_by_team, step_rows
from tilewise.kernels.cpu.recurrent.team import DONE, counted, wait
from tilewise.kernels.cpu.recurrent.told import COUNT, WORDS
from tilewise.kernels.cpu.vectors import FLOAT, INT, NUMBER, Code, Values, compiled, intrinsic_of, named, number_at

__all__ = ["backward", "forward"]

TIME, HIDDEN, PANELS, BLOCKS = (WORDS[name] for name in ("time", "hidden", "panels", "blocks"))
VECTORS, PANEL_SIZE, YIELDING, REVERSE = (WORDS[name] for name in ("vectors", "panel_size", "yielding", "reverse"))
X, H0, Y, PACKED_U, DX, DX_N, DY, STATE = (
    WORDS[name] for name in ("x", "h0", "y", "packed", "dx", "dx_n", "dy", "state")
)
SUMS, SUMS_SIZE, PLACES, FIRSTS, ZEROS = (WORDS[name] for name in ("sums", "sums_size", "places", "firsts", "zeros"))
RESETS, APART, SEED = WORDS["resets"], WORDS["apart"], WORDS["seed"]


class _Row(Numbers):
    """Some units of a sequence's step: what nodes of the cell, or of its derivative, read there.

    ``arguments`` are ``(x, gate, from_h, valid, before, before_at, places, end, unit, dy, means, row, seed)``: of what
    input and state give the first gate, the others are ``gate`` bytes apart; the valid lanes; the table of the states
    before, and the offset in them; the table ``places``, with the offset of the gradients of states and that of
    parameters; the gradient of h by its use; vectors with the means known so far; the step's row, and the seed.
    """

    def __init__(self, code: Code, cell: Cell, arguments: Values) -> None:
        x, gate, from_h, valid, before, before_at, places, end, unit, dy, means, row, seed = arguments
        super().__init__(code, masks.below(code, valid), {}, (unit, row, seed))
        self.cell, self.means, self.slots = cell, means, _slots_of(cell)
        self.end = lambda k: self.at(places, cell.states + cell.parameters + k, end)
        self.inputs = {
            "x": lambda i: self.read(code.at(x, i, gate)),
            "h": lambda i: self.read(code.at(from_h, i, gate)),
            "state": lambda k: self.read(self.at(before, k, before_at)),
            "parameter": lambda j: self.read(self.at(places, cell.states + j, unit)),
            "random": self.random,
            "seed": lambda k: self._seed(k, dy),
        }

    def _seed(self, number: int, dy: ir.Value) -> ir.Value:
        gradient = self.read(self.end(number))
        return self.code.builder.fadd(gradient, self.read(dy)) if number == 0 else gradient

    def found(self, wanted: list[int], levels: int) -> list[ir.Value]:
        """The values at the places ``wanted``, when the means of the first ``levels`` are known."""
        known = [place for level in self.cell.means[:levels] for place in level]
        needed = self.cell.needed(wanted, known)
        for place in needed.intersection(known):
            self.values[place] = self.code.load(_slot(self.code, self.means, self.slots[place]))
        self.evaluate(self.cell, self.inputs, needed)
        return [self.values[place] for place in wanted]


def _slots_of(cell: Cell) -> dict[int, int]:
    """The number of each mean, by its place in the cell: those of a level follow each other."""
    return {place: number for number, place in enumerate(place for level in cell.means for place in level)}


def _slot(code: Code, means: ir.Value, number: int) -> ir.Value:
    """The address of a mean's vector."""
    return code.at(means, number * NUMBER * code.lanes)


@functools.cache
def _summed(lanes: int, cell: Cell, level: int) -> Callable[..., None]:
    """Makes what takes the arguments of :class:`_Row`, and adds some units to the sums for the means of a level."""

    def emit(code: Code, arguments: Values) -> None:
        row, zero = _Row(code, cell, arguments), code.splat(0.0)
        places = cell.means[level]
        values = row.found([int(cell.nodes[place][1]) for place in places], level)
        for place, value in zip(places, values, strict=True):
            to = _slot(code, row.means, row.slots[place])
            code.store(code.builder.fadd(code.load(to), code.builder.select(row.mask, value, zero)), to)

    return intrinsic_of(lanes, emit)


@functools.cache
def _divided(lanes: int, first: int, count: int) -> Callable[..., None]:
    """Makes ``(means, hidden)``, which makes means of ``count`` vectors of sums from number ``first`` on."""

    def emit(code: Code, arguments: Values) -> None:
        b, (means, hidden) = code.builder, arguments
        for number in range(first, first + count):
            vector = code.load(_slot(code, means, number))
            total: ir.Value = b.extract_element(vector, ir.Constant(INT, 0))
            for lane in range(1, lanes):
                total = b.fadd(total, b.extract_element(vector, ir.Constant(INT, lane)))
            mean = b.fdiv(total, b.sitofp(hidden, FLOAT))
            code.store(code.everywhere(mean), _slot(code, means, number))

    return intrinsic_of(lanes, emit)


@functools.cache
def _means(lanes: int, cell: Cell, levels: int, back: bool) -> Callable[..., None]:
    """Makes what computes the means of the first ``levels`` for all units of a sequence's step.

    It takes ``(v, row, before, before_at, of_row, parameters, means)``: the step's row, the table of states before and
    the offset in them, the offset of a sequence's gradients and of a thread's gradients of parameters.
    """
    if not levels:

        @compiled(lanes, cell.name, 0, back)
        def nothing(v, row, before, before_at, of_row, parameters, means):
            return

        return nothing
    earlier, add = _means(lanes, cell, levels - 1, back), _summed(lanes, cell, levels - 1)
    first, count = sum(map(len, cell.means[: levels - 1])), len(cell.means[levels - 1])
    clear, divide = cleared(lanes, count), _divided(lanes, first, count)
    gates, inputs, size = cell.from_h, cell.from_x, NUMBER * lanes

    @compiled(lanes, cell.name, levels, back)
    def run(v, row, before, before_at, of_row, parameters, means):
        earlier(v, row, before, before_at, of_row, parameters, means)
        hidden = v[HIDDEN]
        gate = hidden * NUMBER
        clear(means + first * size, lanes)
        for unit in range(0, hidden, lanes):
            at = unit * NUMBER
            add(
                v[X] + row * inputs * gate + at, gate, v[STATE] + row * gates * gate + at, hidden - unit,
                before, before_at + at, v[PLACES], of_row + at, at, v[DY] + row * gate + at, means, row, v[SEED],
            )  # fmt: skip
        divide(means, hidden)

    return run


@functools.cache
def _cell(lanes: int, cell: Cell) -> Callable[..., None]:
    """Makes what takes the arguments of :class:`_Row` and an offset, and writes the states after the step there."""

    def emit(code: Code, arguments: Values) -> None:
        *of_row, at = arguments
        row = _Row(code, cell, of_row)
        for k, value in enumerate(row.found(list(cell.results), len(cell.means))):
            row.write(value, row.at(of_row[6], k, at))

    return intrinsic_of(lanes, emit)


@functools.cache
def _cell_back(lanes: int, cell: Cell) -> Callable[..., None]:
    """Makes what takes the arguments of :class:`_Row`, ``dx``, ``dh`` and an offset: see ``_cell_back`` of custom.

    The offset is that of the thread's own gradients of parameters.
    """
    whole, gradients = backward_of(cell)
    states, parameters = cell.states, cell.parameters

    def emit(code: Code, arguments: Values) -> None:
        *of_row, dx, dh, own = arguments
        row, gate, places = _Row(code, whole, of_row), of_row[1], of_row[6]
        values = row.found([place for each in gradients.values() for place in each], len(whole.means))
        found = dict(zip((place for each in gradients.values() for place in each), values, strict=True))
        for name, address in (("x", dx), ("h", dh)):
            for i, place in enumerate(gradients[name]):
                row.write(found[place], code.at(address, i, gate))
        for k, place in enumerate(gradients["state"]):
            row.write(found[place], row.end(k))
        for j, place in enumerate(gradients["parameter"]):
            to = row.at(places, 2 * states + parameters + j, own)
            row.write(code.builder.fadd(row.read(to), found[place]), to)

    return intrinsic_of(lanes, emit)


@functools.cache
def _product(lanes: int, cell: Cell) -> Callable[..., None]:
    """Makes ``(v, panel, sums, first, rows, before, begun)``: keeps what the state gives a panel's gates."""
    gates, vector = cell.from_h, NUMBER * lanes
    multiply, begins, clear, settle = multiplied(lanes), is_reset(), cleared(lanes, 1), settled(lanes, False)

    @compiled(lanes, cell.name)
    def run(v, panel, sums, first, rows, before, begun):
        hidden = v[HIDDEN]
        gate, line, packed = hidden * NUMBER, v[VECTORS] * vector, v[PACKED_U] + panel * v[PANEL_SIZE]
        multiply(v, v[Y] + before * gate, gate, begun, packed, hidden, sums, 0)
        multiply(v, v[H0] + begun * gate, gate, rows - begun, packed, hidden, sums + begun * line, 0)
        for block in range(v[BLOCKS]):
            unit = (panel * v[BLOCKS] + block) * lanes
            if unit < hidden:
                for n in range(rows):
                    reset = begins(v[RESETS], first + n)
                    for number in range(gates):
                        to = v[STATE] + ((first + n) * gates + number) * gate + unit * NUMBER
                        if reset:
                            clear(to, hidden - unit)
                        else:
                            settle(sums + (block * gates + number) * vector + n * line, hidden - unit, to)

    return run


@functools.cache
def _step(lanes: int, cell: Cell) -> Callable[..., None]:
    """Makes ``(v, means, first, n, before, begun)``: the cell of all units of the step's sequence ``n``."""
    gates, inputs, levels = cell.from_h, cell.from_x, len(cell.means)
    of_means, of_cell, begins = _means(lanes, cell, levels, False), _cell(lanes, cell), is_reset()

    @compiled(lanes, cell.name)
    def run(v, means, first, n, before, begun):
        hidden, row = v[HIDDEN], first + n
        gate = hidden * NUMBER
        states = v[PLACES] if n < begun else v[FIRSTS]
        states_at = (before + n if n < begun else n) * gate
        if begins(v[RESETS], row):
            states, states_at = v[ZEROS], 0
        of_means(v, row, states, states_at, 0, 0, means)
        for unit in range(0, hidden, lanes):
            at = unit * NUMBER
            of_cell(
                v[X] + row * inputs * gate + at, gate, v[STATE] + row * gates * gate + at, hidden - unit,
                states, states_at + at, v[PLACES], 0, at, 0, means, row, v[SEED], row * gate + at,
            )  # fmt: skip

    return run


@functools.cache
def _step_back(lanes: int, cell: Cell) -> Callable[..., None]:
    """Makes ``(v, means, own, first, n, before, begun)``: as :func:`_step`, the gradients but for the product.

    ``own`` is the offset of the thread's gradients of parameters.
    """
    whole, _ = backward_of(cell)
    gates, inputs, states, levels = cell.from_h, cell.from_x, cell.states, len(whole.means)
    of_means, of_cell, begins = _means(lanes, whole, levels, True), _cell_back(lanes, cell), is_reset()
    clear, word, first_gradient = cleared(lanes, 1), number_at(), cell.states + cell.parameters

    @compiled(lanes, cell.name)
    def run(v, means, own, first, n, before, begun):
        hidden, row = v[HIDDEN], first + n
        gate = hidden * NUMBER
        earlier = v[PLACES] if n < begun else v[FIRSTS]
        earlier_at = (before + n if n < begun else n) * gate
        reset = begins(v[RESETS], row)
        if reset:
            earlier, earlier_at = v[ZEROS], 0
        of_means(v, row, earlier, earlier_at, n * gate, own, means)
        for unit in range(0, hidden, lanes):
            at = unit * NUMBER
            of_cell(
                v[X] + row * inputs * gate + at, gate, v[STATE] + row * gates * gate + at, hidden - unit,
                earlier, earlier_at + at, v[PLACES], n * gate + at, at, v[DY] + row * gate + at, means, row,
                v[SEED], v[DX] + row * inputs * gate + at, v[DX_N] + row * gates * gate + at, own + at,
            )  # fmt: skip
            if reset:
                for k in range(states):
                    clear(word(v[PLACES], first_gradient + k) + n * gate + at, hidden - unit)

    return run


def forward(lanes: int, cell: Cell) -> Callable[..., None]:
    """Makes ``(data)``, the forward pass, with the same ``data`` as that of :mod:`.custom`."""
    product, step = _product(lanes, cell), _step(lanes, cell)
    team_of, step_of, add, until = packed_by_team(lanes, cell.from_h, False), step_rows(), counted(), wait()

    def run(data):
        v = carray(data, COUNT)
        address = v.ctypes.data
        thread, team = team_of(address, v)
        if team > thread:
            sums = v[SUMS] + thread * v[SUMS_SIZE]
            first_panel, last_panel = thread * v[PANELS] // team, (thread + 1) * v[PANELS] // team
            for s in range(v[TIME]):
                first, rows, before, begun = step_of(v, s, v[REVERSE])
                for panel in range(first_panel, last_panel):
                    product(v, panel, sums, first, rows, before, begun)
                add(address + DONE, 1)
                until(address + DONE, team * (2 * s + 1), v[YIELDING])
                for n in range(thread, rows, team):
                    step(v, sums, first, n, before, begun)
                add(address + DONE, 1)
                until(address + DONE, team * (2 * s + 2), v[YIELDING])

    return named(run, lanes, cell.name)


def backward(lanes: int, cell: Cell) -> Callable[..., None]:
    """As :func:`forward`, backwards. Each thread has its own gradients of parameters, ``apart`` bytes from the last."""
    product, step = product_back(lanes, cell), _step_back(lanes, cell)
    team_of, step_of, add, until = packed_by_team(lanes, cell.from_h, True), step_rows(), counted(), wait()

    def run(data):
        v = carray(data, COUNT)
        address = v.ctypes.data
        thread, team = team_of(address, v)
        if team > thread:
            sums, own = v[SUMS] + thread * v[SUMS_SIZE], thread * v[APART]
            first_panel, last_panel = thread * v[PANELS] // team, (thread + 1) * v[PANELS] // team
            for s in range(v[TIME]):
                first, rows, before, begun = step_of(v, s, 1 - v[REVERSE])
                for n in range(thread, rows, team):
                    step(v, sums, own, first, n, before, begun)
                add(address + DONE, 1)
                until(address + DONE, team * (2 * s + 1), v[YIELDING])
                for panel in range(first_panel, last_panel):
                    product(v, panel, sums, first, rows, before, begun)
                add(address + DONE, 1)
                until(address + DONE, team * (2 * s + 2), v[YIELDING])

    return named(run, lanes, cell.name)
