"""Layers whose filters are prepared once by the FFT solver, and what runs and checks them."""

from __future__ import annotations

from dataclasses import replace

import torch
from tests.reference import convolve

from tilewise import execute
from tilewise.plan import Plan
from tilewise.problems.conv.axis import Axis
from tilewise.problems.conv.problem import ConvProblem, Pass
from tilewise.solvers import get

FFT = get("fft")
KEPT = {"constant_weight": True, "checked_weight": True}
LAYERS = {
    "dense": ConvProblem(Pass.FPROP, 3, 4, 6, (Axis(9, 3, 1, 1, 1, 1), Axis(8, 3)), **KEPT),
    "depthwise": ConvProblem(Pass.FPROP, 3, 4, 4, (Axis(9, 5, 1, 1, 2, 2),), groups=4, **KEPT),
    "transposed": ConvProblem(Pass.DGRAD, 3, 4, 6, (Axis(9, 3, 2), Axis(8, 3)), groups=2, **KEPT),
}


def frozen(p: ConvProblem) -> ConvProblem:
    """The same where the caller promises that the weight stays."""
    return replace(p, checked_weight=False)


def bound(p: ConvProblem) -> tuple[execute.Bound, torch.Tensor, torch.Tensor]:
    a, w = (torch.randn(p.shape(role)) for role in p.operands)
    config = next(iter(FFT.configs(p)))
    assert FFT.constant(p, config) > 0
    return execute.bind(Plan(p.key, FFT.name, FFT.version, config), p, a, w), a, w


def check(run: execute.Bound, p: ConvProblem, a: torch.Tensor, w: torch.Tensor) -> None:
    torch.testing.assert_close(run(a, w).double(), convolve(p, a, w), rtol=1e-4, atol=1e-4)
