"""Running a model by a schedule, and making the schedule of a model: from plan tables of plans to files and back."""

from __future__ import annotations

import os
import warnings
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import fields, replace
from typing import Any

import torch
from torch import nn

from tilewise.comm.agreement import agree, receive, send, several_ranks
from tilewise.machine.device import device_name, environment
from tilewise.nn.layers.plan_table import PlanTable
from tilewise.nn.report import LayerReport, kept
from tilewise.planner import Options, Schedule, ScheduleError
from tilewise.planner.caches.rates import known_rates
from tilewise.planner.schedules.follow import ABSENT, entry_of, follow
from tilewise.planner.schedules.results import Layer, LayerResult, PassResult, with_times
from tilewise.planner.schedules.schedule import grouped, with_tried
from tilewise.problems.base import Problem

__all__ = ["Source", "read_schedule", "schedule"]

Given = Schedule | str | os.PathLike[str] | None


def schedule(model: nn.Module, *, fronts: bool = False, candidates: bool = False) -> Schedule:
    """The schedule that :func:`tilewise.optimize` found for ``model``: every layer and pass with its plan.

    With ``candidates`` it also holds what was tried and why it lost. With ``fronts`` it holds the plans of each pass
    that need less workspace than every faster one, and measures those that were not measured before.

    Raises ``ValueError`` for a model that was not optimized or whose layers are on several devices.

    >>> model = tilewise.optimize(torch.nn.Conv2d(3, 8, 3), torch.randn(2, 3, 16, 16), rigor="estimate")
    >>> found = tilewise.schedule(model)
    >>> len(found.layers), found.batch, found.device
    (1, 2, 'cpu')
    """
    last_report, plan_table, deterministic = kept(model)
    layers = [made for layer in last_report.layers for made in _results(layer)]
    problems = [problem for result in layers for problem in result.layer.problems]
    devices = {problem.device for problem in problems} or {device_name(_device(model))}
    if len(devices) > 1:
        raise ValueError(f"model: its layers are on {' and '.join(sorted(devices))}; a schedule is for one device")
    device = devices.pop()
    made = Schedule(
        type(model).__name__,
        device,
        environment(device).key,
        replace(plan_table.options, deterministic=plan_table.options.deterministic or deterministic),
        batch=max((problem.batch_size for problem in problems), default=1),
        dtype=_usual((problem.dtype for problem in problems), "fp32"),
        precision=_usual((problem.precision for problem in problems), "ieee"),
        layout=_usual((problem.layout(problem.operands[0]) for problem in problems), "contiguous"),
        layers=grouped(layers),
        budget=plan_table.facts.get("budget"),
        step_memory=plan_table.facts.get("step_memory"),
    )
    made = replace(made, rates=known_rates(plan_table.planner.wisdom, made.environment, made.dtype, made.precision))
    return with_tried(made, plan_table.planner, fronts=fronts, candidates=candidates) if fronts or candidates else made


def _results(layer: LayerReport) -> list[LayerResult]:
    """One result for each call of a module; the first has the module's name, further ones also a number."""
    if not layer.calls:
        return [LayerResult(Layer((layer.name,), (), "Transpose" in layer.kind, layer.reason), ())]
    results = []
    for index, call in enumerate(layer.calls):
        name = layer.name if not index else f"{layer.name} (call {index + 1})"
        passes = tuple(
            with_times(
                PassResult(
                    pass_report.problem, pass_report.plan, pass_report.reason if pass_report.plan is None else ""
                ),
                pass_report.torch_ms,
                pass_report.torch_host_ms,
            )
            for pass_report in call.passes
        )
        transposed = "Transpose" in layer.kind
        results.append(LayerResult(Layer((name,), tuple(p.problem for p in passes), transposed, layer.reason), passes))
    return results


def _usual(values: Iterable[str], default: str) -> str:
    """The most frequent value, ``default`` where there is none."""
    return next((value for value, _ in Counter(values).most_common(1)), default)


def _device(model: nn.Module) -> torch.device:
    """The device of the model's first parameter, a CPU where it has none."""
    return next((parameter.device for parameter in model.parameters()), torch.device("cpu"))


def read_schedule(given: Given) -> Schedule | None:
    """The schedule that was given, or that the given file holds.

    With several ranks all must call this, and get the schedule of rank 0. Raises ``OSError``, :class:`ScheduleError`,
    ``TypeError`` for any other value, and :class:`RankMismatch` where ranks were given different ones.
    """
    if not isinstance(given, Schedule | str | os.PathLike | None):
        raise TypeError(f"schedule={given!r}: a tilewise.Schedule, or the path of a file that holds one, would do")
    if not several_ranks():
        return _loaded(given) if isinstance(given, str | os.PathLike) else given
    if isinstance(given, Schedule):
        agree(f"a schedule {given}", "the schedule that tilewise.optimize is to follow")
    else:
        agree("no schedule" if given is None else "a file", "the schedule that tilewise.optimize is to follow")
    return None if given is None else _broadcast(given)


