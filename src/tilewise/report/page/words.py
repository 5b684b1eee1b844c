"""Values as the page shows them. Times, sizes and plans read as in the tables of the command line."""

from __future__ import annotations

import math

from tilewise.plan import Error, Plan, format_bytes
from tilewise.report.page.contents import Part
from tilewise.report.page.html import Markup, tag
from tilewise.report.words import BUSY, LEFT, NOTHING, format_ms, format_ratio, plan_name

__all__ = [
    "BUSY", "DIFFERENT", "LEFT", "NAME", "NOTHING", "anchor", "clean_size", "count", "distance", "format_ms",
    "format_ratio", "middle", "milliseconds", "name_of", "numbers", "plan_text", "rate", "rate_text", "root_text",
    "short", "shown_name", "size", "varies",
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
    return NOTHING if not flops or not time_ms else rate_text(flops / time_ms / 1e6)


def rate_text(gflops: float) -> str:
    """A rate in GFLOP/s as text, with the unit that fits."""
    units = ("GFLOP/s", "TFLOP/s", "PFLOP/s")
    power = 0 if gflops < 1000 else 1 if gflops < 1e6 else 2
    return f"{gflops / 1000**power:.3g} {units[power]}"


def short(text: str, most: int = 60) -> str:
    """``text``, cut off after ``most`` characters."""
    return text if len(text) <= most else text[: most - 1] + "…"


def middle(name: str, most: int) -> str:
    """A name of at most ``most`` characters: its beginning and its end, which names of one network differ in."""
    if len(name) <= most:
        return name
    end = max(1, (most - 1) * 2 // 3)
    return f"{name[: max(0, most - 1 - end)]}…{name[-end:]}"


DIFFERENT = ("different layer-pass", "different layer-passes")
"""Passes where equal layers count once, in words; as layer-passes each of them counts."""
NAME = 30
"""Most characters of a layer's name in a row; a longer one is whole inside of it."""


def shown_name(name: str, most: int = NAME) -> Markup:
    """A layer's name, which never breaks and keeps its direction to itself; one that is shortened is whole on hover."""
    cut = middle(name, most)
    return tag("bdi", cut, class_="name", title=short(name, 400) if cut != name else None)


def plan_text(plan: Plan) -> str:
    """A plan in one line, shortened where it has hundreds of sizes."""
    return short(plan_name(plan), 160)


def root_text(part: Part) -> str:
    """What runs for a pass, in one line."""
    if part.plan is None:
        return "no plan"
    return plan_text(part.plan) if part.replaced else LEFT


def name_of(part: Part) -> str:
    """A pass's layer and name."""
    return f"{middle(part.title, 60)} {part.pass_}"


def anchor(part: Part) -> Markup:
    """A link to the row of a pass."""
    return tag("a", shown_name(part.title), " ", part.pass_, href=f"#pass-{part.number}")


def varies(part: Part) -> str:
    """How far single runs of a pass's plan lie apart, in words; empty where the document does not say."""
    return "" if part.spread is None else f"varies {part.spread:.0%}"


def numbers(picture: Markup) -> Markup:
    """The numbers of a picture as a table, behind a button."""
    return tag("details", tag("summary", "Numbers as a table"), picture, class_="numbers")
