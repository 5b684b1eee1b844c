"""The roofline (Williams et al. 2009): the rate of every pass against the arithmetic that its data allow."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from tilewise.report.page.contents import Part, Report
from tilewise.report.page.html import Child, Markup, escaped, join, table, tag
from tilewise.report.page.svg import key, line, log_ticks, percent, svg, write
from tilewise.report.page.words import (
    DIFFERENT,
    NOTHING,
    count,
    format_ms,
    middle,
    milliseconds,
    name_of,
    numbers,
    rate_text,
)

__all__ = ["roofline_section"]

HEIGHT, TOP, BOTTOM = 300.0, 14.0, 262.0
"""Height of the drawing, and the edges of its plot, in pixels."""
LEAST, GREATEST = 1e-9, 1e15
"""Rates in GFLOP/s that are drawn: no device is slower or faster."""
MOST = 300
"""Most passes that are links of their own. Of the others, those that would lie on each other are one dot."""
COLUMNS, ROWS = 100, 60
"""The grid of dots for the others."""


@dataclass(frozen=True, slots=True)
class Dot:
    """A pass: operations per byte, and GFLOP/s as it runs and by torch, ``None`` where that is not known."""

    part: Part
    intensity: float
    rate: float
    torch: float | None


def roofline_section(report: Report) -> list[Child]:
    """The plot of all passes whose operations, bytes and time are known; empty where there are none."""
    dots = [dot for part in report.parts if (dot := _dot(part)) is not None]
    if not dots:
        return []
    dots.sort(key=lambda dot: -dot.part.all_ms)
    left_out = sum(len(part.names) for part in report.parts) - sum(len(dot.part.names) for dot in dots)
    notes = [
        "Upwards is faster. To the right a pass does more arithmetic for each byte of its operands and its result. "
        "Both are counted by the direct method, so that a solver that does less arithmetic can pass a device's peak.",
    ]
    roof = _measured(report)
    if roof is None:
        notes.append(
            "The roof is no data sheet's: its slope is the most bytes, its top the most operations a second that "
            "any pass of this page reached."
        )
    else:
        notes.append(
            f"The roof is what this device was measured to reach: its slope is the {_gigabytes(roof.slope)} of a large "
            f"copy, its top the {rate_text(roof.top)} of a matrix product of this type. A pass whose data stay in a "
            "cache can lie above the slope."
        )
    if left_out:
        notes.append(f"{count(left_out, 'layer-pass is', 'layer-passes are')} not drawn: no time, operations or bytes.")
    kinds = list(dict.fromkeys(KINDS.get(dot.part.pass_, "r1") for dot in dots))
    names = {kind: name for name, kind in KINDS.items()}
    legend = [key(kind, names.get(kind, "pass")) for kind in sorted(kinds)]
    if any(dot.torch for dot in dots):
        legend.append(key("by-torch", "by torch"))
    legend.append(key("roof", "the best that was reached" if roof is None else "what the device was measured to reach"))
    return [
        tag("p", " ".join(notes), class_="note"),
        tag("ul", legend, class_="legend"),
        _plot(dots, roof or _reached(dots)),
        numbers(_table(dots)),
    ]


KINDS = {"fprop": "r1", "dgrad": "r2", "wgrad": "r3"}
"""The class that draws each pass."""


def _dot(part: Part) -> Dot | None:
    """A pass as a point, if all is known of it."""
    if not part.flops or not part.bytes:
        return None
    planned, torch = (part.flops / ms / 1e6 if ms else 0.0 for ms in (part.time_ms, part.framework_ms))
    if not LEAST <= planned <= GREATEST:
        return None
    seen = part.replaced and LEAST <= torch <= GREATEST
    return Dot(part, part.flops / part.bytes, planned, torch if seen else None)


@dataclass(frozen=True, slots=True)
class Roof:
    """The most that passes can reach: ``slope`` in GB/s where bytes decide, ``top`` in GFLOP/s where operations do."""

    slope: float
    top: float

    def at(self, intensity: float) -> float:
        """The most GFLOP/s at so many operations per byte."""
        return min(self.top, self.slope * intensity)


def _measured(report: Report) -> Roof | None:
    """The roof of the device, as far as the document knows it."""
    if report.rates is None:
        return None
    roof = Roof(report.rates.bytes / 1e9, report.rates.flops / 1e9)
    return roof if all(LEAST <= rate <= GREATEST for rate in (roof.slope, roof.top)) else None


def _reached(dots: list[Dot]) -> Roof:
    """The best that any pass of the page reached."""
    return Roof(max(dot.rate / dot.intensity for dot in dots), max(dot.rate for dot in dots))


def _gigabytes(rate: float) -> str:
    """A rate in GB/s as text, with the unit that fits."""
    return f"{rate:.3g} GB/s" if rate < 1000 else f"{rate / 1000:.3g} TB/s"


class _Axes:
    """Two logarithmic axes: places in shares of the width and in pixels. The roof's right end is in sight."""

    def __init__(self, dots: Iterable[Dot], roof: Roof) -> None:
        dots = list(dots)
        self.across = _padded([dot.intensity for dot in dots])
        upwards = [value for dot in dots for value in (dot.rate, dot.torch) if value]
        self.upwards = _padded([*upwards, roof.at(self.across[1])])

    def x(self, intensity: float) -> float:
        low, high = self.across
        return math.log(intensity / low) / math.log(high / low)

    def y(self, rate: float) -> float:
        low, high = self.upwards
        return BOTTOM - math.log(rate / low) / math.log(high / low) * (BOTTOM - TOP)


