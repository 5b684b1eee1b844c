"""The search for the passes that a step runs by plan: which choice of them is timed next, and what is kept at its end.

It only asks for times. :mod:`.goal` takes them from steps that it runs, :mod:`.live` from those of the program. What
stands for a problem may be anything that can be compared: the problem itself, or its name where ranks tell each other.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Generator, Hashable, Mapping
from dataclasses import dataclass, replace
from typing import Generic, Protocol, TypeVar

from tilewise.nn.step.pairs import LEAST_PAIRS, Pairs
from tilewise.nn.step.result import StepReport
from tilewise.problems.base import Problem

__all__ = [
    "NOTE",
    "Asked",
    "Key",
    "Search",
    "Swappable",
    "Tried",
    "concluded",
    "search",
    "why_nothing_to_compare",
    "with_times",
]

NOTE = "taken back: the step is not faster with it"
MORE_PAIRS, MORE_S, WORTH = 40, 5.0, 1.005
"""Where the first pairs leave open whether a step gains, so many more decide, if they take so many seconds at the most
and the step seems to gain by this factor. They alone count: with the first ones the better of two chances would."""
SHORT_OF = 0.85
SHORT_BY_MS = 0.3
"""A step that gains less than this part of what its passes promise, and by so many milliseconds less, has passes that
are in doubt."""

Key = tuple[Problem, bool]
"""A problem, and torch's deterministic flag in its calls."""
K = TypeVar("K", bound=Hashable)
"""What stands for a problem and the flag."""


class Swappable(Protocol):
    """The modules of a model, or the calls of a program, whose passes may run by plan or by torch."""

    def gains(self) -> Mapping[Key, float]:
        """The milliseconds that a step gains by each problem that runs by plan, as measured alone."""
        ...

    def withhold(self, keys: Collection[Key], note: str) -> None:
        """Let torch compute these problems, and no others, although they have plans."""
        ...

    def switches(self) -> tuple[Callable[[], None], Callable[[], None]]:
        """Functions that let all modules compute as torch does, and as they do now."""
        ...


@dataclass(frozen=True)
class Asked(Generic[K]):
    """Times that the search asks for: of torch's step and the one with the plans of ``withheld`` taken back."""

    withheld: frozenset[K]
    pairs: int


@dataclass(frozen=True)
class Tried(Generic[K]):
    """A choice of problems to leave to torch, and the times of torch's step and this one.

    Of the pairs that were ``asked`` for, fewer may have been enough.
    """

    withheld: frozenset[K]
    asked: int
    pairs: Pairs


Search = Generator[Asked[K], Pairs, Tried[K]]


def why_nothing_to_compare(gains: Mapping[K, float]) -> str:
    """Why steps with these gains need not be compared; empty where they should be."""
    if not gains:
        return "no pass runs by plan"
    if any(math.isnan(gain) for gain in gains.values()):
        return "there are plans that were not chosen by their times"
    return ""


def search(
    gains: Mapping[K, float],
    rounds_of: Callable[[Pairs], int],
    exploring_pairs: int,
    start: frozenset[K] = frozenset(),
    promised: Callable[[frozenset[K]], float] | None = None,
) -> Search[K]:
    """Ask for times, take back what promises least while the step gains by that, and return the fastest choice.

    It begins with ``start`` taken back, as a model of the step has it, and then looks whether none is better.
    ``promised`` gives the milliseconds that a step should gain with some problems taken back; by default the sum of
    ``gains`` of the others.
    ``rounds_of`` says how often a choice is tried after the first, by the times of that one. Each is explored by
    ``exploring_pairs`` and the one that is returned timed by enough pairs to be sure.
    """
    promised = promised or (lambda withheld: sum(gain for key, gain in gains.items() if key not in withheld))
    best = Tried(start, LEAST_PAIRS, (yield Asked(start, LEAST_PAIRS)))
    rounds = rounds_of(best.pairs)
    if start and rounds:
        rounds -= 1
        nothing = frozenset[K]()
        tried = Tried(nothing, exploring_pairs, (yield Asked(nothing, exploring_pairs)))
        if tried.pairs.speedup[1] > best.pairs.speedup[1]:
            best = tried
    first = best.withheld
    ordered = sorted((key for key in gains if key not in first), key=lambda key: gains[key])
    low, high = 0, len(ordered)  # how many are taken back: all is torch's step
    for _ in range(rounds):
        if high - low < 2 or not falls_short(best.pairs, promised(best.withheld)):
            break
        middle = (low + high) // 2
        withheld = first | frozenset(ordered[:middle])
        tried = Tried(withheld, exploring_pairs, (yield Asked(withheld, exploring_pairs)))
        if tried.pairs.speedup[1] > best.pairs.speedup[1]:
            best, low = tried, middle
        else:
            high = middle
    if best.asked < LEAST_PAIRS:
        best = Tried(best.withheld, LEAST_PAIRS, (yield Asked(best.withheld, LEAST_PAIRS)))
    if is_open(best.pairs):
        best = Tried(best.withheld, MORE_PAIRS, (yield Asked(best.withheld, MORE_PAIRS)))
    return best


def is_open(pairs: Pairs) -> bool:
    """Whether the step seems to gain and more pairs, which do not take long, may tell surely: a host may be uneven."""
    least, speedup, _ = pairs.speedup
    return least <= 1.0 and speedup >= WORTH and MORE_PAIRS * sum(pairs.medians) <= MORE_S * 1e3


def falls_short(pairs: Pairs, promised: float) -> bool:
    """Whether the step gains clearly less than the milliseconds that are ``promised``."""
    torch_ms, planned_ms = pairs.medians
    gained = torch_ms - planned_ms
    return gained < SHORT_OF * promised and promised - gained > SHORT_BY_MS


def concluded(gains: Mapping[K, float], best: Tried[K], way: str = "eager") -> tuple[StepReport, frozenset[K]]:
    """The report of the fastest choice, and what is to be taken back: all where it is not surely faster than torch.

    ``way`` is how the steps ran, as :class:`StepReport` has it.
    """
    kept = with_times(StepReport(), best.pairs).kept
    withheld = best.withheld if kept else frozenset(gains)
    predicted_ms = sum(gain for key, gain in gains.items() if key not in best.withheld)
    report = StepReport(predicted_ms=predicted_ms, taken_back=len(withheld), way=way)
    return with_times(report, best.pairs), withheld


def with_times(report: StepReport, pairs: Pairs) -> StepReport:
    """``report`` with the times of torch's step and another, which is kept where it is surely faster."""
    least, speedup, most = pairs.speedup
    torch_ms, planned_ms = pairs.medians
    torch_host_ms, planned_host_ms = pairs.host_ms or (None, None)
    torch_device_ms, planned_device_ms = pairs.device_ms or (None, None)
    return replace(
        report,
        torch_ms=torch_ms,
        planned_ms=planned_ms,
        speedup=speedup,
        least=least,
        most=most,
        pairs=len(pairs.first_ms),
        torch_host_ms=torch_host_ms,
        planned_host_ms=planned_host_ms,
        torch_device_ms=torch_device_ms,
        planned_device_ms=planned_device_ms,
        kept=least > 1.0,
        reason="",
    )
