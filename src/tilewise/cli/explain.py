"""``tilewise explain``: everything tried for one layer and pass, or one product, and why each lost."""

from __future__ import annotations

import click

from tilewise.cli.program import NO_PLAN, BadInput, bad_input
from tilewise.cli.settings import OPS, PASSES, Asked, planning_options

__all__ = ["command"]


@click.command("explain")
@click.argument("layer", metavar="LAYER|PRODUCT")
@click.option(
    "--pass",
    "pass_",
    type=click.Choice((*PASSES, *OPS)),
    help="Which pass, or how a product's operands are stored.  [default: fprop; nn]",
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
    """List every solver and config for one pass of LAYER, or for PRODUCT.

    Each has its estimate, time, workspace and error, or the reason why it could not.

    Exits with 1 where nothing keeps the limit.
    """
    from tilewise.cli.planning import explain_target, head
    from tilewise.cli.target import layer_target, product_target
    from tilewise.planner import Planner
    from tilewise.planner.options import names_to_measure
    from tilewise.problems.conv.notation import looks_like_layer
    from tilewise.problems.gemm.notation import looks_like_product
    from tilewise.report.console import show, show_json
    from tilewise.report.documents import explain_document
    from tilewise.report.tables import explain_table, heading, plan_table

    is_product = looks_like_product(layer)
    if not is_product and not looks_like_layer(layer):
        example = "text such as mb256ic64ih27oc192oh27kh5ph2, or 16x512:512x1024 for a product, would do"
        raise BadInput(f"LAYER: {layer!r} is not a layer; {example}")
    options = settings.options()
    with bad_input():
        names = names_to_measure(solvers, options, "--solver")
    if is_product:
        target = product_target(layer, settings, (pass_ or OPS[0],))
    else:
        target = layer_target(layer, settings, (pass_ or PASSES[0],))
    result, tried = explain_target(target, options, Planner(), names)
    top, first_pass = head(target, settings, options), result.passes[0]
    if as_json:
        show_json(explain_document(top, first_pass, tried))
    else:
        show(heading(top), plan_table([result]), "", explain_table(tried, first_pass.problem.device))
    if first_pass.plan is None:
        ctx.exit(NO_PLAN)
