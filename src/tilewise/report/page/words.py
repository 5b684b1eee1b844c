"""Values as the page shows them. Times, sizes and plans read as in the tables of the command line."""

from __future__ import annotations

import math

from tilewise.plan import Error, Plan, format_bytes
from tilewise.report.page.contents import Part
from tilewise.report.page.html import Markup, escaped, tag
from tilewise.report.tables import LEFT, NOTHING, format_ms, format_ratio, plan_name
from tilewise.report.values import is_left

__all__ = [
    "LEFT", "NOTHING", "anchor", "breakable", "clean_size", "count", "distance", "format_ms", "format_ratio",
    "milliseconds", "name_of", "numbers", "plan_text", "rate", "root_text", "short", "size",
]  # fmt: skip


def milliseconds(value: float | None) -> str:
    """A time with its unit; ``-`` where unknown."""
    return NOTHING if value is None or not math.isfinite(value) else f"{format_ms(value)} ms"


def size(value: int | None) -> str:
    """Bytes with their unit; ``-`` where unknown."""
    return NOTHING if value is None else format_bytes(value)


def clean_size(value: int) -> str:
    """A round number of bytes, for an axis: ``64 MiB`` where a table has ``64.0 MiB``."""
    return format_bytes(value).replace(".0 ", " ")


def count(number: int, singular: str, plural: str = "") -> str:
    """A number of things, such as ``1 plan`` or ``2 plans``."""
    return f"{number:,} {singular if number == 1 else plural or singular + 's'}"


def distance(error: Error | None, which: str = "l2") -> str:
    """A relative error, such as ``2e-07``; ``which`` is ``l2`` or ``spread``."""
    value = math.nan if error is None else getattr(error, which)
    return NOTHING if not math.isfinite(value) else f"{value:.0e}"


def rate(flops: int | None, time_ms: float | None) -> str:
    """Floating-point operations of the direct method per second, as text."""
    if not flops or not time_ms:
        return NOTHING
    value = flops / time_ms / 1e6
    return f"{value / 1000:.3g} TFLOP/s" if value >= 1000 else f"{value:.3g} GFLOP/s"


def short(text: str, most: int = 60) -> str:
    """``text``, cut off after ``most`` characters."""
    return text if len(text) <= most else text[: most - 1] + "…"


def breakable(name: str) -> Markup:
    """A layer's name, where lines may break after a dot."""
    return Markup(escaped(short(name, 48)).replace(".", ".<wbr>"))


def plan_text(plan: Plan) -> str:
    """A plan in one line, shortened where it has hundreds of sizes."""
    return short(plan_name(plan), 160)


def root_text(part: Part) -> str:
    """What runs for a pass, in one line."""
    if part.plan is None:
        return "no plan"
    return LEFT if is_left(part.plan) else plan_text(part.plan)


def name_of(part: Part) -> str:
    """A pass's layer and name."""
    return f"{short(part.title)} {part.pass_}"


def anchor(part: Part, text: str = "") -> Markup:
    """A link to the row of a pass."""
    return tag("a", text or name_of(part), href=f"#pass-{part.number}")


def numbers(picture: Markup) -> Markup:
    """The numbers of a picture as a table, behind a button."""
    return tag("details", tag("summary", "Numbers as a table"), picture, class_="numbers")
