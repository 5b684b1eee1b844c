"""Schedule documents as the program writes them, made up without measuring: networks of any length."""

from __future__ import annotations

import random
from typing import Any

from tilewise.plan import Config, Error, Measurement, Plan
from tilewise.planner.schedules.results_json import document as document_of
from tilewise.planner.schedules.results_json import layers_json, summary_json
from tilewise.problems.conv.notation import parse_layer
from tilewise.problems.conv.problem import Pass
from tilewise.report.documents import measurement_json, time_document
from tilewise.report.values import Layer, LayerResult, NetworkTime, PassResult, StepTime, summarize

MIB = 2**20
REASONS = (
    "runs on cuda, not cpu",
    "takes as many groups as channels, not 1 of 64 to 192 channels",
    "not measured: estimated {n}.059 ms, the best so far takes 0.922",
    "takes {n} bytes of workspace, the limit is 67108864",
    "raised RuntimeError: CUDNN_STATUS_NOT_SUPPORTED <engine {n}>",
)


def schedule(
    layers: int = 5,
    *,
    kind: str = "plan",
    extras: bool = True,
    policy: str = "arena",
    candidates: int = 9,
    seed: int = 0,
) -> dict[str, Any]:
    """A document of ``layers`` layers; ``kind`` is ``plan`` or ``time``, ``extras`` the fields only schedules have."""
    rng = random.Random(seed)
    results = [_layer(i, rng, timed=kind == "time") for i in range(layers)]
    options = {
        "batch": 256, "dtype": "fp32", "precision": "ieee", "layout": "contiguous", "workspace": 64 * MIB,
        "batch_sizes": "powers_of_two", "rigor": "measure", "deterministic": False,
    }  # fmt: skip
    head = {
        "target": "alexnet",
        "device": "cuda:NVIDIA H100 80GB HBM3",
        "environment": "device=cuda:NVIDIA H100 80GB HBM3 driver=570.86 torch=2.11.0+cu128 cudnn=91900",
        "options": options,
    }
    if kind == "plan":
        document = document_of(
            "plan",
            **head,
            layers=layers_json(results),
            summary=summary_json(summarize(results)),
            budget=None,
            step=None,
        )
    else:
        sides = (StepTime(31.5, 66.25, 5200 * MIB, 6.91), StepTime(20.75, 43.5, 5360 * MIB, 6.91))
        document = time_document(head, results, summarize(results), NetworkTime(*sides, 21))
    if extras:
        _extend(document, rng, policy, candidates)
    return document


def _layer(index: int, rng: random.Random, timed: bool) -> LayerResult:
    channels, size = rng.choice(((3, 224), (64, 56), (192, 27), (384, 13))) if index else (3, 224)
    text = f"mb256ic{channels}ih{size}oc{64 * rng.randint(1, 6)}oh{size}kh{rng.choice((3, 5))}"
    text = text[:-1] + ("3ph1" if text.endswith("3") else "5ph2")
    passes = (Pass.FPROP, Pass.WGRAD) if not index else (Pass.FPROP, Pass.DGRAD, Pass.WGRAD)
    problems = tuple(parse_layer(text, pass_=pass_, device="cuda:H100") for pass_ in passes)
    names = tuple(f"features.{index}.conv{i + 1}" for i in range(3 if index % 4 == 3 else 1))
    return LayerResult(Layer(names, problems), tuple(_pass(p, i, index, rng, timed) for i, p in enumerate(problems)))


def _pass(problem: Any, number: int, index: int, rng: random.Random, timed: bool) -> PassResult:
    base = rng.uniform(0.3, 12.0)
    which = (index + number) % 4
    if which == 3 and index % 5 == 4:
        return PassResult(
            problem, None, "no plan within 0 B:\n  aten: takes 11 MiB\n  fft: takes 48 MiB", base if timed else None
        )
    plan = plan_of(problem.key, which, base / rng.uniform(0.97, 3.5), rng)
    if not timed:
        return PassResult(problem, plan)
    return PassResult(
        problem, plan, "", base, None if plan.solver == "aten" else plan.time_ms * rng.uniform(0.98, 1.02)
    )


