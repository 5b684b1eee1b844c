"""When a plan replaces torch's choice, by what both took in the same rounds."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

import torch

from tilewise.planner.measure import Took
from tilewise.planner.measure import rounds as timed

__all__ = ["ROUNDS", "SURE", "clear", "median_ms", "rounds", "settled", "share", "wins"]

MARGIN = {"cuda": 0.95, "cpu": 0.88}
"""A plan replaces torch's choice below this share of its time, and if it wins three rounds of four: less is noise."""
SURE = 0.7
"""On a CPU a plan that takes a larger share of torch's time is timed whole a second time."""
CLEAR, CLEAR_AT_ONCE = 1.5, 4.0
"""On a CPU, no more rounds where all plans are so far from torch's choice: after three, and after one."""
ROUNDS, CLEAR_ON_GPU = 5, 1.15
"""On a GPU, whose times differ by little, the least, and enough where all plans are so far from torch's choice and one
is the fastest in each."""
BUSY = 2.0
"""A plan must not lose with a host this many times slower: many launches lose their gain first."""
EVEN = 1.03
"""Times that differ less are as good as equal."""


def rounds(
    calls: Sequence[Callable[[], object]], device: torch.device, compared: bool, launched: bool
) -> list[list[Took]]:
    """What plans took in turns, and where they are ``compared`` torch's choice, the last, until that is settled."""
    if device.type == "cuda":
        decided = settled if compared else None
        return timed(calls, device, budget_ms=25.0, least=ROUNDS, most=31, decided=decided, launched=launched)
    decided = clear if compared else None
    return timed(calls, device, budget_ms=1500.0, least=7, most=15, decided=decided, launched=launched)


def clear(times: list[list[Took]]) -> bool:
    """Whether every plan has been far ahead of torch's choice or far behind it in all rounds, torch's being last."""
    return len(times[-1]) != 2 and _far(times, CLEAR_AT_ONCE if len(times[-1]) == 1 else CLEAR)


def _far(times: list[list[Took]], factor: float) -> bool:
    """Whether every plan has been ``factor`` ahead of torch's choice or behind it in all rounds."""
    shares = [own.weighed_ms / its.weighed_ms for plan in times[:-1] for own, its in zip(plan, times[-1], strict=True)]
    return all(share < 1 / factor or share > factor for share in shares)


def settled(times: list[list[Took]]) -> bool:
    """Whether one and the same plan was the fastest in some rounds, all plans far from torch's choice each time."""
    if len(times[-1]) < ROUNDS or not _far(times, CLEAR_ON_GPU):
        return False
    turns = ([took.weighed_ms for took in turn] for turn in zip(*times[:-1], strict=True))
    return len({turn.index(min(turn)) for turn in turns}) == 1


def share(own: Took, its: Took, device: str) -> float:
    """A plan's time in torch's. It must gain as the two are weighed, and elsewhere it may not lose.

    That is where the launch costs nothing, and where the host is busy with other work.
    """
    elsewhere = max(own.device_ms / its.device_ms, own.with_host(BUSY) / its.with_host(BUSY))
    return max(own.weighed_ms / its.weighed_ms, elsewhere * MARGIN[device] / EVEN)


def median_ms(times: Sequence[Took]) -> float:
    """Of one plan's rounds, as they are weighed."""
    return statistics.median(took.weighed_ms for took in times)


def wins(shares: Sequence[float], device: str) -> bool:
    """Whether a plan with these :func:`share`, the least first, is the faster surely enough."""
    return statistics.median(shares) <= MARGIN[device] and shares[len(shares) * 3 // 4] < 1.0
