"""The step of a model that is replayed from CUDA graphs, compared with what it replaces."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from torch import nn

from tilewise.nn.graphs.graphed import ungraphed
from tilewise.nn.graphs.model import ModelGraphs
from tilewise.nn.ranks.steps import Ranks
from tilewise.nn.step.goal import NOTE, StepGoal, Swappable, is_of_memory, reason_of
from tilewise.nn.step.pairs import Pairs, Side, time_pairs
from tilewise.nn.step.result import StepReport
from tilewise.nn.step.search import with_times
from tilewise.nn.step.step import Step

__all__ = ["compare_replayed"]


def compare_replayed(
    model: nn.Module,
    graphs: ModelGraphs,
    modules: Swappable,
    step: Step,
    note: Callable[[int, int], object],
    ranks: Ranks,
    *,
    own: bool,
) -> StepReport:
    """Keep the plans of a captured ``model`` where replays are faster by them, and replays where the step is by those.

    First replays of torch's own choice and of the plans run in turns, as :class:`StepGoal` has them. Then the step as
    it came in, by torch and without graphs, and the one that is replayed. If that is not surely faster, the model is
    left as it came in. The report is of the second comparison, and its ``way`` is ``"graph"`` where calls are replayed.

    Raises what a step of the program's ``own`` raises, and leaves the model as it came in then. Where a step was made
    up and fails, or runs out of memory, the model stays as it was captured.
    """
    every = list(modules.gains())
    step.way = "graph"

    def undo() -> None:
        """Leave the model as it came in."""
        ungraphed(model)
        modules.withhold(every, NOTE)

    try:
        inside = StepGoal(step, modules, note, ranks).decide(own=own)
        replayed = graphs.report().replayed
        pairs = _against_torch(graphs, modules, step, ranks)
    except Exception as error:
        graphs.resting = False
        if own and not is_of_memory(error):
            undo()
            raise
        return StepReport(reason=reason_of(error))
    except BaseException:
        undo()
        raise
    way = "graph" if graphs.report().replayed > replayed else "eager"
    made = replace(with_times(inside, pairs), way=way)
    if made.kept:
        graphs.settle()
    else:
        undo()
    return made


def _against_torch(graphs: ModelGraphs, modules: Swappable, step: Step, ranks: Ranks) -> Pairs:
    """The times of torch's own step without graphs, and of the step as it is now."""
    by_torch, by_plans = modules.switches()

    def as_it_came() -> None:
        """Compute as torch does, without graphs."""
        by_torch()
        graphs.resting = True

    def as_it_is() -> None:
        """Compute by plans that are kept, and from graphs."""
        by_plans()
        graphs.resting = False

    try:
        with step.repeatable(compiled=True):
            return time_pairs(Side(as_it_came, step), Side(as_it_is, step), step.device, ranks=ranks)
    finally:
        as_it_is()
