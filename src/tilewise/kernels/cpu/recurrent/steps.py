"""Workers of recurrent layers: all steps of a sequence, whose units threads divide.

So each thread reads the same share of the weights at every step, and it stays in its core's caches where it fits
(Diamos et al. 2016, "Persistent RNNs", do the same with a GPU's registers). ``v`` has the numbers of
:class:`tilewise.kernels.cpu.recurrent.told.Told`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

from numba import carray  # type: ignore[attr-defined]

from tilewise.kernels.cpu.recurrent import cells
from tilewise.kernels.cpu.recurrent.products import copied, turned
from tilewise.kernels.cpu.recurrent.team import COME, DONE, PACKED, UNIT, counted, in_team, wait
from tilewise.kernels.cpu.recurrent.told import COUNT, GATES, WORDS
from tilewise.kernels.cpu.vectors import NUMBER, compiled, named, number_at, pointer_call

__all__ = ["back_through_steps", "backward", "forward", "multiplied", "packed_by_team", "step_rows", "through_steps"]

THREADS, TIME, HIDDEN, OFFSETS = (WORDS[name] for name in ("threads", "time", "hidden", "offsets"))
PANELS, BLOCKS, VECTORS, PANEL_SIZE = (WORDS[name] for name in ("panels", "blocks", "vectors", "panel_size"))
MOST, PRODUCTS, PART, YIELDING = (WORDS[name] for name in ("most", "products", "part", "yielding"))
REVERSE, KEEP, Y_ROW, DY_ROW = (WORDS[name] for name in ("reverse", "keep", "y_row", "dy_row"))
SUMS_SIZE, X, U, BIAS_N, H0, C0, Y, STATE = (
    WORDS[name] for name in ("sums_size", "x", "u", "bias_n", "h0", "c0", "y", "state")
)  # fmt: skip
PACKED_U, SUMS, DX, DX_N, DY, DH, DC = (WORDS[name] for name in ("packed", "sums", "dx", "dx_n", "dy", "dh", "dc"))


@functools.cache
def _pack_turned(lanes: int, gates: int) -> Callable[..., None]:
    """Makes ``(v, panel)``, which packs a panel of the forward pass: its lines lie along columns of ``u``."""
    square, vector = turned(lanes), NUMBER * lanes

    @compiled(lanes, gates)
    def run(v, panel):
        hidden, target = v[HIDDEN], v[PACKED_U] + panel * v[PANEL_SIZE]
        row, line = hidden * NUMBER, v[VECTORS] * vector
        for block in range(v[BLOCKS]):
            unit = (panel * v[BLOCKS] + block) * lanes
            for gate in range(gates):
                source = v[U] + (gate * hidden + unit) * row
                to = target + (block * gates + gate) * vector
                for k in range(0, hidden, lanes):
                    square(source + k * NUMBER, row, hidden - unit, hidden - k, to + k * line, line)

    return run


@functools.cache
def _pack_copied(lanes: int, gates: int) -> Callable[..., None]:
    """Makes ``(v, panel)``, which packs a panel of the backward pass: its lines lie along rows of ``u``."""
    copy, vector = copied(lanes), NUMBER * lanes

    @compiled(lanes, gates)
    def run(v, panel):
        hidden, to = v[HIDDEN], v[PACKED_U] + panel * v[PANEL_SIZE]
        first = panel * v[BLOCKS] * lanes
        for k in range(gates * hidden):
            source = v[U] + (k * hidden + first) * NUMBER
            for block in range(v[BLOCKS]):
                copy(source + block * vector, hidden - first - block * lanes, to)
                to += vector

    return run


@functools.cache
def packed_by_team(lanes: int, gates: int, back: bool) -> Callable[..., tuple[int, int]]:
    """Makes ``(address, v)``, which packs with all threads that come: a thread's number and those of its team.

    The team has 0 threads for one that came too late.
    """
    pack = (_pack_copied if back else _pack_turned)(lanes, gates)
    add, team_of, until = counted(), in_team(), wait()

    @compiled(lanes, gates, back)
    def run(address, v):
        thread = add(address + COME, 1)
        if thread >= v[THREADS]:
            return thread, 0
        unit = add(address + UNIT, 1)
        while unit < v[PANELS]:
            pack(v, unit)
            add(address + PACKED, 1)
            unit = add(address + UNIT, 1)
        team = team_of(address, thread, v[THREADS], v[YIELDING])
        until(address + PACKED, v[PANELS], v[YIELDING])
        return thread, team

    return run


@functools.cache
def multiplied(lanes: int) -> Callable[..., None]:
    """Makes ``(v, a, a_row, rows, b, depth, sums, add)``: the product of rows and a panel, or with ``add`` more.

    A part of the panel stays in the second cache while all rows are multiplied with it. Tiles are nearly equal.
    """
    call, word, vector = pointer_call(), number_at(), NUMBER * lanes

    @compiled(lanes)
    def run(v, a, a_row, rows, b, depth, sums, add):
        if rows == 0:
            return
        line, tiles = v[VECTORS] * vector, (rows + v[MOST] - 1) // v[MOST]
        each = (rows + tiles - 1) // tiles
        full, last = 2 * (each - 1), 2 * (rows - (tiles - 1) * each - 1)
        for k in range(0, depth, v[PART]):
            part, more = min(v[PART], depth - k), 1 if add or k > 0 else 0
            for tile in range(tiles):
                row = tile * each
                to = word(v[PRODUCTS], (last if tile == tiles - 1 else full) + more)
                call(to, a + row * a_row + k * NUMBER, a_row, b + k * line, line, part, sums + row * line)

    return run


@functools.cache
def _fetch(lanes: int, gates: int) -> Callable[..., None]:
    """Makes ``(v, panel, first, rows)``: prefetches what a panel's units need of a step while a product is computed."""
    fetch, one = cells.fetched(lanes, gates), cells.fetched(lanes, 1)

    @compiled(lanes, gates)
    def run(v, panel, first, rows):
        gate = v[HIDDEN] * NUMBER
        for block in range(v[BLOCKS]):
            of_unit = (panel * v[BLOCKS] + block) * lanes * NUMBER
            for n in range(first, first + rows):
                fetch(v[X] + n * gates * gate + of_unit, gate)
                one(v[DY] + n * v[DY_ROW] + of_unit, 0)

    return run


