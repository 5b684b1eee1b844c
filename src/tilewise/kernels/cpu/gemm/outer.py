"""Blocks of a matrix product along whose columns vectors lie: each step adds an outer product to sums in registers."""

from __future__ import annotations

import functools
from collections.abc import Callable

from llvmlite import ir

from tilewise.kernels.cpu import masks
from tilewise.kernels.cpu.vectors import INT, NUMBER, Code, Values, intrinsic_of, named

__all__ = ["WORDS", "outer"]

WORDS = 13
"""The number of integers that a block takes."""


@functools.cache
def _block(lanes: int, rows: int, vectors: int) -> Callable[..., None]:
    """Makes the instructions of :func:`outer`."""
    size = NUMBER * lanes

    def emit(code: Code, arguments: Values) -> None:
        a, a_row, a_step, b, b_step, c, c_row, init, init_row, columns, depth, ahead, _ = arguments
        builder = code.builder
        mask = masks.below(code, builder.sub(columns, ir.Constant(INT, (vectors - 1) * lanes)))

        def read(place: ir.Value, j: int) -> ir.Value:
            address = code.at(place, j * size)
            return masks.load(code, address, mask) if j == vectors - 1 else code.load(address)

        a_rows = [builder.mul(a_row, ir.Constant(INT, i)) for i in range(rows)]
        starts = [builder.add(init, builder.mul(init_row, ir.Constant(INT, i))) for i in range(rows)]
        nothing = [code.splat(0.0)] * (rows * vectors)
        begin = builder.block
        body, after = (builder.append_basic_block(name) for name in ("body", "after"))
        builder.branch(body)
        builder.position_at_end(body)
        left, at, bt = (builder.phi(INT) for _ in range(3))
        sums = [builder.phi(code.vector) for _ in nothing]
        for j in range(vectors):
            code.prefetch(builder.add(code.at(bt, j * size), ahead))
        row = [read(bt, j) for j in range(vectors)]
        updated = []
        for i in range(rows):
            factor = code.broadcast(builder.add(at, a_rows[i]))
            updated += [builder.call(code.fma, [factor, row[j], sums[i * vectors + j]]) for j in range(vectors)]
        less = builder.sub(left, ir.Constant(INT, 1))
        for phi, start, following in (
            (left, depth, less), (at, a, builder.add(at, a_step)), (bt, b, builder.add(bt, b_step)),
            *zip(sums, nothing, updated, strict=True),
        ):  # fmt: skip
            phi.add_incoming(start, begin)
            phi.add_incoming(following, body)
        builder.cbranch(builder.icmp_signed(">", less, ir.Constant(INT, 0)), body, after)
        builder.position_at_end(after)
        for i in range(rows):
            to = builder.add(c, builder.mul(c_row, ir.Constant(INT, i)))
            for j in range(vectors):
                place, value = code.at(to, j * size), builder.fadd(updated[i * vectors + j], read(starts[i], j))
                if j == vectors - 1:
                    masks.store(code, value, place, mask)
                else:
                    code.store(value, place)

    return intrinsic_of(lanes, emit)


def outer(lanes: int, rows: int, vectors: int) -> Callable[..., None]:
    """Makes ``(a, a_row, a_step, b, b_step, c, c_row, init, init_row, columns, depth, ahead, none)``.

    It computes ``c = init + a b``.

    ``c`` has ``rows`` rows of ``columns`` columns, which take ``vectors`` vectors, the last one perhaps in part. Row i
    of ``a`` begins at ``a + i * a_row``, and its numbers are ``a_step`` bytes apart. Rows of ``b`` are ``b_step`` bytes
    apart, those of ``init``, to which complete sums are added, ``init_row``: short sums are rounded less. ``depth``, at
    least 1, is their length. At
    each step the lines ``ahead`` bytes behind those of ``b`` are prefetched. Nothing beyond the columns is touched.
    """
    block = _block(lanes, rows, vectors)

    def run(a, a_row, a_step, b, b_step, c, c_row, init, init_row, columns, depth, ahead, none):
        block(a, a_row, a_step, b, b_step, c, c_row, init, init_row, columns, depth, ahead, none)

    return named(run, lanes, rows, vectors)
