"""Inputs of other shapes than the examples': what is said while they are planned, and that reports have them."""

from __future__ import annotations

import logging

import pytest
import torch
from tests.nn.dividing import Dividing
from torch import nn

import tilewise
from tilewise.nn import report
from tilewise.nn.progress import Late


def network() -> nn.Module:
    return nn.Sequential(nn.Conv2d(2, 4, 3), nn.ReLU(), nn.Conv2d(4, 2, 3))


def images(batch: int) -> torch.Tensor:
    return torch.randn(batch, 2, 9, 9)


def optimized(**options: str) -> nn.Module:
    return tilewise.optimize(network(), images(3), planner=Dividing(), goal="passes", **options)


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [line for line in caplog.messages if line.startswith("planning for")]


def test_one_line_says_why_an_input_is_planned(caplog: pytest.LogCaptureFixture) -> None:
    model = optimized()
    with caplog.at_level(logging.INFO, "tilewise"):
        model(images(3)).sum().backward()
        assert said(caplog) == []
        model(images(5)).sum().backward()
        model(images(5)).sum().backward()
        with torch.no_grad():
            model(images(5))
            model(images(7))
    remedies = '(once; list it among the examples of optimize, or unplanned="torch" leaves it to torch)'
    assert said(caplog) == [
        f"planning for a new input of Conv2d 0: 5x2x9x9 {remedies}",
        f"planning for a new input of Conv2d 0: 7x2x9x9 {remedies}",
    ]


def test_a_report_has_the_shapes_that_were_met() -> None:
    model = optimized()
    numbers = report(model).numbers()
    model(images(5)).sum().backward()
    with torch.no_grad():
        model(images(5))
        model(images(7))
    first = report(model).layers[0]
    assert [(call.shape, call.met, len(call.passes)) for call in first.calls] == [
        ((3, 2, 9, 9), False, 2),
        ((5, 2, 9, 9), True, 2),
        ((7, 2, 9, 9), True, 1),
    ]
    assert all(one.plan is not None and one.replaced for one in first.passes())
    assert str(report(model)).count("(not among the examples)") == 2 + 3 + 1 + 1  # no gradient of the first input
    now = report(model).numbers()
    times = {name for name in now if name.endswith("_ms")}
    assert {name: now[name] for name in times} == {name: numbers[name] for name in times}


def test_what_is_left_to_torch_is_not_planned_but_named(caplog: pytest.LogCaptureFixture) -> None:
    model = optimized(unplanned="torch")
    with caplog.at_level(logging.INFO, "tilewise"):
        model(images(5)).sum().backward()
    assert said(caplog) == []
    met = report(model).layers[0].calls[1]
    assert met.met
    assert {one.reason for one in met.passes} == {"not planned for"}


def test_other_kinds_of_layers_are_reported_too() -> None:
    model = nn.Sequential(nn.Linear(8, 4), nn.Linear(4, 2))
    tilewise.optimize(model, torch.randn(3, 8), rigor="estimate", exclude=("aten_gemm",))
    model(torch.randn(6, 8)).sum().backward()
    assert [[call.shape for call in layer.calls] for layer in report(model).layers if layer.replaced] == [
        [(3, 8), (6, 8)],
        [(3, 4), (6, 4)],
    ]


def test_functions_are_planned_without_a_word(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "tilewise"):
        tilewise.nn.set_defaults(planner=Dividing())
        try:
            tilewise.conv2d(images(3), torch.randn(4, 2, 3, 3))
        finally:
            tilewise.nn.set_defaults()
    assert said(caplog) == []


def test_no_line_says_that_a_layer_of_a_new_input_begins(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tilewise.nn.progress.LATE_S", 0.0)
    late = Late()
    with late.planning(brief=True), late.planning():
        late(0, 1, "only")
        late(1, 1, "")
    assert capsys.readouterr().err == ""
    with late.planning():
        late(0, 1, "only")
        late(1, 1, "")
    assert capsys.readouterr().err.splitlines() == [
        "tilewise: planning 1 problem, a few seconds left",
        "tilewise: planned 1 problem in 0 s",
    ]
