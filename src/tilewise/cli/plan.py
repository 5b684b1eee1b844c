"""``tilewise plan``: the fastest plan of every layer and pass."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from tilewise.cli.mesh import MeshAsked, mesh_options, plan_mesh
from tilewise.cli.program import NO_PLAN, BadInput
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
    from tilewise.cli.whole_step import Found
    from tilewise.nn.budget import Divided
    from tilewise.planner import Planner, Schedule

__all__ = ["command"]


@click.command("plan")
@click.argument("target", metavar="NET|LAYER|PRODUCT|RNN")
@passes_option
@shared_option("memory_limit")
@click.option("--max-batch", is_flag=True, help="Find the largest mini-batch that keeps --memory-limit, and plan that.")
@planning_options
@devices_option
@budget_options
@mesh_options
@shared_option("goal")
@click.option("--json", "as_json", is_flag=True, help="Print a document (schema tilewise/plan) instead of tables.")
@click.option(
    "-o", "--output", type=click.Path(dir_okay=False, writable=True), metavar="FILE", help="Write the document to FILE."
)
@click.option("--candidates", is_flag=True, help="In the document, what was tried and why it lost.")
@click.option("--fronts", is_flag=True, help="In the document, the front of time and workspace; measures more.")
@click.pass_context
def command(
    ctx: click.Context,
    target: str,
    passes: tuple[str, ...],
    memory_limit: str | None,
    max_batch: bool,
    settings: Asked,
    devices: str | None,
    total_workspace: str | None,
    policy: str | None,
    mesh: MeshAsked,
    goal: str,
    as_json: bool,
    output: str | None,
    candidates: bool,
    fronts: bool,
) -> None:
    """Find and print a plan for every layer and pass of NET or LAYER.

    With --goal step, which is what holds where nothing is said, torch's own choice stays where a network's training
    step does not gain from a plan. Every pass decides for itself for a single layer, with --pass, --total-workspace or
    --gpus, and under a limit that torch's choice need not keep.

    Plans are remembered: what was measured once, here or in a program, is not measured again. With --memory-limit a
    training step is run (forward, a loss and backward, without an optimizer), each kernel may use what is left at its
    moment, and the step's peak is measured. With --gpus meshes of GPUs are compared by a model of the step's time and
    memory; nothing is planned for good. Exits with 1 where some layer-pass has no plan within the limit, with the
    reasons, or where nothing keeps the step's or the total. What -o writes is a schedule, which `tilewise.optimize` and
    `tilewise time --schedule` run by.
    """
    report = PlanReport(as_json, output, candidates, fronts)
    report.check()
    if max_batch and memory_limit is None:
        raise BadInput("--max-batch: of which limit? --memory-limit 16GiB would do")
    options = settings.options()
    budget = settings.budget(total_workspace, policy)
    mesh.check()
    if mesh.gpus is not None:
        others = {"--pass": passes, "--max-batch": max_batch, "--total-workspace": budget, "-o": output}
        others |= {"--candidates": candidates, "--fronts": fronts}
        refuse_with_mesh(others)
        planner = make_planner(devices, settings.torch_device())
        ctx.exit(run_mesh(target, mesh, settings, planner, memory_limit, as_json))
    if budget is not None and memory_limit is not None:
        raise BadInput("--total-workspace: --memory-limit gives every kernel its own limit; leave one of them out")

    from tilewise.cli.planning import divide_target
    from tilewise.cli.target import resolve
    from tilewise.cli.whole_step import plan_asked

    resolved = resolve(target, settings, passes)
    planner = make_planner(devices, resolved.device)
    divided = divide_target(resolved, options, planner, budget)
    by_step = goal == "step" and not passes and budget is None
    most = passes if max_batch else None
    found = plan_asked(resolved, options, planner, divided, memory_limit, most, by_step=by_step)
    if report.write(found, divided, settings, planner):
        ctx.exit(NO_PLAN)


@dataclass(frozen=True, slots=True)
class PlanReport:
    """What the command prints and writes: tables or a document, which may go to the file ``output`` as well."""

    as_json: bool
    output: str | None
    candidates: bool
    fronts: bool

    def check(self) -> None:
        """Raise :class:`BadInput` where the file could not be written, before anything is planned."""
        if self.output is not None and not Path(self.output).absolute().parent.is_dir():
            raise BadInput(f"-o: {self.output!r} lies in no folder that there is")

    def write(self, found: Found, divided: Divided, settings: Asked, planner: Planner) -> int:
        """Print and write what was ``found``; how many passes have no plan."""
        from tilewise.cli.planning import head, schedule_of
        from tilewise.report.console import show, show_json
        from tilewise.report.tables import budget_table, compared_text, heading, memory_text, plan_table, summary_text
        from tilewise.report.values import summarize

        options, budget = settings.options(), divided.facts["budget"]
        summary = summarize(found.results)
        if self.as_json or self.output is not None:
            schedule = schedule_of(
                found.target, settings, options, found.results, planner, fronts=self.fronts, candidates=self.candidates
            )
            schedule = replace(schedule, budget=budget, step_memory=found.step, largest_batch=found.largest)
            if self.output is not None:
                save(schedule, self.output)
            if self.as_json:
                show_json(schedule.to_json())
        if not self.as_json:
            show(heading(head(found.target, settings, options)), plan_table(found.results), "", summary_text(summary))
            if budget is not None:
                show("", budget_table(budget))
            if found.step is not None:
                show("", memory_text(found.step, found.largest))
            if found.compared is not None:
                show("", compared_text(found.compared))
        return summary.unplanned


def refuse_with_mesh(others: dict[str, object]) -> None:
    """Raise :class:`BadInput` for the first of the options ``others`` that was given beside ``--gpus``."""
    for name, value in others.items():
        if value:
            raise BadInput(f"{name}: --gpus compares meshes and makes no schedule; leave one of them out")


def run_mesh(
    target: str, mesh: MeshAsked, settings: Asked, planner: Planner, memory_limit: str | None, as_json: bool
) -> int:
    """Compare meshes and print them; the exit status."""
    from tilewise.report.console import show, show_json
    from tilewise.report.meshes import mesh_document, mesh_table, mesh_text
    from tilewise.report.tables import heading

    head, choice = plan_mesh(target, mesh, settings, planner, memory_limit)
    if as_json:
        show_json(mesh_document(head, choice))
    else:
        show(heading(head), mesh_table(choice), "", mesh_text(choice))
    return 0 if choice.best is not None else NO_PLAN


def save(schedule: Schedule, path: str) -> None:
    """Write ``schedule`` into a file. Raises :class:`BadInput` where it cannot be written."""
    try:
        schedule.save(path)
    except OSError as error:
        raise BadInput(f"-o: {path!r} cannot be written: {error.strerror}") from error
