"""Decides when a plan replaces torch's choice, by the times of both in the same rounds."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

import torch

from tilewise.planner.measuring.times import Alike, Took
from tilewise.planner.measuring.times import rounds as timed

__all__ = [
    "ROUNDS",
    "SURE",
    "decided_on_cpu",
    "decided_on_gpu",
    "loses_by_launches",
    "median_ms",
    "rounds",
    "time_ratio",
    "wins",
]

MARGIN = {"cuda": 0.95, "cpu": 0.88}
"""A plan replaces torch's choice below this share of its time, and if it wins three rounds of four: less is noise."""
SURE = 0.7
"""On a CPU a plan that takes a larger share of torch's time is timed whole a second time."""
CLEAR, CLEAR_AT_ONCE, ENOUGH, CLEAR_BY_THEN = 1.5, 4.0, 5, 1.2
"""On a CPU rounds end once all plans are these factors from torch's choice: after three rounds, after one, and after
the :data:`ENOUGH`-th."""
ROUNDS, CLEAR_ON_GPU = 5, 1.15
"""On a GPU, the least number of rounds, and the factor from torch's choice at which they are enough.

The same plan must then have been the fastest in each round."""
SLOWER_HOST = 2.0
"""A plan must not lose either if the host is this many times slower: a plan of many launches suffers most then."""
EVEN = 1.03
"""Times whose ratio is below this count as equal."""


def rounds(
    calls: Sequence[Callable[[], object]],
    device: torch.device,
    compared: bool,
    launched: bool,
    written: torch.Tensor | None = None,
    alike: Sequence[Alike] = (),
) -> list[list[Took]]:
    """Time ``calls`` in turns. Where plans are ``compared``, the last call is torch's choice and rounds end early.

    Without ``launched`` the host's times count as zero, as in replays of CUDA graphs. On a GPU the second cache holds
    what it can of ``written``, an operand, and short calls are timed several at once, which ``alike`` gives for each.
    Returns a list for each call.
    """
    if device.type == "cuda":
        decided = decided_on_gpu if compared else None
        return timed(
            calls, device, budget_ms=25.0, least=ROUNDS, most=31, decided=decided, launched=launched, written=written,
            alike=alike,
        )  # fmt: skip
    decided = decided_on_cpu if compared else None
    return timed(calls, device, budget_ms=600.0, least=5, most=11, decided=decided, launched=launched)


def decided_on_cpu(times: list[list[Took]]) -> bool:
    """Whether every plan has been far ahead of torch's choice or far behind it in all rounds, torch's being last."""
    done = len(times[-1])
    factor = CLEAR_AT_ONCE if done == 1 else CLEAR if done < ENOUGH else CLEAR_BY_THEN
    return done != 2 and _far(times, factor)


def _far(times: list[list[Took]], factor: float) -> bool:
    """Whether every plan has been ``factor`` ahead of torch's choice or behind it in all rounds."""
    ratios = [
        of_plan.device_ms / of_torch.device_ms
        for plan in times[:-1]
        for of_plan, of_torch in zip(plan, times[-1], strict=True)
    ]
    return all(ratio < 1 / factor or ratio > factor for ratio in ratios)


def decided_on_gpu(times: list[list[Took]]) -> bool:
    """Whether one and the same plan was the fastest in some rounds, all plans far from torch's choice each time."""
    if len(times[-1]) < ROUNDS or not _far(times, CLEAR_ON_GPU):
        return False
    turns = ([took.device_ms for took in turn] for turn in zip(*times[:-1], strict=True))
    return len({turn.index(min(turn)) for turn in turns}) == 1


def time_ratio(of_plan: Took, of_torch: Took, device: str) -> float:
    """A plan's time divided by torch's in the same round.

    The plan must gain on the device, and must not lose where launches count and the host is slow. The worse of the two
    counts.
    """
    launched = of_plan.with_host(SLOWER_HOST) / of_torch.with_host(SLOWER_HOST)
    return max(of_plan.device_ms / of_torch.device_ms, launched * MARGIN[device] / EVEN)


def loses_by_launches(of_plan: Took, of_torch: Took) -> bool:
    """Whether a plan is expected to lose by its launches, as :func:`time_ratio` would find when it is timed whole."""
    return of_plan.with_host(SLOWER_HOST) > EVEN * of_torch.with_host(SLOWER_HOST)


def median_ms(times: Sequence[Took]) -> float:
    """The median of the device's times of one plan's rounds, in ms."""
    return statistics.median(took.device_ms for took in times)


def wins(ratios: Sequence[float], device: str) -> bool:
    """Whether a plan is surely enough faster than torch's choice.

    ``ratios`` are those of :func:`time_ratio`, least first.
    """
    return statistics.median(ratios) <= MARGIN[device] and ratios[len(ratios) * 3 // 4] < 1.0
