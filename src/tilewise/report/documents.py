"""JSON documents for programs: what ``--json`` prints. ``docs/json.md`` describes each of them, and tests check it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any

from tilewise import wisdom
from tilewise.kernels.packs.summary import Held
from tilewise.nn.step.result import StepReport
from tilewise.planner.schedules.results_json import (
    document,
    layers_json,
    measurement_json,
    number,
    pass_json,
    problem_json,
    summary_json,
)
from tilewise.report.explained import Explained, answer_text, why_not
from tilewise.report.values import LayerResult, NetworkTime, StepTime, Summary

__all__ = [
    "document",
    "explain_document",
    "kernels_document",
    "measurement_json",
    "problem_json",
    "time_document",
    "wisdom_document",
]


def time_document(
    head: dict[str, Any],
    results: Sequence[LayerResult],
    summary: Summary,
    step: NetworkTime | None,
    budget: dict[str, Any] | None = None,
    rates: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """The document of ``tilewise time``.

    ``head`` says what was timed: ``target``, ``device``, ``environment``, ``options``. ``step`` is ``None`` for a
    single layer, ``budget`` where there was none, ``rates`` where it is not known what the device can reach.
    """
    fields = None
    if step is not None:
        fields = {
            "iterations": step.iterations,
            "framework": _step(step.framework),
            "planned": _step(step.planned),
            "ratio": number(step.ratio),
            "compared": None if step.compared is None else _compared(step.compared),
            "taken_back": sorted(problem.key for problem in step.taken_back),
        }
    totals = summary_json(summary)
    layers = layers_json(results)
    return document("time", **head, layers=layers, summary=totals, training_step=fields, budget=budget, rates=rates)


def explain_document(head: dict[str, Any], explained: Explained) -> dict[str, Any]:
    """The document of ``tilewise explain``: the answer in words, the plan that won and everything that was tried."""
    candidates = [
        {
            **measurement_json(m, explained.device),
            "chosen": m is explained.chosen,
            "why_not": why_not(m, explained),
        }
        for m in explained.tried
    ]
    fields = {**head, **pass_json(explained.result), "candidates": candidates}
    return document("explain", **fields, answer=answer_text(explained))


def wisdom_document(path: str, summaries: Iterable[wisdom.Summary]) -> dict[str, Any]:
    """The document of what a store holds."""
    return document("wisdom", path=path, environments=[asdict(summary) for summary in summaries])


def _compared(compared: StepReport) -> dict[str, Any]:
    """The fields of the comparison of whole steps."""
    fields = compared.to_json()
    return {name: number(value) if isinstance(value, float) else value for name, value in fields.items()}


def kernels_document(path: str, held: Iterable[Held]) -> dict[str, Any]:
    """The document of the compiled kernels in a pack, or in the caches of this user."""
    return document("kernels", path=path, held=[asdict(each) for each in held])


def _step(step: StepTime) -> dict[str, Any]:
    """The fields of one training step."""
    return {
        "forward_ms": step.forward_ms,
        "backward_ms": step.backward_ms,
        "step_ms": step.step_ms,
        "peak": step.peak,
        "loss": number(step.loss),
    }
