"""Plans that cut a problem along one axis: sizes are tried in falling order, then composed by dynamic programming.

A part's candidates are those that gained at the size before, or that only now fit the limit: planning stays short
because an engine that lost at 128 images is not run again at 64. Sizes between powers of two are guessed from their
neighbours, and only those that a division wants to use are measured, until it wants no other.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from tilewise.execute import carved
from tilewise.plan import Config, Measurement, Plan, format_bytes, sum_known
from tilewise.planner.fronts import divide, front, thin
from tilewise.planner.options import Options
from tilewise.planner.search.leaves import leaf_plan
from tilewise.planner.search.rates import Rates
from tilewise.planner.search.trial import Trial
from tilewise.problems.base import Part, Problem, narrow
from tilewise.problems.operands import Tensors, make_operands, make_results
from tilewise.solvers import Split
from tilewise.solvers.base import BATCH_LEVEL

__all__ = [
    "GAIN",
    "HOPELESS",
    "Choice",
    "Deeper",
    "Divisions",
    "TrialOf",
    "choice_of",
    "division_of",
    "sums_apart",
    "tensors_of",
]

GAIN = 0.97
"""Smaller parts count as a gain where their time per image is below this share of the best."""
HOPELESS = 2.0
"""No smaller sizes are tried once the time per image is this many times the best."""
LARGER = 1 - 1e-6
"""Factor on guesses above the only size that was measured, so that of equal guesses the larger size is measured."""
MOST_BETWEEN = 24
"""Most sizes between powers of two that are measured; ``patient`` measures all."""

Choice = tuple[str, Config, tuple["Choice", ...]]
"""What a plan does, without its figures: solver, config, and the same of each of its parts."""

TrialOf = Callable[[Problem, Tensors, Options], Trial]
Deeper = Callable[[Trial], list[Plan]]


@dataclass
class Divisions:
    """The divisions by ``solver`` of the problem of ``trial``, which has been run, into parts that each keep the limit.

    ``trial_of`` makes the trial of a part's leaves on given tensors under given options. ``deeper`` gives the plans
    that cut a part again, after the trial of its leaves was run. ``exhaustive``: every size is tried with every
    candidate. ``for_front``: divisions that are slower and take less workspace count too.
    """

    solver: Split
    trial: Trial
    trial_of: TrialOf
    deeper: Deeper
    exhaustive: bool = False
    for_front: bool = False
    share: tuple[int, int] = (0, 1)
    """Index and count: of the sizes between powers of two every count-th is tried, from that index on."""
    fronts: dict[int, list[Plan]] = field(default_factory=dict)
    leaves: dict[int, list[Plan]] = field(default_factory=dict)
    """By size, all leaves that were measured, on the front or not."""
    lost: dict[int, list[Measurement]] = field(default_factory=dict)
    estimates: dict[int, dict[tuple[str, Config], float]] = field(default_factory=dict)
    """By size, estimated milliseconds of all leaves that were offered, over the limit or not."""

    def __post_init__(self) -> None:
        self.problem, self.tensors, self.options = self.trial.problem, self.trial.tensors, self.trial.options
        self.estimates[self._whole] = self.trial.offers.estimates
        usable = [m for m in self.trial.found if not m.reason and m.time_ms is not None]
        self.leaves[self._whole] = [leaf_plan(self.problem, m) for m in usable]

    def plans(self) -> list[Plan]:
        """The front of divisions, fastest first; times are sums of their parts'."""
        sum_bytes, limit = self.sum_bytes(), self.options.workspace
        if limit is not None and limit < sum_bytes:
            return []
        if limit is not None:
            self.options = replace(self.options, workspace=limit - sum_bytes)
        self._try_sizes()
        points = {size: [(p.time_ms, p.workspace) for p in plans] for size, plans in self.fronts.items() if plans}
        divisions = divide(self._whole, points, self.options.workspace)
        chosen_plans = ([self.fronts[s][i] for s, i in zip(d.sizes, d.points, strict=True)] for d in divisions)
        return [
            division_of(self.problem, self.solver, d.sizes, plans, sum_bytes)
            for d, plans in zip(divisions, chosen_plans, strict=True)
        ]

    def why_none(self) -> str:
        """Why :meth:`plans` found no division that can be computed."""
        if not self.fronts:
            sums = self.sum_bytes()
            return f"sums of parts in fp32 take {format_bytes(sums)}" if sums else "no size of parts to try"
        size = min(self.lost, key=lambda size: (bool(self.fronts[size]), size))
        reasons = (f"{m.solver} {m.config}".strip() + f": {m.reason}" for m in self.lost[size])
        return f"no division could be computed; parts of {size}: {'; '.join(reasons)}"

    @property
    def _whole(self) -> int:
        """The extent of the problem along the axis that is cut."""
        return self.problem.extent(self.solver.axis_of(self.problem))

    def _try_sizes(self) -> None:
        """Measure parts of falling size until smaller ones gain nothing, then of sizes between."""
        policy = self.options.batch_sizes
        rate = self.trial.best_ms / self._whole
        seen, blocked, worse_in_a_row = Rates(), self.trial.offers.blocked, 0
        seen.note(self.trial.took_ms(), 1, self._whole)
        found_rate, size_before = 0.0, self._whole
        for size in self.solver.sizes(self.problem, policy):
            promising = self.for_front or any(estimate < rate * size_before for estimate in blocked.values())
            if not self.exhaustive and not promising and (worse_in_a_row or found_rate > HOPELESS * rate):
                break  # smaller parts are no faster, and what the limit keeps out would not be either
            trial = self._tried(size, rate, None if self.exhaustive else seen, self._only())
            found_rate = min((p.time_ms for p in self.fronts[size]), default=math.inf) / size
            worse_in_a_row = 0 if found_rate < GAIN * rate else worse_in_a_row + 1
            rate = min(rate, found_rate)
            seen.note(trial.took_ms(), self._whole / size, size)
            size_before, blocked = size, trial.offers.blocked
        self._try_rests()
        between = self.solver.between(self.problem, policy)
        if self.exhaustive:
            first, step = self.share
            for size in between[first::step]:
                self._tried(size, rate, None, None)
        elif between:
            # What is left of a size between may be a power of two below those that gained.
            untried = [size for size in self.solver.sizes(self.problem, policy) if size not in self.fronts]
            self._try_between([*between, *untried], rate)

    def _try_rests(self) -> None:
        """Measure smaller parts, fast or not, that make up what the smallest size so far leaves of the whole."""
        last = min((size for size, plans in self.fronts.items() if plans), default=self._whole)
        rest = self._whole % last
        only = frozenset((p.solver, p.config) for p in self.fronts.get(last, ()) if p.leaf) or None
        for size in self.solver.sizes(self.problem, self.options.batch_sizes):
            if size <= rest and size not in self.fronts:
                self._tried(size, math.inf, None, only)
                rest %= size if self.fronts[size] else self._whole

    def _only(self) -> frozenset[tuple[str, Config]] | None:
        """The candidates to try on parts; ``None`` for all.

        Cuts of other axes than the batch cost more than they save, except for candidates that the limit kept out of
        the whole and that are estimated to be faster.
        """
        if self.solver.level <= BATCH_LEVEL or self.exhaustive:
            return None
        return frozenset(key for key, estimate in self.trial.offers.blocked.items() if estimate < self.trial.best_ms)

    def _try_between(self, sizes: Sequence[int], rate: float) -> None:
        """Measure the sizes that divisions want by what is guessed of them, until they want no more."""
        all_sizes = dict.fromkeys([*sizes, *self.fronts])
        guesses = {
            size: size_guesses for size in all_sizes if (size_guesses := _guesses(size, self.leaves, self._fixed))
        }
        room = MOST_BETWEEN
        while room:
            measured = {size: [(p.time_ms, p.workspace) for p in plans] for size, plans in self.fronts.items()}
            guessed = {
                size: [(guess.time_ms, guess.workspace) for guess in size_guesses]
                for size, size_guesses in guesses.items()
            }
            points = {size: _merged(measured.get(size, []), guessed.get(size, [])) for size in all_sizes}
            divisions = divide(self._whole, points, self.options.workspace)
            wanted = {
                size
                for d in (divisions if self.for_front else divisions[:1])
                for size, i in zip(d.sizes, d.points, strict=True)
                if points[size][i] not in measured.get(size, [])
            }
            missing = sorted(wanted, reverse=True)[self.share[0] :: self.share[1]][:room]
            if not missing:
                break
            room -= len(missing)
            for size in missing:
                self._try_guessed(size, guesses.pop(size), rate)

    def _try_guessed(self, size: int, guesses: Sequence[_Guess], rate: float) -> None:
        """Measure the guessed candidates on parts of ``size``, and add them to those measured there before."""
        before = self.fronts.get(size, []), self.leaves.get(size, []), self.estimates.get(size, {})
        only = frozenset((guess.solver, guess.config) for guess in guesses)
        # What a division wants is measured, far behind the best of other sizes or not: there may be no better rest.
        rate = max(rate, *(guess.time_ms / size for guess in guesses))
        self._tried(size, rate, None, only, whole=True)
        plans = [*before[0], *self.fronts[size]]
        self.fronts[size] = [plans[i] for i in thin(front((plan.time_ms, plan.workspace) for plan in plans))]
        self.leaves[size] = [*before[1], *self.leaves[size]]
        self.estimates[size] = before[2] | self.estimates[size]

    def _fixed(self, leaf: Plan, size: int) -> float:
        """The share of a leaf's time on a part of ``size`` that a part of any size takes, by estimates at two sizes."""
        key = leaf.solver, leaf.config
        estimate = self.estimates[size].get(key, 0.0)
        other_sizes = [n for n, estimates in self.estimates.items() if key in estimates and n != size]
        if not other_sizes or estimate <= 0.0:
            return 0.0
        other_size = min(other_sizes, key=lambda n: abs(n - size))
        fixed = (other_size * estimate - size * self.estimates[other_size][key]) / (other_size - size)
        return min(max(fixed / estimate, 0.0), 1.0)

    def _tried(
        self,
        size: int,
        rate: float,
        seen: Rates | None,
        only: frozenset[tuple[str, Config]] | None,
        *,
        whole: bool = False,
    ) -> Trial:
        """Try the leaves of parts of ``size``, and unless they are to stay ``whole`` their own divisions."""
        child = self.solver.child(self.problem, size)
        trial = self.trial_of(child, self._part_tensors(size), self.options)
        trial.offers.only = only
        if not self.exhaustive and not self.for_front:
            trial.best_ms = rate * size
        if seen is not None:
            trial.pruning.prior_ms = seen.at(size, self._whole / size)
        measurements = trial.run()
        self.estimates[size] = trial.offers.estimates
        self.lost[size] = [m for m in measurements if m.reason]
        usable = [m for m in measurements if not m.reason and m.time_ms is not None]
        plans = [leaf_plan(child, m) for m in usable]
        self.leaves[size] = plans
        if not whole:
            plans = plans + self.deeper(trial)
        front_indices = front((plan.time_ms, plan.workspace) for plan in plans)
        self.fronts[size] = [plans[i] for i in thin(front_indices)]
        return trial

    def _part_tensors(self, size: int) -> Tensors:
        """Tensors for a part of ``size``: views of the whole's."""
        sizes = tuple(s for s in (size, self._whole - size) if s)
        part = self.solver.children(self.problem, Config(sizes=sizes))[0]
        return tensors_of(self.problem, self.tensors, part, self.solver.child(self.problem, size))

    def sum_bytes(self) -> int:
        """Bytes of the fp32 sums that divisions need beside a 16-bit result; 0 where they need none."""
        sizes = self.solver.sizes(self.problem, self.options.batch_sizes)
        child = self.solver.child(self.problem, sizes[0]) if sizes else self.problem
        return sums_apart(self.problem, child)


