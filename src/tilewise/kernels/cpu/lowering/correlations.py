"""Matrix products with a lowered image that is stored once, not once for each tap.

The rows of the lowered matrix are lines of a strip of the image. A table has the offset of each row in bytes, so that
taps which read the same line share it. The sums of a block of the result stay in registers over all taps.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

from llvmlite import ir

from tilewise.kernels.cpu.vectors import INT, NUMBER, Code, Values, intrinsic_of, named

__all__ = ["correlations", "gradients"]

PLACE = 8
"""Bytes of an entry of a table of offsets."""


def correlations(lanes: int, vectors: int, rows: int) -> Callable[..., None]:
    """Makes ``(a, next, b, table, c, depth, add, blocks)``, which computes ``c = a b``, or with ``add`` ``c += a b``.

    A row of ``b`` and ``c`` is ``vectors`` vectors. Row k of ``b`` begins at ``b + table[k]`` in bytes. ``a`` and ``c``
    consist of ``blocks`` blocks of ``rows`` rows. Blocks of ``a`` are ``next`` bytes apart, and numbers of a column are
    neighbours in them; blocks of ``c`` follow each other. ``depth``, at least 1, is the length of the sums.
    """
    block = _correlation(lanes, vectors, rows)
    size = rows * vectors * lanes * NUMBER

    def run(a, next, b, table, c, depth, add, blocks):
        for i in range(blocks):
            block(a + i * next, b, table, c + i * size, depth, add)

    return named(run, lanes, vectors, rows)


def gradients(lanes: int, vectors: int, rows: int) -> Callable[..., None]:
    """Makes ``(a, table, b, b_step, c, blocks, add, columns, lines, gap)``, which sums products over a plane.

    It computes ``c = a b``, or with ``add`` ``c += a b``, summed over the positions of a plane. ``a`` consists of
    ``blocks`` blocks of ``rows`` rows, and row i begins at ``a + table[i]`` in bytes. The plane has ``lines`` lines of
    ``columns`` positions, with ``gap`` bytes after each line of ``a``. ``b`` has a row for each position, ``b_step``
    bytes apart. Rows of ``c`` follow each other.
    """
    block = _gradient(lanes, vectors, rows)
    size = rows * vectors * lanes * NUMBER

    def run(a, table, b, b_step, c, blocks, add, columns, lines, gap):
        for i in range(blocks):
            block(a, table + i * rows * PLACE, b, b_step, c + i * size, columns, lines, gap, add)

    return named(run, lanes, vectors, rows)


class _Block:
    """Writes a loop that keeps ``rows * vectors`` sums in registers, and then stores them."""

    def __init__(self, code: Code, vectors: int, rows: int) -> None:
        builder = self.builder = code.builder
        self.code, self.vectors, self.rows, self.size = code, vectors, rows, NUMBER * code.lanes
        self.begin, self.body = builder.block, builder.append_basic_block("body")
        builder.branch(self.body)
        builder.position_at_end(self.body)
        self.sums = [builder.phi(self.code.vector) for _ in range(rows * vectors)]

    def phi(self, first: ir.Value) -> ir.Value:
        """A number that is ``first`` in the first step, and whose following value is given to :meth:`end`."""
        phi = self.builder.phi(INT)
        phi.add_incoming(first, self.begin)
        return phi

    def more(self, factors: list[ir.Value], row: list[ir.Value]) -> list[ir.Value]:
        """The sums after a step, in which a ``row`` of vectors is multiplied by each of the ``factors``."""
        updated = []
        for i, factor in enumerate(factors):
            sums = self.sums[i * self.vectors : (i + 1) * self.vectors]
            updated += [
                self.builder.call(self.code.fma, [factor, value, total]) for value, total in zip(row, sums, strict=True)
            ]
        return updated

    def end(self, again: ir.Value, moved: list[tuple[ir.Value, ir.Value]], updated: list[ir.Value]) -> None:
        """End the loop's body, which runs ``again`` where that is true.

        ``moved`` has the numbers of :meth:`phi` with their following values, and ``updated`` the sums after the step.
        """
        for phi, following in moved:
            phi.add_incoming(following, self.body)
        for total, value in zip(self.sums, updated, strict=True):
            total.add_incoming(self.code.splat(0.0), self.begin)
            total.add_incoming(value, self.body)
        after = self.builder.append_basic_block("after")
        self.builder.cbranch(again, self.body, after)
        self.builder.position_at_end(after)

    def out(self, sums: list[ir.Value], c: ir.Value, add: ir.Value) -> None:
        """Store the sums at ``c``, or where ``add`` is not 0 add them to the vectors there."""
        builder, code = self.builder, self.code
        adding, setting, done = (builder.append_basic_block(name) for name in ("adding", "setting", "done"))
        builder.cbranch(builder.icmp_signed("!=", add, ir.Constant(INT, 0)), adding, setting)
        for block in (adding, setting):
            builder.position_at_end(block)
            for i, value in enumerate(sums):
                place = code.at(c, i * self.size)
                code.store(builder.fadd(value, code.load(place)) if block is adding else value, place)
            builder.branch(done)
        builder.position_at_end(done)


def _number(builder: ir.IRBuilder, address: ir.Value) -> ir.Value:
    """The int64 at ``address``."""
    return builder.load(builder.inttoptr(address, INT.as_pointer()))


@functools.cache
def _correlation(lanes: int, vectors: int, rows: int) -> Callable[..., None]:
    """Makes ``(a, b, table, c, depth, add)``, one block of :func:`correlations`."""

    def emit(code: Code, arguments: Values) -> None:
        a, b, table, c, depth, add = arguments
        builder, block = code.builder, _Block(code, vectors, rows)
        left, at, entry = block.phi(depth), block.phi(a), block.phi(table)
        line = builder.add(b, _number(builder, entry))
        row = [code.load(code.at(line, j * block.size)) for j in range(vectors)]
        updated = block.more([code.broadcast(code.at(at, i * NUMBER)) for i in range(rows)], row)
        less = builder.sub(left, ir.Constant(INT, 1))
        moved = [(left, less), (at, code.at(at, rows * NUMBER)), (entry, code.at(entry, PLACE))]
        block.end(builder.icmp_signed(">", less, ir.Constant(INT, 0)), moved, updated)
        block.out(updated, c, add)

    return intrinsic_of(lanes, emit)


@functools.cache
def _gradient(lanes: int, vectors: int, rows: int) -> Callable[..., None]:
    """Makes ``(a, table, b, b_step, c, columns, lines, gap, add)``, one block of :func:`gradients`."""

    def emit(code: Code, arguments: Values) -> None:
        a, table, b, b_step, c, columns, lines, gap, add = arguments
        builder, zero, one = code.builder, ir.Constant(INT, 0), ir.Constant(INT, 1)
        starts = [builder.add(a, _number(builder, code.at(table, i * PLACE))) for i in range(rows)]
        total = builder.mul(columns, lines)
        block = _Block(code, vectors, rows)
        left, across, at, bt = block.phi(total), block.phi(columns), block.phi(zero), block.phi(b)
        row = [code.load(code.at(bt, j * block.size)) for j in range(vectors)]
        updated = block.more([code.broadcast(builder.add(start, at)) for start in starts], row)
        ends = builder.icmp_signed("==", across, one)
        less = builder.sub(left, one)
        moved = [
            (left, less),
            (across, builder.select(ends, columns, builder.sub(across, one))),
            (at, builder.add(code.at(at, NUMBER), builder.select(ends, gap, zero))),
            (bt, builder.add(bt, b_step)),
        ]
        block.end(builder.icmp_signed(">", less, zero), moved, updated)
        block.out(updated, c, add)

    return intrinsic_of(lanes, emit)
