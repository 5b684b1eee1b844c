"""How long a user waits for planning: with nothing cached, with kernels on disk, with wisdom, and in the background.

Each row is a network in a process of its own, which trains it: ``torch`` is a plain loop, the others call
``tilewise.optimize`` before it. ``cold`` begins with an empty cache directory, ``kernels`` with the kernels that the
first left but no plans, and ``wisdom`` with both: their figure is the seconds of the call. ``pack`` begins with a pack
of kernels, made by ``tilewise kernels build`` for the network and imported into an empty cache directory, ``carried``
with what ``tilewise wisdom export --with-kernels`` wrote after planning, imported in the same way. ``background`` is
``wait=False`` with kernels on disk, for ``background_s`` seconds of training: its figure is how much later than torch's
its first step is done. ``details`` have the times of the steps (what planning adds to them in the median, and over any
hundred steps in a row at the most), the second in which the first layer changed over and that in which all was planned,
and how many problems were left from time to time. ``cases`` are those of ``steps``, in the usual layout of their mode
or the ``layout`` that is given.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from harness.machine import commit
from harness.result import Bar, Result, Row, Side
from harness.settings import Settings
from harness.training import LAYOUTS, USUAL_LAYOUT, case_of, precision

import tilewise
import tilewise.nn
from tilewise.machine.torch_state import framework_flags

DEFAULTS = {
    "cases": "",
    "ways": "cold,kernels,wisdom,background",
    "goal": "step",
    "rigor": "measure",
    "torch_steps": "40",
    "background_s": "120",
    "share": "0.02",
    "layout": "",
    "seconds": "0",
}
QUICK = {"cases": "photonet@1@fp32", "ways": "kernels,background", "rigor": "estimate", "torch_steps": "2",
         "background_s": "1"}  # fmt: skip
GPU_CASES = (
    "torchvision:resnet50@64@fp32,torchvision:efficientnet_b0@64@fp32,timm:convnext_tiny@64@fp32,"
    "torchvision:resnet50@128@bf16"
)
CPU_CASES = (
    "torchvision:resnet18@8@fp32,torchvision:mobilenet_v3_large@8@fp32,timm:convnext_tiny@4@fp32,"
    "torchvision:efficientnet_b0@4@fp32,torchvision:densenet121@4@fp32"
)
WAYS = ("cold", "kernels", "pack", "carried", "wisdom", "background")
MOST_S = {"cold": 30.0, "kernels": 8.0, "pack": 8.0, "carried": 8.0, "background": 2.0}
LOOK_STEPS, LOOK_S = 20, 5.0
"""Steps, or seconds where steps are long, between two looks at how far planning is: each takes as long as a step."""
STRETCH = 100
"""Steps over which planning in the background may not take more than its share."""


def run(settings: Settings) -> Result:
    """One row a case and way."""
    deadline, rows, notes = settings.deadline(), list[Row](), list[str]()
    ways = settings.chosen("ways", {way: way for way in WAYS})
    cases = settings.text("cases") or (GPU_CASES if settings.device.type == "cuda" else CPU_CASES)
    for text in cases.split(","):
        case_of(text)  # names a wrong one before any process runs
        if deadline.passed:
            notes.append(f"out of time before {text}")
            continue
        with tempfile.TemporaryDirectory(prefix="tilewise-benchmark-") as folder:
            rows += _rows(settings, text, ways, Path(folder))
        settings.keep(Result(rows, notes=[*notes, f"ended after {text}"]))
    return Result(rows, bars(rows, settings), notes=notes)


def _rows(settings: Settings, case: str, ways: Sequence[str], cache: Path) -> list[Row]:
    """The rows of one case. The first ways fill the cache directory for those after them."""
    by_torch = _ran(settings, case, "torch", cache)
    rows = []
    filled = False
    for way in ways:
        if way in ("kernels", "carried", "background") and not filled:
            _ran(settings, case, "cold", cache)
        prepared_s = _prepare(settings, case, way, cache)
        found = _ran(settings, case, way, cache)
        filled = True
        rows.append(_row(case, way, by_torch, found | prepared_s))
        settings.say(f"  {case}, {way}: {rows[-1].ours.value:.1f} s")
    return rows


def _prepare(settings: Settings, case: str, way: str, cache: Path) -> dict[str, float]:
    """Leave in the cache directory what ``way`` begins with; the seconds of each command that it took."""
    took = dict[str, float]()
    with tempfile.TemporaryDirectory(prefix="tilewise-benchmark-") as folder:
        pack = str(Path(folder, "kernels.pack"))

        def command(name: str, *words: str) -> None:
            begin = time.perf_counter()
            _run([sys.executable, "-m", "tilewise", *words], cache)
            took[name] = time.perf_counter() - begin

        if way == "pack":
            _empty(cache)
            command("build_s", "kernels", "build", *_to_build(settings, case), "--output", pack)
        elif way == "carried":
            command("export_s", "wisdom", "export", "--with-kernels", pack)
        if way in ("cold", "pack", "carried"):
            _empty(cache)
        elif way != "wisdom":
            for path in cache.glob("wisdom*"):
                path.unlink()
        if way in ("pack", "carried"):
            command("import_s", "kernels" if way == "pack" else "wisdom", "import", pack, "--trust")
    return took


def _empty(cache: Path) -> None:
    """Drop all that is in the cache directory."""
    shutil.rmtree(cache)
    cache.mkdir(mode=0o700)


def _to_build(settings: Settings, case: str) -> list[str]:
    """What ``tilewise kernels build`` is told for a case."""
    network, batch, mode = case.rsplit("@", 2)
    layout = settings.text("layout") or USUAL_LAYOUT[mode]
    return [
        network, "--batch", batch, "--layout", layout, "--dtype", "bf16" if mode == "bf16" else "fp32",
        "--precision", "tf32" if mode == "tf32" else "ieee",
    ]  # fmt: skip


def _row(case: str, way: str, by_torch: dict[str, Any], found: dict[str, Any]) -> Row:
    """The row of one way, beside what torch's loop took."""
    details = {name: value for name, value in found.items() if name != "steps_s"}
    details |= {"torch_step_s": statistics.median(by_torch["steps_s"]), "tilewise": commit()}
    if way == "background":
        details |= _overhead(by_torch["steps_s"], found)
        return Row(case, way, Side("torch's first step", by_torch["first_s"]), Side("ours", found["first_s"]),
                   unit="s", details=details)  # fmt: skip
    return Row(case, way, Side("torch's first step", by_torch["first_s"]), Side("planning", found["planning_s"]),
               unit="s", details=details)  # fmt: skip


