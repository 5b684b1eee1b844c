"""What cuDNN offers for the papers' layers and what asking, building and calling cost, as JSON. Needs a GPU.

    python benchmarks/explore_cudnn.py [result.json] [--seconds 120] [--precision ieee]

For AlexNet's five layers at batch 256 and the five of fbfft's Table 4, all passes: every engine with its notes,
workspace, time and error; cuDNN's legacy algorithms beside them; milliseconds to ask for a problem the first time, for
a smaller batch of the same layer and again, to build a plan; microseconds of host time to call one.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import legacy_cudnn
import torch

from tilewise.machine.device import device_name
from tilewise.machine.torch_state import fp32_precision
from tilewise.problems.conv.axis import Axis
from tilewise.problems.conv.problem import ConvProblem, Pass
from tilewise.problems.operands import make_operands, make_result
from tilewise.solvers.vendor._cudnn import CudnnRun
from tilewise.solvers.vendor.cudnn import Cudnn

LAYERS: dict[str, tuple[int, ...]] = {  # batch, in channels, out channels, size, kernel, padding, stride
    "conv1": (256, 3, 64, 224, 11, 2, 4),
    "conv2": (256, 64, 192, 27, 5, 2, 1),
    "conv3": (256, 192, 384, 13, 3, 1, 1),
    "conv4": (256, 384, 384, 13, 3, 1, 1),
    "conv5": (256, 384, 256, 13, 3, 1, 1),
    "L1": (128, 3, 96, 128, 11, 0, 1),
    "L2": (128, 64, 64, 64, 9, 0, 1),
    "L3": (128, 128, 128, 32, 9, 0, 1),
    "L4": (128, 128, 128, 16, 7, 0, 1),
    "L5": (128, 384, 384, 13, 3, 0, 1),
}
BATCHES = (128, 64, 32, 16, 8, 4, 2, 1)


def problem(name: str, pass_: Pass, precision: str) -> ConvProblem:
    batch, channels, outs, size, kernel, padding, stride = LAYERS[name]
    axis = Axis(size, kernel, stride, 1, padding, padding)
    return ConvProblem(pass_, batch, channels, outs, (axis, axis), precision=precision, device=device_name("cuda"))


def took_ms(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return round((time.perf_counter() - start) * 1e3, 3)


def median_ms(run: Callable[[], object], repeat: int = 5) -> float:
    run()
    times = []
    for _ in range(repeat):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        run()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return round(sorted(times)[repeat // 2], 4)


def host_us(run: Callable[[], object], repeat: int = 300, rounds: int = 9) -> float:
    times = []
    for _ in range(rounds):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(repeat):
            run()
        times.append((time.perf_counter() - start) / repeat * 1e6)
    return round(sorted(times)[rounds // 2], 2)


def error(p: ConvProblem, out: torch.Tensor, want: torch.Tensor) -> float:
    got = out if p.pass_ is Pass.WGRAD else out[: want.shape[0]]
    return float(f"{((got.double() - want).norm() / want.norm()).item():.1e}")


def engines(solver: Cudnn, p: ConvProblem) -> dict[str, Any]:
    """Every engine's row: notes, MiB, milliseconds, error and milliseconds to bind; or what it raised."""
    a, b = make_operands(p)
    out = make_result(p)
    few = p if p.pass_ is Pass.WGRAD else replace(p, batch=2)
    want = few.reference(a, b) if p.pass_ is Pass.WGRAD else few.reference(a[:2], b)
    rows = {}
    for offer in solver.details(p):
        row: dict[str, Any] = {"notes": sorted(offer.notes), "mib": round(offer.workspace / 2**20, 1)}
        cost = solver.cost(p, offer.config)
        row["estimate"] = [cost.flops, cost.bytes, cost.kernels, cost.efficiency]
        rows[str(offer.config["engine"])] = row
        if offer.compiles:
            row["left_out"] = "compiles"
            continue
        try:
            space = torch.empty(max(offer.workspace, 1), dtype=torch.uint8, device="cuda")
            start = time.perf_counter()
            run = solver.bind(p, offer.config, a, b, out)
            row["bind_ms"] = round((time.perf_counter() - start) * 1e3, 3)
            out.fill_(torch.nan)
            row["ms"] = median_ms(lambda run=run, space=space: run(a, b, out, space))
            row["error"] = error(p, out, want)
        except RuntimeError as failure:
            row["raised"] = str(failure)[:200]
    return rows


