"""How values read on the page; times, sizes and plans as in the tables of the command line."""

from __future__ import annotations

import math

from tilewise.plan import Error, Plan, format_bytes
from tilewise.report.page.contents import Part
from tilewise.report.page.html import Markup, escaped, tag
from tilewise.report.tables import LEFT, NOTHING, format_ms, format_ratio, plan_name
from tilewise.report.values import BASELINE

__all__ = [
    "LEFT", "NOTHING", "anchor", "breakable", "clean_size", "count", "distance", "format_ms", "format_ratio",
    "milliseconds", "name_of", "numbers", "plan_text", "rate", "root_text", "short", "size",
]  # fmt: skip


def milliseconds(value: float | None) -> str:
    """A time with its unit."""
    return NOTHING if value is None or not math.isfinite(value) else f"{format_ms(value)} ms"


def size(value: int | None) -> str:
    """Bytes with their unit."""
    return NOTHING if value is None else format_bytes(value)


def clean_size(value: int) -> str:
    """A round number of bytes, for an axis: ``64 MiB`` where a table has ``64.0 MiB``."""
    return format_bytes(value).replace(".0 ", " ")


def count(number: int, one: str, many: str = "") -> str:
    """``1 plan``, ``2 plans``."""
    return f"{number:,} {one if number == 1 else many or one + 's'}"


def distance(error: Error | None, which: str = "l2") -> str:
    """A relative error: ``2e-07``."""
    value = math.nan if error is None else getattr(error, which)
    return NOTHING if not math.isfinite(value) else f"{value:.0e}"


def rate(flops: int | None, time_ms: float | None) -> str:
    """Floating-point operations of the direct method per second."""
    if not flops or not time_ms:
        return NOTHING
    value = flops / time_ms / 1e6
    return f"{value / 1000:.3g} TFLOP/s" if value >= 1000 else f"{value:.3g} GFLOP/s"


def short(text: str, most: int = 60) -> str:
    """``text``, its end left out where it is long."""
    return text if len(text) <= most else text[: most - 1] + "…"


def breakable(name: str) -> Markup:
    """A layer's name, that may go on in the next line after a dot."""
    return Markup(escaped(short(name, 48)).replace(".", ".<wbr>"))


def plan_text(plan: Plan) -> str:
    """A plan's first line; one of hundreds of sizes is not shown in full."""
    return short(plan_name(plan), 160)


def root_text(part: Part) -> str:
    """What runs for a pass, in a line."""
    if part.plan is None:
        return "no plan"
    return LEFT if part.plan.solver == BASELINE else plan_text(part.plan)


def name_of(part: Part) -> str:
    """Layer and pass."""
    return f"{short(part.title)} {part.pass_}"


def anchor(part: Part, text: str = "") -> Markup:
    """A link to the row of a pass."""
    return tag("a", text or name_of(part), href=f"#pass-{part.number}")


def numbers(picture: Markup) -> Markup:
    """A table behind a button of its own, for those who want the numbers of a picture."""
    return tag("details", tag("summary", "Numbers as a table"), picture, class_="numbers")
