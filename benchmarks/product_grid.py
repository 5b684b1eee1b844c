"""Products of recurrent layers over a grid of sizes: planned against torch's own call, and where times jump.

The post's curves (Diamos 2016, "Optimizing RNN performance"): a weight of H by H and N rows of activations. ``nt`` is
the forward of a linear layer, ``nn`` the gradient of its input, ``tn`` that of its weight. ``nn_wide`` is the weight
times activations that are stored as H by N, whose leading dimension is N, odd ones included. Modes are ieee or tf32
(fp32), bf16 or fp16. On a GPU all sides are CUDA graphs of many calls. With ``warm`` caches all calls have the same
tensors; with ``cold`` ones they go through so many copies that none is in a cache when its turn comes again. Sides are
timed in turns; times are medians.

Beside torch's call and the plan there is the vendor's best: the fastest of torch's call and of all that cuBLASLt's
heuristic returns. Where the plan runs kernels of our own, their gain over it is reported apart.

The whole grid takes long: ``modes``, ``ops`` and ``hidden`` choose a part of it, and
``seconds`` ends a run in time with what it has.

A cliff is a size whose product takes longer than that of a larger one, or runs at a much lower rate than that of a
smaller one. Cliffs are those of the planned times, and reported for every mode, operation and state of the caches, with
the sizes where the worst is. Larger sizes are planned first, so that smaller ones can be computed as they are. Bars are
those of an H100.
"""

from __future__ import annotations

import math
import statistics
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from harness.ranks import graphed
from harness.result import Bar, Result, Row, Side, geometric_mean
from harness.settings import Settings
from steps import in_turns

from tilewise import execute, solvers
from tilewise.machine.device import device_name
from tilewise.plan import Plan
from tilewise.planner import Options, Planner
from tilewise.problems.gemm.problem import GemmProblem
from tilewise.problems.operands import make_operands
from tilewise.wisdom import Wisdom

DEFAULTS = {
    "modes": "ieee,tf32,bf16",
    "ops": "nt,nn,tn,nn_wide",
    "hidden": "512,1024,1760,2560",
    "short": "1,2,4,8,9,16,17,32,33,48,64,65,96,127,128,129,192,256",
    "caches": "warm,cold",
    "cold_mib": "128",
    "rigor": "measure",
    "rounds": "7",
    "round_ms": "5",
    "seconds": "0",
}
QUICK = {
    "modes": "ieee",
    "hidden": "64",
    "short": "3,5",
    "cold_mib": "1",
    "rigor": "estimate",
    "rounds": "1",
    "round_ms": "1",
}
CALLS = 20
"""The least number of calls in a graph, so that starting it counts little."""
MOST_SHORT = 128
"""The bar for the mean is over mini-batches up to this."""
VENDORS = ("aten_gemm", "cublaslt_gemm")
OWN = ("thin_gemm", "stream_k_gemm")
"""Solvers that run the vendor's kernels alone, and kernels of our own alone. Others change what the vendor is given."""
CORNER = "nn_wide"
"""The operation at which torch's rate falls most from N=64 to N=65."""
LONGER, SLOWER = 1.05, 0.9
"""A product may take so many times as long as a larger one, and have this share of the best rate of a smaller one."""


def run(settings: Settings) -> Result:
    """One row a mode, operation, size and state of the caches."""
    rows: list[Row] = []
    deadline = settings.deadline()
    with tempfile.TemporaryDirectory(prefix="products-") as folder:
        planner = Planner(Wisdom(Path(folder, "wisdom.sqlite3")))
        for mode in settings.words("modes"):
            for op in settings.words("ops"):
                for hidden in settings.integers("hidden"):
                    if deadline.passed:
                        settings.say(f"  no time left for {mode} {op} {hidden} and what follows")
                        return Result(rows, bars(settings, rows))
                    found = curve(settings, planner, mode, op, hidden)
                    settings.say(f"  {mode} {op} {hidden}: " + ", ".join(f"{row.ratio:.2f}" for row in found))
                    rows += found
                    settings.keep(Result(rows, []))
    return Result(rows, bars(settings, rows))


