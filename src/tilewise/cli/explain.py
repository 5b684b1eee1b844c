"""``tilewise explain``: everything tried for one pass of a layer of any kind, and why each lost."""

from __future__ import annotations

import click

from tilewise.cli.program import NO_PLAN, BadInput, bad_input
from tilewise.cli.settings import OPS, PASSES, TASKS, Asked, planning_options

__all__ = ["command"]


@click.command("explain")
@click.argument("layer", metavar="LAYER|PRODUCT|RNN")
@click.option(
    "--pass",
    "pass_",
    type=click.Choice((*PASSES, *OPS, *TASKS)),
    help="Which pass, or how a product's operands are stored.  [default: fprop; nn; inference]",
)
@planning_options
@click.option(
    "--solver",
    "solvers",
    multiple=True,
    metavar="SOLVER",
    help="Measure and check every config of this solver, whatever its estimate; may be repeated.",
)
@click.option("--json", "as_json", is_flag=True, help="Print a document (schema tilewise/explain) instead of tables.")
@click.pass_context
def command(
    ctx: click.Context, layer: str, pass_: str | None, settings: Asked, solvers: tuple[str, ...], as_json: bool
) -> None:
    """List every solver and config for one pass of LAYER, which may be a layer of any kind, or for PRODUCT.

    Each has its estimate, time, workspace and error, or the reason why it could not.

    Exits with 1 where nothing keeps the limit.
    """
    from tilewise.cli.planning import explain_target, head
    from tilewise.cli.target import text_target
    from tilewise.planner import Planner
    from tilewise.planner.options import names_to_measure
    from tilewise.report.console import show, show_json
    from tilewise.report.documents import explain_document
    from tilewise.report.shares import measured_shares, shares_table
    from tilewise.report.tables import explain_table, heading, plan_table

    found = text_target(layer)
    if found is None:
        example = (
            "text such as mb256ic64ih27oc192oh27kh5ph2, 16x512:512x1024 for a product, lstm:t99n16i64h64 for a "
            "recurrent layer, max_pool:n16c64i112x112k3x3s2x2 for a pooling or lrn:n64c96s55x55k5 for a normalization "
            "would do"
        )
        raise BadInput(f"LAYER: {layer!r} is not a layer; {example}")
    options = settings.options()
    with bad_input():
        names = names_to_measure(solvers, options, "--solver")
    make, first = found
    target = make(layer, settings, (pass_ or first,))
    result, tried = explain_target(target, options, Planner(), names)
    top, first_pass = head(target, settings, options), result.passes[0]
    if as_json:
        show_json(explain_document(top, first_pass, tried))
    else:
        show(heading(top), plan_table([result]), "", explain_table(tried, first_pass.problem.device))
        if shares := measured_shares(tried):
            show("", shares_table(shares))
    if first_pass.plan is None:
        ctx.exit(NO_PLAN)
