"""The types that users see: checked by mypy with the rest of the tree, and against a built wheel. Nothing here is run.

``assert_type`` holds a result to its exact type. A call that must be refused has ``type: ignore``: mypy reports one
that silences nothing, so a call that it stops refusing is an error as well.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, assert_type

import torch
from torch import nn

import tilewise
from tilewise import (
    ConvProblem,
    GemmProblem,
    NoPlanError,
    Options,
    Pass,
    Plan,
    Planner,
    RecurrentProblem,
    Schedule,
    ScheduleError,
    Settings,
    Wisdom,
)
from tilewise.axis import Axis
from tilewise.distributed import SpatialParallel
from tilewise.nn import Exported, ExportReport, LargestBatch, Report, Session, SharedModel
from tilewise.plan import Measurement


class Net(nn.Module):
    """A model of one's own: its class must come back from whatever returns a model."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """One convolution."""
        result: torch.Tensor = self.conv(x)
        return result


def models(images: torch.Tensor, path: Path) -> None:
    """What takes a model and gives it back keeps its class."""
    assert_type(tilewise.optimize(Net(), images), Net)
    assert_type(tilewise.optimize(Net(), (images,), workspace="64MiB", training=False, frozen=True), Net)
    assert_type(tilewise.optimize(Net(), {"x": images}, workspace=2**20, schedule=path), Net)
    assert_type(tilewise.optimize(Net(), images, settings=Settings(workspace="1MiB"), step=one_step), Net)
    assert_type(tilewise.restore(Net()), Net)
    assert_type(tilewise.graphed(Net(), images), Net)
    assert_type(tilewise.nn.report(Net()), Report)
    assert_type(tilewise.summary(Net()), Report)
    assert_type(tilewise.summary(Net()).trace("step.json"), Path)
    assert_type(tilewise.summary(Net()).explain_commands("0"), tuple[str, ...])
    assert_type(tilewise.schedule(Net()), Schedule)
    assert_type(tilewise.export(Net(), images, path), ExportReport)
    assert_type(tilewise.load_exported(path), Exported)
    assert_type(tilewise.shared(Net(), devices=["cpu"]), SharedModel)
    assert_type(tilewise.largest_batch(Net(), inputs_of, "1GiB"), LargestBatch)

    tilewise.optimize(Net(), images, workspce="64MiB")  # type: ignore[call-arg]
    tilewise.optimize(Net(), images, workspace=6.4)  # type: ignore[arg-type]
    tilewise.optimize(Net())  # type: ignore[call-arg]
    tilewise.optimize("resnet50", images)  # type: ignore[type-var]
    tilewise.restore(images)  # type: ignore[type-var]


def one_step(model: Net) -> torch.Tensor:
    """A step as ``optimize`` times it."""
    return model(torch.zeros(1, 3, 8, 8, dtype=torch.float32, device="cpu")).sum()  # type: ignore[no-any-return]


def inputs_of(batch: int) -> torch.Tensor:
    """Inputs of so many images."""
    return torch.zeros(batch, 3, 8, 8, dtype=torch.float32, device="cpu")


def functions(x: torch.Tensor, w: torch.Tensor) -> None:
    """Functions give tensors."""
    assert_type(tilewise.conv1d(x, w), torch.Tensor)
    assert_type(tilewise.conv2d(x, w, None, stride=2, padding="same"), torch.Tensor)
    assert_type(tilewise.conv3d(x, w), torch.Tensor)
    assert_type(tilewise.conv_transpose1d(x, w), torch.Tensor)
    assert_type(tilewise.conv_transpose2d(x, w), torch.Tensor)
    assert_type(tilewise.conv_transpose3d(x, w), torch.Tensor)
    assert_type(tilewise.linear(x, w, activation="relu"), torch.Tensor)
    assert_type(tilewise.fft.rfft2(x, (32, 32)), torch.Tensor)
    assert_type(tilewise.fft.irfft(x, 16), torch.Tensor)
    assert_type(tilewise.fft.next_size(20), int)
    assert_type(tilewise.fft.unsupported("cpu", 16), list[str])

    tilewise.linear(x)  # type: ignore[call-arg]
    tilewise.fft.next_size("20")  # type: ignore[arg-type]


def problems() -> None:
    """Problems are values that planners take, and plans are values that they give."""
    conv = ConvProblem(Pass.FPROP, 8, 3, 16, (Axis(32, 3), Axis(32, 3)), dtype="bf16")
    planner = Planner()
    options = Options(workspace=2**20, rigor="measure")
    assert_type(conv.key, str)
    assert_type(planner.plan(conv), Plan)
    assert_type(planner.plan_many([conv], options), dict[ConvProblem, Plan])
    assert_type(planner.front(conv, options), tuple[Plan, ...])
    assert_type(planner.explain(conv), list[Measurement])
    assert_type(GemmProblem.from_key("").key, str)
    assert_type(RecurrentProblem.from_key("").key, str)

    planner.plan("mb8ic3ih32oc16kh3")  # type: ignore[arg-type]
    Options(workspac=1)  # type: ignore[call-arg]


def plans(plan: Plan) -> None:
    """A plan's numbers, parts and documents."""
    assert_type(plan.time_ms, float)
    assert_type(plan.host_ms, float | None)
    assert_type(plan.workspace, int)
    assert_type(plan.children, tuple[Plan, ...])
    assert_type(plan.leaves(), Iterator[Plan])
    assert_type(plan.to_json(), dict[str, Any])
    assert_type(Plan.from_json({}), Plan)

    plan.time_ms = 1.0  # type: ignore[misc]


def schedules(path: Path) -> None:
    """A schedule as a file, and what reading one may raise."""
    try:
        schedule = Schedule.load(path)
    except ScheduleError as error:
        assert_type(error.args, tuple[Any, ...])
        return
    assert_type(schedule.save("schedule.json"), None)
    assert_type(schedule.batch, int)
    assert_type(Schedule.from_json(schedule.to_json()), Schedule)


def wisdom(path: Path) -> None:
    """What was measured, by environment and problem."""
    kept = Wisdom(path)
    assert_type(kept.plan("environment", "problem", "constraints"), Plan | None)
    assert_type(kept.measurements("environment", "problem"), list[Measurement])


def errors() -> None:
    """Errors are of the classes that Python's own handlers expect."""
    refused: type[ValueError] = ScheduleError
    none: type[Exception] = NoPlanError
    assert_type((refused, none), tuple[type[ValueError], type[Exception]])


def programs(model: nn.Module) -> None:
    """Scripts that stay as they are, and images that are split over ranks."""
    assert_type(tilewise.enable(), Session)
    with tilewise.enabled(workspace="64MiB") as session:
        assert_type(session, Session)
        assert_type(session.report(), Report)
    assert_type(tilewise.disable(), None)
    assert_type(tilewise.__version__, str)
    split: type[nn.Module] = SpatialParallel
    assert_type(split, type[nn.Module])
