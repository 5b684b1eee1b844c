"""Blocks of a matrix product along whose sums vectors lie: both operands have rows as long as the sums."""

from __future__ import annotations

import functools
from collections.abc import Callable

from llvmlite import ir

from tilewise.kernels.cpu import masks
from tilewise.kernels.cpu.vectors import FLOAT, INT, NUMBER, Code, Values, intrinsic_of, named

__all__ = ["WORDS", "dots"]

WORDS = 13
"""The number of integers that a block takes."""


def _summed(code: Code, sums: list[ir.Value]) -> list[ir.Value]:
    """Vectors whose lanes are the sums over the lanes of each of ``sums``, in order.

    A step halves the number of vectors. Every vector is made of segments, one for each sum that is in it. Each step
    adds the halves of all segments of two vectors.
    """
    b, lanes = code.builder, code.lanes
    kind, length = ir.VectorType(ir.IntType(32), lanes), lanes
    while length > 1:
        places = [start + i for start in range(0, 2 * lanes, length) for i in range(length // 2)]
        low = ir.Constant(kind, places)
        high = ir.Constant(kind, [place + length // 2 for place in places])
        sums = sums + [code.splat(0.0)] * (len(sums) % 2)
        pairs = zip(sums[::2], sums[1::2], strict=True)
        sums = [b.fadd(b.shuffle_vector(p, q, low), b.shuffle_vector(p, q, high)) for p, q in pairs]
        length //= 2
    return sums


@functools.cache
def _block(lanes: int, rows: int, others: int) -> Callable[..., None]:
    """Makes the instructions of :func:`dots`."""

    def emit(code: Code, arguments: Values) -> None:
        w, w_row, valid, x, x_row, c, c_row, c_step, init, init_row, init_step, depth, _ = arguments
        builder = code.builder
        zero, one = ir.Constant(INT, 0), ir.Constant(INT, 1)
        inside = [builder.icmp_signed("<", ir.Constant(INT, i), valid) for i in range(rows)]
        w_rows = [
            builder.select(ok, builder.mul(w_row, ir.Constant(INT, i)), zero) for i, ok in enumerate(inside)
        ]  # rows that are not there are read as the first
        x_rows = [builder.mul(x_row, ir.Constant(INT, j)) for j in range(others)]

        def step(at: ir.Value, sums: list[ir.Value], mask: ir.Value | None) -> list[ir.Value]:
            def read(base: ir.Value, row: ir.Value) -> ir.Value:
                address = builder.add(builder.add(base, row), at)
                return masks.read(code, address, mask)

            of_x = [read(x, row) for row in x_rows]
            updated = []
            for i in range(rows):
                of_w = read(w, w_rows[i])
                updated += [builder.call(code.fma, [of_w, of_x[j], sums[i * others + j]]) for j in range(others)]
            return updated

        whole = builder.sdiv(depth, ir.Constant(INT, lanes))
        begin = builder.block
        body, rest = (builder.append_basic_block(name) for name in ("body", "rest"))
        nothing = [code.splat(0.0)] * (rows * others)
        builder.cbranch(builder.icmp_signed(">", whole, zero), body, rest)
        builder.position_at_end(body)
        left, at = builder.phi(INT), builder.phi(INT)
        sums = [builder.phi(code.vector) for _ in nothing]
        updated = step(at, sums, None)
        less, following = builder.sub(left, one), builder.add(at, ir.Constant(INT, NUMBER * lanes))
        loops = [(left, whole, less), (at, zero, following), *zip(sums, nothing, updated, strict=True)]
        for phi, start, value in loops:
            phi.add_incoming(start, begin)
            phi.add_incoming(value, body)
        builder.cbranch(builder.icmp_signed(">", less, zero), body, rest)
        builder.position_at_end(rest)
        end = builder.phi(INT)
        totals = [builder.phi(code.vector) for _ in nothing]
        for phi, start, value in ((end, zero, following), *zip(totals, nothing, updated, strict=True)):
            phi.add_incoming(start, begin)
            phi.add_incoming(value, body)
        remaining = builder.sub(depth, builder.mul(whole, ir.Constant(INT, lanes)))
        before = builder.block
        tail, done = (builder.append_basic_block(name) for name in ("tail", "done"))
        builder.cbranch(builder.icmp_signed(">", remaining, zero), tail, done)
        builder.position_at_end(tail)
        last = step(end, totals, masks.below(code, remaining))
        builder.branch(done)
        builder.position_at_end(done)
        final = []
        for total, value in zip(totals, last, strict=True):
            phi = builder.phi(code.vector)
            phi.add_incoming(total, before)
            phi.add_incoming(value, tail)
            final.append(phi)
        _write(code, _summed(code, final), inside, others, (c, c_row, c_step), (init, init_row, init_step))

    return intrinsic_of(lanes, emit)


def _write(
    code: Code,
    sums: list[ir.Value],
    inside: list[ir.Value],
    others: int,
    to: tuple[ir.Value, ir.Value, ir.Value],
    init: tuple[ir.Value, ir.Value, ir.Value],
) -> None:
    """Store ``init`` plus the sums of each row that is there. ``to`` and ``init`` are a place and two distances."""
    b = code.builder
    for i, ok in enumerate(inside):
        with b.if_then(ok):
            for j in range(others):
                number = i * others + j
                value = b.extract_element(sums[number // code.lanes], ir.Constant(INT, number % code.lanes))
                source, target = (
                    b.inttoptr(
                        b.add(place, b.add(b.mul(row, ir.Constant(INT, i)), b.mul(step, ir.Constant(INT, j)))),
                        FLOAT.as_pointer(),
                    )
                    for place, row, step in (init, to)
                )
                b.store(b.fadd(value, b.load(source, align=NUMBER)), target, align=NUMBER)


def dots(lanes: int, rows: int, others: int) -> Callable[..., None]:
    """Makes ``(w, w_row, valid, x, x_row, c, c_row, c_step, init, init_row, init_step, depth, none)``: dot products.

    Number (i, j) of ``c``, at ``c + i * c_row + j * c_step``, becomes that of ``init`` plus the product of row i of
    ``w``, of which the first ``valid`` are there, ``rows`` at the most, and row j of ``x``, of which there are
    ``others``. ``depth`` is the length of rows. Distances are in bytes.
    """
    block = _block(lanes, rows, others)

    def run(w, w_row, valid, x, x_row, c, c_row, c_step, init, init_row, init_step, depth, none):
        block(w, w_row, valid, x, x_row, c, c_row, c_step, init, init_row, init_step, depth, none)

    return named(run, lanes, rows, others)
