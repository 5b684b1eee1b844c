"""The comparison of a model's whole step by torch and by plans, as :func:`tilewise.optimize` makes it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Protocol

import torch.distributed as dist
from torch import nn

from tilewise.comm.agreement import several_ranks
from tilewise.nn.layers.plan_table import planning
from tilewise.nn.notices.channel import say
from tilewise.nn.progress import Late, showing
from tilewise.nn.ranks.post import why_no_post
from tilewise.nn.ranks.steps import Ranks, all_ranks
from tilewise.nn.step.goal import Modelled, StepGoal
from tilewise.nn.step.live import LiveGoal
from tilewise.nn.step.result import StepReport
from tilewise.nn.step.search import Swappable
from tilewise.nn.step.step import Step
from tilewise.settings import Settings
from tilewise.solvers import all_solvers

__all__ = ["Decide", "compare_live", "compare_steps", "why_not_compared", "why_not_live"]


Note = Callable[[int, int], object]


class Decide(Protocol):
    """Decides by a step, the program's ``own`` or one that was made up, how a model is to compute."""

    def __call__(self, step: Step, note: Note, ranks: Ranks, *, own: bool) -> StepReport:
        """The report of what was decided; ``note(done, total)`` is called as pairs of steps are timed."""
        ...


class PlannedModules(Swappable, Modelled, Protocol):
    """The modules of a model that run by plan."""


BINDING = ("workspace", "total_workspace", "deterministic", "error_limit", "strict")
"""Options that bind plans and not torch: a pass that keeps them must not be taken back for one that does not."""


def compare_steps(
    model: nn.Module,
    examples: list[Any],
    asked: Settings,
    own_step: Callable[[Any], object] | None,
    modules: PlannedModules,
    schedule: object,
    silent: bool,
    replayed: Decide | None = None,
) -> StepReport:
    """Time the model's step by torch and by plans, and take back what does not help it.

    Progress is shown unless ``silent``. All ranks do so at once, and rank 0 shows it for all. Where the model is
    replayed from graphs, ``replayed`` decides.
    """
    if several_ranks() and not dist.is_gloo_available():
        return StepReport(reason="ranks tell each other their times by Gloo, which this torch does not have")
    with all_ranks() as ranks:
        step, reason = (
            None,
            why_not_compared(asked if replayed is None else replace(asked, cuda_graphs=False), schedule),
        )
        try:
            step = Step(model, examples, own_step, training=asked.training)
        except ValueError as error:
            reason = reason or str(error)
        reason = ranks.any(reason)
        if reason or step is None:
            return StepReport(reason=reason)
        own = own_step is not None
        decide = replayed or _decided(modules)
        return _compared(functools.partial(decide, step, own=own), ranks, silent=silent or not ranks.leads)


def _decided(modules: PlannedModules) -> Decide:
    """What decides of a model that is not replayed."""

    def decide(step: Step, note: Note, ranks: Ranks, *, own: bool) -> StepReport:
        """Decide by ``step``, the program's ``own`` or one that was made up."""
        return StepGoal(step, modules, note, ranks, modules).decide(own=own)

    return decide


def _compared(decide: Callable[[Note, Ranks], StepReport], ranks: Ranks, *, silent: bool) -> StepReport:
    """What ``decide`` says became of the step."""
    shown = None if silent else Late("pairs of steps", "timing", "timed")

    def note(done: int, total: int) -> None:
        """Show how many pairs are timed."""
        if shown is not None:
            shown(done, total, "by torch and by plans")

    with planning(), showing(shown):
        report = decide(note, ranks)
    if not report.reason:
        report = replace(report, ranks=ranks.count)
    return report


def compare_live(
    modules: Swappable, pending: Callable[[], int], asked: Settings, schedule: object, silent: bool
) -> LiveGoal:
    """What compares the steps of the program itself once nothing is ``pending``; where they cannot be, it says why."""
    tell = functools.partial(_tell, silent=silent)
    goal = LiveGoal(modules, pending, training=asked.training, decided=tell)
    reason = why_not_live(asked, schedule)
    if reason:
        goal.stop(reason)
    return goal


def why_not_live(asked: Settings, schedule: object) -> str:
    """Why the steps of the program itself are not compared; empty where they are."""
    return why_not_compared(asked, schedule) or why_no_post()


def _tell(report: StepReport, *, silent: bool) -> None:
    """One line on what became of the program's own steps, by rank 0 alone; none where they were not compared."""
    if not report.reason and (not several_ranks() or dist.get_rank() == 0):
        say(str(report), shown=not silent)


def why_not_compared(asked: Settings, schedule: object) -> str:
    """Why whole steps are not compared; empty where they are."""
    if asked.goal != "step":
        return f"goal={asked.goal!r}"
    if schedule is not None:
        return "plans follow a schedule"
    if asked.memory_limit is not None:
        return "plans follow memory_limit"
    if asked.cuda_graphs:
        return "cuda_graphs=True: the step is replayed from a graph"
    kept = [name for name in BINDING if getattr(asked, name) not in (None, False)]
    if kept:
        demand = f"torch's own step need not keep {kept[0]}={getattr(asked, kept[0])!r}"
        return f"{demand}; leave {' and '.join(kept)} out to have it compared"
    if asked.exclude and any(solver.baseline and solver.name in asked.exclude for solver in all_solvers()):
        return f"exclude={asked.exclude!r} has torch's own choice"
    if asked.rigor in ("estimate", "wisdom_only"):
        return f"rigor={asked.rigor!r} measures nothing"
    return ""
