"""Which parts of a model run as regions: those that can be traced, are right, and are surely faster than by torch.

The whole model is tried first. Where it cannot be traced, each of its parts is tried in its place, and so on down.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from tilewise.comm.agreement import several_ranks
from tilewise.machine.device import conv_precision, matmul_precision
from tilewise.machine.recording import recorder_of
from tilewise.machine.torch_state import undisturbed
from tilewise.nn.graphs.inputs import Inputs
from tilewise.nn.kept_values import tensors_in
from tilewise.nn.layers.kinds import kind_of
from tilewise.nn.layers.plan_table import PlanTable, planning
from tilewise.nn.layers.swaps import copies_itself, swap_back, swapped
from tilewise.nn.layers.weights import Weights
from tilewise.nn.programs.program import Program, where_expected
from tilewise.nn.progress import Late
from tilewise.nn.record import arguments_of, state_kept, without_gradients
from tilewise.nn.regions.check import ERROR_LIMIT, TF32_LIMIT, error_of, in_float64, timed
from tilewise.nn.regions.forward import Ready, Regional, run_by_programs
from tilewise.nn.regions.plans import RegionPlans
from tilewise.nn.regions.region import plan_region
from tilewise.nn.regions.rewrite import rewrite
from tilewise.nn.regions.trace import Traced, Untraceable, trace
from tilewise.nn.regions.ways import Times
from tilewise.nn.report import RegionLine, RegionReport
from tilewise.nn.step.compare import why_not_compared
from tilewise.problems.kept_runs import KEPT_BYTES, keeping_runs
from tilewise.settings import Settings

__all__ = ["RegionPlanner", "why_no_regions"]

Filter = Callable[[str, nn.Module], bool]
MOST_CALLS = 4
"""Kinds of calls of one module that are planned ahead."""
COMPILED = "compiled"
"""The name under which the report tells what regions run by within ``torch.compile``."""
LEAST_SPEEDUP = 1.0
"""A region is kept where the lower end of its speedup's 95 % interval is above this."""


def why_no_regions(asked: Settings, schedule: object, examples: Sequence[object]) -> str:
    """Why no regions are planned; empty where they are. Nothing is to be said of training, which has none."""
    if not asked.regions:
        return "regions=False"
    if several_ranks():
        return "one rank of several plans layers alone"
    bound = replace(asked, workspace=None, deterministic=False, error_limit=None, strict=False)
    reason = why_not_compared(bound, schedule)
    if reason:
        return reason
    places = {t.device for t in tensors_in(examples)}
    if len(places) != 1 or next(iter(places)).type not in ("cpu", "cuda"):
        return "its inputs are not all on the CPU, or all on one GPU"
    if next(iter(places)).type == "cuda" and not asked.frozen:
        return "the host would wait for the GPU to compare weights at every call: frozen=True would do"
    if asked.wait is False:
        return "wait=False: layers are planned in the background"
    return ""


