"""Trying leaf candidates on one problem: measures those that are worth it, and keeps the reason of each loss."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import torch

from tilewise import execute
from tilewise.kernels.building.kept import NotKept, kept_only
from tilewise.machine.turns import beside, in_turns
from tilewise.plan import Config, Error, Measurement, Plan, format_bytes
from tilewise.planner.experience import Experience
from tilewise.planner.measuring.times import Timer
from tilewise.planner.options import Options
from tilewise.planner.search.benchmark import OUT_OF_MEMORY, Benchmark, TooSlow
from tilewise.planner.search.binding import Binder
from tilewise.planner.search.estimate import Profile
from tilewise.planner.search.known import Known
from tilewise.planner.search.leaves import OverLimit
from tilewise.planner.search.offers import Offer, Offers, loss_of
from tilewise.planner.search.pruning import Pruning
from tilewise.planner.search.rates import Key
from tilewise.problems.base import Problem
from tilewise.problems.operands import Tensors
from tilewise.solvers import Solver

__all__ = ["UNKNOWN", "Trial"]

UNKNOWN = "not measured, and wisdom knows nothing of it"
TOGETHER = 8
"""So many further candidates are bound at a time beside a program."""


class Trial:
    """Tries leaf candidates for ``problem`` on the given tensors. Measurements are added to ``known``.

    The keys in ``foreign`` are those of ``known`` that were measured elsewhere: a workspace below what is declared is
    not believed of them. ``wrong`` has candidates that failed a check against float64 in this search, with the reason.
    ``judge`` gives the reason why a candidate's error is too large, empty text when it is not. ``bias`` is that of a
    root problem that adds one. For a front slower candidates with less workspace are wanted, too. Without ``watched``
    nobody asks how much memory a candidate takes, so that its finalists alone are watched for hidden memory. What
    ``loses`` says yes to will not be chosen because of its launches, however fast it is. On a GPU ``experience``
    corrects estimates, and takes what is measured. ``known_of`` has what is known of other problems.

    Which candidates there are is said by :attr:`offers`, which of them are not worth a measurement by :attr:`pruning`,
    and what one takes by :attr:`benchmark`.
    """

    def __init__(
        self,
        problem: Problem,
        tensors: Tensors,
        options: Options,
        profile: Profile,
        timer: Timer,
        known: Known,
        foreign: set[Key],
        wrong: Mapping[tuple[str, Config], str],
        judge: Callable[[Error], str],
        *,
        is_root: bool = True,
        bias: torch.Tensor | None = None,
        for_front: bool = False,
        watched: bool = True,
        loses: Callable[[Measurement], bool] | None = None,
        experience: Experience | None = None,
        known_of: Callable[[Problem], Known] | None = None,
    ) -> None:
        self.problem, self.tensors, self.options, self.is_root = problem, tensors, options, is_root
        self.known, self.foreign, self.judge, self._loses = known, foreign, judge, loses
        narrows = options.rigor == "measure" and problem.device_type == "cuda"
        self._experience = experience if narrows else None
        self.offers = Offers(problem, options, profile, wrong, is_root, known_of=known_of, experience=self._experience)
        self.pruning = Pruning(problem, known, options.rigor == "patient", for_front)
        self.pruning.narrows = narrows
        self.benchmark = Benchmark(problem, tensors, options, timer, is_root, bias, watched)
        self._binder = Binder(problem, tensors)
        self.best_ms = float("inf")
        """Starts as a bound, and falls to the best time found. Candidates far above it are given up."""
        self.found: list[Measurement] = []
        """All measurements, the candidates included that are lost."""
        self._too_slow: dict[Key, float] = {}
        """Milliseconds of candidates that were run once and given up."""
        self._waiting: list[Offer] = []
        """Candidates that are still to be tried, the next one last."""

    def run(self) -> list[Measurement]:
        """Try the candidates of every leaf solver in the order of their estimates. Returns all measurements.

        On a GPU those come first that need no kernel of ours: what they take says which kernels are worth compiling.
        """
        self._waiting = self._begin()[::-1]
        while self._waiting:
            self._consider(self._waiting.pop())
        return self.found

    def run_ready(self) -> list[Offer]:
        """Try only the candidates whose kernels are compiled. Returns the others that :meth:`run` would then try."""
        wanted: list[Offer] = []
        self._waiting = self._begin()[::-1]
        with kept_only():
            while self._waiting:
                offer = self._waiting.pop()
                try:
                    self._consider(offer)
                except NotKept:
                    wanted.append(offer)
        return wanted

    def lacking(self) -> list[str]:
        """As :meth:`run_ready`; returns what workers would compile for the others."""
        return self._binder.lacking([Plan(self.problem.key, *offer.key) for offer in self.run_ready()])

    def _begin(self) -> list[Offer]:
        """The candidates in the order in which they are tried; those that cannot be are noted as lost.

        On a GPU those come first that need no kernel of ours, then the best by estimate of each family, then others.
        """
        with beside(short=True):
            offers = self.offers.ranked()
            self.found += self.offers.lost
            self.pruning.compare(offers)
        if self.problem.device_type != "cuda" or not self.pruning.narrows:
            return offers
        firsts = {offer.solver.family(offer.config): offer for offer in reversed(offers)}.values()
        return sorted(offers, key=lambda offer: (offer.solver.compiles, all(offer is not first for first in firsts)))

    def took_ms(self) -> dict[Key, float]:
        """Milliseconds that candidates take, as measured at any time or seen in this trial."""
        known = {key: m.time_ms for key, m in self.known.items() if m.time_ms is not None and not m.reason}
        return {**self._too_slow, **known}

    def _consider(self, offer: Offer) -> None:
        """Try a candidate, or note why it is not worth that."""
        if reason := self.pruning.reason(offer, self._time_to_beat):
            self._lose(offer, reason)
            return
        self._try(offer)
        m = self.found[-1]
        took_ms = None if m.reason else m.time_ms
        self.pruning.note(offer, took_ms)
        if took_ms is not None and self._experience is not None:
            self._experience.note(self.problem, offer.solver, offer.config, took_ms / max(offer.by_cost_ms, 1e-9))

    def _time_to_beat(self, workspace: int) -> float:
        """The time to beat in ms: the best so far; for a front, the best that needs at most ``workspace`` bytes."""
        if not self.pruning.for_front:
            return self.best_ms
        measurements = (*self.offers.beside, *self.found)
        within_workspace = (m for m in measurements if not m.reason and (m.workspace or 0) <= workspace)
        return min((m.time_ms for m in within_workspace if m.time_ms is not None), default=float("inf"))

    def _try(self, offer: Offer) -> None:
        """Take a candidate's measurement from what is known, or measure it, and hold it to the options."""
        solver, config, key = offer.solver, offer.config, offer.key
        m = self.believed(key, solver.workspace(self.problem, config) if key in self.foreign else 0)
        if self.options.rigor == "estimate" and (m is None or not m.reason):
            # By estimate alone, so that all compare alike.
            self._add(Measurement(*key, offer.estimate_ms, offer.needed))
            return
        if m is None and self.options.rigor == "wisdom_only":
            self._lose(offer, UNKNOWN)
            return
        if m is None:
            try:
                m = self.measure(solver, config, self._time_to_beat(offer.needed))
            except OverLimit as over:
                self._block(offer, str(over), over.workspace)
                return
            except TooSlow as slow:  # beside the best of this search: another limit may leave nothing faster
                self._too_slow[key] = slow.took_ms
                self._lose(offer, str(slow), slow.workspace)
                return
            if not (in_turns() and m.reason.startswith(OUT_OF_MEMORY)):  # a program beside it has the memory now
                self.known[key] = m
                self.foreign.discard(key)
        limit = self.options.workspace
        if not m.reason and limit is not None and m.workspace is not None and m.workspace > limit:
            text = f"took {format_bytes(m.workspace)} of workspace when run, the limit is {format_bytes(limit)}"
            self._block(offer, text, m.workspace)
            return
        if not m.reason and m.error is not None:
            m = replace(m, reason=self.judge(m.error))
        self._add(m)

    def believed(self, key: Key, declared: int) -> Measurement | None:
        """What is known of a candidate that needs ``declared`` bytes of workspace, in its own config.

        ``None`` where nothing is, or where what was measured elsewhere says less.
        """
        m = self.known.get(key)
        if m is None or key not in self.foreign:
            return m
        if not m.reason and (m.workspace is None or m.workspace < declared):
            return None
        return replace(m, config=key[2])  # numbers may be equal and of another type

    def measure(self, solver: Solver, config: Config, best_ms: float = float("inf")) -> Measurement:
        """Measure a candidate as :meth:`Benchmark.measure` does."""
        return self.measure_plan(Plan(self.problem.key, solver.name, solver.version, config), best_ms)

    def measure_plan(self, plan: Plan, best_ms: float) -> Measurement:
        """Like :meth:`measure`, for any plan of the problem. The measurement has the plan's own config."""
        return self.benchmark.measure(plan, best_ms, self._bind)

    def _bind(self, plan: Plan) -> execute.Bound:
        """Bind ``plan``, where candidates are waiting with those beside it that are to be compiled."""
        return self._binder.bind(plan, self._to_bind if self._waiting else None)

    def _to_bind(self) -> list[Plan]:
        """Plans of waiting candidates that will be measured and may have to be compiled.

        Beside a program also the next others: each time that something is bound there, a turn is waited for.
        """
        waiting = self._waiting[::-1]
        offers = self.pruning.to_compile(waiting, self.best_ms)
        if in_turns():
            offers += [o for o in self.pruning.to_measure(waiting, self.best_ms)[:TOGETHER] if o not in offers]
        return [Plan(self.problem.key, *offer.key) for offer in offers]

    def _add(self, m: Measurement) -> None:
        """Note a measurement. One that is not lost, nor will lose by its launches, may be the best so far."""
        self.found.append(m)
        if not m.reason and m.time_ms is not None and not (self._loses and self._loses(m)):
            self.best_ms = min(self.best_ms, m.time_ms)

    def _block(self, offer: Offer, reason: str, workspace: int) -> None:
        """Note that a candidate is lost to the workspace limit alone."""
        self.offers.blocked[offer.solver.name, offer.config] = offer.estimate_ms
        self._lose(offer, reason, workspace)

    def _lose(self, offer: Offer, reason: str, workspace: int | None = None) -> None:
        """Note that a candidate is lost, and why."""
        self.found.append(loss_of(offer.solver, offer.config, reason, workspace))