def _padded(values: list[float]) -> tuple[float, float]:
    """The ends of an axis that shows ``values``, at least a factor of 4 apart."""
    low, high = min(values) / 1.3, max(values) * 1.3
    widen = max(1.0, math.sqrt(4 * low / high))
    return low / widen, high * widen


def _plot(dots: list[Dot], roof: Roof) -> Markup:
    """The plot with its axes, its roof and its dots."""
    axes = _Axes(dots, roof)
    shapes: list[Child] = []
    labels: list[Child] = []
    for tick in log_ticks(*axes.upwards):
        shapes.append(line(0, 1, axes.y(tick), axes.y(tick), "grid"))
        labels.append(write("100%", axes.y(tick) + 4, rate_text(tick), "soft", "end"))
    for tick in log_ticks(*axes.across):
        x = axes.x(tick)
        shapes.append(line(x, x, BOTTOM, BOTTOM + 4, "axis"))
        shapes.append(write(percent(x), BOTTOM + 17, f"{tick:g}", "soft", "middle"))
    shapes.append(write("100%", HEIGHT - 4, "operations per byte", "soft", "end"))
    shapes.append(line(0, 1, BOTTOM, BOTTOM, "axis"))
    shapes += _roof_lines(axes, roof)
    shapes += _others(dots[MOST:], axes)
    shapes += [_point(dot, axes) for dot in reversed(dots[:MOST])]
    words = f"Roofline of {count(len(dots), *DIFFERENT)}, at most {rate_text(max(dot.rate for dot in dots))}"
    axis = Markup(f'<svg width="100%" height="{HEIGHT:.0f}" aria-hidden="true">{join(labels)}</svg>')
    plot = tag("div", svg(words, shapes, height=int(HEIGHT), links=True))
    return tag("figure", tag("div", axis, plot, class_="step"), class_="wide roofline")


def _roof_lines(axes: _Axes, roof: Roof) -> list[Child]:
    """The slope and the top of the roof, as far as they are in sight."""
    low, high = axes.across
    corner = roof.top / roof.slope
    start, end = max(low, axes.upwards[0] / roof.slope), min(corner, high)
    lines: list[Child] = []
    if start < end:
        lines.append(line(axes.x(start), axes.x(end), axes.y(roof.at(start)), axes.y(roof.at(end)), "roof"))
    if corner < high:
        lines.append(line(axes.x(max(corner, low)), 1, axes.y(roof.top), axes.y(roof.top), "roof"))
    return lines


def _others(dots: list[Dot], axes: _Axes) -> list[Child]:
    """Dots without links, one for each place of a grid that has any."""
    places = {
        (
            KINDS.get(dot.part.pass_, "r1"),
            round(axes.x(dot.intensity) * COLUMNS),
            round(axes.y(dot.rate) / HEIGHT * ROWS),
        )
        for dot in dots
    }
    return [
        Markup(f'<circle class="{kind}" cx="{percent(x / COLUMNS)}" cy="{y * HEIGHT / ROWS:.4g}" r="3"/>')
        for kind, x, y in sorted(places)
    ]


def _point(dot: Dot, axes: _Axes) -> Markup:
    """A pass as a link, and a line from where torch has it."""
    x, y = percent(axes.x(dot.intensity)), f"{axes.y(dot.rate):.4g}"
    title = (
        f"{name_of(dot.part)}: {rate_text(dot.rate)} in {milliseconds(dot.part.time_ms)}, {dot.intensity:.3g} per byte"
    )
    shapes = ""
    if dot.torch is not None:
        title += f"; {rate_text(dot.torch)} by torch"
        torch = f"{axes.y(dot.torch):.4g}"
        shapes = f'<line class="gone" x1="{x}" x2="{x}" y1="{torch}" y2="{y}"/>'
        shapes += f'<circle class="by-torch" cx="{x}" cy="{torch}" r="3"/>'
    kind = KINDS.get(dot.part.pass_, "r1")
    shapes += f'<circle class="{kind}" cx="{x}" cy="{y}" r="5"><title>{escaped(title)}</title></circle>'
    return Markup(f'<a href="#pass-{dot.part.number}" aria-label="{escaped(title)}">{shapes}</a>')


def _table(dots: list[Dot]) -> Markup:
    """The points as a table, those that take longest first."""
    rows = [
        [
            middle(dot.part.title, 60),
            dot.part.pass_,
            f"{dot.intensity:.3g}",
            format_ms(dot.part.time_ms),
            rate_text(dot.rate),
            NOTHING if dot.torch is None else rate_text(dot.torch),
        ]
        for dot in dots
    ]
    columns = ("layer", "pass", "#operations per byte", "#ms", "#rate", "#by torch")
    return table("Rates by the direct method's operations", columns, rows)
