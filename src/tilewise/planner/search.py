"""The search for one problem's plan: leaves, divisions over their fronts, then the finalists whole against torch.

The bound on it: a split may only be cut again at a higher level (so at most two splits are nested), at most 16 points
of a front go up, and sizes descend only while the limit kept something out or smaller parts gain.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch

from tilewise import execute, solvers
from tilewise.plan import Config, Error, Measurement, Plan, format_bytes
from tilewise.planner.divisions import BATCH_LEVEL, Divisions, part_plans, wrong_part
from tilewise.planner.estimate import Profile, estimate_ms
from tilewise.planner.measure import Timer, framework_flags, interleaved
from tilewise.planner.operands import Tensors, make_operands, make_result
from tilewise.planner.options import NoPlanError, Options
from tilewise.planner.pareto import front, thin
from tilewise.planner.trial import Known, Trial, leaf_plan
from tilewise.planner.verify import error_limit, errors_of
from tilewise.problem import ConvProblem, Pass
from tilewise.solvers import Split

__all__ = ["Search", "Store"]

FINALISTS = 3
"""Plans measured whole against the baseline."""
NEAR = 1.15
"""Plans whose estimate is within this of the best are finalists."""
MOST_NESTED = 2
MARGIN = {"cuda": 0.98, "cpu": 0.95}
"""A plan replaces torch's choice below this share of its time: less is within the noise of a median."""
RETRIES = 8
"""Times a search starts again without a part that turned out to be wrong, at any size."""


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
        self.wrong: dict[tuple[str, Config], str] = {}
        a, b = make_operands(self.problem)
        self.tensors: Tensors = (a, b, make_result(self.problem))
        self.timer = Timer(a.device)

    def best(self) -> Plan:
        """The fastest plan that keeps every constraint, checked against float64 and timed whole against torch.

        Its solver is torch's own where that wins. Raises :class:`NoPlanError` with every candidate's reason.
        """
        with framework_flags(self.problem.precision, self.options.deterministic):
            self._measure_baseline()
            for _ in range(RETRIES):
                ranked = self._estimated() if self.options.rigor == "estimate" else self._measured()
                with contextlib.suppress(_WrongPart):
                    return self._choose(ranked)
            raise NoPlanError(_no_plan_text(self.problem, self.options, self.log))

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
            trial = self._trial(self.problem, self.tensors)
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

    def _trial(self, problem: ConvProblem, tensors: Tensors, *, root: bool = True) -> Trial:
        known = self.store.of(problem)
        return Trial(problem, tensors, self.options, self.profile, self.timer, known, self.wrong, is_root=root)

    def _measured(self) -> list[Plan]:
        """Leaves and divisions, best first by measured or summed time."""
        trial = self._trial(self.problem, self.tensors)
        if self.baseline_allowed and self.baseline is not None and self.baseline.time_ms is not None:
            trial.best_ms = self.baseline.time_ms
        plans = [leaf_plan(self.problem, m) for m in self._usable(trial)]
        plans += self._cut(self.problem, self.tensors, trial, -1)
        return sorted(plans, key=lambda plan: plan.time_ms)

    def _cut(self, problem: ConvProblem, tensors: Tensors, trial: Trial, level: int, depth: int = 0) -> list[Plan]:
        """Plans that cut ``problem`` by splits of a higher level, each axis once and at most two nested."""
        plans: list[Plan] = []
        for solver in solvers.all_solvers():
            if not isinstance(solver, Split) or solver.level <= level or depth == MOST_NESTED:
                continue
            reasons = solver.why_not(problem)
            if self.options.batch_sizes == "undivided":
                reasons = reasons or ["batch_sizes=undivided"]
            if solver.level > BATCH_LEVEL and self.options.rigor != "patient" and not trial.blocked:
                reasons = reasons or ["not tried: the workspace limit kept nothing out"]
            if reasons:
                if depth == 0:
                    self.log.append(Measurement(solver.name, solver.version, Config(), reason="; ".join(reasons)))
                continue
            divisions = Divisions(
                solver,
                problem,
                tensors,
                self.options,
                functools.partial(self._trial, root=False),
                trial.known,
                trial.best_ms,
                trial.blocked,
                functools.partial(self._cut, level=solver.level, depth=depth + 1),
            )
            plans += divisions.plans()
        return plans

    def _usable(self, trial: Trial) -> list[Measurement]:
        found = trial.run()
        self.log += found if trial.is_root else []
        return [m for m in found if not m.reason and m.time_ms is not None]

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
        calls: list[Callable[[], object]] = []
        kept: list[Plan] = []
        for plan in plans:
            try:
                bound = execute.bind(plan, self.problem, a, b, out)
                call = functools.partial(bound, a, b, None, out)
                workspace = self._trial(self.problem, self.tensors).peak(call, bound.workspace, False)
            except RuntimeError as error:
                self.log.append(Measurement(plan.solver, plan.version, plan.config, reason=str(error)[:300]))
                continue
            limit = self.options.workspace
            if limit is not None and workspace > limit:
                text = f"took {format_bytes(workspace)} of workspace when run whole, the limit is {format_bytes(limit)}"
                self.log.append(Measurement(plan.solver, plan.version, plan.config, workspace=workspace, reason=text))
                continue
            # Timed as a layer runs it: like torch, each call allocates its result.
            calls.append(functools.partial(bound, a, b, self._bias()))
            kept.append(replace(plan, workspace=workspace))
        if not kept:
            return []
        if self.baseline is not None:
            calls.append(self._framework_call())
        times = interleaved(calls, a.device, budget_ms=40.0 if a.is_cuda else 1500.0, least=5, most=31)
        if self.baseline is not None:
            self.baseline = replace(self.baseline, time_ms=times[-1])
            self.store.of(self.problem)[(self.baseline.solver, self.baseline.version, Config())] = self.baseline
        return [replace(plan, time_ms=time_ms) for plan, time_ms in zip(kept, times, strict=False)]

    def _bias(self) -> torch.Tensor | None:
        if not self.problem.bias:
            return None
        a = self.tensors[0]
        return torch.zeros(self.problem.shape(self.problem.result)[1], dtype=a.dtype, device=a.device)

    def _framework_call(self) -> Callable[[], object]:
        """torch's operator, with the layer's bias where it has one."""
        a, b, _ = self.tensors
        p, bias = self.problem, self._bias()
        if bias is None:
            assert self.baseline is not None
            return functools.partial(execute.bind(leaf_plan(p, self.baseline), p, a, b), a, b)
        transposed = p.pass_ is Pass.DGRAD
        extra = [x.size + x.before + x.after - (x.out - 1) * x.stride - x.reach for x in p.axes]
        strides, dilations = [x.stride for x in p.axes], [x.dilation for x in p.axes]
        padding, output_padding = [x.before for x in p.axes], extra if transposed else [0] * p.dims
        return functools.partial(
            torch.convolution, a, b, bias, strides, padding, dilations, transposed, output_padding, p.groups
        )

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
            self.store.of(self.problem)[(plan.solver, plan.version, plan.config)] = self.log[-1]
            self.wrong[plan.solver, plan.config] = text
        else:
            self._look_for_wrong_parts(plan)
        return None

    def _look_for_wrong_parts(self, plan: Plan) -> None:
        """Remember parts that are wrong by themselves; then the division must be found anew without them."""
        solver = solvers.get(plan.solver)
        assert isinstance(solver, Split)
        found = False
        for problem, child in _leaf_parts(plan, self.problem, solver):
            error = self._errors(child, problem)
            limit_l2, _ = error_limit(problem, self.options.error_limit, self._own_errors)
            if not error.l2 <= limit_l2:
                text = f"error {error.l2:.1e} (spread {error.spread:.1e}) over the limit {limit_l2:.1e}"
                key = (child.solver, child.version, child.config)
                self.store.of(problem)[key] = wrong_part(text, replace(child, error=error))
                self.wrong[child.solver, child.config] = f"{text}, as a part"
                found = True
        if found:
            raise _WrongPart

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


def _leaf_parts(plan: Plan, problem: ConvProblem, solver: Split) -> Iterator[tuple[ConvProblem, Plan]]:
    for part, child in part_plans(plan, problem, solver):
        if child.leaf:
            yield part, child
        else:
            inner = solvers.get(child.solver)
            assert isinstance(inner, Split)
            yield from _leaf_parts(child, part, inner)


class _WrongPart(Exception):
    """A part of a division was wrong: the search starts again without it."""


def _no_plan_text(problem: ConvProblem, options: Options, log: list[Measurement]) -> str:
    limit = "no workspace limit" if options.workspace is None else f"{format_bytes(options.workspace)} of workspace"
    lines = [f"no plan for {problem.key} under {limit}:"]
    lines += [f"  {m.solver} {m.config}: {m.reason}" for m in log if m.reason]
    return "\n".join(lines)
