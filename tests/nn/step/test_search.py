"""The search for the passes that a step runs by plan, which only asks for times."""

from __future__ import annotations

import pytest

from tilewise.nn.step.pairs import LEAST_PAIRS, Pairs
from tilewise.nn.step.search import MORE_PAIRS, MORE_S, Asked, concluded, search

GAINS = {"first": 1.0, "second": 2.0}
NOTHING = frozenset[str]()
SURE, UNEVEN = [1.04], [*[1.04] * 13, *[0.95] * 7]


def times(ratios: list[float], pairs: int, planned_ms: float = 10.0) -> Pairs:
    """Pairs of steps in which the planned one is faster by these factors, again and again."""
    factors = [ratios[index % len(ratios)] for index in range(pairs)]
    return Pairs(tuple(planned_ms * factor for factor in factors), (planned_ms,) * pairs)


@pytest.mark.parametrize(("further", "kept"), [(SURE, True), ([0.97, 1.01], False)])
def test_more_pairs_decide_where_the_first_leave_open_whether_a_step_gains(further: list[float], kept: bool) -> None:
    """They alone: that the first ones seemed to gain does not count."""
    searching = search(GAINS, lambda _: 0, 6)
    assert next(searching) == Asked(NOTHING, LEAST_PAIRS)
    assert searching.send(times(UNEVEN, LEAST_PAIRS)) == Asked(NOTHING, MORE_PAIRS)
    with pytest.raises(StopIteration) as found:
        searching.send(times(further, MORE_PAIRS))
    report, withheld = concluded(GAINS, found.value.value)
    assert (report.kept, report.pairs) == (kept, MORE_PAIRS)
    assert withheld == (NOTHING if kept else {"first", "second"})


@pytest.mark.parametrize(
    ("ratios", "planned_ms"),
    [
        (SURE, 10.0),
        ([1.001, 0.999], 10.0),
        ([0.97, 1.01], 10.0),
        (UNEVEN, 1e3 * MORE_S / MORE_PAIRS / 2),
    ],
    ids=["surely faster", "alike", "slower", "too long"],
)
def test_otherwise_the_first_pairs_are_enough(ratios: list[float], planned_ms: float) -> None:
    searching = search(GAINS, lambda _: 0, 6)
    next(searching)
    with pytest.raises(StopIteration) as found:
        searching.send(times(ratios, LEAST_PAIRS, planned_ms))
    report, _ = concluded(GAINS, found.value.value)
    assert report.pairs == LEAST_PAIRS
    assert report.kept == (ratios == SURE)
