"""A device's measured profile."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tilewise.planner.search.estimate import estimate_ms, is_profile, measure_profile
from tilewise.problems.gemm.problem import GemmProblem
from tilewise.solvers import Cost


def test_a_profile_is_measured_in_its_own_types(monkeypatch: pytest.MonkeyPatch) -> None:
    """Autocast of the caller would make twice the rate of it, which wisdom keeps."""
    plain, seen = torch.convolution, set()

    def watched(*operands: Any, **options: Any) -> torch.Tensor:
        result = plain(*operands, **options)
        seen.add((result.dtype, result.device.type, result.requires_grad))
        return result

    monkeypatch.setattr(torch, "convolution", watched)
    with torch.autocast("cpu"), torch.device("meta"):
        assert is_profile(measure_profile("cpu"))
    assert seen == {(torch.float32, "cpu", False)}


def test_steps_within_a_kernel_take_as_long_whatever_the_rates_of_a_device() -> None:
    problem = GemmProblem(64, 64, 64, device="cpu")
    for rate in (1.0, 1e9):
        profile = {"copy": rate, "fp32": rate, "tf32": rate, "bf16": rate, "fp16": rate, "launch": rate, "kernel": rate}
        without = estimate_ms(problem, Cost(0, 0, 0), profile)
        assert estimate_ms(problem, Cost(0, 0, 0, serial_us=1500.0), profile) == without + 1.5
