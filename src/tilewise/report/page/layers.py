"""Layers and passes: bars for the framework and the plan, and behind each row the plan and what was tried."""

from __future__ import annotations

from typing import NamedTuple

from tilewise.plan import format_bytes
from tilewise.report.page.contents import Layer, Part, Report
from tilewise.report.page.html import Child, Markup, render, table, tag
from tilewise.report.page.svg import key, line, rect, svg
from tilewise.report.page.tree import inside
from tilewise.report.page.words import (
    BUSY,
    DIFFERENT,
    LEFT,
    NOTHING,
    count,
    distance,
    format_ms,
    format_ratio,
    middle,
    milliseconds,
    name_of,
    numbers,
    rate,
    root_text,
    short,
    shown_name,
    size,
    varies,
)
from tilewise.report.words import marked

__all__ = ["layers_section"]

OPTIONS = (
    ("order", "as they run"),
    ("saved", "time saved"),
    ("gain", "speed-up"),
    ("time", "time"),
    ("workspace", "workspace"),
)
"""What rows can be sorted by."""


IN_TURNS = {
    True: "Framework and plan were timed in turns in one run.",
    False: "Plans have their times of planning, the framework those that it had when it was last measured; "
    "'tilewise time' takes both in turns.",
}
"""How both sides were timed, by whether it was in turns."""
MOST = 900
"""Most passes that have a row which opens. Of a network with more, these are the longest."""


class Row(NamedTuple):
    """A row of the list: that of one pass, or of a layer without passes (``left`` says why)."""

    name: Markup
    left: str = ""
    number: int = 0
    pass_: str = ""
    what: str = ""
    planned: bool = True
    bars: Markup | None = None
    times: tuple[str, ...] = ()
    ratio: str = ""
    gains: int = 0
    workspace: str = ""
    data: tuple[tuple[str, str], ...] = ()
    inside: tuple[Child, ...] = ()


