"""Transforms of tiles by small matrices on both sides, as straight-line code for ``lanes`` tiles at once."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

from tilewise.kernels.cook_toom import Matrix
from tilewise.kernels.cpu.vectors import Code, Values, intrinsic_of, named

__all__ = ["multiplied", "sandwich", "sandwiches"]


def sandwiches(lanes: int, name: str, rows: Matrix, columns: Matrix) -> Callable[..., None]:
    """Makes ``(source, row, column, next, target, to_row, to_column, to_next, count)``, which transforms several tiles.

    Tiles are ``next`` bytes apart, and results ``to_next`` bytes. The other arguments are those of :func:`sandwich`.
    ``name`` tells the matrices from others.
    """
    one = sandwich(lanes, rows, columns)

    def run(source, row, column, next, target, to_row, to_column, to_next, count):
        for i in range(count):
            one(source + i * next, row, column, target + i * to_next, to_row, to_column)

    return named(run, lanes, name)


@functools.cache
def sandwich(lanes: int, rows: Matrix, columns: Matrix) -> Callable[..., None]:
    """Makes ``(source, row, column, target, to_row, to_column)``, which computes ``rows tile columns^T``.

    Rows and columns of the tile are ``row`` and ``column`` bytes apart, those of the result ``to_row`` and
    ``to_column``.
    """

    def emit(code: Code, arguments: Values) -> None:
        source, row, column, target, to_row, to_column = arguments
        half = []
        for j in range(len(columns[0])):
            start = code.at(source, j, column)
            half.append(multiplied(code, rows, [code.load(code.at(start, i, row)) for i in range(len(rows[0]))]))
        for i in range(len(rows)):
            start = code.at(target, i, to_row)
            for j, value in enumerate(multiplied(code, columns, [values[i] for values in half])):
                code.store(value, code.at(start, j, to_column))

    return intrinsic_of(lanes, emit)


def multiplied(code: Code, matrix: Matrix, values: Sequence[Any]) -> list[Any]:
    """The product of ``matrix`` and ``values``.

    The columns, or else the rows, of a point of interpolation and of its negative share their multiplications.
    """
    columns = list(zip(*matrix, strict=True))
    pairs = _pairs(columns)
    if pairs:
        joined, kept = [], []
        for k in range(len(columns)):
            if k in pairs:
                a, b = values[k], values[pairs[k]]
                joined += [code.plus(a, 1.0, b), code.plus(a, -1.0, b)]
                kept += [_halves(columns[k], columns[pairs[k]], 1), _halves(columns[k], columns[pairs[k]], -1)]
            elif k not in pairs.values():
                joined.append(values[k])
                kept.append(columns[k])
        return [_combined(code, row, joined) for row in zip(*kept, strict=True)]
    product: list[Any] = [None] * len(matrix)
    pairs = _pairs(matrix)
    for i, row in enumerate(matrix):
        if i in pairs:
            other = matrix[pairs[i]]
            even, odd = (_combined(code, _halves(row, other, sign), values) for sign in (1, -1))
            product[i], product[pairs[i]] = code.plus(even, 1.0, odd), code.plus(even, -1.0, odd)
        elif i not in pairs.values():
            product[i] = _combined(code, row, values)
    return product


def _pairs(rows: Sequence[Sequence[Fraction]]) -> dict[int, int]:
    """The indices of neighbouring rows that differ only in the signs of some, but not all, elements."""
    pairs: dict[int, int] = {}
    for i in range(len(rows) - 1):
        a, b = rows[i], rows[i + 1]
        signs = {x == y for x, y in zip(a, b, strict=True) if x}
        if i not in pairs.values() and all(abs(x) == abs(y) for x, y in zip(a, b, strict=True)) and len(signs) == 2:
            pairs[i] = i + 1
    return pairs


def _halves(a: Sequence[Fraction], b: Sequence[Fraction], sign: int) -> tuple[Fraction, ...]:
    """The elements of ``a`` that are equal in ``b``, or with ``sign`` -1 negated in ``b``; zeros for the others."""
    return tuple(x if x == sign * y else Fraction(0) for x, y in zip(a, b, strict=True))


def _combined(code: Code, factors: Sequence[Fraction], values: Sequence[Any]) -> Any:
    """The sum of products of ``factors`` and ``values``, which begins with one that needs no multiplication."""
    terms = sorted(
        ((f, v) for f, v in zip(factors, values, strict=True) if f), key=lambda term: (term[0] != 1, term[0] != -1)
    )
    total: Any = None
    for factor, value in terms:
        total = code.plus(total, float(factor), value)
    return total
