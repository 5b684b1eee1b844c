"""Host time of one call: torch's layer, the same with a plan of one kernel, and divided into micro-batches.

A bar, not a figure: a planned call of one kernel takes at most 5 us longer than torch's (8 us with grad), 8 us more for
each further kernel, and nothing where torch's choice won. The layer is so small that a GPU is done before the host asks
for the next call; calls are made in batches without waiting, in turns, and the median batch counts. On a CPU the host
also computes, so there the difference holds both. The plans are written here, not searched for: the fastest solver of
the layer that is not torch's own (cuDNN's where it has one), or the one named by ``solver``.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from harness.result import Bar, Result, Row, Side
from harness.settings import BadInput, Settings
from harness.sides import Call, plan_line
from torch import nn

import tilewise
from tilewise import solvers
from tilewise.machine.torch_state import framework_flags
from tilewise.plan import Config, Plan
from tilewise.planner import Options, Planner
from tilewise.problems.conv.problem import ConvProblem

DEFAULTS = {"solver": "", "kernels": "4", "calls": "200", "batches": "41", "channels": "8", "size": "8"}
QUICK = {"calls": "20", "batches": "5"}
ONE_KERNEL = "cudnn"
"""The solver preferred where it is there: most of its plans launch one kernel."""
MODES = ("eager", "grad", "grad and backward")


class Fixed(Planner):
    """A planner with prescribed plans: torch's own (``kernels`` 0), one leaf (1), or that many micro-batches."""

    def __init__(self, planner: Planner, solver: str, kernels: int) -> None:
        super().__init__(planner.wisdom)
        self.planner, self.solver, self.kernels = planner, solver, kernels
        self.made: dict[ConvProblem, Plan] = {}

    def plan(self, problem: ConvProblem, options: Options | None = None) -> Plan:
        """The prescribed plan of ``problem``."""
        if problem not in self.made:
            self.made[problem] = self._make(problem)
        return self.made[problem]

    def plan_many(self, problems: Iterable[ConvProblem], options: Options | None = None) -> dict[ConvProblem, Plan]:
        """The prescribed plans."""
        return {problem: self.plan(problem) for problem in problems}

    def _make(self, problem: ConvProblem) -> Plan:
        baseline = solvers.baseline(ConvProblem)
        if not self.kernels:
            return Plan(problem.key, baseline.name, baseline.version)
        if self.kernels == 1:
            return self._leaf(problem)
        split, config = solvers.get("micro_batch"), Config(sizes=(1,) * self.kernels)
        assert isinstance(split, solvers.Split)
        part = split.children(problem, config)[0].problem
        assert part is not None
        children = (self._leaf(part),)
        return Plan(problem.key, split.name, split.version, config, children, (self.kernels,))

    def _leaf(self, problem: ConvProblem) -> Plan:
        """The fastest leaf of the solver asked for. Raises :class:`BadInput` when there is none."""
        tried = self.planner.explain(problem, Options(batch_sizes="undivided"))
        usable = [m for m in tried if not (m.reason or solvers.get(m.solver).baseline)]
        preferred = [m for m in usable if m.solver == (self.solver or ONE_KERNEL)]
        found = preferred or ([] if self.solver else usable)
        if not found:
            raise BadInput(f"solver={self.solver!r}: it has no plan for {problem.key}")
        best = found[0]
        return Plan(problem.key, best.solver, best.version, best.config, workspace=best.workspace or 0)


@dataclass(frozen=True)
class Setting:
    """The layer's tensors, and its planned twins by number of kernels (0: torch's choice won)."""

    x: torch.Tensor
    module: nn.Conv2d
    planned: dict[int, nn.Module]
    plans: dict[int, Fixed]


def run(settings: Settings) -> Result:
    """One row a mode and plan; values are microseconds a call."""
    kernels = settings.integer("kernels")
    if kernels < 2:
        raise BadInput(f"kernels={kernels}: two or more would do")
    with framework_flags(settings.device.type, "ieee", deterministic=False):
        layer = _layer(settings, kernels)
        rows = [row for mode in MODES for row in _rows(settings, layer, mode)]
    return Result(rows, bars(rows, settings, kernels))