def curve(settings: Settings, planner: Planner, mode: str, op: str, hidden: int) -> list[Row]:
    """The rows of one operation and weight."""
    found: dict[int, list[Row]] = {}
    for short in sorted(settings.integers("short"), reverse=True):
        p = problem_of(mode, op, hidden, short, settings.device)
        details = {"mode": mode, "op": op, "hidden": hidden, "short": short}
        found[short] = list(rows_of(settings, planner, p, f"H={hidden} N={short}", f"{mode} {op}", details))
    return [row for short in settings.integers("short") for row in found[short]]


def problem_of(mode: str, op: str, hidden: int, short: int, device: torch.device) -> GemmProblem:
    """The product of an operation. Raises ``KeyError`` for another."""
    m, n, k = {"nt": (short, hidden, hidden), "nn": (short, hidden, hidden), "tn": (hidden, hidden, short),
               "nn_wide": (hidden, short, hidden)}[op]  # fmt: skip
    dtype, precision = (mode, "ieee") if mode in ("bf16", "fp16") else ("fp32", mode)
    return GemmProblem(m, n, k, op[:2].upper(), dtype=dtype, precision=precision, device=device_name(device))


def rows_of(
    settings: Settings, planner: Planner, p: GemmProblem, name: str, group: str, details: dict[str, Any]
) -> Iterable[Row]:
    """The rows of one product: one for each state of the caches."""
    with p.flags(deterministic=False):
        options = Options(rigor=settings.text("rigor"), cuda_graphs=p.device_type == "cuda")
        plan = planner.plan(p, options)
        others = tuple(solver.name for solver in solvers.solving(GemmProblem) if solver.name not in VENDORS)
        vendor = planner.plan(p, replace(options, exclude=others))  # mostly known: all of it has just been measured
        replaced, own = not solvers.get(plan.solver).baseline, is_own(plan)
        for cache in settings.words("caches"):
            calls = {side: calls_of(settings, p, each, cache) for side, each in sides_of(p, plan, vendor).items()}
            count = calls["torch"][1]
            took = in_turns({side: call for side, (call, _) in calls.items()}, settings)
            torchs, ours, vendors = (
                statistics.median(took[side]) * 1e3 / count for side in ("torch", "planned", "vendor")
            )
            ours, vendors = ours if replaced else torchs, vendors if vendor.solver == "cublaslt_gemm" else torchs
            found = {
                **details, "cache": cache, "solver": plan.solver, "own": own, "vendor": str(vendor),
                "vendor_us": vendors, "gflops": p.flops / ours / 1e3, "torch_gflops": p.flops / torchs / 1e3,
                "vendor_gflops": p.flops / vendors / 1e3,
            }  # fmt: skip
            yield Row(
                name, f"{group} {cache}", Side("torch", torchs), Side(str(plan), ours), unit="us", replaced=replaced,
                details=found,
            )  # fmt: skip


def is_own(plan: Plan) -> bool:
    """Whether all that a plan runs are kernels of our own."""
    return all(map(is_own, plan.children)) if plan.children else plan.solver in OWN


def sides_of(p: GemmProblem, plan: Plan, vendor: Plan) -> dict[str, Plan]:
    """The plan, the vendor's best, and torch's own call as one."""
    solver = solvers.get("aten_gemm")
    by_torch = Plan(p.key, solver.name, solver.version, next(iter(solver.configs(p))))
    return {"torch": by_torch, "planned": plan, "vendor": vendor}


def calls_of(settings: Settings, p: GemmProblem, plan: Plan, cache: str) -> tuple[Callable[[], object], int]:
    """A step of several calls by a plan, and how many they are."""
    copies = 1 if cache == "warm" else max(2, math.ceil(settings.integer("cold_mib") * 2**20 / p.bytes))
    tensors = [make_operands(p, seed) for seed in range(copies)]
    bound = execute.bind(plan, p, *tensors[0])
    count = max(copies, CALLS)
    calls = [partial(bound.call, *tensors[i % copies]) for i in range(count)]

    def step() -> None:
        for call in calls:
            call()

    return graphed(settings.device, [step])[0], count


