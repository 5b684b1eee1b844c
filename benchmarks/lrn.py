"""Local response normalization of AlexNet: our kernels against torch's function, forward and with backward.

The layers are AlexNet's first and second one (Krizhevsky et al. 2012, section 3.3) at several batches, types and
layouts. Both sides are called in turns, each with a new result; times are medians. Of our configs the fastest counts,
as the planner takes it. Memory is kept between calls on both sides. On a GPU calls wait in its queue, so that the time
to launch torch's many kernels does not count. A row's details have the least time of both sides, which other processes
disturb less, the larger L2 error of our config against float64, and the time of a copy of the input, which moves the
least memory that a forward can.
"""

from __future__ import annotations

import math
import statistics
from dataclasses import replace

from harness.one_problem import row_of
from harness.result import Bar, Result, Row
from harness.settings import Settings

from tilewise import execute, solvers
from tilewise.machine.device import device_name
from tilewise.plan import Config, Plan
from tilewise.problems.lrn.checks import errors_of
from tilewise.problems.lrn.problem import LrnProblem
from tilewise.problems.operands import make_operands

LAYERS = {"norm1": ("norm1", 96, (55, 55)), "norm2": ("norm2", 256, (27, 27))}
"""Name, channels and space of AlexNet's two normalizations."""
OURS = {"cpu": "channel_window", "cuda": "channel_tiles"}
DEFAULTS = {
    "layers": "norm1,norm2",
    "batches": "1,16,64",
    "tasks": "inference,training",
    "layouts": "contiguous,channels_last",
    "dtypes": "",
    "rounds": "15",
}
"""Without ``dtypes`` those that our solver takes: fp32 on a CPU, fp32 and bf16 on a GPU."""
QUICK = {"layers": "norm2", "batches": "1", "rounds": "3", "layouts": "contiguous"}
LEAST = 4.0


def run(settings: Settings) -> Result:
    """One row a layer, batch, task, layout and type."""
    device = settings.device.type
    rows: list[Row] = []
    for dtype in settings.words("dtypes") or (("fp32",) if device == "cpu" else ("fp32", "bf16")):
        for layout in settings.chosen("layouts", {name: name for name in ("contiguous", "channels_last")}):
            for task in settings.chosen("tasks", {name: name for name in ("inference", "training")}):
                group = f"{task} {layout} {dtype}"
                for name, channels, space in settings.chosen("layers", LAYERS):
                    for batch in settings.integers("batches"):
                        p = LrnProblem(
                            batch, channels, space, 5, task=task, layout_name=layout, dtype=dtype,
                            device=device_name(settings.device),
                        )  # fmt: skip
                        rows.append(_row(settings, f"{name} N={batch}", group, p))
                        settings.say(f"  {group} {name} batch {batch}: {rows[-1].ratio:.1f}")
    bars = []
    for group in dict.fromkeys(row.group for row in rows):
        mean = math.exp(statistics.fmean(math.log(row.ratio) for row in rows if row.group == group))
        bars.append(Bar(f"{group}: geometric mean over torch", mean, least=LEAST, applies=not settings.quick))
    return Result(rows, bars)


def _row(settings: Settings, label: str, group: str, p: LrnProblem) -> Row:
    """Both times of one normalization, and our config's error, of one image."""
    solver = solvers.get(OURS[settings.device.type])
    row = row_of(settings, label, group, p, solver.name)
    small = replace(p, batch=1)
    plan = Plan(small.key, solver.name, solver.version, Config.from_key(row.details["config"]))
    bound = execute.bind(plan, small, *make_operands(small))
    count = len(p.operands)
    error = errors_of(small, lambda *tensors: bound.call(*tensors[:count])).l2
    return replace(row, details=row.details | {"batch": p.batch, "error": error})
