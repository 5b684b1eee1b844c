"""``tilewise time``: the framework and the plans side by side, by layer and pass and as whole training steps."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from tilewise.cli.given.early import check_asked, check_budget, check_file, check_target, kind_of_text
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
from tilewise.machine.files import TRACE, TRACE_ENDINGS, checked_path

if TYPE_CHECKING:
    from tilewise.planner import Options, Schedule
    from tilewise.report.values import LayerResult, NetworkTime, Summary

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
def command(ctx: click.Context, /, as_json: bool, fronts: bool, **asked: Any) -> None:
    """Plan NET or LAYER, then time the framework and the plans in turns: every layer and pass, and for a network whole
    training steps (forward, loss and backward) with their peak memory.

    Of a network the training step decides: plans that are faster by themselves are taken back where it does not gain
    from them, and the table marks them. With --goal passes, under a limit of workspace, or by a schedule, every pass
    decides for itself.

    With --schedule the plans are the schedule's, after a check. Where no inputs are given they are like those that it
    was made for.

    A layer where torch's own choice won is left to it and counts 1.00. Exits with 1 where some layer-pass has no plan.
    There, and with --pass, training steps are not timed.
    """
    if TimeAsked(**asked).carry_out(ctx, fronts, as_json):
        ctx.exit(NO_PLAN)


@dataclass(frozen=True, slots=True)
class TimeAsked:
    """What is to be timed, and how."""

    target: str
    passes: tuple[str, ...]
    iterations: int | None
    file: str | None
    settings: Asked
    devices: str | None
    total_workspace: str | None
    policy: str | None
    goal: str
    trace: str | None

    def check(self) -> None:
        """Raise :class:`BadInput` for what can be told to be wrong without torch."""
        if self.file is not None:
            check_file("--schedule", self.file)
        check_asked(self.settings)
        check_budget(self.total_workspace, self.policy)
        check_target(self.target, self.settings, self.passes)
        if self.trace is not None:
            check_trace(self.trace, whole=not kind_of_text(self.target) and not self.passes)

    def carry_out(self, ctx: click.Context, fronts: bool, as_json: bool) -> int:
        """Time and print; how many passes have no plan. Raises :class:`BadInput`."""
        self.check()

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
        from tilewise.planner.caches.rates import known_rates
        from tilewise.report.console import show_json
        from tilewise.report.documents import time_document
        from tilewise.report.values import summarize

        schedule = None if self.file is None else load(self.file)
        budget = self.settings.budget(self.total_workspace, self.policy)
        if budget is not None and schedule is not None:
            raise BadInput("--total-workspace: the schedule has limits of its own; leave it or --schedule out")
        settings, options = self.settings, self.settings.options()
        if schedule is not None:
            settings, options = following(ctx, settings, schedule)
        resolved = resolve(self.target, settings, self.passes)
        planner = make_planner(self.devices, resolved.device)
        divided = divide_target(resolved, options, planner, budget)
        plans = plan_target(resolved, options, planner, schedule, divided.limits)
        results = time_results(resolved, plans, options.deterministic, self.iterations)
        if fronts:
            results = with_fronts(resolved, results, options, planner, divided.limits)
        top, summary = head(resolved, settings, options), summarize(results)
        # Not where only some passes are asked for; nor without all plans, and the table says which and why.
        whole = not self.passes and not summary.unplanned
        taken = None if schedule is None else schedule_of(resolved, settings, options, plans, planner)
        step = None
        if whole:
            step = time_training(resolved, options, planner, self.iterations, taken, budget, self.goal, self.trace)
        facts = divided.facts["budget"]
        if as_json:
            settings_of = top["options"]
            rates = known_rates(planner.wisdom, top["environment"], settings_of["dtype"], settings_of["precision"])
            show_json(time_document(top, results, summary, step, facts, rates))
        else:
            show_times(top, results, summary, step, facts, fronts)
        return summary.unplanned


def show_times(
    top: dict[str, Any],
    results: list[LayerResult],
    summary: Summary,
    step: NetworkTime | None,
    budget: dict[str, Any] | None,
    fronts: bool,
) -> None:
    """Print the tables of what was timed, those of ``fronts``, the whole step and the budget where there are any."""
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

    back = frozenset() if step is None else step.taken_back
    show(heading(top), time_table(results, back), "", summary_text(summary))
    if fronts:
        show("", front_table(results))
    if step is not None:
        show("", step_table(step), *([] if step.compared is None else ["", compared_text(step.compared)]))
    if budget is not None:
        show("", budget_table(budget))


def check_trace(file: str, *, whole: bool) -> None:
    """Raise :class:`BadInput` for a file that no time line can be written to, and where no ``whole`` step is timed."""
    if not whole:
        raise BadInput(f"--trace {file!r}: it is of a whole training step; NET without --pass would do")
    with bad_input("--trace"):
        checked_path(file, TRACE_ENDINGS, TRACE)


def load(file: str) -> Schedule:
    """The schedule in ``file``. Raises :class:`BadInput`."""
    from tilewise.planner import Schedule, ScheduleError

    with bad_input("--schedule"):
        try:
            return Schedule.load(file)
        except OSError as error:
            raise BadInput(f"--schedule: {file!r} cannot be read: {error.strerror}") from error
        except ScheduleError as error:
            raise BadInput(f"--schedule: {error}; a file that `tilewise plan NET -o FILE` wrote would do") from error


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