def _layer(settings: Settings, kernels: int) -> Setting:
    torch.manual_seed(0)
    channels, size = settings.integer("channels"), settings.integer("size")
    x = torch.randn(kernels, channels, size, size, device=settings.device)
    module = nn.Conv2d(channels, channels, 3, padding=1, bias=False).to(settings.device)
    planner = settings.planner()
    plans = {count: Fixed(planner, settings.text("solver"), count) for count in (0, 1, kernels)}
    planned: dict[int, nn.Module] = {}
    for count, fixed in plans.items():
        twin = nn.Conv2d(channels, channels, 3, padding=1, bias=False).to(settings.device)
        twin.load_state_dict(module.state_dict())
        example = x.clone().requires_grad_()
        planned[count] = tilewise.optimize(twin, (example,), planner=fixed)
    return Setting(x, module, planned, plans)


def _rows(settings: Settings, layer: Setting, mode: str) -> list[Row]:
    """Torch's module and function, then the planned modules, in turns."""
    x = layer.x.clone().requires_grad_(mode != "eager")
    functions: list[Callable[[torch.Tensor], torch.Tensor]] = [
        layer.module,
        partial(F.conv2d, weight=layer.module.weight, padding=1),
        *layer.planned.values(),
    ]
    calls = [_call(function, x, mode) for function in functions]
    with torch.set_grad_enabled(mode != "eager"):
        module_us, function_us, *planned_us = host_us(calls, settings)
    return [
        Row(
            f"{mode}, {_name(count)}",
            mode,
            Side("nn.Conv2d", module_us),
            Side(_plans(fixed), us),
            unit="us",
            details={"kernels": count, "more_us": us - module_us, "f_conv2d_us": function_us},
        )
        for (count, fixed), us in zip(layer.plans.items(), planned_us, strict=True)
    ]


def _call(function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor, mode: str) -> Call:
    if mode != "grad and backward":
        return lambda: function(x)
    gradient = torch.ones_like(function(x))
    return lambda: function(x).backward(gradient)


def host_us(calls: Sequence[Call], settings: Settings) -> list[float]:
    """Median microseconds that the host spends on each call, batches of calls in turns, waiting only in between."""
    times: list[list[float]] = [[] for _ in calls]
    count = settings.integer("calls")
    for turn in range(settings.integer("batches") + 1):
        for index, call in enumerate(calls):
            _wait(settings.device)
            start = time.perf_counter()
            for _ in range(count):
                call()
            if turn:  # the first round warms up
                times[index].append((time.perf_counter() - start) / count * 1e6)
    return [statistics.median(each) for each in times]


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _name(count: int) -> str:
    return {0: "torch's choice won", 1: "one kernel"}.get(count, f"{count} micro-batches")


def _plans(fixed: Fixed) -> str:
    """The forward's plan; the others where there are any are of the same kind."""
    return plan_line(next(iter(fixed.made.values())))


def bars(rows: list[Row], settings: Settings, kernels: int) -> list[Bar]:
    """Judged on a GPU, where the host does nothing but launch."""
    applies = settings.device.type == "cuda" and not settings.quick
    more = {(row.group, row.details["kernels"]): row.details["more_us"] for row in rows}
    further = {mode: (more[mode, kernels] - more[mode, 1]) / (kernels - 1) for mode in ("eager", "grad")}
    return [
        Bar("us more than torch, eager, one kernel", more["eager", 1], most=5, applies=applies),
        Bar("us more than torch, with grad, one kernel", more["grad", 1], most=8, applies=applies),
        Bar("us more a further kernel, eager", further["eager"], most=8, applies=applies),
        Bar("us more a further kernel, with grad", further["grad"], most=8, applies=applies),
        # Two timings of the same module differ by this much.
        Bar("us more where torch's choice won", max(more["eager", 0], more["grad", 0]), most=0.5, applies=applies),
    ]
