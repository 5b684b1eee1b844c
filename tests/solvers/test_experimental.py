"""What has not run on every kind of device is offered only when asked for."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
import torch

from tilewise.axis import Axis
from tilewise.device import EXPERIMENTAL, experimental
from tilewise.plan import Config
from tilewise.problem import ConvProblem, Pass
from tilewise.solvers import Cost, Run, Solver


class Untried(Solver):
    """A solver that says of itself that it is experimental."""

    name, version, experimental = "untried", 1, frozenset({"cpu"})

    def unsupported(self, p: ConvProblem) -> list[str]:
        return []

    def configs(self, p: ConvProblem) -> Iterable[Config]:
        return [Config()]

    def cost(self, p: ConvProblem, c: Config) -> Cost:
        return Cost(p.flops, p.bytes)

    def bind(self, p: ConvProblem, c: Config, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None) -> Run:
        raise NotImplementedError


@pytest.mark.parametrize(("value", "asked"), [(None, False), ("", False), ("0", False), ("1", True)])
def test_experimental_solvers_wait_to_be_asked_for(
    value: str | None, asked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(EXPERIMENTAL)
    if value is not None:
        monkeypatch.setenv(EXPERIMENTAL, value)
    problem = ConvProblem(Pass.FPROP, 2, 3, 4, (Axis(10, 3),))
    assert experimental() is asked
    assert any(EXPERIMENTAL in reason for reason in Untried().why_not(problem)) is not asked
