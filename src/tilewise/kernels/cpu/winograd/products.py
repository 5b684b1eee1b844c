"""Small matrix products whose sums stay in registers."""

from __future__ import annotations

import functools
from collections.abc import Callable

from llvmlite import ir

from tilewise.kernels.cpu.vectors import INT, NUMBER, Code, Values, intrinsic_of, named, number_at

__all__ = ["products"]

MOST_DEPTH = 128
"""The longest sums that stay in registers: the rows of b fit the first cache, and shorter sums round less."""
AHEAD = 2
"""The number of cache lines that are prefetched at each step."""
LINE = 64
"""The bytes of a cache line."""


@functools.cache
def _block(lanes: int, vectors: int, rows: int) -> Callable[..., None]:
    """Makes ``(a, a_row, a_step, b, b_step, c, c_row, depth, add, next)``, which computes ``c = a b`` in registers.

    ``c`` has ``rows`` rows of ``vectors`` vectors. Row i of ``a`` begins at ``a + i * a_row``, and its numbers are
    ``a_step`` bytes apart. Rows of ``b`` have ``vectors`` vectors and are ``b_step`` bytes apart. ``depth``, at least
    1, is the length of the sums. At each step :data:`AHEAD` cache lines from ``next`` on are prefetched to the second
    cache. With ``add`` the complete sums are added to ``c``.
    """

    def emit(code: Code, arguments: Values) -> None:
        a, a_row, a_step, b, b_step, c, c_row, depth, add, ahead = arguments
        builder = code.builder
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
        updated = []
        for i in range(rows):
            factor = code.broadcast(builder.add(at, a_rows[i]))
            updated += [builder.call(code.fma, [factor, row[j], sums[i * vectors + j]]) for j in range(vectors)]
        less = builder.sub(left, ir.Constant(INT, 1))
        for phi, first, following in (
            (left, depth, less), (at, a, builder.add(at, a_step)), (bt, b, builder.add(bt, b_step)),
            (line, ahead, code.at(line, AHEAD * LINE)),
            *((total, code.splat(0.0), value) for total, value in zip(sums, updated, strict=True)),
        ):  # fmt: skip
            phi.add_incoming(first, begin)
            phi.add_incoming(following, body)
        builder.cbranch(builder.icmp_signed(">", less, zero), body, after)
        builder.position_at_end(after)
        builder.cbranch(builder.icmp_signed("!=", add, zero), adding, setting)
        builder.position_at_end(adding)
        for value, place in zip(updated, places, strict=True):
            code.store(builder.fadd(value, code.load(place)), place)
        builder.branch(done)
        builder.position_at_end(setting)
        for value, place in zip(updated, places, strict=True):
            code.store(value, place)
        builder.branch(done)
        builder.position_at_end(done)

    return intrinsic_of(lanes, emit)


def products(lanes: int, vectors: int, rows: int) -> Callable[..., None]:
    """Makes ``(a, b, c, depth, add, blocks, count, distances)``, which computes ``count`` products ``c = a b``.

    Sums have the length ``depth``; with ``add`` they are added to ``c``. Each product has ``blocks`` blocks of ``rows``
    rows and ``vectors`` vectors. ``distances`` is the address of the bytes between neighbours: rows, steps and matrices
    of ``a``, steps and matrices of ``b``, rows and matrices of ``c``.
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
