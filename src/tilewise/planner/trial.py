"""Trying leaf candidates on one problem: binds them, checks their memory, times them, keeps the reason of each loss."""

from __future__ import annotations

import functools
import gc
import statistics
from collections.abc import Callable
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
GIVE_UP = 1.5
"""After one run this many times slower than the best a candidate is not repeated."""

Known = dict[tuple[str, int, Config], Measurement]


def leaf_plan(problem: ConvProblem, m: Measurement) -> Plan:
    """The plan that a leaf's measurement stands for."""
    time_ms = float("nan") if m.time_ms is None else m.time_ms
    return Plan(problem.key, m.solver, m.version, m.config, time_ms=time_ms, workspace=m.workspace or 0, error=m.error)


class _OverLimit(Exception):
    def __init__(self, workspace: int, limit: int) -> None:
        needs, allowed = format_bytes(workspace), format_bytes(limit)
        super().__init__(f"needs {needs} of workspace, temporaries included, the limit is {allowed}")
        self.workspace = workspace


@dataclass
class Trial:
    """Tries leaves of ``problem`` on the given tensors; ``known`` is filled with what each gave.

    ``best_ms`` starts as a bound: candidates estimated or seen to be well over it are given up.
    """

    problem: ConvProblem
    tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    options: Options
    profile: Profile
    timer: Timer
    known: Known
    is_root: bool = True
    best_ms: float = float("inf")
    found: list[Measurement] = field(default_factory=list)
    blocked: bool = False
    """Whether some candidate was lost to the workspace limit alone."""

    def run(self) -> list[Measurement]:
        """Every leaf solver's candidates, tried in the order of their estimates."""
        waiting: list[tuple[float, int, Solver, Config, int]] = []
        for solver in solvers.all_solvers():
            if isinstance(solver, Split) or (solver.baseline and self.is_root):
                continue  # the root's baseline is measured by the search, outside the limit
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
        for rank, (config, workspace) in enumerate(solver.offers(self.problem, limit)):
            if self.options.deterministic and not solver.is_deterministic(self.problem, config):
                self._lose(solver, config, "is not deterministic", workspace)
                continue
            needed = workspace + solver.hidden_workspace(self.problem, config)
            if limit is not None and needed > limit:
                self.blocked = True
                text = f"needs {format_bytes(needed)} of workspace, the limit is {format_bytes(limit)}"
                self._lose(solver, config, text, needed)
                continue
            estimate = estimate_ms(self.problem, solver.cost(self.problem, config), self.profile)
            listed.append((estimate, rank, solver, config, workspace))
        return listed

    def _pruned(self, solver: Solver, config: Config, estimate: float, tried: dict[str, int]) -> bool:
        if self.options.rigor == "patient":
            return False
        if (solver.name, solver.version, config) in self.known:
            return False
        if estimate > PRUNE * self.best_ms:
            text = f"not measured: estimated {estimate:.3f} ms, the best so far takes {self.best_ms:.3f}"
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
                self.blocked = True
                self._lose(solver, config, str(over), over.workspace)
                return
            self.known[key] = m
        if not m.reason and limit is not None and m.workspace is not None and m.workspace > limit:
            self.blocked = True
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
                for _ in range(REPEATS):
                    timed()
            time_ms = statistics.median(times[1:] or times)
            return Measurement(solver.name, solver.version, config, time_ms, workspace)
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
            call()  # modules load and handles are made: neither is workspace
            return peak_bytes(call, device, own)
        if declared:
            execute.touch_workspace(declared, device)
        return declared + peak_bytes(call, device, own)

    def _lose(self, solver: Solver, config: Config, reason: str, workspace: int | None = None) -> None:
        self.found.append(Measurement(solver.name, solver.version, config, workspace=workspace, reason=reason))


def _first_line(error: BaseException) -> str:
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0][:300]
