"""Tables for people, built from plain values."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

from rich.markup import escape

from tilewise.nn.step.result import StepReport
from tilewise.plan import Plan, format_bytes
from tilewise.problems.base import Problem
from tilewise.report.sheet import Sheet
from tilewise.report.values import Layer, LayerResult, NetworkTime, PassResult, Summary, describe, is_left
from tilewise.report.words import BUSY, LEFT, NOTHING, format_ms, format_ratio, marked, plan_words, walk

__all__ = [
    "budget_table",
    "compared_text",
    "front_table",
    "heading",
    "launches",
    "layer_line",
    "light_table",
    "memory_text",
    "no_plan",
    "plan_table",
    "step_table",
    "summary_text",
    "time_table",
]

LARGEST = 10
"""Segments of a budget that are listed."""
MOST_REASONS = 5
"""Reasons that are shown in a table where nothing computes a pass; there is one for each candidate, some thirty."""
TAKEN_BACK = "taken back: the step is not faster with it"
"""Mark of a plan that is faster by itself, and that the network does not run by."""
OFF = "runs, and is off the front: that was timed at another moment"
"""Mark of a plan that runs and is no point of its front."""
HOST = {False: (), True: (("host ms", "right"),)}
"""The column of the host's times, by whether it is shown: a CPU has none."""


def light_table(*columns: tuple[str, str], title: str = "") -> Sheet:
    """An empty table; ``columns`` are those of a :class:`Sheet`."""
    return Sheet(columns, escape(title))


def heading(head: Mapping[str, Any]) -> str:
    """What was planned, where, and under which constraints, in one line; ``head`` is that of a document."""
    options = head["options"]
    limit = "no workspace limit" if options["workspace"] is None else f"{format_bytes(options['workspace'])} a kernel"
    words = [head["target"], f"batch {options['batch']}", f"{options['dtype']} ({options['precision']})"]
    words += [options["layout"]] if options["layout"] != "contiguous" else []
    words += [limit, f"batch sizes {options['batch_sizes']}", f"rigor {options['rigor']}", head["device"]]
    return f"[bold]{escape(words[0])}[/]: {escape(', '.join(words[1:]))}\n"


def plan_table(results: Iterable[LayerResult]) -> Sheet:
    """Plans as trees by layer and pass: what runs, its times, workspace and error. CPUs have no time of the host's."""
    results = list(results)
    on_gpu = launches(results)
    table = light_table(
        ("pass", ""), ("plan", "text"), ("ms", "right"), *HOST[on_gpu], ("workspace", "right"), ("error", "right")
    )
    for index, result in enumerate(results):
        if index:
            table.add_line()
        table.add_line(layer_line(result.layer))
        for pass_result in result.passes:
            name = pass_result.problem.task
            if pass_result.plan is None:
                table.add_row(name, no_plan(pass_result), *[""] * (len(table.columns) - 2))
                continue
            for depth, count, plan in walk(pass_result.plan):
                table.add_row("" if depth else name, *_plan_cells(depth, count, plan, on_gpu))
    return table


def layer_line(layer: Layer) -> str:
    """A layer's name and its text, as the line above its passes."""
    return f"[bold]{escape(layer.title)}[/]  [dim]{escape(_layer_text(layer))}[/]"


def _layer_text(layer: Layer) -> str:
    """A layer in benchdnn's notation, or why it is left to torch."""
    if not layer.problems:
        return f"{LEFT}: {layer.left}"
    return describe(layer.problems[0]) + (" (transposed: its forward is dgrad)" if layer.transposed else "")


def no_plan(result: PassResult) -> str:
    """Why there is no plan. The first line is dropped where solvers' reasons follow it; few are shown."""
    first, *reasons = result.reason.splitlines() or [""]
    advice = [line for line in reasons if not line.startswith(" ")]  # candidates are indented
    reasons = [line for line in reasons if line.startswith(" ")]
    lines = reasons[:MOST_REASONS] or ([] if advice else [first])
    if more := len(reasons) - len(lines):
        lines.append(f"and {more} others, which 'tilewise explain' lists")
    return "[red]no plan:[/] " + escape("\n".join(line.strip() for line in (*lines, *advice)))


def launches(results: Iterable[LayerResult]) -> bool:
    """Whether any of ``results`` is of a GPU, where the host's times are shown beside the device's."""
    return any(each.problem.device != "cpu" for result in results for each in result.passes)


