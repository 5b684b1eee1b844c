"""A report's numbers, and what TensorBoard reads of them."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.nn.dividing import Dividing
from torch import nn

import tilewise
from tilewise.nn import Report


def report() -> Report:
    """The report of a model with one planned layer that is called twice, and one left to torch."""
    layer = nn.Conv2d(2, 2, 3, padding=1)
    model = nn.Sequential(layer, layer, nn.Conv2d(2, 2, 1))
    tilewise.optimize(model, torch.randn(3, 2, 8, 8), planner=Dividing(), goal="passes", training=False)
    return tilewise.summary(model)


def test_numbers_are_finite_and_of_every_layer() -> None:
    numbers = report().numbers()
    assert (numbers["layers"], numbers["layers_by_plan"]) == (2, 2)
    assert {"0/forward/runs_ms", "2/forward/runs_ms"} <= set(numbers)
    assert all(math.isfinite(value) for value in numbers.values())
    assert not any(name.startswith("step/") for name in numbers)  # it was not compared
    assert Report(()).numbers() == {"layers": 0, "layers_by_plan": 0, "workspace_bytes": 0}


def test_tensorboard_reads_them(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.tensorboard import SummaryWriter

    made = report()
    with SummaryWriter(str(tmp_path)) as writer:
        made.to_tensorboard(writer, 7)
    read = EventAccumulator(str(tmp_path)).Reload()
    numbers = made.numbers()
    assert set(read.Tags()["scalars"]) == {f"tilewise/{name}" for name in numbers}
    for name, value in numbers.items():
        (event,) = read.Scalars(f"tilewise/{name}")
        assert (event.step, event.value) == (7, pytest.approx(value))
    (text,) = read.Tensors("tilewise/report/text_summary")
    assert str(made).splitlines()[0] in text.tensor_proto.string_val[0].decode()


class Writer:
    """What is written, without TensorBoard."""

    def __init__(self) -> None:
        self.scalars: dict[str, tuple[float, int]] = {}
        self.texts: dict[str, str] = {}

    def add_scalar(self, tag: str, value: float, global_step: int) -> None:
        self.scalars[tag] = value, global_step

    def add_text(self, tag: str, text: str, global_step: int) -> None:
        self.texts[tag] = text


def test_any_writer_of_that_kind_will_do() -> None:
    made, writer = report(), Writer()
    made.to_tensorboard(writer)
    assert writer.scalars == {f"tilewise/{name}": (value, 0) for name, value in made.numbers().items()}
    assert [line.removeprefix("    ") for line in writer.texts["tilewise/report"].splitlines()] == str(
        made
    ).splitlines()


@pytest.mark.parametrize(
    ("writer", "global_step", "said"),
    [
        (None, 0, "writer=None: a torch.utils.tensorboard.SummaryWriter would do"),
        (Writer, 0, "writer=<class"),
        ("runs", 0, "writer='runs': a torch"),
        (Writer(), -1, "global_step=-1: a whole number from 0 on would do"),
        (Writer(), 1.5, "global_step=1.5: a whole number"),
        (Writer(), True, "global_step=True: a whole number"),
    ],
)
def test_other_arguments_are_refused(writer: Any, global_step: Any, said: str) -> None:
    with pytest.raises(ValueError, match=r"writer=|global_step=") as caught:
        Report(()).to_tensorboard(writer, global_step)
    assert said in str(caught.value)
