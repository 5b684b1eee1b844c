"""A schedule: a plan for every layer and pass of a network, as a value and as a file."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from tilewise.planner.options import NoPlanError, Options
from tilewise.planner.planner import Planner
from tilewise.planner.schedules.reader import ScheduleError, read_fields, read_file
from tilewise.planner.schedules.results import Layer, LayerResult, PassResult, Summary, summarize
from tilewise.planner.schedules.results_json import document, head_json, layers_json, summary_json
from tilewise.problems.base import Problem
from tilewise.wisdom.document import write

__all__ = ["Schedule", "ScheduleError", "grouped", "with_tried"]


@dataclass(frozen=True)
class Schedule:
    """The plans of a network, and the device and options that they were made for.

    ``target`` is the network as given; ``device`` and ``environment`` say where the plans were found, ``options`` under
    which constraints. ``batch``, ``dtype``, ``precision`` and ``layout`` describe the inputs. ``layers`` are in the
    order they first run, equal ones once. ``budget`` says how one budget was divided among the kernels, ``step_memory``
    what memory a training step takes, ``largest_batch`` which is the largest that keeps to it, all as
    ``docs/json.md`` describes them; ``None`` where nobody asked. ``rates`` is what the device was measured to reach,
    ``None`` where that is not known.

    >>> model = tilewise.optimize(torch.nn.Conv2d(3, 8, 3), torch.randn(2, 3, 16, 16), rigor="estimate")
    >>> import tempfile
    >>> path = tempfile.mkdtemp() + "/schedule.json"
    >>> tilewise.schedule(model).save(path)
    >>> tilewise.Schedule.load(path).batch
    2
    """

    target: str
    device: str
    environment: str
    options: Options
    batch: int
    dtype: str
    precision: str
    layout: str
    layers: tuple[LayerResult, ...]
    budget: dict[str, Any] | None = None
    step_memory: dict[str, Any] | None = None
    largest_batch: dict[str, Any] | None = None
    rates: dict[str, Any] | None = None

    @cached_property
    def kernels(self) -> dict[Problem, PassResult]:
        """The result for each distinct problem; of several, as a step's limit gives, the one with least workspace."""
        by_problem: dict[Problem, PassResult] = {}
        for result in self.layers:
            for pass_result in result.passes:
                known = by_problem.get(pass_result.problem, pass_result)
                takes_less = (
                    known.plan is not None
                    and pass_result.plan is not None
                    and pass_result.plan.workspace < known.plan.workspace
                )
                by_problem[pass_result.problem] = pass_result if takes_less else known
        return by_problem

    @property
    def summary(self) -> Summary:
        """Times, counts and sizes of all layer-passes together."""
        return summarize(self.layers)

    @property
    def head(self) -> dict[str, Any]:
        """The fields at the head of the schedule's document."""
        return head_json(
            self.target,
            self.device,
            self.environment,
            self.options,
            batch=self.batch,
            dtype=self.dtype,
            precision=self.precision,
            layout=self.layout,
        )

    def to_json(self) -> dict[str, Any]:
        """The ``tilewise/plan`` document; :meth:`from_json` reads it back."""
        return document(
            "plan",
            **self.head,
            layers=layers_json(self.layers),
            summary=summary_json(self.summary),
            budget=self.budget,
            step_memory=self.step_memory,
            largest_batch=self.largest_batch,
            rates=self.rates,
        )

    @classmethod
    def from_json(cls, data: object) -> Schedule:
        """Read a document of :meth:`to_json`, whoever wrote it; fields that it does not know are left out.

        Raises :class:`ScheduleError` naming the field at fault, its value and what would do.
        """
        return cls(**read_fields(data))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the document: ``path`` holds what it held before, or all of it. Raises ``OSError``."""
        write(Path(path), self.to_json())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Schedule:
        """Read what :meth:`save` or ``tilewise plan --json`` wrote.

        Nothing of it is run: :func:`tilewise.optimize` checks every plan before it uses it. Raises ``OSError``, and
        :class:`ScheduleError` naming the file, the field at fault, its value and what would do.
        """
        data = read_file(Path(path))
        try:
            return cls.from_json(data)
        except ScheduleError as error:
            raise ScheduleError(f"{path}: {error}") from error


def grouped(results: Iterable[LayerResult]) -> tuple[LayerResult, ...]:
    """``results`` with equal layers of equal results joined under all their names, in the place of the first."""
    joined: list[LayerResult] = []
    places: dict[object, int] = {}
    for result in results:
        layer = result.layer
        key = (layer.problems, layer.transposed, layer.left, tuple((p.plan, p.reason) for p in result.passes))
        place = places.setdefault(key, len(joined))
        if place == len(joined):
            joined.append(result)
        else:
            names = (*joined[place].layer.names, *layer.names)
            joined[place] = replace(joined[place], layer=Layer(names, layer.problems, layer.transposed, layer.left))
    return tuple(joined)


def with_tried(
    schedule: Schedule,
    planner: Planner,
    *,
    fronts: bool = False,
    candidates: bool = False,
    step: Callable[[Problem], None] = lambda problem: None,
) -> Schedule:
    """``schedule`` with what was tried: ``candidates`` from wisdom alone, ``fronts`` measured where unknown.

    ``step`` is called with each problem before it is worked on.
    """
    with_results: dict[Problem, PassResult] = {}
    for problem, pass_result in schedule.kernels.items():
        step(problem)
        if fronts:
            try:
                pass_result = replace(pass_result, front=planner.front(problem, schedule.options))
            except NoPlanError:
                pass_result = replace(pass_result, front=())
        if candidates:
            known = replace(schedule.options, rigor="wisdom_only")
            pass_result = replace(pass_result, candidates=tuple(planner.explain(problem, known)))
        with_results[problem] = pass_result
    layers = tuple(
        replace(
            result,
            passes=tuple(
                replace(p, front=with_results[p.problem].front, candidates=with_results[p.problem].candidates)
                for p in result.passes
            ),
        )
        for result in schedule.layers
    )
    return replace(schedule, layers=layers)
