"""The choice of ways and formats, beside every choice that there is."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from tilewise.nn.regions.layouts import Part, Way, choose_ways

FORMATS = ((4, 1), (1, 4))
TIMES = st.integers(1, 40).map(float)
ERRORS = st.sampled_from([0.0, 1e-7, 3e-7, 1e-6, 1e-5])


@st.composite
def networks(draw: st.DrawFn) -> list[Part]:
    """Parts that each read one or two tensors given before."""
    parts: list[Part] = []
    for number in range(draw(st.integers(1, 5))):
        before = ["x", *(part.output for part in parts)]
        inputs = tuple(draw(st.lists(st.sampled_from(before), min_size=1, max_size=2, unique=True)))
        ways = tuple(
            Way(
                tuple(draw(st.sampled_from(FORMATS)) for _ in inputs), draw(st.sampled_from(FORMATS)), draw(TIMES),
                error=draw(ERRORS),
            )
            for _ in range(draw(st.integers(1, 3)))
        )  # fmt: skip
        parts.append(Part(inputs, f"y{number}", ways))
    return parts


def conversion_ms(tensor: object) -> float:
    return 3.0 + len(str(tensor)) % 5


def total(parts: Sequence[Part], ways: Sequence[int]) -> float:
    """Milliseconds of a choice, each conversion counted once."""
    chosen = [part.ways[index] for part, index in zip(parts, ways, strict=True)]
    formats = {"x": FORMATS[0]} | {part.output: way.gives for part, way in zip(parts, chosen, strict=True)}
    converted = {
        (tensor, wanted)
        for part, way in zip(parts, chosen, strict=True)
        for tensor, wanted in zip(part.inputs, way.reads, strict=True)
        if formats[tensor] != wanted
    }
    return sum(way.ms for way in chosen) + sum(conversion_ms(tensor) for tensor, _ in converted)


def squares(parts: Sequence[Part], ways: Sequence[int]) -> float:
    return sum(part.ways[index].error ** 2 for part, index in zip(parts, ways, strict=True))


@settings(max_examples=60, deadline=None)
@given(parts=networks(), share=st.sampled_from([0.0, 0.01, 0.3, 0.9, math.inf]))
def test_it_is_the_fastest_within_the_limit_of_errors(parts: list[Part], share: float) -> None:
    """Where nothing is within the limit, it is the fastest of the most exact."""
    every = list(itertools.product(*(range(len(part.ways)) for part in parts)))
    least, largest = min(squares(parts, w) for w in every), max(squares(parts, w) for w in every)
    most = least + share * (largest - least) if math.isfinite(share) else math.inf
    within = [w for w in every if squares(parts, w) <= max(most, least) * (1 + 1e-9)]
    found = choose_ways(parts, {"x": FORMATS[0]}, conversion_ms, most)
    assert found.optimal
    assert squares(parts, found.ways) <= max(most, least) * (1 + 1e-5)
    assert found.ms == pytest.approx(total(parts, found.ways))
    assert found.ms <= min(total(parts, w) for w in within) + 1e-6


def test_a_part_without_ways_is_an_error() -> None:
    with pytest.raises(ValueError, match="at least one way"):
        choose_ways([Part(("x",), "y", ())], {"x": FORMATS[0]}, conversion_ms)
