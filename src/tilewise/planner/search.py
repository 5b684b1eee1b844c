"""The search for one problem's plan: leaves, divisions over their fronts, then the finalists whole against torch.

The bound on it: a split may only be cut again at a higher level (so at most two splits are nested), at most 16 points
of a front go up, and sizes descend only while the limit kept something out or smaller parts gain.
"""

from __future__ import annotations

import contextlib
import functools
import math
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch

from tilewise import execute, solvers
from tilewise.device import torch_device
from tilewise.plan import Config, Error, Measurement, Plan, format_bytes
from tilewise.planner import replacing
from tilewise.planner.divisions import BATCH_LEVEL, Choice, Divisions, choice_of, leaf_parts
from tilewise.planner.estimate import Profile, estimate_ms
from tilewise.planner.gate import MOST_NESTED
from tilewise.planner.measure import Timer, check_peak_is_known, peak_is_known
from tilewise.planner.operands import Tensors, make_bias, make_operands, make_result
from tilewise.planner.options import EXCLUDED, NoPlanError, Options, no_plan_text
from tilewise.planner.pareto import front, thin
from tilewise.planner.partitions import Partitions, told_as
from tilewise.planner.rates import Key
from tilewise.planner.replacing import rounds
from tilewise.planner.store import Store
from tilewise.planner.tilings import Tilings
from tilewise.planner.trial import UNKNOWN, OverLimit, Trial, first_line, leaf_plan
from tilewise.planner.verify import Compute, error_limit, errors_of
from tilewise.problem import ConvProblem
from tilewise.solvers import Cost, Split
from tilewise.torch_state import framework_flags, undisturbed

__all__ = ["Search"]

FINALISTS = 3
"""Plans measured whole against the baseline."""
NEAR = 1.15
"""Plans whose estimate is within this of the best are finalists."""
MOST_WITHIN_LESS = 2
"""Configs of each solver that are measured under each of the limits below."""
LEAST_LIMIT = 1 << 20
"""A front is looked for under limits of half, a quarter and so on of its fastest plan's workspace, down to this."""
BEHIND = {"cuda": 2.0, "cpu": 1.3}
"""Plans whose estimate is this many times torch's time are not run whole. A GPU's small parts are overestimated."""


