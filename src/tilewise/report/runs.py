"""Runs of plans, one after the other: the least and the median of their times, as benchmarks print them."""

from __future__ import annotations

import math
from collections.abc import Iterable

from rich.markup import escape

from tilewise.plan import format_bytes
from tilewise.report.sheet import Sheet
from tilewise.report.tables import layer_line, no_plan
from tilewise.report.values import LayerResult, is_left
from tilewise.report.words import LEFT, NOTHING, format_ms, plan_words

__all__ = ["runs_table", "runs_text"]


def runs_table(results: Iterable[LayerResult]) -> Sheet:
    """A row for each pass of each layer: the least and the median of its runs, its workspace, error and plan."""
    table = Sheet(
        (("pass", ""), ("min ms", "right"), ("median ms", "right"), ("workspace", "right"), ("error", "right"),
         ("plan", "text"))
    )  # fmt: skip
    for index, result in enumerate(results):
        if index:
            table.add_line()
        table.add_line(layer_line(result.layer))
        for each in result.passes:
            if each.plan is None:
                table.add_row(each.problem.task, *[NOTHING] * 4, no_plan(each))
                continue
            least, middle = (None, None) if each.runs is None else (each.runs.least_ms, each.runs.median_ms)
            error = NOTHING if each.plan.error is None else f"{each.plan.error.l2:.0e}"
            name = LEFT if is_left(each.plan) else plan_words(each.plan)
            cells = (format_ms(least), format_ms(middle), format_bytes(each.plan.workspace), error)
            table.add_row(each.problem.task, *cells, escape(name))
    return table


def runs_text(results: Iterable[LayerResult]) -> str:
    """The sums of all passes in one line, each layer as often as it occurs."""
    occurring = [each.runs for result in results for _ in result.layer.names for each in result.passes]
    timed = [runs for runs in occurring if runs is not None]
    if not timed:
        return "nothing was timed"
    least, middle = math.fsum(runs.least_ms for runs in timed), math.fsum(runs.median_ms for runs in timed)
    fewest, most = min(runs.count for runs in timed), max(runs.count for runs in timed)
    times = f"{fewest}" if fewest == most else f"{fewest} to {most}"
    return f"all together: min {format_ms(least)} ms, median {format_ms(middle)} ms, of {times} runs each"
