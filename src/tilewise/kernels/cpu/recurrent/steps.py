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
from tilewise.kernels.cpu.vectors import NUMBER, compiled, named, pointer_call

__all__ = ["backward", "forward"]

THREADS, TIME, BATCH, HIDDEN = (WORDS[name] for name in ("threads", "time", "batch", "hidden"))
PANELS, BLOCKS, VECTORS, PANEL_SIZE = (WORDS[name] for name in ("panels", "blocks", "vectors", "panel_size"))
TILES, ROWS, LAST, PART, SET, ADD = (WORDS[name] for name in ("tiles", "rows", "last", "part", "set", "add"))
YIELDING, REVERSE, KEEP, STATE_TIME = (WORDS[name] for name in ("yielding", "reverse", "keep", "state_time"))
Y_TIME, Y_ROW, DY_TIME, DY_ROW = (WORDS[name] for name in ("y_time", "y_row", "dy_time", "dy_row"))
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
def _team(lanes: int, gates: int, back: bool) -> Callable[..., tuple[int, int]]:
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
def _multiply(lanes: int) -> Callable[..., None]:
    """Makes ``(v, a, a_row, b, depth, sums, add)``: the product of the batch's rows and a panel, or with ``add`` more.

    A part of the panel stays in the second cache while all rows are multiplied with it.
    """
    call, vector = pointer_call(), NUMBER * lanes

    @compiled(lanes)
    def run(v, a, a_row, b, depth, sums, add):
        line, tiles, rows = v[VECTORS] * vector, v[TILES], v[ROWS]
        for k in range(0, depth, v[PART]):
            part, first = min(v[PART], depth - k), ADD if add or k > 0 else SET
            for tile in range(tiles):
                row = tile * rows
                to = v[first + (tile == tiles - 1)]
                call(to, a + row * a_row + k * NUMBER, a_row, b + k * line, line, part, sums + row * line)

    return run


@functools.cache
def _fetch(lanes: int, gates: int) -> Callable[..., None]:
    """Makes ``(v, panel, t)``, which prefetches what a panel's units need of step ``t`` while a product is computed."""
    fetch, one = cells.fetched(lanes, gates), cells.fetched(lanes, 1)

    @compiled(lanes, gates)
    def run(v, panel, t):
        hidden, batch = v[HIDDEN], v[BATCH]
        gate = hidden * NUMBER
        for block in range(v[BLOCKS]):
            of_unit = (panel * v[BLOCKS] + block) * lanes * NUMBER
            for n in range(batch):
                fetch(v[X] + (t * batch + n) * gates * gate + of_unit, gate)
                one(v[DY] + t * v[DY_TIME] + n * v[DY_ROW] + of_unit, 0)

    return run


@functools.cache
def _step(lanes: int, cell: str) -> Callable[..., None]:
    """Makes ``(v, panel, sums, t, h, h_row, c)``: step ``t`` of a panel's units, from the state before it."""
    gates, vector = GATES[cell], NUMBER * lanes
    multiply, fetch = _multiply(lanes), _fetch(lanes, gates)
    of_cell, lstm = cells.forward(lanes, cell), int(cell == "lstm")

    @compiled(lanes, cell)
    def run(v, panel, sums, t, h, h_row, c):
        hidden, batch, keep = v[HIDDEN], v[BATCH], v[KEEP]
        gate, line = hidden * NUMBER, v[VECTORS] * vector
        fetch(v, panel, t)
        multiply(v, h, h_row, v[PACKED_U] + panel * v[PANEL_SIZE], hidden, sums, 0)
        for block in range(v[BLOCKS]):
            unit = (panel * v[BLOCKS] + block) * lanes
            if unit < hidden:
                of_unit, valid, of_sums = unit * NUMBER, hidden - unit, sums + block * gates * vector
                x, to, bias = (
                    v[X] + t * batch * gates * gate + of_unit,
                    v[STATE] + t * v[STATE_TIME] + of_unit,
                    v[BIAS_N],
                )
                y, y_row = v[Y] + t * v[Y_TIME] + of_unit, v[Y_ROW]
                state, state_row = (c if lstm else h) + of_unit, gate if lstm else h_row
                for n in range(batch):
                    of_cell(
                        x + n * gates * gate, gate, of_sums + n * line, valid, state + n * state_row, to + n * gate,
                        y + n * y_row, bias + of_unit, keep,
                    )  # fmt: skip

    return run


