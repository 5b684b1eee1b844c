"""Trying leaf candidates on one problem: binds them, checks their memory, times them, keeps the reason of each loss."""

from __future__ import annotations

import functools
import gc
import statistics
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from tilewise import execute, solvers
from tilewise.kept_filter import compared_bytes, kept_bytes
from tilewise.kernels.kept import NotKept, kept_only
from tilewise.kernels.triton.ahead import side_by_side
from tilewise.plan import Config, Error, Measurement, Plan, format_bytes
from tilewise.planner.estimate import Profile, estimate_ms
from tilewise.planner.measure import Timer, Took, lead_ms, peak_bytes, peak_is_known
from tilewise.planner.operands import narrow
from tilewise.planner.options import EXCLUDED, Options
from tilewise.planner.rates import LOST, Key
from tilewise.problem import ConvProblem
from tilewise.solvers import Solver, SolverUnavailable, Split

__all__ = ["UNKNOWN", "Known", "OverLimit", "Trial", "first_line", "leaf_plan"]

PRUNE = 2.0
"""A candidate whose estimate is this many times the best measured time is not measured, save by ``patient``."""
REPEATS = 3
LONG_MS = 1.0
"""Runs on a GPU longer than this vary little: one more is enough among candidates; finalists are timed again."""
SETTLING, SETTLING_MS = 4, 30.0
"""Runs after the first on a CPU, where a candidate's first two or three are slower, as many as this holds."""
BEHIND_KIN = 1.25
"""A candidate whose estimate is this many times the best of its kin is not measured, save by ``patient``."""
SLOW_MS = 400.0
"""Runs longer than this are not repeated at all."""
FAR, LOADING_MS = 4.0, 50.0
"""A first run this many times slower than the best, and by more than loading a module takes, ends a candidate."""
FEW, FEW_MS = 32, 1.0
"""The share of the batch on which an unpredicted candidate is run first, and what that may take in any case."""
WORTH_MS = 0.5
"""Where the best takes less, a candidate that is hundreds of times slower is over before such a run would be."""
GIVE_UP = 1.5
"""After one run this many times slower than the best a candidate is not repeated."""
FIRST = 2.0
"""The same for a short one on a CPU."""
LOSES = {"cuda": 1.2, "cpu": GIVE_UP}
"""Nor after two runs that were both so many times slower: what disturbs a run seldom meets two."""
SHORT_MS = {"cuda": 1.0, "cpu": 0.0}
"""Unless it is as short as this: the host may have been kept from a launch, and that repeating takes no time."""

UNKNOWN = "not measured, and wisdom knows nothing of it"

Known = dict[Key, Measurement]
Offer = tuple[float, int, Solver, Config, int]
"""Estimate, rank among its solver's, solver, config and workspace."""


def leaf_plan(problem: ConvProblem, m: Measurement) -> Plan:
    """The plan that a leaf's measurement stands for."""
    time_ms = float("nan") if m.time_ms is None else m.time_ms
    constant = kept_bytes(solvers.get(m.solver), problem, m.config)
    return Plan(
        problem.key, m.solver, m.version, m.config, time_ms=time_ms, workspace=m.workspace or 0, constant=constant,
        error=m.error,
    )  # fmt: skip


class _TooSlow(Exception):
    """A candidate that lost on its first run."""

    def __init__(self, took_ms: float, best_ms: float, workspace: int, how: str = "when first run") -> None:
        super().__init__(f"took {took_ms:.0f} ms {how}, the best so far takes {best_ms:.3f}")
        self.took_ms, self.workspace = took_ms, workspace


class OverLimit(Exception):
    """What a candidate was bound to takes more workspace than it may."""

    def __init__(self, workspace: int, limit: int) -> None:
        needs, allowed = format_bytes(workspace), format_bytes(limit)
        super().__init__(f"needs {needs} of workspace, temporaries included, the limit is {allowed}")
        self.workspace = workspace


