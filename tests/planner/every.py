"""Every way to divide a batch, found by trying all: what planner and fronts are compared with."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence

Point = tuple[float, int]
"""Time in ms and workspace in bytes."""


def partitions(whole: int, sizes: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Every way to sum up to ``whole``, larger sizes first."""
    if not whole:
        yield ()
    for i, size in enumerate(sizes):
        if size <= whole:
            yield from ((size, *rest) for rest in partitions(whole - size, sizes[i:]))


def every_division(whole: int, fronts: Mapping[int, Sequence[Point]], limit: int | None) -> list[Point]:
    found = []
    for sizes in partitions(whole, sorted(fronts, reverse=True)):
        for choice in itertools.product(*(fronts[size] for size in sizes)):
            workspace = max(ws for _, ws in choice)
            if limit is None or workspace <= limit:
                found.append((sum(ms for ms, _ in choice), workspace))
    return found
