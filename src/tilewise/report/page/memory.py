"""Memory: operands, results and workspace of each layer (mu-cuDNN, Figure 12), and of a whole training step."""

from __future__ import annotations

from tilewise.plan import format_bytes
from tilewise.report.page.batches import folded
from tilewise.report.page.contents import Layer, Moment, Report, Step
from tilewise.report.page.html import Child, Markup, table, tag
from tilewise.report.page.svg import key, line, rect, size_ticks, svg, write
from tilewise.report.page.words import NOTHING, breakable, clean_size, count, numbers, short, size

__all__ = ["layer_memory_section", "step_section"]

SHOWN, LISTED = 24, 300
HEIGHT, TOP = 240.0, 20.0
"""Height of the plot of a step, and of the room above it, in pixels."""


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
        tag("span", tag("b", breakable(layer.title)), class_="who"),
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


def step_section(step: Step) -> list[Child]:
    """Memory while each kernel of a training step runs, and the limit."""
    if not step.moments:
        return [tag("p", _facts(step), class_="note"), tag("p", "No moments were recorded.", class_="note")]
    return [
        tag("p", _facts(step), class_="note"),
        tag(
            "ul",
            key("al", "alive"),
            key("rs", "result"),
            key("ws", "workspace"),
            key("limit", "limit") if step.limit is not None else None,
            class_="legend",
        ),
        _plot(step),
        numbers(_moments_table(step)),
    ]


def _facts(step: Step) -> str:
    """Limit, peak and least memory of a step, in words."""
    words = ["No limit was set" if step.limit is None else f"Limit {format_bytes(step.limit)}"]
    if step.peak is not None:
        share = f" ({step.peak / step.limit:.0%} of the limit)" if step.limit else ""
        words.append(f"peak {format_bytes(step.peak)}{share}")
    if step.least is not None:
        words.append(f"the step needs {format_bytes(step.least)} at least")
    return ", ".join(words) + f"; {count(len(step.moments), 'kernel')} in the order they ran."


MOST_MOMENTS = 400
"""Most moments that the plot of a step draws."""


def _binned(moments: tuple[Moment, ...]) -> list[Moment]:
    """At most ``MOST_MOMENTS`` moments: of each run of neighbours the one that takes most."""
    width = -(-len(moments) // MOST_MOMENTS)
    return [max(moments[i : i + width], key=lambda m: m.total) for i in range(0, len(moments), width)]


def _plot(step: Step) -> Markup:
    """The plot of a step."""
    moments = _binned(step.moments)
    top = max(max(m.total for m in moments), step.limit or 0, step.peak or 0) or 1
    # A limit far above what is used would press the drawing flat; then the limit is told in words alone.
    used = max(max(m.total for m in moments), step.peak or 0) or 1
    fits = step.limit is not None and step.limit <= 2.5 * used
    ticks = size_ticks(top if fits else used)
    full = ticks[-1]

    def y(value: float) -> float:
        return TOP + HEIGHT * (1 - value / full)

    labels = [write("100%", y(tick) + 4, clean_size(tick), "", "end") for tick in ticks]
    shapes: list[Child] = [line(0, 1, y(tick), y(tick), "grid") for tick in ticks]
    width = 1 / len(moments)
    drawn = width * (0.86 if len(moments) <= 80 else 1.02)
    for i, m in enumerate(moments):
        edges = [0, m.alive, m.alive + m.result, m.total]
        title = f"{short(m.layer)} {m.pass_}: alive {format_bytes(m.alive)}, result {format_bytes(m.result)}, "
        title += f"workspace {format_bytes(m.workspace)}, in all {format_bytes(m.total)}"
        bars = [
            rect(i * width, drawn, y(high), HEIGHT * (high - low) / full, kind)
            for low, high, kind in zip(edges[:-1], edges[1:], ("al", "rs", "ws"), strict=True)
            if high > low
        ]
        shapes.append(tag("g", tag("title", title), bars))
    if fits and step.limit is not None:
        shapes.append(line(0, 1, y(step.limit), y(step.limit), "limit"))
        shapes.append(write("4", y(step.limit) - 5, f"limit {format_bytes(step.limit)}", "halo strong"))
    i = max(range(len(moments)), key=lambda i: moments[i].total)
    high = moments[i]
    shapes.append(write(f"{100 * (i + 0.5) / len(moments):.5g}%", y(high.total) - 3, "▼", "halo", "middle"))
    shapes.append(line(0, 1, TOP + HEIGHT, TOP + HEIGHT, "axis"))
    text = f"{short(high.layer)} {high.pass_}, {format_bytes(high.total)}"
    picture = svg(
        f"Memory over {count(len(step.moments), 'kernel')} of a step; most in {text}",
        shapes,
        height=int(TOP + HEIGHT + 2),
    )
    axis = Markup(f'<svg width="100%" height="{TOP + HEIGHT + 2:.0f}" aria-hidden="true">{"".join(labels)}</svg>')
    ends = tag(
        "span",
        *(tag("span", f"{short(m.layer, 24)} {m.pass_}") for m in (step.moments[0], step.moments[-1])),
        class_="ends",
    )
    beyond = step.limit is not None and not fits
    return tag(
        "figure",
        tag("div", axis, tag("div", picture, ends), class_="step"),
        tag(
            "figcaption",
            "▼ most: ",
            text,
            f"; the limit, {format_bytes(step.limit or 0)}, is above the drawing" if beyond else "",
        ),
        class_="wide",
    )


def _moments_table(step: Step) -> Markup:
    """The moments as a table."""
    rows = []
    for m in step.moments[:5000]:
        left = NOTHING if step.limit is None else size(step.limit - m.total) if step.limit >= m.total else "over"
        rows.append([short(m.layer), m.pass_, *map(format_bytes, (m.alive, m.result, m.workspace, m.total)), left])
    columns = ("layer", "pass", "#alive", "#result", "#workspace", "#in all", "#left")
    return table("Memory while each kernel runs, in the order they ran", columns, rows)
