"""Time lines of divided plans: their parts in the order in which they run (Oyama et al. 2018, mu-cuDNN, Figure 9)."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tilewise.declared import names_at_once
from tilewise.plan import Plan
from tilewise.report.page.contents import Part, Report
from tilewise.report.page.html import Child, Markup, table, tag
from tilewise.report.page.svg import KEYS, key, line, percent, rect, svg
from tilewise.report.page.words import (
    anchor,
    format_ms,
    milliseconds,
    name_of,
    numbers,
    plan_text,
    short,
    size,
)
from tilewise.report.words import NOTHING, marked

__all__ = ["batches_section", "folded"]

MOST_RUNS = 96
"""Most runs of equal parts that a time line draws. Where there are more, inner splits are drawn whole."""
MOST_LINES = 200
"""Most parts of a run that are separated by lines."""
MOST_LANES = 8
"""Most parts run at once that are drawn."""
SHOWN, LISTED = 8, 60


@dataclass(frozen=True, slots=True)
class Run:
    """``times`` parts in a row that have one plan.

    ``size`` is a part's length along the axis that is divided, ``None`` where it is not known.
    """

    plan: Plan
    times: int
    size: int | None

    @property
    def label(self) -> str:
        """The run as text, such as ``3x64``."""
        if self.size is None:
            return f"{self.times}x" if self.times > 1 else ""
        return str(self.size) if self.times == 1 else f"{self.times}x{self.size}"

    @property
    def time_ms(self) -> float | None:
        """The time of all its parts together; ``None`` where unknown."""
        return self.plan.time_ms * self.times if math.isfinite(self.plan.time_ms) else None


def batches_section(report: Report) -> list[Child]:
    """A time line for each divided plan, the longest first."""
    divided = list(report.divided)
    if not divided:
        return [tag("p", "No plan divides its layer: each runs in one piece.", class_="note")]
    divided.sort(key=lambda part: -(part.time_ms or 0.0))
    runs_of = {part.number: list(runs(part.plan)) for part in divided if part.plan is not None}
    names = list(dict.fromkeys(run.plan.solver for line_runs in runs_of.values() for run in line_runs))
    drawn = [_figure(part, runs_of[part.number], names) for part in divided[:LISTED]]
    beyond = len(divided) - len(drawn)
    notes = ["Each line is as long as its pass takes, and has its own scale.", "Parts run from left to right, with the"]
    notes[1] += " shares that they had by themselves when planned; a letter stands for the solver."
    equal = sum(len(part.names) for part in divided)
    if equal > len(divided):
        notes.append(f"Equal layers share a line: {len(divided)} lines for {equal} layer-passes.")
    return [
        tag("p", " ".join(notes), class_="note"),
        tag("ul", [key(_kind(i), f"{_letter(i)} {short(name)}") for i, name in enumerate(names)], class_="legend"),
        folded(drawn, SHOWN, "divided plans", "lines"),
        tag("p", f"{beyond} more divided plans are in the table.", class_="note") if beyond else None,
        numbers(_table(divided, runs_of)),
    ]


def folded(figures: Sequence[Child], first: int, what: str, kind: str) -> list[Child]:
    """The ``first`` figures, and those beyond them behind a button that says how many more ``what`` there are."""
    shown: list[Child] = [tag("div", figures[:first], class_=kind)]
    if len(figures) > first:
        rest = tag("div", figures[first:], class_=kind)
        shown.append(tag("details", tag("summary", f"{len(figures) - first} more {what}"), rest, class_="more"))
    return shown


def runs(plan: Plan) -> Iterator[Run]:
    """Runs of equal parts in the order in which they run; those of inner splits too where they are few."""
    first_runs = list(itertools.islice(_runs(plan), MOST_RUNS + 1))
    yield from first_runs if len(first_runs) <= MOST_RUNS else itertools.islice(_own_runs(plan), MOST_RUNS)


def _own_runs(plan: Plan) -> Iterator[Run]:
    """Runs of the parts of the root of ``plan``."""
    sizes = plan.config.get("sizes")
    first = 0
    for child, times in zip(plan.children, plan.counts, strict=True):
        has_size = isinstance(sizes, tuple) and first + times <= len(sizes)
        yield Run(child, times, sizes[first] if has_size and isinstance(sizes, tuple) else None)
        first += times


def _runs(plan: Plan) -> Iterator[Run]:
    """Runs of the leaves of ``plan``, and of parts that run at once."""
    for run in _own_runs(plan):
        if run.plan.leaf or at_once(run.plan):
            yield run
        else:
            for _ in range(min(run.times, MOST_RUNS + 1)):
                yield from _runs(run.plan)


def at_once(plan: Plan) -> bool:
    """Whether a split's parts run at the same time."""
    return plan.solver in names_at_once()


def _letter(index: int) -> str:
    """The letter that stands for solver number ``index``."""
    return chr(ord("A") + index) if index < 26 else f"{chr(ord('A') + index // 26 % 26)}{index % 26}"


