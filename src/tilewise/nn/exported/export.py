"""Writes a planned model to a file: its programs for some kinds of calls, with plans and filters, without code."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Unpack

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from tilewise.machine.device import environment
from tilewise.nn.arguments import check_model, examples_of, in_line, settings_of, takes, unwrapped
from tilewise.nn.example_errors import with_tensors
from tilewise.nn.exported import files
from tilewise.nn.exported.document import Writing
from tilewise.nn.exported.values import ExportError, encoded
from tilewise.nn.kept_values import tensors_in
from tilewise.nn.layers.weights import Weights
from tilewise.nn.optimize import plan_table_of
from tilewise.nn.programs.slots import Place
from tilewise.nn.record import arguments_of
from tilewise.nn.regions.choose import RegionPlanner, why_no_regions
from tilewise.nn.regions.forward import Ready
from tilewise.nn.regions.trace import Untraceable
from tilewise.nn.report import RegionReport
from tilewise.planner import Planner, Progress
from tilewise.settings import PlanOptions, Settings
from tilewise.version import VERSION

__all__ = ["ExportReport", "export"]


@dataclass(frozen=True)
class ExportReport:
    """What was exported: the file, its ``size`` in bytes, and for each example how its program was planned.

    A program that is not faster than torch is written all the same, since it needs no Python code of the model:
    ``regions`` says so.

    >>> import tempfile
    >>> path = tempfile.mkdtemp() + "/model.safetensors"
    >>> report = tilewise.export(torch.nn.Linear(4, 2).eval(), torch.randn(3, 4), path)
    >>> report.path.name, report.size > 0, len(report.regions)
    ('model.safetensors', True, 1)
    """

    path: Path
    size: int
    regions: tuple[RegionReport, ...]

    def __str__(self) -> str:
        return "\n".join((f"{self.path}: {self.size:,} bytes", *map(str, self.regions)))


@takes(PlanOptions)
def export(
    model: nn.Module,
    example_inputs: object,
    path: str | os.PathLike[str],
    *,
    settings: Settings | None = None,
    progress: Progress | None = None,
    planner: Planner | None = None,
    **options: Unpack[PlanOptions],
) -> ExportReport:
    """Plan ``model`` for inference on the CPU and write it to ``path``, for :func:`load_exported` to run elsewhere.

    The file holds one program for each example: operators, plans, and filters with folded norms. It holds no code, and
    nothing in it is pickled; its format is safetensors. Parameters are copied, so the model may change or vanish; it is
    left as it is. It must be in ``eval`` mode, and traceable as a whole (see "Inference" in the manual). Plans are for
    this kind of processor and torch's present number of threads. ``tilewise kernels build FILE`` packs their kernels.

    {arguments}
    - ``path``: the file, which is replaced where it exists.

    Options, each by keyword:

    {options}

    Raises ``ExportError`` (a ``ValueError``) where the model has no exact program as a whole, with the reason,
    ``ValueError`` naming the argument at fault, ``NoPlanError`` when no solver keeps the limits, and ``OSError``.

    >>> model, rows = torch.nn.Linear(4, 2).eval(), torch.randn(3, 4)
    >>> report = tilewise.export(model, rows, "model.safetensors")
    >>> tilewise.load_exported("model.safetensors")(rows).shape
    torch.Size([3, 2])
    """
    check_model(model)
    target = _checked_path(path)
    examples = with_tensors(examples_of(example_inputs))
    asked = settings_of("export", PlanOptions, settings, options)
    if planner is not None and progress is not None:
        raise ValueError("progress: the planner given has its own; give one or the other")
    reason = why_no_regions(asked, None, examples)
    if any(t.device.type != "cpu" for t in tensors_in(examples)):
        reason = "its inputs are not on the CPU"
    if reason:
        raise ExportError(f"the model cannot be exported: {reason}")
    planner = planner if progress is None else Planner(progress=progress)
    table = plan_table_of(asked, None, None, planner, later=False)
    regions = RegionPlanner(unwrapped(model), asked, table, Weights.FROZEN, None, torch.device("cpu"))
    writing = Writing()
    programs, reports = [], []
    for example in examples:
        ready, report = _program_of(regions, example)
        programs.append(_document(ready, example, writing))
        reports.append(report)
    fields = {
        "tilewise": VERSION,
        "torch": torch.__version__,
        "environment": str(environment("cpu")),
        "model": type(unwrapped(model)).__name__,
        "programs": programs,
    }
    return ExportReport(target, files.write(target, fields, writing.tensors), tuple(reports))


def _checked_path(path: object) -> Path:
    """Where to write. Raises ``ValueError`` for what is no path of a file."""
    if not isinstance(path, str | os.PathLike) or not str(path) or "\0" in str(path):
        raise ValueError(f"path={in_line(path)}: the path of a file would do")
    target = Path(path)
    if target.is_dir() or not target.absolute().parent.is_dir():
        raise ValueError(f"path={str(path)!r:.200}: a file in a folder that exists would do")
    return target.absolute()


def _program_of(regions: RegionPlanner, example: object) -> tuple[Ready, RegionReport]:
    """The program for one example. Raises :class:`ExportError` where there is none that is right."""
    args, kwargs = arguments_of(example)
    try:
        return regions.program_of(args, kwargs)
    except Untraceable as error:
        raise ExportError(f"the model cannot be exported: {error}") from error


def _document(ready: Ready, example: object, writing: Writing) -> dict[str, Any]:
    """A program with what its arguments and results look like."""
    traced = ready.traced
    leaves: Sequence[Any] = [Place(leaf) if is_tensor else leaf for is_tensor, leaf in traced.leaves]
    return {
        "arguments": encoded(list(_with_places(*arguments_of(example))), "example_inputs"),
        "results": encoded(tree_unflatten(list(leaves), traced.structure), "what the model returns"),
        "program": writing.program(ready.planning.program),
    }


def _with_places(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
    """Arguments with places of tensors, in the order in which a call's tensors come."""
    leaves, structure = tree_flatten((args, dict(kwargs)))
    count = 0
    for index, leaf in enumerate(leaves):
        if isinstance(leaf, torch.Tensor):
            leaves[index] = Place(count)
            count += 1
    found: tuple[Any, Any] = tree_unflatten(leaves, structure)
    return found
