"""Solvers that say that they may write a result over the residual that they add: the bits are those of a new result."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tilewise import solvers
from tilewise.problems.conv.axis import Axis
from tilewise.problems.conv.problem import ConvProblem, Pass
from tilewise.problems.operands import make_bias, make_operands, make_residual, make_result
from tilewise.solvers import Solver

pytest.importorskip("numba")

LAYERS = (
    (1, 40, 72, (Axis(14, 3, 1, 1, 1, 1), Axis(13, 3, 1, 1, 1, 1))),
    (2, 600, 130, (Axis(9, 1), Axis(11, 1))),
    (3, 36, 65, (Axis(30, 3, 1, 1, 1, 1), Axis(33, 3, 1, 1, 1, 1))),
    (1, 24, 40, (Axis(15, 3, 2, 1, 1, 1), Axis(16, 1, 2))),
)
"""Images, input and output channels, axes: tiles, panels and blocks that are not full, deep sums, strides."""
OVER = [solver for solver in solvers.all_solvers() if solver.writes_over_residual]


def problems() -> Iterator[ConvProblem]:
    """Each layer in both layouts."""
    for batch, into, outof, axes in LAYERS:
        for layout in ("contiguous", "channels_last"):
            yield ConvProblem(
                Pass.FPROP, batch, into, outof, axes, bias=True, residual=True, activation="relu",
                constant_weight=True, layouts=(layout,) * 3,
            )  # fmt: skip


def test_some_solvers_do() -> None:
    assert {"indirect", "winograd", "winograd_last"} <= {solver.name for solver in OVER}


@pytest.mark.parametrize("solver", OVER, ids=lambda solver: solver.name)
def test_the_bits_are_those_of_a_new_result(solver: Solver) -> None:
    ran = 0
    for p in problems():
        if solver.unsupported(p):
            continue
        a, b = make_operands(p)
        bias, residual = make_bias(p, 5), make_residual(p, 5)
        for c in solver.configs(p):
            space = torch.empty(solver.workspace(p, c), dtype=torch.uint8, device="cpu")
            kept = torch.empty(solver.constant(p, c), dtype=torch.uint8, device="cpu")
            prepare = solver.prepare(p, c, b)
            if kept.numel():
                prepare(b, kept, space)
            new = make_result(p)
            assert residual is not None
            solver.bind(p, c, a, b, new)(a, kept if kept.numel() else b, new, space, bias, residual)
            assert new.isfinite().all()
            for _ in range(3):
                over = torch.empty_strided(residual.shape, residual.stride(), dtype=residual.dtype, device="cpu")
                over.copy_(residual)
                solver.bind(p, c, a, b, over)(a, kept if kept.numel() else b, over, space, bias, over)
                assert torch.equal(over, new), (p.key, c)
            ran += 1
    assert ran
