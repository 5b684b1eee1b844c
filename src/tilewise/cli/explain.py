"""``tilewise explain``: everything tried for one pass of a layer of any kind, and why each lost."""

from __future__ import annotations

import re

import click

from tilewise.cli.given.early import check_asked, check_solvers, check_target, kind_of_text
from tilewise.cli.helped import Helped
from tilewise.cli.program import NO_PLAN, BadInput, bad_input
from tilewise.cli.settings import BATCH_OF_LAYER, OPS, PASSES, ROLES, TASKS, Asked, planning_options
from tilewise.frontends.names import BUILTIN, LIBRARIES, is_factory

__all__ = ["command"]

MODULE = re.compile(r"[A-Za-z_]\w*(\.\w+)*|\d+(\.\w+)+")
"""Names that modules in models have: conv1, d1.dw, layer1.0.conv2, 0.1."""

EXAMPLES = (
    (
        "tilewise explain mb32ic64ih28oc64kh3ph1 --pass wgrad",
        "What computes a layer's filter gradient, and why.",
    ),
    ("tilewise explain 64x512:512x1024 --solver gemm --verbose", "Try every config of one solver on a product."),
)


@click.command("explain", cls=Helped, examples=EXAMPLES, short_help="Say what computes a layer, and why not another.")
@click.argument("layer", metavar="LAYER|PRODUCT|RNN")
@click.option(
    "--pass",
    "pass_",
    type=click.Choice((*PASSES, *ROLES, *OPS, *TASKS)),
    help="Which pass, in torch's words too, or how a product's operands are stored.  [default: fprop; nn; inference]",
)
@planning_options(batch=BATCH_OF_LAYER)
@click.option(
    "--solver",
    "solvers",
    multiple=True,
    metavar="SOLVER",
    help="Measure and check every config of this solver, whatever its estimate; may be repeated.",
)
@click.option("--verbose", is_flag=True, help="A row for each candidate that was lost, and configs as they are kept.")
@click.option("--json", "as_json", is_flag=True, help="Print a document (schema tilewise/explain) instead of tables.")
@click.pass_context
def command(
    ctx: click.Context,
    layer: str,
    pass_: str | None,
    settings: Asked,
    solvers: tuple[str, ...],
    verbose: bool,
    as_json: bool,
) -> None:
    """Say what computes one pass of LAYER, which may be a layer of any kind, and why nothing else does.

    A sentence that answers stands first. Below it are all candidates: what was expected of each, its time and how far
    single runs spread, its workspace and error, and the reason why it was not chosen.

    Exits with 1 where nothing keeps the limit.
    """
    if not kind_of_text(layer):
        raise BadInput(f"LAYER: {layer!r} {_in_place_of_a_layer(layer)}")
    check_asked(settings)
    check_solvers("--solver", solvers)
    check_target(layer, settings, () if pass_ is None else (pass_,))

    from tilewise.cli.planning import explain_target, head
    from tilewise.cli.target import text_target
    from tilewise.planner import Planner
    from tilewise.planner.options import names_to_measure
    from tilewise.report.console import show, show_json
    from tilewise.report.documents import explain_document
    from tilewise.report.explained import Explained, answer, explain_table
    from tilewise.report.shares import measured_shares, shares_table
    from tilewise.report.tables import heading, plan_table

    found = text_target(layer)
    assert found is not None  # as its kind is known
    options = settings.options()
    with bad_input():
        names = names_to_measure(solvers, options, "--solver")
    make, first = found
    target = make(layer, settings, (pass_ or first,))
    result, tried = explain_target(target, options, Planner(), names)
    top, first_pass = head(target, settings, options), result.passes[0]
    explained = Explained(first_pass, tried, options.rigor)
    if as_json:
        show_json(explain_document(top, explained))
    else:
        show(answer(explained), "", heading(top))
        if first_pass.plan is not None and not first_pass.plan.leaf:
            show(plan_table([result]), "")
        show(explain_table(explained, verbose=verbose))
        if shares := measured_shares(tried):
            show("", shares_table(shares))
    if first_pass.plan is None:
        ctx.exit(NO_PLAN)


def _in_place_of_a_layer(text: str) -> str:
    """What was given in place of a layer's text, and what would do."""
    if text in BUILTIN or is_factory(text) or text.startswith(tuple(f"{name}:" for name in LIBRARIES)):
        return f"is a network, and one layer is explained; 'tilewise plan {text}' lists its layers as such texts"
    texts = (
        "is not a layer; text such as mb256ic64ih27oc192oh27kh5ph2, 16x512:512x1024 for a product, "
        "lstm:t99n16i64h64 for a recurrent layer, max_pool:n16c64i112x112k3x3s2x2 for a pooling or "
        "lrn:n64c96s55x55k5 for a normalization would do"
    )
    if MODULE.fullmatch(text) is None:
        return texts
    return f"{texts}; for a module of your model, tilewise.summary(model).explain_commands({text!r}) gives the commands"
