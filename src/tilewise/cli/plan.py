"""``tilewise plan``: the fastest plan of every layer and pass."""

from __future__ import annotations

import click

from tilewise.cli.program import NO_PLAN
from tilewise.cli.settings import PASSES, Settings, budget_options, planning_options

__all__ = ["command"]


@click.command("plan")
@click.argument("target", metavar="NET|LAYER")
@click.option("--pass", "passes", type=click.Choice(PASSES), multiple=True, help="Only this pass; may be repeated.")
@planning_options
@budget_options
@click.option("--json", "as_json", is_flag=True, help="Print a document (schema tilewise/plan) instead of tables.")
@click.pass_context
def command(
    ctx: click.Context,
    target: str,
    passes: tuple[str, ...],
    settings: Settings,
    total_workspace: str | None,
    policy: str | None,
    as_json: bool,
) -> None:
    """Find and print a plan for every layer and pass of NET or LAYER.

    Plans are remembered: what was measured once, here or in a program, is not measured again. Exits with 1 where some
    layer-pass has no plan within the limit, with the reasons, and where nothing keeps the total.
    """
    from tilewise.cli.planning import divide_target, head, plan_target
    from tilewise.cli.target import resolve
    from tilewise.planner import Planner
    from tilewise.report.console import show, show_json
    from tilewise.report.documents import plan_document
    from tilewise.report.tables import budget_table, heading, plan_table, summary_text
    from tilewise.report.values import summarize

    options = settings.options()
    budget = settings.budget(total_workspace, policy)
    resolved, planner = resolve(target, settings, passes), Planner()
    divided = divide_target(resolved, options, planner, budget)
    results = plan_target(resolved, options, planner, divided.limits)
    top, summary = head(resolved, settings, options), summarize(results)
    if as_json:
        show_json(plan_document(top, results, summary, divided.facts["budget"]))
    else:
        show(heading(top), plan_table(results), "", summary_text(summary))
        if divided.facts["budget"] is not None:
            show("", budget_table(divided.facts["budget"]))
    if summary.unplanned:
        ctx.exit(NO_PLAN)
