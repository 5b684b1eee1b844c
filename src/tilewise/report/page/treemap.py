"""Where the time goes: a treemap of the layers, each as large as what it takes (Bruls et al. 2000, squarified)."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from tilewise.report.page.contents import Layer, Report
from tilewise.report.page.html import Child, Markup, escaped, join, tag
from tilewise.report.page.svg import key, percent, rect, svg
from tilewise.report.page.words import count, format_ratio, middle, milliseconds

__all__ = ["squarified", "treemap_section"]

MOST = 48
"""Most layers that have a cell of their own; the others share one."""
SIZES = {"wide": (660.0, 264.0), "narrow": (296.0, 400.0)}
"""Both drawings: the least width that each is shown in, which words must fit into, and the height, in pixels."""
LETTER = 7.6
"""Pixels of a wide letter at the size of labels."""
KINDS = {1: "up", 0: "even", -1: "down"}

Box = tuple[float, float, float, float]
"""Left, top, width and height."""


@dataclass(frozen=True, slots=True)
class Cell:
    """A layer, or several: what is written on it, its time in ms, where a click leads, how it compares with torch."""

    label: str
    ms: float
    target: str
    ratio: float | None
    gains: int
    text: str


def treemap_section(report: Report) -> list[Child]:
    """The treemap of all layers that have a time; empty where none has."""
    layers = [layer for layer in report.layers if any(part.all_ms for part in layer.parts)]
    # What all names begin with tells no layer from another.
    common = _common([layer.title for layer in layers])
    cells = [_cell(layer, report, layer.title[common:]) for layer in layers]
    if not cells:
        return []
    cells.sort(key=lambda cell: -cell.ms)
    total = sum(cell.ms for cell in cells)
    others = cells[MOST:]
    shown = cells[:MOST]
    if others:
        ms = sum(cell.ms for cell in others)
        name = count(len(others), "other layer")
        shown.append(Cell(name, ms, "#layers", None, 0, f"{name}: {milliseconds(ms)} together"))
    note = f"Each layer is as large as the time of its passes; all together take {milliseconds(total)}. "
    note += "Equal layers are one cell. A click leads to the layer's longest pass."
    if without := sum(len(part.names) for part in report.parts if part.plan is None):
        note += f" {count(without, 'layer-pass', 'layer-passes')} without a plan are left out."
    legend = [key(kind, text) for kind, text in LEGEND] if report.compared else []
    drawings = [_drawing(shown, total, *SIZES[kind], kind) for kind in SIZES]
    return [tag("p", note, class_="note"), tag("ul", legend, class_="legend") if legend else None, *drawings]


LEGEND = (("up", "faster than torch"), ("even", "about equal, or torch's own"), ("down", "slower"))


def _common(names: Sequence[str]) -> int:
    """How many characters all ``names`` begin with, up to a dot."""
    words = [name.split(".")[:-1] for name in names] if len(names) > 1 else []
    alike = itertools.takewhile(lambda level: len(set(level)) == 1, zip(*words, strict=False))
    return sum(len(level[0]) + 1 for level in alike)


def _cell(layer: Layer, report: Report, label: str) -> Cell:
    """The cell of one layer."""
    parts = [part for part in layer.parts if part.all_ms]
    longest = max(parts, key=lambda part: part.all_ms)
    ms = sum(part.all_ms for part in parts)
    both = [part for part in parts if part.framework_ms is not None and part.ran_ms is not None]
    framework = sum((part.framework_ms or 0.0) * len(part.names) for part in both)
    ran = sum((part.ran_ms or 0.0) * len(part.names) for part in both)
    ratio = framework / ran if ran and report.compared else None
    noise = max((part.noise for part in both), default=0.0)
    gains = 0 if ratio is None or abs(ratio - 1) < noise else 1 if ratio > 1 else -1
    words = ", ".join(f"{part.pass_} {milliseconds(part.all_ms)}" for part in parts)
    text = f"{middle(layer.title, 60)}: {milliseconds(ms)} ({words})"
    text += f", {format_ratio(ratio)} against torch" if ratio is not None else ""
    return Cell(label, ms, f"#pass-{longest.number}", ratio, gains, text)


def _drawing(cells: Sequence[Cell], total: float, width: float, height: float, kind: str) -> Markup:
    """The treemap for places from ``width`` pixels on."""
    boxes = squarified([cell.ms for cell in cells], width, height)
    shapes = [_shape(cell, box, width) for cell, box in zip(cells, boxes, strict=True)]
    words = f"Treemap of {count(len(cells), 'cell')}, {milliseconds(total)} in all"
    return tag("div", svg(words, shapes, height=int(height), links=True), class_=f"map {kind}")


def _shape(cell: Cell, box: Box, width: float) -> Markup:
    """A cell as a link, with what of its label fits."""
    left, top, wide, high = box
    shapes: list[Child] = [
        rect(left / width, wide / width, top, high, f"cell {KINDS[cell.gains]}", cell.text),
    ]
    room = int((wide - 8) / LETTER)
    # The ends of names differ: what does not fit is left out at the beginning.
    name = cell.label if len(cell.label) <= room else "…" + cell.label[-max(1, room - 1) :].lstrip(".")
    lines = [name, milliseconds(cell.ms), format_ratio(cell.ratio) if cell.ratio is not None else ""]
    fitting = [line for line in lines if line and len(line) <= room][: int((high - 4) // 15)] if room >= 3 else []
    if fitting:
        words = [tag("text", line, x=5, y=15 * (i + 1), class_="on") for i, line in enumerate(fitting)]
        place = f'x="{percent(left / width)}" width="{percent(wide / width)}" y="{top:.5g}" height="{high:.5g}"'
        shapes.append(Markup(f'<svg {place} class="cut-off" aria-hidden="true">{"".join(words)}</svg>'))
    return Markup(f'<a href="{cell.target}" aria-label="{escaped(cell.text)}">{join(shapes)}</a>')


def squarified(values: Sequence[float], width: float, height: float) -> list[Box]:
    """Boxes that fill ``width`` x ``height`` with areas as ``values``, which are sorted downwards, near to squares.

    >>> squarified([3.0, 1.0], 4.0, 1.0)
    [(0.0, 0.0, 3.0, 1.0), (3.0, 0.0, 1.0, 1.0)]
    """
    total = sum(values)
    areas = [value / total * width * height for value in values]
    boxes: list[Box] = []
    left = top = 0.0
    while areas:
        side = min(width - left, height - top)
        taken = 1
        while taken < len(areas) and _worst(areas[: taken + 1], side) <= _worst(areas[:taken], side):
            taken += 1
        row, areas = areas[:taken], areas[taken:]
        thick = sum(row) / side if side > 0 else 0.0
        along = 0.0
        stacked = width - left >= height - top
        for area in row:
            long = area / thick if thick > 0 else 0.0
            boxes.append((left, top + along, thick, long) if stacked else (left + along, top, long, thick))
            along += long
        left, top = (left + thick, top) if stacked else (left, top + thick)
    return boxes


def _worst(row: Sequence[float], side: float) -> float:
    """The worst ratio of sides in a row of ``row`` areas along ``side``."""
    total = sum(row)
    if not total or side <= 0:
        return float("inf")
    return max(max(side**2 * area / total**2, total**2 / (side**2 * area)) if area else float("inf") for area in row)