def legacy(p: ConvProblem) -> dict[str, Any]:
    """cuDNN's legacy algorithms on the same problem: MiB and milliseconds, or why not."""
    a, b = make_operands(p)
    tensors = dict(zip((*p.operands, p.result), (a, b, make_result(p)), strict=True))
    padding, stride = [axis.before for axis in p.axes], [axis.stride for axis in p.axes]
    found = legacy_cudnn.algorithms(
        p.pass_.value, tensors["x"], tensors["w"], tensors["y"],
        padding=padding, stride=stride, allow_tf32=p.precision == "tf32",
    )  # fmt: skip
    rows: dict[str, Any] = {}
    for each in found:
        rows[each.name] = {"mib": round(each.workspace / 2**20, 1)}
        if each.reason:
            rows[each.name] = each.reason
            continue
        try:
            space = torch.empty(max(each.workspace, 1), dtype=torch.uint8, device="cuda")
            rows[each.name]["ms"] = median_ms(lambda each=each, space=space: each(space))
        except RuntimeError as failure:
            rows[each.name]["raised"] = str(failure)[:200]
    return rows


def asking(precision: str) -> dict[str, Any]:
    """Milliseconds to ask for AlexNet's layers by batch size, in the order a planner does; again; and in all."""
    solver = Cudnn()
    rows: dict[str, Any] = {}
    start = time.perf_counter()
    for name in ("conv1", "conv2", "conv3", "conv4", "conv5"):
        for pass_ in Pass:
            whole = problem(name, pass_, precision)
            times = []
            for batch in (256, *BATCHES):
                p = replace(whole, batch=batch)
                times.append(took_ms(lambda p=p: solver.details(p)))
            counts = [len(list(solver.configs(replace(whole, batch=batch)))) for batch in (256, 64, 1)]
            rows[f"{name} {pass_.value}"] = {"ms_by_batch": times, "offers_256_64_1": counts}
            rows[f"{name} {pass_.value}"]["again_ms"] = took_ms(lambda whole=whole: solver.details(whole))
    rows["all_ms"] = round((time.perf_counter() - start) * 1e3, 1)
    return rows


CHECKS: dict[str, tuple[Axis, Axis]] = {
    "stride 1, padding 1,1": (Axis(14, 3, 1, 1, 1, 1), Axis(14, 3, 1, 1, 1, 1)),
    "stride 1, padding 0,2": (Axis(14, 3, 1, 1, 1, 1), Axis(14, 3, 1, 1, 0, 2)),
    "stride 1, padding 2,0": (Axis(14, 3, 1, 1, 1, 1), Axis(14, 3, 1, 1, 2, 0)),
    "stride 1, padding 0,1": (Axis(14, 3, 1, 1, 1, 1), Axis(14, 3, 1, 1, 0, 1)),
    "stride 2, padding 1,1": (Axis(15, 3, 2, 1, 1, 1), Axis(15, 3, 2, 1, 1, 1)),
    "stride 3, padding 1,1": (Axis(16, 3, 3, 1, 1, 1), Axis(16, 3, 3, 1, 1, 1)),
    "stride 2 and 3, padding 1,1": (Axis(15, 3, 2, 1, 1, 1), Axis(16, 3, 3, 1, 1, 1)),
    "stride 3, padding 0,2": (Axis(16, 3, 3, 1, 0, 2), Axis(16, 3, 3, 1, 0, 2)),
    "stride 3, kernel 2": (Axis(16, 2, 3), Axis(16, 2, 3)),
    "dilation 2": (Axis(17, 3, 1, 2, 2, 2), Axis(17, 3, 1, 2, 2, 2)),
    "kernel 4, padding 0,3": (Axis(14, 4, 1, 1, 0, 3), Axis(14, 4, 1, 1, 0, 3)),
    "kernel 14": (Axis(14, 14), Axis(14, 14)),
    "kernel 1": (Axis(14, 1), Axis(14, 1)),
    "kernel 1, stride 2": (Axis(15, 1, 2), Axis(15, 1, 2)),
}