@dataclass
class Trial:
    """Tries leaves of ``problem`` on the given tensors; ``known`` is filled with what each gave.

    ``wrong`` are candidates that have failed a check against float64 in this search, at whatever size.

    ``best_ms`` starts as a bound: candidates estimated or seen to be well over it are given up.
    """

    problem: ConvProblem
    tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    options: Options
    profile: Profile
    timer: Timer
    known: Known
    wrong: Mapping[tuple[str, Config], str] = field(default_factory=dict)
    judge: Callable[[Error], str] = lambda error: ""
    """Why an error that is known of a candidate is too large; empty when it is not."""
    is_root: bool = True
    bias: torch.Tensor | None = None
    """What is added to the result of a root that has a bias."""
    for_front: bool = False
    """Whether slower candidates count that take less workspace."""
    best_ms: float = float("inf")
    beside: Sequence[Measurement] = ()
    """For a front, what was found under other limits."""
    most: int | None = None
    """Configs of a solver to measure at most, when that is fewer than its own number."""
    found: list[Measurement] = field(default_factory=list)
    only: frozenset[tuple[str, Config]] | None = None
    """The solvers and configs to try; ``None``: all."""
    blocks: bool = False
    """Whether a part is worth trying for candidates that block the batch themselves: a tile is, a micro-batch not."""
    among: frozenset[str] | None = None
    """Names of the solvers to try; ``None``: all."""
    foreign: set[Key] = field(default_factory=set)
    """What of :attr:`known` was measured elsewhere: less memory than a candidate is bound to is not believed."""
    prior_ms: dict[Key, float] = field(default_factory=dict)
    """What candidates would take at their rate at a larger size: one that lost there by far is not run again."""
    blocked: dict[tuple[str, Config], float] = field(default_factory=dict)
    """Candidates lost to the workspace limit alone, with their estimates."""
    estimates: dict[tuple[str, Config], float] = field(default_factory=dict)
    """Of all that was offered, over the limit or not."""
    _too_slow: dict[Key, float] = field(default_factory=dict)
    """What candidates took whose first run was their last."""
    _ahead: dict[tuple[str, Config], execute.Bound] = field(default_factory=dict)
    """What was bound to be compiled and waits to be measured."""
    _waiting: list[Offer] = field(default_factory=list)
    """What is still to be tried, the next one last."""
    _tried: Counter[str] = field(default_factory=Counter)
    """How many candidates of each solver's families were measured."""
    _kin: dict[str, list[tuple[float, int]]] = field(default_factory=dict)
    """Estimates and workspaces of the candidates whose solvers have kin, by its name."""

    def run(self) -> list[Measurement]:
        """Every leaf solver's candidates, tried in the order of their estimates."""
        waiting: list[Offer] = []
        for solver in solvers.all_solvers():
            if isinstance(solver, Split) or (solver.baseline and self.is_root):
                continue  # the root's baseline is measured by the search, outside the limit
            if self.only is not None and all(name != solver.name for name, _ in self.only):
                continue
            if self.among is not None and solver.name not in self.among:
                continue
            if self.options.excludes(solver):
                self._lose(solver, Config(), EXCLUDED)
                continue
            try:
                reasons = solver.why_not(self.problem) or self._policy(solver)
                if not reasons:
                    waiting += self._offers(solver)
            except Exception as error:  # as in measure
                reasons = [f"raised {type(error).__name__} when asked for configs: {first_line(error)}"]
            if reasons:
                self._lose(solver, Config(), "; ".join(reasons))
        waiting.sort(key=lambda entry: entry[:2])
        for estimate, _, solver, _, needed in waiting:
            if solver.kin:
                self._kin.setdefault(solver.kin, []).append((estimate, needed))
        self._waiting, self._tried = waiting[::-1], Counter()
        while self._waiting:
            estimate, _, solver, config, needed = self._waiting.pop()
            if not self._pruned(solver, config, estimate, needed):
                self._try(solver, config, estimate, needed)
        return self.found

    def took_ms(self) -> dict[Key, float]:
        """What candidates take as far as it was ever measured, or seen in this trial."""
        known = {key: m.time_ms for key, m in self.known.items() if m.time_ms is not None and not m.reason}
        return {**self._too_slow, **known}

    def _bound(self, plan: Plan) -> execute.Bound:
        """``plan`` bound. Where that has to compile for a GPU, what will be measured later is compiled beside it.

        What fails beside it fails again when it is measured, and is lost there with its reason.
        """
        a, b, out = self.tensors
        key = plan.solver, plan.config
        if key not in self._ahead and self._waiting and self.problem.device_type == "cuda":
            try:
                with kept_only():
                    return execute.bind(plan, self.problem, a, b, out)
            except NotKept:
                self._bind_side_by_side([plan, *self._to_compile()])
        return self._ahead.pop(key, None) or execute.bind(plan, self.problem, a, b, out)

    def _bind_side_by_side(self, plans: Sequence[Plan]) -> None:
        if len(plans) < 2:
            return
        a, b, out = self.tensors

        def bind(plan: Plan) -> None:
            self._ahead[plan.solver, plan.config] = execute.bind(plan, self.problem, a, b, out)

        side_by_side([functools.partial(bind, plan) for plan in plans], a.device)

    def _to_compile(self) -> list[Plan]:
        """Those that will be measured as far as can be told now, and whose kernels may have to be compiled."""
        wanted: list[Plan] = []
        patient = self.options.rigor == "patient"
        tried = self._tried.copy()
        for estimate, _, solver, config, needed in reversed(self._waiting):
            if not solver.compiles:
                continue
            known = (solver.name, solver.version, config) in self.known
            if known or patient or not self._hopeless(solver, config, estimate, needed, self.best_ms):
                family = solver.family(config)
                tried[family] += 1  # as in _pruned
                if not known and (patient or tried[family] <= self._most(solver)):
                    wanted.append(Plan(self.problem.key, solver.name, solver.version, config))
        return wanted

    def _policy(self, solver: Solver) -> list[str]:
        on_gpu = self.problem.device_type == "cuda"
        if solver.blocks_itself and not (self.is_root or self.blocks or self.options.rigor == "patient"):
            return ["takes the batch in blocks by itself"]
        if solver.baseline and on_gpu and self.options.workspace is not None:
            return ["torch's benchmark mode tries workspaces of any size, so as a part it cannot be held to a limit"]
        return []

    def _offers(self, solver: Solver) -> list[Offer]:
        listed = []
        lost, limit = len(self.found), self.options.workspace
        only = None if self.only is None else [c for name, c in self.only if name == solver.name]
        for rank, (config, workspace) in enumerate(solver.offers(self.problem, limit, only)):
            if self.options.excludes(solver, config):
                self._lose(solver, config, EXCLUDED, workspace)
                continue
            if self.options.deterministic and not solver.is_deterministic(self.problem, config):
                self._lose(solver, config, "is not deterministic", workspace)
                continue
            if (solver.name, config) in self.wrong:
                self._lose(solver, config, self.wrong[solver.name, config], workspace)
                continue
            needed = workspace + solver.hidden_workspace(self.problem, config)
            if limit is not None and needed > limit:
                text = f"needs {format_bytes(needed)} of workspace, the limit is {format_bytes(limit)}"
                self._lose(solver, config, text, needed)
                self.blocked[solver.name, config] = self._estimate(solver, config)
                continue
            estimate = self._estimate(solver, config)
            listed.append((estimate, rank, solver, config, needed))
        if not listed and len(self.found) == lost:
            within = "" if limit is None else f" in {format_bytes(limit)} of workspace"
            self._lose(solver, Config(), f"offers no config{within}")
        return listed

    def _estimate(self, solver: Solver, config: Config) -> float:
        """By arithmetic and bytes, and by how wrong that was of its like under other limits."""
        share = self._shares.get((solver.name, solver.like(config)), 1.0) if self._shares else 1.0
        estimate = share * self._by_cost(solver, config)
        self.estimates[solver.name, config] = estimate
        return estimate

    def _by_cost(self, solver: Solver, config: Config) -> float:
        cost = solver.cost(self.problem, config)
        if compared := compared_bytes(solver, self.problem, config):
            cost = replace(cost, apart=cost.apart + compared)
        return estimate_ms(self.problem, cost, self.profile)

    @functools.cached_property
    def _shares(self) -> dict[tuple[str, Config], float]:
        """Times in estimates of what was measured ``beside``, the last of each like."""
        by_name = {solver.name: solver for solver in solvers.all_solvers()}
        found = {}
        for m in self.beside:
            if m.time_ms is not None and not m.reason:
                solver = by_name[m.solver]
                found[m.solver, solver.like(m.config)] = m.time_ms / max(self._by_cost(solver, m.config), 1e-9)
        return found

    def _pruned(self, solver: Solver, config: Config, estimate: float, needed: int) -> bool:
        if self.options.rigor == "patient":
            return False
        tried, family = self._tried, solver.family(config)
        if (solver.name, solver.version, config) in self.known:
            tried[family] += 1  # else each search would measure as many again
            return False
        text = self._hopeless(solver, config, estimate, needed, self._bound_ms(needed))
        if text:
            self._lose(solver, config, text)
            return True
        tried[family] += 1
        most = self._most(solver)
        if tried[family] > most:
            self._lose(solver, config, f"not measured: {most} of {family} with better estimates were")
            return True
        return False

    def _most(self, solver: Solver) -> int:
        own = solver.most(self.problem)
        return own if self.most is None else min(own, self.most)

    def _hopeless(self, solver: Solver, config: Config, estimate: float, needed: int, best_ms: float) -> str:
        """Why a candidate that is not known yet is not worth a measurement; empty when it is."""
        prior = self.prior_ms.get((solver.name, solver.version, config), 0.0)
        kin = [ms for ms, workspace in self._kin.get(solver.kin, ()) if not self.for_front or workspace <= needed]
        if kin and estimate > BEHIND_KIN * min(kin):
            return f"not measured: estimated {estimate:.3f} ms, the best of {solver.kin} {min(kin):.3f}"
        if estimate > PRUNE * best_ms:
            return f"not measured: estimated {estimate:.3f} ms, the best so far takes {best_ms:.3f}"
        if prior > LOST * best_ms:
            return f"not measured: {prior:.3f} ms by its rate at a larger size, the best so far takes {best_ms:.3f}"
        return ""

    def _try(self, solver: Solver, config: Config, estimate: float, needed: int) -> None:
        key = solver.name, solver.version, config
        limit = self.options.workspace
        m = self.believed(key, solver.workspace(self.problem, config) if key in self.foreign else 0)
        if self.options.rigor == "estimate" and (m is None or not m.reason):
            # By estimate alone, so that all compare alike.
            self.found.append(Measurement(solver.name, solver.version, config, estimate, needed))
            self.best_ms = min(self.best_ms, estimate)
            return
        if m is None and self.options.rigor == "wisdom_only":
            self._lose(solver, config, UNKNOWN)
            return
        if m is None:
            try:
                m = self.measure(solver, config, self._bound_ms(needed))
            except OverLimit as over:
                self.blocked[solver.name, config] = self._estimate(solver, config)
                self._lose(solver, config, str(over), over.workspace)
                return
            except _TooSlow as slow:  # beside the best of this search: another limit may leave nothing faster
                self._too_slow[key] = slow.took_ms
                self._lose(solver, config, str(slow), slow.workspace)
                return
            self.known[key] = m
            self.foreign.discard(key)
        if not m.reason and limit is not None and m.workspace is not None and m.workspace > limit:
            self.blocked[solver.name, config] = self._estimate(solver, config)
            text = f"took {format_bytes(m.workspace)} of workspace when run, the limit is {format_bytes(limit)}"
            self._lose(solver, config, text, m.workspace)
            return
        if not m.reason and m.error is not None:
            m = replace(m, reason=self.judge(m.error))
        self.found.append(m)
        if not m.reason and m.time_ms is not None:
            self.best_ms = min(self.best_ms, m.time_ms)

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

    def _bound_ms(self, workspace: int) -> float:
        """The time to beat: for a front, that of what is found in no more workspace."""
        if not self.for_front:
            return self.best_ms
        every = (*self.beside, *self.found)
        found = (m for m in every if not m.reason and (m.workspace or 0) <= workspace)
        return min((m.time_ms for m in found if m.time_ms is not None), default=float("inf"))

    def measure(self, solver: Solver, config: Config, best_ms: float = float("inf")) -> Measurement:
        """Bind, run once to see its memory, then time. A candidate that raises is lost, with its reason.

        One that takes much more than ``best_ms`` is not repeated.
        """
        return self.measure_plan(Plan(self.problem.key, solver.name, solver.version, config), best_ms)

    def measure_plan(self, plan: Plan, best_ms: float) -> Measurement:
        """As :meth:`measure`, of any plan for the problem; the measurement has the plan's own config."""
        a, b, out = self.tensors
        try:
            bound = self._bound(plan)
            if self.options.workspace is not None and bound.workspace > self.options.workspace:
                raise OverLimit(bound.workspace, self.options.workspace)
            solver = solvers.get(plan.solver)
            new = solver.own_output and self.is_root and not self.problem.accumulate
            call = functools.partial(bound, a, b, self.bias, None if new else out)
            if solver.unpredicted(self.problem, plan.config):
                self._run_on_few(plan, best_ms, bound.workspace)
            if self._keeps(plan):
                call()  # a filter is prepared once: that is neither the candidate's time nor its workspace
            times: list[Took] = []
            timed = functools.partial(self._time_into, times, call)
            scratch = solver.baseline or solver.hidden_workspace(self.problem, plan.config) > 0
            workspace = self.peak(timed, bound.workspace, new, best_ms, scratch=scratch)
            first_ms = times[0].ms
            device = self.timer.device.type
            repeats, give_up = _repeats(first_ms, device)
            if first_ms <= max(give_up * best_ms, SHORT_MS[device]):
                if workspace > bound.workspace and device == "cpu":
                    # A first run also makes what a library keeps for good.
                    workspace = self.peak(call, bound.workspace, new)
                for _ in range(repeats):
                    timed()
                    if min(took.device_ms for took in times) > LOSES[device] * best_ms:
                        break
            took = _usual(times, device)
            time_ms = (took.replayed() if self.options.cuda_graphs else took).weighed_ms
            return Measurement(plan.solver, plan.version, plan.config, time_ms, workspace)
        except (OverLimit, _TooSlow):
            raise
        except (torch.OutOfMemoryError, MemoryError) as error:
            reason = f"out of memory: {first_line(error)}"
        except Exception as error:  # whatever a solver or its library does: the candidate is lost, planning goes on
            reason = f"raised {type(error).__name__}: {first_line(error)}"
        if reason.startswith("out of memory"):
            gc.collect()
            if self.timer.device.type == "cuda":
                torch.cuda.empty_cache()
        return Measurement(plan.solver, plan.version, plan.config, reason=reason)

    def _run_on_few(self, plan: Plan, best_ms: float, workspace: int) -> None:
        """Run a candidate on a few images, so that one that takes seconds for all ends here.

        The second run counts: the first loads modules.
        """
        p, count = self.problem, self.problem.batch // FEW
        if self.options.rigor == "patient" or not count or not WORTH_MS <= best_ms < float("inf"):
            return
        part = p.split("batch", (count, p.batch - count))[0]
        assert part.problem is not None
        few = replace(part.problem, accumulate=p.accumulate, out_dtype=p.out_dtype)
        tensors = [narrow(t, part.ranges(role)) for t, role in zip(self.tensors, (*p.operands, p.result), strict=True)]
        a, b, out = tensors
        try:
            call = functools.partial(execute.bind(replace(plan, problem=few.key), few, a, b, out), a, b, None, out)
        except SolverUnavailable:
            return  # it takes the whole alone, which will tell
        call()
        took_ms = self.timer.time(call).device_ms
        if took_ms > max(FAR * best_ms * count / p.batch, FEW_MS):
            whole_ms = took_ms * p.batch / count
            raise _TooSlow(whole_ms, best_ms, workspace, f"by its rate on {count} of {p.batch} images")

    def _keeps(self, plan: Plan) -> bool:
        """Whether a first run on a CPU prepares a filter; on a GPU :meth:`_warm_up` is the first."""
        if self.timer.device.type != "cpu" or not self.problem.constant_weight:
            return False
        own = plan.leaf and kept_bytes(solvers.get(plan.solver), self.problem, plan.config) > 0
        return own or any(leaf.constant for leaf in plan.leaves())

    def _time_into(self, times: list[Took], call: Callable[[], object]) -> None:
        # The first run is also watched for memory, of which what clears a cache would take some.
        times.append(self.timer.time(call, lead_ms(times[-1]) if times else 0.0))

    def peak(
        self,
        call: Callable[[], object],
        declared: int,
        new_result: bool,
        best_ms: float = float("inf"),
        *,
        scratch: bool = True,
    ) -> int:
        """Bytes one run takes at its peak beyond operands and result, what is declared included.

        ``new_result``: the call allocates the result; ``scratch``: it uses libraries' own workspaces. Where nothing can
        tell and no limit asks: what is declared.
        """
        device = self.timer.device
        result = self.tensors[2]
        size = result.numel() * result.element_size() if new_result else 0
        if device.type == "cuda":
            self._warm_up(call, declared, best_ms)
            return peak_bytes(call, device, size, scratch)
        if declared:
            execute.touch_workspace(declared, device)
        if self.options.workspace is None and not peak_is_known(device):
            call()
            return declared
        return declared + peak_bytes(call, device, size)

    def _warm_up(self, call: Callable[[], object], declared: int, best_ms: float) -> None:
        """Load modules and make handles, which are no workspace; a candidate that is far too slow ends here."""
        start = time.perf_counter()
        call()
        self.timer.synchronize()
        took = (time.perf_counter() - start) * 1e3
        if self.options.rigor != "patient" and took > FAR * best_ms + LOADING_MS:
            raise _TooSlow(took, best_ms, declared)

    def _lose(self, solver: Solver, config: Config, reason: str, workspace: int | None = None) -> None:
        self.found.append(Measurement(solver.name, solver.version, config, workspace=workspace, reason=reason))


def _usual(times: Sequence[Took], device: str) -> Took:
    """Median of the device's times and the least of the host's, which other work only adds to.

    A first run counts where there is no other, and on a CPU the later half.
    """
    counted = times[(len(times) + 1) // 2 if device == "cpu" else 1 :] or times
    return Took(statistics.median(took.device_ms for took in counted), min(took.host_ms for took in counted))


def _repeats(took_ms: float, device: str) -> tuple[int, float]:
    """Runs after a first one of so long, and how many times slower than the best that one may be."""
    if device == "cpu" and took_ms < SETTLING_MS / 2:
        return min(SETTLING, int(SETTLING_MS / max(took_ms, 1e-3))), FIRST
    return REPEATS if took_ms < LONG_MS else 1 if took_ms < SLOW_MS else 0, GIVE_UP


def first_line(error: BaseException) -> str:
    """The first line of an error's message, its type where it has none."""
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0][:300]