def _plan_cells(depth: int, count: int, plan: Plan, on_gpu: bool) -> tuple[str, ...]:
    """Cells of one node of a plan tree; with the host's time ``on_gpu``."""
    name = LEFT if depth == 0 and is_left(plan) else plan_words(plan)
    times = f"{count} x " if count > 1 else ""
    error = NOTHING if plan.error is None else f"{plan.error.l2:.0e}"
    host = (format_ms(plan.host_ms),) if on_gpu else ()
    time = marked(format_ms(plan.time_ms), plan.busy)
    return "  " * depth + times + escape(name), time, *host, format_bytes(plan.workspace), error


def time_table(results: Iterable[LayerResult], taken_back: Collection[Problem] = ()) -> Sheet:
    """Times of the framework and of plans side by side, by layer and pass: the device's and, on a GPU, the host's.

    Problems that were ``taken_back`` for the whole step's sake are marked.
    """
    results = list(results)
    on_gpu = launches(results)
    table = light_table(
        ("pass", ""), ("framework ms", "right"), *HOST[on_gpu], ("planned ms", "right"), *HOST[on_gpu],
        ("speed-up", "right"), ("workspace", "right"), ("plan", "text"),
    )  # fmt: skip
    for index, result in enumerate(results):
        if index:
            table.add_line()
        table.add_line(layer_line(result.layer))
        for pass_result in result.passes:
            *cells, name = _time_cells(pass_result, on_gpu)
            mark = f" [yellow]({TAKEN_BACK})[/]" if pass_result.problem in taken_back else ""
            table.add_row(pass_result.problem.task, *cells, name + mark)
    return table


def front_table(results: Iterable[LayerResult]) -> Sheet:
    """The front of each pass: the plans that no other one beats in both time and workspace, the fastest first.

    The plan that runs is marked. Where it is not on its front, as that was timed at another moment, it stands below.
    """
    table = light_table(
        ("pass", ""), ("ms", "right"), ("workspace", "right"), ("plan", "text"), title="fronts of time and workspace"
    )
    for index, result in enumerate(results):
        if index:
            table.add_line()
        table.add_line(layer_line(result.layer))
        for pass_result in result.passes:
            task, plan, is_there = pass_result.problem.task, pass_result.plan, False
            if not pass_result.front:
                table.add_row(
                    task, NOTHING, NOTHING, "nothing keeps the limit" if plan is None else "no front is known"
                )
            for place, point in enumerate(pass_result.front or ()):
                is_plan = plan is not None and (point.solver, point.config) == (plan.solver, plan.config)
                name = LEFT if is_left(point) else plan_words(point) + _leaf_names(point)
                mark = " [bold](runs)[/]" if is_plan else ""
                is_there = is_there or is_plan
                cells = (format_ms(point.time_ms), format_bytes(point.workspace), escape(name) + mark)
                table.add_row("" if place else task, *cells)
            if pass_result.front and plan is not None and not is_there:
                name = LEFT if is_left(plan) else plan_words(plan) + _leaf_names(plan)
                cells = (format_ms(plan.time_ms), format_bytes(plan.workspace), f"{escape(name)} [bold]({OFF})[/]")
                table.add_row("", *cells)
    return table


def _time_cells(result: PassResult, on_gpu: bool) -> tuple[str, ...]:
    """The table cells with one pass's times, ``on_gpu`` the host's too, their ratio, its workspace and its plan."""
    hosts = [format_ms(result.framework_host_ms), format_ms(result.planned_host_ms)] if on_gpu else []
    framework = (marked(format_ms(result.framework_ms), result.busy), *hosts[:1])
    nothing = [NOTHING] * len(hosts[1:])
    if result.plan is None:
        return *framework, NOTHING, *nothing, NOTHING, NOTHING, no_plan(result)
    workspace = format_bytes(result.plan.workspace)
    if not result.replaced:
        same = ["same"] * len(hosts[1:])
        return *framework, "same", *same, format_ratio(1.0), workspace, f"[dim]{LEFT}[/]"
    name = escape(plan_words(result.plan) + _leaf_names(result.plan))
    planned = (marked(format_ms(result.planned_ms), result.busy), *hosts[1:])
    return *framework, *planned, _coloured(result.ratio), workspace, name


def _leaf_names(plan: Plan) -> str:
    """The solvers that a divided plan uses, in short."""
    if plan.leaf:
        return ""
    names = dict.fromkeys(leaf.solver for leaf in plan.leaves())
    return f": {', '.join(names)}"


