"""What planning commands do with a target: plan, explain and time it, showing progress."""

from __future__ import annotations

import copy
import itertools
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import click
from torch import nn

from tilewise import solvers
from tilewise.cli.program import BadInput
from tilewise.cli.settings import Asked
from tilewise.cli.target import Target
from tilewise.frontends.networks import Network
from tilewise.machine.device import device_name, environment
from tilewise.machine.torch_state import framework_flags
from tilewise.nn import optimize
from tilewise.nn import report as report_of
from tilewise.nn.budget import Budget, Divided, divide
from tilewise.nn.step.compare import why_not_compared
from tilewise.nn.step.pairs import LEAST_PAIRS, WARM
from tilewise.nn.step.result import StepReport
from tilewise.nn.step.search import NOTE
from tilewise.plan import Measurement, Plan
from tilewise.planner import NoPlanError, Options, Planner, Schedule
from tilewise.planner.caches.measurements import baselines
from tilewise.planner.caches.rates import known_rates
from tilewise.planner.planner import settle
from tilewise.planner.schedules.follow import entry_of, follow
from tilewise.planner.schedules.results import with_times
from tilewise.planner.schedules.schedule import with_tried
from tilewise.problems.base import Problem
from tilewise.report.layer_time import time_pass, time_runs
from tilewise.report.network_time import time_training_steps
from tilewise.report.progress import progress_bar
from tilewise.report.values import LayerResult, NetworkTime, PassResult, RunTimes
from tilewise.settings import Settings

COMPARED = 2 * (LEAST_PAIRS + WARM)
"""Steps that a comparison runs at least."""

__all__ = [
    "decide_by_step",
    "divide_target",
    "explain_target",
    "head",
    "plan_target",
    "schedule_of",
    "time_results",
    "time_training",
    "with_fronts",
    "with_runs",
]


def head(target: Target, settings: Asked, options: Options) -> dict[str, Any]:
    """What every document says first: for what and where it holds."""
    return _schedule(target, settings, options, ()).head


def _schedule(target: Target, settings: Asked, options: Options, layers: Sequence[LayerResult]) -> Schedule:
    """The schedule of ``layers`` for ``target``, planned under ``options``."""
    device = device_name(target.device)
    return Schedule(
        target.name,
        device,
        environment(device).key,
        options,
        batch=target.batch,
        dtype=settings.dtype,
        precision=target.precision,
        layout=settings.layout,
        layers=tuple(layers),
    )


def divide_target(target: Target, options: Options, planner: Planner, budget: Budget | None) -> Divided:
    """``budget`` divided among the layers and passes of ``target``; no limits where there is none.

    Raises ``ClickException`` (exit status 1) with the least budget that works.
    """
    if budget is None:
        return Divided({}, {"budget": None})
    names: dict[Problem, list[str]] = {}
    for layer in target.layers:
        for problem in layer.problems:
            names.setdefault(problem, []).extend(layer.names)
    before = planner.progress
    with progress_bar("searching", len(names)) as progress:
        planner.progress = lambda done, total, text: progress(text) if done < total else None
        try:
            return divide(planner, names, options, budget)
        except NoPlanError as error:
            raise click.ClickException(str(error)) from error
        finally:
            planner.progress = before


def schedule_of(
    target: Target,
    settings: Asked,
    options: Options,
    results: Sequence[LayerResult],
    planner: Planner,
    *,
    fronts: bool = False,
    candidates: bool = False,
) -> Schedule:
    """What was planned for ``target``, with the times that planning took; on request with what was tried."""
    times = baselines(planner.wisdom, (each.problem for result in results for each in result.passes))

    def timed(each: PassResult) -> PassResult:
        torchs = times.get(each.problem)
        return each if torchs is None else with_times(each, torchs.time_ms, torchs.host_ms)

    layers = [replace(result, passes=tuple(map(timed, result.passes))) for result in results]
    schedule = _schedule(target, settings, options, layers)
    rates = known_rates(planner.wisdom, schedule.environment, schedule.dtype, schedule.precision)
    schedule = replace(schedule, rates=rates)
    if not fronts and not candidates:
        return schedule
    with progress_bar("fronts" if fronts else "candidates", len(schedule.kernels)) as progress:

        def step(problem: Problem) -> None:
            progress(_progress_text(target, problem))

        return with_tried(schedule, planner, fronts=fronts, candidates=candidates, step=step)


