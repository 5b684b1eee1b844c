"""Plan a model's layers for its example inputs, replace those that gain, and undo it.

A model goes through these steps, one after the other. Its modules that can be planned are listed (``modules``), and
their calls are recorded in one run on each example (``record``). A budget for all kernels is divided among them
(``budget``). Their problems are planned into a plan table (``layers.plan_table``), alone or with other ranks
(``ranks``), or taken from a schedule (``schedule``). Modules that gain are swapped (``layers.swaps``). Where a step has
a memory limit, plans are changed until it keeps the limit (``memory``). The whole step is timed by torch and by plans,
and passes from which it does not gain are taken back (``step``). Branches that run faster on streams of their own are
set to do so (``branches``). The model is captured in CUDA graphs where that is faster (``graphs``). All is reported
(``report``), and one line says what came of it (``conclusion``).
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar, Unpack

import torch
from torch import nn

from tilewise.comm.agreement import gather, several_ranks
from tilewise.nn.arguments import check_function, check_model, examples_of, settings_of, takes, unwrapped
from tilewise.nn.background.begin import begin, plans_later
from tilewise.nn.background.later import LaterTable
from tilewise.nn.background.model import cancel
from tilewise.nn.background.service import without_turns
from tilewise.nn.branches import choose as branch_times
from tilewise.nn.branches.find import at_once
from tilewise.nn.budget import Budget, make_budget
from tilewise.nn.conclusion import conclude
from tilewise.nn.graphs.choose import choose_graphs
from tilewise.nn.graphs.compare import compare_replayed
from tilewise.nn.graphs.graphed import graphs_of, ungraphed
from tilewise.nn.kept_values import tensors_in
from tilewise.nn.layers.kinds import withdraw_offer
from tilewise.nn.layers.plan_table import PlanTable
from tilewise.nn.layers.swaps import swap_back
from tilewise.nn.layers.weights import Weights
from tilewise.nn.memory.step_planner import StepPlanner, memory_bytes
from tilewise.nn.modules import PlannedModules, workspaces_of
from tilewise.nn.notices.busy import say_if_busy
from tilewise.nn.notices.extras import say_missing
from tilewise.nn.progress import Late
from tilewise.nn.ranks.together import plan_together
from tilewise.nn.regions.choose import RegionPlanner, why_no_regions
from tilewise.nn.regions.forward import regional_of
from tilewise.nn.report import RegionReport, Report, forget, keep
from tilewise.nn.schedule import Source
from tilewise.nn.step.compare import Decide, compare_live, compare_steps, why_not_compared
from tilewise.nn.step.live import LiveGoal
from tilewise.nn.step.negligible import leave_negligible
from tilewise.nn.step.result import StepReport
from tilewise.nn.step.step import Step
from tilewise.nn.step.timeline import StepSource
from tilewise.planner import Planner, Progress, Schedule
from tilewise.problems.base import Problem
from tilewise.settings import ModelOptions, Settings

__all__ = ["optimize", "restore", "unwrapped"]

Model = TypeVar("Model", bound=nn.Module)
EXAMPLE = """\
>>> model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.ReLU())
>>> images = torch.randn(2, 3, 16, 16)
>>> model = tilewise.optimize(model, images, rigor="estimate")
>>> model(images).shape
torch.Size([2, 8, 14, 14])
"""


@takes(ModelOptions, EXAMPLE)
@without_turns
def optimize(
    model: Model,
    example_inputs: object,
    *,
    settings: Settings | None = None,
    filter_fn: Callable[[str, nn.Module], bool] | None = None,
    progress: Progress | None = None,
    planner: Planner | None = None,
    schedule: Schedule | str | os.PathLike[str] | None = None,
    step: Callable[[Model], object] | None = None,
    memory_step: Callable[[Model], object] | None = None,
    **options: Unpack[ModelOptions],
) -> Model:
    """Plan layers of ``model`` for shapes of ``example_inputs``, and run by plan what gains.

    The model is run once on each example to see its layers' calls; it is returned, changed in place. Only what
    ``nn.Conv1d`` to ``nn.ConvTranspose3d`` and, without a memory limit, ``nn.Linear``, ``Bilinear``, ``LSTM``, ``GRU``
    and ``RNN`` compute is swapped; where torch's own choice wins every pass, the module is left exactly as it was.
    :func:`restore` undoes it, :func:`summary` tells what was done. Of several ranks every one calls it; rank 0 plans.
    At the end one line says it, see ``docs/torch.md``, or a ``NothingPlannedWarning`` why nothing could be planned.

    - ``example_inputs``: what ``model`` is called with: a tuple of positional arguments, a mapping of named ones, a
      single value, or a list of such examples.
    {arguments}

    Options, each by keyword:

    {options}

    Raises ``ValueError`` naming the argument at fault or a schedule that fits no layer, ``ScheduleError`` for a file
    that holds none, ``NoPlanError`` when no solver keeps the limit for a layer, or no schedule ``memory_limit`` or
    ``total_workspace`` (it says what is needed at least), ``RankMismatch`` when ranks see different layers,
    ``RuntimeError`` naming the rank whose step raised, and what the model raises on its example, or ``step``.
    """
    check_model(model)
    examples = examples_of(example_inputs)
    asked = settings_of("optimize", ModelOptions, settings, options)
    check_arguments(asked, filter_fn, progress, planner, schedule, step, memory_step)
    own_step = memory_step if step is None else step
    later = plans_later(model, asked, schedule)
    weights = Weights.of(training=asked.training, frozen=asked.frozen)
    ungraphed(model)  # a replay would call no layer
    source = Source.of(schedule)
    budget = make_budget(asked.total_workspace, asked.policy, asked.options().workspace)
    silent = planner is not None or progress is not None
    planner = planner if progress is None else Planner(progress=progress)
    plan_table = plan_table_of(asked, budget, source, planner, later=later)
    regions = _regions_of(model, examples, asked, plan_table, weights, filter_fn, schedule)
    modules = _modules_of(model, plan_table, asked, weights, filter_fn, source, regions)
    step_planner = step_planner_of(model, examples, asked, own_step, modules, weights)
    deterministic = torch.are_deterministic_algorithms_enabled()
    planning = Planning(modules, examples, asked, budget, source, deterministic)
    planning.record_and_plan()
    if source is not None:
        source.conclude(plan_table, modules.problems())
    live = install(model, planning, step_planner, progress, silent)
    now = functools.partial(compare_steps, model, examples, asked, own_step, modules, schedule, silent)
    made = replace(planning.concluded(now if live is None else lambda _: live.report), regions=regions.reports)
    _conclude(model, planning, made, silent=silent)
    return model


def _conclude(model: nn.Module, planning: Planning, made: Report, *, silent: bool) -> None:
    """Keep the report of ``model``, and say what was done and what is missing here."""
    examples, modules = list(planning.examples), planning.modules
    made = replace(made, source=StepSource.of(model, examples, training=planning.asked.training))
    for kept in (model, modules.model):
        keep(kept, made, modules.plan_table, planning.deterministic)
    say_missing({t.device.type for t in (*model.parameters(), *tensors_in(examples))})
    conclude(modules.model, made, silent=silent)


def _modules_of(
    model: nn.Module,
    plan_table: PlanTable,
    asked: Settings,
    weights: Weights,
    filter_fn: Callable[[str, nn.Module], bool] | None,
    source: Source | None,
    regions: Regions,
) -> PlannedModules:
    """The modules of ``model`` that may be planned: not those in regions; with a schedule those of kinds it has."""
    return PlannedModules(
        unwrapped(model),
        plan_table,
        weights,
        filter_fn,
        separate=asked.memory_limit is not None,
        scheduled=None if source is None else source.kinds,
        elsewhere=regions.taken,
    )


class Regions(NamedTuple):
    """What is said of regions, and the names of modules within them, each with the region as text."""

    reports: tuple[RegionReport, ...] = ()
    taken: Mapping[str, str] = MappingProxyType({})


def _regions_of(
    model: nn.Module,
    examples: list[Any],
    asked: Settings,
    plan_table: PlanTable,
    weights: Weights,
    filter_fn: Callable[[str, nn.Module], bool] | None,
    schedule: object,
) -> Regions:
    """Let parts of ``model`` run as regions where that is surely faster, for inference alone."""
    if asked.training:
        return Regions()
    inner = unwrapped(model)
    for module in inner.modules():
        if regional_of(module) is not None:
            swap_back(module)
    reason = why_no_regions(asked, schedule, examples)
    if reason:
        return Regions((RegionReport("", type(inner).__name__, reason=reason),))
    device = tensors_in(examples)[0].device
    planner = RegionPlanner(inner, asked, plan_table, weights, filter_fn, device)
    planner.plan(examples)
    return Regions(tuple(planner.reports), planner.taken)


def restore(model: Model) -> Model:
    """Give every module of ``model`` torch's own computation back and return the model.

    Raises ``ValueError`` for anything but a module.

    >>> model = tilewise.optimize(torch.nn.Conv2d(3, 8, 3), torch.randn(2, 3, 16, 16), rigor="estimate")
    >>> tilewise.restore(model) is model
    True
    """
    ungraphed(model)
    unwrapped_model = unwrapped(model)
    cancel(unwrapped_model)
    for module in unwrapped_model.modules():
        swap_back(module)
        withdraw_offer(module)
    branch_times.unfork(unwrapped_model)
    forget(model)
    forget(unwrapped_model)
    return model


def check_arguments(
    asked: Settings,
    filter_fn: object,
    progress: object,
    planner: object,
    schedule: object,
    step: object,
    memory_step: object,
) -> None:
    """Raise ``ValueError`` for an argument of :func:`optimize` of a wrong type, or two that exclude one another.

    The types of a planner and a schedule are checked elsewhere: by the plan table and by the reader of schedules.
    """
    check_function("filter_fn", filter_fn, "name, module")
    check_function("step", step, "model")
    check_function("memory_step", memory_step, "model")
    if step is not None and memory_step is not None:
        raise ValueError("memory_step: it is the older name of step; give one of them")
    if planner is not None and progress is not None:
        raise ValueError("progress: the planner given has its own; give one or the other")
    limits = {"memory_limit": asked.memory_limit, "total_workspace": asked.total_workspace}
    for name, limit in limits.items():
        if limit is not None and schedule is not None:
            raise ValueError(f"{name}={limit!r}: a schedule has limits of its own; give one or the other")
    if memory_step is not None and asked.memory_limit is None:
        raise ValueError("memory_step: it is the step that memory_limit is of; give both")
    if asked.memory_limit is not None and asked.graphs != "never":
        raise ValueError(f"graphs={asked.graphs!r}: memory_limit is of a step without graphs; workspace would do")
    if asked.memory_limit is not None and several_ranks():
        raise ValueError(f"memory_limit={asked.memory_limit!r}: one process only; workspace would do for several ranks")


def plan_table_of(
    asked: Settings, budget: Budget | None, source: Source | None, planner: Planner | None, *, later: bool
) -> PlanTable:
    """The plan table of the model's plans, under the options of the schedule or, without one, of ``asked``.

    With ``later`` they are planned in the background. Raises ``ValueError`` for an option of ``asked`` that differs
    from the schedule's.
    """
    options = asked.options()
    if budget is not None:
        options = replace(options, workspace=budget.limit)
    table = LaterTable if later else PlanTable
    plan_table = table(options if source is None else source.options(options), asked.unplanned, planner)
    plan_table.supply = None if source is None else source.supply
    return plan_table


def step_planner_of(
    model: nn.Module,
    examples: list[Any],
    asked: Settings,
    memory_step: Callable[[Any], object] | None,
    modules: PlannedModules,
    weights: Weights,
) -> StepPlanner | None:
    """What chooses plans so that a step keeps ``asked.memory_limit``; ``None`` without a limit."""
    if asked.memory_limit is None:
        return None
    step = Step(model, examples, memory_step, training=asked.training)
    return StepPlanner(
        step,
        modules.candidates,
        modules.plan_table,
        modules.plan_tables,
        modules.install,
        memory_bytes(asked.memory_limit, step.device),
        weights,
    )


def install(
    model: nn.Module, planning: Planning, step_planner: StepPlanner | None, progress: Progress | None, silent: bool
) -> LiveGoal | None:
    """Let modules run by the plans that gain, or by plans with which a step keeps its memory limit.

    What is planned in the background begins here, and so does the comparison of the program's own steps after it, which
    is returned then.
    """
    modules, table = planning.modules, planning.modules.plan_table
    if isinstance(table, LaterTable):
        live = compare_live(modules, lambda: table.pending, planning.asked, None, silent)
        begin(model, modules, table, planning.asked, planning.deterministic, progress, live)
        return live
    if step_planner is None:
        modules.install({})
    else:
        modules.plan_table.facts["step_memory"] = step_planner.fit()
    return None


@dataclass(frozen=True)
class Planning:
    """The planning of one model's modules, by this process or by all ranks together.

    ``asked`` holds the options, ``deterministic`` is torch's own flag.
    """

    modules: PlannedModules
    examples: Sequence[object]
    asked: Settings
    budget: Budget | None
    source: Source | None
    deterministic: bool

    def record_and_plan(self) -> None:
        """Record the model's calls, divide the budget among them if there is one, and plan them into the plan table."""
        plan_table = self.modules.plan_table
        if several_ranks():
            plan_together(
                plan_table, self._record, self.deterministic, self._divide, f"{self.budget}, graphs={self.asked.graphs}"
            )
        else:
            problems = self._record()
            self._divide()
            if not isinstance(plan_table, LaterTable):
                options = {p: plan_table.constraints(p, self.deterministic) for p in problems}
                shown = isinstance(plan_table.planner.progress, Late)
                say_if_busy(plan_table.planner, {} if plan_table.supply else options, shown=shown)
                if not why_not_compared(self.asked, self.source):
                    leave_negligible(plan_table, problems, self.deterministic)
            plan_table.plan(problems, self.deterministic)
        plan_table.torch_times(self.modules.problems())

    def _record(self) -> list[Problem]:
        """Run the examples and return the model's problems. Raises ``ValueError`` where a schedule has none of them."""
        self.modules.record(self.examples)
        problems = self.modules.problems()
        if self.source is not None:
            self.source.require_any(problems, self.modules.model)
        return problems

    def _divide(self) -> None:
        """Divide the budget, if there is one, into limits of the single problems."""
        if self.budget is None:
            return
        names = self.modules.names()
        groups = at_once(self.modules.model, names) if self.asked.branches == "measured" else None
        self.modules.plan_table.divide(names, self.budget, self.deterministic, groups)

    def concluded(self, compare: Callable[[Decide | None], StepReport]) -> Report:
        """The report of the model, after whole steps were compared by ``compare`` and what is faster was kept.

        A step that is replayed from CUDA graphs waits for no host, so it is compared as it is replayed.
        """
        if self.asked.graphs == "never":
            compared = compare(None)
            return replace(self.report(), step=compared)
        made = self.report()
        model, facts = self.modules.model, self.modules.plan_table.facts
        graphs = graphs_of(model)
        compared = compare(None if graphs is None else functools.partial(compare_replayed, model, graphs, self.modules))
        if graphs is not None and not compared.kept:
            facts["graphs"] |= {"kept": False, "reason": "the step is not surely faster than it was"}
        return replace(made, layers=self.modules.report(), step=compared)

    def report(self) -> Report:
        """Set branches to run on streams and capture the model, each where that is faster, and return the report."""
        layers = self.modules.report()
        forks = branch_times.choose_branches(
            self.modules.model,
            self.examples,
            self.asked.branches,
            training=self.asked.training,
            workspaces=workspaces_of(layers),
            budget=None if self.budget is None else self.budget.total,
        )
        facts = self.modules.plan_table.facts
        if self.asked.graphs == "auto":
            facts["graphs"] = choose_graphs(self.modules.model, self.examples, training=self.asked.training)
            if several_ranks() and not all(gather(facts["graphs"]["kept"])) and facts["graphs"]["kept"]:
                ungraphed(self.modules.model)
                facts["graphs"] |= {"kept": False, "reason": "another rank runs without graphs"}
        return Report(layers, forks, facts)
