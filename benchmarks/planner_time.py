"""Planning time: AlexNet's three passes, powers_of_two, with empty wisdom and from wisdom.

A bar, not a figure: at most 5 s cold on a GPU and 0.2 s from wisdom. mu-cuDNN needed 3.82 s (powerOfTwo) and 34.16 s
(all) in 64 MiB on a P100 (Oyama et al. 2018, Section IV-B1). The first planning of a process also compiles kernels,
builds vendor plans and loads libraries; what it takes beyond the ``runs`` after it, whose wisdom is as empty, is listed
apart. The least of those counts: measured times differ from one to the next, and with them what is compiled.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterable
from pathlib import Path

import torch
from harness.layers import ALEXNET, by_name
from harness.result import Bar, Result, Row, Side
from harness.settings import Progress, Settings, parse_size

from tilewise.planner import Options, Planner
from tilewise.problem import ConvProblem, Pass
from tilewise.wisdom import Wisdom

DEFAULTS = {
    "layers": "",
    "batch": "0",
    "batch_sizes": "powers_of_two",
    "limits": "none,64MiB",
    "rigor": "measure",
    "runs": "3",
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
    _start_device(settings.device)
    rows = [_row(settings, limit, problems) for limit in settings.words("limits")]
    return Result(rows, bars(rows, settings))


def _row(settings: Settings, limit: str, problems: list[ConvProblem]) -> Row:
    size = None if limit == "none" else parse_size("limits", limit)
    options = settings.planning(size, settings.policies("batch_sizes")[0])
    runs = max(1, settings.integer("runs"))
    with tempfile.TemporaryDirectory(prefix="tilewise-benchmark-") as folder:
        settings.say(f"{limit}: planning {len(problems)} kernels with empty wisdom, {1 + runs} times")
        first_s = _seconds(Path(folder) / "first.sqlite3", problems, options)
        again = [Path(folder) / f"again{number}.sqlite3" for number in range(runs)]
        cold_s = min(_seconds(path, problems, options) for path in again)
        known_s = min(_seconds(again[-1], problems, options) for _ in range(3))
    return Row(
        f"{len(problems)} kernels, limit {limit}",
        "cold over wisdom",
        Side("planning with empty wisdom", cold_s),
        Side("planning from wisdom", known_s),
        unit="s",
        details={
            "first_s": first_s,
            "compilation_s": max(0.0, first_s - cold_s),
            "batch_sizes": options.batch_sizes,
            "limit": limit,
        },
    )


def _seconds(path: Path, problems: Iterable[ConvProblem], options: Options) -> float:
    """Wall time of planning with the wisdom at ``path``, opening and closing it included."""
    start = time.perf_counter()
    wisdom = Wisdom(path)
    Planner(wisdom, Progress()).plan_many(problems, options)
    wisdom.close()
    return time.perf_counter() - start


def _start_device(device: torch.device) -> None:
    """A first convolution: context and libraries of the framework itself are no part of planning."""
    x = torch.randn(1, 4, 8, 8, device=device)
    torch.nn.functional.conv2d(x, x)
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def bars(rows: list[Row], settings: Settings) -> list[Bar]:
    """Judged on a GPU for the whole of AlexNet."""
    applies = settings.device.type == "cuda" and not settings.quick
    cold = max(row.baseline.value for row in rows)
    known = max(row.ours.value for row in rows)
    return [
        Bar("seconds of planning with empty wisdom, compilation apart", cold, most=5.0, applies=applies),
        Bar("seconds of planning from wisdom", known, most=0.2, applies=applies),
    ]
