"""What a row opens to: the problem, the plan tree, and what was tried and why it lost."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable

from tilewise.plan import Measurement, is_busy
from tilewise.report.page.contents import Layer, Part
from tilewise.report.page.html import Child, Markup, table, tag
from tilewise.report.page.words import (
    NOTHING,
    count,
    distance,
    format_ms,
    format_ratio,
    milliseconds,
    name_of,
    plan_text,
    rate,
    short,
    size,
)
from tilewise.report.tables import marked, walk

__all__ = ["inside"]


def _columns(part: Part) -> tuple[str, ...]:
    """Columns of the table of a plan and of what was tried; on a GPU with the host's times."""
    host = ("#host ms",) if part.on_gpu else ()
    return ("plan", "#ms", *host, "#of plan's time", "#workspace", "#L2 error", "#spread", "")


def _times(time_ms: float | None, host_ms: float | None, busy: bool, part: Part) -> list[str]:
    """The cells of the device's time and, on a GPU, of the host's."""
    return [marked(format_ms(time_ms), busy), *([format_ms(host_ms)] if part.on_gpu else [])]


def inside(part: Part, layer: Layer, most: int) -> list[Child]:
    """All about one pass. At most ``most`` measured and ``most`` lost candidates are listed."""
    blocks: list[Child] = [_problem(part, layer)]
    if part.plan is None:
        blocks.append(tag("p", "No plan: ", part.reason or "the document does not say why.", class_="why bad"))
    rows, note = _tried(part, most) if part.candidates is not None else ([], _where_to_look(part))
    if part.plan is not None or rows:
        blocks.append(table(f"Plan of {name_of(part)}", _columns(part), [*_tree(part), *rows], captioned=False))
    return [*blocks, note]


def _problem(part: Part, layer: Layer) -> Markup:
    """Facts about the problem of one pass: its notation, arithmetic and data."""
    facts: list[Child] = [tag("code", part.text or part.key)] if part.text or part.key else []
    if layer.transposed:
        facts.append("transposed: its forward is dgrad")
    if part.flops is not None:
        facts.append(
            f"{part.flops / 1e9:.4g} GFLOP by the direct method, {rate(part.flops, part.ran_ms or part.plan_ms)}"
        )
    if part.bytes is not None:
        facts.append(f"operands and result {size(part.bytes)}")
    if part.saved_ms is not None and part.replaced:
        words = "saves" if part.saved_ms >= 0 else "loses"
        layers = f" in {len(part.names)} layers" if len(part.names) > 1 else ""
        facts.append(f"{words} {milliseconds(abs(part.saved_ms))}{layers}")
    if len(part.names) > 1:
        facts.append("equal layers: " + short(", ".join(part.names), 600))
    return tag("ul", [tag("li", fact) for fact in facts], class_="line")


def _tree(part: Part) -> list[list[str]]:
    """Rows of the plan tree."""
    rows = []
    for depth, times, plan in walk(part.plan) if part.plan is not None else ():
        name = f"{times} x {plan_text(plan)}" if times > 1 else plan_text(plan)
        if depth == 0 and not part.replaced:
            name += " (left to torch)"
        rows.append(
            [
                tag("span", name, class_=f"d{min(depth, 8)}") if depth else tag("b", name),
                *_times(plan.time_ms, plan.host_ms, plan.busy, part),
                "",
                size(plan.workspace),
                distance(plan.error),
                distance(plan.error, "spread"),
                f"keeps {size(plan.constant)} between calls" if plan.constant else "",
            ]
        )
    return rows


def _where_to_look(part: Part) -> Markup:
    """How to find out what else was tried."""
    if not part.text:
        return tag("p", "The document does not say what else was tried.", class_="note")
    command = tag("code", f"tilewise explain {part.text} --pass {part.pass_}")
    return tag("p", "The document does not say what else was tried; ", command, " does.", class_="note")


def _tried(part: Part, most: int) -> tuple[list[str | list[str]], Markup | None]:
    """Rows of candidates, and a note on those that are not listed."""
    candidates = part.candidates or ()
    won = [m for m in candidates if not m.reason]
    lost = _grouped(m for m in candidates if m.reason)
    won.sort(key=lambda m: (math.inf if m.time_ms is None else m.time_ms, m.solver))
    chosen = next((m for m in won if _chosen(m, part)), None)
    rows: list[str | list[str]] = [f"Tried: {count(len(won), 'candidate')} measured, {len(candidates) - len(won)} lost"]
    rows += [_measured(m, m is chosen, part) for m in won[:most]]
    if chosen is not None and not any(m is chosen for m in won[:most]):
        rows.append(_measured(chosen, True, part))
    rows += [_lost(m, times, part) for m, times in lost[:most]]
    notes = []
    if len(won) > most:
        notes.append(f"{len(won) - most} slower")
    if len(lost) > most:
        notes.append(f"{sum(times for _, times in lost[most:])} lost")
    more = tag("p", f"Not listed: {' and '.join(notes)}.", class_="note") if notes else None
    return rows, more


def _chosen(m: Measurement, part: Part) -> bool:
    """Whether a measurement is of the chosen plan."""
    return part.plan is not None and m.solver == part.plan.solver and m.config == part.plan.config


def _measured(m: Measurement, chosen: bool, part: Part) -> list[str]:
    """The row of a measured candidate."""
    ratio = m.time_ms / part.plan_ms if m.time_ms is not None and part.plan_ms else None
    why = "chosen" if chosen else "slower" if ratio is not None and ratio > 1 else NOTHING
    if why == NOTHING and part.plan is not None and m.workspace is not None and m.workspace > part.plan.workspace:
        why = "takes more workspace than the plan"
    times = _times(m.time_ms, m.host_ms, is_busy(m.load, part.device), part)
    cells = [_name(m), *times, format_ratio(ratio), size(m.workspace)]
    return [*cells, distance(m.error), distance(m.error, "spread"), tag("b", why) if chosen else why]


def _lost(m: Measurement, times: int, part: Part) -> list[str]:
    """The row of ``times`` similar lost candidates."""
    name = _name(m) + (f" and {count(times - 1, 'other')}" if times > 1 else "")
    taken = _times(m.time_ms, m.host_ms, is_busy(m.load, part.device), part)
    cells = [name, *taken, NOTHING, size(m.workspace), distance(m.error), distance(m.error, "spread")]
    return [*cells, short(m.reason, 400)]


def _name(m: Measurement) -> str:
    """Solver and config of a candidate."""
    return " ".join(word for word in (short(m.solver), short(str(m.config), 160)) if word)


def _grouped(lost: Iterable[Measurement]) -> list[tuple[Measurement, int]]:
    """Lost candidates by solver and reason, numbers aside: the first of each group, and the size of the group."""
    groups: dict[tuple[str, str], list[Measurement]] = {}
    for m in lost:
        groups.setdefault((m.solver, re.sub(r"[\d.e+-]+", "0", m.reason)), []).append(m)
    return [(group[0], len(group)) for group in groups.values()]