def bars(settings: Settings, rows: list[Row]) -> list[Bar]:
    """Means and least ratios by mode and state of the caches, and the worst cliffs."""
    applies = not settings.quick and settings.device.type == "cuda"
    found = []
    for mode, cache in dict.fromkeys((str(row.details["mode"]), str(row.details["cache"])) for row in rows):
        some = [row for row in rows if row.details["mode"] == mode and row.details["cache"] == cache]
        what = f"{mode}, {cache}"
        few = [row.ratio for row in some if int(row.details["short"]) <= MOST_SHORT]
        if few:
            mean = math.exp(statistics.fmean(map(math.log, few)))
            found.append(Bar(f"geometric mean over torch, N <= {MOST_SHORT}, {what}", mean, least=1.3, applies=applies))
        found.append(Bar(f"least over torch, {what}", min(row.ratio for row in some), least=0.97, applies=applies))
        found += bars_of_own(some, what)
        for op in dict.fromkeys(str(row.details["op"]) for row in some):
            longer, slower = cliffs([row for row in some if row.details["op"] == op])
            where = f"{mode}, {op}, {cache}"
            found.append(
                Bar(f"time over that of a larger N, {where}{longer[1]}", longer[0], most=LONGER, applies=applies)
            )
            found.append(
                Bar(f"rate over the best of a smaller N, {where}{slower[1]}", slower[0], least=SLOWER, applies=applies)
            )
        corner = [
            row.ratio for row in some if mode == "bf16" and (row.name, row.details["op"]) == ("H=2560 N=65", CORNER)
        ]
        if corner:
            found.append(Bar(f"H=2560, N=65 over torch, {what}", min(corner), least=2.5, applies=applies))
    return found


def bars_of_own(rows: list[Row], what: str) -> list[Bar]:
    """What kernels of our own gain over the best of the vendor's, which is reported and not judged."""
    gains = [float(row.details["vendor_us"]) / row.ours.value for row in rows if row.details["own"]]
    first = [row.baseline.value / float(row.details["vendor_us"]) for row in rows]
    found = [
        Bar(f"share of products by kernels of our own, {what}", len(gains) / len(rows), applies=False),
        Bar(f"geometric mean of the vendor's best over torch, {what}", geometric_mean(first), applies=False),
    ]
    if gains:
        mean = geometric_mean(gains)
        found.append(Bar(f"geometric mean of our own kernels over the vendor's best, {what}", mean, applies=False))
        found.append(Bar(f"least of our own kernels over the vendor's best, {what}", min(gains), applies=False))
    return found


def cliffs(rows: list[Row]) -> tuple[tuple[float, str], tuple[float, str]]:
    """The worst planned time in units of that of a larger N, and the worst rate in units of the best of a smaller N.

    Behind each stands in words where it is. A plan that keeps torch's own call takes as long as that.
    """
    longer, slower = (0.0, ""), (math.inf, "")
    curves: dict[int, list[Row]] = {}
    for row in rows:
        curves.setdefault(int(row.details["hidden"]), []).append(row)
    for hidden, curve in curves.items():
        curve.sort(key=lambda row: int(row.details["short"]))
        sizes = [int(row.details["short"]) for row in curve]
        times = [row.ours.value if row.replaced else row.baseline.value for row in curve]
        rates = [float(row.details["gflops"]) for row in curve]
        for i in range(len(curve) - 1):
            least = min(range(i + 1, len(curve)), key=times.__getitem__)
            most = max(range(i + 1), key=rates.__getitem__)
            longer = max(longer, (times[i] / times[least], f" (H={hidden}, N={sizes[i]} and {sizes[least]})"))
            slower = min(slower, (rates[i + 1] / rates[most], f" (H={hidden}, N={sizes[i + 1]} and {sizes[most]})"))
    return longer if longer[1] else (math.nan, ""), slower if slower[1] else (math.nan, "")
