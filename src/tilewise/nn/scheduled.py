"""A model run by a schedule, and the schedule of a model: the joint between books of plans and files of them."""

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
from tilewise.device import device_name, environment
from tilewise.nn.book import Book
from tilewise.nn.report import LayerReport, kept
from tilewise.planner import Options, Schedule, ScheduleError
from tilewise.planner.follow import ABSENT, entry_of, follow
from tilewise.planner.results import Layer, LayerResult, PassResult, with_times
from tilewise.planner.schedule import grouped, with_tried
from tilewise.problem import ConvProblem

__all__ = ["Source", "read_schedule", "schedule"]

Given = Schedule | str | os.PathLike[str] | None


def schedule(model: nn.Module, *, fronts: bool = False, candidates: bool = False) -> Schedule:
    """The schedule that :func:`tilewise.optimize` found for ``model``: every layer and pass with its plan.

    With ``candidates`` also what was tried and why it lost, with ``fronts`` the plans of each pass that need less
    workspace than every faster one; fronts measure what was not measured before.

    Raises ``ValueError`` for a model that was not optimized or whose layers are on several devices.
    """
    made, book, deterministic = kept(model)
    layers = [found for layer in made.layers for found in _results(layer)]
    problems = [problem for result in layers for problem in result.layer.problems]
    devices = {problem.device for problem in problems} or {device_name(_device(model))}
    if len(devices) > 1:
        raise ValueError(f"model: its layers are on {' and '.join(sorted(devices))}; a schedule is for one device")
    device = devices.pop()
    found = Schedule(
        type(model).__name__,
        device,
        environment(device).key,
        replace(book.options, deterministic=book.options.deterministic or deterministic),
        batch=max((problem.batch for problem in problems), default=1),
        dtype=_usual((problem.dtype for problem in problems), "fp32"),
        precision=_usual((problem.precision for problem in problems), "ieee"),
        layout=_usual((problem.layout("x") for problem in problems), "contiguous"),
        layers=grouped(layers),
        budget=book.facts.get("budget"),
        step=book.facts.get("step"),
    )
    return with_tried(found, book.planner, fronts=fronts, candidates=candidates) if fronts or candidates else found


def _results(layer: LayerReport) -> list[LayerResult]:
    """A module's calls as layers of their own, the first under the module's name."""
    if not layer.calls:
        return [LayerResult(Layer((layer.name,), (), "Transpose" in layer.kind, layer.reason), ())]
    results = []
    for index, call in enumerate(layer.calls):
        name = layer.name if not index else f"{layer.name} (call {index + 1})"
        passes = tuple(
            with_times(PassResult(one.problem, one.plan, one.reason if one.plan is None else ""), one.torch_ms)
            for one in call.passes
        )
        transposed = "Transpose" in layer.kind
        results.append(LayerResult(Layer((name,), tuple(p.problem for p in passes), transposed, layer.reason), passes))
    return results


def _usual(values: Iterable[str], default: str) -> str:
    """The value that occurs most."""
    return next((value for value, _ in Counter(values).most_common(1)), default)


def _device(model: nn.Module) -> torch.device:
    return next((parameter.device for parameter in model.parameters()), torch.device("cpu"))


def read_schedule(given: Given) -> Schedule | None:
    """The schedule that was given or that a file holds; with several ranks, which all call this, rank 0's.

    Raises ``OSError``, :class:`ScheduleError`, ``TypeError`` for anything else and :class:`RankMismatch` where ranks
    were given different ones.
    """
    if not isinstance(given, Schedule | str | os.PathLike | None):
        raise TypeError(f"schedule={given!r}: a tilewise.Schedule, or the path of a file that holds one, would do")
    if not several_ranks():
        return Schedule.load(given) if isinstance(given, str | os.PathLike) else given
    if isinstance(given, Schedule):
        agree(f"a schedule {given}", "the schedule that tilewise.optimize is to follow")
    else:
        agree("no schedule" if given is None else "a file", "the schedule that tilewise.optimize is to follow")
    return None if given is None else _shared(given)


