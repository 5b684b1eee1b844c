"""``tilewise plan``: the fastest plan of every layer and pass."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tilewise.cli.given.batch_file import is_batch_file, read_batch
from tilewise.cli.given.early import check_asked, check_budget, check_target
from tilewise.cli.helped import Helped
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
    from tilewise.nn.budget import Budget, Divided
    from tilewise.planner import Planner, Schedule

__all__ = ["command"]


EXAMPLES = (
    ("tilewise plan resnet18 --batch 8 -o resnet18.json", "Plan a network, and keep its schedule for programs."),
    ("tilewise plan mb32ic64ih28oc64kh3ph1 --workspace 64MiB", "Plan one layer within 64 MiB of workspace."),
)


@click.command("plan", cls=Helped, examples=EXAMPLES, short_help="Find the fastest plan of every layer and pass.")
@click.argument("target", metavar="NET|LAYER|PRODUCT|RNN|FILE")
@passes_option
@shared_option("memory_limit")
@click.option("--max-batch", is_flag=True, help="Find the largest mini-batch that keeps --memory-limit, and plan that.")
@planning_options()
@devices_option
@budget_options
@mesh_options
@shared_option("goal")
@click.option("--json", "as_json", is_flag=True, help="Print a document (schema tilewise/plan) instead of tables.")
@click.option(
    "-o", "--output", type=click.Path(dir_okay=False, writable=True), metavar="FILE", help="Write the document to FILE."
)
@click.option("--candidates", is_flag=True, help="In the document, what was tried and why it lost.")
@click.option("--fronts", is_flag=True, help="The front of time and workspace of each pass; measures more.")
@click.pass_context
def command(
    ctx: click.Context,
    /,
    as_json: bool,
    output: str | None,
    candidates: bool,
    fronts: bool,
    **asked: Any,
) -> None:
    """Find and print a plan for every layer and pass of NET or LAYER, or of the layers that FILE lists.

    FILE has one layer a line, as benchdnn's --batch= reads it. What follows # is a comment, and options such as --mb=8
    or --dir=BWD_D hold from their line on. Its plans are timed, and the least and the median are printed.

    Plans are remembered: what was measured once, here or in a program, is not measured again. What -o writes is a
    schedule, which `tilewise.optimize` and `tilewise time --schedule` run by.

    Of a network the training step counts: where it does not gain from a plan, torch's own choice stays. With --goal
    passes every pass decides for itself. So it does for a single layer, with --pass, --total-workspace or --gpus, and
    under a limit that torch's choice need not keep.

    With --memory-limit a training step is run: forward, a loss and backward, without an optimizer. Each kernel may use
    what is left at its moment, and the step's peak is measured. With --gpus meshes of GPUs are compared by a model of
    the step's time and memory; nothing is planned for good.

    Exits with 1 where some layer-pass has no plan within the limit, with the reasons, or where nothing keeps the step's
    limit or the total.
    """
    report = PlanReport(as_json, output, candidates, fronts)
    report.check()
    if PlanAsked(**asked).carry_out(report):
        ctx.exit(NO_PLAN)


@dataclass(frozen=True, slots=True)
class PlanAsked:
    """What is to be planned, and how."""

    target: str
    passes: tuple[str, ...]
    memory_limit: str | None
    max_batch: bool
    settings: Asked
    devices: str | None
    total_workspace: str | None
    policy: str | None
    mesh: MeshAsked
    goal: str

    def check(self) -> None:
        """Raise :class:`BadInput` for what can be told to be wrong without torch."""
        if self.max_batch and self.memory_limit is None:
            raise BadInput("--max-batch: of which limit? --memory-limit 16GiB would do")
        self.mesh.check()
        if self.total_workspace is not None and self.memory_limit is not None:
            raise BadInput("--total-workspace: --memory-limit gives every kernel its own limit; leave one of them out")
        check_asked(self.settings)
        check_budget(self.total_workspace, self.policy)
        if not is_batch_file(self.target):
            check_target(self.target, self.settings, self.passes)
            return
        for flag, value in (("--memory-limit", self.memory_limit), ("--gpus", self.mesh.gpus)):
            if value is not None:
                raise BadInput(f"{flag}: it is of a network's step, and {self.target!r} lists layers; NET would do")
        read_batch(self.target, self.settings, self.passes)

    def carry_out(self, report: PlanReport) -> int:
        """Plan and report; how many passes have no plan. Raises :class:`BadInput`."""
        self.check()
        budget = self.settings.budget(self.total_workspace, self.policy)
        if is_batch_file(self.target):
            from tilewise.cli.plan_file import plan_file

            return plan_file(self.target, self.settings, self.passes, self.devices, budget, report)
        if self.mesh.gpus is not None:
            return self._compare_meshes(budget, report)

        from tilewise.cli.planning import divide_target
        from tilewise.cli.target import resolve
        from tilewise.cli.whole_step import plan_asked

        options = self.settings.options()
        resolved = resolve(self.target, self.settings, self.passes)
        planner = make_planner(self.devices, resolved.device)
        divided = divide_target(resolved, options, planner, budget)
        by_step = self.goal == "step" and not self.passes and budget is None
        most = self.passes if self.max_batch else None
        found = plan_asked(resolved, options, planner, divided, self.memory_limit, most, by_step=by_step)
        return report.write(found, divided, self.settings, planner)

    def _compare_meshes(self, budget: Budget | None, report: PlanReport) -> int:
        """Compare meshes of GPUs; 1 where none can be used."""
        others = {"--pass": self.passes, "--max-batch": self.max_batch, "--total-workspace": budget}
        others |= {"-o": report.output, "--candidates": report.candidates, "--fronts": report.fronts}
        refuse_with_mesh(others)
        planner = make_planner(self.devices, self.settings.torch_device())
        return run_mesh(self.target, self.mesh, self.settings, planner, self.memory_limit, report.as_json)


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

    @property
    def writes(self) -> bool:
        """Whether there is a document."""
        return self.as_json or self.output is not None

    def write(self, found: Found, divided: Divided, settings: Asked, planner: Planner) -> int:
        """Print and write what was ``found``; how many passes have no plan."""
        from tilewise.cli.planning import head, with_fronts
        from tilewise.report.console import show
        from tilewise.report.tables import (
            budget_table,
            compared_text,
            front_table,
            heading,
            memory_text,
            plan_table,
            summary_text,
        )
        from tilewise.report.values import summarize

        unplanned = self.write_document(found, divided, settings, planner)
        if self.as_json:
            return unplanned
        options, budget = settings.options(), divided.facts["budget"]
        top, summary = head(found.target, settings, options), summarize(found.results)
        show(heading(top), plan_table(found.results), "", summary_text(summary))
        if self.fronts:
            show("", front_table(with_fronts(found.target, found.results, options, planner, divided.limits)))
        if budget is not None:
            show("", budget_table(budget))
        if found.step is not None:
            show("", memory_text(found.step, found.largest))
        if found.compared is not None:
            show("", compared_text(found.compared))
        return unplanned

    def write_document(self, found: Found, divided: Divided, settings: Asked, planner: Planner) -> int:
        """Print and write the document of what was ``found``, where one is asked for; how many passes have no plan."""
        from tilewise.cli.planning import schedule_of
        from tilewise.report.console import show_json
        from tilewise.report.values import summarize

        if self.writes:
            options = settings.options()
            schedule = schedule_of(
                found.target, settings, options, found.results, planner, fronts=self.fronts, candidates=self.candidates
            )
            facts = {"budget": divided.facts["budget"], "step_memory": found.step, "largest_batch": found.largest}
            schedule = replace(schedule, **facts)
            if self.output is not None:
                save(schedule, self.output)
            if self.as_json:
                show_json(schedule.to_json())
        return summarize(found.results).unplanned


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
