"""Fronts of time against workspace, one small plot for each (Oyama et al. 2018, mu-cuDNN, Figure 8)."""

from __future__ import annotations

import math

from tilewise.plan import Plan
from tilewise.report.page.batches import folded
from tilewise.report.page.contents import Part, Report
from tilewise.report.page.html import Child, Markup, escaped, table, tag
from tilewise.report.page.svg import key, log_ticks
from tilewise.report.page.words import (
    DIFFERENT,
    anchor,
    clean_size,
    count,
    format_ms,
    milliseconds,
    name_of,
    numbers,
    plan_text,
    short,
    size,
)
from tilewise.report.words import marked

__all__ = ["fronts_section"]

SHOWN, LISTED = 8, 60
LEFT, RIGHT, TOP, BOTTOM = 40.0, 250.0, 14.0, 138.0
"""Edges of the plot in a panel of 260 x 160."""
ZERO = 24.0
"""Room left of the axis for a workspace of 0, which a logarithmic axis cannot show."""

ABOVE = 1.005
"""From how many times the front's time on a plan is said to lie above it: less would not be seen."""

Point = tuple[float, int]


def fronts_section(report: Report) -> list[Child]:
    """A plot for each pass whose front has a choice, all with one scale of workspace."""
    parts = [part for part in report.parts if part.front and any(_points(part))]
    if not parts:
        words = "The document has no fronts: of each pass it holds the chosen plan alone."
        return [tag("p", words, class_="note")]
    choice = [part for part in parts if len(_points(part)) > 1]
    choice.sort(key=lambda part: -(part.plan_ms or 0.0))
    above = sum(_above(part) is not None for part in choice)
    sizes = [workspace for part in choice for _, workspace in [*_points(part), *_chosen(part)]]
    span, zero = _decades([workspace for workspace in sizes if workspace]), 0 in sizes
    drawn = [_panel(part, span, report.workspace, zero) for part in choice[:LISTED]]
    alone, beyond = len(parts) - len(choice), len(choice) - len(drawn)
    notes = ["Down and to the left is better. Workspace has one logarithmic scale in all panels, time one in each."]
    notes.append("Times are those of planning; of a division's point it is the sum of its parts' times.")
    if above:
        notes.append(
            f"{count(above, 'chosen plan lies', 'chosen plans lie')} above the front: a chosen plan was timed whole, "
            "and took longer so than the front has for its workspace."
        )
    if alone:
        notes.append(f"{count(alone, *DIFFERENT)} {'has' if alone == 1 else 'have'} one point alone, in the table.")
    if beyond:
        notes.append(f"{count(beyond, 'further front is', 'further fronts are')} in the table.")
    legend = [key("dots", "desirable plan"), key("chosen", "chosen plan")]
    if report.workspace is not None and span[0] <= report.workspace <= span[1]:
        legend.append(key("limit", f"limit per kernel, {size(report.workspace)}"))
    return [
        tag("p", " ".join(notes), class_="note"),
        tag("ul", legend, class_="legend") if drawn else None,
        folded(drawn, SHOWN, "fronts", "panels") if drawn else None,
        numbers(_table(parts)),
    ]


def _points(part: Part) -> list[Point]:
    """The timed points of a front, the least workspace first."""
    return sorted(((p.time_ms, p.workspace) for p in part.front or () if p.time_ms > 0), key=lambda point: point[1])


def _chosen(part: Part) -> list[Point]:
    """The chosen plan as a point, if it was timed."""
    plan = part.plan
    return [(plan.time_ms, plan.workspace)] if plan is not None and plan.time_ms > 0 else []


def _decades(sizes: list[int]) -> tuple[int, int]:
    """The powers of two that enclose all workspaces."""
    low, high = min(sizes, default=2**10), max(sizes, default=2**20)
    first, last = math.floor(math.log2(low)), math.ceil(math.log2(high))
    return 2**first, 2 ** max(last, first + 1)


