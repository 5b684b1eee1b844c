"""mu-cuDNN Figure 14: how a budget is divided over AlexNet's convolution kernels, batch 256, 120 MiB in all.

Oyama et al. 2018, IV-D. A row is one kernel: the fastest plan of its front within an equal share of the budget (WR, the
paper's 8 MiB) against the plan that the integer program gave it (``paper_wd``), both as planned. ``details`` have the
segment and its share; the facts have the program's size and time, to which the paper's ResNet-50 compares: 562
variables and 5.46 ms.
"""

from __future__ import annotations

from harness.network_kernels import kernels_of
from harness.result import Bar, Result, Row, Side
from harness.settings import NothingToMeasure, Settings
from harness.sides import plan_line

from tilewise.planner.budget.allocate import Kernel, allocate

DEFAULTS = {
    "network": "alexnet",
    "batch": "256",
    "budget": "120MiB",
    "batch_sizes": "powers_of_two",
    "rigor": "measure",
    "kernels": "0",
}
QUICK = {"batch": "2", "budget": "960MiB", "batch_sizes": "undivided", "rigor": "estimate", "kernels": "2"}


def run(settings: Settings) -> Result:
    """One row a kernel; ResNet-50 with ``network=resnet50``, ``batch=32`` and ``budget=2544MiB``."""
    (batch_sizes,) = settings.policies("batch_sizes")
    options = settings.planning(batch_sizes=batch_sizes)
    kernels = kernels_of(
        settings.text("network"), settings.integer("batch"), settings.device, settings.integer("kernels")
    )
    planner, total = settings.planner(), settings.size("budget")
    fronts = [planner.front(kernel.problem, options) for kernel in kernels]
    items = [
        Kernel(k.name, tuple((p.time_ms, p.workspace) for p in front), k.count)
        for k, front in zip(kernels, fronts, strict=True)
    ]
    found = allocate(items, total, "paper_wd")
    share = total // sum(kernel.count for kernel in kernels)
    rows, notes = [], []
    for kernel, front, choice in zip(kernels, fronts, found.choices, strict=True):
        chosen = front[choice]
        equal = next((plan for plan in front if plan.workspace <= share), None)
        if equal is None:
            notes.append(f"{kernel.name}: no plan within an equal share of {share} bytes")
            continue
        rows.append(
            Row(
                kernel.name,
                "paper_wd over equal shares",
                Side(plan_line(equal), equal.time_ms),
                Side(plan_line(chosen), chosen.time_ms),
                details={
                    "count": kernel.count,
                    "segment": chosen.workspace,
                    "share": kernel.count * chosen.workspace / max(found.used, 1),
                    "equal_workspace": equal.workspace,
                    "points": len(front),
                },
            )
        )
    if not rows:
        raise NothingToMeasure(f"no kernel has a plan within an equal share of {share} bytes")
    program = found.program
    facts = {
        "total": total,
        "used": found.used,
        "least": found.least,
        "variables": program.variables,
        "rows": program.rows,
        "solve_ms": program.solve_ms,
        "optimal": program.optimal,
        "method": program.method,
    }
    bars = [
        Bar("ms to solve the program", program.solve_ms, most=20.0),
        Bar("proven optimal", float(program.optimal), least=1.0),
        Bar("share of the budget that is used", found.used / total, most=1.0),
    ]
    return Result(rows, bars, facts, notes)
