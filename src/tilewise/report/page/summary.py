"""The top of the page: what was planned and where, and what it gained."""

from __future__ import annotations

from tilewise.report.page.contents import Part, Report, Side, Training
from tilewise.report.page.html import Child, Markup, table, tag
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
)

__all__ = ["summary_section"]

GREATEST = 5
"""Most gains and most losses that are listed."""


def summary_section(report: Report) -> list[Child]:
    """Cards with the totals, the greatest gains, a training step, and the settings."""
    return [
        tag("dl", _cards(report), class_="cards"),
        _gains(report),
        _training(report.training) if report.training is not None else None,
        _settings(report),
    ]


def _cards(report: Report) -> list[Child]:
    """The totals at the page's top, one card each."""
    totals = report.totals
    cards: list[Child] = []
    if totals is not None:
        if totals.framework_ms is not None and totals.planned_ms:
            ratio = format_ratio(totals.framework_ms / totals.planned_ms)
            text = f"framework {milliseconds(totals.framework_ms)}, planned {milliseconds(totals.planned_ms)}"
            cards.append(_card("convolutions", ratio, text))
        if totals.geometric_mean is not None:
            text = f"geometric mean of {totals.compared}; worst {format_ratio(totals.worst)}"
            cards.append(_card("speed-up per pass", format_ratio(totals.geometric_mean), text))
        if totals.passes is not None and totals.replaced is not None:
            text = f"{totals.replaced / totals.passes:.0%} of the layer-passes" if totals.passes else "no layer-passes"
            cards.append(_card("replaced", f"{totals.replaced} of {totals.passes}", text))
        if totals.divided is not None:
            cards.append(_card("divided", str(totals.divided), "layer-passes run in parts"))
        if totals.unplanned:
            cards.append(
                _card("without a plan", str(totals.unplanned), "layer-passes that nothing keeps the limits for")
            )
        if totals.framework_host_ms and totals.planned_host_ms is not None:
            text = f"framework {milliseconds(totals.framework_host_ms)}, planned {milliseconds(totals.planned_host_ms)}"
            ratio = format_ratio(totals.framework_host_ms / totals.planned_host_ms if totals.planned_host_ms else None)
            cards.append(_card("launches by the host", ratio, text))
    if report.busy:
        text = "layer-passes timed while other processes kept the host busy: doubtful"
        cards.append(_card("busy host", str(report.busy), text))
    plan_times = [part.plan_ms * len(part.names) for part in report.parts if part.plan_ms is not None]
    if plan_times and not report.compared:
        how = "estimated" if report.rigor == "estimate" else "as timed when planning"
        cards.insert(0, _card("plans in all", milliseconds(sum(plan_times)), how))
    if report.training is not None and report.training.ratio is not None:
        sides = (report.training.framework.step_ms, report.training.planned.step_ms)
        text = f"framework {milliseconds(sides[0])}, planned {milliseconds(sides[1])}"
        cards.append(_card("training step", format_ratio(report.training.ratio), text))
    if report.budget is not None and report.budget.used is not None:
        text = f"of {size(report.budget.total)} for all kernels"
        cards.append(_card("workspace budget", size(report.budget.used), text))
    if report.step is not None and report.step.peak is not None:
        limit = "no limit set" if report.step.limit is None else f"limit {size(report.step.limit)}"
        cards.append(_card("peak of a step", size(report.step.peak), limit))
    return cards


def _card(name: str, value: str, text: str) -> Markup:
    """One total with a word on it."""
    return tag("div", tag("dt", name), tag("dd", tag("b", value), tag("span", text)))


def _gains(report: Report) -> list[Child]:
    """The passes that gain most and those that lose most."""
    gains = sorted(((part.saved_ms, part.number, part) for part in report.parts if part.saved_ms), reverse=True)
    best = [part for saved, _, part in gains if saved and saved > 0][:GREATEST]
    worst = [part for saved, _, part in reversed(gains) if saved and saved < 0 and part.replaced][:GREATEST]
    if not report.compared:
        return []
    shown: list[Child] = [tag("h3", "Greatest gains")]
    shown.append(_list(best) if best else tag("p", "No layer-pass gains.", class_="note"))
    if worst:
        shown += [tag("h3", "Losses"), _list(worst)]
    return shown


def _list(parts: list[Part]) -> Markup:
    """Passes with what they gain."""
    return tag("ol", [tag("li", anchor(part), " ", _gain(part)) for part in parts], class_="gains")


def _gain(part: Part) -> list[Child]:
    """What one pass gains over the framework, in milliseconds and as a ratio, and by which plan."""
    saved = part.saved_ms or 0.0
    words = f"{'saves' if saved >= 0 else 'loses'} {milliseconds(abs(saved))}" + (
        f" in {len(part.names)} layers" if len(part.names) > 1 else ""
    )
    return [
        tag("span", f"{words}, {format_ratio(part.ratio)}", class_="num"),
        " ",
        tag("span", root_text(part), class_="plan"),
    ]


def _training(training: Training) -> list[Child]:
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
    caption = "Forward with loss, then backward, without the optimizer"
    if training.iterations is not None:
        caption += f"; medians of {count(training.iterations, 'step')}"
    columns = ("side", "#forward ms", "#backward ms", "#step ms", "#peak memory")
    return [tag("h3", "Training step"), table(caption, columns, rows)]


def _times(side: Side) -> tuple[float | None, float | None, float | None]:
    """Forward, backward and whole step in ms."""
    return side.forward_ms, side.backward_ms, side.step_ms


def _settings(report: Report) -> Markup:
    """Options, device and versions."""
    facts = [
        *report.options,
        ("device", report.device),
        ("environment", report.environment),
        ("tilewise", report.version),
    ]
    pairs = [tag("div", tag("dt", name), tag("dd", short(text, 300))) for name, text in facts if text]
    return tag("details", tag("summary", "Settings and versions"), tag("dl", pairs, class_="facts"), class_="numbers")
