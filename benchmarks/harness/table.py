"""Results for people: one table of rows, then the bars."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table

MARKS = {True: "[green]met[/]", False: "[red]missed[/]", None: "not judged"}


def show(document: dict[str, Any], console: Console) -> None:
    """Print a result document."""
    machine = document["machine"]
    console.print(f"[bold]{document['title']}[/]", highlight=False)
    console.print(f"{machine['device']} · torch {machine['torch']} · {document['date']}", highlight=False)
    console.print(_rows(document["rows"]))
    console.print(_groups(document["summary"]["groups"]))
    for bar in document["summary"]["bars"]:
        console.print(f"{MARKS[bar['met']]}: {bar['text']}: {_bar(bar)}", highlight=False)
    for note in document["summary"]["notes"]:
        console.print(note, highlight=False, markup=False)


def _rows(rows: list[dict[str, Any]]) -> Table:
    table = Table(box=None, pad_edge=False)
    for name in ("group", "row", "baseline"):
        table.add_column(name)
    for name in ("", "ours", "ratio"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("what ran")
    for row in rows:
        ratio = f"{row['ratio']:.2f}x" if row["replaced"] else "left to torch"
        table.add_row(
            row["group"],
            row["name"],
            row["baseline"]["what"],
            f"{row['baseline']['value']:.4g}",
            f"{row['ours']['value']:.4g} {row['unit']}",
            ratio,
            row["ours"]["what"],
        )
    return table


def _groups(groups: dict[str, dict[str, Any]]) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column("group")
    for name in ("geometric mean", "min", "max", "rows", "replaced"):
        table.add_column(name, justify="right")
    for name, group in groups.items():
        ratios = [f"{group[key]:.2f}x" for key in ("geometric_mean", "min", "max")]
        table.add_row(name, *ratios, str(group["rows"]), str(group["replaced"]))
    return table


def _bar(bar: dict[str, Any]) -> str:
    value = "no value" if bar["value"] is None else f"{bar['value']:.4g}"
    bounds = [("at least", bar["least"]), ("at most", bar["most"])]
    wanted = ", ".join(f"{word} {bound:g}" for word, bound in bounds if bound is not None)
    return f"{value} ({wanted})" if wanted else value
