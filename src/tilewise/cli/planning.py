"""What planning commands do with a target: plan, explain and time it, showing progress."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import click

from tilewise.cli.settings import POLICIES, Settings
from tilewise.cli.target import Target
from tilewise.device import device_name, environment
from tilewise.nn import optimize
from tilewise.nn.budget import Budget, Divided, divide
from tilewise.plan import Measurement
from tilewise.planner import NoPlanError, Options, Planner
from tilewise.planner.measure import framework_flags
from tilewise.problem import ConvProblem
from tilewise.report.console import progress_bar
from tilewise.report.layer_time import time_pass
from tilewise.report.network_time import time_training_steps
from tilewise.report.values import LayerResult, NetworkTime, PassResult

__all__ = ["divide_target", "explain_target", "head", "plan_target", "time_results", "time_training"]


def head(target: Target, settings: Settings, options: Options) -> dict[str, Any]:
    """What every document says first: for what and where it holds."""
    device = device_name(target.device)
    return {
        "target": target.name,
        "device": device,
        "environment": environment(device).key,
        "options": {
            "batch": target.batch,
            "dtype": settings.dtype,
            "precision": target.precision,
            "layout": settings.layout,
            "workspace": options.workspace,
            "batch_sizes": options.batch_sizes,
            "rigor": options.rigor,
            "deterministic": options.deterministic,
        },
    }


def divide_target(target: Target, options: Options, planner: Planner, budget: Budget | None) -> Divided:
    """``budget`` divided among the layers and passes of ``target``; no limits where there is none.

    Raises ``ClickException`` (exit status 1) with the least budget that works.
    """
    if budget is None:
        return Divided({}, {"budget": None})
    names: dict[ConvProblem, list[str]] = {}
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


def plan_target(
    target: Target, options: Options, planner: Planner, limits: Mapping[ConvProblem, int] | None = None
) -> list[LayerResult]:
    """Every layer of ``target`` with a plan for each pass, or the reason there is none; equal problems once.

    ``limits`` are workspaces of single problems, in place of the options'.
    """
    own = limits or {}
    problems = dict.fromkeys(problem for layer in target.layers for problem in layer.problems)
    results: dict[ConvProblem, PassResult] = {}
    with progress_bar("planning", len(problems)) as progress:
        for problem in problems:
            progress(_progress_text(target, problem))
            within = replace(options, workspace=own.get(problem, options.workspace))
            results[problem] = _planned(problem, within, planner)
    return [LayerResult(layer, tuple(results[problem] for problem in layer.problems)) for layer in target.layers]


def _planned(problem: ConvProblem, options: Options, planner: Planner) -> PassResult:
    try:
        return PassResult(problem, planner.plan(problem, options))
    except NoPlanError as error:
        return PassResult(problem, reason=str(error))


def explain_target(target: Target, options: Options, planner: Planner) -> tuple[LayerResult, list[Measurement]]:
    """The first problem of ``target`` with its plan, and everything that was tried on it."""
    layer = target.layers[0]
    problem = layer.problems[0]
    with progress_bar("explaining", 1) as progress:
        progress(_progress_text(target, problem))
        tried = planner.explain(problem, options)
        return LayerResult(layer, (_planned(problem, options, planner),)), tried


def time_results(
    target: Target, results: list[LayerResult], deterministic: bool, iterations: int | None
) -> list[LayerResult]:
    """``results`` with both times of every distinct problem, taken in turns."""
    timed: dict[ConvProblem, PassResult] = {}
    distinct = {found.problem: found for result in results for found in result.passes}
    with progress_bar("timing", len(distinct)) as progress:
        for problem, found in distinct.items():
            progress(_progress_text(target, problem))
            timed[problem] = time_pass(found, deterministic, iterations)
    return [replace(result, passes=tuple(timed[found.problem] for found in result.passes)) for result in results]


def time_training(
    target: Target, options: Options, planner: Planner, iterations: int | None, budget: Budget | None = None
) -> NetworkTime | None:
    """Whole training steps, plain and with the planner's plans; ``None`` where the target is a layer."""
    if target.network is None or target.inputs is None:
        return None
    plain = target.network.module
    with progress_bar("training steps", None) as progress, framework_flags(target.precision, options.deterministic):
        progress(target.name)
        planned = optimize(
            copy.deepcopy(plain),
            target.inputs,
            workspace=options.workspace,
            total_workspace=None if budget is None else budget.total,
            policy=POLICIES[0] if budget is None else budget.policy,
            batch_sizes=options.batch_sizes,
            rigor=options.rigor,
            deterministic=options.deterministic,
            planner=planner,
        )
        return time_training_steps(plain, planned, target.inputs, target.network.loss, iterations)


def _progress_text(target: Target, problem: ConvProblem) -> str:
    layer = next(layer for layer in target.layers if problem in layer.problems)
    return f"{layer.title} {problem.pass_.value}"
