"""How long planning takes: with empty wisdom, in this process or in one of its own, and what was compiled meanwhile.

``python -m harness.planning TASK`` plans what the JSON text TASK says and prints what :func:`apart` returns.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from tilewise.machine import cache
from tilewise.machine.device import device_name, environment
from tilewise.planner import Options, Planner
from tilewise.planner.planner import Progress
from tilewise.planner.processes.messages import Job
from tilewise.problems.conv.problem import ConvProblem
from tilewise.wisdom import Wisdom

PATIENCE_S = 3600


def seconds(path: Path, problems: Iterable[ConvProblem], options: Options, progress: Progress | None = None) -> float:
    """Wall time of planning with the wisdom at ``path``, opening and closing it included."""
    start = time.perf_counter()
    wisdom = Wisdom(path)
    Planner(wisdom, progress).plan_many(problems, options)
    wisdom.close()
    return time.perf_counter() - start


def kernels() -> int:
    """Compiled kernels on disk: Triton's and our own."""
    places = [cache.kernel_dir()]
    if importlib.util.find_spec("triton") is not None:
        from triton import knobs

        places.append(Path(knobs.cache.dir))
    return sum(1 for place in places if place.is_dir() for _ in place.rglob("*.cubin"))


def start_device(device: torch.device) -> None:
    """A first convolution: context and libraries of the framework itself are no part of planning."""
    x = torch.randn(1, 4, 8, 8, device=device)
    torch.nn.functional.conv2d(x, x)
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def apart(
    problems: Iterable[ConvProblem],
    options: Options,
    devices: Sequence[int | str],
    profile: Mapping[str, float],
    *,
    started: bool,
) -> dict[str, Any]:
    """Plan in a fresh process with empty wisdom on ``devices``: seconds, kernels compiled, and devices that took part.

    ``started``: the workers are started before the time begins. Nothing else is warm: what a process loads when it
    first needs it is in the time, on one device as on several. ``profile`` is the device's.
    """
    jobs = [Job(problem, options).to_json() for problem in problems]
    task = json.dumps({"jobs": jobs, "devices": list(devices), "profile": dict(profile), "started": started})
    folder = str(Path(__file__).resolve().parents[1])
    paths = [folder, *(os.path.abspath(path) for path in sys.path if path)]
    done = subprocess.run(
        [sys.executable, "-m", "harness.planning"],
        input=task,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=PATIENCE_S,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
    )
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    task = json.loads(sys.stdin.read())
    jobs = [Job.from_json(job) for job in task["jobs"]]
    first = task["devices"][0]
    device = torch.device("cuda", first) if isinstance(first, int) else torch.device(first)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    start_device(device)
    with tempfile.TemporaryDirectory(prefix="tilewise-benchmark-") as folder:
        wisdom = Wisdom(Path(folder) / "wisdom.sqlite3")
        wisdom.remember_profile(environment(device_name(device)).key, task["profile"])
        planner = Planner(wisdom, devices=task["devices"])
        assert planner.workers is not None
        ready = planner.workers.start() if task["started"] else len(planner.workers.places)
        before, start = kernels(), time.perf_counter()
        plans = planner.plan_many([job.problem for job in jobs], jobs[0].options)
        took = time.perf_counter() - start
        planner.close()
        time_ms = sum(plan.time_ms for plan in plans.values())
        print(json.dumps({"seconds": took, "compiled": kernels() - before, "ready": ready, "plans_ms": time_ms}))


if __name__ == "__main__":
    main()
