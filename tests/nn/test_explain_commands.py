"""The commands that explain a layer of a model: each is about the very problem that was planned."""

from __future__ import annotations

import dataclasses
import shlex
from typing import Any

import pytest
import torch
from torch import nn

import tilewise
from tilewise.cli import explain
from tilewise.cli.settings import Asked
from tilewise.cli.target import text_target


def problem_of(line: str) -> Any:
    """The problem that a command line explains."""
    program, name, *words = shlex.split(line)
    assert (program, name) == ("tilewise", "explain")
    given = explain.command.make_context("explain", words).params
    settings = Asked(**{field.name: given[field.name] for field in dataclasses.fields(Asked)})
    found = text_target(given["layer"])
    assert found is not None
    (problem,) = found[0](given["layer"], settings, (given["pass_"],)).layers[0].problems
    return problem


def alike(problem: Any) -> Any:
    """``problem`` without the name of its filter's layout."""
    if not isinstance(problem, tilewise.ConvProblem):
        return problem
    x, _, y = problem.layouts
    return dataclasses.replace(problem, layouts=(x, x, y))


@pytest.mark.parametrize(
    ("dtype", "order"),
    [
        (torch.float32, torch.contiguous_format),
        (torch.float32, torch.channels_last),
        (torch.bfloat16, torch.contiguous_format),
    ],
)
def test_each_command_is_about_the_problem_that_was_planned(dtype: torch.dtype, order: torch.memory_format) -> None:
    convolutions = (nn.Conv2d(4, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 5, 1, 2, groups=8, bias=False), nn.Conv2d(8, 4, 1))
    model = nn.Sequential(*convolutions, nn.MaxPool2d(2), nn.Flatten(), nn.Linear(4 * 7 * 7, 3)).to(dtype)
    model = model.to(memory_format=order)
    images = torch.randn(2, 4, 16, 16, dtype=dtype).contiguous(memory_format=order)
    summary = tilewise.summary(tilewise.optimize(model, images, rigor="wisdom_only"))
    told = 0
    for layer in summary.layers:
        planned = [each.problem for each in layer.passes()]
        explained = [problem_of(line) for line in summary.explain_commands(layer.name)]
        # A filter with one channel to a group, or of one pixel, lies in memory as both orders say; its name may differ.
        assert [alike(each) for each in explained] == [alike(each) for each in planned]
        told += len(planned)
    assert told >= 9


def test_a_transposed_forward_is_explained_without_its_bias() -> None:
    model = tilewise.optimize(nn.ConvTranspose2d(8, 4, 2, 2), torch.randn(2, 8, 8, 8), rigor="wisdom_only")
    summary = tilewise.summary(model)
    forward = summary.layers[0].calls[0].passes[0].problem
    assert problem_of(summary.explain_commands("")[0]) == dataclasses.replace(forward, bias=False)


def test_a_name_that_no_layer_has_is_told() -> None:
    model = nn.Sequential(nn.Conv2d(4, 8, 3))
    model.add_module("conv2", nn.Conv2d(8, 8, 3))
    summary = tilewise.summary(tilewise.optimize(model, torch.randn(2, 4, 8, 8), rigor="wisdom_only"))
    with pytest.raises(ValueError, match=r"layer='conv3': no layer that was planned; 'conv2' would do"):
        summary.explain_commands("conv3")
