"""Planned modules whose calls and kernels come from C++, on real GPUs."""

from __future__ import annotations

import copy
import inspect

import pytest
import torch
from torch import nn

import tilewise
from tilewise.kernels.native import autograd
from tilewise.machine.torch_state import fp32_precision
from tilewise.nn.layers.repeated import Repeated

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


def repeated_of(module: nn.Module) -> Repeated:
    found = inspect.getclosurevars(module.forward.__func__).nonlocals["repeated"]  # type: ignore[union-attr]
    assert isinstance(found, Repeated)
    return found


def check(device: torch.device, dtype: torch.dtype, *, bias: bool, channels_last: bool) -> None:
    """Three steps of a planned convolution, beside float64."""
    order = torch.channels_last if channels_last else torch.contiguous_format
    torch.manual_seed(0)
    want = nn.Conv2d(64, 96, 3, padding=1, bias=bias, device=device).to(memory_format=order)
    got = copy.deepcopy(want)
    images = torch.randn(8, 64, 28, 28, device=device).to(memory_format=order)
    with torch.autocast("cuda", dtype, enabled=dtype is not torch.float32), fp32_precision("cuda", "conv", "ieee"):
        tilewise.optimize(got, images.clone().requires_grad_(), rigor="estimate", exclude=["aten"])
        assert autograd.why_not() == ""
        for step in range(3):
            x, exact = images.clone().requires_grad_(), images.double().requires_grad_()
            y = got(x)
            assert type(y.grad_fn).__name__ == "PlannedConvBackward"
            assert step == 0 or repeated_of(got).call is not None
            dy = torch.randn_like(y)
            grads = torch.autograd.grad(y, (x, *got.parameters()), dy)
            reference = copy.deepcopy(want).double()
            with torch.autocast("cuda", enabled=False):
                its = reference(exact)
            wanted = torch.autograd.grad(its, (exact, *reference.parameters()), dy.double())
            for mine, exactly in zip((y, *grads), (its, *wanted), strict=True):
                error = (mine.double() - exactly).norm() / exactly.norm()
                assert error < (1e-2 if dtype is not torch.float32 else 1e-4)
                assert mine.device == device
    torch.cuda.synchronize(device)


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_steps_from_cpp_are_right(dtype: torch.dtype, bias: bool, channels_last: bool) -> None:
    check(torch.device("cuda", 0), dtype, bias=bias, channels_last=channels_last)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one GPU")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_module_runs_on_its_own_gpu_whichever_is_current(dtype: torch.dtype) -> None:
    for current in (0, 1):
        with torch.cuda.device(current):
            for index in (1, 0):
                check(torch.device("cuda", index), dtype, bias=True, channels_last=False)
            assert torch.cuda.current_device() == current


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one GPU")
def test_a_module_that_moves_to_another_gpu_is_noticed() -> None:
    torch.manual_seed(0)
    got = nn.Conv2d(64, 96, 3, padding=1, device="cuda:0")
    want, x = copy.deepcopy(got), torch.randn(8, 64, 28, 28, device="cuda:0")
    tilewise.optimize(got, x.clone().requires_grad_(), rigor="estimate", exclude=["aten"])
    for index in (0, 1, 0, 1):
        device = torch.device("cuda", index)
        got, want, given = got.to(device), want.to(device), x.to(device).requires_grad_()
        for _ in range(2):
            y = got(given)
            torch.testing.assert_close(y, want(given), rtol=1e-3, atol=1e-3)
            y.sum().backward()
            assert y.device == device