class RegionPlanner:
    """Plans regions of one model on ``device`` under the options ``asked``, with the plans of ``plan_table``."""

    def __init__(
        self,
        model: nn.Module,
        asked: Settings,
        plan_table: PlanTable,
        weights: Weights,
        filter_fn: Filter | None,
        device: torch.device,
    ) -> None:
        self.model, self._device = model, device
        self._asked, self._weights, self._filter = asked, weights, filter_fn
        self._times = Times(device)
        self._plans, self._facts = RegionPlans(plan_table), plan_table.facts
        is_shown = isinstance(plan_table.planner.progress, Late)
        self._shown = Late("programs of a region", "timing", "timed") if is_shown else None
        self.reports: list[RegionReport] = []
        self.taken: dict[str, str] = {}
        """Modules that run within a region, by name, and which region that is, as text."""

    def plan(self, examples: Sequence[object]) -> None:
        """Plan the model for the examples, or its parts where it cannot be planned whole; install what is faster."""
        calls = [arguments_of(example) for example in examples]
        self._plan_module("", self.model, calls)

    def program_of(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Ready, RegionReport]:
        """A program of the whole model for one call, with its report; the model stays as it is.

        Raises :class:`Untraceable` where it has none that is exact enough.
        """
        self._check("", self.model)
        ready, report = self._planned("", self.model, args, kwargs)
        program = ready.planning.program
        assert report.error is not None
        assert report.torch_error is not None
        reason = self._why_lost(report.error, report.torch_error, [program.slots[i].dtype for i in program.outputs])
        if reason:
            raise Untraceable(f"its program {reason}")
        return ready, report

    def _plan_module(
        self, name: str, module: nn.Module, calls: Sequence[tuple[tuple[Any, ...], dict[str, Any]]]
    ) -> None:
        """Plan one module for these calls, or its parts where it cannot be planned whole."""
        try:
            self._check(name, module)
            made = []
            for args, kwargs in calls[:MOST_CALLS]:
                made.append(self._planned(name, module, args, kwargs))
        except Untraceable as error:
            if not name or str(error):
                self.reports.append(RegionReport(name, type(module).__name__, reason=str(error)))
            self._plan_parts(name, module, calls)
            return
        reports = [report for _, report in made]
        if all(report.kept for report in reports):
            self._install(name, module, [ready for ready, _ in made])
        else:  # a module runs by programs for all of the examples or for none
            reason = "another of the examples is not kept"
            reports = [replace(report, kept=False, reason=reason) if report.kept else report for report in reports]
        self.reports += reports

    def _install(self, name: str, module: nn.Module, programs: Sequence[Ready]) -> None:
        """Let a module run by its programs."""
        plan_call = functools.partial(self._on_sight, name)
        on_sight = self._asked.unplanned == "plan"
        note = functools.partial(_note, self._facts, name)
        regional = Regional(module, plan_call, self._retraced, self._device, on_sight=on_sight, note=note)
        for part in module.modules():
            swap_back(part)
        run_by_programs(module, regional)
        for ready in programs:
            regional.add(ready.standing_now(module))
        for part_name, part in module.named_modules(prefix=name):
            if kind_of(part) is not None:
                self.taken[part_name] = f"runs within the region {name!r}" if name else "runs within the whole model"

    def _check(self, name: str, module: nn.Module) -> None:
        """Raise :class:`Untraceable` for a module that cannot run by programs, whatever it is called with."""
        forward = module.__dict__.get("forward")
        if forward is not None and swapped(module) is None:
            raise Untraceable("has a forward set on the instance")
        copies = copies_itself(module)
        if copies:
            raise Untraceable(copies)
        for part_name, part in module.named_modules(prefix=name):
            if self._filter is not None and kind_of(part) is not None and not self._filter(part_name, part):
                raise Untraceable(f"{part_name} is left out by filter_fn")

    def _plan_parts(
        self, name: str, module: nn.Module, calls: Sequence[tuple[tuple[Any, ...], dict[str, Any]]]
    ) -> None:
        """Plan the parts of a module that hold layers, for the calls that they get when the module is called so."""
        parts = dict(_parts(name, module))
        if not parts:
            return
        seen: dict[str, list[tuple[tuple[Any, ...], dict[str, Any]]]] = {part_name: [] for part_name in parts}
        handles = []

        def noting(part_name: str) -> Callable[..., None]:
            def note(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
                kinds = [Inputs.of(*call).shape for call in seen[part_name]]
                if len(kinds) < MOST_CALLS and Inputs.of(args, kwargs).shape not in kinds:
                    seen[part_name].append(_copied(args, kwargs))

            return note

        for part_name, part in parts.items():
            handles.append(part.register_forward_pre_hook(noting(part_name), with_kwargs=True))
        try:
            with state_kept(module, calls):
                for args, kwargs in calls:
                    without_gradients(module, functools.partial(module, *args, **kwargs))
        finally:
            for handle in handles:
                handle.remove()
        for part_name, part in parts.items():
            if seen[part_name]:
                self._plan_module(part_name, part, seen.pop(part_name))

    def _planned(
        self, name: str, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[Ready, RegionReport]:
        """A program for one call, with its report. Raises :class:`Untraceable`."""
        inputs = Inputs.of(args, kwargs)
        if inputs.obstacle:
            raise Untraceable(inputs.obstacle)
        tensors = list(inputs.tensors)
        by_torch = functools.partial(type(module).forward, module, *args, **kwargs)
        kept = KEPT_BYTES.get(self._device.type, 0)
        with planning(), undisturbed(), keeping_runs(kept), state_kept(module, (args, dict(kwargs))):
            traced = trace(module, args, kwargs, functools.partial(type(module).forward, module))
            wanted = in_float64(traced, tensors)
            own = traced.module(*tensors)
            if wanted is None:
                wanted = tuple(t.double() if t.is_floating_point() else t for t in own)
            torch_error = error_of(own, wanted)
            given = where_expected(tensors)

            def judge(program: Program) -> float:
                found = program(*given)
                results = found if isinstance(found, tuple) else (found,)
                aim = self._error_limit(torch_error, [t.dtype for t in results], of_torch=1.0)
                return error_of(results, wanted) / aim

            planned = plan_region(traced, tensors, self._plans, judge, self._times, self._weights, self._shown)
            ready = Ready(module, traced, planned, _code(traced), inputs)
            found = planned.program(*given)
            results = found if isinstance(found, tuple) else (found,)
            error = error_of(results, wanted)
            graph = self._graphed(planned.program, given)
            pairs = timed(by_torch, functools.partial(ready, tensors), self._device)
        recorded = 0 if planned.program.graph is None else planned.program.graph.nbytes
        least, speedup, most = pairs.speedup
        torch_ms, planned_ms = pairs.medians
        reason = self._why_lost(error, torch_error, [t.dtype for t in results])
        if not reason and least <= LEAST_SPEEDUP:
            reason = "is not surely faster than by torch"
        report = RegionReport(
            name,
            type(module).__name__,
            kept=not reason,
            reason=reason,
            input=inputs.in_words(),
            torch_ms=torch_ms,
            planned_ms=planned_ms,
            speedup=speedup,
            least=least,
            most=most,
            pairs=len(pairs.first_ms),
            error=error,
            torch_error=torch_error,
            fused=planned.fused,
            conversions=planned.conversions,
            why_not_native=planned.program.why_not_native if self._device.type == "cpu" else graph,
            bytes=planned.program.arena_bytes + recorded + planned.constants.nbytes,
            lines=tuple(RegionLine(line.name, line.runs, line.layout, line.ms) for line in planned.lines),
        )
        return ready, report

    def _graphed(self, program: Program, given: Sequence[torch.Tensor]) -> str:
        """Let a program on a GPU replay a CUDA graph where that is asked for and surely faster.

        Returns why its steps are called from Python; empty where they are not, and on a CPU.
        """
        if self._device.type == "cpu":
            return ""
        if self._asked.graphs != "auto":
            return "graphs='never': graphs='auto' would replay them from a CUDA graph"
        reason = program.use_graph(given, recorder_of(self._device))
        if reason:
            return f"they cannot be captured: {reason}"
        stepwise, replayed = functools.partial(program.in_python, *given), functools.partial(program, *given)
        least, _, _ = timed(stepwise, replayed, self._device).speedup
        if least <= LEAST_SPEEDUP:
            program.graph = None
            return "a replay of their graph is not surely faster"
        return ""

    def _why_lost(self, error: float, torch_error: float, dtypes: Sequence[torch.dtype]) -> str:
        """Why results that are ``error`` away from float64 are not good enough; empty where they are."""
        limit = self._error_limit(torch_error, dtypes)
        if error <= limit:
            return ""
        return f"is {error:.2g} away from float64 (relative L2; torch {torch_error:.2g}); {limit:.2g} would do"

    def _error_limit(self, torch_error: float, dtypes: Sequence[torch.dtype], of_torch: float = 2.0) -> float:
        """How far results of these types may be from float64: in fp32, if that is more, ``of_torch`` times torch's."""
        limit = self._asked.error_limit
        if limit is None:
            exact = all(dtype in (torch.float32, torch.float64) or not dtype.is_floating_point for dtype in dtypes)
            rounds = self._device.type == "cuda" and "tf32" in (conv_precision(), matmul_precision())
            limit = max(
                (TF32_LIMIT if rounds else ERROR_LIMIT) if exact else 0.0, (of_torch if exact else 2.0) * torch_error
            )
        return limit

    def _on_sight(self, name: str, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Ready:
        """A program for a call that was not planned ahead. Raises :class:`Untraceable`."""
        ready, report = self._planned(name, module, args, kwargs)
        if not report.kept:
            raise Untraceable(report.reason)
        return ready

    def _retraced(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Traced, str]:
        """The trace of a call, with the text of its rewritten code. Raises :class:`Untraceable`."""
        with undisturbed():
            traced = trace(module, args, kwargs, functools.partial(type(module).forward, module))
        rewrite(traced.graph)
        return traced, _code(traced)


def _note(facts: dict[str, Any], name: str, outcome: Mapping[str, Any]) -> None:
    """Keep for the report what was faster where the region ``name`` was compiled."""
    facts.setdefault(COMPILED, []).append({"region": name, **outcome})


def _code(traced: Traced) -> str:
    """The text of a graph, by which two traces are compared."""
    return str(traced.graph)


def _parts(name: str, module: nn.Module) -> list[tuple[str, nn.Module]]:
    """The parts of a module that may be regions: those with layers of a kind, which are of no kind themselves.

    The parts of a list of modules, which is not called itself, stand in its place.
    """
    found: list[tuple[str, nn.Module]] = []
    for part_name, part in module.named_children():
        full = f"{name}.{part_name}" if name else part_name
        if kind_of(part) is not None or not any(kind_of(inner) is not None for inner in part.modules()):
            continue
        if isinstance(part, nn.ModuleList | nn.ModuleDict):
            found += _parts(full, part)
        else:
            found.append((full, part))
    return found


def _copied(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments whose tensors are copies that lie alike, since a module may write into what it is called with."""

    def copy(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            with torch.inference_mode(False), torch.no_grad():
                return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device).copy_(
                    value
                )
        return value

    copies: tuple[tuple[Any, ...], dict[str, Any]] = torch.utils._pytree.tree_map(copy, (args, kwargs))
    return copies
