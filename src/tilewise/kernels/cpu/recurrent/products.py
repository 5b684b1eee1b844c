"""Products of rows of a batch and packed weights, and the packing: weights lie as they are read, a line a step.

A panel has a few vectors of columns for each step of the sums (Goto and van de Geijn 2008, "Anatomy of high-performance
matrix multiplication", section 4.2). It is packed once for all steps of a sequence.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

from llvmlite import ir

from tilewise.kernels.cpu import masks
from tilewise.kernels.cpu.vectors import INT, NUMBER, Code, Values, intrinsic_of, named, transposed

__all__ = ["WORDS", "copied", "products", "turned"]

WORDS = 6
"""The number of integers that :func:`products` takes."""


@functools.cache
def _block(lanes: int, rows: int, vectors: int, add: bool) -> Callable[..., None]:
    """Makes the instructions of :func:`products`."""
    size = NUMBER * lanes

    def emit(code: Code, arguments: Values) -> None:
        a, a_row, b, b_row, depth, c = arguments
        builder = code.builder
        a_rows = [builder.mul(a_row, ir.Constant(INT, i)) for i in range(rows)]
        before = [code.load(code.at(c, i * size)) if add else code.splat(0.0) for i in range(rows * vectors)]
        begin = builder.block
        body, after = (builder.append_basic_block(name) for name in ("body", "after"))
        builder.branch(body)
        builder.position_at_end(body)
        left, at, bt = (builder.phi(INT) for _ in range(3))
        sums = [builder.phi(code.vector) for _ in before]
        line = [code.load(code.at(bt, j * size)) for j in range(vectors)]
        updated = []
        for i in range(rows):
            factor = code.broadcast(builder.add(at, a_rows[i]))
            updated += [builder.call(code.fma, [factor, line[j], sums[i * vectors + j]]) for j in range(vectors)]
        less = builder.sub(left, ir.Constant(INT, 1))
        for phi, start, following in (
            (left, depth, less), (at, a, code.at(at, NUMBER)), (bt, b, builder.add(bt, b_row)),
            *zip(sums, before, updated, strict=True),
        ):  # fmt: skip
            phi.add_incoming(start, begin)
            phi.add_incoming(following, body)
        builder.cbranch(builder.icmp_signed(">", less, ir.Constant(INT, 0)), body, after)
        builder.position_at_end(after)
        for i, value in enumerate(updated):
            code.store(value, code.at(c, i * size))

    return intrinsic_of(lanes, emit)


def products(lanes: int, rows: int, vectors: int, add: bool) -> Callable[..., None]:
    """Makes ``(a, a_row, b, b_row, depth, c)``, which sets ``c`` to the product of ``a`` and ``b``, or adds it there.

    ``a`` has ``rows`` rows of ``depth`` numbers, at least 1, ``a_row`` bytes apart. ``b`` has ``depth`` lines of
    ``vectors`` vectors, ``b_row`` bytes apart, and ``c`` has ``rows`` lines of as many vectors, one after the other.
    """
    block = _block(lanes, rows, vectors, add)

    def run(a, a_row, b, b_row, depth, c):
        block(a, a_row, b, b_row, depth, c)

    return named(run, lanes, rows, vectors, add)


@functools.cache
def turned(lanes: int) -> Callable[..., None]:
    """Makes ``(source, row, valid, columns, target, line)``, which transposes a square of numbers.

    The square has ``lanes`` rows, ``row`` bytes apart. Rows from ``valid`` on and columns from ``columns`` on become
    zero without being read. Its columns become vectors, ``line`` bytes apart.
    """

    def emit(code: Code, arguments: Values) -> None:
        source, row, valid, columns, target, line = arguments
        b, mask = code.builder, masks.below(code, columns)
        read = [b.select(b.icmp_signed("<", ir.Constant(INT, i), valid), mask, masks.none(code)) for i in range(lanes)]
        rows = [masks.load(code, code.at(source, i, row), each) for i, each in enumerate(read)]
        for i, vector in enumerate(transposed(code, rows)):
            code.store(vector, code.at(target, i, line))

    return intrinsic_of(lanes, emit)


@functools.cache
def copied(lanes: int) -> Callable[..., None]:
    """Makes ``(source, valid, target)``, which copies one vector; lanes from ``valid`` on become zero, unread."""

    def emit(code: Code, arguments: Values) -> None:
        source, valid, target = arguments
        code.store(masks.load(code, source, masks.below(code, valid)), target)

    return intrinsic_of(lanes, emit)
