"""What a row opens to: the problem, the plan tree, and what was tried and why it lost."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable

from tilewise.plan import Measurement, Plan, is_busy
from tilewise.report.page.contents import Layer, Part
from tilewise.report.page.html import Child, Markup, join, table, tag
from tilewise.report.page.words import (
    NAME,
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
from tilewise.report.words import marked, walk

__all__ = ["inside"]


def _columns(part: Part) -> tuple[str, ...]:
    """Columns of the table of a plan and of what was tried; on a GPU with the host's times."""
    host = ("#host ms",) if part.on_gpu else ()
    # Where the pass was timed again, beside the framework, the row above has that time.
    again = part.ran_ms is not None and part.plan_ms is not None and format_ms(part.ran_ms) != format_ms(part.plan_ms)
    ms = "#ms when planned" if again else "#ms"
    return ("plan", ms, *host, "#of plan's time", "#varies", "#workspace", "#L2 error", "#spread")


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
    if part.taken_back:
        facts.append("taken back: the step runs it by torch, although the plan is faster by itself")
    if len(layer.title) > NAME:
        facts.append(f"layer {short(layer.title, 400)}")
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
        why = "; ".join(word for word in (_kept(plan), "" if depth else _again(part)) if word)
        rows.append(
            [
                _head(tag("span", name, class_=f"d{min(depth, 8)}") if depth else tag("b", name), why),
                *_times(plan.time_ms, plan.host_ms, plan.busy, part),
                "",
                NOTHING if depth or part.spread is None else f"{part.spread:.0%}",
                size(plan.workspace),
                distance(plan.error),
                distance(plan.error, "spread"),
            ]
        )
    return rows


def _head(name: str, why: str) -> Markup:
    """The first cell of a row: its name, and below it what is to be said of it."""
    return join([name, tag("span", why, class_="why") if why else None])


def _kept(plan: Plan) -> str:
    """What a plan keeps between calls, in words."""
    return f"keeps {size(plan.constant)} between calls" if plan.constant else ""


def _again(part: Part) -> str:
    """What the plan took as one of the candidates, where that is another time than the plan's."""
    m = part.tried
    if m is None:
        return ""
    runs = f"chosen, {count(m.runs, 'run')}" if m.runs else "chosen"
    same = m.time_ms is None or part.plan_ms is None or format_ms(m.time_ms) == format_ms(part.plan_ms)
    return runs if same else f"{runs}; {milliseconds(m.time_ms)} as one of the candidates"


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
    rows: list[str | list[str]] = [f"Tried: {count(len(won), 'candidate')} measured, {len(candidates) - len(won)} lost"]
    # The chosen one is the plan above: a second row would be a second time of the same.
    won = [m for m in won if m is not part.tried]
    rows += [_measured(m, part) for m in won[:most]]
    rows += [_lost(m, times, part) for m, times in lost[:most]]
    notes = []
    if len(won) > most:
        notes.append(f"{len(won) - most} slower")
    if len(lost) > most:
        notes.append(f"{sum(times for _, times in lost[most:])} lost")
    more = tag("p", f"Not listed: {' and '.join(notes)}.", class_="note") if notes else None
    return rows, more


def _measured(m: Measurement, part: Part) -> list[str]:
    """The row of a measured candidate that was not chosen."""
    ratio = m.time_ms / part.plan_ms if m.time_ms is not None and part.plan_ms else None
    why = "slower" if ratio is not None and ratio > 1 else ""
    if not why and part.plan is not None and m.workspace is not None and m.workspace > part.plan.workspace:
        why = "takes more workspace than the plan"
    if not why and ratio is not None and ratio < 1:
        why = "faster when it was tried than the plan, which was timed whole, at another moment"
    times = _times(m.time_ms, m.host_ms, is_busy(m.load, part.device), part)
    cells = [_head(_name(m), why), *times, format_ratio(ratio), _varies(m), size(m.workspace)]
    return [*cells, distance(m.error), distance(m.error, "spread")]


def _varies(m: Measurement) -> str:
    """How far single runs of a candidate lie apart."""
    return NOTHING if m.dispersion is None else f"{m.dispersion:.0%}"


def _lost(m: Measurement, times: int, part: Part) -> list[str]:
    """The row of ``times`` similar lost candidates."""
    name = _name(m) + (f" and {count(times - 1, 'other')}" if times > 1 else "")
    taken = _times(m.time_ms, m.host_ms, is_busy(m.load, part.device), part)
    cells = [_head(name, short(m.reason, 400)), *taken, NOTHING, _varies(m), size(m.workspace)]
    return [*cells, distance(m.error), distance(m.error, "spread")]


def _name(m: Measurement) -> str:
    """Solver and config of a candidate."""
    return " ".join(word for word in (short(m.solver), short(str(m.config), 160)) if word)


def _grouped(lost: Iterable[Measurement]) -> list[tuple[Measurement, int]]:
    """Lost candidates by solver and reason, numbers aside: the first of each group, and the size of the group."""
    groups: dict[tuple[str, str], list[Measurement]] = {}
    for m in lost:
        groups.setdefault((m.solver, re.sub(r"[\d.e+-]+", "0", m.reason)), []).append(m)
    return [(group[0], len(group)) for group in groups.values()]
