"""One line at the end of ``optimize`` says what it did; a warning says why nothing could be done."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from tests.nn.dividing import Dividing
from torch import nn

import tilewise
from tilewise.nn import NothingPlannedWarning
from tilewise.nn.conclusion import in_one_line
from tilewise.nn.report import RegionReport, Report
from tilewise.nn.step.result import StepReport

ROOT = Path(__file__).parents[2]


def images(**options: torch.dtype | str) -> torch.Tensor:
    """A batch for the networks here."""
    return torch.randn(3, 2, 8, 8, **options)  # type: ignore[call-overload,no-any-return]


def network() -> nn.Module:
    return nn.Sequential(nn.Conv2d(2, 4, 3), nn.ReLU(), nn.Conv2d(4, 2, 3))


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "tilewise"]


def test_one_line_says_what_was_done(caplog: pytest.LogCaptureFixture) -> None:
    model = network()
    with caplog.at_level(logging.INFO, "tilewise"):
        tilewise.optimize(model, images(), planner=Dividing(), goal="passes")
    assert lines(caplog) == [
        "planned 2 of 2 layers; step not compared (goal='passes'); tilewise.summary(model) tells more"
    ]
    assert in_one_line(tilewise.summary(model)) == lines(caplog)[0]


def test_it_is_shown_where_nobody_logs_and_nobody_else_shows_progress() -> None:
    program = """
import torch, tilewise
from tests.nn.dividing import Dividing
from torch import nn
import tilewise.nn.layers.plan_table as plan_table
model, x = nn.Conv2d(2, 4, 3), torch.randn(3, 2, 8, 8)
tilewise.optimize(model, x, planner=Dividing(), goal="passes")  # silent: the planner is the program's
plan_table.Planner = lambda progress: Dividing()
tilewise.optimize(model, x, goal="passes")
"""
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "src")])}
    done = subprocess.run([sys.executable, "-c", program], env=variables, capture_output=True, text=True, check=True)
    assert done.stderr.splitlines() == [
        "tilewise: planned 1 of 1 layers; step not compared (goal='passes'); tilewise.summary(model) tells more"
    ]


STEP = StepReport(torch_ms=20.0, planned_ms=16.0, speedup=1.25, least=1.2, most=1.3, pairs=20, way="eager")


@pytest.mark.parametrize(
    ("made", "line"),
    [
        (
            Report((), step=STEP),
            "planned 0 of 0 layers; step 20 -> 16 ms (1.25x in the median pair, 95 % between 1.20 and 1.30)",
        ),
        (
            Report((), step=StepReport(torch_ms=20.0, planned_ms=20.5, speedup=0.98, least=0.9, most=1.1, kept=False)),
            "planned 0 of 0 layers; step stays torch's at 20 ms, plans are not surely faster "
            "(0.98x in the median pair, 95 % between 0.90 and 1.10)",
        ),
        (
            Report((), step=StepReport(reason="nothing runs by plan")),
            "planned 0 of 0 layers: torch is as fast or faster",
        ),
        (
            Report((), regions=(RegionReport("", "Net", True, torch_ms=3.0, planned_ms=2.0, speedup=1.5),)),
            "the whole model runs as one region, 3 -> 2 ms (1.50x in the median pair)",
        ),
        (
            Report((), facts={"graphs": {"kept": True}}, step=STEP),
            "planned 0 of 0 layers; replayed from CUDA graphs; step 20 -> 16 ms "
            "(1.25x in the median pair, 95 % between 1.20 and 1.30)",
        ),
    ],
)
def test_every_outcome_has_a_line(made: Report, line: str) -> None:
    assert in_one_line(made) == f"{line}; tilewise.summary(model) tells more"


def double() -> tuple[nn.Module, torch.Tensor]:
    return network().double(), images(dtype=torch.float64)


def on_meta() -> tuple[nn.Module, torch.Tensor]:
    return network().to("meta"), images(device="meta")


def scripted() -> tuple[nn.Module, torch.Tensor]:
    return torch.jit.script(network()), images()


def linear() -> tuple[nn.Module, torch.Tensor]:
    return nn.Sequential(nn.Linear(8, 4), nn.ReLU(), nn.Linear(4, 2)), torch.randn(3, 8)


@pytest.mark.parametrize(
    ("model", "x", "options", "reason"),
    [
        (*double(), {}, "Conv2d (2): computes in torch.float64: one of torch.float32, torch.bfloat16, torch.float16"),
        (*on_meta(), {}, "Conv2d (2): called on the device meta: a CPU, or a GPU of CUDA, would do"),
        (network(), images()[:0], {}, "Conv2d (1): called with an empty tensor of shape (0, 2, 8, 8)"),
        (*linear(), {"workspace": "1MiB"}, "Linear (2): is planned without memory limits alone"),
        (linear()[0].double(), linear()[1].double(), {}, "Linear (2): computes in torch.float64: one of"),
        (nn.GRU(4, 3).double(), torch.randn(2, 1, 4).double(), {}, "GRU (1): computes in torch.float64: one of"),
        (nn.ReLU(), images(), {}, "it has none of the layers that tilewise plans (convolutions"),
        (network(), images(), {"filter_fn": lambda *_: False}, "Conv2d (2): left out by filter_fn"),
    ],
)
@pytest.mark.parametrize("training", [True, False])
def test_a_model_for_which_nothing_can_be_done(
    model: nn.Module, x: torch.Tensor, options: dict[str, object], reason: str, training: bool
) -> None:
    with pytest.warns(NothingPlannedWarning) as caught:
        tilewise.optimize(model, x, planner=Dividing(), training=training, **options)  # type: ignore[arg-type]
    (one,) = caught
    assert one.filename == __file__
    assert str(one.message).startswith(f"tilewise: nothing was planned in this {type(model).__name__}: ")
    assert reason in str(one.message)
    assert "\n" not in str(one.message)
    tilewise.summary(model)


def test_a_scripted_model() -> None:
    model, x = scripted()
    with pytest.warns(
        NothingPlannedWarning, match=r"it is scripted by torch.jit, .*: the model before scripting would"
    ):
        tilewise.optimize(model, x, planner=Dividing())


def test_a_warning_can_be_silenced_and_made_an_error() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("ignore", NothingPlannedWarning)
        tilewise.optimize(nn.ReLU(), images(), planner=Dividing())
    assert not caught
    with warnings.catch_warnings():
        warnings.simplefilter("error", NothingPlannedWarning)
        with pytest.raises(NothingPlannedWarning):
            tilewise.optimize(nn.ReLU(), images(), planner=Dividing())


def test_summary_is_the_report() -> None:
    model = network()
    with pytest.raises(ValueError, match=r"model=Sequential: tilewise.optimize has not been called on it"):
        tilewise.summary(model)
    with pytest.raises(ValueError, match=r"model=5: a torch.nn.Module would do"):
        tilewise.summary(5)  # type: ignore[arg-type]
    tilewise.optimize(model, images(), planner=Dividing())
    assert tilewise.summary(model) == tilewise.nn.report(model)
    assert str(tilewise.summary(model)).startswith("layer")
