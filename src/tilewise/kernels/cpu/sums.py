"""Sums of products in registers: what direct convolutions and their filters' gradients have in common.

A tile of ``rows`` by ``columns`` sums stays in registers while *lines* of products go by. A line is some steps along
two operands: a vector of one is multiplied with those of the other that each sum stands before, which are neighbours
along the tile's columns. Of an image that vector is a tap, and the other operand is the source; of a filter's gradient
it is the output's gradient, and the sums are taps.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

from tilewise.kernels.cpu.vectors import INT, NUMBER, Code, named
from tilewise.kernels.cpu.windows import LINE, MOST_COLUMNS, MOST_ROWS, REGISTERS

__all__ = ["WORDS", "sums", "sums_call", "tiles"]

WORDS = 13
"""Arguments of :func:`sums`."""


def tiles(lanes: int) -> list[tuple[int, int]]:
    """Rows and columns of the tiles that there are."""
    most = REGISTERS[lanes]
    sizes = ((rows, columns) for rows in range(1, MOST_ROWS + 1) for columns in range(1, MOST_COLUMNS + 1))
    return [(rows, columns) for rows, columns in sizes if rows * columns <= most]


def sums(lanes: int) -> Callable[..., None]:
    """``(rows, columns, out, out_row, out_column, a, a_row, a_step, b, b_step, table, lines, add)``, int64.

    For sum (r, t) at ``out + r * out_row + t * out_column``: over all lines ``(a_line, b_line, steps)`` of ``table``,
    three int64 each, and all their steps n, ``b[b_line + n * b_step] * a[a_line + n * a_step + r * a_row + t]``, t in
    vectors. With ``add`` it is added to what is there. Rows and columns are one of :func:`tiles`.
    """
    chosen = _chosen(lanes)

    def run(number, columns, out, out_row, out_column, a, a_row, a_step, b, b_step, table, lines, add):
        chosen((number, columns, out, out_row, out_column, a, a_row, a_step, b, b_step, table, lines, add))

    return named(run, lanes)


@functools.cache
def sums_call() -> Callable[..., None]:
    """``(address, words)``: calls :func:`sums`, compiled, which is there."""

    def generate(context, builder, signature, arguments):
        kind = ir.FunctionType(ir.VoidType(), [INT] * WORDS)
        builder.call(
            builder.inttoptr(arguments[0], kind.as_pointer()), cgutils.unpack_tuple(builder, arguments[1], WORDS)
        )
        return context.get_dummy_value()

    signature = types.void(types.int64, types.UniTuple(types.int64, WORDS))

    def made(typingctx, to, words):
        return signature, generate

    kind: Any = made
    return intrinsic(kind)


@functools.cache
def _chosen(lanes: int) -> Callable[..., None]:
    """:func:`sums` of a tuple."""

    def generate(context, builder, signature, arguments):
        words = cgutils.unpack_tuple(builder, arguments[0], WORDS)
        kind = builder.add(builder.mul(words[0], ir.Constant(INT, MOST_COLUMNS + 1)), words[1])
        done = builder.append_basic_block("done")
        choice = builder.switch(kind, done)
        for rows, columns in tiles(lanes):
            with builder.goto_block(done):
                block = builder.append_basic_block(f"tile.{rows}.{columns}")
            choice.add_case(ir.Constant(INT, rows * (MOST_COLUMNS + 1) + columns), block)
            builder.position_at_end(block)
            _tile(Code(builder, lanes), rows, columns, words[2:])
            builder.branch(done)
        builder.position_at_end(done)
        return context.get_dummy_value()

    signature = types.void(types.UniTuple(types.int64, WORDS))

    def made(typingctx, words):
        return signature, generate

    kind: Any = made
    return intrinsic(kind)


def _tile(code: Code, rows: int, columns: int, words: Sequence[ir.Value]) -> None:
    out, out_row, out_column, a, a_row, a_step, b, b_step, table, lines, add = words
    builder, vector = code.builder, NUMBER * code.lanes
    held = [[cgutils.alloca_once(builder, code.vector) for _ in range(columns)] for _ in range(rows)]
    for row in held:
        for place in row:
            builder.store(code.splat(0.0), place)
    with cgutils.for_range(builder, lines) as line:
        first = builder.add(table, builder.mul(line.index, ir.Constant(INT, 8 * LINE)))
        a_line, b_line, steps = (_number(code, code.at(first, 8 * i)) for i in range(LINE))
        a_next, b_next = (cgutils.alloca_once(builder, INT) for _ in range(2))
        builder.store(builder.add(a, a_line), a_next)
        builder.store(builder.add(b, b_line), b_next)
        with cgutils.for_range(builder, steps):
            source, factor = builder.load(a_next), code.load(builder.load(b_next))
            for row in held:
                for t, place in enumerate(row):
                    value = code.load(code.at(source, t * vector))
                    builder.store(builder.call(code.fma, [factor, value, builder.load(place)]), place)
                source = builder.add(source, a_row)
            builder.store(builder.add(builder.load(a_next), a_step), a_next)
            builder.store(builder.add(builder.load(b_next), b_step), b_next)
    with builder.if_else(builder.icmp_signed("!=", add, ir.Constant(INT, 0))) as (adds, sets):
        for case, block in ((True, adds), (False, sets)):
            with block:
                for r, row in enumerate(held):
                    start = code.at(out, r, out_row)
                    for t, place in enumerate(row):
                        target = code.at(start, t, out_column)
                        value = builder.load(place)
                        code.store(builder.fadd(code.load(target), value) if case else value, target)


def _number(code: Code, address: ir.Value) -> ir.Value:
    return code.builder.load(code.builder.inttoptr(address, INT.as_pointer()), align=8)