def _kind(index: int) -> str:
    """The class that draws solver number ``index``."""
    return f"k{index % KEYS + 1}"


def _figure(part: Part, line_runs: list[Run], names: list[str]) -> Markup:
    """The time line of one pass."""
    assert part.plan is not None
    together = at_once(part.plan)
    lanes = (
        [Run(run.plan, 1, run.size) for run in line_runs for _ in range(min(run.times, MOST_LANES))] if together else []
    )
    spans = [_span(run, line_runs) for run in (lanes or line_runs)]
    length = max(spans, default=0.0) if together else sum(spans)
    timed = all(run.time_ms is not None for run in line_runs)
    alone = length
    if timed and part.time_ms and length:
        # The line is as long as the pass takes: its parts by themselves can take more or less.
        spans = [span * (part.time_ms / length) for span in spans]
        length = part.time_ms
    scale = max(length, part.framework_ms or 0.0) if timed else length
    scale = scale or 1.0
    shapes: list[Child] = []
    top = 0.0
    if timed and part.framework_ms is not None:
        shapes.append(rect(0, part.framework_ms / scale, 0, 8, "fw", f"framework {milliseconds(part.framework_ms)}"))
        top = 11.0
    if together:
        for i, (run, span) in enumerate(zip(lanes[:MOST_LANES], spans, strict=False)):
            shapes += _segment(run, 0.0, span / scale, top + 19 * i, 17, names)
        height = int(top + 19 * min(len(lanes), MOST_LANES))
    else:
        at = 0.0
        for run, span in zip(line_runs, spans, strict=True):
            shapes += _segment(run, at / scale, span / scale, top, 24, names)
            at += span
        height = int(top + 25)
    words = [f"plan {milliseconds(part.time_ms)}"]
    if timed and abs(alone - length) > 0.1 * length:
        words.append(f"its parts by themselves {milliseconds(alone)}")
    if part.framework_ms is not None:
        words.append(f"framework {milliseconds(part.framework_ms)}")
    if together:
        words.append("parts at once")
    if not timed:
        words.append("parts not timed, drawn by size")
    text = ", ".join(words)
    ends = tag("span", tag("span", "0"), tag("span", milliseconds(scale)), class_="ends") if timed else None
    return tag(
        "figure",
        tag(
            "figcaption",
            anchor(part),
            " ",
            tag("span", plan_text(part.plan), class_="plan"),
            " ",
            tag("span", text, class_="said"),
        ),
        svg(f"{name_of(part)}: {plan_text(part.plan)}; {text}", shapes, height=height),
        ends,
    )


def _span(run: Run, line_runs: list[Run]) -> float:
    """The length of a run: its time where all runs have one, else its share of sizes, else its number of parts."""
    if all(other.time_ms is not None for other in line_runs):
        return run.time_ms or 0.0
    if all(other.size for other in line_runs):
        return float((run.size or 1) * run.times)
    return float(run.times)


def _segment(run: Run, x: float, width: float, y: float, height: float, names: list[str]) -> list[Child]:
    """The shapes of one run in a time line."""
    index = names.index(run.plan.solver)
    alone = f": {milliseconds(run.time_ms)} when planned" if run.time_ms is not None else ""
    title = f"{run.label} {plan_text(run.plan)}{alone}".strip()
    shapes: list[Child] = [rect(x, width, y, height, f"{_kind(index)} seg", title)]
    if 1 < run.times <= MOST_LINES:
        shapes += [
            line(x + width * i / run.times, x + width * i / run.times, y, y + height, "cut")
            for i in range(1, run.times)
        ]
    if width >= 0.03:
        text = tag("text", f"{_letter(index)} {run.label}".strip(), x=5, y=f"{height / 2 + 4.5:.5g}", class_="on")
        place = f'x="{percent(x)}" width="{percent(width)}" y="{y:.5g}" height="{height:.5g}"'
        # A drawing in the drawing cuts off what is longer than the segment; the pointer finds the segment below.
        shapes.append(Markup(f'<svg {place} class="cut-off" aria-hidden="true">{text}</svg>'))
    return shapes


def _table(divided: list[Part], runs_of: dict[int, list[Run]]) -> Markup:
    """The parts of all divided plans as a table."""
    rows = []
    for part in divided:
        for i, run in enumerate(runs_of[part.number]):
            rows.append(
                [
                    short(part.title) if i == 0 else "",
                    part.pass_ if i == 0 else "",
                    str(run.times),
                    NOTHING if run.size is None else str(run.size),
                    plan_text(run.plan),
                    marked(format_ms(run.plan.time_ms), run.plan.busy),
                    format_ms(run.time_ms),
                    size(run.plan.workspace),
                ]
            )
    columns = ("layer", "pass", "#parts", "#size", "solver", "#ms each", "#ms together", "#workspace")
    return table("Parts of divided plans in the order they run, with their times when planned", columns, rows)
