"""The pass for bias, residual and activation in Triton's interpreter against float64, over views between NaN."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.interpreter import interpreted
from tests.products import fill

from tilewise.problems.activations import ACTIVATIONS, activated, activation_kind, activation_parameters

PLACES = [pytest.param("cpu", marks=interpreted), pytest.param("cuda", marks=pytest.mark.gpu)]
ALL = (*ACTIVATIONS, "relu6", "hardswish", "hardsigmoid", "leaky_relu:0.2", "clamp:-0.25:inf", "clamp:-0.5:0.75")


def finish(
    out: torch.Tensor, strides: tuple[int, int], bias: torch.Tensor | None, residual: torch.Tensor | None,
    activation: str, along: str = "columns", block: int = 64,
) -> None:  # fmt: skip
    """Finish ``out`` in place, whose matrices and rows are ``strides`` apart. Biases and residuals are tensors 4 and 5.

    Along rows a bias repeats as often as rows do.
    """
    from tilewise.kernels.triton.gemm.finish import finish as kernel
    from tilewise.kernels.triton.launch import Pointer, Program
    from tilewise.solvers.common.views import launch

    result = Pointer(2, 0, out.dtype)
    constants: dict[str, Any] = {
        "BIAS": "" if bias is None else along, "RESIDUAL": residual is not None,
        "ACTIVATION": activation_kind(activation), "BLOCK": block,
    }  # fmt: skip
    constants["FIRST"], constants["SECOND"], *_ = (*activation_parameters(activation), 0.0, 0.0)
    pointers = (
        result,
        result if bias is None else Pointer(4, 0, out.dtype),
        result if residual is None else Pointer(5, 0, out.dtype),
    )
    channels = 1 if bias is None else len(bias)
    scalars = (out.shape[-2], out.shape[-1], out.numel(), *strides, channels)
    one = launch(kernel, (-(-out.numel() // block),), pointers, scalars, **constants)
    size = out.element_size()
    Program([one], [size, size, size, 256, size, size], out.device)((None, None, out, None, bias, residual))


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(
    ("activation", "bias", "adds"),
    [
        *[(activation, "columns", True) for activation in ALL],
        *[("relu", bias, adds) for bias in ("", "rows", "columns") for adds in (False, True)],
    ],
)
def test_all_in_one_pass(place: str, activation: str, bias: str, adds: bool) -> None:
    for shape, strides in (((5, 7), (11, 1)), ((2, 9, 130), (1300, 131, 1)), ((1, 1), (1, 1))):
        base = torch.full((4000,), float("nan"), dtype=torch.float32, device=place)
        like = torch.full((4000,), float("nan"), dtype=torch.float32, device=place)
        out, residual = base.as_strided(shape, strides, 3), like.as_strided(shape, strides)
        fill(out, 1)
        fill(residual, 3)
        length = shape[-1] if bias == "columns" else max(1, shape[-2] // 3)
        added = fill(torch.empty(length, dtype=torch.float32, device=place), 2)
        want = out.double() + (residual.double() if adds else 0)
        if bias:
            long = added if bias == "columns" else added.repeat(shape[-2])[: shape[-2]].unsqueeze(1)
            want = want + long.double()
        want = activated(want, activation)
        untouched = torch.ones_like(base, dtype=torch.bool)
        untouched.as_strided(shape, strides, 3).fill_(False)
        steps = (strides[0] if len(shape) > 2 else 0, strides[-2])
        finish(out, steps, added if bias else None, residual if adds else None, activation, bias)
        torch.testing.assert_close(out.double(), want, rtol=2e-6, atol=2e-6)
        assert bool(base[untouched].isnan().all())


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("activation", ALL)
def test_the_ends_of_the_range_and_nan(place: str, activation: str) -> None:
    """As torch has it in the same type."""
    values = [0.0, -0.0, 1e-20, -1e-6, 88.0, -88.0, 1e4, -1e4, 1e30, float("nan")]
    if activation != "gelu":  # of which torch makes NaN
        values.append(float("inf"))
    out = torch.tensor([values], dtype=torch.float32, device=place)
    want = activated(out.clone(), activation)
    finish(out, (0, 16), None, None, activation, block=16)
    torch.testing.assert_close(out, want, rtol=2e-6, atol=1e-7, equal_nan=True)


@pytest.mark.parametrize("place", PLACES)
def test_sums_of_16_bits_are_rounded_once(place: str) -> None:
    out = torch.full((3, 4), 256.0, dtype=torch.bfloat16, device=place)
    residual, bias = torch.full_like(out, 1.0), torch.full((4,), 1.0, dtype=torch.bfloat16, device=place)
    finish(out, (0, 4), bias, residual, "none")
    assert bool((out == 258).all())  # 256 + 1 alone would be 256


@pytest.mark.parametrize("place", PLACES)
def test_gelu_of_16_bits_is_rounded_right(place: str) -> None:
    """Of every number of fp16 up to 2^14, and not only near 0, where a result is small."""
    bits = torch.arange(0x7400, dtype=torch.int16, device=place)
    half = bits.view(torch.float16)
    values = torch.cat([half, -half, half.new_tensor([torch.inf, torch.nan])]).unsqueeze(0)
    want = torch.nn.functional.gelu(values.double())
    got = values.clone()
    finish(got, (0, got.shape[1]), None, None, "gelu", block=4096)
    ulp = torch.where(want.abs() < 2.0**-14, 2.0**-24, 2.0 ** (want.abs().log2().floor() - 10))
    assert bool((got.double() - want)[0, :-2].abs().le(0.52 * ulp[0, :-2]).all())
    assert got[0, -2:].tolist()[0] == torch.inf
    assert bool(got[0, -1].isnan())