def wrong(precision: str) -> dict[str, Any]:
    """Engines further from float64 than any rounding, over small problems off the common path."""
    solver = Cudnn()
    rows: dict[str, Any] = {}
    for layout in ("contiguous", "channels_last"):
        for name, axes in CHECKS.items():
            for pass_ in Pass:
                p = ConvProblem(pass_, 4, 16, 24, axes, precision=precision, device=device_name("cuda"))
                p = replace(p, layouts=(layout,) * 3)
                found = engines(solver, p)
                bad = {e: row for e, row in found.items() if "raised" in row or not row.get("error", 0.0) < 1e-3}
                rows[f"{pass_.value} {layout} {name}"] = {"offers": len(found), **bad}
    return rows


def calling() -> dict[str, Any]:
    """Host microseconds of a call on a layer too small to fill the GPU, for the first few engines."""
    axis = Axis(8, 3, 1, 1, 1, 1)
    p = ConvProblem(Pass.FPROP, 2, 8, 8, (axis, axis), device=device_name("cuda"))
    solver = Cudnn()
    a, b = make_operands(p)
    out = make_result(p)
    rows: dict[str, Any] = {}
    for config in list(solver.configs(p))[:4]:
        run = solver.bind(p, config, a, b, out)
        assert isinstance(run, CudnnRun)
        space = torch.empty(max(solver.workspace(p, config), 1), dtype=torch.uint8, device="cuda")
        addresses = (a.data_ptr(), b.data_ptr(), out.data_ptr(), space.data_ptr())
        rows[str(config)] = {
            "tensors": host_us(lambda run=run, space=space: run(a, b, out, space)),
            "addresses": host_us(lambda run=run, at=addresses: run.run_pointers(*at)),
            "F.conv2d": host_us(lambda: torch.nn.functional.conv2d(a, b, padding=1)),
        }
    return rows


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("result", nargs="?")
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--precision", default="ieee", choices=("ieee", "tf32"))
    arguments = parser.parse_args()
    with fp32_precision("cuda", "conv", "ieee"):
        explore(arguments)


def explore(arguments: argparse.Namespace) -> None:
    deadline = time.perf_counter() + arguments.seconds
    report: dict[str, Any] = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
    report["cudnn"] = torch.backends.cudnn.version()
    solver = Cudnn()
    sections: list[tuple[str, Callable[[], Any]]] = [
        ("asking", lambda: asking(arguments.precision)),
        ("calling", calling),
        ("wrong", lambda: wrong(arguments.precision)),
    ]
    for name in LAYERS:
        for pass_ in Pass:
            p = problem(name, pass_, arguments.precision)
            sections.append((f"{name} {pass_.value}", lambda p=p: engines(solver, p)))
            sections.append((f"{name} {pass_.value} legacy", lambda p=p: legacy(p)))
    for name, work in sections:
        if time.perf_counter() > deadline:
            report[name] = "out of time"
            continue
        try:
            report[name] = work()
        except (RuntimeError, ValueError) as failure:
            report[name] = f"{type(failure).__name__}: {failure}"
        torch.cuda.empty_cache()
        print(name, file=sys.stderr, flush=True)
    text = json.dumps(report, indent=1)
    if arguments.result:
        with open(arguments.result, "w", encoding="utf-8") as file:
            file.write(text)
    else:
        print(text)


if __name__ == "__main__":
    main()