@dataclass
class Search:
    """Plans one root ``problem``. :meth:`best` gives the plan to use, :meth:`front` the whole front."""

    problem: ConvProblem
    options: Options
    profile: Profile
    store: Store
    also: tuple[Plan, ...] = ()
    """Divisions that an earlier search found for a front, which may have tried more sizes."""

    def __post_init__(self) -> None:
        self.log: list[Measurement] = []
        self.baseline: Measurement | None = None
        self.wrong: dict[tuple[str, Config], str] = {}
        """Leaves that compute something else: out of this search at every size."""
        self.dropped: dict[Choice, str] = {}
        """Plans that failed when run whole."""
        self.shares: dict[Choice, list[float]] = {}
        """Plans' times in torch's of the same round, the least first."""
        self.timer = Timer(torch_device(self.problem.device))  # before anything is allocated: refuses in a capture
        if self.options.workspace is not None:
            check_peak_is_known(self.timer.device)
        a, b = make_operands(self.problem)
        self.tensors: Tensors = (a, b, make_result(self.problem))
        self.bias = make_bias(self.problem)
        self._for_front = False
        self._share = (0, 1)

    def best(self) -> Plan:
        """The fastest plan that keeps every constraint, checked against float64 and timed whole against torch.

        Its solver is torch's own where that wins. Raises :class:`NoPlanError` with every candidate's reason.
        """
        with self._undisturbed():
            self._measure_baseline()
            while True:  # ends: each turn but the last adds to what is wrong or dropped
                with contextlib.suppress(_Dropped):
                    return self._choose(self._ranked())

    def front(self) -> tuple[Plan, ...]:
        """Checked plans of the time/workspace front, fastest first; times of divisions are their parts' sums."""
        self._for_front = True
        with self._undisturbed():
            self._measure_baseline()
            while True:  # ends: as above
                ranked = self._ranked()
                if self.baseline_allowed:
                    ranked.append(self._baseline_plan())
                kept = [ranked[i] for i in thin(front((plan.time_ms, plan.workspace) for plan in ranked))]
                checked = [plan if self._is_baseline(plan) else self._verified(self._as_run(plan)) for plan in kept]
                right = tuple(plan for plan in checked if plan is not None)
                if len(right) == len(kept):
                    return tuple(right[i] for i in front((plan.time_ms, plan.workspace) for plan in right))

    def survey(self) -> None:
        """Fill :attr:`log` with what every solver could do, without choosing."""
        with self._undisturbed():
            self._measure_baseline()
            self._ranked()

    def confirm(self, plan: Plan, *, by_peak: bool = True) -> tuple[Plan, str]:
        """A plan found elsewhere with its workspace and error here, and why it may not be used, empty when it may.

        It is run whole and checked like one found here, not timed. Unless ``by_peak`` its workspace is what it is bound
        to.
        """
        own, limit = solvers.baseline(), self.options.workspace
        with self._undisturbed():
            if not own.why_not(self.problem):  # its errors are what others' are held to, save in fp32
                self.baseline = Measurement(own.name, own.version, Config())
            try:
                workspace = execute.bind(plan, self.problem, *self.tensors).workspace
                if limit is not None and workspace > limit:
                    raise OverLimit(workspace, limit)
                if by_peak:
                    _, workspace = self._run_whole(plan)
            except OverLimit as over:
                return plan, str(over)
            except Exception as error:  # as in a trial
                return plan, f"raised {type(error).__name__} when run whole: {first_line(error)}"
            plan = replace(plan, workspace=workspace)
            reason = self._over_limit(workspace)
            if reason or (self._is_baseline(plan) and self.options.error_limit is None):
                return plan, reason
            distance, reason = self._checked(plan, self.problem)
            return replace(plan, error=distance), reason

    def measure_share(self, index: int, count: int) -> None:
        """As :meth:`survey`, but of the sizes between powers of two only one in ``count``, from ``index`` on."""
        self._share = index, count
        self.survey()

    @contextlib.contextmanager
    def _undisturbed(self) -> Iterator[None]:
        """torch's flags as the problem wants them, and nothing of the caller's."""
        problem, deterministic = self.problem, self.options.deterministic
        with framework_flags(problem.device_type, problem.precision, deterministic=deterministic), undisturbed():
            yield

    def _measure_baseline(self) -> None:
        """Time torch's choice in its steady state; its benchmark mode has run by then."""
        solver = solvers.baseline()
        reasons = solver.why_not(self.problem)
        known = self.store.of(self.problem)
        key = (solver.name, solver.version, Config())
        foreign = self._foreign(self.problem)
        if key in foreign:
            del known[key]  # all else is held against it, so that it is measured here
            foreign.remove(key)
        if not reasons and self.options.rigor == "wisdom_only" and key not in known:
            reasons = [UNKNOWN]
        if reasons:
            self.log.append(Measurement(*key, reason="; ".join(reasons)))
            return
        found = known.get(key)
        if found is None:
            outside = replace(self.options, workspace=None)
            found = self._trial(self.problem, self.tensors, outside).measure(solver, Config())
            known[key] = found
        self.baseline = None if found.reason else found
        self.log.append(replace(found, reason=found.reason or self._against_baseline()))

    @property
    def baseline_allowed(self) -> bool:
        """Whether torch's choice may be used: it is not excluded, and keeps limit, determinism and error asked for."""
        return self.baseline is not None and not self._against_baseline()

    def _against_baseline(self) -> str:
        """The constraint that torch's choice breaks; empty when it keeps all."""
        assert self.baseline is not None
        if self.options.excludes(solvers.baseline()):
            return EXCLUDED
        limit, workspace = self.options.workspace, self.baseline.workspace or 0
        if limit is not None and workspace > limit:
            return f"took {format_bytes(workspace)} of workspace when run, the limit is {format_bytes(limit)}"
        if self.options.deterministic and not solvers.baseline().is_deterministic(self.problem, Config()):
            return "is not deterministic"
        if self.options.error_limit is not None:  # only one asked for: else torch's own error is what is wanted
            return self._judge(self.problem, self._own_errors)
        return ""

    def _trial(self, problem: ConvProblem, tensors: Tensors, options: Options, *, root: bool = True) -> Trial:
        return Trial(
            problem,
            tensors,
            options,
            self.profile,
            self.timer,
            self.store.of(problem),
            {**self.wrong, **{key[:2]: reason for key, reason in self.dropped.items()}} if root else self.wrong,
            functools.partial(self._judge, problem),
            is_root=root,
            bias=self.bias if root else None,
            for_front=self._for_front,
            foreign=self._foreign(problem),
        )

    def _foreign(self, problem: ConvProblem) -> set[Key]:
        """What is known of ``problem`` from elsewhere."""
        self.store.of(problem)
        return self.store.foreign[problem.key]

    def _ranked(self) -> list[Plan]:
        """Leaves and divisions, best first by measured, summed or (rigor ``estimate``) estimated time."""
        trial = self._trial(self.problem, self.tensors, self.options)
        allowed = self.baseline_allowed and self.options.rigor != "estimate"
        if self.baseline is not None and self.baseline.time_ms is not None:
            if allowed:
                trial.best_ms = self.baseline.time_ms
            elif self._may_in_parts(self.baseline):
                # In parts it may keep the limit; on a GPU it is never held to one.
                trial.blocked[self.baseline.solver, Config()] = self.baseline.time_ms
        usable = self._usable(trial)
        if self._for_front:
            usable += self._within_less(usable)
        plans = [leaf_plan(self.problem, m) for m in usable]
        plans += map(self._with_bias, self._cut(trial, -1))
        found = {choice_of(plan) for plan in plans}
        plans += [plan for plan in self.also if choice_of(plan) not in found]
        kept = (plan for plan in plans if choice_of(plan) not in self.dropped)
        return sorted(kept, key=lambda plan: plan.time_ms)

    def _may_in_parts(self, baseline: Measurement) -> bool:
        """Whether torch's choice only takes too much workspace on the whole."""
        over = bool(self._over_limit(baseline.workspace or 0)) and self.problem.device_type == "cpu"
        return over and not self.options.excludes(solvers.baseline())

    def _with_bias(self, division: Plan) -> Plan:
        """A division's parts, which were measured without a bias, and the pass that adds one."""
        if not self.problem.bias or execute.adds_bias(division, self.problem):
            return division
        more = estimate_ms(self.problem, Cost(0, 2 * self.problem.nbytes(self.problem.result)), self.profile)
        return replace(division, time_ms=division.time_ms + more)

    def _within_less(self, usable: list[Measurement]) -> list[Measurement]:
        """What solvers offer under lower and lower limits: some block their work to fit one, and only then."""
        if not usable or not peak_is_known(self.timer.device):
            return []
        limit = min(usable, key=lambda m: m.time_ms or math.inf).workspace or 0
        found: list[Measurement] = []
        while (limit := limit // 2) >= LEAST_LIMIT:
            trial = self._trial(self.problem, self.tensors, replace(self.options, workspace=limit))
            trial.beside, trial.most = [*usable, *found], MOST_WITHIN_LESS
            known = {(m.solver, m.config) for m in trial.beside}
            found += [m for m in self._usable(trial) if (m.solver, m.config) not in known]
        return found

    def _cut(self, trial: Trial, level: int, depth: int = 0) -> list[Plan]:
        """Plans that cut a trial's problem by splits of a higher level, each axis once and at most two nested."""
        plans: list[Plan] = []
        problem, patient = trial.problem, self.options.rigor == "patient"
        for solver in solvers.all_solvers():
            if not isinstance(solver, Split) or solver.level <= level or depth == MOST_NESTED:
                continue
            reasons = [EXCLUDED] if self.options.excludes(solver) else solver.why_not(problem)
            if self.options.batch_sizes == "undivided":
                reasons = reasons or ["batch_sizes=undivided"]
            batch = solver.level <= BATCH_LEVEL
            if not (batch or patient or trial.blocked) and (idle := solver.idle(problem)):
                reasons = reasons or [f"not tried: {idle}"]
            if reasons:
                if depth == 0:
                    self.log.append(Measurement(solver.name, solver.version, Config(), reason="; ".join(reasons)))
                continue
            if solver.at_once:
                if depth == 0:
                    partitions = Partitions(solver, trial, self.baseline if self.baseline_allowed else None)
                    plans += partitions.plans()
                    self.log += partitions.log
                continue
            each = functools.partial(self._trial, root=False)
            deeper = functools.partial(self._cut, level=solver.level, depth=depth + 1)
            divisions: Divisions | Tilings = Tilings(solver, trial, each, deeper, patient)
            if solver.alike:
                for_front = batch and self._for_front
                divisions = Divisions(solver, trial, each, deeper, patient, for_front, self._share)
            found = [plan for plan in divisions.plans() if plan.is_kept]
            plans += found
            if depth == 0:
                self.log += [Measurement(p.solver, p.version, p.config, p.time_ms, p.workspace) for p in found]
                if not found:
                    reason = divisions.why_none()
                    self.log.append(Measurement(solver.name, solver.version, Config(), reason=reason))
        return plans

    def _usable(self, trial: Trial) -> list[Measurement]:
        found = trial.run()
        if trial.is_root and self.options.rigor == "estimate":
            self.log += [m if m.reason else replace(m, reason=f"not run: estimated {m.time_ms:.3f} ms") for m in found]
        elif trial.is_root:
            self.log += found
        return [m for m in found if not m.reason and m.time_ms is not None]

    def _choose(self, ranked: list[Plan]) -> Plan:
        """Time the finalists whole beside torch and take the fastest that is right."""
        ranked = [p for p in ranked if not self._over_limit(p.workspace)]
        if ranked and not self._is_behind(ranked[0]):
            timed = self._time_whole(self._finalists(ranked))
            gaining = [plan for plan in timed if not self._keeps_baseline(plan)]
            if timed and not gaining:
                return self._baseline_plan()
            checked = self._verified(min(gaining, key=lambda plan: plan.time_ms)) if gaining else None
            if checked is None:
                raise _Dropped  # others were given up because of what now turned out to be none
            if not self._gains_again(checked):
                return self._baseline_plan()
            self._note(checked)
            return checked
        if self.baseline_allowed:
            return self._baseline_plan()
        raise NoPlanError(no_plan_text(self.problem, self.options, self.log))

    def _is_behind(self, plan: Plan) -> bool:
        """Whether torch's choice is so much faster that running ``plan`` whole would be a waste."""
        if self.options.rigor in ("estimate", "patient") or not self.baseline_allowed:
            return False
        assert self.baseline is not None
        return plan.time_ms > BEHIND[self.problem.device_type] * (self.baseline.time_ms or math.inf)

    def _finalists(self, ranked: list[Plan]) -> list[Plan]:
        if self.options.rigor == "estimate":
            return ranked[:1]
        best = ranked[0].time_ms
        return [p for p in ranked[:FINALISTS] if p.time_ms <= NEAR * best]

    def _time_whole(self, plans: list[Plan]) -> list[Plan]:
        """The plans with their own measured times; one that takes too much memory or raises is dropped."""
        a, b, _ = self.tensors
        kept: list[Plan] = []
        calls: list[Callable[[], object]] = []
        for plan in plans:
            try:
                bound, workspace = self._run_whole(plan)
            except Exception as error:  # as in a trial: the candidate is lost, planning goes on
                self._drop(plan, f"raised {type(error).__name__} when run whole: {first_line(error)}")
                self._look_for_wrong_parts(plan)
                continue
            if over := self._over_limit(workspace):
                self._drop(replace(plan, workspace=workspace), over)
                self._note_torchs_parts(plan, workspace)
                continue
            # Timed as a layer runs it: like torch, each call allocates its result.
            calls.append(functools.partial(bound, a, b, self.bias))
            kept.append(replace(plan, workspace=workspace))
        if not kept:
            return []
        if self.baseline is not None:
            baseline = leaf_plan(self.problem, self.baseline)
            calls.append(functools.partial(execute.bind(baseline, self.problem, a, b), a, b, self.bias))
        try:
            times = rounds(calls, a.device, self.baseline is not None, launched=not self.options.cuda_graphs)
        except Exception as error:
            if len(kept) > 1:
                return [timed for plan in kept for timed in self._time_whole([plan])]
            self._drop(kept[0], f"raised {type(error).__name__} when timed whole: {first_line(error)}")
            return []
        if self.baseline is not None:
            for plan, values in zip(kept, times, strict=False):
                pairs = zip(values, times[-1], strict=True)
                self.shares[choice_of(plan)] = sorted(replacing.share(own, its, a.device.type) for own, its in pairs)
            self.baseline = replace(self.baseline, time_ms=replacing.median_ms(times[-1]))
            self.store.of(self.problem)[(self.baseline.solver, self.baseline.version, Config())] = self.baseline
        return [replace(plan, time_ms=replacing.median_ms(values)) for plan, values in zip(kept, times, strict=False)]

    def _run_whole(self, plan: Plan) -> tuple[execute.Bound, int]:
        """The bound plan and the bytes it takes beyond operands and result."""
        a, b, out = self.tensors
        bound = execute.bind(plan, self.problem, a, b, out)
        new = plan.leaf and solvers.get(plan.solver).own_output and not self.problem.accumulate
        call = functools.partial(bound, a, b, self.bias, None if new else out)
        trial = self._trial(self.problem, self.tensors, self.options)
        workspace = trial.peak(call, bound.workspace, new)
        if a.device.type == "cpu" and workspace > bound.workspace:
            workspace = trial.peak(call, bound.workspace, new)  # as in a trial
        return bound, workspace

    def _over_limit(self, workspace: int) -> str:
        limit = self.options.workspace
        if limit is None or workspace <= limit:
            return ""
        return f"took {format_bytes(workspace)} of workspace when run whole, the limit is {format_bytes(limit)}"

    def _drop(self, plan: Plan, reason: str) -> None:
        self.dropped[choice_of(plan)] = reason
        self.log.append(
            Measurement(plan.solver, plan.version, told_as(plan), plan.time_ms, plan.workspace, plan.error, reason)
        )

    def _keeps_baseline(self, plan: Plan) -> bool:
        if not self.baseline_allowed or self.baseline is None or self.baseline.time_ms is None:
            return False
        shares = self.shares[choice_of(plan)]
        return not replacing.wins(shares, self.problem.device_type)

    def _gains_again(self, plan: Plan) -> bool:
        """Whether a small gain on a CPU comes out a second time, some seconds later: its load changes."""
        if self.problem.device_type != "cpu" or not self.baseline_allowed or choice_of(plan) not in self.shares:
            return True
        if statistics.median(self.shares[choice_of(plan)]) < replacing.SURE:
            return True
        return bool(self._time_whole([plan])) and not self._keeps_baseline(plan)

    def _baseline_plan(self) -> Plan:
        assert self.baseline is not None
        return leaf_plan(self.problem, self.baseline)

    def _is_baseline(self, plan: Plan) -> bool:
        return plan.solver == solvers.baseline().name

    def _as_run(self, plan: Plan) -> Plan:
        """A front's plan with the memory it takes, where only what was measured elsewhere says how much that is."""
        if not any(self.store.foreign.values()):
            return plan
        with contextlib.suppress(Exception):  # raised again, and kept as its reason, where it is checked
            plan = replace(plan, workspace=max(plan.workspace, self._run_whole(plan)[1]))
        return plan

    def _verified(self, plan: Plan) -> Plan | None:
        """The plan with its error, or ``None`` when it is too far from float64: then its leaves are looked at."""
        if over := self._over_limit(plan.workspace):
            self._drop(plan, over)
            return None
        error, reason = self._checked(plan, self.problem)
        plan = replace(plan, error=error)
        if not reason:
            return plan
        self._drop(plan, reason)
        if plan.leaf:
            self._remember_wrong(plan, self.problem, reason)
        self._look_for_wrong_parts(plan)
        return None

    def _checked(self, plan: Plan, problem: ConvProblem) -> tuple[Error | None, str]:
        """A plan's error and why it may not be used, empty when it may."""
        try:
            error = self._errors(plan, problem)
        except Exception as raised:  # as in a trial
            return None, f"raised {type(raised).__name__} when checked: {first_line(raised)}"
        return error, self._judge(problem, error)

    def _judge(self, problem: ConvProblem, error: Error) -> str:
        """Why ``error`` is too large under these options; empty when it is not."""
        counted = error if self.options.strict else replace(error, spread=0.0)
        most = error_limit(problem, self.options.error_limit, counted, lambda: self._own_errors)
        if not error.l2 <= most[0]:
            return f"error {error.l2:.1e} over the limit {most[0]:.1e}"
        if self.options.strict and not error.spread <= most[1]:
            return f"error {error.spread:.1e} beside an outlier over the limit {most[1]:.1e}"
        return ""

    def _remember_wrong(self, leaf: Plan, problem: ConvProblem, reason: str) -> None:
        """Keep a leaf out of this search, and its error for others, whose limits may be wider."""
        self.wrong[leaf.solver, leaf.config] = reason
        if math.isnan(leaf.time_ms) or (leaf.solver, leaf.version, leaf.config) in self._foreign(problem):
            return  # one of several at once, on fewer threads: what is kept of the problem is of all of them
        error = leaf.error
        finite = error is not None and math.isfinite(error.l2) and math.isfinite(error.spread)
        self.store.of(problem)[(leaf.solver, leaf.version, leaf.config)] = Measurement(
            leaf.solver,
            leaf.version,
            leaf.config,
            leaf.time_ms,
            leaf.workspace,
            error if finite else None,
            "" if finite else reason,
        )

    def _look_for_wrong_parts(self, plan: Plan) -> None:
        """Remember the parts of a division that are wrong by themselves."""
        solver = solvers.get(plan.solver)
        if isinstance(solver, Split):
            for problem, child in leaf_parts(plan):
                error, reason = self._checked(child, problem)
                if reason:
                    self._remember_wrong(replace(child, error=error), problem, f"{reason}, as a part")

    @functools.cached_property
    def _own_errors(self) -> Error:
        """torch's own errors; none where it cannot solve the problem."""
        if self.baseline is None:
            return Error(0.0, 0.0)
        return self._errors(self._baseline_plan(), self.problem)

    def _errors(self, plan: Plan, problem: ConvProblem) -> Error:
        own, here = solvers.baseline(), problem == self.problem
        can = self.baseline is not None if here else not own.why_not(problem)
        torchs = None
        if can and own in solvers.all_solvers():
            torchs = _computing(leaf_plan(problem, Measurement(own.name, own.version, Config())), problem)
        return errors_of(problem, _computing(plan, problem), plan, torchs)

    def _note_torchs_parts(self, plan: Plan, workspace: int) -> None:
        """Torch alone takes more than it was seen to: now in a row, so that its parts would be chosen again."""
        for problem, leaf in leaf_parts(plan):
            if self._is_baseline(leaf):
                kept = Measurement(leaf.solver, leaf.version, leaf.config, leaf.time_ms, workspace)
                self.store.of(problem)[(leaf.solver, leaf.version, leaf.config)] = kept

    def _note(self, plan: Plan) -> None:
        base = self.baseline.time_ms if self.baseline is not None else None
        m = Measurement(plan.solver, plan.version, told_as(plan), plan.time_ms, plan.workspace, plan.error, "", base)
        self.log.append(m)
        if plan.leaf:
            self.store.of(self.problem)[(plan.solver, plan.version, plan.config)] = m


def _computing(plan: Plan, problem: ConvProblem) -> Compute:
    """How ``plan`` computes ``problem``, bound anew to the tensors of each call."""

    def compute(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor) -> torch.Tensor:
        return execute.bind(plan, problem, a, b, out)(a, b, bias, out)

    return compute


class _Dropped(Exception):
    """The best plan was none: the search starts again without it."""
