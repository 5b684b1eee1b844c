"""``tilewise time``: the framework and the plans side by side, by layer and pass and as whole training steps."""

from __future__ import annotations

import click

from tilewise.cli.program import NO_PLAN
from tilewise.cli.settings import PASSES, Settings, budget_options, planning_options

__all__ = ["command"]


@click.command("time")
@click.argument("target", metavar="NET|LAYER")
@click.option("--pass", "passes", type=click.Choice(PASSES), multiple=True, help="Only this pass; may be repeated.")
@click.option(
    "--iterations",
    type=click.IntRange(min=1),
    metavar="N",
    help="Timed runs of each side.  [default: as many as the time taken allows, 5 or more]",
)
@planning_options
@budget_options
@click.option("--json", "as_json", is_flag=True, help="Print a document (schema tilewise/time) instead of tables.")
@click.pass_context
def command(
    ctx: click.Context,
    target: str,
    passes: tuple[str, ...],
    iterations: int | None,
    settings: Settings,
    total_workspace: str | None,
    policy: str | None,
    as_json: bool,
) -> None:
    """Plan NET or LAYER, then time the framework and the plans in turns: every layer and pass, and for a network whole
    training steps (forward, loss and backward) with their peak memory.

    Where torch's own choice won, the layer is left to it and counts 1.00. Exits with 1 where some layer-pass has no
    plan; there, and with --pass, training steps are not timed.
    """
    from tilewise.cli.planning import divide_target, head, plan_target, time_results, time_training
    from tilewise.cli.target import resolve
    from tilewise.planner import Planner
    from tilewise.report.console import show, show_json
    from tilewise.report.documents import time_document
    from tilewise.report.tables import budget_table, heading, step_table, summary_text, time_table
    from tilewise.report.values import summarize

    options = settings.options()
    budget = settings.budget(total_workspace, policy)
    resolved = resolve(target, settings, passes)
    planner = Planner()
    divided = divide_target(resolved, options, planner, budget)
    planned = plan_target(resolved, options, planner, divided.limits)
    results = time_results(resolved, planned, options.deterministic, iterations)
    top, summary = head(resolved, settings, options), summarize(results)
    # Not where only some passes are asked for; nor without all plans, and the table says which and why.
    whole = not passes and not summary.unplanned
    step = time_training(resolved, options, planner, iterations, budget) if whole else None
    if as_json:
        show_json(time_document(top, results, summary, step, divided.facts["budget"]))
    else:
        show(heading(top), time_table(results), "", summary_text(summary))
        if step is not None:
            show("", step_table(step))
        if divided.facts["budget"] is not None:
            show("", budget_table(divided.facts["budget"]))
    if summary.unplanned:
        ctx.exit(NO_PLAN)
