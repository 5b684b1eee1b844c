"""Fused depthwise transforms, with the very C++ of their kernels on the CPU; GPU tests run what is compiled."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.kernels.emulator import emulate, emulated
from tests.solvers.test_solvers import Memory, check
from tests.strategies import with_memory

from tilewise.axis import Axis
from tilewise.plan import Config
from tilewise.planner.operands import make_operands, make_result
from tilewise.problem import ConvProblem, Pass
from tilewise.solvers._depthwise_fft import Step
from tilewise.solvers.base import Run
from tilewise.solvers.depthwise_fft import DepthwiseFFT

DENSE = (("contiguous", 0),) * 3
SLOW = [HealthCheck.filter_too_much, HealthCheck.too_slow, HealthCheck.data_too_large]


class Emulated(DepthwiseFFT):
    """The solver with its kernels run by the emulator."""

    def __init__(self, backwards: bool = False) -> None:
        self.backwards = backwards

    def bind(self, p: ConvProblem, c: Config, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None) -> Run:
        assert out is not None
        steps = self.steps(p, c, a, b, out)

        def run(
            a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None, workspace: torch.Tensor | None
        ) -> torch.Tensor:
            assert out is not None
            for step in steps:
                launch(step, (a, b, out, workspace), self.backwards)
            return out

        return run


def launch(step: Step, tensors: tuple[torch.Tensor | None, ...], backwards: bool) -> None:
    addresses = []
    for source, offset in step.pointers:
        tensor = tensors[source]
        assert tensor is not None
        addresses.append(tensor.data_ptr() + offset)
    p = step.program
    emulate(p.source(), p.name, step.grid, p.threads, addresses, step.scalars, backwards)


SOLVER = Emulated()


@st.composite
def depthwise(draw: st.DrawFn, pass_: Pass, dims: int = 2, longest: int = 20, dtype: str = "fp32") -> ConvProblem:
    """Layers of any kernel up to the padded image, with signed padding that differs by side."""
    axes = []
    for _ in range(dims):
        size = draw(st.integers(1, longest))
        before, after = draw(st.integers(-min(2, size - 1), size)), draw(st.integers(0, size))
        axes.append(Axis(size, draw(st.integers(1, min(size + before + after, longest))), 1, 1, before, after))
    channels = draw(st.sampled_from((1, 2, 3, 5)))
    return ConvProblem(pass_, draw(st.integers(1, 4)), channels, channels, tuple(axes), channels, dtype=dtype)


@emulated
@pytest.mark.parametrize("pass_", list(Pass))
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
@settings(max_examples=8, suppress_health_check=SLOW)
@given(data=st.data())
def test_planes_of_any_size_and_memory(pass_: Pass, dtype: str, data: st.DataObject) -> None:
    found: tuple[ConvProblem, Memory] = data.draw(
        with_memory(depthwise(pass_, dtype=dtype), lambda p: not SOLVER.unsupported(p)), "problem"
    )
    p, forms = found
    if dtype != "fp32" and data.draw(st.booleans(), "fp32 result"):
        p = replace(p, out_dtype="fp32")
    c = data.draw(st.sampled_from(list(SOLVER.configs(p))), "config")
    check(Emulated(data.draw(st.booleans(), "backwards")), p, c, forms, False)


@emulated
@pytest.mark.parametrize("pass_", list(Pass))
@pytest.mark.parametrize(
    ("size", "kernel", "padding", "split", "planes"),
    [
        (56, 31, 15, 2, 1), (56, 31, 15, 1, 2), (30, 17, 8, 2, 2), (30, 17, 8, 1, 3), (84, 51, 25, 2, 1),
        (14, 13, 6, 1, 5), (7, 3, 1, 1, 8),
    ],
)  # fmt: skip
def test_layers(pass_: Pass, size: int, kernel: int, padding: int, split: int, planes: int) -> None:
    """Large bases, with one and with two threads a transform, all blocks and threads in either order."""
    axis = Axis(size, kernel, 1, 1, padding, padding)
    p = ConvProblem(pass_, 3, 2, 2, (axis, axis), 2)
    c = next(iter(SOLVER.configs(p)))
    c = Config(**{**c, "split": split, "planes": planes})
    if pass_ is Pass.WGRAD:
        if split == 1 and size == 56:
            c = Config(**{**c, "planes": 1})
        c = Config(**{**c, "shares": 2})
    a, b = make_operands(p)
    out = make_result(p).fill_(math.nan)
    space = torch.full((SOLVER.workspace(p, c),), 0xFF, dtype=torch.uint8)
    for backwards in (False, True):
        Emulated(backwards).bind(p, c, a, b, out)(a, b, out, space)
        want = p.reference(a, b)
        assert (out.double() - want).norm() <= 4e-7 * want.norm()