def plan_target(
    target: Target,
    options: Options,
    planner: Planner,
    schedule: Schedule | None = None,
    limits: Mapping[Any, int] | None = None,
) -> list[LayerResult]:
    """Every layer of ``target`` with a plan for each pass, or the reason there is none; equal problems once.

    With ``schedule`` its plans, checked; one warning tells how many had to be planned anew, and why. Raises
    :class:`BadInput` where it has nothing for ``target``. ``limits`` are workspaces of single problems, in place of the
    options'.
    """
    limit_of = limits or {}
    problems = dict.fromkeys(problem for layer in target.layers for problem in layer.problems)
    if schedule is not None and problems and all(entry_of(schedule, problem) is None for problem in problems):
        made_with = (
            f"--batch {schedule.batch} --dtype {schedule.dtype} --layout {schedule.layout}, {schedule.precision}"
        )
        raise BadInput(f"--schedule: it has nothing for {target.name}; it was made for {schedule.target}, {made_with}")
    results: dict[Problem, PassResult] = {}
    notes: Counter[str] = Counter()
    with progress_bar("planning", len(problems)) as progress:
        begun: set[Problem] = set()

        def tell(problem: Problem) -> None:
            progress(_progress_text(target, problem))
            begun.add(problem)

        if schedule is None and not limit_of:
            planner.plan_ahead(list(problems), options, tell)
            planner.close()  # nothing else is to run beside what is measured next
        for problem in problems:
            if problem not in begun:
                tell(problem)
            within = replace(options, workspace=limit_of.get(problem, options.workspace))
            results[problem], note = _planned(problem, within, planner, schedule)
            notes.update([note] if note else [])
    settle(planner, problems)  # a step that is run next is one by the plans that are shown
    if notes:
        whys = "; ".join(f"{count}: {why}" for why, count in notes.most_common())
        warnings.warn(f"{notes.total()} of {len(problems)} passes were planned anew ({whys})", stacklevel=2)
    return [LayerResult(layer, tuple(results[problem] for problem in layer.problems)) for layer in target.layers]


def _planned(
    problem: Problem, options: Options, planner: Planner, schedule: Schedule | None = None
) -> tuple[PassResult, str]:
    """What came of ``problem``, and why a schedule's plan was not taken."""
    note = ""
    if schedule is not None:
        followed = follow(schedule, problem, options, planner)
        if followed.plan is not None:
            return PassResult(problem, followed.plan), ""
        note = followed.note.splitlines()[0]
        options = options if followed.limit is None else replace(options, workspace=followed.limit)
    try:
        return PassResult(problem, planner.plan(problem, options)), note
    except NoPlanError as error:
        return PassResult(problem, reason=str(error)), note


def explain_target(
    target: Target, options: Options, planner: Planner, every_config_of: Sequence[str] = ()
) -> tuple[LayerResult, list[Measurement]]:
    """The first problem of ``target`` with its plan, and everything that was tried on it."""
    layer = target.layers[0]
    problem = layer.problems[0]
    with progress_bar("explaining", 1 + len(every_config_of)) as progress:
        planner.progress = lambda done, total, text: progress(text)
        progress(_progress_text(target, problem))
        tried = planner.explain(problem, options, every_config_of=every_config_of)
        return LayerResult(layer, (_planned(problem, options, planner)[0],)), tried


def time_results(
    target: Target, results: list[LayerResult], deterministic: bool, iterations: int | None
) -> list[LayerResult]:
    """``results`` with both times of every distinct problem, taken in turns."""
    timed: dict[Problem, PassResult] = {}
    distinct = {each.problem: each for result in results for each in result.passes}
    with progress_bar("timing", len(distinct)) as progress:
        for problem, each in distinct.items():
            progress(_progress_text(target, problem))
            timed[problem] = time_pass(each, deterministic, iterations)
    return [replace(result, passes=tuple(timed[each.problem] for each in result.passes)) for result in results]


def with_runs(target: Target, results: list[LayerResult], deterministic: bool) -> list[LayerResult]:
    """``results`` with the times of runs of the plan of every distinct problem; ``None`` where there is no plan."""
    distinct = {each.problem: each for result in results for each in result.passes}
    times: dict[Problem, RunTimes | None] = {}
    with progress_bar("timing", len(distinct)) as progress:
        for problem, each in distinct.items():
            progress(_progress_text(target, problem))
            times[problem] = time_runs(each, deterministic)
    return [
        replace(one, passes=tuple(replace(each, runs=times[each.problem]) for each in one.passes)) for one in results
    ]


