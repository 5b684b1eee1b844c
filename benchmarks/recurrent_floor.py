"""Steps of recurrent layers against what they take at the least where the recurrent weights stay on the chip.

The least is the larger of two times, that of the matrix units and that of reading the weights from shared memory; then
that of reading the state from the second cache, as often as multiprocessors or clusters read it; the exchange of a word
between two multiprocessors, which is measured here; and the input's product. Rates are an H100's. Layers are those of
``recurrent_layers``, forward, as replays of a CUDA graph. A row's first side is the layer, its second the least time.
"""

from __future__ import annotations

import statistics
import tempfile
from pathlib import Path
from typing import Any

import torch
from harness.ranks import graphed
from harness.result import Bar, Result, Row, Side
from harness.settings import Settings
from recurrent_layers import SIZES, calls_of, on_a_stream, problem_of
from steps import in_turns

from tilewise import solvers
from tilewise.kernels.cuda.launch import kernel
from tilewise.planner import Options, Planner
from tilewise.problems.recurrent.problem import RecurrentProblem
from tilewise.wisdom import Wisdom

DEFAULTS = {"sizes": SIZES, "modes": "bf16,ieee", "rigor": "measure", "rounds": "7", "round_ms": "25"}
QUICK = {"sizes": "rnn_tanh:t3n2h16", "modes": "bf16", "rounds": "1", "round_ms": "1"}
UNITS = {"bf16": 989e12, "fp16": 989e12, "tf32": 495e12, "ieee": 495e12 / 3}
"""Operations a second of the matrix units; fp32's products are three of TF32 parts."""
SHARED = 132 * 128 * 1.755e9
"""Bytes a second that all multiprocessors read in their shared memories."""
CACHE = 5.5e12
"""Bytes a second of the second cache."""
PASSES = 20_000
SOURCE = """
extern "C" __global__ void pass_on(unsigned* words, long long passes) {
  if (threadIdx.x) return;
  unsigned* mine = words + blockIdx.x * 64;
  unsigned* others = words + (1 - blockIdx.x) * 64;
  for (unsigned i = 1; i <= passes; ++i) {
    if (blockIdx.x == 0) asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(others), "r"(i) : "memory");
    unsigned seen;
    do asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(seen) : "l"(mine) : "memory");
    while (seen < i);
    if (blockIdx.x == 1) asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(others), "r"(i) : "memory");
  }
}
"""


def run(settings: Settings) -> Result:
    """One row a layer whose plan keeps the weights on the chip."""
    if settings.device.type != "cuda":
        return Result([], notes=["Layers whose weights stay on the chip run on GPUs."])
    exchange = exchange_us(settings.device)
    settings.say(f"  a word reaches another multiprocessor in {exchange:.2f} us")
    rows = []
    for mode in settings.words("modes"):
        for size in settings.words("sizes"):
            row = row_of(settings, size, mode, exchange)
            if row is not None:
                settings.say(f"  {row.name}: {row.baseline.value:.2f} us, at the least {row.ours.value:.2f}")
                rows.append(row)
    most = max((row.ratio for row in rows), default=0.0)
    return Result(
        rows,
        [Bar("largest ratio to the least time", most, most=2.0, applies=not settings.quick)],
        facts={"exchange_us": exchange},
    )


def exchange_us(device: torch.device) -> float:
    """Microseconds from the store of a word on one multiprocessor until another one reads it, in the median."""
    index = device.index or 0
    words = torch.zeros(128, dtype=torch.int32, device=device)
    launch = kernel(SOURCE, "pass_on", index).launch(2, 32, 0, 1, (PASSES,), together=True)
    took = []
    for _ in range(5):
        words.zero_()
        events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        events[0].record()
        launch(words.data_ptr())
        events[1].record()
        torch.cuda.synchronize(device)
        took.append(events[0].elapsed_time(events[1]) * 1e3 / PASSES / 2)
    return statistics.median(took)


def least_us(p: RecurrentProblem, mode: str, readers: float, exchange: float) -> float:
    """Microseconds of a step at the least. ``readers``: multiprocessors that read the state, a cluster as one."""
    width = p.torch_dtype("x").itemsize
    weights = p.gates * p.hidden * p.hidden
    units = 2 * p.batch * weights / UNITS[mode]
    inputs = 2 * p.batch * p.gates * p.hidden * p.inputs / UNITS[mode]
    state = p.batch * p.hidden * width * readers / CACHE
    return 1e6 * (max(units, weights * width / SHARED) + state + inputs) + exchange


def row_of(settings: Settings, size: str, mode: str, exchange: float) -> Row | None:
    """The row of a layer; None where another solver won."""
    p = problem_of(size, mode, "inference", settings.device)
    with p.flags(deterministic=False):
        with tempfile.TemporaryDirectory(prefix="recurrent-") as folder:
            plan = Planner(Wisdom(Path(folder, "wisdom.sqlite3"))).plan(p, Options(rigor=settings.text("rigor")))
        if plan.solver != "persistent_grid":
            return None
        shape: Any = plan.config["forward"]
        units, _, cluster, *_ = shape
        solver: Any = solvers.get(plan.solver)
        with on_a_stream(settings.device):
            call = calls_of(p, solver.layer(p, plan.config))["planned"]
            took = in_turns({"planned": graphed(settings.device, [call])[0]}, settings)["planned"]
    least = least_us(p, mode, -(-p.hidden // units) / cluster, exchange)
    step = statistics.median(took) * 1e3 / p.time
    return Row(f"{size} {mode}", "a step, inference", Side(f"{plan.solver} {plan.config}", step),
               Side("at the least", least), unit="us", details={"mode": mode})  # fmt: skip
