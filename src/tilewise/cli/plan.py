"""``tilewise plan``: the fastest plan of every layer and pass."""

from __future__ import annotations

import click

from tilewise.cli.program import NO_PLAN
from tilewise.cli.settings import PASSES, Settings, devices_option, make_planner, planning_options

__all__ = ["command"]


@click.command("plan")
@click.argument("target", metavar="NET|LAYER")
@click.option("--pass", "passes", type=click.Choice(PASSES), multiple=True, help="Only this pass; may be repeated.")
@planning_options
@devices_option
@click.option("--json", "as_json", is_flag=True, help="Print a document (schema tilewise/plan) instead of tables.")
@click.pass_context
def command(
    ctx: click.Context, target: str, passes: tuple[str, ...], settings: Settings, devices: str | None, as_json: bool
) -> None:
    """Find and print a plan for every layer and pass of NET or LAYER.

    Plans are remembered: what was measured once, here or in a program, is not measured again. Exits with 1 where some
    layer-pass has no plan within the limit, with the reasons.
    """
    from tilewise.cli.planning import head, plan_target
    from tilewise.cli.target import resolve
    from tilewise.report.console import show, show_json
    from tilewise.report.documents import plan_document
    from tilewise.report.tables import heading, plan_table, summary_text
    from tilewise.report.values import summarize

    options = settings.options()
    resolved = resolve(target, settings, passes)
    results = plan_target(resolved, options, make_planner(devices, resolved.device))
    top, summary = head(resolved, settings, options), summarize(results)
    if as_json:
        show_json(plan_document(top, results, summary))
    else:
        show(heading(top), plan_table(results), "", summary_text(summary))
    if summary.unplanned:
        ctx.exit(NO_PLAN)