def forward(lanes: int, cell: str) -> Callable[..., None]:
    """Makes ``(data)``, which goes through all steps with as many threads as call it with the same ``data``.

    ``data`` is the address of the numbers of ``Told`` and the counters of a team.
    """
    team_of, step, add, until = _team(lanes, GATES[cell], False), _step(lanes, cell), counted(), wait()

    def run(data):
        v = carray(data, COUNT)
        address = v.ctypes.data
        thread, team = team_of(address, v)
        if team > thread:
            sums, row = v[SUMS] + thread * v[SUMS_SIZE], v[HIDDEN] * NUMBER
            first, last = thread * v[PANELS] // team, (thread + 1) * v[PANELS] // team
            h, h_row, c = v[H0], row, v[C0]
            for s in range(v[TIME]):
                t = v[TIME] - 1 - s if v[REVERSE] else s
                for panel in range(first, last):
                    step(v, panel, sums, t, h, h_row, c)
                h, h_row, c = v[Y] + t * v[Y_TIME], v[Y_ROW], v[STATE] + t * v[STATE_TIME]
                add(address + DONE, 1)
                until(address + DONE, team * (s + 1), v[YIELDING])

    return named(run, lanes, cell)


@functools.cache
def _gates_back(lanes: int, cell: str) -> Callable[..., None]:
    """Makes ``(v, panel, t, last, previous)``: gradients of the gates of a panel's units at step ``t``.

    ``previous`` is the step before, and there is none where ``last`` is set.
    """
    gates, of_cell = GATES[cell], cells.backward(lanes, cell)
    lstm, gru = int(cell == "lstm"), int(cell == "gru")

    @compiled(lanes, cell)
    def run(v, panel, t, last, previous):
        hidden, batch = v[HIDDEN], v[BATCH]
        gate = hidden * NUMBER
        for n in range(batch):
            for block in range(v[BLOCKS]):
                unit = (panel * v[BLOCKS] + block) * lanes
                if unit < hidden:
                    of_unit = unit * NUMBER
                    of_row, of_step = n * gate + of_unit, (t * batch + n) * gate
                    of_y = n * v[Y_ROW] + of_unit
                    now, before = v[Y] + t * v[Y_TIME] + of_y, v[Y] + previous * v[Y_TIME] + of_y
                    if last:
                        before = v[H0] + of_row
                    if lstm or gru:
                        now = v[STATE] + t * v[STATE_TIME] + of_row
                    if lstm:
                        before = v[C0] + of_row if last else v[STATE] + previous * v[STATE_TIME] + of_row
                    of_cell(
                        v[X] + of_step * gates + of_unit, gate, hidden - unit, v[DX] + of_step * gates + of_unit,
                        v[DY] + t * v[DY_TIME] + n * v[DY_ROW] + of_unit, v[DH] + of_row, v[DC] + of_row, now, before,
                        v[DX_N] + of_step + of_unit,
                    )  # fmt: skip

    return run


@functools.cache
def _product_back(lanes: int, cell: str) -> Callable[..., None]:
    """Makes ``(v, panel, sums, t, previous)``: the gradient of h before step ``t``, of a panel's units."""
    gates, vector, gru = GATES[cell], NUMBER * lanes, int(cell == "gru")
    multiply, fetch = _multiply(lanes), _fetch(lanes, gates)
    settle = cells.settled(lanes, cell == "gru")

    @compiled(lanes, cell)
    def run(v, panel, sums, t, previous):
        hidden, batch = v[HIDDEN], v[BATCH]
        gate, b = hidden * NUMBER, v[PACKED_U] + panel * v[PANEL_SIZE]
        fetch(v, panel, previous)
        depth = (gates - gru) * hidden
        multiply(v, v[DX] + t * batch * gates * gate, gates * gate, b, depth, sums, 0)
        if gru:
            multiply(v, v[DX_N] + t * batch * gate, gate, b + depth * v[VECTORS] * vector, hidden, sums, 1)
        for n in range(batch):
            for block in range(v[BLOCKS]):
                unit = (panel * v[BLOCKS] + block) * lanes
                if unit < hidden:
                    to = v[DH] + n * gate + unit * NUMBER
                    settle(sums + (n * v[VECTORS] + block) * vector, hidden - unit, to)

    return run


def backward(lanes: int, cell: str) -> Callable[..., None]:
    """As :func:`forward`, backwards."""
    team_of, add, until = _team(lanes, GATES[cell], True), counted(), wait()
    gates, product = _gates_back(lanes, cell), _product_back(lanes, cell)

    def run(data):
        v = carray(data, COUNT)
        address = v.ctypes.data
        thread, team = team_of(address, v)
        if team > thread:
            sums, time = v[SUMS] + thread * v[SUMS_SIZE], v[TIME]
            first, last = thread * v[PANELS] // team, (thread + 1) * v[PANELS] // team
            for s in range(time):
                t, previous = (s, s + 1) if v[REVERSE] else (time - 1 - s, time - 2 - s)
                for panel in range(first, last):
                    gates(v, panel, t, s == time - 1, previous)
                add(address + DONE, 1)
                until(address + DONE, team * (s + 1), v[YIELDING])
                for panel in range(first, last):
                    product(v, panel, sums, t, previous)

    return named(run, lanes, cell)