def _shared(given: Schedule | str | os.PathLike[str]) -> Schedule:
    if torch.distributed.get_rank():
        data: Any = receive()
        if "error" in data:
            raise ScheduleError(f"rank 0 could not read the schedule: {data['error']}")
        return Schedule.from_json(data)
    try:
        found = given if isinstance(given, Schedule) else Schedule.load(given)
    except BaseException as error:
        send({"error": str(error) or type(error).__name__})
        raise
    send(found.to_json())
    return found


class Source:
    """Where a book's plans come from while it follows ``schedule``, and what came of that."""

    def __init__(self, schedule: Schedule, origin: Given) -> None:
        self.schedule = schedule
        self.name = repr(os.fspath(origin)) if isinstance(origin, str | os.PathLike) else f"of {schedule.target}"
        self.taken = 0

    def options(self, asked: Options) -> Options:
        """The schedule's options. Raises ``ValueError`` for one that was ``asked`` for besides and is another."""
        own, default = self.schedule.options, Options()
        for field in fields(Options):
            value, its = getattr(asked, field.name), getattr(own, field.name)
            if value not in (its, getattr(default, field.name)):
                raise ValueError(
                    f"{field.name}={value!r}: the schedule {self.name} was planned with {field.name}={its!r}; leave "
                    "it out, or plan without the schedule"
                )
        return own

    def require_any(self, problems: Sequence[ConvProblem], model: nn.Module) -> None:
        """Raise ``ValueError`` where the schedule has none of ``problems``: it is for something else."""
        if problems and all(entry_of(self.schedule, problem) is None for problem in problems):
            its = next(iter(self.schedule.kernels), None)
            raise ValueError(
                f"schedule {self.name} ({self.schedule.target}, batch {self.schedule.batch}) fits no layer of "
                f"{type(model).__name__} on this example: the model has {problems[0].key}, the schedule "
                f"{'no plans' if its is None else its.key}; plan without it, or with the inputs that it was made for"
            )

    def supply(self, book: Book, problems: list[ConvProblem], deterministic: bool) -> list[ConvProblem]:
        """Have ``book`` learn what the schedule has, checked; gives back what is to be planned, noted with why."""
        left = []
        progress = book.planner.progress
        for done, problem in enumerate(problems):
            if progress is not None:
                progress(done, len(problems), problem.key)
            found = follow(self.schedule, problem, book.constraints(problem, deterministic), book.planner)
            if found.limit is not None:
                book.limits[problem] = found.limit
            if found.framework_ms is not None:
                book.times[problem] = found.framework_ms
            if found.plan is not None:
                book.learn(problem, deterministic, found.plan)
                self.taken += 1
                continue
            book.notes[problem] = found.note
            if found.note == ABSENT and book.unplanned == "torch":
                book.refuse(problem, deterministic, ABSENT)
            else:
                left.append(problem)
        return left

    def conclude(self, book: Book, problems: Iterable[ConvProblem]) -> None:
        """Say once what was not taken from the schedule; what it tells of all its plans holds if everything was."""
        distinct = set(problems)
        notes = Counter(book.notes[problem].splitlines()[0] for problem in distinct if problem in book.notes)
        if not notes:
            facts = {"budget": self.schedule.budget, "step": self.schedule.step}
            book.facts.update({name: value for name, value in facts.items() if value is not None})
            return
        if several_ranks() and torch.distributed.get_rank():
            return
        whys = "; ".join(f"{count}: {why}" for why, count in notes.most_common())
        planned = "left to torch" if set(notes) == {ABSENT} and book.unplanned == "torch" else "planned anew"
        warnings.warn(
            f"schedule {self.name}: {notes.total()} of {len(distinct)} kernels were not taken from it and {planned} "
            f"({whys}); tilewise.nn.report(model) says which",
            UserWarning,
            stacklevel=3,
        )