def with_fronts(
    target: Target,
    results: list[LayerResult],
    options: Options,
    planner: Planner,
    limits: Mapping[Any, int] | None = None,
) -> list[LayerResult]:
    """``results`` with the front of time and workspace of every distinct problem; empty where nothing keeps the limit.

    ``limits`` are workspaces of single problems, in place of the options'.
    """
    limit_of = limits or {}
    found: dict[Problem, tuple[Plan, ...]] = {}
    distinct = dict.fromkeys(each.problem for result in results for each in result.passes)
    with progress_bar("fronts", len(distinct)) as progress:
        for problem in distinct:
            progress(_progress_text(target, problem))
            within = replace(options, workspace=limit_of.get(problem, options.workspace))
            try:
                found[problem] = planner.front(problem, within)
            except NoPlanError:
                found[problem] = ()
    return [
        replace(one, passes=tuple(replace(each, front=found[each.problem]) for each in one.passes)) for one in results
    ]


def time_training(
    target: Target,
    options: Options,
    planner: Planner,
    iterations: int | None,
    schedule: Schedule | None = None,
    budget: Budget | None = None,
    goal: str = "step",
    trace: str | None = None,
) -> NetworkTime | None:
    """Whole training steps, plain and with the planner's plans or those of ``schedule``; ``None`` for a layer.

    With the ``goal`` "step" plans from which the step does not gain are taken back before. The time line of a planned
    step is written to the file ``trace``.
    """
    if target.network is None or target.inputs is None:
        return None
    asked: dict[str, Any] = {"goal": goal}
    total = asked if budget is None else {**asked, "total_workspace": budget.total, "policy": budget.policy}
    settings = replace(Settings.of(options), **total)
    flags = framework_flags(target.device.type, target.precision, deterministic=options.deterministic)
    with progress_bar("training steps", (COMPARED if goal == "step" else 0) + 2) as progress, flags:
        planned = _planned_module(target, target.network, settings, planner, schedule, progress)
        progress(f"{target.name}: steps in turns with torch's")
        module, loss = target.network.module, target.network.loss
        timed = time_training_steps(module, planned, target.inputs, loss, iterations)
        if trace is not None:
            inputs = target.inputs
            report_of(planned).trace(trace, step=lambda model: loss(model(inputs)).backward())
    if goal != "step":
        return timed
    return replace(timed, compared=report_of(planned).step, taken_back=_taken_back(planned))


def decide_by_step(
    target: Target, results: Sequence[LayerResult], options: Options, planner: Planner
) -> tuple[list[LayerResult], StepReport | None]:
    """``results`` with torch's own choice where a plan is faster by itself and the network's step is not.

    The report is ``None``, and nothing is run, where ``target`` is a layer or steps cannot be compared.
    """
    settings = Settings.of(options)
    if target.network is None or target.inputs is None or why_not_compared(settings, None):
        return list(results), None
    flags = framework_flags(target.device.type, target.precision, deterministic=options.deterministic)
    with progress_bar("training steps", COMPARED + 1) as progress, flags:
        planned = _planned_module(target, target.network, settings, planner, None, progress)
    back = _taken_back(planned)
    others = tuple(solver.name for solver in solvers.all_solvers() if not solver.baseline)
    by_torch = replace(options, exclude=others)

    def chosen(each: PassResult) -> PassResult:
        """The result of one pass as the network runs it."""
        return _planned(each.problem, by_torch, planner)[0] if each.problem in back else each

    return [replace(one, passes=tuple(map(chosen, one.passes))) for one in results], report_of(planned).step


def _planned_module(
    target: Target,
    network: Network,
    settings: Settings,
    planner: Planner,
    schedule: Schedule | None,
    progress: Callable[[str], object],
) -> nn.Module:
    """A copy of the network that runs by plans, chosen by its whole training step where ``settings`` say so."""
    run = itertools.count(1)

    def step(model: nn.Module) -> None:
        """One training step. Those beyond the least number, where passes are taken back, are of the last piece."""
        if next(run) <= COMPARED:
            progress(f"{target.name}: steps by torch and by plans")
        network.loss(model(target.inputs)).backward()
        model.zero_grad(set_to_none=True)

    progress(f"{target.name}: its layers by their plans")
    own_step = step if settings.goal == "step" else None
    module = copy.deepcopy(network.module)
    return optimize(module, target.inputs, settings=settings, planner=planner, schedule=schedule, step=own_step)


def _taken_back(planned: nn.Module) -> frozenset[Problem]:
    """The problems of a planned network that are torch's for the step's sake."""
    return frozenset(one.problem for _, _, one in report_of(planned).passes() if one.note == NOTE)


def _progress_text(target: Target, problem: Problem) -> str:
    """The words that the progress bar shows while ``problem`` is planned: its layer and its pass."""
    layer = next(layer for layer in target.layers if problem in layer.problems)
    return f"{layer.title} {problem.task}"