@functools.cache
def _step(lanes: int, cell: str) -> Callable[..., None]:
    """Makes ``(v, panel, sums, first, rows, before, begun)``: a step of a panel's units.

    The step has ``rows`` rows from ``first`` on. The first ``begun`` of its sequences go on from the rows from
    ``before`` on, the others from their first state.
    """
    gates, vector = GATES[cell], NUMBER * lanes
    multiply, fetch = multiplied(lanes), _fetch(lanes, gates)
    of_cell, lstm = cells.forward(lanes, cell), int(cell == "lstm")

    @compiled(lanes, cell)
    def run(v, panel, sums, first, rows, before, begun):
        hidden, keep, y_row = v[HIDDEN], v[KEEP], v[Y_ROW]
        gate, line, packed = hidden * NUMBER, v[VECTORS] * vector, v[PACKED_U] + panel * v[PANEL_SIZE]
        fetch(v, panel, first, rows)
        multiply(v, v[Y] + before * y_row, y_row, begun, packed, hidden, sums, 0)
        multiply(v, v[H0] + begun * gate, gate, rows - begun, packed, hidden, sums + begun * line, 0)
        for block in range(v[BLOCKS]):
            unit = (panel * v[BLOCKS] + block) * lanes
            if unit < hidden:
                of_unit, of_sums = unit * NUMBER, sums + block * gates * vector
                x, y = v[X] + first * gates * gate + of_unit, v[Y] + first * y_row + of_unit
                # Where c is not kept, each sequence has one, which every step replaces.
                state = v[STATE] + of_unit
                to, earlier = state + keep * first * gate, state + keep * before * gate
                if not lstm:
                    earlier = v[Y] + before * y_row + of_unit
                earlier_row = gate if lstm else y_row
                begin = (v[C0] if lstm else v[H0]) + of_unit
                for n in range(rows):
                    of_cell(
                        x + n * gates * gate, gate, of_sums + n * line, hidden - unit,
                        earlier + n * earlier_row if n < begun else begin + n * gate, to + n * gate,
                        y + n * y_row, v[BIAS_N] + of_unit, keep,
                    )  # fmt: skip

    return run


@functools.cache
def step_rows() -> Callable[..., tuple[int, int, int, int]]:
    """Makes ``(v, s, reverse)``: of the step with number ``s`` of a pass its first row, its rows, and those before it.

    The rows before are the first one and the number of those that the step's sequences had in the forward's step
    before; there are none where they begin. With ``reverse`` steps run from the last one to the first.
    """
    word = number_at()

    @compiled()
    def run(v, s, reverse):
        t = v[TIME] - 1 - s if reverse else s
        earlier = t + 1 if v[REVERSE] else t - 1
        first = word(v[OFFSETS], t)
        rows = word(v[OFFSETS], t + 1) - first
        if earlier < 0 or earlier >= v[TIME]:
            return first, rows, 0, 0
        before = word(v[OFFSETS], earlier)
        return first, rows, before, min(rows, word(v[OFFSETS], earlier + 1) - before)

    return run


