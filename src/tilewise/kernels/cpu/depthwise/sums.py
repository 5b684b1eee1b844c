"""Sums of products in registers, which direct convolutions and their filters' gradients share.

A tile of ``rows`` by ``columns`` sums stays in registers while products are added line by line. A *line* is a number of
steps along two operands. At each step one vector of the second operand is multiplied by a vector of the first operand
for each sum; those of neighbouring columns are neighbours. For an image the first operand is the source and the second
has the taps. For a filter's gradient the second operand is the output's gradient, and the sums are taps.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

from tilewise.kernels.cpu.depthwise.windows import LINE, MOST_COLUMNS, MOST_ROWS, REGISTERS
from tilewise.kernels.cpu.vectors import INT, NUMBER, Code, named

__all__ = ["WORDS", "sums", "sums_call", "tiles"]

WORDS = 13
"""The number of arguments of the function of :func:`sums`."""


def tiles(lanes: int) -> list[tuple[int, int]]:
    """The rows and columns of all tiles whose sums fit in registers."""
    most = REGISTERS[lanes]
    sizes = ((rows, columns) for rows in range(1, MOST_ROWS + 1) for columns in range(1, MOST_COLUMNS + 1))
    return [(rows, columns) for rows, columns in sizes if rows * columns <= most]


def sums(lanes: int) -> Callable[..., None]:
    """Makes ``(rows, columns, out, out_row, out_column, a, a_row, a_step, b, b_step, table, lines, add)``.

    ``table`` has three int64 for each of its ``lines``: ``(a_line, b_line, steps)``. Sum (r, t) is the sum over all
    lines and their steps n of ``b[b_line + n * b_step] * a[a_line + n * a_step + r * a_row + t]``, where t counts
    vectors. It goes to ``out + r * out_row + t * out_column``; with ``add`` it is added to the vector there. Rows and
    columns are one of :func:`tiles`. All arguments are int64, and distances are in bytes.
    """
    chosen = _chosen(lanes)

    def run(number, columns, out, out_row, out_column, a, a_row, a_step, b, b_step, table, lines, add):
        chosen((number, columns, out, out_row, out_column, a, a_row, a_step, b, b_step, table, lines, add))

    return named(run, lanes)


@functools.cache
def sums_call() -> Callable[..., None]:
    """Makes ``(address, words)``, which calls the compiled function of :func:`sums` at ``address`` with ``words``."""

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
    """Makes the function of :func:`sums`, with its arguments as one tuple."""

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
    """Write the instructions for one size of tiles; ``words`` are the arguments of :func:`sums` from ``out`` on."""
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
    """The int64 at ``address``."""
    return code.builder.load(code.builder.inttoptr(address, INT.as_pointer()), align=8)
