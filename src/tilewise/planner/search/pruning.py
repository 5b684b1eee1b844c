"""Which candidates are not worth a measurement: by their estimates, and by how many of their family were measured."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

from tilewise.planner.search.known import Known
from tilewise.planner.search.offers import Offer
from tilewise.planner.search.rates import LOST, Key
from tilewise.problems.base import Problem
from tilewise.solvers import Solver

__all__ = ["PRUNE", "Pruning"]

PRUNE = 2.0
"""A candidate whose estimate is this many times the best measured time is not measured, save by ``patient``."""
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
    """How many candidates of each solver's families were measured."""
    kin: dict[str, list[tuple[float, int]]] = field(default_factory=dict)
    """Estimates and workspaces of candidates, by the name of their solver's kin."""

    def compare(self, offers: Iterable[Offer]) -> None:
        """Note the estimates of all candidates, which are compared among kin."""
        for offer in offers:
            if offer.solver.kin:
                self.kin.setdefault(offer.solver.kin, []).append((offer.estimate_ms, offer.needed))

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
        most = self._most(offer.solver)
        if not is_known and self.tried[family] > most:
            return f"not measured: {most} of {family} with better estimates were"
        return ""

    def to_compile(self, offers: Sequence[Offer], best_ms: float) -> list[Offer]:
        """Those of ``offers``, the next first, that will be measured and whose kernels may have to be compiled.

        That is as far as can be told now, where the best so far takes ``best_ms``.
        """
        foreseen = replace(self, tried=self.tried.copy())
        compiled = (offer for offer in offers if offer.solver.compiles)
        measured = [offer for offer in compiled if not foreseen.reason(offer, lambda workspace: best_ms)]
        return [offer for offer in measured if offer.key not in self.known]

    def _most(self, solver: Solver) -> int:
        """How many configs of a family of ``solver`` are measured at the most."""
        of_solver = solver.most(self.problem)
        return of_solver if self.most is None else min(of_solver, self.most)

    def _hopeless(self, offer: Offer, best_ms: float) -> str:
        """Why a candidate that is not known yet is not worth a measurement; empty when it is."""
        kin_name, estimate = offer.solver.kin, offer.estimate_ms
        comparable = self.kin.get(kin_name, ())
        kin = [ms for ms, workspace in comparable if not self.for_front or workspace <= offer.needed]
        if kin and estimate > BEHIND_KIN * min(kin):
            return f"not measured: estimated {estimate:.3f} ms, the best of {kin_name} {min(kin):.3f}"
        if estimate > PRUNE * best_ms:
            return f"not measured: estimated {estimate:.3f} ms, the best so far takes {best_ms:.3f}"
        prior = self.prior_ms.get(offer.key, 0.0)
        if prior > LOST * best_ms:
            return f"not measured: {prior:.3f} ms by its rate at a larger size, the best so far takes {best_ms:.3f}"
        return ""