def _overhead(torch_s: Sequence[float], found: dict[str, Any]) -> dict[str, Any]:
    """What planning added to torch's steps, until the first layer changed over: later steps may be faster by it."""
    until = found["changed_step"] or len(found["steps_s"])
    steps, usual = found["steps_s"][:until], statistics.median(torch_s)
    stretches = [sum(steps[i : i + STRETCH]) / STRETCH for i in range(max(0, len(steps) - STRETCH + 1))]
    return {
        "steps": len(found["steps_s"]),
        "steps_before_change": until,
        "median_share": statistics.median(steps) / usual - 1 if steps else None,
        "mean_share": statistics.fmean(steps) / usual - 1 if steps else None,
        "worst_stretch_share": max(stretches) / usual - 1 if stretches else None,
        "longest_step_share": max(steps) / usual - 1 if steps else None,
    }


def bars(rows: list[Row], settings: Settings) -> list[Bar]:
    """The longest wait of each way."""
    found = []
    for way, most in MOST_S.items():
        waits = [row.ours.value - (row.baseline.value if way == "background" else 0.0) for row in rows
                 if row.group == way]  # fmt: skip
        if waits:
            found.append(Bar(f"longest wait in seconds, {way}", max(waits), most=most, applies=not settings.quick))
    return found


