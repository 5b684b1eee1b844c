"""Every config of the implicit_gemm solver on the papers' layers: time, error, compile time, and where time goes.

    python benchmarks/tune_implicit_gemm.py [result.json] [--seconds 110] [--limit 64MiB] [--layers conv2,vgg]

For each layer and pass the configs that keep the workspace limit, fastest first, beside cuDNN's best engine that keeps
it and is as exact; then the fastest config's launches one by one. Needs a GPU.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from tilewise.kernels.triton.launch import Program
from tilewise.machine.device import device_name
from tilewise.machine.torch_state import fp32_precision, without_benchmark
from tilewise.plan import Config, parse_bytes
from tilewise.planner.measuring.times import Timer
from tilewise.problems.conv.axis import Axis
from tilewise.problems.conv.problem import ROLES, ConvProblem, Pass
from tilewise.problems.operands import make_operands, make_result
from tilewise.solvers.common.views import View
from tilewise.solvers.products._implicit import launches
from tilewise.solvers.products.implicit_gemm import ImplicitGemm, _layout
from tilewise.solvers.vendor.cudnn import Cudnn

LAYERS: dict[str, tuple[int, ...]] = {  # batch, in channels, out channels, size, kernel, padding
    "conv2": (256, 64, 192, 27, 5, 2),
    "conv3": (256, 192, 384, 13, 3, 1),
    "conv4": (256, 384, 384, 13, 3, 1),
    "conv5": (256, 384, 256, 13, 3, 1),
    "vgg": (64, 128, 128, 56, 3, 1),
}
EXACT = {"ieee": 1e-5, "tf32": 2e-3}
SHOWN = 6


def problem(name: str, pass_: Pass, precision: str, layout: str) -> ConvProblem:
    batch, channels, outs, size, kernel, padding = LAYERS[name]
    axis = Axis(size, kernel, 1, 1, padding, padding)
    p = ConvProblem(pass_, batch, channels, outs, (axis, axis), precision=precision, device=device_name("cuda"))
    return replace(p, layouts=(layout, layout, layout))


class Bench:
    """One problem with its tensors, a reference on some of it, and a timer."""

    def __init__(self, p: ConvProblem, timer: Timer) -> None:
        self.p, self.timer = p, timer
        self.a, self.b = make_operands(p, 1, wide=True)
        self.out = make_result(p)
        with without_benchmark(p.device_type):
            if p.pass_ is Pass.WGRAD:
                rows = [0, p.out_channels - 1]
                part = replace(p, out_channels=2, layouts=("contiguous",) * 3)
                self.want = part.reference(self.a, self.b[:, rows])
                self.slice: Any = rows
            else:
                self.slice = [0, p.batch - 1]
                part = replace(p, batch=2, layouts=("contiguous",) * 3)
                self.want = part.reference(self.a[self.slice], self.b)

    def error(self) -> float:
        got = self.out[self.slice].double()
        return ((got - self.want).norm() / self.want.norm()).item()

    def median_ms(self, call: Callable[[], object], least: int = 5, budget_ms: float = 25.0) -> float:
        first = self.timer.time_ms(call)
        repeats = max(least, min(21, int(budget_ms / max(first, 1e-2))))
        return statistics.median(self.timer.time_ms(call) for _ in range(repeats))

    def measure(self, solver: Any, c: Config, workspace: int) -> dict[str, Any]:
        row: dict[str, Any] = {"config": str(c), "mib": round(workspace / 2**20, 1)}
        try:
            start = time.perf_counter()
            run = solver.bind(self.p, c, self.a, self.b, self.out)
            row["bind_s"] = round(time.perf_counter() - start, 2)
            space = torch.full((max(workspace, 1),), 0xFF, dtype=torch.uint8, device="cuda")
            self.out.fill_(torch.nan)
            run(self.a, self.b, self.out, space)
            torch.cuda.synchronize()
            row["finite"] = bool(torch.isfinite(self.out).all())
            row["error"] = float(f"{self.error():.2e}")
            row["ms"] = round(self.median_ms(lambda: run(self.a, self.b, self.out, space)), 4)
            row["tflops"] = round(self.p.flops / row["ms"] / 1e9, 1)
        except Exception as failure:
            row["reason"] = f"{type(failure).__name__}: {failure}"[:300]
        return row

    def launches(self, c: Config) -> list[dict[str, Any]]:
        """Milliseconds, registers and spilled bytes of each launch of a config alone."""
        layout = _layout(self.p, c)
        space = torch.zeros(layout.workspace, dtype=torch.uint8, device="cuda")
        alignment = [*(self.p.alignment[ROLES.index(r)] for r in (*self.p.operands, self.p.result)), 256]
        tensors = (self.a, self.b, self.out, space)
        rows = []
        for launch in launches(layout, *map(View.of, tensors[:3]))[:6]:
            program = Program([launch], alignment, self.a.device)
            compiled = launch.compile(alignment)
            program(tensors)
            rows.append({
                "kernel": compiled.name, "grid": launch.grid, "regs": compiled.n_regs, "spills": compiled.n_spills,
                "shared": compiled.metadata.shared,
                "ms": round(self.median_ms(lambda program=program: program(tensors)), 4),
            })  # fmt: skip
        return rows


def cudnn_best(bench: Bench, limit: int, precision: str) -> dict[str, Any]:
    """cuDNN's fastest engine within the limit and the error, or why there is none."""
    solver = Cudnn()
    reasons = solver.why_not(bench.p)
    if reasons:
        return {"reason": reasons[0]}
    fits = [offer for offer in solver.details(bench.p) if offer.workspace <= limit and not offer.compiles]
    rows = [bench.measure(solver, offer.config, offer.workspace) for offer in fits]
    good = [row for row in rows if row.get("error", 1.0) < EXACT[precision] and "ms" in row]
    return min(good, key=lambda row: row["ms"]) if good else {"reason": f"none of {len(rows)} engines is exact"}


