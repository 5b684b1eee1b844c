"""Memory of each layer: operands, results and workspace (Oyama et al. 2018, mu-cuDNN, Figure 12)."""

from __future__ import annotations

from tilewise.plan import format_bytes
from tilewise.report.page.batches import folded
from tilewise.report.page.contents import Layer, Report
from tilewise.report.page.html import Child, Markup, table, tag
from tilewise.report.page.svg import key, rect, svg
from tilewise.report.page.words import NOTHING, numbers, short, shown_name, size

__all__ = ["layer_memory_section"]

SHOWN, LISTED = 24, 300


def layer_memory_section(report: Report) -> list[Child]:
    """A bar for each layer: operands and results, and the workspace of the pass that takes most."""
    layers = [layer for layer in report.layers if any(part.bytes is not None or part.plan for part in layer.parts)]
    if not layers:
        return [tag("p", "The document has no sizes of operands or plans.", class_="note")]
    greatest = max(_data(layer) + _workspace(layer)[0] for layer in layers) or 1
    rows = [_bar(layer, greatest) for layer in layers[:LISTED]]
    data, extra = (
        sum(value(layer) * len(layer.names) for layer in layers)
        for value in (_data, lambda layer: _workspace(layer)[0])
    )
    note = (
        f"All layers together: {format_bytes(data)} of operands and results, {format_bytes(extra)} of workspace if "
        "each layer held its own. Passes of a layer share their tensors and run one after the other: the workspace "
        f"drawn is that of the pass that takes most. Bars are on one scale from 0 to {format_bytes(greatest)}."
    )
    table_rows = [
        [short(part.title), part.pass_, size(part.bytes), size(part.plan.workspace if part.plan else None),
         size(part.plan.constant if part.plan else None)]
        for part in report.parts
    ]  # fmt: skip
    beyond = len(layers) - len(rows)
    return [
        tag("p", note, class_="note"),
        tag("ul", key("rs", "operands and results"), key("ws", "workspace"), class_="legend"),
        folded(rows, SHOWN, "layers", "bars-list"),
        tag("p", f"{beyond} more layers are in the table.", class_="note") if beyond else None,
        numbers(table("Memory of each pass", MEMORY_COLUMNS, table_rows)),
    ]


MEMORY_COLUMNS = ("layer", "pass", "#operands and result", "#workspace", "#kept between calls")


def _data(layer: Layer) -> int:
    """Bytes of a layer's operands and results."""
    return max((part.bytes or 0 for part in layer.parts), default=0)


def _workspace(layer: Layer) -> tuple[int, str]:
    """Bytes of the pass with the most workspace, and its name."""
    return max(((part.plan.workspace, part.pass_) for part in layer.parts if part.plan), default=(0, ""))


def _bar(layer: Layer, greatest: int) -> Markup:
    """The bar of one layer."""
    data, (extra, pass_) = _data(layer), _workspace(layer)
    share = data / greatest
    shapes = [rect(0, share, 1, 14, "rs"), rect(share, extra / greatest, 1, 14, "ws")]
    return tag(
        "div",
        tag("span", tag("b", shown_name(layer.title)), class_="who"),
        svg(
            f"{short(layer.title)}: operands and results {format_bytes(data)}, workspace {format_bytes(extra)}",
            shapes,
            height=16,
        ),
        tag("span", format_bytes(data), class_="num"),
        tag("span", f"+ {format_bytes(extra)}" if extra else NOTHING, class_="num"),
        tag("i", pass_ if extra else ""),
        class_="bar",
    )
