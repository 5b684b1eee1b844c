"""Steps of recurrent cells that a user states: the product with the state and all of the cell in one kernel a step.

A cell is a list of nodes (:mod:`tilewise.kernels.cpu.recurrent.expressions`), which the kernels take as tuples of
constants: while Triton compiles, a loop over the nodes becomes straight code. All numbers are fp32 in registers.

A program computes some sequences of some units. Where a cell has means over units it has all units of them.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from tilewise.kernels.cpu.recurrent.expressions import Cell

# Tuples of tensors grow by addition: Triton has no starred expressions.
# ruff: noqa: RUF005
# mypy: disable-error-code="assignment"

__all__ = ["OPERATIONS", "encoded", "step", "step_back"]

OPERATIONS = {
    name: number
    for number, name in enumerate(
        (
            "x", "h", "state", "parameter", "random", "seed", "constant", "add", "sub", "mul", "div", "neg", "tanh",
            "sigmoid", "relu", "sqrt", "less", "less_equal", "select", "clamp", "where_positive", "where_within",
            "mean",
        )
    )
}  # fmt: skip
"""The number of each operation: those of :func:`_evaluated`."""


def encoded(cell: Cell) -> dict[str, tuple[Any, ...]]:
    """The nodes of a cell as constants of kernels: operations, up to three places or a number, and up to two values."""
    operations, firsts, seconds, thirds = list[int](), list[int](), list[int](), list[int]()
    lows, highs = list[float](), list[float]()
    for name, *rest in cell.nodes:
        values = rest if name == "constant" else rest[1:] if name == "clamp" else rest[2:] if "within" in name else []
        places = [*(int(each) for each in rest[: len(rest) - len(values)]), 0, 0, 0]
        operations.append(OPERATIONS[name])
        firsts.append(places[0])
        seconds.append(places[1])
        thirds.append(places[2])
        numbers = [*(float(each) for each in values), 0.0, 0.0]
        low, high = numbers[:2]
        lows.append(low)
        highs.append(high)
    columns: dict[str, list[Any]] = {
        "OPS": operations,
        "A": firsts,
        "B": seconds,
        "C": thirds,
        "LOW": lows,
        "HIGH": highs,
    }
    return {name: tuple(column) for name, column in columns.items()}


@triton.jit
def _tanh(x):
    """tanh, as exact for small numbers as for others: a series up to x^11 below a quarter."""
    square = x * x
    series = -1382.0 / 155925.0
    series = series * square + 62.0 / 2835.0
    series = series * square - 17.0 / 315.0
    series = series * square + 2.0 / 15.0
    series = series * square - 1.0 / 3.0
    near = x + x * (square * series)
    e = tl.exp(-2.0 * tl.abs(x))
    far = (1.0 - e) / (1.0 + e)
    return tl.where(tl.abs(x) < 0.25, near, tl.where(x < 0.0, -far, far))


@triton.jit
def _number(word, DTYPE: tl.constexpr):
    """The upper 24 bits of a word as a number of [0, 1), rounded to a type."""
    return ((word >> 8).to(tl.int32).to(tl.float32) * 5.9604644775390625e-08).to(DTYPE).to(tl.float32)


@triton.jit
def _randoms(units, rows, seed, COUNT: tl.constexpr, DTYPE: tl.constexpr):
    """Random numbers of [0, 1) for each unit, rounded to a type, as :mod:`tilewise.rnn.noise` says."""
    found = ()
    first = units.to(tl.uint32) + tl.zeros(rows.shape, tl.uint32)
    lower = (rows & 0xFFFFFFFF).to(tl.uint32) + tl.zeros(units.shape, tl.uint32)
    upper = (rows >> 32).to(tl.uint32) + tl.zeros(units.shape, tl.uint32)
    for group in tl.static_range((COUNT + 3) // 4):
        a, b, c, d = tl.philox(seed, first, lower, upper, tl.full(first.shape, group, tl.uint32))
        found = found + (_number(a, DTYPE), _number(b, DTYPE), _number(c, DTYPE), _number(d, DTYPE))
    return found


@triton.jit
def _evaluated(from_x, from_h, states, parameters, randoms, seeds, valid, hidden, OPS: tl.constexpr, A: tl.constexpr,
               B: tl.constexpr, C: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr):  # fmt: skip
    """The values of all nodes."""
    values = ()
    for n in tl.static_range(len(OPS)):
        if OPS[n] == 0:
            v = from_x[A[n]]
        elif OPS[n] == 1:
            v = from_h[A[n]]
        elif OPS[n] == 2:
            v = states[A[n]]
        elif OPS[n] == 3:
            v = parameters[A[n]]
        elif OPS[n] == 4:
            v = randoms[A[n]]
        elif OPS[n] == 5:
            v = seeds[A[n]]
        elif OPS[n] == 6:
            v = tl.full(valid.shape, LOW[n], tl.float32)
        elif OPS[n] == 7:
            v = values[A[n]] + values[B[n]]
        elif OPS[n] == 8:
            v = values[A[n]] - values[B[n]]
        elif OPS[n] == 9:
            v = values[A[n]] * values[B[n]]
        elif OPS[n] == 10:
            v = values[A[n]] / values[B[n]]
        elif OPS[n] == 11:
            v = -values[A[n]]
        elif OPS[n] == 12:
            v = _tanh(values[A[n]])
        elif OPS[n] == 13:
            v = tl.sigmoid(values[A[n]])
        elif OPS[n] == 14:
            v = tl.where(values[A[n]] > 0.0, values[A[n]], values[A[n]] * 0.0)  # keeps NaN
        elif OPS[n] == 15:
            v = tl.sqrt(values[A[n]])
        elif OPS[n] == 16:
            v = tl.where(values[A[n]] < values[B[n]], 1.0, 0.0)
        elif OPS[n] == 17:
            v = tl.where(values[A[n]] <= values[B[n]], 1.0, 0.0)
        elif OPS[n] == 18:
            v = tl.where(values[A[n]] != 0.0, values[B[n]], values[C[n]])
        elif OPS[n] == 19:
            low = tl.where(values[A[n]] < LOW[n], LOW[n], values[A[n]])
            v = tl.where(low > HIGH[n], HIGH[n], low)
        elif OPS[n] == 20:
            v = tl.where(values[B[n]] > 0.0, values[A[n]], 0.0)
        elif OPS[n] == 21:
            v = tl.where((values[B[n]] >= LOW[n]) & (values[B[n]] <= HIGH[n]), values[A[n]], 0.0)
        else:
            total = tl.sum(tl.where(valid, values[A[n]], 0.0), axis=1, keep_dims=True)
            v = tl.broadcast_to(total / hidden, valid.shape)
        values = values + (v,)
    return values


@triton.jit
def _read(at, stride, valid, COUNT: tl.constexpr):
    """Tensors that lie ``stride`` elements apart, in fp32."""
    found = ()
    for k in tl.static_range(COUNT):
        found = found + (tl.load(at + k * stride, mask=valid, other=0.0).to(tl.float32),)
    return found


@triton.jit
def _tile(batch, hidden, BN: tl.constexpr, BH: tl.constexpr):
    """The program's sequences (BN, 1) and units (1, BH), and which pairs of them there are."""
    rows = (tl.program_id(0) * BN + tl.arange(0, BN))[:, None]
    units = (tl.program_id(1) * BH + tl.arange(0, BH))[None, :]
    return rows, units, (rows < batch) & (units < hidden)


