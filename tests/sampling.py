"""How much of what is drawn or listed runs: a sample, or everything where ``TILEWISE_EVERY_TEST`` is set.

A test marked ``slow`` runs only with everything. Of a generated test :data:`MOST_DRAWN` examples are drawn at most.

A test marked ``sampled(n)`` runs n of its cases that together meet as many values of its parameters as n can. With
``each=("solver", "pass_")`` it runs, whatever n is, the first case of every combination of these, and within each value
of the first of them every value of the other parameters. Where a run is narrowed to words or files (``-k``, a file, a
test's name) all of their cases run.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from hypothesis import settings

__all__ = ["EVERY", "MOST_DRAWN", "fewer_examples", "is_narrowed", "sample", "some"]

EVERY = bool(os.environ.get("TILEWISE_EVERY_TEST"))


MOST_DRAWN = 15
"""Examples of a generated test in a run that is neither narrowed nor of everything."""


def fewer_examples(test: object) -> None:
    """Let a test that hypothesis generates draw no more than :data:`MOST_DRAWN` examples; any other is left alone."""
    drawn = getattr(test, "_hypothesis_internal_use_settings", None)
    if drawn is not None and drawn.max_examples > MOST_DRAWN:
        test._hypothesis_internal_use_settings = settings(drawn, max_examples=MOST_DRAWN)  # type: ignore[attr-defined]


def some(count: int) -> int:
    """``count`` cases, or a tenth of them."""
    return count if EVERY else -(-count // 10)


def is_narrowed(config: pytest.Config) -> bool:
    """Whether the run is of some tests only, by their names or files. A folder is not narrow."""
    paths = (Path(argument.partition("::")[0]) for argument in config.args)
    return bool(config.getoption("keyword", "")) or any(path.suffix == ".py" for path in paths)


def sample(cases: Sequence[Mapping[str, object]], count: int, each: Sequence[str] = ()) -> set[int]:
    """The places of the cases that run, of parameters by name.

    With ``each`` the first case of every combination of these parameters. Then cases that meet what is not met yet;
    without ``each`` only up to ``count``, and those that lie evenly among all make up for what is missing to it.
    """
    first: dict[tuple[str, ...], int] = {}
    if each:
        for i, case in enumerate(cases):
            first.setdefault(tuple(str(case[name]) for name in each), i)
    kept = set(first.values())
    values = [_values(case, each) for case in cases]
    missing = set().union(*values) - set().union(*(values[i] for i in kept))
    while missing and (each or len(kept) < count):
        # Of those that meet as many, one that differs from the last: values then meet in turns.
        best = max(range(len(cases)), key=lambda i: (len(values[i] & missing), -_shared(values[i], kept, values)))
        kept.add(best)
        missing -= values[best]
    last, steps = len(cases) - 1, max(1, count - 1)
    for i in range(count):
        if len(kept) >= count:
            break
        kept.add(round(i * last / steps))
    return kept


def _values(case: Mapping[str, object], each: Sequence[str]) -> frozenset[tuple[str, ...]]:
    """What a case meets: a value of a parameter; beside ``each``, of those within the first of these."""
    within = (str(case[each[0]]),) if each else ()
    return frozenset((name, str(value), *within) for name, value in case.items())


def _shared(value: frozenset[tuple[str, ...]], kept: set[int], values: Sequence[frozenset[tuple[str, ...]]]) -> int:
    """How much of a case those that run meet already, each time counted."""
    return sum(len(value & values[i]) for i in kept)