def _panel(part: Part, span: tuple[int, int], limit: int | None, zero: bool) -> Markup:
    """The plot of one front."""
    points, chosen = _points(part), _chosen(part)
    times = [ms for ms, _ in points + chosen]
    low, high = min(times) / 1.15, max(times) * 1.15
    if high < 2 * low:
        middle = math.sqrt(low * high)
        low, high = middle / math.sqrt(2), middle * math.sqrt(2)

    start = LEFT + 8 + ZERO * zero

    def x(workspace: float) -> float:
        if workspace <= 0:
            return LEFT + 8
        share = (math.log2(workspace) - math.log2(span[0])) / (math.log2(span[1]) - math.log2(span[0]))
        return start + share * (RIGHT - 8 - start)

    def y(ms: float) -> float:
        return BOTTOM - (math.log(ms) - math.log(low)) / (math.log(high) - math.log(low)) * (BOTTOM - TOP)

    shapes: list[str] = []
    for tick in log_ticks(low, high):
        shapes.append(f'<path class="grid" d="M{LEFT:.0f} {y(tick):.1f}H{RIGHT:.0f}"/>')
        shapes.append(f'<text x="{LEFT - 4:.0f}" y="{y(tick) + 4:.1f}" text-anchor="end">{tick:.4g}</text>')
    shapes.append(f'<path class="axis" d="M{LEFT:.0f} {TOP:.0f}V{BOTTOM:.0f}H{RIGHT:.0f}"/>')
    shapes.append(f'<text x="{LEFT - 4:.0f}" y="{TOP - 4:.0f}" text-anchor="end">ms</text>')
    for workspace in (*([0] if zero else []), *_ticks(span)):
        label = "0" if not workspace else clean_size(workspace)
        shapes.append(f'<path class="axis" d="M{x(workspace):.1f} {BOTTOM:.0f}v4"/>')
        shapes.append(f'<text x="{x(workspace):.1f}" y="{BOTTOM + 16:.0f}" text-anchor="middle">{label}</text>')
    if limit is not None and span[0] <= limit <= span[1]:
        shapes.append(f'<path class="limit" d="M{x(limit):.1f} {TOP:.0f}V{BOTTOM:.0f}"/>')
    places = [(x(workspace), y(ms)) for ms, workspace in points]
    stairs = f"M{places[0][0]:.1f} {places[0][1]:.1f}" + "".join(f"H{px:.1f}V{py:.1f}" for px, py in places[1:])
    shapes.append(f'<path class="stairs" d="{stairs}"/>')
    shapes.append(f'<path class="dots" d="{"".join(f"M{px:.1f} {py:.1f}h0" for px, py in places)}"/>')
    for ms, workspace in chosen:
        shapes.append(f'<path class="chosen" d="M{x(workspace):.1f} {y(ms) - 7:.1f}l7 7-7 7-7-7z"/>')
    title = f"{name_of(part)}: {_front_text(part)}"
    picture = f'<svg viewBox="0 0 260 160" role="img"><title>{escaped(title)}</title>{"".join(shapes)}</svg>'
    caption = tag("figcaption", anchor(part), " ", tag("span", _front_text(part), class_="said"))
    return tag("figure", caption, Markup(picture))


def _ticks(span: tuple[int, int]) -> list[int]:
    """Powers of two within ``span``, few enough to be read."""
    first, last = round(math.log2(span[0])), round(math.log2(span[1]))
    step = next(n for n in (1, 2, 5, 10, 20, 30, 63) if (last - first) // n <= 3)
    start = -(-first // step) * step
    return [2**n for n in range(start, last + 1, step)]


def _front_text(part: Part) -> str:
    """A pass's front in words: how many points it has, and the plan that was chosen."""
    plan = part.plan
    chosen = "" if plan is None else f"; chosen {milliseconds(plan.time_ms)} in {size(plan.workspace)}"
    above = _above(part)
    words = "" if above is None else f", {above:.0%} above the front: timed whole"
    return count(len(_points(part)), "point") + chosen + words


def _above(part: Part) -> float | None:
    """How far the chosen plan lies above its own front, as a share of the front's time; ``None`` where it does not."""
    for ms, workspace in _chosen(part):
        least = min((time for time, taken in _points(part) if taken <= workspace), default=math.inf)
        if ms > ABOVE * least:
            return ms / least - 1
    return None


def _table(parts: list[Part]) -> Markup:
    """The points of all fronts as a table."""
    rows = []
    for part in parts:
        for i, plan in enumerate(part.front or ()):
            mark = "chosen" if _same(plan, part.plan) else ""
            head = (short(part.title), part.pass_) if i == 0 else ("", "")
            rows.append(
                [*head, marked(format_ms(plan.time_ms), plan.busy), size(plan.workspace), plan_text(plan), mark]
            )
    return table("Fronts, fastest first", ("layer", "pass", "#ms", "#workspace", "plan", "chosen"), rows)


def _same(plan: Plan, chosen: Plan | None) -> bool:
    """Whether a point of a front is the chosen plan."""
    return chosen is not None and (plan.solver, plan.config, plan.children) == (
        chosen.solver,
        chosen.config,
        chosen.children,
    )
