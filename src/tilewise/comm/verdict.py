"""Which rank failed, and why, judged from what ranks said before they stopped and from closed connections.

A rank is named only where something speaks against it: it said that it failed; its process is gone and had said
nothing; or others waited for it in vain and it still says nothing. A rank that stopped because of another has said so.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["Cause", "Verdict", "judge", "killed"]

Cause = tuple[int, str]
"""A rank that failed, and what became of it in words."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """The ``causes`` of a failure. ``sure`` says that nothing which may still be heard would change them."""

    causes: tuple[Cause, ...]
    sure: bool


def judge(
    said: Mapping[int, Sequence[Mapping[str, Any]]], gone: Collection[int], awaited: Collection[int], timeout: float
) -> Verdict:
    """The verdict of a rank that waited in vain for the ranks ``awaited``.

    ``said`` has the entries of every other rank, ``gone`` the ranks whose processes are gone. The ``kind`` of an entry
    is ``"failed"``, with ``text`` and ``lost`` (ranks that were gone by then); ``"waited"``, with ``for``; ``"heard"``,
    with ``causes``; or ``"ended"``, of a program that came to its end. ``timeout`` is in seconds, for the text.
    """
    kinds = {rank: {entry.get("kind") for entry in entries} for rank, entries in said.items()}
    failed = [(r, e) for r, entries in said.items() for e in entries if e.get("kind") == "failed"]
    first: list[Cause] = [(rank, str(entry["text"])) for rank, entry in failed if not entry.get("lost")]
    for entries in said.values():
        first += [(int(r), str(text)) for e in entries if e.get("kind") == "heard" for r, text in e["causes"]]
    if first:
        return Verdict(_each_once(first), sure=True)
    silent = {rank for rank in gone if not kinds.get(rank)}
    silent |= {int(rank) for _, entry in failed for rank in entry["lost"]}
    waits = {rank: _awaited(entries) for rank, entries in said.items()}
    if dead := _reached(awaited, waits) & silent or silent:
        return Verdict(tuple((rank, killed(rank)) for rank in sorted(dead)), sure=True)
    ended = {rank for rank, rank_kinds in kinds.items() if rank_kinds == {"ended"}}
    if over := _reached(awaited, waits) & ended:
        return Verdict(tuple((r, f"rank {r} ended: its program came to its end") for r in sorted(over)), sure=False)
    quiet = {rank for rank in said if not kinds[rank]}
    late = _narrowest([set(awaited), *waits.values()], quiet)
    return Verdict(tuple((r, f"rank {r} gave no answer for {timeout:g} s") for r in sorted(late)), sure=False)


def killed(rank: int) -> str:
    """The text on a rank whose process is gone without a word."""
    return f"rank {rank} ended without a word, as a process does that is killed"


def _each_once(causes: Sequence[Cause]) -> tuple[Cause, ...]:
    """The first cause for each rank."""
    texts: dict[int, str] = {}
    for rank, text in causes:
        texts.setdefault(rank, text)
    return tuple(texts.items())


def _awaited(entries: Sequence[Mapping[str, Any]]) -> set[int]:
    """The ranks that a rank's entries say it waited for."""
    return {int(rank) for entry in entries if entry.get("kind") == "waited" for rank in entry["for"]}


def _reached(awaited: Collection[int], waits: Mapping[int, set[int]]) -> set[int]:
    """The ranks ``awaited``, those that these waited for, and so on."""
    reached: set[int] = set()
    todo = list(awaited)
    while todo:
        rank = todo.pop()
        if rank not in reached:
            reached.add(rank)
            todo += waits.get(rank, ())
    return reached


def _narrowest(waits: Sequence[set[int]], quiet: set[int]) -> set[int]:
    """The quiet ranks for which somebody waits, by the ranks that wait for the fewest: these know most."""
    quiet_waits = [wait & quiet for wait in waits if wait & quiet]
    least = min(map(len, quiet_waits), default=0)
    return set().union(*(wait_set for wait_set in quiet_waits if len(wait_set) == least))