def _coloured(ratio: float | None) -> str:
    """A speed-up, green where it is faster and red where it is slower."""
    text = format_ratio(ratio)
    if ratio is None or 0.97 <= ratio < 1.03:
        return text
    return f"[green]{text}[/]" if ratio > 1 else f"[red]{text}[/]"


def summary_text(summary: Summary) -> str:
    """The totals in words."""
    line = f"{summary.replaced} of {summary.passes} layer-passes replaced ({summary.share_replaced:.0%}), "
    line += f"{summary.divided} divided; "
    line += f"[red]{summary.unplanned} without a plan[/]" if summary.unplanned else "the others are left to torch"
    if summary.compared:
        line += (
            f"\nlayers: framework {format_ms(summary.framework_ms)} ms, planned "
            f"{format_ms(summary.planned_ms)} ms; speed-up: geometric mean {format_ratio(summary.geometric_mean)}, "
            f"worst {format_ratio(summary.worst)} (left to torch counts 1.00)"
        )
    if summary.framework_host_ms and summary.planned_host_ms is not None:
        line += (
            f"\nlaunching them takes the host: framework {format_ms(summary.framework_host_ms)} ms, planned "
            f"{format_ms(summary.planned_host_ms)} ms"
        )
    if summary.busy:
        line += (
            f"\n[yellow]{BUSY}: other processes kept the host busy while {summary.busy} of {summary.passes} were "
            "timed; their times are doubtful until they are taken on a quiet host[/]"
        )
    return line


def memory_text(step: Mapping[str, Any], largest: Mapping[str, Any] | None) -> str:
    """A step's limit, peak and least memory, its largest kernel, and the largest batch where that was searched."""
    line = f"step: peak {format_bytes(step['peak'])}, limit {format_bytes(step['limit'])}, needs at least "
    line += format_bytes(step["least"])
    moment = max(step["moments"], key=lambda m: m["alive"] + m["result"] + m["workspace"], default=None)
    if moment is not None:
        parts = ", ".join(f"{format_bytes(moment[name])} {name}" for name in ("alive", "result", "workspace"))
        line += f"\nlargest kernel: {escape(moment['layer'])} {moment['pass']} ({parts})"
    if largest is not None:
        line += f"\nlargest batch: {largest['batch']}, step {format_ms(largest['step_ms'])} ms, "
        line += f"{format_ms(largest['image_ms'])} ms an image"
    return line


def step_table(time: NetworkTime) -> Sheet:
    """Times of whole training steps side by side."""
    table = light_table(
        ("training step", ""), ("forward ms", "right"), ("backward ms", "right"), ("step ms", "right"),
        ("peak memory", "right"), ("loss", "right"),
    )  # fmt: skip
    for name, side in (("framework", time.framework), ("planned", time.planned)):
        peak = NOTHING if side.peak is None else format_bytes(side.peak)
        times = (format_ms(value) for value in (side.forward_ms, side.backward_ms, side.step_ms))
        table.add_row(name, *times, peak, f"{side.loss:.6g}")
    ratios = (
        time.framework.forward_ms / time.planned.forward_ms,
        time.framework.backward_ms / time.planned.backward_ms,
        time.ratio,
    )
    table.add_row("speed-up", *(_coloured(ratio) for ratio in ratios), "", f"medians of {time.iterations}")
    return table


def compared_text(compared: StepReport) -> str:
    """What became of the whole step, in words."""
    return escape(str(compared))


def budget_table(budget: Mapping[str, Any]) -> Sheet:
    """How a workspace budget was divided: its totals and the largest segments."""
    total, used, least = (format_bytes(budget[name]) for name in ("total", "used", "least"))
    program = budget["program"]
    title = (
        f"{used} of {total} of workspace used ({budget['policy']}), at least {least} would do; "
        f"{program['variables']} variables, {program['rows']} rows, {format_ms(program['solve_ms'])} ms"
    )
    table = light_table(
        ("largest segments", "text"), ("pass", ""), ("workspace", "right"), ("ms", "right"), title=title
    )
    segments = sorted(budget["segments"], key=lambda segment: -segment["workspace"])
    for segment in segments[:LARGEST]:
        table.add_row(
            escape(segment["layer"]),
            segment["pass"],
            format_bytes(segment["workspace"]),
            format_ms(segment["time_ms"]),
        )
    if len(segments) > LARGEST:
        table.add_line(f"[dim]and {len(segments) - LARGEST} others[/]")
    return table