def one(name: str, pass_: Pass, arguments: argparse.Namespace, timer: Timer) -> dict[str, Any]:
    p = problem(name, pass_, arguments.precision, arguments.layout)
    solver, bench = ImplicitGemm(), Bench(p, timer)
    limit = parse_bytes(arguments.limit)
    rows = [bench.measure(solver, c, n) for c, n in solver.offers(p, limit)]
    rows.sort(key=lambda row: row.get("ms", 1e9))
    entry: dict[str, Any] = {"configs": rows, "compile_s": round(sum(row.get("bind_s", 0.0) for row in rows), 1)}
    best = rows[0]
    if "ms" in best:
        c = next(c for c, _ in solver.offers(p, limit) if str(c) == best["config"])
        try:
            entry["launches"] = bench.launches(c)
        except Exception as failure:
            entry["launches"] = f"{type(failure).__name__}: {failure}"[:300]
    entry["cudnn"] = cudnn_best(bench, limit, arguments.precision) if arguments.cudnn else {}
    return entry


def show(label: str, entry: dict[str, Any]) -> None:
    cudnn = entry["cudnn"]
    beside = f"cudnn {cudnn['ms']:.3f} ms {cudnn['config']}" if "ms" in cudnn else f"cudnn: {cudnn.get('reason', '-')}"
    print(f"{label}: compiled in {entry['compile_s']} s; {beside}", flush=True)
    for row in entry["configs"][:SHOWN]:
        if "ms" in row:
            print(f"  {row['ms']:7.3f} ms {row['tflops']:6.1f} TF/s err {row['error']:.1e} {row['mib']:6.1f} MiB "
                  f"{row['config']}{'' if row['finite'] else ' NOT FINITE'}")  # fmt: skip
    for row in entry["configs"]:
        if "reason" in row:
            print(f"  LOST {row['config']}: {row['reason'][:140]}")
    if isinstance(entry.get("launches"), list):
        print("    " + " | ".join(f"{r['kernel']} {r['grid'][0]} {r['ms']:.3f} ms r{r['regs']} s{r['spills']}"
                                  for r in entry["launches"]))  # fmt: skip
    elif "launches" in entry:
        print(f"    launches: {entry['launches']}")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("result", nargs="?")
    parser.add_argument("--seconds", type=float, default=110.0)
    parser.add_argument("--limit", default="64MiB")
    parser.add_argument("--precision", default="ieee", choices=("ieee", "tf32"))
    parser.add_argument("--layout", default="contiguous", choices=("contiguous", "channels_last"))
    parser.add_argument("--layers", default=",".join(LAYERS))
    parser.add_argument("--passes", default="fprop,dgrad,wgrad")
    parser.add_argument("--no-cudnn", dest="cudnn", action="store_false")
    arguments = parser.parse_args()
    with fp32_precision("cuda", "conv", "ieee"):
        measure_all(arguments)


def measure_all(arguments: argparse.Namespace) -> None:
    deadline = time.perf_counter() + arguments.seconds
    timer = Timer(torch.device("cuda", torch.cuda.current_device()))
    report: dict[str, Any] = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
    for name in arguments.layers.split(","):
        for pass_ in map(Pass, arguments.passes.split(",")):
            label = f"{name} {pass_.value}"
            if time.perf_counter() > deadline:
                report[label] = "out of time"
                continue
            try:
                report[label] = one(name, pass_, arguments, timer)
                show(label, report[label])
            except Exception as failure:
                report[label] = f"{type(failure).__name__}: {failure}"[:500]
                print(label, report[label])
            torch.cuda.empty_cache()
            if arguments.result:  # whatever happens next, what was measured is kept
                with open(arguments.result, "w", encoding="utf-8") as file:
                    json.dump(report, file, indent=1)


if __name__ == "__main__":
    main()
