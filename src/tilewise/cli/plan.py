"""``tilewise plan``: the fastest plan of every layer and pass."""

from __future__ import annotations

from dataclasses import replace

import click

from tilewise.cli.program import NO_PLAN, BadInput
from tilewise.cli.settings import PASSES, Settings, planning_options

__all__ = ["command"]


@click.command("plan")
@click.argument("target", metavar="NET|LAYER")
@click.option("--pass", "passes", type=click.Choice(PASSES), multiple=True, help="Only this pass; may be repeated.")
@click.option(
    "--memory-limit",
    metavar="SIZE",
    help="Limit of a whole training step of NET on its device, such as 16GiB or 80%.  [default: none]",
)
@click.option("--max-batch", is_flag=True, help="Find the largest mini-batch that keeps --memory-limit, and plan that.")
@planning_options
@click.option("--json", "as_json", is_flag=True, help="Print a document (schema tilewise/plan) instead of tables.")
@click.pass_context
def command(
    ctx: click.Context,
    target: str,
    passes: tuple[str, ...],
    memory_limit: str | None,
    max_batch: bool,
    settings: Settings,
    as_json: bool,
) -> None:
    """Find and print a plan for every layer and pass of NET or LAYER.

    Plans are remembered: what was measured once, here or in a program, is not measured again. With --memory-limit a
    training step is run (forward, a loss and backward, without an optimizer), each kernel may use what is left at its
    moment, and the step's peak is measured. Exits with 1 where some layer-pass has no plan within the limit, with the
    reasons, or where no schedule keeps the step's.
    """
    from tilewise.cli.planning import head, plan_target
    from tilewise.cli.target import resolve
    from tilewise.cli.whole_step import Found, plan_step
    from tilewise.planner import Planner
    from tilewise.report.console import show, show_json
    from tilewise.report.documents import plan_document
    from tilewise.report.tables import heading, memory_text, plan_table, summary_text
    from tilewise.report.values import summarize

    if max_batch and memory_limit is None:
        raise BadInput("--max-batch: of which limit? --memory-limit 16GiB would do")
    options = settings.options()
    if memory_limit is None:
        resolved = resolve(target, settings, passes)
        found = Found(resolved, plan_target(resolved, options, Planner()))
    elif max_batch:  # inputs of another batch are not to count
        resolved = replace(resolve(target, settings, passes), inputs=None)
        found = plan_step(resolved, options, Planner(), memory_limit, passes)
    else:
        resolved = resolve(target, settings, passes)
        found = plan_step(resolved, options, Planner(), memory_limit, None)
    top, summary = head(found.target, settings, options), summarize(found.results)
    if as_json:
        show_json(plan_document(top, found.results, summary, found.step, found.largest))
    else:
        show(heading(top), plan_table(found.results), "", summary_text(summary))
        if found.step is not None:
            show("", memory_text(found.step, found.largest))
    if summary.unplanned:
        ctx.exit(NO_PLAN)
