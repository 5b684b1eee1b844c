"""``tilewise time``: the framework and the plans side by side, by layer and pass and as whole training steps."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from tilewise.cli.early import check_asked, check_budget, check_file, check_target
from tilewise.cli.helped import Helped
from tilewise.cli.program import NO_PLAN, BadInput, bad_input
from tilewise.cli.settings import (
    Asked,
    budget_options,
    devices_option,
    make_planner,
    passes_option,
    planning_options,
    shared_option,
)

if TYPE_CHECKING:
    from tilewise.planner import Options, Schedule
    from tilewise.report.values import LayerResult, NetworkTime

__all__ = ["command"]

INPUTS = ("batch", "dtype", "precision", "layout")
OPTIONS = ("workspace", "batch_sizes", "rigor", "deterministic", "exclude", "share_with")


EXAMPLES = (
    ("tilewise time resnet18 --batch 8", "Each layer and whole training steps, by torch and by plans."),
    ("tilewise time mb32ic64ih28oc64kh3ph1 --fronts", "One layer, and what less workspace would cost it."),
)


@click.command("time", cls=Helped, examples=EXAMPLES, short_help="Time torch and the plans side by side.")
@click.argument("target", metavar="NET|LAYER|PRODUCT|RNN")
@passes_option
@click.option(
    "--iterations",
    type=click.IntRange(min=1),
    metavar="N",
    help="Timed runs of each side.  [default: as many as the time taken allows, 5 or more]",
)
@click.option(
    "--schedule",
    "file",
    type=click.Path(),
    metavar="FILE",
    help="Take plans from FILE, which `plan -o` wrote, with its options; checked first.",
)
@planning_options()
@devices_option
@budget_options
@shared_option("goal")
@click.option(
    "--trace",
    "trace",
    metavar="FILE",
    help="Also write the time line of one planned training step of NET to FILE (.json or .json.gz), for Perfetto.",
)
@click.option("--fronts", is_flag=True, help="Show the front of time and workspace of each pass; measures more.")
@click.option("--json", "as_json", is_flag=True, help="Print a document (schema tilewise/time) instead of tables.")
@click.pass_context
def command(
    ctx: click.Context,
    target: str,
    passes: tuple[str, ...],
    iterations: int | None,
    file: str | None,
    settings: Asked,
    devices: str | None,
    total_workspace: str | None,
    policy: str | None,
    goal: str,
    trace: str | None,
    fronts: bool,
    as_json: bool,
) -> None:
    """Plan NET or LAYER, then time the framework and the plans in turns: every layer and pass, and for a network whole
    training steps (forward, loss and backward) with their peak memory.

    With --goal step, which is what holds where nothing is said, the network's step decides: plans that are faster by
    themselves are taken back where it does not gain from them, and the table marks them. Under a limit of workspace, or
    by a schedule, every pass decides for itself.

    With --schedule the inputs are like those that the schedule was made for where nothing else is said, and its plans
    are run by after a check.

    Where torch's own choice won, the layer is left to it and counts 1.00. Exits with 1 where some layer-pass has no
    plan; there, and with --pass, training steps are not timed.
    """
    if file is not None:
        check_file("--schedule", file)
    check_asked(settings)
    check_budget(total_workspace, policy)
    check_target(target, settings, passes)

    from tilewise.cli.planning import (
        divide_target,
        head,
        plan_target,
        schedule_of,
        time_results,
        time_training,
        with_fronts,
    )
    from tilewise.cli.target import resolve
    from tilewise.report.console import show_json
    from tilewise.report.documents import time_document
    from tilewise.report.values import summarize

    schedule = None if file is None else load(file)
    budget = settings.budget(total_workspace, policy)
    if budget is not None and schedule is not None:
        raise BadInput("--total-workspace: the schedule has limits of its own; leave it or --schedule out")
    settings, options = (settings, settings.options()) if schedule is None else following(ctx, settings, schedule)
    resolved = resolve(target, settings, passes)
    check_trace(trace, whole=resolved.network is not None and not passes)
    planner = make_planner(devices, resolved.device)
    divided = divide_target(resolved, options, planner, budget)
    plans = plan_target(resolved, options, planner, schedule, divided.limits)
    results = time_results(resolved, plans, options.deterministic, iterations)
    results = with_fronts(resolved, results, options, planner, divided.limits) if fronts else results
    top, summary = head(resolved, settings, options), summarize(results)
    whole = not passes and not summary.unplanned  # else there is no step; the table says which plans are missing
    taken = None if schedule is None else schedule_of(resolved, settings, options, plans, planner)
    step = time_training(resolved, options, planner, iterations, taken, budget, goal, trace) if whole else None
    if as_json:
        show_json(time_document(top, results, summary, step, divided.facts["budget"]))
    else:
        show_tables(top, results, step, divided.facts["budget"], fronts=fronts)
    if summary.unplanned:
        ctx.exit(NO_PLAN)


def show_tables(
    top: dict[str, Any],
    results: list[LayerResult],
    step: NetworkTime | None,
    budget: dict[str, Any] | None,
    *,
    fronts: bool,
) -> None:
    """Print the tables of layers and passes, of their ``fronts``, of whole steps and of a divided budget."""
    from tilewise.report.console import show
    from tilewise.report.tables import (
        budget_table,
        compared_text,
        front_table,
        heading,
        step_table,
        summary_text,
        time_table,
    )
    from tilewise.report.values import summarize

    back = frozenset() if step is None else step.taken_back
    show(heading(top), time_table(results, back), "", summary_text(summarize(results)))
    if fronts:
        show("", front_table(results))
    if step is not None:
        show("", step_table(step), *([] if step.compared is None else ["", compared_text(step.compared)]))
    if budget is not None:
        show("", budget_table(budget))


def check_trace(file: str | None, *, whole: bool) -> None:
    """Raise :class:`BadInput` for a file that no time line can be written to, and where no ``whole`` step is timed."""
    from tilewise.nn.step.timeline import checked_file

    if file is None:
        return
    if not whole:
        raise BadInput(f"--trace {file!r}: it is of a whole training step; NET without --pass would do")
    with bad_input("--trace"):
        checked_file(file)


def load(file: str) -> Schedule:
    """The schedule in ``file``. Raises :class:`BadInput`."""
    from tilewise.planner import Schedule

    with bad_input("--schedule"):
        try:
            return Schedule.load(file)
        except OSError as error:
            raise BadInput(f"--schedule: {file!r} cannot be read: {error.strerror}") from error


def following(ctx: click.Context, settings: Asked, schedule: Schedule) -> tuple[Asked, Options]:
    """``settings`` with the schedule's inputs where none were given, and its options.

    Raises :class:`BadInput` where options of planning were given besides.
    """
    given = [name for name in (*INPUTS, *OPTIONS) if ctx.get_parameter_source(name) is ParameterSource.COMMANDLINE]
    for name in given:
        if name in OPTIONS:
            raise BadInput(f"--{name.replace('_', '-')}: the schedule has its own; leave it or --schedule out")
    inputs = {name: getattr(schedule, name) for name in INPUTS if name not in given}
    return replace(settings, **inputs), schedule.options
