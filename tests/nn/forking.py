"""Modules whose forward forks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from tilewise.frontends.zoo.googlenet import Inception
from tilewise.nn.branches.find import Program, program_of


def programmed(module: nn.Module) -> Program:
    program = program_of(module)
    assert program is not None
    return program


def inception(channels: int = 6) -> Inception:
    torch.manual_seed(0)
    return Inception(channels, (3, 2, 4, 2, 3, 2))


class Forms(nn.Module):
    def __init__(self, form: Callable[[Any, torch.Tensor], Any]) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Conv2d(4, 4, 3, padding=1) for _ in range(3))
        self.norm = nn.BatchNorm2d(4)
        self.scale = nn.Parameter(torch.rand(1))
        self.factor = 2.0
        self.calls = 0
        self._form = [form]

    def forward(self, x: torch.Tensor) -> Any:
        return self._form[0](self, x)


def counts(m: Any, x: torch.Tensor) -> Any:
    m.calls += 1
    return m.a(x) + m.b(x)