def plan_of(key: str, which: int, time_ms: float, rng: random.Random) -> Plan:
    """The framework's own, a leaf, micro-batches, or parts of both kinds inside of one another."""
    error, workspace = Error(2e-7, 3e-7), rng.randint(0, 60 * MIB)
    if which == 0:
        return Plan(key, "aten", 1, time_ms=time_ms, workspace=11 * MIB, error=error)
    if which == 1:
        config = Config(basis=(32, 32), product="batched")
        return Plan(key, "fft", 1, config, time_ms=time_ms, workspace=workspace, constant=MIB, error=error)
    fft = Plan(f"{key} mb64", "fft", 1, Config(basis=(32, 32)), time_ms=time_ms / 5, workspace=workspace)
    engine = Plan(f"{key} mb32", "cudnn", 1, Config(engine=34, knobs="tile=128x64"), time_ms=time_ms / 5, workspace=MIB)
    if which == 2:
        sizes = Config(sizes=(64, 64, 64, 32, 32))
        return Plan(key, "micro_batch", 1, sizes, (fft, engine), (3, 2), time_ms, workspace, error=error)
    half = Plan(f"{key} oc", "micro_batch", 1, Config(sizes=(128, 128)), (engine,), (2,), time_ms / 2, MIB)
    return Plan(key, "output_channels", 1, Config(sizes=(96, 96)), (half,), (2,), time_ms, workspace, error=error)


def _extend(document: dict[str, Any], rng: random.Random, policy: str, candidates: int) -> None:
    segments, moments, alive = [], [], 600 * MIB
    for layer in document["layers"]:
        for found in layer["passes"]:
            plan = found["plan"]
            found["front"], found["candidates"] = None, None
            if plan is None:
                continue
            found["front"] = front(Plan.from_json(plan), rng)
            found["candidates"] = [measurement_json(m, "cpu") for m in tried(Plan.from_json(plan), candidates, rng)]
            for name in layer["names"]:
                segments.append({"layer": name, "pass": found["problem"]["pass"], "workspace": plan["workspace"],
                                 "time_ms": plan["time_ms"]})  # fmt: skip
                alive += rng.randint(-10, 30) * MIB
                moments.append({"layer": name, "pass": found["problem"]["pass"], "alive": max(alive, 0),
                                "result": rng.randint(4, 90) * MIB, "workspace": plan["workspace"]})  # fmt: skip
    sizes = [s["workspace"] for s in segments]
    used = (sum if policy == "paper_wd" else lambda each: max(each, default=0))(sizes)
    program = {"variables": 40, "rows": 15, "solve_ms": 3.25, "optimal": True, "method": "milp"}
    document["budget"] = {"policy": policy, "total": used + 20 * MIB, "used": used, "least": used // 3,
                          "segments": segments, "program": program}  # fmt: skip
    peak = max((m["alive"] + m["result"] + m["workspace"] for m in moments), default=0)
    document["step_memory"] = {"limit": peak + 90 * MIB, "peak": peak, "least": peak // 2, "moments": moments}


def front(plan: Plan, rng: random.Random) -> list[dict[str, Any]]:
    """The plan and up to five others that are slower in less or faster in more, fastest first."""
    points = [plan]
    for i in range(rng.randint(0, 5)):
        faster = i % 2 == 0
        time = plan.time_ms * (0.8 ** (i + 1) if faster else 1.4**i)
        size = plan.workspace * 2 ** (i + 1) if faster else plan.workspace >> (2 * i)
        points.append(Plan(plan.problem, "fft", 1, Config(basis=(16 + i, 16)), time_ms=time, workspace=size))
    points.sort(key=lambda p: (p.time_ms, p.workspace))
    kept: list[Plan] = []
    for point in points:
        if not kept or point.workspace < kept[-1].workspace:
            kept.append(point)
    return [point.to_json() for point in kept]


def tried(plan: Plan, count: int, rng: random.Random) -> list[Measurement]:
    """The chosen one, slower ones and lost ones."""
    found = [Measurement(plan.solver, 1, plan.config, plan.time_ms, plan.workspace, plan.error, "", plan.time_ms * 1.5)]
    for i in range(count):
        config = Config(engine=i, knobs="tile=64x64")
        if i % 2:
            reason = REASONS[i // 2 % len(REASONS)].format(n=i)
            found.append(Measurement("cudnn" if i % 4 == 1 else "winograd", 1, config, reason=reason))
        else:
            time = plan.time_ms * rng.uniform(1.01, 4)
            found.append(Measurement("cudnn", 1, config, time, rng.randint(0, 300 * MIB), Error(1e-7, 2e-7)))
    return found