def _loaded(path: str | os.PathLike[str]) -> Schedule:
    """The schedule in a file. Errors get a note that says which file would do."""
    try:
        return Schedule.load(path)
    except (OSError, ScheduleError) as error:
        would_do = "a file that tilewise.schedule(model).save(path) or tilewise plan --json wrote would do"
        error.add_note(f"schedule={os.fspath(path)!r:.200}: {would_do}")
        raise


def _broadcast(given: Schedule | str | os.PathLike[str]) -> Schedule:
    """The schedule of rank 0 on every rank, which all call this."""
    if torch.distributed.get_rank():
        data: Any = receive()
        if "error" in data:
            raise ScheduleError(f"rank 0 could not read the schedule: {data['error']}")
        return Schedule.from_json(data)
    try:
        schedule = given if isinstance(given, Schedule) else _loaded(given)
    except BaseException as error:
        send({"error": str(error) or type(error).__name__})
        raise
    send(schedule.to_json())
    return schedule


class Source:
    """A schedule as a source of plans for a plan table; ``taken`` counts the plans taken from it."""

    def __init__(self, schedule: Schedule, origin: Given) -> None:
        self.schedule = schedule
        self.name = repr(os.fspath(origin)) if isinstance(origin, str | os.PathLike) else f"of {schedule.target}"
        self.taken = 0

    @classmethod
    def of(cls, given: Given) -> Source | None:
        """The source for a given schedule or file, ``None`` without one. Raises what :func:`read_schedule` raises."""
        schedule = read_schedule(given)
        return None if schedule is None else cls(schedule, given)

    def options(self, asked: Options) -> Options:
        """The schedule's options. Raises ``ValueError`` where ``asked`` sets an option to another value."""
        planned, default = self.schedule.options, Options()
        for field in fields(Options):
            value, theirs = getattr(asked, field.name), getattr(planned, field.name)
            if value not in (theirs, getattr(default, field.name)):
                raise ValueError(
                    f"{field.name}={value!r}: the schedule {self.name} was planned with {field.name}={theirs!r}; leave "
                    "it out, or plan without the schedule"
                )
        return planned

    @property
    def kinds(self) -> set[str]:
        """The kinds of its problems, by the first word of their keys."""
        return {problem.kind for problem in self.schedule.kernels}

    def require_any(self, problems: Sequence[Problem], model: nn.Module) -> None:
        """Raise ``ValueError`` where the schedule has none of ``problems``: it is for another model or input."""
        if problems and all(entry_of(self.schedule, problem) is None for problem in problems):
            held = next(iter(self.schedule.kernels), None)
            raise ValueError(
                f"schedule {self.name} ({self.schedule.target}, batch {self.schedule.batch}) fits no layer of "
                f"{type(model).__name__} on this example: the model has {problems[0].key}, the schedule "
                f"{'no plans' if held is None else held.key}; plan without it, or with the inputs that it was made for"
            )

    def supply(self, plan_table: PlanTable, problems: list[Problem], deterministic: bool) -> list[Problem]:
        """Put the schedule's plans for ``problems`` into ``plan_table``, each after a check.

        Returns the problems that are still to be planned; the plan table notes why.
        """
        unplanned = []
        progress = plan_table.planner.progress
        for done, problem in enumerate(problems):
            if progress is not None:
                progress(done, len(problems), problem.key)
            followed = follow(
                self.schedule, problem, plan_table.constraints(problem, deterministic), plan_table.planner
            )
            if followed.limit is not None:
                plan_table.limits[problem] = followed.limit
            if followed.framework_ms is not None:
                plan_table.times[problem] = followed.framework_ms
            if followed.plan is not None:
                plan_table.learn(problem, deterministic, followed.plan)
                self.taken += 1
                continue
            plan_table.notes[problem] = followed.note
            if followed.note == ABSENT and plan_table.unplanned == "torch":
                plan_table.refuse(problem, deterministic, ABSENT)
            else:
                unplanned.append(problem)
        return unplanned

    def conclude(self, plan_table: PlanTable, problems: Iterable[Problem]) -> None:
        """Warn once of what was not taken from the schedule.

        Where all was taken, the schedule's budget and memory of a step go into the plan table's facts.
        """
        distinct = set(problems)
        notes = Counter(
            plan_table.notes[problem].splitlines()[0] for problem in distinct if problem in plan_table.notes
        )
        if not notes:
            facts = {"budget": self.schedule.budget, "step_memory": self.schedule.step_memory}
            plan_table.facts.update({name: value for name, value in facts.items() if value is not None})
            return
        if several_ranks() and torch.distributed.get_rank():
            return
        whys = "; ".join(f"{count}: {why}" for why, count in notes.most_common())
        planned = "left to torch" if set(notes) == {ABSENT} and plan_table.unplanned == "torch" else "planned anew"
        warnings.warn(
            f"schedule {self.name}: {notes.total()} of {len(distinct)} kernels were not taken from it and {planned} "
            f"({whys}); tilewise.summary(model) says which",
            UserWarning,
            stacklevel=4,
        )