@triton.jit
def step(x, u, h, others, parameters, resets, row, seed, from_h, h_new, others_new, batch, hidden, between,
         OPS: tl.constexpr, A: tl.constexpr, B: tl.constexpr, C: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr,
         RESULTS: tl.constexpr, FROM_X: tl.constexpr, FROM_H: tl.constexpr, STATES: tl.constexpr,
         PARAMETERS: tl.constexpr, RANDOMS: tl.constexpr, FUSED: tl.constexpr, PRECISION: tl.constexpr,
         BN: tl.constexpr, BH: tl.constexpr, BK: tl.constexpr):  # fmt: skip
    """One step of all sequences.

    ``x`` (batch, FROM_X * hidden) are what the input gives, ``u`` (FROM_H * hidden, hidden) the recurrent weights,
    ``h`` (batch, hidden) the first state before the step and ``h_new`` after it. ``others`` are the further states, in
    fp32, ``between`` elements apart: batch * hidden. ``from_h`` (batch, FROM_H * hidden) in fp32 becomes u h where
    ``FUSED``; else it is there already. ``resets`` are bytes, one a sequence; ``row`` is the number of the step's first
    row, ``seed`` that of random numbers, one of 64 bits each.
    """
    rows, units, valid = _tile(batch, hidden, BN, BH)
    wide, own = rows.to(tl.int64), rows.to(tl.int64) * hidden + units
    kept = tl.load(resets + rows, mask=rows < batch, other=0) == 0
    gates = wide * (FROM_H * hidden) + units
    if FUSED:
        of_h = ()
        for g in tl.static_range(FROM_H):
            sums = tl.zeros((BN, BH), tl.float32)
            for start in range(0, hidden, BK):
                k = start + tl.arange(0, BK)
                left = tl.load(
                    h + wide * hidden + k[None, :], mask=kept & (rows < batch) & (k[None, :] < hidden), other=0.0
                )
                weights = u + (g * hidden + units.to(tl.int64)) * hidden + k[:, None]
                right = tl.load(weights, mask=(units < hidden) & (k[:, None] < hidden), other=0.0)
                sums = tl.dot(left, right, sums, input_precision=PRECISION)
            tl.store(from_h + gates + g * hidden, sums, mask=valid)
            of_h = of_h + (sums,)
    else:
        of_h = ()
        for g in tl.static_range(FROM_H):
            part = tl.load(from_h + gates + g * hidden, mask=valid, other=0.0)
            part = tl.where(kept, part, 0.0)
            tl.store(from_h + gates + g * hidden, part, mask=valid)
            of_h = of_h + (part,)
    at_start = valid & kept
    states = _read(h + own, 0, at_start, 1) + _read(others + own, between, at_start, STATES - 1)
    of_x = _read(x + wide * (FROM_X * hidden) + units, hidden, valid, FROM_X)
    of_unit = _read(parameters + units + tl.zeros((BN, 1), tl.int32), hidden, valid, PARAMETERS)
    randoms = _randoms(units, tl.load(row) + wide, tl.load(seed), RANDOMS, x.dtype.element_ty)
    values = _evaluated(of_x, of_h, states, of_unit, randoms, (), valid, hidden, OPS, A, B, C, LOW, HIGH)
    tl.store(h_new + own, values[RESULTS[0]].to(h_new.dtype.element_ty), mask=valid)
    for k in tl.static_range(STATES - 1):
        tl.store(others_new + k * between + own, values[RESULTS[k + 1]], mask=valid)


