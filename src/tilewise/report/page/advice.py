"""The page of advice: what to pick and why, and TFLOP/s against the mini-batch, a curve for each operation."""

from __future__ import annotations

from collections.abc import Sequence

from tilewise.report.page.advice_document import AdviceReport, Place
from tilewise.report.page.html import Child, Markup, escaped, table, tag
from tilewise.report.page.words import NOTHING, count, format_ms, numbers, short
from tilewise.report.words import marked

__all__ = ["advice_line", "advice_sections"]

LEFT, RIGHT, TOP, BOTTOM = 46.0, 350.0, 16.0, 190.0
"""Edges of the plot in a panel of 440 x 220; to its right stand the names of the curves."""
COLOURS = 6
MOST_PANELS, MOST_POINTS = 6, 2000


def advice_line(report: AdviceReport) -> str:
    """What was asked, in one line."""
    words = ["tilewise advice", report.device]
    words.append(f"{count(len(report.points), 'point')} in {report.seconds:.0f} s" if report.seconds else "")
    words.append("" if report.done else "stopped before all was measured")
    return " · ".join(short(word, 120) for word in words if word)


def advice_sections(report: AdviceReport) -> list[tuple[str, str, list[Child]]]:
    """Identifier, name and contents of each section."""
    return [
        ("pick", "What to pick", _pick(report)),
        ("curves", "TFLOP/s against mini-batch", _curves(report)),
    ]


def _pick(report: AdviceReport) -> list[Child]:
    """The points worth naming, and the reasons."""
    asked = report.asked.samples_per_second
    rows = []
    for named in report.named:
        mine = named.point.samples_per_second
        ratio = f"{mine / asked:.2f}x" if mine and asked else NOTHING
        rows.append([*_row(named.point, ratio), ", ".join(named.roles), _plans(named.point)])
    columns = (*_columns(report), "best for", "plan")
    return [
        tag("ul", [tag("li", short(line, 600)) for line in report.why], class_="gains") if report.why else None,
        table("Sizes worth naming", columns, rows),
    ]


def _curves(report: AdviceReport) -> list[Child]:
    """A panel for each layer that was measured with several mini-batches, and all points as a table."""
    groups: dict[tuple[int, ...], list[Place]] = {}
    for point in report.points[:MOST_POINTS]:
        groups.setdefault(_rest(point.sizes, report.batch), []).append(point)
    wanted = [_rest(each.sizes, report.batch) for each in (report.asked, *(named.point for named in report.named))]
    shown = [groups[rest] for rest in dict.fromkeys(wanted) if len(groups.get(rest, ())) > 1][:MOST_PANELS]
    note = (
        "One curve for each operation; dashed is torch's own choice. Upwards is better, with one scale in all panels."
    )
    high = max((rate for group in shown for point in group for rate in _rates(point)), default=1.0)
    panels = [_panel(report, sorted(group, key=lambda p: p.sizes[report.batch]), high) for group in shown]
    rows = [[*_row(point, ""), _plans(point)] for point in report.points[:MOST_POINTS]]
    columns = [*_columns(report), "plan"]
    columns.remove("#of asked")
    place = len(report.axes) + 1
    return [
        tag("p", note, class_="note") if panels else tag("p", "No layer has several mini-batches.", class_="note"),
        tag("div", panels, class_="panels"),
        numbers(table("All points", columns, [[*row[:place], *row[place + 1 :]] for row in rows])),
    ]


def _panel(report: AdviceReport, group: Sequence[Place], high: float) -> Markup:
    """TFLOP/s against the mini-batch for one layer."""
    batches = [point.sizes[report.batch] for point in group]
    low, wide = batches[0], max(1, batches[-1] - batches[0])

    def x(batch: int) -> float:
        return LEFT + 6 + (batch - low) / wide * (RIGHT - LEFT - 12)

    def y(rate: float) -> float:
        return BOTTOM - rate / high * (BOTTOM - TOP)

    shapes = [f'<path class="axis" d="M{LEFT:.0f} {TOP:.0f}V{BOTTOM:.0f}H{RIGHT:.0f}"/>']
    for rate in (high * share for share in (0.25, 0.5, 0.75, 1.0)):
        shapes.append(f'<path class="grid" d="M{LEFT:.0f} {y(rate):.1f}H{RIGHT:.0f}"/>')
        shapes.append(f'<text x="{LEFT - 4:.0f}" y="{y(rate) + 4:.1f}" text-anchor="end">{rate:.3g}</text>')
    shapes += [
        f'<text x="{x(batch):.1f}" y="{BOTTOM + 16:.0f}" text-anchor="middle">{batch}</text>'
        for batch in dict.fromkeys((batches[0], batches[len(batches) // 2], batches[-1]))
    ]
    for index, part in enumerate(group[0].parts[:COLOURS]):
        parts = [
            (x(batch), each.parts[index]) for batch, each in zip(batches, group, strict=True) if index < len(each.parts)
        ]
        by_torch = [(px, y(each.torch_rate)) for px, each in parts if each.torch_rate is not None]
        planned = [(px, y(each.rate)) for px, each in parts if each.rate is not None]
        shapes += [_path(by_torch, f"c{index + 1} torch"), _path(planned, f"c{index + 1}")]
        if planned:
            px, py = planned[-1]
            shapes.append(f'<text x="{px + 8:.1f}" y="{py + 4:.1f}">{escaped(short(part.name, 16))}</text>')
    title = _title(report, group[0])
    inside = f"<title>{escaped(title)}</title>{''.join(shapes)}"
    return tag("figure", tag("figcaption", title), Markup(f'<svg viewBox="0 0 440 220" role="img">{inside}</svg>'))


def _path(points: Sequence[tuple[float, float]], kind: str) -> str:
    """A line of class ``kind`` through ``points``, if there are any."""
    line = "L".join(f"{px:.1f} {py:.1f}" for px, py in points)
    return f'<path class="curve {kind}" d="M{line}"/>' if points else ""


def _title(report: AdviceReport, point: Place) -> str:
    """The sizes of a point but its mini-batch, in words."""
    pairs = enumerate(zip(report.axes, point.sizes, strict=True))
    return short(", ".join(f"{name} {size}" for i, (name, size) in pairs if i != report.batch) or "all", 120)


def _row(point: Place, ratio: str) -> list[str]:
    """The cells that all tables of points have."""
    samples = NOTHING if point.samples_per_second is None else f"{point.samples_per_second:,.4g}"
    rates = (NOTHING if rate is None else f"{rate:.3g}" for rate in (point.rate, point.torch_rate))
    return [*map(str, point.sizes), samples, ratio, *rates, marked(format_ms(point.ms), point.busy)]


def _columns(report: AdviceReport) -> list[str]:
    """The names of these cells."""
    return [*(f"#{short(axis, 20)}" for axis in report.axes), "#samples/s", "#of asked", "#TFLOP/s", "#torch", "#ms"]


def _plans(point: Place) -> str:
    """The plans of all operations of a point."""
    return "; ".join(f"{short(part.name, 16)}: {short(part.plan, 120)}" for part in point.parts)


def _rates(point: Place) -> list[float]:
    """All rates of a point."""
    return [rate for part in point.parts for rate in (part.rate, part.torch_rate) if rate is not None]


def _rest(sizes: tuple[int, ...], batch: int) -> tuple[int, ...]:
    """``sizes`` without the mini-batch."""
    return (*sizes[:batch], *sizes[batch + 1 :])
