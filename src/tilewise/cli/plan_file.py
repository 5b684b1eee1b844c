"""``tilewise plan FILE``: plans of the layers that a file lists, and the least and the median of their times."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

from tilewise.cli.given.batch_file import Line, read_batch
from tilewise.cli.layers import grouped
from tilewise.cli.planning import divide_target, head, plan_target, with_runs
from tilewise.cli.program import BadInput
from tilewise.cli.settings import Asked, make_planner
from tilewise.cli.target import Target, text_target
from tilewise.cli.whole_step import Found
from tilewise.report.console import show
from tilewise.report.runs import runs_table, runs_text
from tilewise.report.tables import budget_table, heading, summary_text
from tilewise.report.values import summarize

if TYPE_CHECKING:
    from tilewise.nn.budget import Budget, Divided
    from tilewise.planner import Planner

__all__ = ["file_target", "plan_file"]


class Report(Protocol):
    """What is printed and written of plans: :class:`tilewise.cli.plan.PlanReport`."""

    @property
    def as_json(self) -> bool:
        """Whether the document is printed."""
        ...

    @property
    def writes(self) -> bool:
        """Whether there is a document."""
        ...

    def write_document(self, found: Found, divided: Divided, settings: Asked, planner: Planner) -> int:
        """Print and write the document, where one is asked for; how many passes have no plan."""
        ...


def plan_file(
    path: str, settings: Asked, passes: tuple[str, ...], devices: str | None, budget: Budget | None, report: Report
) -> int:
    """Plan the layers of the file at ``path``, time each plan and print what came of it; how many have no plan."""
    target = file_target(path, read_batch(path, settings, passes), report.writes)
    options = settings.options()
    planner = make_planner(devices, target.device)
    divided = divide_target(target, options, planner, budget)
    results = with_runs(target, plan_target(target, options, planner, limits=divided.limits), options.deterministic)
    unplanned = report.write_document(Found(target, results), divided, settings, planner)
    if not report.as_json:
        show(heading(head(target, settings, options)), runs_table(results), "", summary_text(summarize(results)))
        show(runs_text(results))
        if divided.facts["budget"] is not None:
            show("", budget_table(divided.facts["budget"]))
    return unplanned


def file_target(path: str, lines: list[Line], is_schedule: bool) -> Target:
    """The layers of a file as one target, each under its name or the number of its line; equal ones are one.

    Raises :class:`BadInput` where they are to be a schedule, which has one type and layout, and differ in them.
    """
    kinds = dict.fromkeys((line.settings.dtype, line.settings.layout) for line in lines)
    if is_schedule and len(kinds) > 1:
        told = " and ".join(" ".join(kind) for kind in kinds)
        raise BadInput(f"{path}: layers are {told}, and a document has one type and layout; a file for each would do")
    targets = [_target(line) for line in lines]
    layers = [
        replace(layer, names=tuple(f"line {line.number}" if name in UNNAMED else name for name in layer.names))
        for line, target in zip(lines, targets, strict=True)
        for layer in target.layers
    ]
    first = targets[0]
    return Target(path, max(target.batch for target in targets), first.device, first.precision, grouped(layers))


UNNAMED = ("layer", "product", "rnn_tanh", "rnn_relu", "gru", "lstm", "max_pool", "avg_pool", "lrn")
"""Names of layers whose text has none."""


def _target(line: Line) -> Target:
    """The layer of one line."""
    found = text_target(line.text)
    assert found is not None  # the file was checked
    return found[0](line.text, line.settings, line.passes)
