"""The pass for bias and activation in Triton's interpreter against torch in float64, over views between NaN."""

from __future__ import annotations

import pytest
import torch
from tests.interpreter import interpreted
from tests.products import fill

from tilewise.problems.activations import ACTIVATIONS, activated

PLACES = [pytest.param("cpu", marks=interpreted), pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("bias", [False, True])
def test_bias_and_activation_in_one_pass(place: str, activation: str, bias: bool) -> None:
    from tilewise.kernels.triton.gemm.finish import finish
    from tilewise.kernels.triton.launch import Pointer, Program
    from tilewise.solvers.common.views import launch

    for shape, strides in (((5, 7), (11, 1)), ((2, 9, 130), (1300, 131, 1)), ((1, 1), (1, 1))):
        base = torch.full((4000,), float("nan"), dtype=torch.float32, device=place)
        out = base.as_strided(shape, strides, 3)
        fill(out, 1)
        added = fill(torch.empty(shape[-1], dtype=torch.float32, device=place), 2)
        want = activated(out.double() + (added.double() if bias else 0), activation)
        untouched = torch.ones_like(base, dtype=torch.bool)
        untouched.as_strided(shape, strides, 3).fill_(False)
        batch = strides[0] if len(shape) > 2 else 0
        one = launch(
            finish, (-(-out.numel() // 64),), (Pointer(2, 0, out.dtype), Pointer(4, 0, out.dtype)),
            (shape[-2], shape[-1], out.numel(), batch, strides[-2]), BIAS=bias, ACTIVATION=activation, BLOCK=64,
        )  # fmt: skip
        Program([one], [4, 4, 4, 256, 4], torch.device(place))((None, None, out, None, added))
        torch.testing.assert_close(out.double(), want, rtol=2e-6, atol=2e-6)
        assert bool(base[untouched].isnan().all())


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_the_ends_of_the_range_and_nan(place: str, activation: str) -> None:
    """As torch has it in the same type."""
    from tilewise.kernels.triton.gemm.finish import finish
    from tilewise.kernels.triton.launch import Pointer, Program
    from tilewise.solvers.common.views import launch

    values = [0.0, -0.0, 1e-20, -1e-6, 88.0, -88.0, 1e4, -1e4, 1e30, float("nan")]
    if activation != "gelu":  # of which torch makes NaN
        values.append(float("inf"))
    out = torch.tensor([values], dtype=torch.float32, device=place)
    want = activated(out.clone(), activation)
    one = launch(
        finish, (1,), (Pointer(2, 0, out.dtype), Pointer(2, 0, out.dtype)), (1, len(values), len(values), 0, 16),
        BIAS=False, ACTIVATION=activation, BLOCK=16,
    )  # fmt: skip
    Program([one], [4, 4, 4, 256, 4], torch.device(place))((None, None, out, None))
    torch.testing.assert_close(out, want, rtol=2e-6, atol=1e-7, equal_nan=True)
