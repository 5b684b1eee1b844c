"""Solvers whose launches are run by the emulator, the very C++ of their kernels on the CPU, or checked on a GPU."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace

import torch
from tests.kernels.emulator import emulate

from tilewise.machine.device import device_name
from tilewise.plan import Config
from tilewise.problems.conv.problem import ConvProblem
from tilewise.problems.conv.reference import convolve_by_transform
from tilewise.problems.operands import make_operands, make_result
from tilewise.solvers.base import Prepare, Run, Solver
from tilewise.solvers.common.cuda_run import Step
from tilewise.solvers.conv import ConvSolver

__all__ = ["EmulatedSteps", "check_on_gpu", "launch"]


class EmulatedSteps(ConvSolver):
    """Before a solver with ``steps`` and ``filters`` among the bases of a class: binds them to the emulator."""

    def __init__(self, backwards: bool = False) -> None:
        self.backwards = backwards

    def steps(self, p: ConvProblem, c: Config, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> list[Step]:
        """The launches, of the solver behind this class."""
        found: list[Step] = super().steps(p, c, a, b, out)  # type: ignore[misc]
        return found

    def filters(self, p: ConvProblem, c: Config, weight: torch.Tensor) -> list[Step]:
        """Those for constant filters, of the solver behind this class."""
        found: list[Step] = super().filters(p, c, weight)  # type: ignore[misc]
        return found

    def bind(self, p: ConvProblem, c: Config, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None) -> Run:
        assert out is not None
        steps = self.steps(p, c, a, b, out)

        def run(
            a: torch.Tensor,
            b: torch.Tensor,
            out: torch.Tensor | None,
            workspace: torch.Tensor | None,
            *bias: torch.Tensor,
        ) -> torch.Tensor:
            assert out is not None
            for step in steps:
                launch(step, (a, b, out, workspace, *bias), self.backwards)
            return out

        return run

    def prepare(self, p: ConvProblem, c: Config, weight: torch.Tensor) -> Prepare:
        steps = self.filters(p, c, weight)

        def prepare(weight: torch.Tensor, kept: torch.Tensor, workspace: torch.Tensor | None) -> None:
            for step in steps:
                launch(step, (weight, None, kept, workspace), self.backwards)

        return prepare


def launch(
    step: Step, tensors: tuple[torch.Tensor | None, ...], backwards: bool, source: str | None = None
) -> None:  # fmt: skip
    """Run a step on tensors of the CPU; ``source`` in place of its program's."""
    addresses = []
    for number, offset in step.pointers:
        tensor = tensors[number]
        assert tensor is not None
        addresses.append(tensor.data_ptr() + offset)
    p = step.program
    emulate(source or p.source(), p.name, step.grid, p.threads, addresses, step.scalars, backwards)


def check_on_gpu(solver: Solver, here: ConvProblem, configs: Iterable[Config]) -> None:
    """Configs of a problem on a GPU, of which ``here`` is the same on a CPU."""
    p = replace(here, device=device_name(torch.device("cuda")))
    assert not solver.why_not(p)
    a, b = (t.cuda() for t in make_operands(here))
    want = convolve_by_transform(p, a, b)
    limit = {"fp32": 1e-6, "bf16": 2.0**-8, "fp16": 2.0**-10}[p.dtype]
    for c in configs:
        out = make_result(here).cuda().fill_(math.nan)
        space = torch.full((solver.workspace(p, c),), 0xFF, dtype=torch.uint8, device="cuda")
        run, filters = solver.bind(p, c, a, b, out), b
        if p.constant_weight:
            filters = torch.full((solver.constant(p, c),), 0xFF, dtype=torch.uint8, device="cuda")
            solver.prepare(p, c, b)(b, filters, space)
        run(a, filters, out, space)
        missing = int(out.isnan().sum())
        assert not missing, f"{p.key} {c}: {missing} of {out.numel()} results are not written"
        error = float((out.double() - want).norm() / want.norm())
        assert error <= limit, f"{p.key} {c}: error {error:.1e}, at most {limit:.1e}"