def _ran(settings: Settings, case: str, way: str, cache: Path) -> dict[str, Any]:
    """What one process found. Raises ``RuntimeError`` with its last words where it failed."""
    given = {
        "case": case,
        "way": way,
        "device": str(settings.device),
        "goal": settings.text("goal"),
        "rigor": settings.text("rigor"),
        "share": settings.text("share"),
        "layout": settings.text("layout"),
        "torch_steps": settings.integer("torch_steps"),
        "background_s": settings.integer("background_s"),
    }
    found: dict[str, Any] = json.loads(_run([sys.executable, str(Path(__file__)), json.dumps(given)], cache))
    return found


def _run(command: Sequence[str], cache: Path) -> str:
    """The last line that ``command`` wrote, with both caches in one directory. Raises ``RuntimeError`` if it failed."""
    environment = {**os.environ, "TILEWISE_CACHE_DIR": str(cache), "TRITON_CACHE_DIR": str(cache / "triton")}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        words = " ".join(command[1:5])
        raise RuntimeError(f"{words[:200]}: the process ended with {done.returncode}: {done.stderr[-2000:]}")
    return (done.stdout.splitlines() or [""])[-1]


def _process(given: dict[str, Any]) -> dict[str, Any]:
    """In the process of its own: train the network, and tell what was waited for."""
    device, way, case = torch.device(given["device"]), given["way"], case_of(given["case"])
    kind = LAYOUTS[given["layout"] or USUAL_LAYOUT[case.mode]]
    model = case.network.module.to(device).train().to(memory_format=kind)
    images = case.network.example_inputs(case.batch, device).to(memory_format=kind)
    optimizer = torch.optim.SGD(model.parameters(), 1e-4)

    def step() -> float:
        """One training step, and the seconds that it took."""
        begin = time.perf_counter()
        optimizer.zero_grad()
        with precision(case, device):
            loss = case.network.loss(model(images))
        loss.backward()
        optimizer.step()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter() - begin

    begin = time.perf_counter()
    if way != "torch":
        wait = way != "background"
        with precision(case, device):
            if wait:
                tilewise.optimize(model, images, goal=given["goal"], rigor=given["rigor"])
            else:
                share = float(given["share"])
                tilewise.optimize(model, images, wait=False, rigor=given["rigor"], background_share=share)
    planning_s = time.perf_counter() - begin
    step()
    first_s = time.perf_counter() - begin
    found: dict[str, Any] = {"planning_s": planning_s, "first_s": first_s, "steps_s": []}
    if way == "torch":
        found["steps_s"] = [step() for _ in range(given["torch_steps"])]
    elif way == "background":
        found |= _trained(model, step, begin, given["background_s"])
    if way != "torch":
        report = tilewise.nn.report(model)
        found |= {
            "pending": report.pending,
            "replaced_passes": sum(one.replaced for _, _, one in report.passes()),
            "step": None if report.step is None else report.step.to_json(),
        }
    return found


def _trained(model: Any, step: Callable[[], float], begin: float, seconds: float) -> dict[str, Any]:
    """Train until ``seconds`` after ``begin``, and tell how far planning is: ``left`` has times and counts."""
    steps_s, left = list[float](), list[tuple[float, int]]()
    changed_s, changed_step, all_s = None, None, None
    looked_s = 0.0
    while (now_s := time.perf_counter() - begin) < seconds:
        steps_s.append(step())
        if all_s is not None or (len(steps_s) % LOOK_STEPS and now_s - looked_s < LOOK_S):
            continue
        looked_s = now_s = time.perf_counter() - begin
        report = tilewise.nn.report(model)
        left.append((round(now_s, 1), report.pending))
        if changed_s is None and any(layer.replaced for layer in report.layers):
            changed_s, changed_step = now_s, len(steps_s)
        if not report.pending:
            all_s = now_s
    return {"steps_s": steps_s, "changed_s": changed_s, "changed_step": changed_step, "all_s": all_s, "left": left}


if __name__ == "__main__":
    asked = json.loads(sys.argv[1])
    tf32 = asked["case"].endswith("@tf32")
    with framework_flags(torch.device(asked["device"]).type, "tf32" if tf32 else "ieee", deterministic=False):
        print(json.dumps(_process(asked)))