@triton.jit
def step_back(x, u, h, others, from_h, parameters, resets, resets_next, row, seed, dy, dgates_next, carry, ends, dx,
              dgates, sums, batch, hidden, between, OPS: tl.constexpr, A: tl.constexpr, B: tl.constexpr,
              C: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr, OF_X: tl.constexpr, OF_H: tl.constexpr,
              OF_STATE: tl.constexpr, OF_PARAMETER: tl.constexpr, RANDOMS: tl.constexpr, FUSED: tl.constexpr,
              PRECISION: tl.constexpr, BN: tl.constexpr, BH: tl.constexpr, BK: tl.constexpr):  # fmt: skip
    """The gradients of one step, from those of the states after it.

    ``ends`` (states, batch, hidden) in fp32 are these, but that of h lacks the product of ``dgates_next``, the
    gradients of what the state gave the next step, with ``u``: it is ``carry`` (batch, hidden) in fp32 where not
    ``FUSED``. They become those before the step. ``dy`` is added to that of h. ``sums`` (programs along the batch, all
    parts of all parameters * hidden) are added to. The other arguments are those of :func:`step`.
    """
    rows, units, valid = _tile(batch, hidden, BN, BH)
    wide, own = rows.to(tl.int64), rows.to(tl.int64) * hidden + units
    kept = tl.load(resets + rows, mask=rows < batch, other=0) == 0
    went_on = tl.load(resets_next + rows, mask=rows < batch, other=0) == 0
    if FUSED:
        product = tl.zeros((BN, BH), tl.float32)
        for start in range(0, hidden * len(OF_H), BK):
            k = start + tl.arange(0, BK)
            inside = k < hidden * len(OF_H)
            left = tl.load(
                dgates_next + wide * (hidden * len(OF_H)) + k[None, :], mask=(rows < batch) & inside[None, :], other=0.0
            )
            right = tl.load(
                u + k[:, None].to(tl.int64) * hidden + units, mask=inside[:, None] & (units < hidden), other=0.0
            )
            product = tl.dot(left, right, product, input_precision=PRECISION)
    else:
        product = tl.load(carry + own, mask=valid, other=0.0)
    of_h = _read(from_h + wide * (hidden * len(OF_H)) + units, hidden, valid, len(OF_H))
    at_start = valid & kept
    states = _read(h + own, 0, at_start, 1) + _read(others + own, between, at_start, len(OF_STATE) - 1)
    of_x = _read(x + wide * (hidden * len(OF_X)) + units, hidden, valid, len(OF_X))
    of_unit = _read(parameters + units + tl.zeros((BN, 1), tl.int32), hidden, valid, len(OF_PARAMETER))
    randoms = _randoms(units, tl.load(row) + wide, tl.load(seed), RANDOMS, x.dtype.element_ty)
    given = _read(ends + own, between, valid, len(OF_STATE))
    of_y = tl.load(dy + own, mask=valid, other=0.0).to(tl.float32)
    first = given[0] + of_y + tl.where(went_on, product, 0.0)
    seeds = (first,) + given[1:]
    values = _evaluated(of_x, of_h, states, of_unit, randoms, seeds, valid, hidden, OPS, A, B, C, LOW, HIGH)
    for k in tl.static_range(len(OF_X)):
        at = dx + wide * (hidden * len(OF_X)) + k * hidden + units
        tl.store(at, values[OF_X[k]].to(dx.dtype.element_ty), mask=valid)
    for k in tl.static_range(len(OF_H)):
        at = dgates + wide * (hidden * len(OF_H)) + k * hidden + units
        tl.store(at, values[OF_H[k]].to(dgates.dtype.element_ty), mask=valid)
    for k in tl.static_range(len(OF_STATE)):
        tl.store(ends + k * between + own, tl.where(kept, values[OF_STATE[k]], 0.0), mask=valid)
    for k in tl.static_range(len(OF_PARAMETER)):
        at = sums + (tl.program_id(0) * len(OF_PARAMETER) + k) * hidden + units
        total = tl.sum(tl.where(valid, values[OF_PARAMETER[k]], 0.0), axis=0, keep_dims=True)
        before = tl.load(at, mask=units < hidden, other=0.0)
        tl.store(at, before + total, mask=units < hidden)
