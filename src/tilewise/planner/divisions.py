"""Plans that cut a problem along one axis: sizes are tried in falling order, then composed by dynamic programming.

A part's candidates are those that gained at the size before, or that only now fit the limit: planning stays short
because an engine that lost at 128 images is not run again at 64. Sizes between powers of two are guessed from their
neighbours, and only those that a division wants to use are measured, until it wants no other.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from tilewise.execute import carved
from tilewise.plan import Config, Measurement, Plan, format_bytes
from tilewise.planner.operands import Tensors, make_result, narrow
from tilewise.planner.options import Options
from tilewise.planner.pareto import divide, front, thin
from tilewise.planner.rates import Rates
from tilewise.planner.trial import Trial, leaf_plan
from tilewise.problem import ConvProblem, Part
from tilewise.solvers import Split

__all__ = [
    "BATCH_LEVEL",
    "GAIN",
    "HOPELESS",
    "Choice",
    "Deeper",
    "Divisions",
    "TrialOf",
    "choice_of",
    "division_of",
    "leaf_parts",
    "sums_apart",
    "tensors_of",
]

GAIN = 0.97
"""Smaller parts are looked at further when their time an image falls below this share of the best."""
BATCH_LEVEL = 2
HOPELESS = 2.0
"""Sizes stop falling when their time an image is this many times the best."""
LARGER = 1 - 1e-6
"""A size above the only one measured takes no more time an image: of equal guesses it is the one to measure."""
MOST_BETWEEN = 24
"""Sizes between powers of two that are measured, save by ``patient``."""

Choice = tuple[str, Config, tuple["Choice", ...]]
"""What a plan does: solver, config and the same of its parts."""

TrialOf = Callable[[ConvProblem, Tensors, Options], Trial]
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
    """Index and count: of the sizes between, one in so many is tried, beginning with that one."""
    fronts: dict[int, list[Plan]] = field(default_factory=dict)
    leaves: dict[int, list[Plan]] = field(default_factory=dict)
    """All leaves that were measured, on the front or not."""
    lost: dict[int, list[Measurement]] = field(default_factory=dict)
    estimates: dict[int, dict[tuple[str, Config], float]] = field(default_factory=dict)
    """Of all leaves that were offered, over the limit or not."""

    def __post_init__(self) -> None:
        self.problem, self.tensors, self.options = self.trial.problem, self.trial.tensors, self.trial.options
        self.estimates[self._whole] = self.trial.estimates
        usable = [m for m in self.trial.found if not m.reason and m.time_ms is not None]
        self.leaves[self._whole] = [leaf_plan(self.problem, m) for m in usable]

    def plans(self) -> list[Plan]:
        """The front of divisions, fastest first; times are sums of their parts'."""
        sums, limit = self.sum_bytes(), self.options.workspace
        if limit is not None and limit < sums:
            return []
        if limit is not None:
            self.options = replace(self.options, workspace=limit - sums)
        self._try_sizes()
        points = {size: [(p.time_ms, p.workspace) for p in plans] for size, plans in self.fronts.items() if plans}
        found = divide(self._whole, points, self.options.workspace)
        picked = ([self.fronts[s][i] for s, i in zip(d.sizes, d.points, strict=True)] for d in found)
        return [
            division_of(self.problem, self.solver, d.sizes, plans, sums) for d, plans in zip(found, picked, strict=True)
        ]

    def why_none(self) -> str:
        """Why :meth:`plans` is empty."""
        if not self.fronts:
            sums = self.sum_bytes()
            return f"sums of parts in fp32 take {format_bytes(sums)}" if sums else "no size of parts to try"
        size = min(self.lost, key=lambda size: (bool(self.fronts[size]), size))
        reasons = (f"{m.solver} {m.config}".strip() + f": {m.reason}" for m in self.lost[size])
        return f"no division could be computed; parts of {size}: {'; '.join(reasons)}"

    @property
    def _whole(self) -> int:
        return self.problem.extent(self.solver.axis_of(self.problem))

    def _try_sizes(self) -> None:
        policy = self.options.batch_sizes
        rate = self.trial.best_ms / self._whole
        seen, blocked, worse = Rates(), self.trial.blocked, 0
        seen.note(self.trial.took_ms(), 1, self._whole)
        found, before = 0.0, self._whole
        for size in self.solver.sizes(self.problem, policy):
            promising = self.for_front or any(estimate < rate * before for estimate in blocked.values())
            if not self.exhaustive and not promising and (worse or found > HOPELESS * rate):
                break  # smaller parts are no faster, and what the limit keeps out would not be either
            trial = self._tried(size, rate, None if self.exhaustive else seen, self._only())
            found = min((p.time_ms for p in self.fronts[size]), default=math.inf) / size
            worse = 0 if found < GAIN * rate else worse + 1
            rate = min(rate, found)
            seen.note(trial.took_ms(), self._whole / size, size)
            before, blocked = size, trial.blocked
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
        """What the smallest size so far leaves of the whole is made up of smaller ones, fast or not."""
        last = min((size for size, plans in self.fronts.items() if plans), default=self._whole)
        rest = self._whole % last
        only = frozenset((p.solver, p.config) for p in self.fronts.get(last, ()) if p.leaf) or None
        for size in self.solver.sizes(self.problem, self.options.batch_sizes):
            if size <= rest and size not in self.fronts:
                self._tried(size, math.inf, None, only)
                rest %= size if self.fronts[size] else self._whole

    def _only(self) -> frozenset[tuple[str, Config]] | None:
        """Below the batch a cut costs more than it saves, save for what the limit kept out and might gain."""
        if self.solver.level <= BATCH_LEVEL or self.exhaustive:
            return None
        return frozenset(key for key, estimate in self.trial.blocked.items() if estimate < self.trial.best_ms)

    def _try_between(self, sizes: Sequence[int], rate: float) -> None:
        """Measure the sizes that divisions want by what is guessed of them, until they want no more."""
        every = dict.fromkeys([*sizes, *self.fronts])
        guesses = {size: found for size in every if (found := _guesses(size, self.leaves, self._fixed))}
        room = MOST_BETWEEN
        while room:
            measured = {size: [(p.time_ms, p.workspace) for p in plans] for size, plans in self.fronts.items()}
            guessed = {size: [(guess.time_ms, guess.workspace) for guess in found] for size, found in guesses.items()}
            points = {size: _merged(measured.get(size, []), guessed.get(size, [])) for size in every}
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
        """Measure what was guessed of a part, beside what was measured there before."""
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
        own = self.estimates[size].get(key, 0.0)
        others = [n for n, estimates in self.estimates.items() if key in estimates and n != size]
        if not others or own <= 0.0:
            return 0.0
        other = min(others, key=lambda n: abs(n - size))
        fixed = (other * own - size * self.estimates[other][key]) / (other - size)
        return min(max(fixed / own, 0.0), 1.0)

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
        trial.only = only
        if not self.exhaustive and not self.for_front:
            trial.best_ms = rate * size
        if seen is not None:
            trial.prior_ms = seen.at(size, self._whole / size)
        found = trial.run()
        self.estimates[size] = trial.estimates
        self.lost[size] = [m for m in found if m.reason]
        usable = [m for m in found if not m.reason and m.time_ms is not None]
        plans = [leaf_plan(child, m) for m in usable]
        self.leaves[size] = plans
        if not whole:
            plans = plans + self.deeper(trial)
        kept = front((plan.time_ms, plan.workspace) for plan in plans)
        self.fronts[size] = [plans[i] for i in thin(kept)]
        return trial

    def _part_tensors(self, size: int) -> Tensors:
        sizes = tuple(s for s in (size, self._whole - size) if s)
        part = self.solver.children(self.problem, Config(sizes=sizes))[0]
        return tensors_of(self.problem, self.tensors, part, self.solver.child(self.problem, size))

    def sum_bytes(self) -> int:
        """Bytes of the fp32 sum that stands beside a 16-bit result."""
        sizes = self.solver.sizes(self.problem, self.options.batch_sizes)
        child = self.solver.child(self.problem, sizes[0]) if sizes else self.problem
        return sums_apart(self.problem, child)