@dataclass(frozen=True, slots=True)
class _Guess:
    """Time and workspace expected of a leaf at a size that was not measured."""

    solver: str
    config: Config
    time_ms: float
    workspace: int


def _guesses(size: int, leaves: Mapping[int, list[Plan]], fixed: Callable[[Plan, int], float]) -> list[_Guess]:
    """Guesses for leaves that were not measured at ``size``, on the line through two sizes at which they were.

    Where there is only one such size, the line is given by the share of its time that is ``fixed``. All leaves that
    were measured anywhere are guessed: one that loses at both sizes may still be the best between them, where it just
    fits the limit. The power of two below ``size`` is preferred, then the one above, then the nearest size.
    """
    below = 1 << (size.bit_length() - 1)
    nearest = sorted(leaves, key=lambda n: (n != below, n != 2 * below, n != below // 2, max(n, size) / min(n, size)))
    seen: dict[tuple[str, Config], dict[int, Plan]] = {}
    for n in nearest:
        for plan in leaves[n]:
            seen.setdefault((plan.solver, plan.config), {})[n] = plan
    guesses = []
    for (solver, config), by_size in seen.items():
        if size in by_size:
            continue
        ends = list(by_size)[:2]
        first, last = by_size[ends[0]], by_size[ends[-1]]
        share = size / ends[0] if len(ends) < 2 else (size - ends[0]) / (ends[1] - ends[0])
        from_ms, from_bytes = first.time_ms, first.workspace
        if len(ends) < 2:
            from_ms, from_bytes = first.time_ms * fixed(first, ends[0]), 0
        time_ms = from_ms + share * (last.time_ms - from_ms)
        if len(ends) < 2 and size > ends[0]:
            time_ms *= LARGER
        workspace = round(from_bytes + share * (last.workspace - from_bytes))
        guesses.append(_Guess(solver, config, max(time_ms, 0.0), max(workspace, 0)))
    front_indices = front((guess.time_ms, guess.workspace) for guess in guesses)
    return [guesses[i] for i in thin(front_indices)]


def _merged(measured: Sequence[tuple[float, int]], guessed: Sequence[tuple[float, int]]) -> list[tuple[float, int]]:
    """The front of measured and guessed points, fastest first; a measured point is preferred to an equal guess."""
    points = [*measured, *(guess for guess in guessed if guess not in measured)]
    return [points[i] for i in front(points)]


def _grouped(sizes: tuple[int, ...], parts: Sequence[Plan]) -> Iterator[tuple[int, Plan, int]]:
    """Runs of equal parts that follow each other: size, plan, count."""
    start = 0
    for index in range(1, len(parts) + 1):
        if index == len(parts) or (sizes[index], parts[index]) != (sizes[start], parts[start]):
            yield sizes[start], parts[start], index - start
            start = index


def division_of(problem: Problem, solver: Split, sizes: tuple[int, ...], parts: Sequence[Plan], sums: int) -> Plan:
    """The plan that cuts ``problem`` into ``sizes``, with a plan for each in ``parts`` and ``sums`` bytes of sums.

    The device's and the host's times are the sums of the parts'.
    """
    grouped = list(_grouped(sizes, parts))
    label = " + ".join(f"{count}x{size}" if count > 1 else str(size) for size, _, count in grouped)
    return Plan(
        problem.key,
        solver.name,
        solver.version,
        Config(sizes=sizes),
        tuple(replace(plan, label=f"{plan.config} @{size}".strip()) for size, plan, _ in grouped),
        tuple(count for _, _, count in grouped),
        time_ms=sum(plan.time_ms for plan in parts),
        host_ms=sum_known(plan.host_ms for plan in parts),
        load=max((plan.load for plan in parts if plan.load is not None), default=None),
        workspace=sums + max((plan.workspace for plan in parts if plan.device == problem.device), default=0),
        label=f"{sum(sizes)} = {label}",
    )


def tensors_of(problem: Problem, tensors: Tensors, part: Part[Any], child: Problem) -> Tensors:
    """Tensors for ``child``, the problem of ``part``: views of the whole's, or new results where sums are apart.

    On another device all are new.
    """
    if child.device != problem.device:
        return Tensors(make_operands(child), make_results(child))
    operands = _views(tensors.operands, problem.operands, part)
    # What is summed up in fp32 does not go where a 16-bit result goes.
    apart = child.out_dtype != problem.out_dtype
    return Tensors(operands, make_results(child) if apart else _views(tensors.results, problem.results, part))


def _views(tensors: tuple[torch.Tensor, ...], roles: tuple[str, ...], part: Part[Any]) -> tuple[torch.Tensor, ...]:
    """Views of what ``part`` uses of the whole's ``tensors``, which have these ``roles``."""
    return tuple(narrow(tensor, part.ranges(role)) for tensor, role in zip(tensors, roles, strict=True))


def sums_apart(problem: Problem, child: Problem) -> int:
    """Bytes of the fp32 sum of parts such as ``child`` that stands beside a 16-bit result."""
    return 0 if child.out_dtype == problem.out_dtype else sum(carved(child.nbytes(role)) for role in problem.results)


def choice_of(plan: Plan) -> Choice:
    """What ``plan`` does, without its times and sizes."""
    return plan.solver, plan.config, tuple(choice_of(child) for child in plan.children)
