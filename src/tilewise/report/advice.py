"""Advice on sizes as a table, as text, and as a document for programs."""

from __future__ import annotations

from typing import Any

from rich.markup import escape

from tilewise.advice import Advice, Part, Point
from tilewise.planner.schedules.results_json import document, number, problem_json
from tilewise.report.sheet import Sheet
from tilewise.report.tables import light_table
from tilewise.report.words import NOTHING, format_ms, format_ratio, marked

__all__ = ["advice_table", "advice_text", "advise_document"]

LEVELS = {
    "torch": "by torch's own choice alone, as there was no time for plans, which may change what is best",
    "candidates": "by the fastest candidate of each, most of them not checked",
    "plans": "by checked plans",
}
"""How points were measured, by level."""


def advice_table(advice: Advice) -> Sheet:
    """The points worth naming: their sizes, samples a second beside what was asked, rates, and what they are best for.

    Several parts of a step (the passes of a layer, say) have their plans below one another.
    """
    axes = advice.sweep.axes
    table = light_table(
        *((axis.name, "right") for axis in axes), ("samples/s", "right"), ("of asked", "right"), ("TFLOP/s", "right"),
        ("torch", "right"), ("ms", "right"), ("best for", "text"), ("plan", "note"),
    )  # fmt: skip
    asked = advice.asked
    for named in advice.named():
        point = named.point
        ratio = point.samples_per_second / asked.samples_per_second if asked.ms else None
        table.add_row(
            *map(str, point.sizes),
            _rate(point.samples_per_second),
            format_ratio(ratio),
            _rate(point.rate),
            _rate(point.torch_rate),
            marked(format_ms(point.ms), point.busy),
            escape(", ".join(named.roles)),
            escape("\n".join(_plan_text(part, len(point.parts) > 1) for part in point.parts)),
        )
    return table


def advice_text(advice: Advice) -> str:
    """What to pick and why, and how it was measured, in lines."""
    sweep = advice.sweep
    lines = []
    if advice.best.ms and advice.best.sizes != advice.asked.sizes:
        lines.append(f"[bold]most samples a second: {escape(sweep.text(advice.best.sizes))}[/]")
    lines += [f"- {escape(line)}" for line in advice.why]
    within = ", ".join(f"{axis.name} {axis.values[0]} to {axis.values[-1]}" for axis in sweep.axes)
    over = "[yellow]stopped before all was measured: the same again begins with what is known now[/]"
    end = "nothing else was expected to be better" if advice.is_done else over
    turns = "; those above were timed in turns" if advice.finals else ""
    lines.append(
        f"{len(advice.points)} points of {within} in {advice.seconds:.0f} s, {LEVELS[advice.level]}{turns}; {end}"
    )
    if any(point.busy for point in advice.finals or advice.points):
        lines.append("[yellow]other processes kept the host busy: times are doubtful until taken on a quiet host[/]")
    return "\n".join(lines)


def advise_document(head: dict[str, Any], advice: Advice) -> dict[str, Any]:
    """The document of ``tilewise advise``. ``head`` says what was asked: target, device, environment, options."""
    sweep = advice.sweep
    return document(
        "advise",
        **head,
        axes=[
            {"name": x.name, "asked": x.asked, "least": x.values[0], "most": x.values[-1], "unit": x.unit}
            for x in sweep.axes
        ],
        batch_axis=sweep.batch,
        level=advice.level,
        done=advice.is_done,
        seconds=advice.seconds,
        asked=_point_json(advice, advice.asked),
        best=_point_json(advice, advice.best),
        fastest=_point_json(advice, advice.fastest),
        named=[{"roles": list(x.roles), "point": _point_json(advice, x.point)} for x in advice.named()],
        points=[_point_json(advice, point) for point in advice.points],
        why=list(advice.why),
    )


def _point_json(advice: Advice, point: Point) -> dict[str, Any]:
    """The fields of one point."""
    return {
        "sizes": advice.sweep.named(point.sizes),
        "samples": point.samples,
        "ms": number(point.ms),
        "samples_per_second": number(point.samples_per_second) if point.ms else None,
        "tflops": number(point.rate) if point.ms else None,
        "torch_tflops": number(point.torch_rate),
        "checked": point.checked,
        "busy": point.busy,
        "parts": [_part_json(part) for part in point.parts],
    }


def _part_json(part: Part) -> dict[str, Any]:
    """The fields of one problem of a point."""
    return {
        "problem": problem_json(part.problem),
        "ms": number(part.ms),
        "torch_ms": number(part.torch_ms),
        "solver": part.solver,
        "plan": part.plan,
        "reason": part.reason,
    }


def _plan_text(part: Part, is_named: bool) -> str:
    """What computes a part, or why nothing does; with the part's name where there are several."""
    text = part.plan or f"no plan: {part.reason}"
    return f"{part.problem.task}: {text}" if is_named else text


def _rate(value: float | None) -> str:
    """A rate with three digits; ``-`` where unknown."""
    return NOTHING if not value else f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"