def layers_section(report: Report) -> list[Child]:
    """A row for each pass, which opens to its plan."""
    parts = report.parts
    if not report.layers:
        return [render("note.html", text="The document has no layers.")]
    times = [ms for part in parts for ms in (part.framework_ms, _shown_ms(part, report)) if ms is not None]
    greatest = max(times, default=0.0)
    most = max(2, min(24, 1500 // max(len(parts), 1)))
    listed = {part.number for part in sorted(parts, key=lambda part: -part.all_ms)[:MOST]}
    rows: list[Row] = []
    for layer in report.layers:
        if not layer.parts:
            rows.append(Row(shown_name(layer.title), f"{LEFT}: {layer.left}" if layer.left else "no passes"))
        rows += [_row(part, layer, report, greatest, most) for part in layer.parts if part.number in listed]
    section = render(
        "layers.html",
        note=_scale(report, greatest) + _left_out(report),
        legend=_legend(report),
        options=OPTIONS,
        compared=report.compared,
        rows=rows,
        table=numbers(_table(report, listed)),
    )
    return [section]


def _scale(report: Report, greatest: float) -> str:
    """What the bars show, in words."""
    words = [f"Bars are on one scale from 0 to {milliseconds(greatest)}." if greatest else "No times are given."]
    if report.compared:
        words.append(IN_TURNS[report.in_turns])
        words.append("A speed-up in colour is more than noise: 3 %, or more where single runs lie further apart.")
    else:
        estimated = " and estimated, not measured," if report.rigor == "estimate" else ""
        words.append(f"Times are the plans' own{estimated} and stand alone: the framework was not timed beside them.")
        words.append(f"To compare: tilewise time {short(report.target) or 'NET'} --json.")
    if report.on_gpu:
        words.append("Times are what the device computes; what the host needs to launch it is in the tables.")
    if report.busy:
        words.append(
            f"{BUSY}: other processes kept the host busy while {count(report.busy, 'layer-pass', 'layer-passes')} were "
            "timed. Their times are doubtful until they are taken on a quiet host."
        )
    words.append("A row opens to the plan and what was tried.")
    return " ".join(words)


def _left_out(report: Report) -> str:
    """That the shorter passes of a large network are in the table alone, in words."""
    beyond = len(report.parts) - MOST
    return f" The {MOST} longest are listed; {beyond:,} shorter ones are in the table below." if beyond > 0 else ""


def _legend(report: Report) -> list[Child]:
    """The legend of the bars."""
    sides = [key("fw", "framework"), key("pl", "planned")] if report.compared else [key("pl", "plan")]
    spread = any(part.spread for part in report.parts)
    return [*sides, key("spread", "half of all runs lie within") if spread else None]


def _shown_ms(part: Part, report: Report) -> float | None:
    """The time of a pass's second bar; ``None`` where that is the framework's."""
    return None if report.compared and not part.replaced else part.time_ms


def _row(part: Part, layer: Layer, report: Report, greatest: float, most: int) -> Row:
    """The row of one pass; ``most`` limits the candidates that it lists."""
    planned = _shown_ms(part, report)
    values = (part.framework_ms, planned) if report.compared else (planned,)
    shown = [format_ms(ms) for ms in values]
    if report.compared and part.plan is not None and not part.replaced:
        shown[1] = "same"
    shown[-1] = marked(shown[-1], part.busy)
    what = root_text(part) + (" (taken back: the step runs torch's)" if part.taken_back else "")
    return Row(
        name=shown_name(part.title),
        number=part.number,
        pass_=part.pass_,
        what=what,
        planned=part.plan is not None,
        bars=_bars(part, report, values, greatest),
        times=tuple(shown),
        ratio=format_ratio(part.ratio),
        gains=part.gains,
        workspace=size(part.plan.workspace if part.plan is not None else None),
        data=(
            ("saved", _key(part.saved_ms)),
            ("gain", _key(part.ratio)),
            ("time", _key(part.time_ms)),
            ("workspace", str(part.plan.workspace if part.plan is not None else -1)),
        ),
        inside=tuple(inside(part, layer, most)),
    )


def _bars(part: Part, report: Report, values: tuple[float | None, ...], greatest: float) -> Markup:
    """The bars of one pass, the plan's with how far its runs lie apart."""
    kinds = ("fw", "pl") if report.compared else ("pl",)
    height = 8 if len(kinds) == 2 else 10
    shapes: list[Child] = [
        rect(0, ms / greatest, 2 + 13 * i, height, kind)
        for i, (ms, kind) in enumerate(zip(values, kinds, strict=True))
        if ms is not None and greatest
    ]
    planned = values[-1]
    if planned is not None and part.spread and greatest:
        y = 2 + 13 * (len(kinds) - 1) + height / 2
        low, high = (planned / greatest * (1 + sign * part.spread / 2) for sign in (-1, 1))
        shapes += [line(low, high, y, y, "spread"), *(line(x, x, y - 4, y + 4, "spread") for x in (low, high))]
    names = ("framework", "planned") if report.compared else ("plan",)
    words = [
        f"{word} {milliseconds(ms)}" for word, ms in zip(names, values, strict=True) if ms is not None or len(names) < 2
    ]
    words += [varies(part)] if part.spread is not None else []
    return svg(f"{name_of(part)}: {', '.join(words)}", shapes, height=26 if len(kinds) == 2 else 14, kind="bars")


def _key(value: float | None) -> str:
    """A number as the script reads it."""
    return "" if value is None else f"{value:.6g}"


def _id(part: Part) -> str:
    """The identifier that links to a pass lead to."""
    return f"pass-{part.number}"


def _table(report: Report, listed: set[int]) -> Markup:
    """All passes as a table. Links to those that are not ``listed`` lead here."""
    rows = []
    for part in report.parts:
        plan = part.plan
        rows.append(
            [
                middle(part.title, 60) if part.number in listed else tag("span", middle(part.title, 60), id=_id(part)),
                part.pass_,
                part.text or part.key or NOTHING,
                marked(format_ms(part.framework_ms), part.busy and part.framework_ms is not None),
                *([format_ms(part.framework_host_ms)] if report.on_gpu else []),
                marked(format_ms(part.planned_ms), part.busy and part.planned_ms is not None),
                *([format_ms(part.planned_host_ms)] if report.on_gpu else []),
                format_ratio(part.ratio),
                marked(format_ms(part.plan_ms), plan is not None and plan.busy),
                NOTHING if part.spread is None else f"{part.spread:.0%}",
                NOTHING if plan is None else format_bytes(plan.workspace),
                NOTHING if plan is None else distance(plan.error),
                rate(part.flops, part.time_ms),
                root_text(part),
            ]
        )
    framework, planned = (([f"#{side} host ms"] if report.on_gpu else []) for side in ("framework", "planned"))
    columns = (
        "layer", "pass", "problem", "#framework ms", *framework, "#planned ms", *planned, "#speed-up",
        "#ms when planned", "#varies", "#workspace", "#L2 error", "#rate", "plan",
    )  # fmt: skip
    return table(f"{count(len(rows), *DIFFERENT)}, framework and planned", columns, rows, most=None)
