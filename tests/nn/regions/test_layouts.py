"""The choice of ways and formats, beside every choice that there is."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from tilewise.nn.regions.layouts import Part, Way, choose_ways, deferred, is_deferred

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


@st.composite
def rows(draw: st.DrawFn) -> list[Part]:
    """Parts in a row, some of which may be left to a later one."""
    count = draw(st.integers(2, 5))
    ways = [
        [Way((draw(st.sampled_from(FORMATS)),), draw(st.sampled_from(FORMATS)), draw(TIMES)) for _ in range(2)]
        for _ in range(count)
    ]
    for number in range(draw(st.integers(1, 3))):
        first = draw(st.integers(0, count - 2))
        last = draw(st.integers(first + 1, count - 1))
        format_ = draw(st.sampled_from(FORMATS))
        for part in range(first, last):
            reads, format_ = format_, deferred(10 * number + part)
            ways[part].append(Way((reads,), format_, 0.0))
        ways[last].append(Way((format_,), draw(st.sampled_from(FORMATS)), draw(TIMES)))
    names = ["x", *(f"y{number}" for number in range(count))]
    return [Part((names[number],), names[number + 1], tuple(each)) for number, each in enumerate(ways)]


@settings(max_examples=60, deadline=None)
@given(parts=rows())
def test_a_part_is_left_just_where_another_one_computes_it(parts: list[Part]) -> None:
    def fits(ways: Sequence[int]) -> bool:
        """Formats that no tensor has are read where they are given, and nowhere else."""
        chosen = [part.ways[index] for part, index in zip(parts, ways, strict=True)]
        given = [FORMATS[0], *(way.gives for way in chosen)]
        read = [*(way.reads[0] for way in chosen), FORMATS[0]]
        return all(a == b or not (is_deferred(a) or is_deferred(b)) for a, b in zip(given, read, strict=True))

    result = Part((parts[-1].output,), "result", (Way((FORMATS[0],), FORMATS[0], 0.0),))
    every = [w for w in itertools.product(*(range(len(part.ways)) for part in parts)) if fits(w)]
    found = choose_ways([*parts, result], {"x": FORMATS[0]}, conversion_ms)
    assert found.optimal
    assert fits(found.ways[:-1])
    assert found.ms == pytest.approx(min(total([*parts, result], [*w, 0]) for w in every))


def test_a_part_without_ways_is_an_error() -> None:
    with pytest.raises(ValueError, match="at least one way"):
        choose_ways([Part(("x",), "y", ())], {"x": FORMATS[0]}, conversion_ms)
