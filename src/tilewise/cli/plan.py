"""``tilewise plan``: the fastest plan of every layer and pass."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from tilewise.cli.program import NO_PLAN, BadInput
from tilewise.cli.settings import PASSES, Settings, planning_options

if TYPE_CHECKING:
    from tilewise.planner import Schedule

__all__ = ["command"]


@click.command("plan")
@click.argument("target", metavar="NET|LAYER")
@click.option("--pass", "passes", type=click.Choice(PASSES), multiple=True, help="Only this pass; may be repeated.")
@planning_options
@click.option("--json", "as_json", is_flag=True, help="Print a document (schema tilewise/plan) instead of tables.")
@click.option(
    "-o", "--output", type=click.Path(dir_okay=False, writable=True), metavar="FILE", help="Write the document to FILE."
)
@click.option("--candidates", is_flag=True, help="In the document, what was tried and why it lost.")
@click.option("--fronts", is_flag=True, help="In the document, the front of time and workspace; measures more.")
@click.pass_context
def command(
    ctx: click.Context,
    target: str,
    passes: tuple[str, ...],
    settings: Settings,
    as_json: bool,
    output: str | None,
    candidates: bool,
    fronts: bool,
) -> None:
    """Find and print a plan for every layer and pass of NET or LAYER.

    Plans are remembered: what was measured once, here or in a program, is not measured again. Exits with 1 where some
    layer-pass has no plan within the limit, with the reasons. What -o writes is a schedule, which `tilewise.optimize`
    and `tilewise time --schedule` run by.
    """
    from tilewise.cli.planning import head, plan_target, schedule_of
    from tilewise.cli.target import resolve
    from tilewise.planner import Planner
    from tilewise.report.console import show, show_json
    from tilewise.report.tables import heading, plan_table, summary_text
    from tilewise.report.values import summarize

    if output is not None and not Path(output).absolute().parent.is_dir():
        raise BadInput(f"-o: {output!r} lies in no folder that there is")
    options = settings.options()
    resolved = resolve(target, settings, passes)
    planner = Planner()
    results = plan_target(resolved, options, planner)
    summary = summarize(results)
    if as_json or output is not None:
        schedule = schedule_of(resolved, settings, options, results, planner, fronts=fronts, candidates=candidates)
        if output is not None:
            save(schedule, output)
        if as_json:
            show_json(schedule.to_json())
    if not as_json:
        show(heading(head(resolved, settings, options)), plan_table(results), "", summary_text(summary))
    if summary.unplanned:
        ctx.exit(NO_PLAN)


def save(schedule: Schedule, path: str) -> None:
    """Write ``schedule``. Raises :class:`BadInput`."""
    try:
        schedule.save(path)
    except OSError as error:
        raise BadInput(f"-o: {path!r} cannot be written: {error.strerror}") from error