def through_steps(step: Callable[..., None], lanes: int, gates: int, name: str) -> Callable[..., None]:
    """Makes ``(data)``, which goes through all steps with as many threads as call it with the same ``data``.

    ``data`` is the address of the numbers of ``Told`` and the counters of a team. ``step`` is as :func:`_step` makes
    it, for a cell of this ``name``.
    """
    team_of, step_of, add, until = packed_by_team(lanes, gates, False), step_rows(), counted(), wait()

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
                    step(v, panel, sums, first, rows, before, begun)
                add(address + DONE, 1)
                until(address + DONE, team * (s + 1), v[YIELDING])

    return named(run, lanes, name)


def back_through_steps(
    of_gates: Callable[..., None], product: Callable[..., None], lanes: int, gates: int, name: str
) -> Callable[..., None]:
    """As :func:`through_steps`, backwards: of each step first the gates' gradients, then the product with them."""
    team_of, step_of, add, until = packed_by_team(lanes, gates, True), step_rows(), counted(), wait()

    def run(data):
        v = carray(data, COUNT)
        address = v.ctypes.data
        thread, team = team_of(address, v)
        if team > thread:
            sums = v[SUMS] + thread * v[SUMS_SIZE]
            first_panel, last_panel = thread * v[PANELS] // team, (thread + 1) * v[PANELS] // team
            for s in range(v[TIME]):
                first, rows, before, begun = step_of(v, s, 1 - v[REVERSE])
                for panel in range(first_panel, last_panel):
                    of_gates(v, panel, first, rows, before, begun)
                add(address + DONE, 1)
                until(address + DONE, team * (s + 1), v[YIELDING])
                for panel in range(first_panel, last_panel):
                    product(v, panel, sums, first, rows, before, begun)

    return named(run, lanes, name)


def forward(lanes: int, cell: str) -> Callable[..., None]:
    """Makes ``(data)``, the forward pass: see :func:`through_steps`."""
    return through_steps(_step(lanes, cell), lanes, GATES[cell], cell)


@functools.cache
def _gates_back(lanes: int, cell: str) -> Callable[..., None]:
    """Makes ``(v, panel, first, rows, before, begun)``: gradients of the gates of a panel's units at a step.

    Rows are as for :func:`_step`.
    """
    gates, of_cell = GATES[cell], cells.backward(lanes, cell)
    lstm, gru = int(cell == "lstm"), int(cell == "gru")

    @compiled(lanes, cell)
    def run(v, panel, first, rows, before, begun):
        hidden, y_row = v[HIDDEN], v[Y_ROW]
        gate = hidden * NUMBER
        for n in range(rows):
            for block in range(v[BLOCKS]):
                unit = (panel * v[BLOCKS] + block) * lanes
                if unit < hidden:
                    of_unit = unit * NUMBER
                    of_row, of_step = n * gate + of_unit, (first + n) * gate
                    now, earlier = v[Y] + (first + n) * y_row + of_unit, v[Y] + (before + n) * y_row + of_unit
                    if lstm or gru:
                        now = v[STATE] + of_step + of_unit
                    if lstm:
                        earlier = v[STATE] + (before + n) * gate + of_unit
                    if n >= begun:
                        earlier = (v[C0] if lstm else v[H0]) + of_row
                    of_cell(
                        v[X] + of_step * gates + of_unit, gate, hidden - unit, v[DX] + of_step * gates + of_unit,
                        v[DY] + (first + n) * v[DY_ROW] + of_unit, v[DH] + of_row, v[DC] + of_row, now, earlier,
                        v[DX_N] + of_step + of_unit,
                    )  # fmt: skip

    return run


@functools.cache
def _product_back(lanes: int, cell: str) -> Callable[..., None]:
    """Makes ``(v, panel, sums, first, rows, before, begun)``: the gradient of h before a step, of a panel's units."""
    gates, vector, gru = GATES[cell], NUMBER * lanes, int(cell == "gru")
    multiply, fetch = multiplied(lanes), _fetch(lanes, gates)
    settle = cells.settled(lanes, cell == "gru")

    @compiled(lanes, cell)
    def run(v, panel, sums, first, rows, before, begun):
        hidden = v[HIDDEN]
        fetch(v, panel, before, begun)
        gate, b = hidden * NUMBER, v[PACKED_U] + panel * v[PANEL_SIZE]
        depth = (gates - gru) * hidden
        multiply(v, v[DX] + first * gates * gate, gates * gate, rows, b, depth, sums, 0)
        if gru:
            multiply(v, v[DX_N] + first * gate, gate, rows, b + depth * v[VECTORS] * vector, hidden, sums, 1)
        for n in range(rows):
            for block in range(v[BLOCKS]):
                unit = (panel * v[BLOCKS] + block) * lanes
                if unit < hidden:
                    to = v[DH] + n * gate + unit * NUMBER
                    settle(sums + (n * v[VECTORS] + block) * vector, hidden - unit, to)

    return run


def backward(lanes: int, cell: str) -> Callable[..., None]:
    """As :func:`forward`, backwards."""
    return back_through_steps(_gates_back(lanes, cell), _product_back(lanes, cell), lanes, GATES[cell], cell)
