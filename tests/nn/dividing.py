"""A planner whose choice does not depend on the machine: every problem that can be divided along its batch is."""

from __future__ import annotations

import torch

from tilewise import solvers
from tilewise.plan import Config, Plan
from tilewise.planner import Options, Planner
from tilewise.problems.conv.problem import ConvProblem, Pass


class Dividing(Planner):
    """Plans ``1 + rest`` micro-batches by torch for the ``passes`` given; the others stay torch's. Counts its work."""

    def __init__(self, passes: tuple[Pass, ...] = tuple(Pass)) -> None:
        super().__init__()
        self.passes = passes
        self.planned: list[ConvProblem] = []
        self.asked: list[Options] = []

    def plan(self, problem: ConvProblem, options: Options | None = None) -> Plan:
        self.planned.append(problem)
        self.asked.append(options or Options())
        divider, whole = solvers.get("micro_batch"), Plan(problem.key, "aten", solvers.get("aten").version)
        if not isinstance(problem, ConvProblem):  # a linear layer's product
            return Plan(problem.key, solvers.baseline(problem).name, solvers.baseline(problem).version)
        if problem.pass_ not in self.passes or problem.batch < 2 or divider.why_not(problem):
            return whole
        assert isinstance(divider, solvers.Split)
        config = Config(sizes=(1, problem.batch - 1))
        parts = [part.problem for part in divider.children(problem, config)]
        children = tuple(Plan(part.key, "aten", whole.version) for part in parts if part is not None)
        return Plan(problem.key, divider.name, divider.version, config, children, (1, 1), time_ms=1.0)


def assert_same(got: torch.Tensor, want: torch.Tensor) -> None:
    """Equal but for the order of sums, in shape and type too."""
    tolerance = 2e-2 if got.dtype is torch.bfloat16 else 1e-4
    scale = max(1.0, float(want.detach().abs().max())) if want.numel() else 1.0
    torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance * scale)
