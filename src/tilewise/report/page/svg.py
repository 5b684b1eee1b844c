"""Pieces of SVG.

Widths are percentages, so that drawings stretch with the page while text and hatching keep their size.
"""

from __future__ import annotations

import math

from tilewise.report.page.html import Child, Markup, escaped, join, tag

__all__ = ["KEYS", "key", "line", "log_ticks", "patterns", "percent", "rect", "size_ticks", "svg", "write"]

BOX = '<rect class="{}" x="1" y="1" width="20" height="12"/>'
SWATCHES = {
    "limit": '<path class="{}" d="M0 7h22"/>',
    "least": '<path class="{}" d="M11 0v14"/>',
    "dots": '<path class="{}" d="M11 7h0"/>',
    "chosen": '<path class="{}" d="M11 0l7 7-7 7-7-7z"/>',
    "roof": '<path class="{}" d="M0 7h22"/>',
    "r1": '<circle class="{}" cx="11" cy="7" r="5"/>',
    "r2": '<circle class="{}" cx="11" cy="7" r="5"/>',
    "r3": '<circle class="{}" cx="11" cy="7" r="5"/>',
    "by-torch": '<circle class="{}" cx="11" cy="7" r="3"/>',
    "spread": '<path class="{}" d="M2 7h18M2 3v8M20 3v8"/>',
}
"""The drawing in a legend for classes where it is not a box."""

KEYS = 6
"""How many kinds a drawing tells apart by tint and pattern. Letters tell further ones apart."""


def percent(fraction: float) -> str:
    """A fraction such as 0.125 as ``12.5%``, kept between 0 and 100 %."""
    return f"{100 * min(max(fraction, 0.0), 1.0):.4g}%"


def rect(x: float, width: float, y: float, height: float, kind: str, title: str = "") -> Markup:
    """A rectangle of class ``kind``: ``x`` and ``width`` in shares of the drawing, ``y`` and ``height`` in pixels."""
    left = f' x="{percent(x)}"' if x > 0 else ""
    shape = f'<rect class="{kind}"{left} width="{percent(width)}" y="{y:.5g}" height="{height:.5g}"'
    return Markup(f"{shape}><title>{escaped(title)}</title></rect>" if title else f"{shape}/>")


def line(x1: float, x2: float, y1: float, y2: float, kind: str) -> Markup:
    """A line of class ``kind``: x in shares of the drawing, y in pixels."""
    ends = f'x1="{percent(x1)}" x2="{percent(x2)}" y1="{y1:.5g}" y2="{y2:.5g}"'
    return Markup(f'<line class="{kind}" {ends}/>')


def write(x: str, y: float, text: str, kind: str = "", anchor: str = "") -> Markup:
    """Text at ``x`` (with its unit) and ``y`` in pixels, anchored at its ``start``, ``middle`` or ``end``."""
    return tag("text", text, x=x, y=f"{y:.5g}", class_=kind or None, text_anchor=anchor or None)


def svg(title: str, *children: Child, height: int, kind: str = "", links: bool = False) -> Markup:
    """A drawing as wide as its place. ``title`` says what it shows to those who do not see it.

    One that holds ``links`` is a group: those who do not see it find them in it.
    """
    role = "group" if links else "img"
    attributes = f'role="{role}" width="100%" height="{height}"' + (f' class="{kind}"' if kind else "")
    return Markup(f"<svg {attributes}><title>{escaped(title)}</title>{join(children)}</svg>")


def key(kind: str, text: Child) -> Markup:
    """An entry of a legend: a swatch of class ``kind`` and what it stands for."""
    swatch = (
        f'<svg class="swatch" width="22" height="14" aria-hidden="true">{SWATCHES.get(kind, BOX).format(kind)}</svg>'
    )
    return tag("li", Markup(swatch), text)


def patterns() -> Markup:
    """Hatching patterns for fills, which tell kinds apart without colour. Their colours are in the style sheet."""
    marks = {
        "fw": (6, "M-1 1 1-1M0 6 6 0M5 7 7 5"),
        "ws": (6, "M-1 5 1 7M0 0 6 6M5-1 7 1"),
        "rs": (5, "M1 1.5h1.4M3.5 4h1.4"),
        "down": (6, "M-1 5 1 7M0 0 6 6M5-1 7 1"),
        "k2": (7, "M-1 1 1-1M0 7 7 0M6 8 8 6"),
        "k3": (6, "M1 2h1.6M4 5h1.6"),
        "k4": (6, "M0 3h6"),
        "k5": (7, "M-1 6 1 8M0 0 7 7M6-1 8 1"),
        "k6": (6, "M3 0v6"),
    }
    drawn = [
        f'<pattern id="p-{name}" width="{size}" height="{size}" patternUnits="userSpaceOnUse">'
        f'<rect class="b-{name}" width="{size}" height="{size}"/><path class="m-{name}" d="{path}"/></pattern>'
        for name, (size, path) in marks.items()
    ]
    start = '<svg width="0" height="0" class="defs" aria-hidden="true"><title>patterns</title><defs>'
    return Markup(f"{start}{''.join(drawn)}</defs></svg>")


def size_ticks(greatest: float, most: int = 5) -> list[int]:
    """Bytes from 0 to at least ``greatest`` in at most ``most`` equal, round steps."""
    step = 1
    while step * most < greatest:
        step *= 2
    return [step * i for i in range(math.ceil(greatest / step) + 1)] if greatest > 0 else [0, 1]


def log_ticks(low: float, high: float, most: int = 4) -> list[float]:
    """At most ``most`` round values between ``low`` and ``high`` on a logarithmic axis."""
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for steps in (
        (1.0, 1.2, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0),
        (1.0, 1.5, 2.0, 3.0, 5.0, 7.0),
        (1.0, 2.0, 5.0),
        (1.0, 3.0),
        (1.0,),
    ):
        ticks = [step * 10.0**n for n in decades for step in steps if low <= step * 10.0**n <= high]
        if len(ticks) <= most:
            return ticks
    return ticks[:: math.ceil(len(ticks) / most)]
