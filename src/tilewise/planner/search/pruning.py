"""Which candidates are not worth a measurement: by their estimates, and by how many of their family were measured."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

from tilewise.planner.search.known import Known
from tilewise.planner.search.offers import Offer
from tilewise.planner.search.rates import LOST, Key
from tilewise.problems.base import Problem

__all__ = ["BEHIND", "COMPILED", "NEXT", "PRUNE", "Pruning"]

PRUNE = 2.0
"""A candidate whose estimate is this many times the best measured time is not measured, save by ``patient``."""
COMPILED = 1.3
"""The same for a candidate whose kernels may have to be compiled for a GPU."""
BEHIND = 1.4
"""A candidate whose kernels may have to be compiled for a GPU is not measured where its estimate is this many times the
best of all those, save by ``patient``."""
NEXT = 1.15
"""Of those, a further config of a family is measured only where the best of the family so far is within this of the
best of all."""
GAIN = 0.98
"""Of solvers whose configs are measured while it pays: a config that takes at most this share of the best before it."""
BEHIND_KIN = 1.25
"""A candidate whose estimate is this many times the best of its kin is not measured, save by ``patient``."""


@dataclass
class Pruning:
    """Says of one candidate after the other whether it is measured. A ``patient`` search measures all.

    What is ``known`` is never left out, since it takes no measurement.
    """

    problem: Problem
    known: Known
    patient: bool
    for_front: bool = False
    """Whether slower candidates with less workspace are wanted, too."""
    prior_ms: dict[Key, float] = field(default_factory=dict)
    """Milliseconds expected of candidates by their rate at a larger size. One that lost by far there is not run
    again."""
    most: int | None = None
    """Most configs of a solver to measure, if fewer than the solver itself says."""
    tried: Counter[str] = field(default_factory=Counter)
    """How many candidates of each solver's families were measured; since the last gain, where that decides."""
    kin: dict[str, list[tuple[float, int]]] = field(default_factory=dict)
    """Estimates and workspaces of candidates, by the name of their solver's kin."""
    narrows: bool = True
    """Whether few of the candidates are measured whose kernels may have to be compiled for a GPU."""
    compiled: list[tuple[float, int]] = field(default_factory=list)
    """Estimates and workspaces of all candidates whose kernels may have to be compiled for a GPU."""
    took_ms: dict[str, float] = field(default_factory=dict)
    """The best time so far of each family; infinite where a first config is still to be measured."""

    def compare(self, offers: Iterable[Offer]) -> None:
        """Note the estimates of all candidates, which are compared among kin, and among all that are compiled."""
        for offer in offers:
            if offer.solver.kin:
                self.kin.setdefault(offer.solver.kin, []).append((offer.estimate_ms, offer.needed))
            if self.is_compiled(offer):
                self.compiled.append((offer.estimate_ms, offer.needed))

    def is_compiled(self, offer: Offer) -> bool:
        """Whether kernels may have to be compiled for a candidate, each of which takes a core for a second or more."""
        return self.narrows and offer.solver.compiles and self.problem.device_type == "cuda"

    def note(self, offer: Offer, took_ms: float | None) -> None:
        """Note what a candidate took; ``None`` where it is lost."""
        family = offer.solver.family(offer.config)
        before = self.took_ms.get(family, math.inf)
        if took_ms is not None:
            if offer.solver.while_it_pays and took_ms < GAIN * before:
                self.tried[family] = 0
            self.took_ms[family] = min(before, took_ms)
        elif before == math.inf:
            self.took_ms.pop(family, None)  # the next config is the family's first

    def reason(self, offer: Offer, time_to_beat: Callable[[int], float]) -> str:
        """Why a candidate is not worth a measurement; empty where it is. It then counts as measured.

        ``time_to_beat`` gives the ms of the best so far for the bytes of workspace that may be used.
        """
        if self.patient:
            return ""
        family, is_known = offer.solver.family(offer.config), offer.key in self.known
        if not is_known and (hopeless := self._hopeless(offer, time_to_beat(offer.needed))):
            return hopeless
        self.tried[family] += 1  # also what is known, else each search would measure as many again
        most = self._most(offer)
        if not is_known and self.tried[family] > most:
            return f"not measured: {most} of {family} with better estimates were"
        if not is_known and self.is_compiled(offer) and self._is_behind(family, time_to_beat(offer.needed)):
            self.tried[family] -= 1
            first_ms, best_ms = self.took_ms[family], time_to_beat(offer.needed)
            return f"not measured: the best of {family} so far takes {first_ms:.3f} ms, the best of all {best_ms:.3f}"
        self.took_ms.setdefault(family, math.inf)
        return ""

    def _is_behind(self, family: str, best_ms: float) -> bool:
        """Whether a further config of a family is not worth a kernel, as far as its first has shown."""
        return not self.for_front and self.took_ms.get(family, 0.0) > NEXT * best_ms

    def to_compile(self, offers: Sequence[Offer], best_ms: float) -> list[Offer]:
        """Those of ``offers``, the next first, that will be measured and whose kernels may have to be compiled.

        That is as far as can be told now, where the best so far takes ``best_ms``.
        """
        return self.to_measure([offer for offer in offers if offer.solver.compiles], best_ms)

    def to_measure(self, offers: Sequence[Offer], best_ms: float) -> list[Offer]:
        """Those of ``offers``, the next first, that will be measured as far as can be told now."""
        foreseen = replace(self, tried=self.tried.copy(), took_ms=self.took_ms.copy())
        measured = [offer for offer in offers if not foreseen.reason(offer, lambda workspace: best_ms)]
        return [offer for offer in measured if offer.key not in self.known]

    def _least(self, others: Iterable[tuple[float, int]], offer: Offer) -> float:
        """The least estimate of ``others``; for a front, of those that need no more workspace than ``offer``."""
        return min((ms for ms, needed in others if not self.for_front or needed <= offer.needed), default=math.inf)

    def _most(self, offer: Offer) -> int:
        """How many configs of a candidate's family are measured at the most."""
        most = offer.solver.most(self.problem)
        if self.is_compiled(offer) and not self.for_front:
            most = min(most, offer.solver.most_compiled)
        return most if self.most is None else min(most, self.most)

    def _hopeless(self, offer: Offer, best_ms: float) -> str:
        """Why a candidate that is not known yet is not worth a measurement; empty when it is."""
        kin_name, estimate = offer.solver.kin, offer.estimate_ms
        if (least := self._least(self.kin.get(kin_name, ()), offer)) < estimate / BEHIND_KIN:
            return f"not measured: estimated {estimate:.3f} ms, the best of {kin_name} {least:.3f}"
        compiled = self.is_compiled(offer)
        if compiled and (least := self._least(self.compiled, offer)) < estimate / BEHIND:
            return f"not measured: estimated {estimate:.3f} ms, the best that is compiled {least:.3f}"
        if estimate > (COMPILED if compiled else PRUNE) * best_ms:
            return f"not measured: estimated {estimate:.3f} ms, the best so far takes {best_ms:.3f}"
        prior = self.prior_ms.get(offer.key, 0.0)
        if prior > LOST * best_ms:
            return f"not measured: {prior:.3f} ms by its rate at a larger size, the best so far takes {best_ms:.3f}"
        return ""
