"""The search for one problem's plan: leaves, divisions over their fronts, then the finalists whole against torch.

The bound on it: a split may only be cut again at a higher level (so at most two splits are nested), at most 16 points
of a front go up, and sizes descend only while the limit kept something out or smaller parts gain.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch

from tilewise import execute, solvers
from tilewise.plan import Config, Error, Measurement, Plan, format_bytes
from tilewise.planner.estimate import Profile, estimate_ms
from tilewise.planner.measure import Timer, framework_flags, interleaved
from tilewise.planner.operands import make_operands, make_result, narrow
from tilewise.planner.options import NoPlanError, Options
from tilewise.planner.pareto import divide, front, thin
from tilewise.planner.trial import Known, Trial, leaf_plan
from tilewise.planner.verify import error_limit, errors_of
from tilewise.problem import ConvProblem, Part
from tilewise.solvers import Split

__all__ = ["Search", "Store"]

FINALISTS = 3
"""Plans measured whole against the baseline."""
NEAR = 1.15
"""Plans whose estimate is within this of the best are finalists."""
MARGIN = {"cuda": 0.98, "cpu": 0.95}
"""A plan replaces torch's choice below this share of its time: less is within the noise of a median."""
GAIN = 0.97
"""Smaller parts are worth looking at further when their time an image falls below this share of the best."""
HOPELESS = 2.0
"""Sizes stop descending when their time an image is this many times the best."""

Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class Store:
    """Measurements known of each problem; ``load`` brings those of earlier searches when a problem is first met."""

    def __init__(self, load: Callable[[ConvProblem], Known]) -> None:
        self.known: dict[str, Known] = {}
        self._load = load

    def of(self, problem: ConvProblem) -> Known:
        """Measurements of ``problem`` by solver, version and config; grows as candidates are tried."""
        if problem.key not in self.known:
            self.known[problem.key] = self._load(problem)
        return self.known[problem.key]


