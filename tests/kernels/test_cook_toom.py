"""Matrices of fast short convolutions against sums of products, in exact arithmetic."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tilewise.kernels.cook_toom import POINTS, Matrix, Transforms, matrices, shift, transforms, turned

VALUES = st.fractions(-9, 9, max_denominator=7)


def product(matrix: Matrix, values: list[Fraction]) -> list[Fraction]:
    return [sum((a * b for a, b in zip(row, values, strict=True)), Fraction(0)) for row in matrix]


@given(st.data(), st.integers(1, 6), st.integers(1, 6))
def test_short_convolutions_are_exact(data: st.DataObject, m: int, r: int) -> None:
    """For any points: outputs of taps, and taps' gradients of outputs' gradients."""
    n = m + r - 1
    points = data.draw(st.lists(VALUES, min_size=n - 1, max_size=n - 1, unique=True))
    t = matrices(m, r, points)
    d, g, e = (data.draw(st.lists(VALUES, min_size=size, max_size=size)) for size in (n, r, m))
    inputs = product(t.input, d)
    outputs = [a * b for a, b in zip(product(t.filter, g), inputs, strict=True)]
    assert product(turned(t.output), outputs) == [sum(d[i + k] * g[k] for k in range(r)) for i in range(m)]
    taps = [a * b for a, b in zip(product(t.output, e), inputs, strict=True)]
    assert product(turned(t.filter), taps) == [sum(d[i + k] * e[i] for i in range(m)) for k in range(r)]


def test_the_known_transforms() -> None:
    """F(2, 3) and F(4, 3) as Lavin and Gray print them (section 4.1 and 4.3), but for signs of whole rows."""
    assert transforms(2, 3).input[1:3] == ((0, 1, 1, 0), (0, -1, 1, 0))
    four = matrices(4, 3, [Fraction(p) for p in (0, 1, -1, 2, -2)])
    assert four.input[0] == (4, 0, -5, 0, 1, 0)
    assert four.filter[3] == (Fraction(1, 24), Fraction(1, 12), Fraction(1, 6))


@pytest.mark.parametrize("count", POINTS)
def test_as_many_different_points_as_it_takes(count: int) -> None:
    assert len(POINTS[count]) == len(set(POINTS[count])) == count


def test_one_output_of_one_tap_stays_as_it_is() -> None:
    assert transforms(1, 1) == Transforms(((1,),), ((1,),), ((1,),))


@pytest.mark.parametrize(("m", "r"), [(0, 3), (3, 0), (7, 3)])
def test_too_few_points(m: int, r: int) -> None:
    with pytest.raises(ValueError, match="would do"):
        transforms(m, r)


def test_points_must_differ() -> None:
    with pytest.raises(ValueError, match="2 different ones"):
        matrices(2, 2, [Fraction(1), Fraction(1)])


def test_transforms_enlarge_by_powers_of_two() -> None:
    half = [[1 / 2] * 3]
    assert [shift(m) for m in ([[1, 0]], [[1, 1]], [[2, 1], [1, 1]], half)] == [0, 1, 2, 1]  # type: ignore[arg-type]