@dataclass(frozen=True, slots=True)
class _Guess:
    """What a leaf is expected to take at a size that was not measured."""

    solver: str
    config: Config
    time_ms: float
    workspace: int


def _guesses(size: int, leaves: Mapping[int, list[Plan]], fixed: Callable[[Plan, int], float]) -> list[_Guess]:
    """Leaves that were not measured at ``size``, on the line through two sizes at which they were, or through one and
    what is ``fixed`` of its time.

    All that were measured anywhere: one that loses at both may still be the best between them, where it just fits. Of
    the sizes the power of two below counts first, then the one above, then the nearest.
    """
    below = 1 << (size.bit_length() - 1)
    nearest = sorted(leaves, key=lambda n: (n != below, n != 2 * below, n != below // 2, max(n, size) / min(n, size)))
    seen: dict[tuple[str, Config], dict[int, Plan]] = {}
    for n in nearest:
        for plan in leaves[n]:
            seen.setdefault((plan.solver, plan.config), {})[n] = plan
    made = []
    for (solver, config), at in seen.items():
        if size in at:
            continue
        ends = list(at)[:2]
        first, last = at[ends[0]], at[ends[-1]]
        share = size / ends[0] if len(ends) < 2 else (size - ends[0]) / (ends[1] - ends[0])
        from_ms, from_bytes = first.time_ms, first.workspace
        if len(ends) < 2:
            from_ms, from_bytes = first.time_ms * fixed(first, ends[0]), 0
        time_ms = from_ms + share * (last.time_ms - from_ms)
        if len(ends) < 2 and size > ends[0]:
            time_ms *= LARGER
        workspace = round(from_bytes + share * (last.workspace - from_bytes))
        made.append(_Guess(solver, config, max(time_ms, 0.0), max(workspace, 0)))
    kept = front((guess.time_ms, guess.workspace) for guess in made)
    return [made[i] for i in thin(kept)]


def _merged(measured: Sequence[tuple[float, int]], guessed: Sequence[tuple[float, int]]) -> list[tuple[float, int]]:
    """The front of both, fastest first; of equal ones what was measured."""
    points = [*measured, *(guess for guess in guessed if guess not in measured)]
    return [points[i] for i in front(points)]


def _grouped(sizes: tuple[int, ...], parts: Sequence[Plan]) -> Iterator[tuple[int, Plan, int]]:
    """Runs of equal parts: size, plan, count."""
    start = 0
    for index in range(1, len(parts) + 1):
        if index == len(parts) or (sizes[index], parts[index]) != (sizes[start], parts[start]):
            yield sizes[start], parts[start], index - start
            start = index


def division_of(problem: ConvProblem, solver: Split, sizes: tuple[int, ...], parts: Sequence[Plan], sums: int) -> Plan:
    """The plan that computes each part by its own of ``parts``, beside ``sums`` bytes for their sum."""
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
        workspace=sums + max(plan.workspace for plan in parts),
        label=f"{sum(sizes)} = {label}",
    )


def tensors_of(problem: ConvProblem, tensors: Tensors, part: Part, child: ConvProblem) -> Tensors:
    """Tensors for ``child``, the problem of ``part``: views of the whole's."""
    first, second = problem.operands
    a, b, out = tensors
    # What is summed up in fp32 does not go where a 16-bit result goes.
    apart = child.out_dtype != problem.out_dtype
    return (
        narrow(a, part.ranges(first)),
        narrow(b, part.ranges(second)),
        make_result(child) if apart else narrow(out, part.ranges(problem.result)),
    )


def sums_apart(problem: ConvProblem, child: ConvProblem) -> int:
    """Bytes of the fp32 sum of parts such as ``child`` that stands beside a 16-bit result."""
    return 0 if child.out_dtype == problem.out_dtype else carved(child.nbytes(problem.result))


def choice_of(plan: Plan) -> Choice:
    """What ``plan`` does, whatever it takes."""
    return plan.solver, plan.config, tuple(choice_of(child) for child in plan.children)


def leaf_parts(plan: Plan) -> Iterator[tuple[ConvProblem, Plan]]:
    """Every distinct leaf of a division with its problem."""
    for child in plan.children:
        if child.leaf:
            yield ConvProblem.from_key(child.problem), child
        else:
            yield from leaf_parts(child)
