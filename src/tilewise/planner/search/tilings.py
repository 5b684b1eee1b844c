"""Divisions into parts that differ by where they lie, such as tiles of an image, of which those at its border do.

One size serves a division. Sizes are tried in falling order on the part that most of the others equal; only those that
are fastest there are completed by the parts that differ, each planned as the problem it is, with what gained inside.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Any

from tilewise import solvers
from tilewise.plan import Config, Measurement, Plan, sum_known
from tilewise.planner.fronts import front, in_sequence, thin
from tilewise.planner.options import Options
from tilewise.planner.search.divisions import GAIN, HOPELESS, Deeper, TrialOf, division_of, sums_apart, tensors_of
from tilewise.planner.search.leaves import leaf_plan
from tilewise.planner.search.rates import Rates
from tilewise.planner.search.trial import Trial
from tilewise.problems.base import Part, Problem
from tilewise.solvers import Split

__all__ = ["Tilings"]

MOST_COMPLETED = 2
"""Sizes for which all parts are planned; ``patient`` does so for every size."""
MOST_KINDS = 16
"""Divisions into more different problems are not planned: their tiles are far smaller than their halo."""


@dataclass(frozen=True)
class _Tiling:
    """One division: its parts, the problem ``inside`` that covers most of the axis, and the plans for that problem."""

    sizes: tuple[int, ...]
    parts: tuple[Part[Any], ...]
    inside: Problem
    plans: list[Plan]
    ms: float
    """Milliseconds expected of the whole if every part ran at the rate of ``inside``."""


@dataclass
class Tilings:
    """The divisions by ``solver`` of the problem of ``trial``, which has been run, into parts that keep its limit.

    ``trial_of`` makes the trial of a part's leaves on given tensors under given options; ``deeper`` gives the plans
    that cut a part again, after the trial of its leaves was run. ``exhaustive``: every size is completed, with
    every candidate.
    """

    solver: Split
    trial: Trial
    trial_of: TrialOf
    deeper: Deeper
    exhaustive: bool = False
    lost: list[tuple[int, Measurement]] = field(default_factory=list)
    """Sizes of parts, each with a measurement that was lost there, the latest last."""

    def plans(self) -> list[Plan]:
        """Divisions by the best sizes, each size's front; times are sums of their parts'."""
        divisions: list[Plan] = []
        sizes = list(self.solver.sizes(self._problem, self.trial.options.batch_sizes))
        while sizes and not divisions:  # a part that differs may not keep the limit, or a measured one just so
            for completed, tiling in enumerate(sorted(self._tilings(sizes), key=lambda tiling: tiling.ms)):
                if completed >= MOST_COMPLETED and not self.exhaustive:
                    break
                divisions += self._completed(tiling)
        return divisions

    def why_none(self) -> str:
        """Why :meth:`plans` found no division that can be computed."""
        if self._among() == frozenset():
            if self._problem.batch_size > 1:
                return "not tried: micro-batches come first, and then tiles of one image"
            return "not tried: nothing that the workspace limit kept out is estimated to be faster"
        if not self.lost:
            return "no size of parts to try"
        last = self.lost[-1][0]
        reasons = (f"{m.solver} {m.config}".strip() + f": {m.reason}" for size, m in self.lost if size == last)
        return f"no division could be computed; parts of {last}: {'; '.join(dict.fromkeys(reasons))}"

    @property
    def _problem(self) -> Problem:
        """The problem that is divided into tiles."""
        return self.trial.problem

    def _tilings(self, sizes_left: list[int]) -> list[_Tiling]:
        """Divisions of falling size whose parts inside can be computed, until they lose.

        Sizes are taken from the front of ``sizes_left`` as they are looked at.
        """
        best, worse_in_a_row, tilings = self.trial.best_ms, 0, list[_Tiling]()
        blocked, among, seen = self.trial.offers.blocked, self._among(), Rates()
        if among == frozenset():
            sizes_left.clear()
        whole = self._problem.extent(self.solver.axis_of(self._problem))
        while sizes_left:
            promising = any(estimate < best for estimate in blocked.values())
            if (
                tilings
                and not self.exhaustive
                and not promising
                and (worse_in_a_row or tilings[-1].ms > HOPELESS * best)
            ):
                break
            size = sizes_left.pop(0)
            sizes = self.solver.cut(self._problem, size)
            parts = self.solver.children(self._problem, Config(sizes=sizes))
            kinds: Counter[Problem] = Counter()
            for length, part in zip(sizes, parts, strict=True):
                if part.problem is not None:
                    kinds[part.problem] += length
            options = self._options_beside(next(iter(kinds), None))
            if options is None or not kinds or len(kinds) > MOST_KINDS:
                continue
            inside = max(kinds, key=lambda kind: kinds[kind])
            times = whole / next(n for n, part in zip(sizes, parts, strict=True) if part.problem == inside)

            trial = self._trial(inside, parts, options)
            trial.offers.among, trial.best_ms = among, math.inf if self.exhaustive else best / times
            trial.pruning.prior_ms = {} if self.exhaustive else seen.at(size, times)
            plans = self._planned(trial)
            blocked = {key: estimate * times for key, estimate in trial.offers.blocked.items()}
            seen.note(trial.took_ms(), times, size)
            if plans:
                ms = times * min(plan.time_ms for plan in plans)
                tilings.append(_Tiling(sizes, parts, inside, plans, ms))
                worse_in_a_row = 0 if ms < GAIN * best else worse_in_a_row + 1
                best = min(best, ms)
            else:
                worse_in_a_row += 1
        return tilings

    def _among(self) -> frozenset[str] | None:
        """Names of the solvers to try on tiles; ``None`` for all.

        A cut costs more than it saves, unless the limit kept a solver out of the whole that is estimated to be faster,
        or the split itself has reasons for the problem. With several images only solvers that block the batch
        themselves are tried here: the others are tried on tiles of a micro-batch.
        """
        if self.exhaustive or not self.solver.idle(self._problem):
            return None
        names = {name for (name, _), ms in self.trial.offers.blocked.items() if ms < self.trial.best_ms}
        return frozenset(n for n in names if self._problem.batch_size == 1 or solvers.get(n).blocks_itself)

    def _options_beside(self, part: Problem | None) -> Options | None:
        """Options for the parts: the limit less the fp32 sum of parts; ``None`` where that alone is over the limit."""
        options = self.trial.options
        if options.workspace is None or part is None:
            return options
        rest = options.workspace - sums_apart(self._problem, part)
        return None if rest < 0 else replace(options, workspace=rest)

    def _trial(self, kind: Problem, parts: tuple[Part[Any], ...], options: Options) -> Trial:
        """The trial of the parts whose problem is ``kind``, on the tensors of the first of them."""
        part = next(part for part in parts if part.problem == kind)
        trial = self.trial_of(kind, tensors_of(self._problem, self.trial.tensors, part, kind), options)
        trial.offers.blocks = True
        return trial

    def _planned(self, trial: Trial) -> list[Plan]:
        """The front of plans for the parts of a trial."""
        part = trial.problem
        measured = trial.run()
        size = part.extent(self.solver.axis_of(part))
        self.lost += [(size, m) for m in measured if m.reason]
        plans = [leaf_plan(part, m) for m in measured if not m.reason and m.time_ms is not None]
        plans += self.deeper(trial)
        front_indices = front((plan.time_ms, plan.workspace) for plan in plans)
        return [plans[i] for i in thin(front_indices)]

    def _completed(self, tiling: _Tiling) -> list[Plan]:
        """Plans for all parts of the tiling, those included that differ from the part inside."""
        options = self._options_beside(tiling.inside)
        assert options is not None
        kinds = Counter(part.problem for part in tiling.parts if part.problem is not None)
        fronts = {tiling.inside: tiling.plans}
        gained = frozenset((plan.solver, plan.config) for plan in tiling.plans if plan.leaf) or None

        for kind in kinds:
            for only in (None,) if self.exhaustive else (gained, None):
                if not fronts.get(kind):
                    trial = self._trial(kind, tiling.parts, options)
                    trial.offers.only = only
                    fronts[kind] = self._planned(trial)
        points = [[(plan.time_ms, plan.workspace) for plan in fronts[kind]] for kind in kinds]
        divisions = []
        for row in in_sequence(list(kinds.values()), points, options.workspace):
            chosen = {kind: fronts[kind][i] for kind, i in zip(kinds, row, strict=True)}
            divisions.append(self._division(tiling, chosen, sum(kinds[kind] * p.time_ms for kind, p in chosen.items())))
        return divisions

    def _division(self, tiling: _Tiling, chosen: dict[Problem, Plan], ms: float) -> Plan:
        """The plan of the whole with the plan ``chosen`` for each problem, which take ``ms`` together."""
        # A part that meets no data is not run: it follows the plan of the part before it.
        last = chosen[tiling.inside]
        plans = [last := last if part.problem is None else chosen[part.problem] for part in tiling.parts]
        sums = sums_apart(self._problem, tiling.inside)
        run = [plan for plan, part in zip(plans, tiling.parts, strict=True) if part.problem is not None]
        host_ms = sum_known(plan.host_ms for plan in run)
        return replace(division_of(self._problem, self.solver, tiling.sizes, plans, sums), time_ms=ms, host_ms=host_ms)
