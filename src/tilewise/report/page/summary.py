"""The top of the page: the step at one look, what was planned and where, and what it gained."""

from __future__ import annotations

from typing import NamedTuple

from tilewise.report.page.contents import Part, Report, Side, Training
from tilewise.report.page.html import Child, Markup, render, table
from tilewise.report.page.whole import whole_step
from tilewise.report.page.words import (
    NOTHING,
    anchor,
    count,
    format_ms,
    format_ratio,
    milliseconds,
    root_text,
    short,
    size,
    varies,
)

__all__ = ["summary_section"]

GREATEST = 5
"""Most gains and most losses that are listed."""


class Card(NamedTuple):
    """One total with a word on it."""

    name: str
    value: str
    text: str


class Gain(NamedTuple):
    """What one pass gains: a link to it, how much, and by which plan."""

    link: Markup
    words: str
    plan: str


def summary_section(report: Report) -> list[Child]:
    """The step as bars, cards with the totals, the greatest gains, a training step, and the settings."""
    best, worst = _gains(report)
    facts = [
        *report.options,
        ("device", report.device),
        ("environment", report.environment),
        ("tilewise", report.version),
    ]
    summary = render(
        "summary.html",
        whole=whole_step(report),
        cards=_cards(report),
        compared=report.compared,
        best=best,
        worst=worst,
        training=_training(report.training) if report.training is not None else None,
        facts=[(name, short(text, 300)) for name, text in facts if text],
    )
    return [summary]


def _cards(report: Report) -> list[Card]:
    """The totals at the page's top."""
    plan_times = [part.all_ms for part in report.parts if part.plan_ms is not None]
    cards: list[Card] = []
    if plan_times and not report.compared:
        how = "estimated" if report.rigor == "estimate" else f"as timed when planning{_doubt(report)}"
        cards.append(Card("plans in all", milliseconds(sum(plan_times)), how))
    cards += _cards_of_totals(report)
    if report.busy:
        text = "layer-passes timed while other processes kept the host busy: doubtful"
        cards.append(Card("busy host", str(report.busy), text))
    if report.budget is not None and report.budget.used is not None:
        text = f"of {size(report.budget.total)} for all kernels"
        cards.append(Card("workspace budget", size(report.budget.used), text))
    if report.step is not None and report.step.peak is not None:
        limit = "no limit set" if report.step.limit is None else f"limit {size(report.step.limit)}"
        cards.append(Card("peak of a step", size(report.step.peak), limit))
    return cards


def _cards_of_totals(report: Report) -> list[Card]:
    """What the document's summary says."""
    totals = report.totals
    if totals is None:
        return []
    cards: list[Card] = []
    if totals.framework_ms is not None and totals.planned_ms:
        ratio = format_ratio(totals.framework_ms / totals.planned_ms)
        sides = f"framework {milliseconds(totals.framework_ms)}, planned {milliseconds(totals.planned_ms)}"
        cards.append(Card(f"{report.convolutions} by themselves", ratio, f"{sides}{_doubt(report)}"))
    if totals.geometric_mean is not None:
        text = f"geometric mean of {totals.compared}; worst {format_ratio(totals.worst)}"
        cards.append(Card("speed-up per pass", format_ratio(totals.geometric_mean), f"{text}{_doubt(report)}"))
    if totals.passes is not None and totals.replaced is not None:
        text = f"{totals.replaced / totals.passes:.0%} of the layer-passes" if totals.passes else "no layer-passes"
        back = sum(len(part.names) for part in report.parts if part.taken_back)
        text += f"; {back} taken back for the step's sake" if back else ""
        cards.append(Card("replaced", f"{totals.replaced} of {totals.passes}", text))
    if totals.divided is not None:
        drawn = len(report.divided)
        # Equal layers count each here, and once among the drawings.
        different = f", {drawn} of them different" if drawn < totals.divided else ""
        cards.append(Card("divided", str(totals.divided), f"layer-passes run in parts{different}"))
    if totals.unplanned:
        cards.append(Card("without a plan", str(totals.unplanned), "layer-passes that nothing keeps the limits for"))
    if totals.framework_host_ms and totals.planned_host_ms is not None:
        text = f"framework {milliseconds(totals.framework_host_ms)}, planned {milliseconds(totals.planned_host_ms)}"
        ratio = format_ratio(totals.framework_host_ms / totals.planned_host_ms if totals.planned_host_ms else None)
        cards.append(Card("launches by the host", ratio, text))
    return cards


def _doubt(report: Report) -> str:
    """A word behind a total of times, most of which are doubtful; empty where they are not."""
    return "; doubtful: the host was busy" if report.doubtful else ""


def _gains(report: Report) -> tuple[list[Gain], list[Gain]]:
    """The passes that gain most and those that lose most, of those that differ by more than noise."""
    gains = sorted(((part.saved_ms or 0.0, part.number, part) for part in report.parts if part.saved_ms), reverse=True)
    best = [part for saved, _, part in gains if saved > 0 and part.gains > 0][:GREATEST]
    worst = [part for saved, _, part in reversed(gains) if saved < 0 and part.gains < 0 and part.replaced][:GREATEST]
    return [_gain(part) for part in best], [_gain(part) for part in worst]


def _gain(part: Part) -> Gain:
    """What one pass gains over the framework, in milliseconds and as a ratio, and by which plan."""
    saved = part.saved_ms or 0.0
    words = [f"{'saves' if saved >= 0 else 'loses'} {milliseconds(abs(saved))}"]
    words[0] += f" in {len(part.names)} layers" if len(part.names) > 1 else ""
    words += [format_ratio(part.ratio), varies(part), "taken back for the step's sake" if part.taken_back else ""]
    return Gain(anchor(part), ", ".join(word for word in words if word), root_text(part))


def _training(training: Training) -> Markup:
    """The training steps of both sides as a table."""
    ratios = [
        format_ratio(a / b if a is not None and b else None)
        for a, b in zip(_times(training.framework), _times(training.planned), strict=True)
    ]
    rows = [
        ["framework", *map(format_ms, _times(training.framework)), size(training.framework.peak)],
        ["planned", *map(format_ms, _times(training.planned)), size(training.planned.peak)],
        ["speed-up", *ratios, NOTHING],
    ]
    caption = "Forward with loss, then backward, without the optimizer, in ms"
    if training.iterations is not None:
        caption += f"; medians of {count(training.iterations, 'step')}"
    columns = ("side", "#forward", "#backward", "#step", "#peak")
    return table(caption, columns, rows)


def _times(side: Side) -> tuple[float | None, float | None, float | None]:
    """Forward, backward and whole step in ms."""
    return side.forward_ms, side.backward_ms, side.step_ms
