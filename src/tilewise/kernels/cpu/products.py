"""Small matrix products whose sums stay in registers."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

from tilewise.kernels.cpu.vectors import INT, NUMBER, Code, named, number_at

__all__ = ["products"]

MOST_DEPTH = 128
"""Longest sums that are kept in registers: b fits the first cache, and sums of sums round less."""
AHEAD = 2
LINE = 64
"""Bytes of a line of a cache."""


@functools.cache
def _block(lanes: int, vectors: int, rows: int) -> Callable[..., None]:
    """``(a, a_row, a_step, b, b_step, c, c_row, depth, add, next)``: ``c = [c +] a b`` in ``rows * vectors`` registers.

    Row i of ``a`` begins ``i * a_row`` bytes on and its next number lies ``a_step`` on; a row of ``b`` is ``vectors``
    vectors, and the next lies ``b_step`` on. ``depth``, at least 1, is the length of the sums. At each of
    their steps :data:`AHEAD` lines from ``next`` on begin to come to the second cache. What is added to is
    added at the end, as one number.
    """

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, arguments: Any) -> Any:
        a, a_row, a_step, b, b_step, c, c_row, depth, add, ahead = arguments
        code = Code(builder, lanes)
        zero = ir.Constant(INT, 0)
        size = NUMBER * lanes
        starts = [builder.add(c, builder.mul(c_row, ir.Constant(INT, i))) for i in range(rows)]
        places = [code.at(start, j * size) for start in starts for j in range(vectors)]
        a_rows = [builder.mul(a_row, ir.Constant(INT, i)) for i in range(rows)]
        begin = builder.block
        names = "body", "after", "adding", "setting", "done"
        body, after, adding, setting, done = (builder.append_basic_block(name) for name in names)
        builder.branch(body)
        builder.position_at_end(body)
        left, at, bt, line = (builder.phi(INT) for _ in range(4))
        sums = [builder.phi(code.vector) for _ in places]
        row = [code.load(code.at(bt, j * size)) for j in range(vectors)]
        for i in range(AHEAD):
            code.prefetch(code.at(line, i * LINE))
        found = []
        for i in range(rows):
            factor = code.broadcast(builder.add(at, a_rows[i]))
            found += [builder.call(code.fma, [factor, row[j], sums[i * vectors + j]]) for j in range(vectors)]
        less = builder.sub(left, ir.Constant(INT, 1))
        for phi, first, following in (
            (left, depth, less), (at, a, builder.add(at, a_step)), (bt, b, builder.add(bt, b_step)),
            (line, ahead, code.at(line, AHEAD * LINE)),
            *((total, code.splat(0.0), value) for total, value in zip(sums, found, strict=True)),
        ):  # fmt: skip
            phi.add_incoming(first, begin)
            phi.add_incoming(following, body)
        builder.cbranch(builder.icmp_signed(">", less, zero), body, after)
        builder.position_at_end(after)
        builder.cbranch(builder.icmp_signed("!=", add, zero), adding, setting)
        builder.position_at_end(adding)
        for value, place in zip(found, places, strict=True):
            code.store(builder.fadd(value, code.load(place)), place)
        builder.branch(done)
        builder.position_at_end(setting)
        for value, place in zip(found, places, strict=True):
            code.store(value, place)
        builder.branch(done)
        builder.position_at_end(done)
        return context.get_dummy_value()

    signature = types.void(*[types.int64] * 10)

    def ten(typingctx, a, a_row, a_step, b, b_step, c, c_row, depth, add, ahead):
        return signature, generate

    made: Any = ten
    return intrinsic(made)


def products(lanes: int, vectors: int, rows: int) -> Callable[..., None]:
    """``(a, b, c, depth, add, blocks, count, distances)``: ``count`` products ``c = [c +] a b`` of sums over ``depth``.

    Each has ``blocks`` of ``rows`` rows and ``vectors`` vectors. ``distances`` is the address of bytes between
    neighbours: a's rows, steps of its sums, a's matrices, b's steps and matrices, c's rows and matrices.
    """
    block, number = _block(lanes, vectors, rows), number_at()

    def run(a, b, c, depth, add, blocks, count, distances):
        a_row, a_step, a_next = number(distances, 0), number(distances, 1), number(distances, 2)
        b_step, b_next = number(distances, 3), number(distances, 4)
        c_row, c_next = number(distances, 5), number(distances, 6)
        parts = (depth + MOST_DEPTH - 1) // MOST_DEPTH
        for k in range(count):
            ahead = b + (k + 1) * b_next
            last = max(ahead, ahead + b_next - depth // parts * AHEAD * LINE)
            for part in range(parts):
                start = part * depth // parts
                length = (part + 1) * depth // parts - start
                left, right = a + k * a_next + start * a_step, b + k * b_next + start * b_step
                for i in range(blocks):
                    target = c + k * c_next + i * rows * c_row
                    block(
                        left + i * rows * a_row, a_row, a_step, right, b_step, target, c_row, length, add + part, ahead
                    )
                    ahead = min(last, ahead + length * AHEAD * LINE)

    return named(run, lanes, vectors, rows)
