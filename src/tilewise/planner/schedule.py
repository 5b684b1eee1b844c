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
from tilewise.planner.results import Layer, LayerResult, PassResult, Summary, summarize
from tilewise.planner.results_json import document, head_json, layers_json, summary_json
from tilewise.planner.schedule_reader import ScheduleError, read_fields, read_file
from tilewise.problem import ConvProblem
from tilewise.wisdom.document import write

__all__ = ["Schedule", "ScheduleError", "grouped", "with_tried"]


@dataclass(frozen=True)
class Schedule:
    """What was planned for a network, and for where.

    ``target`` is the network as given; ``device`` and ``environment`` say where the plans were found, ``options`` under
    which constraints. ``batch``, ``dtype``, ``precision`` and ``layout`` describe the inputs. ``layers`` are in the
    order they first run, equal ones once. ``budget`` says how one budget was divided among the kernels, ``step`` what
    memory a training step takes, ``largest_batch`` which is the largest that keeps to it, all as ``docs/json.md``
    describes them; ``None`` where nobody asked.
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
    step: dict[str, Any] | None = None
    largest_batch: dict[str, Any] | None = None

    @cached_property
    def kernels(self) -> dict[ConvProblem, PassResult]:
        """What came of each distinct problem: of several, as a limit of a whole step has, that in least workspace."""
        found: dict[ConvProblem, PassResult] = {}
        for result in self.layers:
            for one in result.passes:
                kept = found.get(one.problem, one)
                less = kept.plan is not None and one.plan is not None and one.plan.workspace < kept.plan.workspace
                found[one.problem] = one if less else kept
        return found

    @property
    def summary(self) -> Summary:
        """All layer-passes together."""
        return summarize(self.layers)

    @property
    def head(self) -> dict[str, Any]:
        """For what and where it holds, as every planning document says first."""
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
            step=self.step,
            largest_batch=self.largest_batch,
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
    """Equal layers of which the same came as one, under all their names, where the first of them stood."""
    found: list[LayerResult] = []
    places: dict[object, int] = {}
    for result in results:
        layer = result.layer
        key = (layer.problems, layer.transposed, layer.left, tuple((p.plan, p.reason) for p in result.passes))
        place = places.setdefault(key, len(found))
        if place == len(found):
            found.append(result)
        else:
            names = (*found[place].layer.names, *layer.names)
            found[place] = replace(found[place], layer=Layer(names, layer.problems, layer.transposed, layer.left))
    return tuple(found)


def with_tried(
    schedule: Schedule,
    planner: Planner,
    *,
    fronts: bool = False,
    candidates: bool = False,
    step: Callable[[ConvProblem], None] = lambda problem: None,
) -> Schedule:
    """``schedule`` with what was tried: ``candidates`` from wisdom alone, ``fronts`` measured where they are not known.

    ``step`` is called with each problem before it is worked on.
    """
    told: dict[ConvProblem, PassResult] = {}
    for problem, found in schedule.kernels.items():
        step(problem)
        if fronts:
            try:
                found = replace(found, front=planner.front(problem, schedule.options))
            except NoPlanError:
                found = replace(found, front=())
        if candidates:
            known = replace(schedule.options, rigor="wisdom_only")
            found = replace(found, candidates=tuple(planner.explain(problem, known)))
        told[problem] = found
    layers = tuple(
        replace(
            result,
            passes=tuple(
                replace(p, front=told[p.problem].front, candidates=told[p.problem].candidates) for p in result.passes
            ),
        )
        for result in schedule.layers
    )
    return replace(schedule, layers=layers)
