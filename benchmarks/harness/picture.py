"""Pictures of result documents. matplotlib comes with the extra ``report`` and is loaded when something is drawn."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure
else:
    Figure = Any

__all__ = ["Figure", "heat_maps", "paired_bars", "save", "scattered", "share_lines", "speedup_lines", "stacked_bars"]

LIMIT = 16
"""Speed-ups beyond this, and below its inverse, have the colour of the limit."""


def save(figure: Figure, path: Path) -> None:
    """As a PNG."""
    figure.savefig(path, dpi=120, metadata={"Software": None})


def speedup_lines(
    document: dict[str, Any], groups: Sequence[str], x: str = "batch", line: str = "n", base: int = 2
) -> Figure:
    """A panel a group: speed-up over the detail ``x``, a line for each value of the detail ``line``."""
    figure, panels = _panels(document, len(groups))
    for panel, group in zip(panels, groups, strict=True):
        rows = [row for row in document["rows"] if row["group"] == group]
        for value in dict.fromkeys(row["details"][line] for row in rows):
            points = sorted((r["details"][x], r["ratio"]) for r in rows if r["details"][line] == value)
            panel.plot(*zip(*points, strict=True), marker=".", label=f"{line} = {value}")
        panel.axhline(1.0, color="black", linewidth=0.8)
        panel.set(title=group, xlabel=x, ylabel="speed-up")
        panel.set_xscale("log", base=base)
        panel.set_ylim(bottom=0)
        if rows:
            panel.legend(fontsize="small")
    return figure


def share_lines(document: dict[str, Any], groups: Sequence[str], x: str, label: str) -> Figure:
    """A panel a group: speed-up over the detail ``x``, a share, with a mark for what the detail ``found`` names."""
    figure, panels = _panels(document, len(groups))
    for panel, group in zip(panels, groups, strict=True):
        rows = [row for row in document["rows"] if row["group"] == group]
        points = sorted((row["details"][x], row["ratio"]) for row in rows)
        panel.plot(*zip(*points, strict=True), color="grey", linewidth=0.8)
        for found in dict.fromkeys(row["details"]["found"] for row in rows):
            marks = [(r["details"][x], r["ratio"]) for r in rows if r["details"]["found"] == found]
            panel.plot(*zip(*marks, strict=True), linestyle="", marker="*" if found == "flops" else ".", label=found)
        panel.axhline(1.0, color="black", linewidth=0.8)
        panel.set(title=group, xlabel=label, ylabel="speed-up")
        panel.set_ylim(bottom=0)
        panel.legend(fontsize="small")
    return figure


def heat_maps(document: dict[str, Any], panel: str, x: str, y: str, failed: Sequence[dict[str, Any]] = ()) -> Figure:
    """A panel for each value of the detail ``panel``: speed-up in colours over details ``x`` and ``y``.

    Cells hold geometric means of what falls into them. What failed is black, what was not measured is empty.
    """
    from matplotlib.colors import LogNorm

    places = [row["details"] for row in document["rows"]] + list(failed)
    values = sorted({place[panel] for place in places})
    figure, panels = _panels(document, max(1, len(values)), columns=3)
    norm = LogNorm(1 / LIMIT, LIMIT)
    image = None
    columns, lines = (sorted({place[key] for place in places}) for key in (x, y))
    for axes, value in zip(panels, values, strict=False):
        cells: dict[tuple[int, int], list[float]] = {}
        for row in document["rows"]:
            where = row["details"]
            if where[panel] == value:
                cells.setdefault((lines.index(where[y]), columns.index(where[x])), []).append(math.log(row["ratio"]))
        means = [[math.nan] * len(columns) for _ in lines]
        for (line, column), logs in cells.items():
            means[line][column] = math.exp(math.fsum(logs) / len(logs))
        image = axes.imshow(means, norm=norm, cmap="RdYlGn", aspect="auto", origin="lower", interpolation="nearest")
        lost = [(columns.index(f[x]), lines.index(f[y])) for f in failed if f[panel] == value]
        lost = [place for place in lost if place[::-1] not in cells]
        if lost:
            axes.scatter(*zip(*lost, strict=True), marker="s", color="black")
        axes.set(title=f"{panel} {value}", xlabel=x, ylabel=y)
        axes.set_xticks(range(len(columns)), columns)
        step = max(1, len(lines) // 12)
        axes.set_yticks(range(0, len(lines), step), lines[::step])
    if image is not None:
        bar = figure.colorbar(image, ax=panels, label="speed-up")
        bar.set_ticks([1 / 16, 1 / 4, 1, 4, 16], labels=["1/16x", "1/4x", "1x", "4x", "16x"])
    return figure


def paired_bars(document: dict[str, Any]) -> Figure:
    """A panel a group: baseline and ours beside each other, a pair for each row."""
    groups = list(dict.fromkeys(row["group"] for row in document["rows"]))
    figure, panels = _panels(document, max(1, len(groups)))
    for panel, group in zip(panels, groups, strict=False):
        rows = [row for row in document["rows"] if row["group"] == group]
        for shift, side, label in ((-0.2, "baseline", "torch"), (0.2, "ours", "tilewise")):
            panel.bar([i + shift for i in range(len(rows))], [r[side]["value"] for r in rows], 0.4, label=label)
        panel.set_xticks(range(len(rows)), [row["name"] for row in rows], rotation=30)
        panel.set(title=group, ylabel=rows[0]["unit"])
        panel.legend()
    return figure


def stacked_bars(document: dict[str, Any], parts: str) -> Figure:
    """A bar a row, of the times by name in the detail ``parts``."""
    figure, (panel,) = _panels(document, 1)
    rows = document["rows"]
    names = dict.fromkeys(name for row in rows for name in row["details"][parts])
    left = [0.0] * len(rows)
    for name in names:
        widths = [row["details"][parts].get(name, 0.0) for row in rows]
        panel.barh(range(len(rows)), widths, left=left, label=name)
        left = [a + b for a, b in zip(left, widths, strict=True)]
    panel.set_yticks(range(len(rows)), [row["name"] for row in rows])
    panel.invert_yaxis()
    panel.set(xlabel=rows[0]["unit"] if rows else "")
    if rows:
        panel.legend(fontsize="small")
    return figure


def scattered(document: dict[str, Any], panel: str, x: str, y: str) -> Figure:
    """A panel for each value of the detail ``panel``: of details ``x`` and ``y``, numbers by name, one over the other.

    Both axes are logarithmic and of one scale, with a line where both are equal.
    """
    values = list(dict.fromkeys(row["details"][panel] for row in document["rows"]))
    figure, panels = _panels(document, max(1, len(values)))
    for axes, value in zip(panels, values, strict=False):
        points: dict[str, list[tuple[float, float]]] = {}
        for row in document["rows"]:
            if row["details"][panel] == value:
                for name, number in row["details"][x].items():
                    points.setdefault(name, []).append((number, row["details"][y][name]))
        for name, pairs in points.items():
            axes.scatter(*zip(*pairs, strict=True), s=14, label=name)
        every = [number for pairs in points.values() for pair in pairs for number in pair]
        axes.plot([min(every), max(every)], [min(every), max(every)], color="black", linewidth=0.8)
        axes.set(title=value, xlabel=x, ylabel=y, xscale="log", yscale="log")
        axes.legend(fontsize="small")
    return figure


def _panels(document: dict[str, Any], count: int, columns: int = 2) -> tuple[Figure, list[Any]]:
    """A figure without a window, and its panels."""
    from matplotlib.figure import Figure as Empty

    across = min(columns, count)
    down = -(-count // across)
    figure = Empty(figsize=(6 * across, 4.2 * down), layout="constrained")
    panels = list(figure.subplots(down, across, squeeze=False).flat)
    for spare in panels[count:]:
        spare.set_visible(False)
    title = document["title"].split(":")[0]
    figure.suptitle(f"{title}\n{document['machine']['device']}, {document['date'][:10]}", fontsize="medium")
    return figure, panels[:count]
