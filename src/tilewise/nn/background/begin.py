"""The beginning and the end of planning a model in the background."""

from __future__ import annotations

import warnings

from torch import nn

from tilewise.comm.agreement import several_ranks
from tilewise.nn.arguments import check_model, unwrapped
from tilewise.nn.background import model as of_model
from tilewise.nn.background.later import LaterTable
from tilewise.nn.background.model import Comparison, LayersToPlan, Modules
from tilewise.nn.background.prepare import prepare
from tilewise.nn.background.service import Work, service
from tilewise.nn.layers.swaps import swap_back
from tilewise.nn.progress import Late, showing
from tilewise.planner import Progress
from tilewise.settings import Settings

__all__ = ["begin", "finish", "plans_later", "wait"]

IMPORTING_S = 1.0
"""Seconds for which the call that begins imports what planning takes: a step would be held up by it for longer."""

_told_ranks = False


def plans_later(model: nn.Module, asked: Settings, schedule: object) -> bool:
    """Whether ``asked`` says to plan in the background. What an earlier call has left to plan there is given up.

    With several ranks it says once that all is planned before. Raises ``ValueError`` for what needs a whole step, or
    all layers at once, to be planned, as a ``schedule`` does.
    """
    global _told_ranks
    limits = {"memory_limit": asked.memory_limit, "total_workspace": asked.total_workspace}
    branches = None if asked.branches == "sequence" else asked.branches
    graphs = None if asked.graphs == "never" else asked.graphs
    waits = asked.wait is not False  # as optimize does where nothing is said
    conflicts = {} if waits else {**limits, "branches": branches, "graphs": graphs, "schedule": schedule}
    for name, value in conflicts.items():
        if value is not None:
            raise ValueError(
                f"wait=False: {name}={value!r:.80} needs all layers planned before the first step; wait=True would do"
            )
    of_model.cancel(unwrapped(model))
    if waits or not several_ranks():
        return not waits
    if not _told_ranks:
        _told_ranks = True
        warnings.warn(
            "tilewise: wait=False: several ranks plan together before the first step, as with wait=True", stacklevel=4
        )
    return False


def begin(
    model: nn.Module,
    modules: Modules,
    table: LaterTable,
    asked: Settings,
    deterministic: bool,
    progress: Progress | None,
    comparison: Comparison | None = None,
) -> None:
    """Let ``modules`` of ``model`` compute as torch does until they are planned, which begins at its next step.

    What is in ``table`` already runs by plan at once. Once all is planned, ``comparison`` gets the steps of the model.
    """
    for module in modules.candidates.values():
        swap_back(module)
    prepare((problem for name in modules.candidates for problem in modules.problems_of(name)), IMPORTING_S)
    work = LayersToPlan(table, modules, modules.candidates, deterministic, asked.background_share, progress, comparison)
    of_model.begin(unwrapped(model), work)


def wait(model: nn.Module) -> None:
    """Plan now what :func:`tilewise.optimize` with ``wait=False`` has left, and return when all layers run by plan.

    It may be called between steps: before an evaluation, say, or before the model is compiled or captured. Where whole
    steps are being compared, plans run at its end, and the comparison goes on with the next steps. Ctrl-C keeps what
    was measured, and planning goes on in the background. Progress is shown as by :func:`tilewise.optimize`.

    >>> model, images = torch.nn.Conv2d(3, 8, 3), torch.randn(2, 3, 16, 16)
    >>> model = tilewise.optimize(model, images, wait=False, rigor="estimate")
    >>> tilewise.wait(model)
    >>> tilewise.nn.report(model).pending
    0

    Raises ``ValueError`` for anything but a module, and ``RuntimeError`` while a graph of the model may still be
    differentiated or a CUDA graph is captured, and in a forked process, which did not begin the planning.
    """
    check_model(model)
    work = of_model.work_of(unwrapped(model))
    if work is None:
        return
    if work.pending:
        finish(work)
    if work.comparison is not None:
        work.comparison.rest()


def finish(work: Work) -> None:
    """Do all of ``work`` now, with progress on stderr. Raises what :meth:`Service.finish` raises."""
    late, total = Late(), work.pending
    with showing(late):
        service().finish(work, lambda left: late(max(total - left, 0), max(total, left), ""))
