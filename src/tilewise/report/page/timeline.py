"""A step in time and memory: its kernels in the order they ran, and beneath them what is in memory while each runs."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from tilewise.plan import format_bytes
from tilewise.report.page.contents import Moment, Part, Report, Step
from tilewise.report.page.html import Child, Markup, escaped, table, tag
from tilewise.report.page.svg import key, line, rect, size_ticks, svg, write
from tilewise.report.page.words import (
    NOTHING,
    clean_size,
    count,
    format_ms,
    middle,
    milliseconds,
    numbers,
    shown_name,
    size,
)

__all__ = ["step_section"]

LANE, TOP, HEIGHT = 26.0, 58.0, 220.0
"""Height of the time line, where the plot of memory begins, and its height, in pixels."""
MOST_DRAWN = 400
"""Most spans that are drawn."""
OVERLAP = 0.0008
KINDS = {"fprop": "k1", "dgrad": "k2", "wgrad": "k3"}


@dataclass(frozen=True, slots=True)
class Span:
    """Neighbouring moments as one: where they lie in shares of the width, the fullest of them, and the pass of it."""

    left: float
    width: float
    moment: Moment
    part: Part | None


def step_section(step: Step, report: Report) -> list[Child]:
    """The kernels of a training step by time, and memory while each of them runs, with the limit."""
    facts = tag("p", _facts(step), class_="note")
    if not step.moments:
        return [facts, tag("p", "No moments were recorded.", class_="note")]
    parts = {(name, part.pass_): part for part in report.parts for name in part.names}
    found = [parts.get((m.layer, m.pass_)) for m in step.moments]
    times = [part.time_ms if part is not None else None for part in found]
    timed = bool(times) and all(ms for ms in times)
    spans = _spans(step.moments, found, [ms or 0.0 for ms in times] if timed else [1.0] * len(times))
    passes = [key(kind, name) for name, kind in KINDS.items() if any(m.pass_ == name for m in step.moments)]
    memory = [key("al", "alive"), key("rs", "result"), key("ws", "workspace")]
    limit = [key("limit", "limit")] if step.limit is not None else []
    return [
        facts,
        tag("p", _scale(step, times, timed), class_="note"),
        tag("ul", passes, memory, limit, class_="legend"),
        _plot(step, spans, sum(ms or 0.0 for ms in times) if timed else None),
        numbers(_table(step, times)),
    ]


def _facts(step: Step) -> str:
    """Limit, peak and least memory of a step, in words."""
    words = ["No limit was set" if step.limit is None else f"Limit {format_bytes(step.limit)}"]
    if step.peak is not None:
        share = f" ({_share(step.peak / step.limit)} of the limit)" if step.limit else ""
        words.append(f"peak {format_bytes(step.peak)}{share}")
    if step.least is not None:
        words.append(f"the step needs {format_bytes(step.least)} at least")
    most = max((m.total for m in step.moments), default=0)
    if step.peak is not None and most and step.peak > 1.01 * most:
        # Between kernels there is more at times, and torch's allocator rounds up.
        words.append(f"at these kernels {format_bytes(most)} at most")
    return ", ".join(words) + f"; {count(len(step.moments), 'kernel')} in the order they ran."


def _share(share: float) -> str:
    """A share in percent; one that is not nothing does not read as nothing."""
    return "under 1%" if 0 < share < 0.005 else f"{share:.0%}"


def _scale(step: Step, times: Sequence[float | None], timed: bool) -> str:
    """What the widths stand for, in words."""
    if timed:
        words = "Above, each kernel is as wide as its pass takes; beneath is the memory while it runs. "
        words += "What runs between these kernels has no times here, and no width."
    else:
        unknown = sum(not ms for ms in times)
        words = f"All kernels are drawn with one width: {unknown} of {len(times)} have no time in the document."
    if len(step.moments) > MOST_DRAWN:
        words += f" Neighbours are drawn as one, so that at most {MOST_DRAWN} stand here, each with its fullest kernel."
    return words


def _spans(moments: Sequence[Moment], parts: Sequence[Part | None], widths: Sequence[float]) -> list[Span]:
    """At most ``MOST_DRAWN`` spans, one after the other: of each run of neighbours the moment that takes most."""
    total = sum(widths) or 1.0
    ends = [0.0, *itertools.accumulate(width / total for width in widths)]
    step = -(-len(moments) // MOST_DRAWN)
    spans = []
    for first in range(0, len(moments), step):
        last = min(first + step, len(moments))
        fullest = max(range(first, last), key=lambda i: moments[i].total)
        spans.append(Span(ends[first], ends[last] - ends[first], moments[fullest], parts[fullest]))
    return spans


def _plot(step: Step, spans: Sequence[Span], total_ms: float | None) -> Markup:
    """The time line and the memory beneath it, with one axis of time."""
    used = max(max(span.moment.total for span in spans), step.peak or 0) or 1
    # A limit far above what is used would press the drawing flat; then the limit is told in words alone.
    fits = step.limit is not None and step.limit <= 2.5 * used
    ticks = size_ticks(max(used, step.limit or 0) if fits else used)
    full = ticks[-1]

    def y(value: float) -> float:
        return TOP + HEIGHT * (1 - value / full)

    labels = [write("100%", y(tick) + 4, clean_size(tick), "", "end") for tick in ticks]
    labels.append(write("100%", LANE - 8, "kernels", "", "end"))
    shapes: list[Child] = [line(0, 1, y(tick), y(tick), "grid") for tick in ticks]
    shapes += [_shape(span, [y(v) for v in _edges(span.moment)]) for span in spans]
    if fits and step.limit is not None:
        shapes.append(line(0, 1, y(step.limit), y(step.limit), "limit"))
        shapes.append(write("4", y(step.limit) - 5, f"limit {format_bytes(step.limit)}", "halo strong"))
    most = max(spans, key=lambda span: span.moment.total)
    middle_of = most.left + most.width / 2
    shapes.append(write(f"{100 * middle_of:.5g}%", y(most.moment.total) - 3, "▼", "halo", "middle"))
    shapes.append(line(0, 1, y(0), y(0), "axis"))
    text = f"{middle(most.moment.layer, 60)} {most.moment.pass_}, {format_bytes(most.moment.total)}"
    words = f"{count(len(step.moments), 'kernel')} of a step and the memory while they run; most in {text}"
    height = int(TOP + HEIGHT + 2)
    axis = Markup(f'<svg width="100%" height="{height}" aria-hidden="true">{"".join(labels)}</svg>')
    if total_ms is not None:
        ends = [tag("span", "0"), tag("span", f"{milliseconds(total_ms)} of kernels")]
    else:
        ends = [tag("span", shown_name(m.layer, 20), f" {m.pass_}") for m in (spans[0].moment, spans[-1].moment)]
    beyond = f"; the limit, {format_bytes(step.limit or 0)}, is above the drawing" if step.limit and not fits else ""
    drawing = tag("div", svg(words, shapes, height=height, links=True), tag("span", ends, class_="ends"))
    return tag(
        "figure",
        tag("div", axis, drawing, class_="step"),
        tag("figcaption", "▼ most: ", text, beyond),
        class_="wide timeline",
    )


def _edges(moment: Moment) -> list[int]:
    """The edges between what is alive, the result and the workspace, from 0 upwards."""
    return [0, moment.alive, moment.alive + moment.result, moment.total]


def _shape(span: Span, edges: Sequence[float]) -> Markup:
    """One kernel: its piece of the time line and of the memory beneath, a link where its pass is on the page."""
    m, part = span.moment, span.part
    title = f"{middle(m.layer, 60)} {m.pass_}: "
    title += f"{milliseconds(part.time_ms)}, " if part is not None and part.time_ms else ""
    title += f"alive {format_bytes(m.alive)}, result {format_bytes(m.result)}, workspace {format_bytes(m.workspace)}, "
    title += f"in all {format_bytes(m.total)}"
    width = span.width
    shapes = rect(span.left, width, 2, LANE - 4, f"{KINDS.get(m.pass_, 'k4')} kernel")
    for low, high, kind in zip(edges[:-1], edges[1:], ("al", "rs", "ws"), strict=True):
        if low > high:
            # A hair of overlap: pixels between neighbours would look like gaps in memory.
            shapes += rect(span.left, width + OVERLAP, high, low - high, kind)
    inside = Markup(f"<title>{escaped(title)}</title>{shapes}")
    if part is None:
        return tag("g", inside)
    return tag("a", inside, href=f"#pass-{part.number}", aria_label=title)


def _table(step: Step, times: Sequence[float | None]) -> Markup:
    """The moments as a table."""
    rows = []
    for m, ms in zip(step.moments, times, strict=True):
        left = NOTHING if step.limit is None else size(step.limit - m.total) if step.limit >= m.total else "over"
        sizes = map(format_bytes, (m.alive, m.result, m.workspace, m.total))
        rows.append([middle(m.layer, 60), m.pass_, format_ms(ms), *sizes, left])
    columns = ("layer", "pass", "#ms", "#alive", "#result", "#workspace", "#in all", "#left")
    return table("Memory while each kernel runs, in the order they ran", columns, rows)
