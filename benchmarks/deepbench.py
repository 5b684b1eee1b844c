"""DeepBench's published sizes for training: matrix products, and recurrent layers forward and with backward.

The sizes are those of Baidu's DeepBench (https://github.com/baidu-research/DeepBench, Apache-2.0), whose matrices lie
by columns: a product ``m n k`` there is one of n by k times k by m here. Both sides are timed as in ``product_grid``
and ``recurrent_layers``, whose options these are.
"""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Iterator
from pathlib import Path

import product_grid
import recurrent_layers
from harness.result import Result, Row
from harness.settings import Settings

from tilewise.machine.device import device_name
from tilewise.planner import Planner
from tilewise.problems.gemm.problem import GemmProblem
from tilewise.wisdom import Wisdom

DEFAULTS = {
    "parts": "products,layers",
    "modes": "ieee,tf32,bf16",
    "tasks": "inference,training",
    "most_mflop": "0",
    "caches": "warm",
    "cold_mib": "128",
    "rigor": "measure",
    "rounds": "7",
    "round_ms": "20",
    "seconds": "0",
}
QUICK = {
    "modes": "ieee",
    "tasks": "inference",
    "parts": "products",
    "most_mflop": "17",
    "rigor": "estimate",
    "rounds": "1",
    "round_ms": "1",
}

FEW = (16, 32, 64, 128)
Size = tuple[int, int, int, str]
"""DeepBench's m, n and k, and this library's letters for the storage of the operands."""


def products() -> list[Size]:
    """All products."""
    square, wide, tall = (1760, 2048, 2560, 4096), (24000, 48000), ((6144, 2048), (4608, 1536), (8448, 2816))
    sizes: list[Size] = []
    for op, hidden in itertools.product(("NN", "NT"), square):
        sizes += [(hidden, n, hidden, op) for n in (*FEW, 7000)]
        sizes += [(5124, 9124, hidden, op), (35, 8457, hidden, op)]
    sizes += [(hidden, 7133, hidden, "TN") for hidden in square]
    for op in ("NN", "NT"):
        sizes += [(3 * h, n, h, op) for h in (2560, 1024) for n in (*FEW, *wide)]
        sizes += [(m, n, 500000, op) for m in (512, 1024) for n in (8, 16)]
        sizes += [(m, n, k, op) for m, k in tall for n in (*wide, 16, 32)]
        sizes += [(m, n, k, op) for m in (512, 1024) for k in (2816, 2048, 2560, 1536) for n in wide]
        sizes += [(1024, 700, 512, op)]
    sizes += [(3072, 7435, 1024, "TN"), (7680, 5481, 2560, "TN")]
    sizes += [(m, n, 512, op) for m in (512, 1024) for op in ("NN", "TN") for n in (16, 32)]
    return sizes


def layers() -> list[str]:
    """All recurrent layers in the notation of ``recurrent_layers``."""
    sizes = [("rnn_tanh", 50, n, h) for h in (1760, 2048, 2560) for n in FEW]
    sizes += [("lstm", 25, n, h) for h in (512, 1024, 2048, 4096) for n in FEW]
    sizes += [("lstm", 50, n, 1536) for n in (8, 16, 32)] + [("lstm", 150, n, 256) for n in (16, 32, 64)]
    sizes += [("gru", t, 32, h) for h in (2816, 2048, 1536, 2560) for t in (1500, 750, 375, 187)]
    sizes += [("gru", 1, 32, 512), ("gru", 1500, 32, 1024), ("gru", 1500, 64, 1024)]
    return [f"{cell}:t{t}n{n}h{h}" for cell, t, n, h in sizes]


def run(settings: Settings) -> Result:
    """One row a product and mode, and one a layer, mode, task and way of running.

    ``most_mflop`` leaves out what takes more million operations; 0 leaves nothing out.
    """
    rows: list[Row] = []
    deadline = settings.deadline()
    for row in itertools.chain.from_iterable(
        {"products": product_rows, "layers": layer_rows}[part](settings) for part in settings.words("parts")
    ):
        rows.append(row)
        settings.keep(Result(rows, []))
        if deadline.passed:
            settings.say("  no time left for what follows")
            break
    return Result(rows, [])


def small(settings: Settings, flops: int) -> bool:
    """Whether a problem is not left out."""
    most = settings.integer("most_mflop")
    return not most or flops <= most * 10**6


def product_rows(settings: Settings) -> Iterator[Row]:
    """The rows of all products."""
    with tempfile.TemporaryDirectory(prefix="deepbench-") as folder:
        planner = Planner(Wisdom(Path(folder, "wisdom.sqlite3")))
        for mode, (m, n, k, op) in itertools.product(settings.words("modes"), products()):
            dtype, precision = (mode, "ieee") if mode in ("bf16", "fp16") else ("fp32", mode)
            name = device_name(settings.device)
            p = GemmProblem(n, m, k, op, dtype=dtype, precision=precision, device=name)
            if small(settings, p.flops):
                details = {"mode": mode, "op": op, "m": m, "n": n, "k": k}
                found = list(
                    product_grid.rows_of(settings, planner, p, f"{m} {n} {k} {op}", f"products {mode}", details)
                )
                settings.say("  " + "; ".join(f"{row.group} {row.name} {row.ratio:.2f}" for row in found))
                yield from found


def layer_rows(settings: Settings) -> Iterator[Row]:
    """The rows of all recurrent layers."""
    for mode, size, task in itertools.product(settings.words("modes"), layers(), settings.words("tasks")):
        if small(settings, recurrent_layers.problem_of(size, mode, task, settings.device).flops):
            found = recurrent_layers.rows_of(settings, size, mode, task)
            settings.say("  " + "; ".join(f"{row.group} {row.name} {row.ratio:.2f}" for row in found))
            yield from found
