"""Planning a network for a whole training step under one limit of memory."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import click

from tilewise.cli.planning import decide_by_step, plan_target
from tilewise.cli.program import BadInput, bad_input, one_line
from tilewise.cli.target import Target, layers_of
from tilewise.machine.torch_state import framework_flags
from tilewise.nn import LargestBatch, Report, StepTooLarge, largest_batch, optimize, restore
from tilewise.nn import report as report_of
from tilewise.nn.budget import Divided
from tilewise.nn.memory.step_planner import memory_bytes
from tilewise.nn.step.result import StepReport
from tilewise.plan import Plan, format_bytes
from tilewise.planner import NoPlanError, Options, Planner
from tilewise.problems.base import Problem
from tilewise.report.progress import progress_bar
from tilewise.report.values import LayerResult, PassResult
from tilewise.settings import Settings

__all__ = ["Found", "plan_asked", "plan_step"]


@dataclass(frozen=True)
class Found:
    """Plans of a target. ``step`` and ``largest`` are those fields of the document, ``None`` where not asked for.

    ``compared`` says what became of the network's step, where passes were chosen by it.
    """

    target: Target
    results: list[LayerResult]
    step: dict[str, Any] | None = None
    largest: dict[str, Any] | None = None
    compared: StepReport | None = None


def plan_asked(
    target: Target,
    options: Options,
    planner: Planner,
    divided: Divided,
    memory_limit: str | None,
    passes: tuple[str, ...] | None,
    *,
    by_step: bool = False,
) -> Found:
    """Plan ``target`` by its layers, or within ``memory_limit`` as a whole step where that is given.

    With ``by_step`` a plan from which the whole step does not gain is torch's. ``divided`` has limits of single
    problems, and ``passes`` are those to tell of where the largest batch is asked for. Raises what :func:`plan_step`
    does.
    """
    if memory_limit is None:
        results = plan_target(target, options, planner, limits=divided.limits)
        if not by_step or any(each.plan is None for result in results for each in result.passes):
            return Found(target, results)
        chosen, compared = decide_by_step(target, results, options, planner)
        return Found(target, chosen, compared=compared)
    if passes is not None:  # inputs of another batch are not to count
        target = replace(target, inputs=None)
    return plan_step(target, options, planner, memory_limit, passes)


def plan_step(
    target: Target,
    options: Options,
    planner: Planner,
    memory_limit: str,
    passes: tuple[str, ...] | None,
) -> Found:
    """Plan ``target`` for its batch, or, where ``passes`` to tell of are given, for the largest that keeps the limit.

    torch's flags are those its own times are measured with. Raises :class:`BadInput` for a layer and for a limit that
    is none, ``click.ClickException`` where no schedule keeps the limit.
    """
    if target.network is None or target.make_inputs is None:
        raise BadInput(f"--memory-limit: it is of a network's step, and {target.name!r} is a layer; NET would do")
    with bad_input():
        limit = memory_bytes(memory_limit, target.device, "--memory-limit")
    settings = Settings.of(options)
    module, make_inputs = target.network.module, target.make_inputs
    fits: LargestBatch | None = None
    flags = framework_flags(target.device.type, target.precision, deterministic=options.deterministic)
    with progress_bar("planning a step", None) as progress, flags:
        progress(target.name)
        try:
            if passes is None:
                optimize(module, target.inputs, settings=settings, memory_limit=limit, planner=planner)
            else:
                fits = largest_batch(module, make_inputs, limit, settings=settings, planner=planner)
        except StepTooLarge as error:
            hint = "" if passes is not None else "; --max-batch finds the largest batch that fits"
            raise click.ClickException(
                f"--memory-limit {memory_limit}: a step of {target.name} needs {format_bytes(error.least)} at least "
                f"({error.least} bytes){hint}"
            ) from error
        except NoPlanError as error:
            raise click.ClickException(one_line(str(error))) from error
    made = report_of(module)
    step = dict(made.facts["step_memory"])
    if fits is None:
        return Found(target, _results(target, made), step)
    restore(module)  # what is swapped is no layer of torch's
    inputs = make_inputs(fits.batch)
    layers = layers_of(module, inputs, target.precision, passes or ())
    target = replace(target, batch=fits.batch, inputs=inputs, layers=layers)
    largest = {"batch": fits.batch, "step_ms": fits.step_ms, "image_ms": fits.image_ms}
    return Found(target, _results(target, made), step, largest)


def _results(target: Target, made: Report) -> list[LayerResult]:
    """The plans of each layer; equal ones with equal plans are one."""
    plans: dict[tuple[str, Problem], Plan | None] = {
        (layer.name, pass_report.problem): pass_report.plan for layer, _, pass_report in made.passes()
    }
    results = []
    for layer in target.layers:
        alike: dict[tuple[PassResult, ...], list[str]] = {}
        for name in layer.names:
            module = name.partition(" (call ")[0]
            passes = []
            for problem in layer.problems:
                plan = plans.get((module, problem))
                passes.append(PassResult(problem, plan, "" if plan is not None else "not planned in the step"))
            alike.setdefault(tuple(passes), []).append(name)
        results += [LayerResult(replace(layer, names=tuple(names)), passes) for passes, names in alike.items()]
    return results
