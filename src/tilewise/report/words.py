"""Plans, configs and numbers in words, for tables and pages. Needs no torch: what is shown may be read from a file."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

from tilewise.plan import Plan

__all__ = [
    "BUSY",
    "LEFT",
    "NOTHING",
    "config_words",
    "format_ms",
    "format_ratio",
    "marked",
    "plan_name",
    "plan_words",
    "walk",
]

NOTHING = "-"
"""Cell of a value that is not known."""
LEFT = "left to torch"
"""Plan of a layer that the framework runs."""
BUSY = "(busy)"
"""Mark of a time that was taken while other processes kept the host busy."""
WORDS = {"solver": "computed by", "product": "products", "part": "parts by", "gemm": "products by"}
"""Parameters whose names say little by themselves, in words."""
COUNTS = ("lanes", "threads", "vectors", "shares", "splits", "stages", "terms")
"""Parameters that are numbers of things."""
VALUES = {("team", "own"): "own threads", ("team", "openmp"): "OpenMP's threads"}
"""Parameters of few values, by both, in words."""


def format_ms(value: float | None) -> str:
    """Milliseconds with four digits, and no finer than a microsecond; ``-`` where unknown."""
    if value is None or not math.isfinite(value):
        return NOTHING
    decimals = next((n for n, above in ((0, 1000), (1, 100), (2, 10)) if value >= above), 3)
    return f"{value:.{decimals}f}"


def format_ratio(value: float | None) -> str:
    """A speed-up such as ``1.63x``; ``-`` where unknown."""
    return NOTHING if value is None or not math.isfinite(value) else f"{value:.2f}x"


def plan_name(plan: Plan) -> str:
    """A plan in one line: its solver and config, or the parts of a split as ``256 = 3x64 + 64``."""
    return " ".join(word for word in (plan.solver, plan.label or _division(plan) or str(plan.config)) if word)


def plan_words(plan: Plan) -> str:
    """A plan in one line, as :func:`plan_name`, with its config in words."""
    words = plan.label or _division(plan) or config_words(plan.config)
    if not words:
        return plan.solver
    return f"{plan.solver} {words}" if plan.label or not plan.leaf else f"{plan.solver}: {words}"


def config_words(config: Mapping[str, object]) -> str:
    """A config in words, as people read it: ``basis 32x32, products batched`` for ``basis=32x32 product=batched``.

    What is on is named, and what is off has "no" in front of it.
    """
    return ", ".join(_setting(name, value) for name, value in config.items())


def _setting(name: str, value: object) -> str:
    """One parameter of a config in words."""
    if name == "sizes" and isinstance(value, tuple):
        return _runs(value)
    if (known := VALUES.get((name, str(value)))) is not None:
        return known
    words = WORDS.get(name, name.replace("_", " "))
    if name in COUNTS and type(value) is int:
        return f"{value} {words if value != 1 else words.removesuffix('s')}"
    if isinstance(value, bool):
        return words if value else f"no {words}"
    if isinstance(value, tuple):
        value = "x".join(map(str, value))
    return f"{words} {str(value).replace('_', ' ')}".strip()


def _division(plan: Plan) -> str:
    """The sizes of a split's parts as ``256 = 3x64 + 64``; empty for a leaf."""
    sizes = plan.config.get("sizes")
    return "" if plan.leaf or not isinstance(sizes, tuple) else _runs(sizes)


def _runs(sizes: tuple[int, ...]) -> str:
    """Sizes of parts, and their sum, as ``256 = 3x64 + 64``."""
    runs: list[tuple[int, int]] = []
    for size in sizes:
        if runs and runs[-1][0] == size:
            runs[-1] = (size, runs[-1][1] + 1)
        else:
            runs.append((size, 1))
    return f"{sum(sizes)} = " + " + ".join(str(size) if n == 1 else f"{n}x{size}" for size, n in runs)


def walk(plan: Plan, depth: int = 0, count: int = 1) -> Iterator[tuple[int, int, Plan]]:
    """Every node of a plan tree, root first: its depth, how many equal parts it stands for, and the plan."""
    yield depth, count, plan
    for child, times in zip(plan.children, plan.counts, strict=True):
        yield from walk(child, depth + 1, times)


def marked(text: str, busy: bool) -> str:
    """A time as text, with a mark where other processes kept the host ``busy`` while it was taken."""
    return f"{text} {BUSY}" if busy else text
