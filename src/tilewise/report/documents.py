"""Documents for programs: what ``--json`` prints. Every shape is described in ``docs/json.md``, which tests read.

A document's ``schema`` names its kind; ``version`` rises when a field changes its meaning or goes away. Fields may be
added at any time.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any

from tilewise import wisdom
from tilewise.notation import format_layer
from tilewise.plan import Measurement
from tilewise.problem import ConvProblem
from tilewise.report.values import LayerResult, NetworkTime, PassResult, StepTime, Summary
from tilewise.version import VERSION

__all__ = ["document", "explain_document", "plan_document", "problem_json", "time_document", "wisdom_document"]

VERSIONS = {"plan": 1, "time": 1, "explain": 1, "wisdom": 1, "info": 1}
"""Version of every schema."""


def document(kind: str, **fields: Any) -> dict[str, Any]:
    """A document of ``kind`` with the fields that all have."""
    return {"schema": f"tilewise/{kind}", "version": VERSIONS[kind], "tilewise": VERSION, **fields}


def plan_document(
    head: dict[str, Any], results: Sequence[LayerResult], summary: Summary, budget: dict[str, Any] | None = None
) -> dict[str, Any]:
    """What ``tilewise plan`` found; ``head`` says for what: ``target``, ``device``, ``environment``, ``options``.

    ``budget`` says how one workspace budget was divided, as :mod:`tilewise.nn.budget` tells it.
    """
    return document("plan", **head, layers=_layers(results), summary=_summary(summary), budget=budget)


def time_document(
    head: dict[str, Any],
    results: Sequence[LayerResult],
    summary: Summary,
    step: NetworkTime | None,
    budget: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """What ``tilewise time`` measured; ``step`` is ``None`` for a single layer."""
    fields = None
    if step is not None:
        fields = {
            "iterations": step.iterations,
            "framework": _step(step.framework),
            "planned": _step(step.planned),
            "ratio": number(step.ratio),
        }
    rest = {"summary": _summary(summary), "training_step": fields, "budget": budget}
    return document("time", **head, layers=_layers(results), **rest)


def explain_document(head: dict[str, Any], result: PassResult, tried: Iterable[Measurement]) -> dict[str, Any]:
    """The plan that won and everything that ``tilewise explain`` tried."""
    return document("explain", **head, **_pass(result), candidates=[measurement_json(m) for m in tried])


def wisdom_document(path: str, summaries: Iterable[wisdom.Summary]) -> dict[str, Any]:
    """What a store holds."""
    return document("wisdom", path=path, environments=[asdict(summary) for summary in summaries])


def problem_json(problem: ConvProblem) -> dict[str, Any]:
    """A problem; ``layer`` is null where benchdnn's notation has no text for it, ``key`` always names it."""
    try:
        layer: str | None = format_layer(problem)
    except ValueError:
        layer = None
    return {
        "key": problem.key,
        "layer": layer,
        "pass": problem.pass_.value,
        "dtype": problem.dtype,
        "precision": problem.precision,
        "layouts": list(problem.layouts),
        "device": problem.device,
        "flops": problem.flops,
        "bytes": problem.bytes,
    }


def measurement_json(m: Measurement) -> dict[str, Any]:
    """One candidate; ``reason`` is empty unless it was lost."""
    return {
        "solver": m.solver,
        "version": m.version,
        "config": m.config.to_json(),
        "time_ms": number(m.time_ms),
        "framework_ms": number(m.baseline_ms),
        "workspace": m.workspace,
        "error": None if m.error is None else {"l2": number(m.error.l2), "spread": number(m.error.spread)},
        "reason": m.reason,
    }


def number(value: float | None) -> float | None:
    """JSON has no NaN or infinity: null stands for what was not measured."""
    return None if value is None or not math.isfinite(value) else value


def _layers(results: Iterable[LayerResult]) -> list[dict[str, Any]]:
    return [
        {
            "names": list(result.layer.names),
            "transposed": result.layer.transposed,
            "left": result.layer.left,
            "passes": [_pass(found) for found in result.passes],
        }
        for result in results
    ]


def _pass(result: PassResult) -> dict[str, Any]:
    return {
        "problem": problem_json(result.problem),
        "replaced": result.replaced,
        "plan": None if result.plan is None else result.plan.to_json(),
        "reason": result.reason,
        "framework_ms": number(result.framework_ms),
        "planned_ms": number(result.planned_ms),
        "ratio": number(result.ratio),
    }


def _summary(summary: Summary) -> dict[str, Any]:
    return {**asdict(summary), "share_replaced": summary.share_replaced}


def _step(step: StepTime) -> dict[str, Any]:
    return {
        "forward_ms": step.forward_ms,
        "backward_ms": step.backward_ms,
        "step_ms": step.step_ms,
        "peak": step.peak,
        "loss": number(step.loss),
    }
