"""One piece of memory for all intermediate tensors of a program: when each is in use, and where it lies.

Tensors that are in use at different times may share memory. The largest are placed first, each into the smallest gap
that it fits between those in use at the same time (greedy by size with best fit: Pisarchyk and Lee, "Efficient Memory
Management for Deep Neural Net Inference", MLSys 2020, section 5).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

__all__ = ["ALIGNMENT", "Life", "Use", "lives_of", "most_at_once", "packed"]

ALIGNMENT = 64
"""Bytes: a cache line, and the widest vector. Each tensor starts at a multiple of this."""


class Life(NamedTuple):
    """A tensor of ``size`` bytes that is in use from step ``first`` to step ``last``, both included."""

    size: int
    first: int
    last: int

    def meets(self, other: Life) -> bool:
        """Whether both are in use at the same time."""
        return self.first <= other.last and other.first <= self.last


class Use(NamedTuple):
    """A step's use of tensors: which it touches, which it gives, and whether that may be a view of the others."""

    touches: tuple[int, ...]
    output: int
    may_alias: bool = False


def lives_of(
    sizes: Sequence[int], roots: Sequence[int], uses: Sequence[Use], outputs: Sequence[int]
) -> dict[int, Life]:
    """The life of each tensor in use, by index. All views of a tensor share its life and are not listed themselves.

    ``sizes`` are in bytes, ``roots`` has for each tensor the one whose memory it shows. A tensor that a step returns
    may be a view of what the step touches, which then lives as long as it does. Outputs live until the end.
    """
    first: dict[int, int] = {}
    last: dict[int, int] = {roots[index]: len(uses) for index in outputs}
    for number in reversed(range(len(uses))):
        use = uses[number]
        output = roots[use.output] if use.output >= 0 else -1
        until = max(number, last.get(output, number)) if use.may_alias else number
        for index in {*(roots[index] for index in use.touches), *({output} - {-1})}:
            first[index] = number
            last[index] = max(until, last.get(index, until))
    return {index: Life(sizes[index], first.get(index, 0), end) for index, end in last.items()}


def packed(
    lives: Mapping[int, Life], alignment: int = ALIGNMENT, over: Mapping[int, int] | None = None
) -> tuple[dict[int, int], int]:
    """The offset in bytes of each tensor of ``lives``, and the bytes of all memory.

    ``over`` has for some tensors the one that each may be written over: where that one's last use is the first of the
    tensor, and both are as large, they share their memory.

    Example: two tensors that are in use one after the other share their memory.

    >>> packed({0: Life(100, 0, 1), 1: Life(50, 2, 3), 2: Life(10, 1, 2)})
    ({0: 0, 1: 0, 2: 128}, 192)
    """
    joined, first_of = _joined(lives, over or {})
    placed: list[tuple[int, int, Life]] = []
    offsets: dict[int, int] = {}
    total = 0
    for index, life in sorted(joined.items(), key=lambda item: (-item[1].size, item[1].first, item[0])):
        size = -(-life.size // alignment) * alignment
        start = _best_gap(size, sorted((a, b) for a, b, other in placed if life.meets(other)))
        placed.append((start, start + size, life))
        offsets[index] = start
        total = max(total, start + size)
    return {index: offsets[first_of.get(index, index)] for index in lives}, total


def _joined(lives: Mapping[int, Life], over: Mapping[int, int]) -> tuple[dict[int, Life], dict[int, int]]:
    """The lives of memories that tensors share as ``over`` allows, by their first tensor, and that of each other one.

    A tensor is written over by one other at most.
    """
    joined, first_of = dict(lives), dict[int, int]()
    for index in sorted(over.keys() & lives.keys(), key=lambda index: lives[index].first):
        before = over[index]
        if before not in lives:
            continue
        own, first = lives[index], first_of.get(before, before)
        if lives[before].last == own.first == joined[first].last and lives[before].size == own.size:
            joined[first] = Life(own.size, joined[first].first, own.last)
            first_of[index] = first
            del joined[index]
    return joined, first_of


def _best_gap(size: int, taken: Sequence[tuple[int, int]]) -> int:
    """Where to put ``size`` bytes: into the smallest gap between the ranges ``taken`` that holds them, else behind."""
    best, end = -1, 0
    smallest = -1
    for start, stop in taken:
        gap = start - end
        if gap >= size and (best < 0 or gap < smallest):
            best, smallest = end, gap
        end = max(end, stop)
    return end if best < 0 else best


def most_at_once(lives: Mapping[int, Life], alignment: int = ALIGNMENT) -> int:
    """Bytes of all tensors in use at one time, at most: no arena can be smaller."""
    sizes = [(life, -(-life.size // alignment) * alignment) for life in lives.values()]
    starts = {life.first for life, _ in sizes}
    return max((sum(size for life, size in sizes if life.first <= at <= life.last) for at in starts), default=0)
