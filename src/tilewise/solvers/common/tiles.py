"""What many solvers share: reading a config, errors of one that is none, and how tiles fill multiprocessors."""

from __future__ import annotations

import bisect
import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from tilewise.plan import Config
from tilewise.problems.base import Problem
from tilewise.solvers.base import SolverUnavailable

__all__ = ["PROCESSORS", "busy", "config_reasons", "first_that", "integer", "splits_that_fill"]

T = TypeVar("T")

PROCESSORS = 132
"""Multiprocessors of the GPU that tiles are spread over in estimates (an H100)."""


def integer(c: Config, name: str, default: int | None = None) -> int:
    """The positive integer called ``name`` in a config, or ``default``. Raises ``ValueError`` for any other value."""
    value = c.get(name, default)
    if type(value) is not int or value < 1:
        raise ValueError(f"{name}={value!r}: a positive integer would do")
    return value


@contextlib.contextmanager
def config_reasons(p: Problem, c: Config) -> Iterator[None]:
    """Turn what reading ``c`` raises where it is no config of ``p`` into ``SolverUnavailable``, with the reason."""
    try:
        yield
    except (KeyError, ValueError) as error:
        raise SolverUnavailable(f"{c} is no config of {p.key}: {error}") from error


def busy(programs: int) -> float:
    """Share of the multiprocessors that are busy on average while ``programs`` equally long programs run."""
    return programs / (-(-programs // PROCESSORS) * PROCESSORS)


def first_that(fits: Callable[[T], bool], choices: Sequence[T]) -> int:
    """Index of the first of ``choices`` for which ``fits`` is true, or their number where it never is.

    The choices ask for less and less, so that after the first one that fits all do. Mostly the very first fits: it is
    asked before the others are searched by bisection.
    """
    return 0 if fits(choices[0]) else bisect.bisect_left(choices, True, lo=1, key=fits)


def splits_that_fill(most: int, places: int, busy_with: Callable[[int], float]) -> int:
    """The best number of partial sums, from 1 to ``most``, for a sum over ``places`` places.

    ``busy_with(n)`` is the share of the multiprocessors that ``n`` partial sums keep busy.
    """
    # Partial sums go through memory: at usual rates that takes some 200 / places of the time of a share's products.
    return max(range(1, most + 1), key=lambda n: (busy_with(n) / (1 + 200 * n / places), -n))
