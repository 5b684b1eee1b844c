"""Layers and passes: bars for the framework and the plan, and behind each row the plan and what was tried."""

from __future__ import annotations

from tilewise.plan import format_bytes
from tilewise.report.page.contents import Layer, Part, Report
from tilewise.report.page.html import Child, Markup, table, tag
from tilewise.report.page.svg import key, rect, svg
from tilewise.report.page.tree import inside
from tilewise.report.page.words import (
    LEFT,
    NOTHING,
    breakable,
    count,
    distance,
    format_ms,
    format_ratio,
    milliseconds,
    name_of,
    numbers,
    rate,
    root_text,
    short,
    size,
)
from tilewise.report.tables import BUSY, marked

__all__ = ["layers_section"]


def layers_section(report: Report) -> list[Child]:
    """A row for each pass, which opens to its plan."""
    parts = report.parts
    if not report.layers:
        return [tag("p", "The document has no layers.", class_="note")]
    times = [ms for part in parts for ms in (part.framework_ms, _shown_ms(part, report)) if ms is not None]
    greatest = max(times, default=0.0)
    most = max(2, min(24, 1500 // max(len(parts), 1)))
    rows: list[Child] = []
    for layer in report.layers:
        if not layer.parts:
            rows.append(_left(layer))
        rows += [_row(part, layer, report, greatest, most) for part in layer.parts]
    return [
        tag("p", _scale(report, greatest), class_="note"),
        _legend(report),
        TOOLS,
        _columns(report),
        tag("ol", rows, class_=_kind("rows", report), id="rows"),
        numbers(_table(report)),
    ]


def _scale(report: Report, greatest: float) -> str:
    """What the bars show, in words."""
    words = [f"Bars are on one scale from 0 to {milliseconds(greatest)}." if greatest else "No times are given."]
    if report.compared:
        words.append("Framework and plan were timed in turns in one run.")
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


def _columns(report: Report) -> Markup:
    """The headings of the rows."""
    names = ["layer, pass", "plan", "time", "ms", "speed-up" if report.compared else "", "workspace"]
    return tag(
        "div", [tag("span", name) for name in names if name], class_=_kind("columns", report), aria_hidden="true"
    )


def _kind(kind: str, report: Report) -> str:
    """A class name, which differs where the framework was not timed."""
    return kind if report.compared else f"{kind} alone"


def _legend(report: Report) -> Markup:
    """The legend of the bars."""
    if not report.compared:
        return tag("ul", key("pl", "plan"), class_="legend")
    return tag("ul", key("fw", "framework"), key("pl", "planned"), class_="legend")


OPTIONS = (
    ("order", "as they run"),
    ("saved", "time saved"),
    ("gain", "speed-up"),
    ("time", "time"),
    ("workspace", "workspace"),
)
"""What rows can be sorted by."""
TOOLS = tag(
    "form",
    tag("label", "Filter ", tag("input", type="search", id="filter", autocomplete="off")),
    tag("label", "Sort by ", tag("select", [tag("option", text, value=v) for v, text in OPTIONS], id="sort")),
    tag("button", "Open all", type="button", id="open"),
    tag("output", id="found", for_="filter"),
    class_="tools",
    id="tools",
    hidden=True,
    aria_label="Filter and sort the rows",
)
"""The form for filtering and sorting. The script shows it, as it works only with that."""


def _shown_ms(part: Part, report: Report) -> float | None:
    """The time of a pass's second bar."""
    if report.compared and (part.planned_ms is not None or not part.replaced):
        return part.planned_ms
    return part.plan_ms


def _row(part: Part, layer: Layer, report: Report, greatest: float, most: int) -> Markup:
    """The row of one pass; ``most`` limits the candidates that it lists."""
    planned = _shown_ms(part, report)
    values = (part.framework_ms, planned) if report.compared else (planned,)
    kinds = ("fw", "pl") if report.compared else ("pl",)
    times = [
        f"{word} {milliseconds(ms)}"
        for word, ms in zip(("framework", "planned"), values, strict=False)
        if ms is not None
    ]
    if not report.compared:
        times = [f"plan {milliseconds(planned)}"]
    height = 8 if len(kinds) == 2 else 10
    bars = [
        rect(0, ms / greatest, 2 + 13 * i, height, kind)
        for i, (ms, kind) in enumerate(zip(values, kinds, strict=True))
        if ms is not None and greatest
    ]
    same = report.compared and part.plan is not None and not part.replaced
    shown = [format_ms(ms) for ms in values]
    if same:
        shown[1] = "same"
    shown[-1] = marked(shown[-1], part.busy)
    cells = [
        tag("span", tag("b", breakable(part.title)), " ", tag("i", part.pass_), class_="who"),
        tag("span", root_text(part), class_="what" + ("" if part.plan is not None else " bad")),
        svg(f"{name_of(part)}: {', '.join(times)}", bars, height=26 if len(kinds) == 2 else 14, kind="bars"),
        tag("span", [tag("span", text, class_="under" if i == 0 and len(shown) == 2 else None)
                     for i, text in enumerate(shown)], class_="ms"),
        tag("span", format_ratio(part.ratio), class_=_gain_class(part.ratio)) if report.compared else None,
        tag("span", size(part.plan.workspace if part.plan is not None else None), class_="mem"),
    ]  # fmt: skip
    details = tag("details", tag("summary", cells), tag("div", inside(part, layer, most), class_="inside"))
    return Markup(
        f'<li id="pass-{part.number}" data-saved="{_key(part.saved_ms)}"'
        f' data-gain="{_key(part.ratio)}" data-time="{_key(part.ran_ms if report.compared else part.plan_ms)}"'
        f' data-workspace="{part.plan.workspace if part.plan is not None else -1}">{details}</li>'
    )


def _gain_class(ratio: float | None) -> str:
    """The class of a speed-up: better, worse or about equal."""
    if ratio is None or 0.97 <= ratio < 1.03:
        return "gain"
    return "gain up" if ratio > 1 else "gain bad"


def _key(value: float | None) -> str:
    """A number as the script reads it."""
    return "" if value is None else f"{value:.6g}"


def _left(layer: Layer) -> Markup:
    """The row of a layer without passes."""
    text = f"{LEFT}: {layer.left}" if layer.left else "no passes"
    row = tag("div", tag("span", tag("b", breakable(layer.title)), class_="who"), tag("span", text, class_="why"))
    return tag("li", row, class_="left")


def _table(report: Report) -> Markup:
    """All passes as a table."""
    rows = []
    for part in report.parts:
        plan = part.plan
        rows.append(
            [
                short(part.title),
                part.pass_,
                part.text or part.key or NOTHING,
                marked(format_ms(part.framework_ms), part.busy and part.framework_ms is not None),
                *([format_ms(part.framework_host_ms)] if report.on_gpu else []),
                marked(format_ms(part.planned_ms), part.busy and part.planned_ms is not None),
                *([format_ms(part.planned_host_ms)] if report.on_gpu else []),
                format_ratio(part.ratio),
                marked(format_ms(part.plan_ms), plan is not None and plan.busy),
                NOTHING if plan is None else format_bytes(plan.workspace),
                NOTHING if plan is None else distance(plan.error),
                rate(part.flops, part.ran_ms or part.plan_ms),
                root_text(part),
            ]
        )
    framework, planned = (([f"#{side} host ms"] if report.on_gpu else []) for side in ("framework", "planned"))
    columns = (
        "layer", "pass", "problem", "#framework ms", *framework, "#planned ms", *planned, "#speed-up",
        "#plan's own ms", "#workspace", "#L2 error", "#rate", "plan",
    )  # fmt: skip
    return table(f"{count(len(rows), 'layer-pass', 'layer-passes')}, framework and planned", columns, rows)
