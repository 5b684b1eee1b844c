"""One pass of a layer as two sides: torch's better layout, and the plan for one of the layouts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from harness import queued
from harness.result import Row, Side
from harness.sides import Call, Tensors, framework_call, is_framework, plan_line, planned_call, race
from tilewise.plan import Plan
from tilewise.problems.conv.problem import ConvProblem

LAYOUTS = ("contiguous", "channels_last")


@dataclass(frozen=True)
class LayerPass:
    """Milliseconds of torch by layout and of the plan, from one run in turns."""

    name: str
    torch_ms: dict[str, float]
    planned_ms: float
    plan: Plan
    device_ms: tuple[float, float] | None = None
    """Of torch's better layout and of the plan, the GPU's time alone; both torch's where that was left as it is."""

    @property
    def replaced(self) -> bool:
        """Whether something other than torch's own choice won."""
        return not is_framework(self.plan)

    @property
    def best_torch_ms(self) -> float:
        """Of the better layout, the conversion not counted."""
        return min(self.torch_ms.values())

    @property
    def ours_ms(self) -> float:
        """A pass that is left to torch takes what torch takes."""
        return self.planned_ms if self.replaced else self.best_torch_ms

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {
            "name": self.name,
            **{f"torch_{layout}_ms": ms for layout, ms in self.torch_ms.items()},
            "planned_ms": self.planned_ms,
            "replaced": self.replaced,
            "device_ms": self.device_ms,
            "plan": self.plan.to_json(),
        }


def timed(name: str, problem: ConvProblem, plan: Plan, budget_ms: float = 200.0) -> LayerPass:
    """Torch in both layouts and the plan, in turns; on a GPU a second time without the host that launches them."""
    tensors = {layout: Tensors(problem, layout) for layout in LAYOUTS}
    calls = [framework_call(problem, tensors[layout]) for layout in LAYOUTS]
    calls.append(planned_call(problem, plan, tensors[problem.layout("x")]))
    *torch_ms, planned_ms = race(problem, calls, budget_ms)
    return LayerPass(
        name, dict(zip(LAYOUTS, torch_ms, strict=True)), planned_ms, plan, _device_ms(problem, plan, calls, budget_ms)
    )


def _device_ms(problem: ConvProblem, plan: Plan, calls: Sequence[Call], budget_ms: float) -> tuple[float, float] | None:
    if problem.device_type != "cuda":
        return None
    took = queued.medians(problem, calls, budget_ms=budget_ms, most=15)
    *torch_ms, planned_ms = (each.device_ms for each in took)
    best = min(torch_ms)
    return best, best if is_framework(plan) else planned_ms


def total(name: str, group: str, passes: Sequence[LayerPass], details: dict[str, Any]) -> Row:
    """The sums of several passes; what ran is named by solver."""
    solvers = dict.fromkeys(plan_line(each.plan).split()[0] for each in passes)
    return Row(
        name,
        group,
        Side("torch, better layout of each pass", math.fsum(each.best_torch_ms for each in passes)),
        Side(", ".join(solvers), math.fsum(each.ours_ms for each in passes)),
        replaced=any(each.replaced for each in passes),
        details={**details, **_device_sums(passes), "passes": [each.to_json() for each in passes]},
    )


def _device_sums(passes: Sequence[LayerPass]) -> dict[str, float]:
    times = [each.device_ms for each in passes if each.device_ms is not None]
    if len(times) < len(passes):
        return {}
    torch_ms, ours_ms = (math.fsum(each) for each in zip(*times, strict=True))
    return {"torch_device_ms": torch_ms, "device_ms": ours_ms}
