"""The transform matrices of fast short convolutions, as exact fractions. Does not need Numba."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

__all__ = ["POINTS", "Matrix", "Transforms", "matrices", "shift", "transforms", "turned"]

Matrix = tuple[tuple[Fraction, ...], ...]
"""Rows of exact fractions."""
POINTS: dict[int, tuple[int | Fraction, ...]] = {
    0: (),
    1: (0,),
    2: (0, 1),
    3: (0, 1, -1),
    4: (0, 1, -1, 2),
    5: (0, Fraction(3, 2), Fraction(-3, 2), Fraction(2, 3), Fraction(-2, 3)),
    6: (0, 1, -1, 2, -2, Fraction(1, 2)),
    7: (0, 1, -1, 2, -2, Fraction(1, 2), Fraction(-1, 2)),
    9: (0, 2, -2, Fraction(1, 3), Fraction(-1, 3), Fraction(3, 4), Fraction(-3, 4), Fraction(4, 3), Fraction(-4, 3)),
}
"""Points of evaluation beside infinity, by their number, each next to its negative.

They have the least error in fp32 among 0, 1, 2, 3, 4, ratios of these and their negatives, tried on one axis.
"""


@dataclass(frozen=True, slots=True)
class Transforms:
    """``m`` outputs of ``r`` taps, from ``n = m + r - 1`` inputs with n products (Lavin and Gray 2016, section 4).

    Outputs are ``output^T ((filter g) * (input d))``. The filter's gradient, whose taps are the n inputs' correlation
    with m gradients of outputs, is ``filter^T ((output e) * (input d))``.

    Shapes: ``output`` n x m, ``filter`` n x r, ``input`` n x n.
    """

    output: Matrix
    filter: Matrix
    input: Matrix


@functools.cache
def transforms(m: int, r: int) -> Transforms:
    """The transforms F(m, r) with the points of :data:`POINTS`. Raises ``ValueError`` where there are none."""
    count = m + r - 2
    if m < 1 or r < 1 or count not in POINTS:
        raise ValueError(f"m={m}, r={r}: from 1 on, with a sum of at most 9 or of 11, would do")
    return matrices(m, r, [Fraction(p) for p in POINTS[count]])


def matrices(m: int, r: int, points: Sequence[Fraction]) -> Transforms:
    """The transforms F(m, r) by the method of Toom and Cook.

    Polynomials are evaluated at ``points`` and infinity, multiplied there, and interpolated. Transposed interpolation
    (Winograd 1980, IV) transforms the inputs. Its rows are coefficients of monic polynomials; the factors left over go
    to the filter, which is transformed least often. Raises ``ValueError`` unless there are m + r - 2 different points.
    """
    if len(points) != m + r - 2 or len(set(points)) != len(points):
        raise ValueError(f"points={list(points)}: {m + r - 2} different ones would do")
    n = len(points) + 1
    rows = [_polynomial([q for q in points if q != p], n) for p in points] + [_polynomial(points, n)]
    leads = [math.prod((p - q for q in points if q != p), start=Fraction(1)) for p in points] + [Fraction(1)]
    scaled = [tuple(x / lead for x in row) for row, lead in zip(_powers(points, r), leads, strict=True)]
    return Transforms(_powers(points, m), tuple(scaled), tuple(rows))


def _powers(points: Sequence[Fraction], count: int) -> Matrix:
    """The matrix that evaluates polynomials with ``count`` coefficients at ``points`` and infinity."""
    infinity = tuple(Fraction(int(i == count - 1)) for i in range(count))
    return (*(tuple(p**i for i in range(count)) for p in points), infinity)


def _polynomial(roots: Sequence[Fraction], n: int) -> tuple[Fraction, ...]:
    """The ``n`` coefficients of the monic polynomial with these roots."""
    coefficients = [Fraction(1)]
    for root in roots:
        shifted = [Fraction(0), *coefficients]
        coefficients = [a - root * b for a, b in zip(shifted, [*coefficients, Fraction(0)], strict=True)]
    return tuple(coefficients + [Fraction(0)] * (n - len(coefficients)))


def shift(matrix: Matrix) -> int:
    """The power of two by which a transform may enlarge a value at most."""
    return max(0, math.ceil(math.log2(max(sum(abs(entry) for entry in row) for row in matrix))))


def turned(matrix: Matrix) -> Matrix:
    """The transposed matrix."""
    return tuple(zip(*matrix, strict=True))
