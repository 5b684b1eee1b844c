"""Trying leaf candidates on one problem: binds them, checks their memory, times them, keeps the reason of each loss."""

from __future__ import annotations

import functools
import gc
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

from tilewise import execute, solvers
from tilewise.plan import Config, Measurement, Plan, format_bytes
from tilewise.planner.estimate import Profile, estimate_ms
from tilewise.planner.measure import Timer, peak_bytes
from tilewise.planner.options import Options
from tilewise.problem import ConvProblem
from tilewise.solvers import Solver, Split

__all__ = ["Known", "Trial", "leaf_plan"]

PRUNE = 3.0
"""A candidate whose estimate is this many times the best measured time is not measured, save by ``patient``."""
REPEATS = 3
LONG_MS = 1.0
"""Runs longer than this vary little: one more is enough among candidates; finalists are timed again."""
LOST = 1.4
"""A candidate that was this many times slower than the best at a larger size is not measured, save by ``patient``."""
FAR, LOADING_MS = 4.0, 50.0
"""A first run this many times slower than the best, and by more than loading a module takes, ends a candidate."""
GIVE_UP = 1.5
"""After one run this many times slower than the best a candidate is not repeated."""

Known = dict[tuple[str, int, Config], Measurement]


def leaf_plan(problem: ConvProblem, m: Measurement) -> Plan:
    """The plan that a leaf's measurement stands for."""
    time_ms = float("nan") if m.time_ms is None else m.time_ms
    return Plan(problem.key, m.solver, m.version, m.config, time_ms=time_ms, workspace=m.workspace or 0, error=m.error)


class _TooSlow(RuntimeError):
    """A candidate that lost on its first run."""


