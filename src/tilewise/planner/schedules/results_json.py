"""Results as JSON: the parts that the planning documents of ``docs/json.md`` share.

A document's ``schema`` names its kind; ``version`` rises when a field changes its meaning or goes away. Fields may be
added at any time.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

from tilewise.plan import Measurement, is_busy
from tilewise.planner.options import Options
from tilewise.planner.schedules.results import LayerResult, PassResult, Summary
from tilewise.problems.base import Problem
from tilewise.problems.kinds import kind_of
from tilewise.version import VERSION

__all__ = [
    "VERSIONS",
    "document",
    "head_json",
    "layers_json",
    "measurement_json",
    "number",
    "pass_json",
    "problem_json",
    "summary_json",
]

VERSIONS = {"plan": 2, "mesh": 1, "time": 1, "explain": 1, "advise": 1, "wisdom": 1, "kernels": 1, "info": 1}
"""Version of every schema."""


def document(kind: str, **fields: Any) -> dict[str, Any]:
    """A document of ``kind`` with the fields that all have."""
    return {"schema": f"tilewise/{kind}", "version": VERSIONS[kind], "tilewise": VERSION, **fields}


def head_json(
    target: str,
    device: str,
    environment: str,
    options: Options,
    *,
    batch: int,
    dtype: str,
    precision: str,
    layout: str,
) -> dict[str, Any]:
    """The fields at the head of every planning document: for which network, device and options it holds."""
    asked = {**asdict(options), "exclude": list(options.exclude), "share_with": list(options.share_with)}
    return {
        "target": target,
        "device": device,
        "environment": environment,
        "options": {"batch": batch, "dtype": dtype, "precision": precision, "layout": layout, **asked},
    }


def layers_json(results: Iterable[LayerResult]) -> list[dict[str, Any]]:
    """Layers with the results of their passes, as JSON values."""
    return [
        {
            "names": list(result.layer.names),
            "transposed": result.layer.transposed,
            "left": result.layer.left,
            "passes": [pass_json(pass_result) for pass_result in result.passes],
        }
        for result in results
    ]


def pass_json(result: PassResult) -> dict[str, Any]:
    """The result of one pass, as JSON values."""
    front, candidates = result.front, result.candidates
    return {
        "problem": problem_json(result.problem),
        "replaced": result.replaced,
        "plan": None if result.plan is None else result.plan.to_json(),
        "reason": result.reason,
        "framework_ms": number(result.framework_ms),
        "framework_host_ms": number(result.framework_host_ms),
        "planned_ms": number(result.planned_ms),
        "planned_host_ms": number(result.planned_host_ms),
        "load": number(result.load),
        "busy": result.busy,
        "ratio": number(result.ratio),
        "runs": None if result.runs is None else asdict(result.runs),
        "front": None if front is None else [plan.to_json() for plan in front],
        "candidates": None if candidates is None else [measurement_json(m, result.problem.device) for m in candidates],
    }


def summary_json(summary: Summary) -> dict[str, Any]:
    """The totals of a network, as JSON values."""
    return {**asdict(summary), "share_replaced": summary.share_replaced}


def problem_json(problem: Problem) -> dict[str, Any]:
    """A problem, as JSON values.

    ``layer`` is null where benchdnn's notation has no text for it, ``key`` always names it.
    """
    return {
        "key": problem.key,
        "layer": kind_of(problem).notation(problem),
        "pass": problem.task,
        "dtype": problem.dtype,
        "precision": problem.precision,
        "layouts": list(problem.layouts_in_words),
        "device": problem.device,
        "flops": problem.flops,
        "bytes": problem.bytes,
    }


def measurement_json(m: Measurement, device: str) -> dict[str, Any]:
    """One candidate on ``device``, as JSON values. ``reason`` is empty unless it was lost."""
    return {
        "solver": m.solver,
        "version": m.version,
        "config": m.config.to_json(),
        "estimate_ms": number(m.estimate_ms),
        "time_ms": number(m.time_ms),
        "host_ms": number(m.host_ms),
        "framework_ms": number(m.baseline_ms),
        "framework_host_ms": number(m.baseline_host_ms),
        "dispersion": number(m.dispersion),
        "runs": m.runs,
        "load": number(m.load),
        "busy": is_busy(m.load, device),
        "workspace": m.workspace,
        "error": None if m.error is None else {"l2": number(m.error.l2), "spread": number(m.error.spread)},
        "reason": m.reason,
    }


def number(value: float | None) -> float | None:
    """``value`` if it is finite, else ``None``: JSON has neither NaN nor infinity."""
    return None if value is None or not math.isfinite(value) else value
