"""Running a model's planned modules one pass at a time, with the bytes that are alive before each pass."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from tilewise import solvers
from tilewise.execute import PlanMismatch
from tilewise.machine.torch_state import undisturbed
from tilewise.nn.layers.bound_pass import BoundPass, bind_pass
from tilewise.nn.layers.kinds import kind_of, run_by_plans
from tilewise.nn.layers.plan_table import PlanTable
from tilewise.nn.layers.swaps import standing_attributes
from tilewise.nn.layers.weights import Weights
from tilewise.nn.memory.meter import Meter, Trace
from tilewise.plan import Config, Plan
from tilewise.planner import Options
from tilewise.problems.base import Problem

__all__ = ["Kernel", "MemoryProfiler", "Moment", "saved_swaps", "swaps_kept"]


@dataclass(frozen=True, slots=True)
class Kernel:
    """One pass of a module's call.

    ``deterministic`` is torch's flag during the call, ``declared`` the workspace in bytes that the plan declares.
    """

    layer: str
    problem: Problem
    deterministic: bool
    declared: int = 0


@dataclass(frozen=True, slots=True)
class Moment:
    """One run of a kernel, in bytes.

    ``alive`` is what is alive just before, ``result`` the size of the result, and ``beside`` that of a copy of the
    weight that may be made first. ``most`` is the most alive while it ran.
    """

    kernel: Kernel
    alive: int
    result: int
    beside: int
    most: int


class MemoryProfiler:
    """Runs modules and notes with ``meter`` what is alive at each.

    ``plan_tables`` has the plans of each module by its name; they run where they replace torch's choice. A module that
    is not in there is computed by torch.
    """

    def __init__(self, meter: Meter, plan_tables: Mapping[str, PlanTable]) -> None:
        self._meter, self._plan_tables = meter, plan_tables
        self._ran: list[Kernel] = []
        self._on = False

    @contextmanager
    def over(self, modules: Mapping[str, nn.Module], weights: Weights) -> Iterator[None]:
        """Within the block, notice every pass of the given modules."""
        with swaps_kept(modules.values()):
            for name, module in modules.items():
                kind = kind_of(module)
                assert kind is not None
                run_by_plans(module, kind.layers(ProfiledPlanTable(name, self._plan_tables.get(name), self), weights))
            yield

    def traced(self, step: Callable[[], object]) -> tuple[Trace, list[Moment], int]:
        """Run ``step`` three times: to bind what it calls, to warm up, and to be traced.

        Returns the trace of the last run (its peak includes the warm-up), its kernels in order, and the most bytes
        alive outside all of them.
        """

        def noted() -> None:
            """Run the step and note its kernels."""
            self._ran, self._on = [], True
            step()

        step()  # torch's choice, bound, may hold a stand-in for an operand: it is not there when torch runs by itself
        try:
            trace = self._meter.traced(step, noted)
        finally:
            self._on = False
        return trace, self._moments(trace), max(trace.most[::2])

    def _moments(self, trace: Trace) -> list[Moment]:
        """The moments of a trace, in which each kernel has a mark before it and one after it."""
        moments = []
        for index, kernel in enumerate(self._ran):
            p = kernel.problem
            results = sum(p.nbytes(role) for role in p.results)
            before, during = trace.alive[2 * index], trace.most[2 * index + 1]
            moments.append(Moment(kernel, before, results, p.copied_bytes, during))
        return moments

    def run(self, kernel: Kernel, call: Callable[[], Any]) -> Any:
        """The result of ``call()``, which is noted as ``kernel`` while a step is traced."""
        if not self._on:
            return call()
        self._ran.append(kernel)
        self._meter.mark()
        try:
            return call()
        finally:
            self._meter.mark()


class ProfiledPlanTable(PlanTable):
    """Plans of ``plan_table`` where they replace torch's choice, else torch's choice; all passes are profiled."""

    traced = False

    def __init__(self, name: str, plan_table: PlanTable | None, profiler: MemoryProfiler) -> None:
        super().__init__(Options() if plan_table is None else plan_table.options, "torch")
        self._name, self._plan_table, self._profiler = name, plan_table, profiler

    def ready(self, problems: Iterable[Problem], deterministic: bool, device: torch.device) -> bool:
        """Bind the plans that exist. Nothing is planned."""
        if self._plan_table is not None:
            replaced = [p for p in problems if self._plan_table.replacement(p, deterministic)]
            return self._plan_table.ready(replaced, deterministic, device)
        return True

    def bound(self, problem: Problem, deterministic: bool, device: torch.device) -> BoundPass | None:
        """The profiled pass of ``problem``; ``None`` where torch must compute it in its own way."""
        bound_pass = None if self._plan_table is None else self._plan_table.bound(problem, deterministic, device)
        declared = 0 if bound_pass is None else bound_pass.bound.workspace
        if bound_pass is None:
            baseline = solvers.baseline(problem)
            try:
                with undisturbed():
                    torch_plan = Plan(problem.key, baseline.name, baseline.version, Config())
                    bound_pass = bind_pass(torch_plan, problem, device)
            except PlanMismatch:
                return None
        return ProfiledPass(bound_pass, Kernel(self._name, problem, deterministic, declared), self._profiler)


class ProfiledPass(BoundPass):
    """A bound pass that reports its runs to a profiler."""

    __slots__ = ("_inner", "_kernel", "_profiler")

    def __init__(self, bound_pass: BoundPass, kernel: Kernel, profiler: MemoryProfiler) -> None:
        self.plan, self.problem = bound_pass.plan, bound_pass.problem
        self.slots = bound_pass.slots
        self._inner, self._kernel, self._profiler = bound_pass, kernel, profiler
        self.bound, self.call, self.range = bound_pass.bound, self._run, ""

    def named(self, layer: str, role: str) -> BoundPass:
        """Itself: its own profiler needs no name."""
        return self

    def _run(self, *tensors: torch.Tensor | None) -> Any:
        """Run the pass under the profiler."""
        return self._profiler.run(self._kernel, lambda: self._inner.call(*tensors))


def saved_swaps(modules: Iterable[nn.Module]) -> Callable[[], None]:
    """A function that restores how the modules compute now, planned or not. It may be called several times."""
    saved = [(module, standing_attributes(module)) for module in modules]

    def put_back() -> None:
        """Restore the saved attributes."""
        for module, attributes in saved:
            for name in standing_attributes(module):
                del module.__dict__[name]
            module.__dict__.update(attributes)

    return put_back


@contextmanager
def swaps_kept(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Restore at the end of the block how the modules compute."""
    put_back = saved_swaps(modules)
    try:
        yield
    finally:
        put_back()