class _OverLimit(Exception):
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
    is_root: bool = True
    best_ms: float = float("inf")
    found: list[Measurement] = field(default_factory=list)
    only: frozenset[tuple[str, Config]] | None = None
    """The solvers and configs to try; ``None``: all."""
    prior_rates: dict[tuple[str, int, Config], float] = field(default_factory=dict)
    """Milliseconds an image of candidates at a larger batch: one that lost there by far is not run again."""
    blocked: dict[tuple[str, Config], float] = field(default_factory=dict)
    """Candidates lost to the workspace limit alone, with their estimates."""

    def run(self) -> list[Measurement]:
        """Every leaf solver's candidates, tried in the order of their estimates."""
        waiting: list[tuple[float, int, Solver, Config, int]] = []
        for solver in solvers.all_solvers():
            if isinstance(solver, Split) or (solver.baseline and self.is_root):
                continue  # the root's baseline is measured by the search, outside the limit
            if self.only is not None and all(name != solver.name for name, _ in self.only):
                continue
            reasons = solver.why_not(self.problem) or self._policy(solver)
            if reasons:
                self._lose(solver, Config(), "; ".join(reasons))
                continue
            try:
                waiting += self._offers(solver)
            except (RuntimeError, ValueError) as error:
                self._lose(solver, Config(), f"raised when asked for configs: {_first_line(error)}")
        waiting.sort(key=lambda entry: entry[:2])
        tried: dict[str, int] = {}
        for estimate, _, solver, config, workspace in waiting:
            if not self._pruned(solver, config, estimate, tried):
                self._try(solver, config, workspace)
        return self.found

    def _policy(self, solver: Solver) -> list[str]:
        on_gpu = self.problem.device_type == "cuda"
        if solver.baseline and on_gpu and self.options.workspace is not None:
            return ["torch's benchmark mode tries workspaces of any size, so as a part it cannot be held to a limit"]
        return []

    def _offers(self, solver: Solver) -> list[tuple[float, int, Solver, Config, int]]:
        listed = []
        limit = self.options.workspace
        only = None if self.only is None else [c for name, c in self.only if name == solver.name]
        for rank, (config, workspace) in enumerate(solver.offers(self.problem, limit, only)):
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
            listed.append((estimate, rank, solver, config, workspace))
        return listed

    def _estimate(self, solver: Solver, config: Config) -> float:
        return estimate_ms(self.problem, solver.cost(self.problem, config), self.profile)

    def _pruned(self, solver: Solver, config: Config, estimate: float, tried: dict[str, int]) -> bool:
        if self.options.rigor == "patient":
            return False
        if (solver.name, solver.version, config) in self.known:
            return False
        if estimate > PRUNE * self.best_ms:
            text = f"not measured: estimated {estimate:.3f} ms, the best so far takes {self.best_ms:.3f}"
            self._lose(solver, config, text)
            return True
        prior = self.prior_rates.get((solver.name, solver.version, config), 0.0) * self.problem.batch
        if prior > LOST * self.best_ms:
            text = (
                f"not measured: {prior:.3f} ms by its rate at a larger size, the best so far takes {self.best_ms:.3f}"
            )
            self._lose(solver, config, text)
            return True
        tried[solver.name] = tried.get(solver.name, 0) + 1
        if tried[solver.name] > solver.most_configs:
            self._lose(solver, config, f"not measured: {solver.most_configs} of this solver with better estimates were")
            return True
        return False

    def _try(self, solver: Solver, config: Config, workspace: int) -> None:
        key = solver.name, solver.version, config
        limit = self.options.workspace
        m = self.known.get(key)
        if m is None:
            try:
                m = self.measure(solver, config)
            except _OverLimit as over:
                self.blocked[solver.name, config] = self._estimate(solver, config)
                self._lose(solver, config, str(over), over.workspace)
                return
            self.known[key] = m
        if not m.reason and limit is not None and m.workspace is not None and m.workspace > limit:
            self.blocked[solver.name, config] = self._estimate(solver, config)
            text = f"took {format_bytes(m.workspace)} of workspace when run, the limit is {format_bytes(limit)}"
            self._lose(solver, config, text, m.workspace)
            return
        self.found.append(m)
        if not m.reason and m.time_ms is not None:
            self.best_ms = min(self.best_ms, m.time_ms)

    def measure(self, solver: Solver, config: Config) -> Measurement:
        """Bind, run once to see its memory, then time. A candidate that raises is lost, with its reason."""
        a, b, out = self.tensors
        try:
            plan = Plan(self.problem.key, solver.name, solver.version, config)
            bound = execute.bind(plan, self.problem, a, b, out)
            if self.options.workspace is not None and bound.workspace > self.options.workspace:
                raise _OverLimit(bound.workspace, self.options.workspace)
            call = functools.partial(bound, a, b, None, out)
            times: list[float] = []
            timed = functools.partial(self._time_into, times, call)
            workspace = self.peak(timed, bound.workspace, solver.own_output)
            if times[-1] <= GIVE_UP * self.best_ms:
                for _ in range(REPEATS if times[-1] < LONG_MS else 1):
                    timed()
            time_ms = statistics.median(times[1:] or times)
            return Measurement(solver.name, solver.version, config, time_ms, workspace)
        except _TooSlow as slow:
            return Measurement(solver.name, solver.version, config, workspace=bound.workspace, reason=str(slow))
        except torch.OutOfMemoryError as error:
            reason = f"out of memory: {_first_line(error)}"
        except (RuntimeError, ValueError, TypeError, NotImplementedError) as error:
            reason = f"raised {type(error).__name__}: {_first_line(error)}"
        gc.collect()
        if self.timer.device.type == "cuda":
            torch.cuda.empty_cache()
        return Measurement(solver.name, solver.version, config, reason=reason)

    def _time_into(self, times: list[float], call: Callable[[], object]) -> None:
        times.append(self.timer.time_ms(call))

    def peak(self, call: Callable[[], object], declared: int, own_output: bool) -> int:
        """Bytes one run takes at its peak beyond operands and result, what is declared included."""
        device = self.timer.device
        result = self.tensors[2]
        # As a part, an output of the solver's own is one more temporary.
        own = result.numel() * result.element_size() if own_output and self.is_root else 0
        if device.type == "cuda":
            self._warm_up(call)
            return peak_bytes(call, device, own)
        if declared:
            execute.touch_workspace(declared, device)
        return declared + peak_bytes(call, device, own)

    def _warm_up(self, call: Callable[[], object]) -> None:
        """Load modules and make handles, which are no workspace; a candidate that is far too slow ends here."""
        start = time.perf_counter()
        call()
        self.timer.synchronize()
        took = (time.perf_counter() - start) * 1e3
        if self.options.rigor != "patient" and took > FAR * self.best_ms + LOADING_MS:
            raise _TooSlow(f"took {took:.0f} ms when first run, the best so far takes {self.best_ms:.3f}")

    def _lose(self, solver: Solver, config: Config, reason: str, workspace: int | None = None) -> None:
        self.found.append(Measurement(solver.name, solver.version, config, workspace=workspace, reason=reason))


def _first_line(error: BaseException) -> str:
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0][:300]