@dataclass
class Search:
    """Plans one root ``problem``. :meth:`best` gives the plan to use, :meth:`front` the whole front."""

    problem: ConvProblem
    options: Options
    profile: Profile
    store: Store

    def __post_init__(self) -> None:
        self.log: list[Measurement] = []
        self.baseline: Measurement | None = None
        a, b = make_operands(self.problem)
        self.tensors: Tensors = (a, b, make_result(self.problem))
        self.timer = Timer(a.device)

    def best(self) -> Plan:
        """The fastest plan that keeps every constraint, checked against float64 and timed whole against torch.

        Its solver is torch's own where that wins. Raises :class:`NoPlanError` with every candidate's reason.
        """
        with framework_flags(self.problem.precision, self.options.deterministic):
            self._measure_baseline()
            ranked = self._estimated() if self.options.rigor == "estimate" else self._measured()
            return self._choose(ranked)

    def front(self) -> tuple[Plan, ...]:
        """Plans of the time/workspace front, fastest first; times of divisions are their parts' sums."""
        with framework_flags(self.problem.precision, self.options.deterministic):
            self._measure_baseline()
            plans = self._measured()
        if self.baseline_allowed and self.baseline is not None:
            plans.append(leaf_plan(self.problem, self.baseline))
        kept = front((plan.time_ms, plan.workspace) for plan in plans)
        return tuple(plans[i] for i in thin(kept))

    def _measure_baseline(self) -> None:
        """Time torch's choice in its steady state; its benchmark mode has run by then."""
        solver = solvers.baseline()
        reasons = solver.why_not(self.problem)
        if reasons:
            self.log.append(Measurement(solver.name, solver.version, Config(), reason="; ".join(reasons)))
            return
        known = self.store.of(self.problem)
        key = (solver.name, solver.version, Config())
        found = known.get(key)
        if found is None:
            trial = self._trial(self.problem, self.tensors, known)
            found = trial.measure(solver, Config())
            known[key] = found
        self.log.append(found)
        self.baseline = None if found.reason else found

    @property
    def baseline_allowed(self) -> bool:
        """Whether torch's choice keeps the limit and the determinism asked for."""
        if self.baseline is None:
            return False
        limit = self.options.workspace
        return limit is None or (self.baseline.workspace or 0) <= limit

    def _trial(self, problem: ConvProblem, tensors: Tensors, known: Known, *, root: bool = True) -> Trial:
        return Trial(problem, tensors, self.options, self.profile, self.timer, known, is_root=root)

    def _measured(self) -> list[Plan]:
        """Leaves and divisions, best first by measured or summed time."""
        best_ms = self.baseline.time_ms if self.baseline is not None else None
        trial = self._trial(self.problem, self.tensors, self.store.of(self.problem))
        trial.best_ms = best_ms if best_ms is not None else math.inf
        leaves = self._usable(trial)
        plans = [leaf_plan(self.problem, m) for m in leaves]
        bound = min([p.time_ms for p in plans] + [trial.best_ms])
        for solver in solvers.all_solvers():
            if isinstance(solver, Split):
                reasons = solver.why_not(self.problem)
                if self.options.batch_sizes == "undivided":
                    reasons = reasons or ["batch_sizes=undivided"]
                if reasons:
                    self.log.append(Measurement(solver.name, solver.version, Config(), reason="; ".join(reasons)))
                    continue
                plans += self._divisions(solver, leaves, trial.blocked, bound)
        return sorted(plans, key=lambda plan: plan.time_ms)

    def _usable(self, trial: Trial) -> list[Measurement]:
        found = trial.run()
        self.log += found if trial.is_root else []
        return [m for m in found if not m.reason and m.time_ms is not None]

    def _divisions(self, solver: Split, leaves: list[Measurement], blocked: bool, bound_ms: float) -> list[Plan]:
        """Plans that cut the problem, from the fronts of its parts; whole leaves are not among the parts."""
        whole = self.problem.extent(solver.axis)
        best_rate = bound_ms / whole
        fronts: dict[int, list[Plan]] = {}
        patient = self.options.rigor == "patient"
        worse = 0
        for size in self._sizes(solver):
            if not blocked and worse and not patient:
                break
            child = solver.child(self.problem, size)
            trial = self._trial(child, self._part_tensors(solver, size), self.store.of(child), root=False)
            trial.best_ms = best_rate * size * HOPELESS if not patient else math.inf
            usable = self._usable(trial)
            kept = front((m.time_ms or 0.0, m.workspace or 0) for m in usable)
            fronts[size] = [leaf_plan(child, usable[i]) for i in thin(kept)]
            blocked = trial.blocked
            rate = min((p.time_ms for p in fronts[size]), default=math.inf) / size
            worse = 0 if rate < GAIN * best_rate else worse + 1
            if math.isfinite(rate) and rate > HOPELESS * best_rate and not patient:
                break
            best_rate = min(best_rate, rate)
        points = {size: [(p.time_ms, p.workspace) for p in plans] for size, plans in fronts.items() if plans}
        found = divide(whole, points, self.options.workspace)
        return [self._division_plan(solver, d.sizes, [fronts[s][i] for s, i in zip(d.sizes, d.points, strict=True)])
                for d in found]  # fmt: skip

    def _sizes(self, solver: Split) -> Iterator[int]:
        """Sizes of the policy, descending; under ``all`` the powers of two come first and bound the rest."""
        policy = self.options.batch_sizes
        sizes = list(solver.sizes(self.problem, policy))
        if policy == "all" and self.options.rigor != "patient":
            firsts = [s for s in sizes if s & (s - 1) == 0]
            yield from firsts
            yield from (s for s in sizes if s & (s - 1))
            return
        yield from sizes

    def _part_tensors(self, solver: Split, size: int) -> Tensors:
        whole = self.problem.extent(solver.axis)
        part = self._parts(solver, (size, whole - size))[0]
        a, b = (narrow(t, part.ranges(role)) for t, role in zip(self.tensors, self.problem.operands, strict=False))
        child = solver.child(self.problem, size)
        if part.ranges(self.problem.result):
            return a, b, narrow(self.tensors[2], part.ranges(self.problem.result))
        return a, b, make_result(child)

    def _parts(self, solver: Split, sizes: tuple[int, ...]) -> tuple[Part, ...]:
        return solver.children(self.problem, Config(sizes=tuple(s for s in sizes if s)))

    def _division_plan(self, solver: Split, sizes: tuple[int, ...], parts: list[Plan]) -> Plan:
        children: list[Plan] = []
        counts: list[int] = []
        for plan in parts:
            if children and children[-1] == plan:
                counts[-1] += 1
            else:
                children.append(plan)
                counts.append(1)
        runs = _runs(sizes)
        whole = self.problem.extent(solver.axis)
        label = f"{whole} = " + " + ".join(f"{n}x{s}" if n > 1 else str(s) for s, n in runs)
        extra = self._sum_bytes(sizes)
        return Plan(
            self.problem.key,
            solver.name,
            solver.version,
            Config(sizes=sizes),
            tuple(replace(c, label=f"{c.config} @{_size_of(c, runs, children, counts, i)}".strip())
                  for i, c in enumerate(children)),
            tuple(counts),
            time_ms=sum(p.time_ms for p in parts),
            workspace=extra + max(p.workspace for p in parts),
            label=label,
        )  # fmt: skip

    def _sum_bytes(self, sizes: tuple[int, ...]) -> int:
        """The fp32 sum beside a 16-bit result."""
        role = self.problem.result
        child = self.problem.split("batch", sizes)[0].problem
        if child is None or child.out_dtype == self.problem.out_dtype:
            return 0
        return child.nbytes(role)

    def _estimated(self) -> list[Plan]:
        """Leaves by roofline alone; only the winner is run."""
        plans = []
        limit = self.options.workspace
        for solver in solvers.all_solvers():
            reasons = solver.why_not(self.problem)
            if isinstance(solver, Split) or solver.baseline or reasons:
                if reasons:
                    self.log.append(Measurement(solver.name, solver.version, Config(), reason="; ".join(reasons)))
                continue
            for config, workspace in solver.offers(self.problem, limit):
                needed = workspace + solver.hidden_workspace(self.problem, config)
                if limit is not None and needed > limit:
                    text = f"needs {format_bytes(needed)} of workspace, the limit is {format_bytes(limit)}"
                    self.log.append(Measurement(solver.name, solver.version, config, workspace=needed, reason=text))
                    continue
                time_ms = estimate_ms(self.problem, solver.cost(self.problem, config), self.profile)
                plan = Plan(self.problem.key, solver.name, solver.version, config, time_ms=time_ms, workspace=needed)
                plans.append(plan)
        return sorted(plans, key=lambda plan: plan.time_ms)

    def _choose(self, ranked: list[Plan]) -> Plan:
        """Time the finalists whole beside torch and take the fastest that is right."""
        limit = self.options.workspace
        ranked = [p for p in ranked if limit is None or p.workspace <= limit]
        while ranked:
            finalists = self._finalists(ranked)
            timed = self._time_whole(finalists)
            for plan in sorted(timed, key=lambda p: p.time_ms):
                if self._keeps_baseline(plan):
                    return self._baseline_plan()
                checked = self._verified(plan)
                if checked is not None:
                    self._note(checked)
                    return checked
            ranked = ranked[len(finalists) :]
        if self.baseline_allowed:
            return self._baseline_plan()
        raise NoPlanError(_no_plan_text(self.problem, self.options, self.log))

    def _finalists(self, ranked: list[Plan]) -> list[Plan]:
        if self.options.rigor == "estimate":
            return ranked[:1]
        best = ranked[0].time_ms
        return [p for p in ranked[:FINALISTS] if p.time_ms <= NEAR * best]

    def _time_whole(self, plans: list[Plan]) -> list[Plan]:
        """The plans with their own measured times; a plan that turns out to take too much memory is dropped."""
        a, b, out = self.tensors
        calls, kept = [], []
        for plan in plans:
            try:
                bound = execute.bind(plan, self.problem, a, b, out)
                call = functools.partial(bound, a, b, None, out)
                workspace = self._trial(self.problem, self.tensors, {}).peak(call, bound.workspace, False)
            except RuntimeError as error:
                self.log.append(Measurement(plan.solver, plan.version, plan.config, reason=str(error)[:300]))
                continue
            limit = self.options.workspace
            if limit is not None and workspace > limit:
                text = f"took {format_bytes(workspace)} of workspace when run whole, the limit is {format_bytes(limit)}"
                self.log.append(Measurement(plan.solver, plan.version, plan.config, workspace=workspace, reason=text))
                continue
            # Timed as a layer runs it: like torch, each call allocates its result.
            calls.append(functools.partial(bound, a, b))
            kept.append(replace(plan, workspace=workspace))
        if not kept:
            return []
        if self.baseline is not None:
            solver = solvers.baseline()
            base = execute.bind(leaf_plan(self.problem, self.baseline), self.problem, a, b)
            calls.append(functools.partial(base, a, b))
            assert solver.own_output
        times = interleaved(calls, a.device, budget_ms=60.0 if a.is_cuda else 1500.0, least=5, most=31)
        if self.baseline is not None:
            self.baseline = replace(self.baseline, time_ms=times[-1])
            self.store.of(self.problem)[(self.baseline.solver, self.baseline.version, Config())] = self.baseline
        return [replace(plan, time_ms=time_ms) for plan, time_ms in zip(kept, times, strict=False)]

    def _keeps_baseline(self, plan: Plan) -> bool:
        if not self.baseline_allowed or self.baseline is None or self.baseline.time_ms is None:
            return False
        if self.options.deterministic and not solvers.baseline().is_deterministic(self.problem, Config()):
            return False
        return plan.time_ms > MARGIN[self.problem.device_type] * self.baseline.time_ms

    def _baseline_plan(self) -> Plan:
        assert self.baseline is not None
        return leaf_plan(self.problem, self.baseline)

    def _verified(self, plan: Plan) -> Plan | None:
        """The plan with its error, or ``None`` when it is too far from float64: then its leaves are looked at."""
        error = self._errors(plan, self.problem)
        limit_l2, limit_spread = error_limit(self.problem, self.options.error_limit, self._own_errors)
        if error.l2 <= limit_l2 and (not self.options.strict or error.spread <= limit_spread):
            return replace(plan, error=error)
        text = f"error {error.l2:.1e} (spread {error.spread:.1e}) over the limit {limit_l2:.1e}"
        self.log.append(Measurement(plan.solver, plan.version, plan.config, plan.time_ms, plan.workspace, error, text))
        if plan.leaf:
            known = self.store.of(self.problem)
            known[(plan.solver, plan.version, plan.config)] = self.log[-1]
        return None

    def _own_errors(self) -> Error:
        if self.baseline is None:
            return Error(0.0, 0.0)
        return self._errors(leaf_plan(self.problem, self.baseline), self.problem)

    def _errors(self, plan: Plan, problem: ConvProblem) -> Error:
        def compute(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
            return execute.bind(plan, problem, a, b, out)(a, b, None, out)

        return errors_of(problem, compute, plan)

    def _note(self, plan: Plan) -> None:
        base = self.baseline.time_ms if self.baseline is not None else None
        m = Measurement(plan.solver, plan.version, plan.config, plan.time_ms, plan.workspace, plan.error, "", base)
        self.log.append(m)
        if plan.leaf:
            self.store.of(self.problem)[(plan.solver, plan.version, plan.config)] = m


def _runs(sizes: tuple[int, ...]) -> list[tuple[int, int]]:
    runs: list[tuple[int, int]] = []
    for size in sizes:
        if runs and runs[-1][0] == size:
            runs[-1] = (size, runs[-1][1] + 1)
        else:
            runs.append((size, 1))
    return runs


def _size_of(plan: Plan, runs: list[tuple[int, int]], children: list[Plan], counts: list[int], index: int) -> int:
    """Size of the parts that child ``index`` stands for."""
    start = sum(counts[:index])
    for size, count in runs:
        if start < count:
            return size
        start -= count
    raise IndexError(f"{plan.solver}: child {index} of {len(children)} has no parts")


def _no_plan_text(problem: ConvProblem, options: Options, log: list[Measurement]) -> str:
    limit = "no workspace limit" if options.workspace is None else f"{format_bytes(options.workspace)} of workspace"
    lines = [f"no plan for {problem.key} under {limit}:"]
    lines += [f"  {m.solver} {m.config}: {m.reason}" for m in log if m.reason]
    return "\n".join(lines)
