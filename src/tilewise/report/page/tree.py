"""What a row opens to: the problem, the plan tree, what was tried and why it lost."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable

from tilewise.plan import Measurement
from tilewise.report.page.contents import Layer, Part, Report
from tilewise.report.page.html import Child, Markup, table, tag
from tilewise.report.page.words import (
    NOTHING,
    count,
    distance,
    format_ms,
    format_ratio,
    milliseconds,
    plan_text,
    rate,
    short,
    size,
)
from tilewise.report.tables import walk

__all__ = ["inside"]


def inside(part: Part, layer: Layer, report: Report, most: int) -> list[Child]:
    """All about one pass; at most ``most`` measured and as many lost candidates are listed."""
    return [_problem(part, layer), *_tree(part, report), *_tried(part, most)]


def _problem(part: Part, layer: Layer) -> Markup:
    facts: list[tuple[str, Child]] = [("problem", tag("code", part.text or part.key)) if part.text or part.key else ("", "")]
    if layer.transposed:
        facts.append(("transposed", "its forward is dgrad"))
    if len(part.names) > 1:
        facts.append(("equal layers", short(", ".join(part.names), 600)))
    if part.flops is not None:
        facts.append(("work", f"{part.flops / 1e9:.4g} GFLOP by the direct method; {rate(part.flops, part.ran_ms or part.plan_ms)}"))
    if part.bytes is not None:
        facts.append(("operands and result", size(part.bytes)))
    if part.saved_ms is not None and part.replaced:
        words = "saves" if part.saved_ms >= 0 else "loses"
        each = " in all" if len(part.names) > 1 else ""
        facts.append(("against the framework", f"{words} {milliseconds(abs(part.saved_ms))}{each}"))
    return tag("dl", [tag("div", tag("dt", name), tag("dd", value)) for name, value in facts if name], class_="facts")


def _tree(part: Part, report: Report) -> list[Child]:
    if part.plan is None:
        return [tag("p", "No plan: ", part.reason or "the document does not say why.", class_="why bad")]
    rows = []
    for depth, times, plan in walk(part.plan):
        name = f"{times} x {plan_text(plan)}" if times > 1 else plan_text(plan)
        rows.append(
            [
                tag("span", name, class_=f"d{min(depth, 8)}"),
                format_ms(plan.time_ms),
                size(plan.workspace),
                size(plan.constant) if plan.constant else NOTHING,
                distance(plan.error),
                distance(plan.error, "spread"),
            ]
        )
    head = "Plan (left to torch)" if not part.replaced else "Plan"
    if report.rigor == "estimate":
        head += ", times estimated"
    return [table(head, ("step", "#ms", "#workspace", "#kept", "#L2 error", "#spread"), rows)]


def _tried(part: Part, most: int) -> list[Child]:
    if part.candidates is None:
        if not part.text:
            return [tag("p", "The document does not say what else was tried.", class_="note")]
        command = tag("code", f"tilewise explain {part.text} --pass {part.pass_}")
        return [tag("p", "The document does not say what else was tried; ", command, " does.", class_="note")]
    won = [m for m in part.candidates if not m.reason]
    lost = _grouped(m for m in part.candidates if m.reason)
    won.sort(key=lambda m: (math.inf if m.time_ms is None else m.time_ms, m.solver))
    chosen = next((m for m in won if _chosen(m, part)), None)
    rows = [_measured(m, m is chosen, part) for m in won[:most]]
    if chosen is not None and chosen not in won[:most]:
        rows.append(_measured(chosen, True, part))
    rows += [_lost(m, times) for m, times in lost[:most]]
    notes = []
    if len(won) > most:
        notes.append(f"{len(won) - most} slower ones that were measured")
    if len(lost) > most:
        notes.append(f"{sum(times for _, times in lost[most:])} lost ones")
    columns = ("solver", "config", "#ms", "#of plan's time", "#workspace", "#L2 error", "why it lost")
    caption = f"Tried: {count(len(won), 'candidate')} measured, {len(part.candidates) - len(won)} lost"
    more = tag("p", f"Not listed: {' and '.join(notes)}; the document has them.", class_="note") if notes else None
    return [table(caption, columns, rows), more]


def _chosen(m: Measurement, part: Part) -> bool:
    return part.plan is not None and m.solver == part.plan.solver and m.config == part.plan.config


def _measured(m: Measurement, chosen: bool, part: Part) -> list[str]:
    ratio = m.time_ms / part.plan_ms if m.time_ms is not None and part.plan_ms else None
    why = "chosen" if chosen else "slower" if ratio is not None and ratio > 1 else NOTHING
    if why == NOTHING and part.plan is not None and m.workspace is not None and m.workspace > part.plan.workspace:
        why = "takes more workspace than the plan"
    return [
        tag("b", m.solver) if chosen else m.solver,
        short(str(m.config), 160),
        format_ms(m.time_ms),
        format_ratio(ratio),
        size(m.workspace),
        distance(m.error),
        tag("b", why) if chosen else why,
    ]


def _lost(m: Measurement, times: int) -> list[str]:
    config = short(str(m.config), 160)
    if times > 1:
        config += f" and {count(times - 1, 'other')}"
    return [m.solver, config, format_ms(m.time_ms), NOTHING, size(m.workspace), distance(m.error), short(m.reason, 400)]


def _grouped(lost: Iterable[Measurement]) -> list[tuple[Measurement, int]]:
    """The first of those that one solver lost for reasons equal but for numbers, and how many they are."""
    groups: dict[tuple[str, str], list[Measurement]] = {}
    for m in lost:
        groups.setdefault((m.solver, re.sub(r"[\d.e+-]+", "0", m.reason)), []).append(m)
    return [(group[0], len(group)) for group in groups.values()]
