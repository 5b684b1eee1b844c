"""Planning time: AlexNet's three passes, powers_of_two, with empty wisdom and from wisdom.

A bar, not a figure: at most 5 s cold on a GPU and 0.2 s from wisdom. mu-cuDNN needed 3.82 s (powerOfTwo) and 34.16 s
(all) in 64 MiB on a P100 (Oyama et al. 2018, Section IV-B1). The first planning of a process also compiles kernels,
builds vendor plans and loads libraries; what it takes beyond the least of those after it, whose wisdom is as empty, is
listed apart. Measured times differ from one to the next, and with them what is compiled: at most ``runs`` follow, until
one has compiled nothing.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from harness.layers import ALEXNET, by_name
from harness.planning import kernels, seconds, start_device
from harness.result import Bar, Result, Row, Side
from harness.settings import Progress, Settings, parse_size

from tilewise.problems.conv.problem import ConvProblem, Pass

DEFAULTS = {
    "layers": "",
    "batch": "0",
    "batch_sizes": "powers_of_two",
    "limits": "none,64MiB",
    "rigor": "measure",
    "runs": "5",
}
QUICK = {"layers": "conv5", "batch": "2", "limits": "64MiB", "runs": "1"}


def run(settings: Settings) -> Result:
    """One row a limit: cold planning against planning from the wisdom it left."""
    batch = settings.integer("batch")
    problems = [
        layer.problem(pass_, settings.device, batch=batch)
        for layer in settings.chosen("layers", by_name(ALEXNET))
        for pass_ in Pass
    ]
    start_device(settings.device)
    rows = [_row(settings, limit, problems) for limit in settings.words("limits")]
    return Result(rows, bars(rows, settings))


def _row(settings: Settings, limit: str, problems: list[ConvProblem]) -> Row:
    size = None if limit == "none" else parse_size("limits", limit)
    options = settings.planning(size, settings.policies("batch_sizes")[0])
    runs = max(1, settings.integer("runs"))
    with tempfile.TemporaryDirectory(prefix="tilewise-benchmark-") as folder:
        settings.say(f"{limit}: planning {len(problems)} kernels with empty wisdom, {1 + runs} times at most")
        took: list[float] = []
        compiled: list[int] = []
        while len(took) < 2 or (len(took) <= runs and compiled[-1]):
            path, before = Path(folder) / f"{len(took)}.sqlite3", kernels()
            took.append(seconds(path, problems, options, Progress()))
            compiled.append(kernels() - before)
        known_s = min(seconds(path, problems, options, Progress()) for _ in range(3))
    cold_s = min(took[1:])
    return Row(
        f"{len(problems)} kernels, limit {limit}",
        "cold over wisdom",
        Side("planning with empty wisdom", cold_s),
        Side("planning from wisdom", known_s),
        unit="s",
        details={
            "cold_s": took,
            "compiled": compiled,
            "compilation_s": max(0.0, took[0] - cold_s),
            "batch_sizes": options.batch_sizes,
            "limit": limit,
        },
    )


def bars(rows: list[Row], settings: Settings) -> list[Bar]:
    """Judged on a GPU for the whole of AlexNet."""
    applies = settings.device.type == "cuda" and not settings.quick
    cold = max(row.baseline.value for row in rows)
    known = max(row.ours.value for row in rows)
    return [
        Bar("seconds of planning with empty wisdom, compilation apart", cold, most=5.0, applies=applies),
        Bar("seconds of planning from wisdom", known, most=0.2, applies=applies),
    ]
