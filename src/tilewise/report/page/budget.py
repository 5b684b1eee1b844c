"""How one workspace budget was divided among the kernels (Oyama et al. 2018, mu-cuDNN, Figure 14)."""

from __future__ import annotations

from tilewise.plan import format_bytes
from tilewise.report.page.batches import folded
from tilewise.report.page.contents import Budget, Segment
from tilewise.report.page.html import Child, Markup, table, tag
from tilewise.report.page.svg import key, line, rect, svg
from tilewise.report.page.words import NOTHING, count, format_ms, milliseconds, numbers, short, shown_name, size

__all__ = ["budget_section"]

POLICIES = {
    "arena": "kernels that cannot overlap share it, so it is as large as the most that runs at once",
    "paper_wd": "a segment for each kernel, all held at once (the paper's rule), so their sum is what is used",
}
"""What each policy of dividing means."""
SHOWN, LISTED = 20, 200


def budget_section(budget: Budget) -> list[Child]:
    """The budget's totals, its segments by size, and the 0-1 program that divided it."""
    segments = sorted(budget.segments, key=lambda s: -s.workspace)
    taken = [s for s in segments if s.workspace]
    scale = max((s.workspace for s in segments), default=0) or 1
    rows = [_bar(segment, scale) for segment in taken[:LISTED]]
    none = len(segments) - len(taken)
    notes = [f"Bars are on one scale from 0 to {format_bytes(scale)}."]
    if none:
        notes.append(f"{count(none, 'kernel takes', 'kernels take')} no workspace.")
    return [
        _facts(budget),
        _whole(budget),
        tag("p", " ".join(notes), class_="note") if rows else None,
        folded(rows, SHOWN, "segments", "bars-list flat") if rows else None,
        numbers(_table(budget)),
    ]


def _facts(budget: Budget) -> Markup:
    """The totals as a list of facts."""
    total = sum(s.workspace for s in budget.segments)
    times = [s.time_ms for s in budget.segments if s.time_ms is not None]
    policy = POLICIES.get(budget.policy, "")
    program = [
        count(budget.variables, "variable") if budget.variables is not None else "",
        count(budget.rows, "row") if budget.rows is not None else "",
        f"solved in {milliseconds(budget.solve_ms)}" if budget.solve_ms is not None else "",
        f"by {budget.method}" if budget.method else "",
        {True: "proven optimal", False: "not proven optimal", None: ""}[budget.optimal],
    ]
    facts = {
        "policy": ": ".join(word for word in (budget.policy, policy) if word),
        "budget": size(budget.total),
        "used": size(budget.used) + (f" ({budget.used / budget.total:.0%})" if budget.used and budget.total else ""),
        "least that works": size(budget.least),
        "sum of segments": f"{format_bytes(total)} in {count(len(budget.segments), 'kernel')}",
        "time of all": milliseconds(sum(times)) if times else NOTHING,
        "0-1 program": ", ".join(word for word in program if word) or NOTHING,
    }
    pairs = [tag("div", tag("dt", name), tag("dd", text)) for name, text in facts.items() if text not in ("", NOTHING)]
    return tag("dl", pairs, class_="facts")


def _whole(budget: Budget) -> Markup | None:
    """The budget as one bar: every segment for the paper's rule, what is used for an arena."""
    total = max(budget.total or 0, budget.used or 0)
    if not total:
        return None
    shapes: list[Child] = [rect(0, 1, 1, 26, "room")]
    if budget.policy == "paper_wd":
        at = 0
        for segment in budget.segments:
            if segment.workspace:
                title = f"{short(segment.layer)} {segment.pass_}: {format_bytes(segment.workspace)}"
                share = segment.workspace / total
                shapes.append(rect(at / total, share, 1, 26, f"seg {KINDS.get(segment.pass_, 'k1')}", title))
                at += segment.workspace
    elif budget.used:
        shapes.append(rect(0, budget.used / total, 1, 26, "ws", f"used {format_bytes(budget.used)}"))
    if budget.least:
        shapes.append(line(budget.least / total, budget.least / total, 0, 28, "least"))
    text = f"{size(budget.used)} used of {size(budget.total)}"
    used = [key(kind, name) for name, kind in KINDS.items()] if budget.policy == "paper_wd" else [key("ws", "used")]
    legend = [*used, key("room", "free"), key("least", "least that works") if budget.least else None]
    ends = tag("span", tag("span", "0"), tag("span", size(total)), class_="ends")
    return tag("figure", tag("ul", legend, class_="legend"), svg(text, shapes, height=28), ends, class_="wide")


KINDS = {"fprop": "k1", "dgrad": "k2", "wgrad": "k3"}
"""The class that draws each pass."""


def _bar(segment: Segment, scale: int) -> Markup:
    """The bar of one segment."""
    taken = format_bytes(segment.workspace)
    text = f"{taken}, {milliseconds(segment.time_ms)}" if segment.time_ms is not None else taken
    return tag(
        "div",
        tag("span", tag("b", shown_name(segment.layer)), " ", tag("i", segment.pass_), class_="who"),
        svg(
            f"{short(segment.layer)} {segment.pass_}: {text}",
            rect(0, segment.workspace / scale, 1, 14, KINDS.get(segment.pass_, "k1")),
            height=16,
        ),
        tag("span", taken, class_="num"),
        tag("span", milliseconds(segment.time_ms), class_="num"),
        class_="bar",
    )


def _table(budget: Budget) -> Markup:
    """All segments as a table."""
    rows = [
        [
            short(s.layer),
            s.pass_,
            size(s.workspace),
            NOTHING if not budget.total else f"{s.workspace / budget.total:.1%}",
            format_ms(s.time_ms),
        ]
        for s in budget.segments
    ]
    return table("Segments in the order of the network", ("layer", "pass", "#workspace", "#of budget", "#ms"), rows)
